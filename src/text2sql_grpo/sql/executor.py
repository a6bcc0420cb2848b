"""Runs untrusted SQL in worker processes that can be killed, and returns typed outcomes."""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.address import Kind, parse_address
from text2sql_grpo.sql.cache import ResultCache, is_repeatable, normalised
from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits
from text2sql_grpo.sql.pool import WorkerPool
from text2sql_grpo.sql.sqlite_file import Fingerprint, fingerprint_of
from text2sql_grpo.sql.worker_process import Answer

DEFAULT_WORKERS = max(2, min(2 * (os.cpu_count() or 1), 16))
DEFAULT_CACHE_ENTRIES = 4_096
DEFAULT_CACHE_BYTES = 64_000_000

_LOGS: dict[Kind, tuple[str, ...]] = {"sqlite": ("-wal", "-journal"), "duckdb": (".wal",)}
_Asked = tuple[int, str, str]  # position, location, SQL
_made: Any = partial(tuple.__new__, ExecutionOutcome)  # a third of the time of the constructor
T = TypeVar("T")
_logger = logging.getLogger(__name__)
_executors: weakref.WeakSet["SQLExecutor"] = weakref.WeakSet()


class SQLExecutor:
    """Runs untrusted SQL on databases that it never writes, from any thread.

    Worker processes start when they are first needed, at most `workers` for each kind of database, and end
    with this process, however it ends. After a fork the child starts its own. Unpickled, an executor has
    the same settings, no workers and an empty cache.

    Attributes:
        limits: Bounds of each execution, unless a call gives its own.
        queries: Queries answered so far, those from the cache included.
        seconds_in_sql: Seconds that databases spent on them, added up over parallel workers.
    """

    def __init__(
        self,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        *,
        workers: int = DEFAULT_WORKERS,
        cache_entries: int = DEFAULT_CACHE_ENTRIES,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        cache_ttl_s: float | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            limits: Bounds of each execution.
            workers: Queries that run at the same time, >= 1. More than there are processors pays where
                queries run into their time limit.
            cache_entries: Results remembered; 0 turns remembering off, and the joining of equal queries of
                one batch with it.
            cache_bytes: Of the remembered results together.
            cache_ttl_s: Longest age of a remembered result; None for no limit. A result is never used after
                its file changed.
        """
        if workers < 1:
            raise ValueError(f"workers must be an int >= 1, got {workers}")
        self.limits = limits
        self.queries = 0
        self.seconds_in_sql = 0.0
        self._workers = workers
        self._cache_settings = (cache_entries, cache_bytes, cache_ttl_s)
        self._start()

    def _start(self) -> None:
        entries, n_bytes, ttl_s = self._cache_settings
        self._cache = ResultCache(max_entries=entries, max_bytes=n_bytes, ttl_s=ttl_s) if entries else None
        self._lock = threading.Lock()
        self._pools: dict[Kind, WorkerPool] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._finalizer = weakref.finalize(self, _end, self._pools)
        _executors.add(self)

    @property
    def cache_hits(self) -> int:
        return self._cache.hits if self._cache else 0

    @property
    def cache_misses(self) -> int:
        """Look-ups that found nothing; a query that may not be remembered is not looked up."""
        return self._cache.misses if self._cache else 0

    def execute(self, database: Path | str, sql: str, *, limits: Limits | None = None) -> ExecutionOutcome:
        """What the query returned, or why it did not.

        Args:
            database: A path or a URL; see `parse_address`. A file may be replaced between two calls.
            sql: One statement, as the model wrote it.
            limits: Bounds of this execution; None for the executor's own.

        Raises:
            DataError: The database is missing, unreadable, corrupt or none: not the model's fault.
            RunError: Workers cannot be started.
        """
        limits = limits or self.limits
        kind, location = parse_address(database)
        if type(sql) is not str:
            sql = _text(sql)
        key = None
        if self._cache is not None and _may_be_remembered(sql, limits):
            key = _key(location, normalised(sql), _fingerprint(kind, location), limits)
            known = self._cache.get(key) if key is not None else None
            if known is not None:
                self._count(1, 0.0)
                return known
        answer = (self._pools.get(kind) or self._pool(kind)).run_one(location, sql, limits)
        outcome = _outcome(answer) if answer[-1] else _made(answer)
        if key is not None and self._cache is not None and not answer[-1]:
            self._cache.put(key, outcome)
        self._count(1, outcome.elapsed_s)
        return outcome

    def execute_many(
        self, database_and_sql: Sequence[tuple[Path | str, str]], *, limits: Limits | None = None
    ) -> list[ExecutionOutcome]:
        """One outcome per pair of database and query, in order, run on all workers; see `execute`.

        Equal queries run once if a second run would return the same.
        """
        limits = limits or self.limits
        outcomes: list[Any] = [None] * len(database_and_sql)
        by_kind: dict[Kind, list[_Asked]] = {}
        for position, (database, sql) in enumerate(database_and_sql):
            kind, location = parse_address(database)
            by_kind.setdefault(kind, []).append((position, location, _text(sql)))
        for kind, asked in by_kind.items():
            if self._cache is None or kind not in _LOGS:
                self._run(kind, asked, limits, outcomes)
            else:
                self._run_distinct(kind, asked, limits, outcomes, self._cache)
        self._count(len(outcomes), sum([outcome.elapsed_s for outcome in outcomes if not outcome.from_cache]))
        return outcomes

    async def aexecute(
        self, database: Path | str, sql: str, *, limits: Limits | None = None
    ) -> ExecutionOutcome:
        """`execute` for a coroutine; a cancelled one leaves its query to its time limit."""
        return await self._in_thread(partial(self.execute, database, sql, limits=limits))

    async def aexecute_many(
        self, database_and_sql: Sequence[tuple[Path | str, str]], *, limits: Limits | None = None
    ) -> list[ExecutionOutcome]:
        """`execute_many` for a coroutine."""
        return await self._in_thread(partial(self.execute_many, database_and_sql, limits=limits))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._workers, thread_name_prefix="sql")
        import asyncio  # slow to import; a caller that awaits has done so

        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        """Ends the workers; a later `execute` starts new ones."""
        with self._lock:
            threads, self._threads = self._threads, None
        _end(self._pools)
        if threads is not None:
            threads.shutdown(wait=False)
        if self._cache is not None and self._cache.hits + self._cache.misses:
            hits, n_asked = self._cache.hits, self._cache.hits + self._cache.misses
            _logger.info("SQL results from the cache: %d of %d (%.0f%%)", hits, n_asked, 100 * hits / n_asked)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"limits": self.limits, "_workers": self._workers, "_cache_settings": self._cache_settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, queries=0, seconds_in_sql=0.0)
        self._start()

    def _pool(self, kind: Kind) -> WorkerPool:
        pool = self._pools.get(kind)
        if pool is None:
            with self._lock:
                pool = self._pools.setdefault(kind, WorkerPool(kind, self._workers))
        return pool

    def _run(self, kind: Kind, asked: list[_Asked], limits: Limits, outcomes: list[Any]) -> list[Answer]:
        """Runs queries, puts their outcomes in place, and returns the answers."""
        answers, is_plain = self._pool(kind).run([(location, sql) for _, location, sql in asked], limits)
        made = map(_made, answers) if is_plain else map(_outcome, answers)
        for (position, _, _), outcome in zip(asked, made, strict=True):
            outcomes[position] = outcome
        return answers

    def _run_distinct(
        self, kind: Kind, asked: list[_Asked], limits: Limits, outcomes: list[Any], cache: ResultCache
    ) -> None:
        """Runs what is not remembered, and equal queries once."""
        fingerprints: dict[str, Fingerprint | None] = {}
        keys: dict[int, Hashable] = {}
        firsts: dict[tuple[str, str], int] = {}
        twins: list[tuple[_Asked, int]] = []
        wanted: list[_Asked] = []
        for query in asked:
            position, location, sql = query
            if not _may_be_remembered(sql, limits):
                wanted.append(query)
                continue
            text = normalised(sql)
            first = firsts.setdefault((location, text), position)
            if first != position:
                twins.append((query, first))
                continue
            if location not in fingerprints:
                fingerprints[location] = _fingerprint(kind, location)
            key = keys[position] = _key(location, text, fingerprints[location], limits)
            outcomes[position] = cache.get(key) if key is not None else None
            if outcomes[position] is None:
                wanted.append(query)
        answers = self._run(kind, wanted, limits, outcomes) if wanted else []
        unsure = set()
        for (position, _, _), answer in zip(wanted, answers, strict=True):
            if answer[-1]:
                unsure.add(position)
            elif keys.get(position) is not None:
                cache.put(keys[position], outcomes[position])
        # A view that calls random(). A time-out is shared all the same.
        again = [query for query, first in twins if first in unsure and outcomes[first].is_ok]
        if again:
            self._run(kind, again, limits, outcomes)
        for (position, _, _), first in twins:
            if outcomes[position] is None:
                outcomes[position] = outcomes[first]._replace(from_cache=True)

    def _count(self, n_queries: int, elapsed_s: float) -> None:
        with self._lock:
            self.queries += n_queries
            self.seconds_in_sql += elapsed_s

    def _forget_workers(self) -> None:
        """In a forked child: the workers are the parent's, and a thread that held a lock is not here."""
        self._lock = threading.Lock()
        self._threads = None
        for pool in self._pools.values():
            pool.forget()
        if self._cache is not None:
            self._cache.forget_holder()


def _text(sql: str) -> str:
    if type(sql) is str:
        return sql
    if isinstance(sql, str):
        return "".join(sql)  # a subclass, which cannot be sent
    raise TypeError(f"expected the query as text, got {type(sql).__name__}")


def _may_be_remembered(sql: str, limits: Limits) -> bool:
    # A text may be too long for its blanks alone.
    return len(sql) <= limits.max_sql_bytes and is_repeatable(sql)


def _fingerprint(kind: Kind, location: str) -> Fingerprint | None:
    """None if there is none; whoever opens the database then says what is wrong with it."""
    if kind not in _LOGS:
        return None
    try:
        return fingerprint_of(location, _LOGS[kind])
    except DataError:
        return None


def _key(location: str, text: str, fingerprint: Fingerprint | None, limits: Limits) -> Hashable:
    """None if the result cannot be remembered: the content may change without a trace."""
    return (location, text, fingerprint, limits) if fingerprint is not None and fingerprint[-1] else None


def _outcome(answer: Answer) -> ExecutionOutcome:
    return ExecutionOutcome(*answer[:-1])


def _end(pools: dict[Kind, WorkerPool]) -> None:
    for pool in list(pools.values()):
        pool.close()


def _forget_workers() -> None:
    for executor in _executors:
        executor._forget_workers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)
