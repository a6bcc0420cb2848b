"""Execution of untrusted SQL in worker processes that can be killed."""

import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from text2sql_grpo.errors import DataError, ServerGoneError, check_type
from text2sql_grpo.phrases import listed
from text2sql_grpo.sql.address import Kind, parse_address
from text2sql_grpo.sql.cache import Key, ResultCache, normalised
from text2sql_grpo.sql.engines import ENGINES
from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits
from text2sql_grpo.sql.pool import Cancellation, Query, WorkerPool
from text2sql_grpo.sql.sandbox import PARTS
from text2sql_grpo.sql.sqlite_file import Fingerprint, fingerprint_of
from text2sql_grpo.sql.worker_process import Answer

DEFAULT_WORKERS = max(2, min(2 * (os.cpu_count() or 1), 16))
SERVER_WAIT_S = 120.0  # for a server that answered before, such as one that is restarted

MAX_RIGHTS_SHOWN = 5
_warned: set[str] = set()  # roles of servers whose harmless rights were logged
_logger = logging.getLogger(__name__)
_executors: weakref.WeakSet["SQLExecutor"] = weakref.WeakSet()


class SQLExecutor:
    """Thread-safe executor of untrusted SQL on read-only databases.

    Worker processes start on demand, at most `workers` for each kind of database, and end with this process,
    however it ends. After a fork the child starts its own. Unpickled, an executor has the same settings, no
    workers and an empty cache.

    Attributes:
        limits: Bounds of each execution, unless a call sets its own.
        queries: Number of queries so far, those from the cache included.
        seconds_in_sql: Seconds inside databases, added up over parallel workers.
    """

    def __init__(
        self,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        *,
        workers: int = DEFAULT_WORKERS,
        cache_entries: int = 4_096,
        cache_bytes: int = 64_000_000,
        require_sandbox: bool = False,
    ) -> None:
        """Create an executor without workers.

        Args:
            limits: Bounds of each execution.
            workers: Maximum number of concurrent queries, >= 1. More than there are processors pays if
                queries time out.
            cache_entries: Maximum number of cached results; 0 turns off the cache and the deduplication
                of a batch.
            cache_bytes: Maximum memory of the cached results together. A result is never used after its file
                changed.
            require_sandbox: whether to run nothing unless the kernel enforces all of `sandbox.PARTS`.

        Raises:
            RunError: The required sandbox is not there.
        """
        check_type("limits", limits, Limits)
        if workers < 1:
            raise ValueError(f"workers must be an int >= 1, got {workers}")
        self.limits = limits
        self.queries = 0
        self.seconds_in_sql = 0.0
        self._workers = workers
        self._cache_settings = (cache_entries, cache_bytes)
        self._require_sandbox = require_sandbox
        self._folders: set[str] = set()
        self._start()
        if require_sandbox:
            self._pool("sqlite").sandbox()

    def _start(self) -> None:
        entries, n_bytes = self._cache_settings
        self._cache = ResultCache(max_entries=entries, max_bytes=n_bytes)
        self._lock = threading.Lock()
        self._pools: dict[Kind, WorkerPool] = {}
        self._servers: set[str] = set()  # locations of servers that have answered
        weakref.finalize(self, _end, self._pools)
        _executors.add(self)

    @property
    def cache_hits(self) -> int:
        return self._cache.hits

    def execute(
        self,
        database: Path | str,
        sql: str,
        *,
        limits: Limits | None = None,
        cancellation: Cancellation | None = None,
    ) -> ExecutionOutcome:
        """Run one query.

        Args:
            database: A path or a URL; see `parse_address`. A file may be replaced between two calls.
            sql: One statement, as the model wrote it.
            limits: Bounds of this execution; None for `self.limits`.
            cancellation: Stops the query from another thread; None if nothing does.

        Raises:
            DataError: The database is missing, unreadable or corrupt: not the model's fault.
            RunError: Workers cannot be started.
        """
        return self._execute([(database, sql)], limits or self.limits, cancellation)[0]

    def execute_many(
        self, database_and_sql: Sequence[tuple[Path | str, str]], *, limits: Limits | None = None
    ) -> list[ExecutionOutcome]:
        """Run pairs of database and query; outcomes in order. See `execute`.

        Equal deterministic queries run once. More workers start if it takes longer than starting them.
        """
        return self._execute(database_and_sql, limits or self.limits)

    def _execute(
        self,
        database_and_sql: Sequence[tuple[Path | str, str]],
        limits: Limits,
        cancellation: Cancellation | None = None,
    ) -> list[ExecutionOutcome]:
        outcomes: list[Any] = [None] * len(database_and_sql)
        queries: list[tuple[Kind, Query]] = []
        wanted: list[int] = []  # positions of queries to be run
        twins: list[tuple[int, int]] = []  # position of a query, and of an equal one before it
        firsts: dict[Query, int] = {}
        fingerprints: dict[str, Fingerprint | None] = {}
        keys: dict[int, Key] = {}
        for position, (database, sql) in enumerate(database_and_sql):
            kind, location = parse_address(database)
            if not isinstance(sql, str):
                raise TypeError(f"sql must be text, got {type(sql).__name__}")
            sql = str.__str__(sql)  # plain text of a subclass, which cannot be marshalled
            queries.append((kind, (location, sql)))
            # A longer text is refused, perhaps for its blanks alone.
            is_long = len(sql.encode(errors="replace")) > limits.max_sql_bytes
            if self._cache.max_entries and not is_long and not ENGINES[kind].is_server:
                text, place = normalised(sql), f"{kind}:{location}"
                first = firsts.setdefault((place, text), position)
                if first != position:
                    twins.append((position, first))
                    continue
                if place not in fingerprints:
                    fingerprints[place] = fingerprint(database)
                found = fingerprints[place]
                if found is not None and found[-1]:  # else the content may change without a trace
                    keys[position] = (place, text, found, limits)
                    outcomes[position] = self._cache.get(keys[position])
            if outcomes[position] is None:
                wanted.append(position)
        changing: set[int] = set()  # queries that call random(), read the clock or crash
        elapsed_s = 0.0
        while wanted:
            for kind in dict.fromkeys(queries[position][0] for position in wanted):
                positions = [position for position in wanted if queries[position][0] == kind]
                asked = [queries[position][1] for position in positions]
                answers = self._run(kind, asked, limits, cancellation)
                for position, (*fields, may_change) in zip(positions, answers, strict=True):
                    outcome = outcomes[position] = ExecutionOutcome(*fields)
                    elapsed_s += outcome.elapsed_s
                    if outcome.status in ("timeout", "memory"):  # shared by equal queries, and never kept
                        continue
                    if may_change:
                        changing.add(position)
                    elif position in keys:
                        self._cache.put(keys[position], outcome)
            again = [position for position, first in twins if first in changing]
            wanted = [position for position in again if outcomes[position] is None]
        for position, first in twins:
            if outcomes[position] is None:
                outcomes[position] = outcomes[first]._replace(from_cache=True)
        with self._lock:
            self.queries += len(outcomes)
            self.seconds_in_sql += elapsed_s
        return outcomes

    def _run(
        self, kind: Kind, queries: list[Query], limits: Limits, cancellation: Cancellation | None
    ) -> list[Answer]:
        """Run queries; on a server again while one that answered before is gone, for `SERVER_WAIT_S`."""
        pool = self._pool(kind)
        if not ENGINES[kind].is_server:
            return pool.run(queries, limits, cancellation)
        locations = {location for location, _ in queries}
        give_up = time.monotonic() + SERVER_WAIT_S
        pause_s = 0.1
        while True:
            try:
                answers = pool.run(queries, limits, cancellation)
                for location in locations - self._servers:
                    self._servers.add(location)
                    self._warn_of_rights(location)
                return answers
            except ServerGoneError as error:
                is_cancelled = cancellation is not None and cancellation.is_set
                if not locations <= self._servers or time.monotonic() > give_up or is_cancelled:
                    raise
                if pause_s < 0.2:
                    _logger.warning("Waiting up to %.0f s for the server: %s", SERVER_WAIT_S, error)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)

    def version(self, database: Path | str) -> object:
        """Version of a database's content; equal versions mean equal content.

        It is the fingerprint of a file, and a server's snapshot, which any writing transaction of that server
        changes, on other databases too. None if it is unknown.
        """
        if parse_address(database).engine.is_server:
            return self.execute(database, "SELECT pg_current_snapshot()::text").rows or None
        known = fingerprint(database)
        return known and known[:-1]  # without what depends on the time of day

    def grant_folder(self, folder: Path) -> None:
        """Let SQL workers read all of a folder, for databases that are made there one after the other.

        Otherwise a worker reads single files, and each new file takes a new worker.
        """
        self._folders.add(os.path.abspath(folder))

    def describe(self) -> dict[str, dict[str, bool]]:
        """Parts of the sandbox, and whether each holds a SQLite worker, which is started if there is none."""
        active = self._pool("sqlite").sandbox()
        return {"sandbox": {part: part in active for part in PARTS}}

    def workers(self) -> dict[int, bool]:
        """Process ids of the workers of every kind, and whether each runs a query now."""
        found: dict[int, bool] = {}
        for pool in self._pools.copy().values():
            found |= pool.workers()
        return found

    async def aexecute(
        self, database: Path | str, sql: str, *, limits: Limits | None = None
    ) -> ExecutionOutcome:
        """Async `execute`; the query of a cancelled call is stopped."""
        cancellation = Cancellation()
        import asyncio  # slow to import; a caller that awaits has done so

        try:
            return await asyncio.to_thread(
                self.execute, database, sql, limits=limits, cancellation=cancellation
            )
        finally:
            cancellation.set()

    def close(self) -> None:
        """End the workers; a later `execute` starts new ones."""
        _end(self._pools)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        names = ("limits", "_workers", "_cache_settings", "_require_sandbox", "_folders")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, queries=0, seconds_in_sql=0.0)
        self._start()

    def _pool(self, kind: Kind) -> WorkerPool:
        pool = self._pools.get(kind)
        if pool is None:
            with self._lock:
                new = WorkerPool(
                    kind, self._workers, require_sandbox=self._require_sandbox, folders=self._folders
                )
                pool = self._pools.setdefault(kind, new)
        return pool

    def _warn_of_rights(self, location: str) -> None:
        """Log the rights of a role beyond reading that do no harm here, once for a role of a server."""
        from text2sql_grpo.sql.postgres_role import COPY_PREFIX, HARMLESS_RIGHTS, WHY_HARMLESS

        server = urlsplit(location)
        role = server.username or ""
        place = f"{role}@{server.netloc.rpartition('@')[2]}"
        if place in _warned or role.startswith(COPY_PREFIX):
            return
        _warned.add(place)

        (found,) = self._pool("postgresql").run([(location, HARMLESS_RIGHTS)], self.limits)
        if found[0] == "ok" and found[2]:
            _logger.warning(
                "The PostgreSQL role of %s has rights beyond reading: %s. They do no harm here: %s.",
                place,
                listed([str(right) for (right,) in found[2]], MAX_RIGHTS_SHOWN),
                WHY_HARMLESS,
            )


def fingerprint(database: Path | str) -> Fingerprint | None:
    """Fingerprint of a database's file; None for a server, and for a file that cannot be read.

    Opening such a file raises.
    """
    kind, location = parse_address(database)
    if ENGINES[kind].is_server:
        return None
    try:
        return fingerprint_of(location, ENGINES[kind].logs)
    except DataError:
        return None


def _end(pools: dict[Kind, WorkerPool]) -> None:
    for pool in list(pools.values()):
        pool.close()


def _reset_after_fork() -> None:
    """Drop the parent's workers, and its locks, which a thread of the parent may hold."""
    for executor in _executors:
        executor._lock = threading.Lock()
        for pool in executor._pools.values():
            pool.forget()
        executor._pools.clear()
        executor._cache.reset_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
