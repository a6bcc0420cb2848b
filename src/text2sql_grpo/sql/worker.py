"""Worker process that runs the queries on its standard input; it can be killed at any time.

Started by `pool` as `python -I -S -B`, so that it is ready in about 25 ms and takes 13 MB: for SQLite it
imports nothing beyond a few modules of the standard library.

A second thread watches the deadline. It sends finished answers while the rest of a request runs, and ends
the process shortly after the deadline of a query that the database does not stop; it can run because SQLite
releases the interpreter lock. The last frame holds the time-out of that query.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sqlite3
import sys
import threading
import time
from collections import OrderedDict
from functools import cache
from marshal import loads
from types import SimpleNamespace

if os.name != "nt":
    import resource

from text2sql_grpo.errors import RunError
from text2sql_grpo.sql import sandbox, sqlite
from text2sql_grpo.sql.engines import ENGINES
from text2sql_grpo.sql.failure_text import failed, late_text, why_unfit
from text2sql_grpo.sql.frames import UNFORESEEN, FrameReader, framed, marshalled, marshalled_list, write_all
from text2sql_grpo.sql.sqlite import DatabaseLocked, OutOfMemory

TYPE_CHECKING = False  # see `sqlite`
if TYPE_CHECKING:
    from typing import Any

SPARE_CPU_S = 120  # of processor time, after which the kernel kills a worker that hangs
INTERRUPT_S = 0.0005  # after the deadline, for the database to know it as well
GRACE_S = 0.03  # after the deadline, for the database to stop the query by itself
TICK_S = 0.02  # between two checks of the deadline
IDLE_TICKS = 50  # without a query, before the checks stop until the next one
HEARTBEAT_S = 0.5
LOCKED_S = 5.0  # wait of a query for another process that writes the file
SENT_BYTES = 1 << 20
OPEN_BYTES = 128 * 1024 * 1024  # half of SQLite's memory, for open databases
OTHER_BYTES = 8 * 1024 * 1024  # of a database of another engine: 16 stay open, 70 MB of addresses each
MAX_OPEN_DATABASES = 400
HEAP_LIMIT_BYTES = 256 * 1024 * 1024  # of SQLite in this process

_AGAIN = marshalled(None)  # in place of an answer: run the query again


class Worker:
    """State of the process, shared by its two threads.

    The deadline is infinite between two queries, and reset before an answer is stored: while it is the same,
    the query that it belongs to has no answer yet.
    """

    def __init__(self, frames: FrameReader, kind: str, parent: int, sandbox_parts: tuple[str, ...]) -> None:
        self._frames = frames
        self._sandbox_parts = sandbox_parts
        self._kind = kind
        self._parent = parent
        # Output of libraries goes to stderr, not between the frames.
        self._output = os.dup(1)
        os.dup2(2, 1)
        self._limits: Any = None
        self._databases: OrderedDict[str, Any] = OrderedDict()
        self._n_bytes = 0  # of the open databases
        self._max_open = ENGINES[kind].max_open or _max_open_databases()
        self._database: Any = None
        self._deadline = float("inf")
        self._is_busy = False
        self._lock = threading.Lock()  # guards the fields below
        self._answers: list[bytes] = []  # not sent yet, all from `_database`
        self._sent_at = 0.0
        self._is_last = False  # this process ends after the next frame
        self._is_awake = threading.Event()

    def serve(self) -> None:
        """Answer requests until the parent closes the pipe."""
        threading.Thread(target=self._watch, daemon=True).start()
        sandbox.forbid_processes()
        _extend_processor_time()
        self._write([marshalled(part) for part in self._sandbox_parts])  # ready
        while True:
            limits, segments = loads(self._frames.read()[0])
            self._limits = SimpleNamespace(**limits)  # `outcome.Limits` is slow to import
            self._is_busy = True
            self._is_awake.set()
            for location, queries in segments:
                self._answer_all(location, queries)
                self._send()
            self._is_busy = False

    def _answer_all(self, location: str, queries: list[str]) -> None:
        """Answer queries of one database."""
        self._database = None
        n_bytes = 0
        pending = iter(queries)
        for sql in pending:
            try:
                self._database = self._database or self._opened(location)
            except Exception as error:
                self._answers += [_fault(error) for _ in (sql, *pending)]
                break
            try:
                answer = self._answer(sql)
            except Exception as error:
                answer = self._answer_after(error, location, sql)
                n_bytes = SENT_BYTES
            self._answers.append(answer)
            n_bytes += len(answer)
            if n_bytes > SENT_BYTES:
                self._send()
                n_bytes = 0

    def _answer(self, sql: str) -> bytes:
        if reason := why_unfit(sql, self._limits):
            return marshalled(failed("error", reason, may_change=False))
        started = time.perf_counter()
        self._deadline = started + self._limits.timeout_s
        try:
            if self._kind == "sqlite":
                answer: bytes = self._database.run_marshalled(sql, self._limits, started)
                return answer
            return _run(self._database, sql, self._limits, started)
        finally:
            self._deadline = float("inf")

    def _opened(self, location: str) -> Any:
        """Open connection to this database; a new one if its file changed."""
        known = self._databases.get(location)
        if known is not None and known.is_current():
            self._databases.move_to_end(location)
            return known
        self._close(location)
        module, opened = engine(self._kind)
        fingerprint = module.fingerprint_of(location)
        try:
            database = opened(location, fingerprint)
        except MemoryError:
            self._close(*self._databases)
            database = opened(location, fingerprint)
        self._databases[location] = database
        self._n_bytes += _size_of(database)
        while self._n_bytes > OPEN_BYTES or len(self._databases) > self._max_open:
            self._close(next(iter(self._databases)))
        return database

    def _close(self, *locations: str) -> None:
        for location in locations:
            known = self._databases.pop(location, None)
            if known is not None:
                self._n_bytes -= _size_of(known)
                known.close()

    def _answer_after(self, error: Exception, location: str, sql: str) -> bytes:
        """Answer to a query that ended by an exception; its connection is closed."""
        self._send()  # earlier answers of the connection
        patience = time.perf_counter() + LOCKED_S
        while True:
            if isinstance(error, OutOfMemory) and len(self._databases) > 1:
                # Free the pages of the other connections.
                self._database = None
                self._close(*self._databases)
            elif not isinstance(error, DatabaseLocked) or time.perf_counter() > patience:
                break
            try:
                self._database = self._opened(location)
                return self._answer(sql)
            except Exception as again:
                error = again
        is_unchanged = self._is_unchanged()
        self._database = None
        self._close(location)
        if isinstance(error, OutOfMemory):
            self._is_last = True  # the exit frees the memory
            return error.answer
        if not is_unchanged:
            return _AGAIN
        return _fault(error) if isinstance(error, RunError) else marshalled((UNFORESEEN, _traceback(error)))

    def _is_unchanged(self) -> bool:
        return self._database is None or bool(self._database.is_unchanged())

    def _send(self) -> None:
        """Send the finished answers; those from a file that changed meanwhile are run again."""
        with self._lock:
            n_answers = len(self._answers)
            answers = self._answers[:n_answers]
            del self._answers[:n_answers]
            if answers and not self._is_unchanged():
                answers = [_AGAIN] * n_answers
            self._write(answers)
            if self._is_last:
                os._exit(0)

    def _write(self, answers: list[bytes]) -> None:
        write_all(self._output, framed(marshalled_list(answers), is_last=self._is_last))
        self._sent_at = time.perf_counter()

    def _watch(self) -> None:
        n_idle = 0
        try:
            while True:
                n_idle = 0 if self._is_busy else n_idle + 1
                if n_idle > IDLE_TICKS:
                    self._is_awake.clear()
                    if not self._is_busy:
                        self._is_awake.wait()
                _extend_processor_time()
                if self._is_busy:
                    self._check_deadline()
                left_s = self._deadline - time.perf_counter()
                left_s = left_s if left_s > 0 else left_s + GRACE_S
                time.sleep(max(0.001, min(TICK_S, left_s)))
        except OSError:  # nobody reads the answers: the parent is gone
            os._exit(0)

    def _check_deadline(self) -> None:
        if os.name != "nt" and os.getppid() != self._parent:
            os._exit(0)
        deadline, session = self._deadline, getattr(self._database, "session", None)
        now = time.perf_counter()
        if session is not None and now > deadline + INTERRUPT_S:
            with contextlib.suppress(Exception):  # closed just before
                session.interrupt()
        if now > deadline + GRACE_S:
            self._end(deadline)
        if self._answers or now > self._sent_at + HEARTBEAT_S:
            self._send()

    def _end(self, deadline: float) -> None:
        """Exit if the query of this deadline still runs, with its time-out as the last answer."""
        with self._lock:
            answers = self._answers[:]
            if self._deadline != deadline:
                return  # just finished
            if not self._is_unchanged():
                answers = [_AGAIN] * len(answers)
            timeout_s = self._limits.timeout_s
            elapsed_s = time.perf_counter() - deadline + timeout_s
            self._is_last = True
            self._write([*answers, marshalled(failed("timeout", late_text(timeout_s), elapsed_s))])
            os._exit(0)


_absent: list[RunError] = []  # the engine, found out before the sandbox, which hides modules of the user


@cache
def engine(kind: str) -> tuple[Any, Any]:
    """Module of an engine and its connection class."""
    if _absent:
        raise _absent[0]
    return ENGINES[kind].loaded()


def _max_open_databases() -> int:
    """Number of databases that may be open at once: each takes two files, and a query a few more."""
    if os.name == "nt":
        return MAX_OPEN_DATABASES
    n_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_OPEN_DATABASES if n_files == resource.RLIM_INFINITY else min(MAX_OPEN_DATABASES, n_files // 3)


def _size_of(database: Any) -> int:
    return getattr(database, "n_bytes", OTHER_BYTES)


def _run(database: Any, sql: str, limits: Any, started: float) -> bytes:
    outcome = database.run(sql, limits)
    elapsed_s = time.perf_counter() - started
    answer = marshalled((*outcome[:5], elapsed_s, database.is_volatile, database.is_volatile))
    if outcome.status == "memory":
        raise OutOfMemory(answer)
    return answer


def _fault(error: Exception) -> bytes:
    """Marshalled exception: a RunError by its class and text, any other by its traceback."""
    if isinstance(error, RunError):
        kind = next(cls for cls in type(error).__mro__ if cls.__module__ == RunError.__module__)
        return marshalled((kind.__name__, str(error)))
    return marshalled(("RunError", f"internal error in a SQL worker:\n{_traceback(error)}"))


def _traceback(error: Exception) -> str:
    import traceback

    return "".join(traceback.format_exception(error))


def _extend_processor_time() -> None:
    """Let the kernel end this process if the thread that watches the deadlines cannot run any more."""
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        soft = int(time.process_time()) + SPARE_CPU_S
        soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _limit_memory(kind: str) -> None:
    sqlite3.connect(":memory:").execute(f"PRAGMA hard_heap_limit = {HEAP_LIMIT_BYTES}")
    if sys.platform == "linux":  # macOS accepts the limits, and does not enforce them
        sandbox.lower_limit(resource.RLIMIT_AS, ENGINES[kind].address_space)


def main() -> None:
    """Entry point of a worker process."""
    os.environ["TZ"] = "UTC"  # else the machine decides the day of a moment, in DuckDB and by `localtime`
    if os.name != "nt":
        time.tzset()
    frames = FrameReader(0)
    kind, parent, path, readable, folder = loads(frames.read()[0])
    sys.path[:] = path or sys.path
    sandbox.end_with(parent)  # before slow imports
    sqlite.spills_to_disk = bool(folder)
    try:
        engine(kind)
    except RunError as error:  # raised again by the first query, which the parent sees
        _absent.append(error)
    _limit_memory(kind)
    parts = sandbox.enter(
        readable, [folder] if folder else [], parent=parent, has_network=ENGINES[kind].is_server
    )
    gc.freeze()
    gc.set_threshold(100_000)  # rows of tuples need no collection
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
        worker = Worker(frames, kind, parent, parts)
        module = None if _absent else engine(kind)[0]
        getattr(module, "run_in_query_thread", lambda serve: serve())(worker.serve)
    os._exit(0)
