"""A worker process: runs the queries that come on its standard input, and can be killed at any time.

Started by `pool` as `python -I -S`, so that it is ready in about 25 ms and takes 13 MB: for SQLite it
imports nothing beyond a few modules of the standard library.

A second thread watches the clock. It sends finished answers while the rest of a request runs, and ends the
process shortly after the deadline of a query that nothing in the database stops; SQLite lets the thread run
for it gives up the interpreter lock. Its last frame names the query that was too late.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sqlite3
import sys
import threading
import time
from collections import OrderedDict
from functools import partial
from marshal import loads

from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.sql import sqlite
from text2sql_grpo.sql.failure_text import late_text
from text2sql_grpo.sql.frames import (
    LAST,
    PLAIN,
    SPECIAL,
    FrameReader,
    framed,
    marshalled,
    marshalled_list,
    write_all,
)
from text2sql_grpo.sql.sqlite import DatabaseLocked, OutOfMemory

TYPE_CHECKING = False  # see `sqlite`
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

GRACE_S = 0.03  # after the deadline, for the database to stop the query by itself
TICK_S = 0.02  # between two looks at the clock
PARKED_S = 5.0  # between two looks at the parent while there is nothing to do
HEARTBEAT_S = 0.5
LOCKED_S = 5.0  # a query waits so long for another process that writes the file
SENT_BYTES = 1 << 20
MAX_OPEN_DATABASES = 64
HEAP_LIMIT_BYTES = 256 * 1024 * 1024  # of SQLite in this process
MAX_FILE_BYTES = 1 << 30  # a sort that spills to disk
ADDRESS_SPACE_BYTES = {"sqlite": 1 << 30, "postgresql": 1 << 30, "duckdb": 4 << 30}

_PLAIN_END = marshalled(False)[0]  # how an outcome ends that may be remembered
_AGAIN = marshalled(None)  # an answer that is not given: run the query again
_ENGINES = {
    "duckdb": ("text2sql_grpo.sql.duckdb_database", "HardenedDuckDB"),
    "postgresql": ("text2sql_grpo.sql.postgres_database", "HardenedPostgres"),
}


class _Limits:
    """The same fields as `outcome.Limits`, which is slow to import."""

    def __init__(self, timeout_s: float, max_rows: int, max_bytes: int, max_sql_bytes: int) -> None:
        self.timeout_s = timeout_s
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self.max_sql_bytes = max_sql_bytes


class Worker:
    """The state of the process, shared by its two threads.

    `_started` counts the queries of the request that were begun. It grows before a deadline is set, and the
    deadline is infinite between two queries: a deadline that has passed is that of the last one begun.
    """

    def __init__(self, frames: FrameReader, kind: str, parent: int) -> None:
        self._frames = frames
        self._kind = kind
        self._parent = parent
        # Whatever a library prints goes to standard error, not between the frames.
        self._output = os.dup(1)
        os.dup2(2, 1)
        self._limits = _Limits(0.0, 0, 0, 0)
        self._databases: OrderedDict[str, Any] = OrderedDict()
        self._database: Any = None
        self._started = 0
        self._deadline = float("inf")
        self._is_busy = False
        self._lock = threading.Lock()  # of what follows
        self._answers: list[bytes] = []  # not sent yet, all from `_database`
        self._n_sent = 0
        self._sent_at = 0.0
        self._flags = PLAIN
        self._wake = threading.Event()
        self._is_parked = False

    def serve(self) -> None:
        """Answers requests until the parent closes the pipe."""
        threading.Thread(target=self._watch, daemon=True).start()
        self._send()  # ready
        is_single = False
        while True:
            # Whoever asks one query at a time often asks the next one at once.
            request = self._frames.read(is_soon=is_single)[0]
            timeout_s, max_rows, max_bytes, max_sql_bytes, segments = loads(request)
            is_single = len(segments) == 1 == len(segments[0][1])
            self._limits = _Limits(timeout_s, max_rows, max_bytes, max_sql_bytes)
            self._started = self._n_sent = 0
            self._flags = PLAIN
            self._is_busy = True
            if self._is_parked:
                self._wake.set()
            for location, queries in segments:
                pending = iter(queries)
                while not self._answer_all(location, pending):
                    pass
                self._send()
            self._is_busy = False

    def _answer_all(self, location: str, pending: Iterator[str]) -> bool:
        """Answers queries of one database; False after one that needs a new connection."""
        self._database = None
        try:
            self._database = database = self._opened(location)
        except Exception as error:
            self._append([_fault(error) for _ in pending], SPECIAL)
            return True
        limits, timeout_s = self._limits, self._limits.timeout_s
        run = database.run_marshalled if self._kind == "sqlite" else partial(_run, database)
        answers = self._answers
        n_bytes = 0
        for sql in pending:
            self._started += 1
            started = time.perf_counter()
            self._deadline = started + timeout_s
            try:
                answer = run(sql, limits, started)
            except Exception as error:
                self._append([self._answer_after(error, location, sql)], SPECIAL)
                self._send()
                return False
            self._deadline = float("inf")
            if answer[-1] != _PLAIN_END:
                self._flags |= SPECIAL
            answers.append(answer)
            n_bytes += len(answer)
            if n_bytes > SENT_BYTES:
                self._send()
                n_bytes = 0
        return True

    def _opened(self, location: str) -> Any:
        """The connection kept for this database, or a new one if its file changed."""
        known = self._databases.get(location)
        if known is not None and self._is_current(known, location):
            self._databases.move_to_end(location)
            return known
        self._close(location)
        module, opened = _engine(self._kind)
        fingerprint = module.fingerprint_of(location)
        try:
            database = opened(location, fingerprint)
        except MemoryError:
            self._close(*self._databases)
            database = opened(location, fingerprint)
        self._databases[location] = database
        if len(self._databases) > MAX_OPEN_DATABASES:
            self._close(next(iter(self._databases)))
        return database

    def _is_current(self, known: Any, location: str) -> bool:
        if self._kind == "sqlite":
            is_current: bool = known.is_current()
            return is_current
        return bool(known.fingerprint == _engine(self._kind)[0].fingerprint_of(location))

    def _close(self, *locations: str) -> None:
        for location in locations:
            known = self._databases.pop(location, None)
            if known is not None:
                known.close()

    def _answer_after(self, error: Exception, location: str, sql: str) -> bytes:
        """The answer to a query that ended by an exception; its connection is closed."""
        self._send()  # what the connection answered before
        patience = time.perf_counter() + LOCKED_S
        while isinstance(error, DatabaseLocked) and time.perf_counter() < patience:
            answer = self._second_run(location, sql)
            if isinstance(answer, bytes):
                return answer
            error = answer
        if isinstance(error, OutOfMemory) and len(self._databases) > 1:
            # The other connections' pages were in memory too.
            self._database = None
            self._close(*self._databases)
            answer = self._second_run(location, sql)
            if isinstance(answer, bytes):
                return answer
            error = answer
        self._deadline = float("inf")
        is_unchanged = self._is_unchanged()
        self._database = None
        self._close(location)
        if isinstance(error, OutOfMemory):
            self._flags |= LAST  # gives the memory back
            return error.answer
        return _fault(error) if is_unchanged else _AGAIN

    def _second_run(self, location: str, sql: str) -> bytes | Exception:
        try:
            self._database = database = self._opened(location)
            started = time.perf_counter()
            self._deadline = started + self._limits.timeout_s
            run = database.run_marshalled if self._kind == "sqlite" else partial(_run, database)
            answer: bytes = run(sql, self._limits, started)
            return answer
        except Exception as error:
            return error
        finally:
            self._deadline = float("inf")

    def _is_unchanged(self) -> bool:
        return self._kind != "sqlite" or self._database is None or self._database.is_unchanged()

    def _append(self, answers: list[bytes], flags: int) -> None:
        self._flags |= flags
        self._answers += answers

    def _send(self) -> None:
        """Sends what is answered. What was read from a file that changed meanwhile is not an answer."""
        with self._lock:
            n_answers = len(self._answers)
            answers = self._answers[:n_answers]
            del self._answers[:n_answers]
            if answers and not self._is_unchanged():
                answers = [_AGAIN] * n_answers
                self._flags |= SPECIAL
            self._write(answers)
            self._n_sent += n_answers
            if self._flags & LAST:
                os._exit(0)

    def _write(self, answers: list[bytes]) -> None:
        write_all(self._output, framed(marshalled_list(answers), self._flags))
        self._sent_at = time.perf_counter()

    def _watch(self) -> None:
        n_idle = 0
        while True:
            if self._is_busy:
                n_idle = 0
                self._look()
            else:
                n_idle += 1
            if n_idle * TICK_S > 1.0:
                self._park()
            left_s = self._deadline + GRACE_S - time.perf_counter()
            time.sleep(max(0.001, min(TICK_S, left_s)))

    def _look(self) -> None:
        begun = self._started
        now = time.perf_counter()
        if now > self._deadline + GRACE_S:
            self._end(begun)
        if self._answers or now > self._sent_at + HEARTBEAT_S:
            self._send()
        self._end_without_parent()

    def _end(self, begun: int) -> None:
        """Ends the process, and a query with it that is the last one begun, if it still runs."""
        with self._lock:
            answers = self._answers[:]
            if self._n_sent + len(answers) != begun - 1:
                return  # just finished
            if not self._is_unchanged():
                answers = [_AGAIN] * len(answers)
            timeout_s = self._limits.timeout_s
            elapsed_s = time.perf_counter() - self._deadline + timeout_s
            late = ("timeout", (), (), False, late_text(timeout_s), elapsed_s, True)
            self._flags |= SPECIAL | LAST
            self._write([*answers, marshalled(late)])
            os._exit(0)

    def _park(self) -> None:
        """Waits until there is something to do."""
        self._wake.clear()
        self._is_parked = True
        while not self._is_busy and not self._wake.wait(PARKED_S):
            self._end_without_parent()
        self._is_parked = False

    def _end_without_parent(self) -> None:
        if os.name != "nt" and os.getppid() != self._parent:
            os._exit(0)


def _engine(kind: str) -> tuple[Any, Any]:
    """The module of an engine and its class of connections."""
    if kind == "sqlite":
        return sqlite, sqlite.HardenedDatabase
    name, connection = _ENGINES[kind]
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"expected the package {error.name} for {kind} databases, but it is not installed"
        ) from error
    return module, getattr(module, connection)


def _run(database: Any, sql: str, limits: _Limits, started: float) -> bytes:
    outcome = database.run(sql, limits)
    is_unsure = outcome.status in ("timeout", "memory")
    answer = marshalled((*outcome[:5], time.perf_counter() - started, is_unsure))
    if outcome.status == "memory":
        raise OutOfMemory(answer)
    return answer


def _fault(error: Exception) -> bytes:
    """An exception for the parent: ours by its class and text, any other by its traceback."""
    if isinstance(error, RunError):
        kind = next(cls for cls in type(error).__mro__ if cls.__module__ == RunError.__module__)
        return marshalled((kind.__name__, str(error)))
    import traceback

    text = "".join(traceback.format_exception(error))
    return marshalled(("RunError", f"expected an outcome, got a bug in a SQL worker:\n{text}"))


def _limit_memory(kind: str) -> None:
    sqlite3.connect(":memory:").execute(f"PRAGMA hard_heap_limit = {HEAP_LIMIT_BYTES}")
    if sys.platform == "linux":  # macOS knows the limits, and does not hold them
        import resource

        bounds = {
            resource.RLIMIT_AS: ADDRESS_SPACE_BYTES[kind],
            resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
            resource.RLIMIT_CORE: 0,
        }
        for bound, value in bounds.items():
            hard = resource.getrlimit(bound)[1]  # a lower one may stand, which only root may raise
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(bound, (value, value))


def main() -> None:
    """The life of a worker process."""
    frames = FrameReader(0)
    kind, parent, path = loads(frames.read()[0])
    sys.path[:] = path or sys.path
    _limit_memory(kind)
    gc.freeze()
    gc.set_threshold(100_000)  # rows of tuples need no collection
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
        Worker(frames, kind, parent).serve()
    os._exit(0)
