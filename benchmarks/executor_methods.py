"""Ways to run one query under a time limit, called alike: the rows of path, SQL and seconds.

The methods of SkyRL and BIRD are written from their descriptions; no code of theirs is used. Where a query
is too late or fails, a method raises or returns what it has; the benchmark looks only at the clock then.
"""

import multiprocessing
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import lru_cache, partial
from marshal import loads
from multiprocessing.connection import Connection
from typing import Any

from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Limits
from text2sql_grpo.sql.sqlite import HardenedDatabase
from text2sql_grpo.sql.sqlite_file import fingerprint_of

try:
    from func_timeout import func_timeout

    FUNC_TIMEOUT = "the package"
except ModuleNotFoundError:
    import ctypes

    FUNC_TIMEOUT = "its method re-created"

    def func_timeout(timeout: float, func: Callable[..., Any], args: Iterable[Any] = ()) -> Any:
        """A thread per call; past the limit, an exception is set in it again and again until it ends."""
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(func(*args)), daemon=True)
        thread.start()
        thread.join(timeout)
        if thread.is_alive():
            threading.Thread(target=_stop, args=(thread,), daemon=True).start()
            raise TimeoutError
        return found[0]

    def _stop(thread: threading.Thread) -> None:
        while thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
            )
            time.sleep(0.5)


Rows = Any  # of rows: a list, or a set for SkyRL
Query = tuple[str, str]  # path and SQL
Method = Callable[[str, str, float], Rows]

_open: dict[str, sqlite3.Connection] = {}
_executors: dict[str, SQLExecutor] = {}
# Two of Spider's golds return more rows than the executor keeps by default.
_limits = lru_cache(partial(Limits, max_rows=100_000, max_bytes=50_000_000))
fork = multiprocessing.get_context("fork")


def _kept(path: str) -> sqlite3.Connection:
    if path not in _open:
        _open[path] = sqlite3.connect(path, check_same_thread=False)
    return _open[path]


def bare(path: str, sql: str, limit_s: float) -> Rows:
    """One connection for each database, no protection."""
    return _kept(path).execute(sql).fetchall()


def bare_immutable(path: str, sql: str, limit_s: float) -> Rows:
    """The same, of a file that is promised not to change: no lock is taken."""
    uri = f"file:{path}?mode=ro&immutable=1"
    if uri not in _open:
        _open[uri] = sqlite3.connect(uri, uri=True)
    return _open[uri].execute(sql).fetchall()


def bare_connect(path: str, sql: str, limit_s: float) -> Rows:
    """A connection for each query, no protection."""
    return _on_new_connection(path, sql)


def ours_connect(path: str, sql: str, limit_s: float) -> Rows:
    """A connection of a worker for each query, in this process."""
    with closing(HardenedDatabase(path, fingerprint_of(path))) as database:
        return loads(database.run_marshalled(sql, _limits(limit_s), time.perf_counter()))[2]


def _executor() -> SQLExecutor:
    if "ours" not in _executors:
        _executors["ours"] = SQLExecutor(workers=2, cache_entries=0)
    return _executors["ours"]


def ours(path: str, sql: str, limit_s: float) -> Rows:
    """Our executor, one call at a time: all guards on, no cache."""
    return _executor().execute(path, sql, limits=_limits(limit_s)).rows


def ours_batch(queries: Sequence[Query], limit_s: float) -> list[Rows]:
    """Our executor, one call for all: all guards on, no cache, two workers."""
    outcomes = _executor().execute_many(queries, limits=_limits(limit_s))
    return [outcome.rows for outcome in outcomes]


def sigalrm(path: str, sql: str, limit_s: float) -> Rows:
    """An alarm signal whose handler raises; main thread only."""
    signal.signal(signal.SIGALRM, _raise)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return bare(path, sql, limit_s)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise(number: int, frame: object) -> None:
    raise TimeoutError


def interrupt(path: str, sql: str, limit_s: float) -> Rows:
    """A timer thread per query that calls `interrupt()`."""
    timer = threading.Timer(limit_s, _kept(path).interrupt)
    timer.daemon = True
    timer.start()
    try:
        return bare(path, sql, limit_s)
    finally:
        timer.cancel()


def func_timeout_kept(path: str, sql: str, limit_s: float) -> Rows:
    """func_timeout around a query on a kept connection."""
    return func_timeout(limit_s, bare, (path, sql, limit_s))


def process(path: str, sql: str, limit_s: float) -> Rows:
    """A forked process per query, killed at the limit."""
    here, there = fork.Pipe()
    child = fork.Process(target=_answer, args=(there, path, sql))
    child.start()
    try:
        if not here.poll(limit_s):
            raise TimeoutError
        return here.recv()
    finally:
        child.kill()
        child.join()
        here.close()
        there.close()


def _answer(pipe: Connection, path: str, sql: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        pipe.send(connection.execute(sql).fetchall())


def skyrl(path: str, sql: str, limit_s: float) -> Rows:
    """SkyRL's method: a thread per query with a new connection and a transaction that is rolled back, the
    rows as a set; at the limit the caller interrupts the connection and waits for the thread."""
    found: list[Any] = []
    opened: list[sqlite3.Connection] = []
    done = threading.Event()

    def run() -> None:
        connection = sqlite3.connect(path, check_same_thread=False)
        opened.append(connection)
        try:
            connection.execute("BEGIN TRANSACTION")
            found.append(frozenset(connection.execute(sql).fetchall()))
        except (sqlite3.Error, MemoryError) as error:
            found.append(error)
        finally:
            connection.rollback()
            connection.close()
            done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    if not done.wait(limit_s):
        opened[0].interrupt()
    thread.join()
    return found[0]


def bird(path: str, sql: str, limit_s: float) -> Rows:
    """BIRD's method: func_timeout around a new connection per query."""
    return func_timeout(limit_s, _on_new_connection, (path, sql))


def _on_new_connection(path: str, sql: str) -> Rows:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


class BirdPool:
    """BIRD's method in a pool of two processes."""

    def __init__(self) -> None:
        self._pool = fork.Pool(2)

    def __call__(self, queries: Sequence[Query], limit_s: float) -> list[Rows]:
        """Rows of each query."""
        pending = [self._pool.apply_async(bird, (path, sql, limit_s)) for path, sql in queries]
        return [result.get() for result in pending]

    def close(self) -> None:
        """Ends the processes."""
        self._pool.terminate()
        self._pool.join()


class BarePair:
    """Two bare loops in two processes, each on every second query: what two cores give at most."""

    def __init__(self) -> None:
        self._pool = fork.Pool(2)

    def __call__(self, queries: Sequence[Query], limit_s: float) -> list[Rows]:
        """Nothing for each query: the rows stay where they are."""
        n_run = sum(self._pool.map(_bare_loop, (queries[::2], queries[1::2]), chunksize=1))
        return [None] * n_run

    def close(self) -> None:
        """Ends the processes."""
        self._pool.terminate()
        self._pool.join()


def _bare_loop(queries: Sequence[Query]) -> int:
    return len([bare_immutable(path, sql, 0.0) for path, sql in queries])


def one_by_one(method: Method) -> Callable[[Sequence[Query], float], list[Rows]]:
    """A method for a list of queries."""
    return partial(_one_by_one, method)


def _one_by_one(method: Method, queries: Sequence[Query], limit_s: float) -> list[Rows]:
    return [method(path, sql, limit_s) for path, sql in queries]


def close() -> None:
    """Ends what the methods keep."""
    for executor in _executors.values():
        executor.close()
    for connection in _open.values():
        connection.close()
    _executors.clear()
    _open.clear()
