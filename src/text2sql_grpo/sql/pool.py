"""Pool of worker processes that can be killed: scheduling of queries, restarts, retries.

Needs neither signals nor fork nor readiness of pipes: a thread that waits for a worker blocks in a read, and
the worker, or the backstop thread here, ends that wait.
"""

import logging
import os
import queue
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain, islice
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from text2sql_grpo import errors
from text2sql_grpo.errors import DataError, RunError
from text2sql_grpo.sql.address import Kind
from text2sql_grpo.sql.engines import ENGINES
from text2sql_grpo.sql.failure_text import late_text
from text2sql_grpo.sql.frames import UNFORESEEN, framed, marshalled
from text2sql_grpo.sql.outcome import Limits
from text2sql_grpo.sql.worker_process import PATIENCE_S, Answer, KilledAtStart, Reply, Worker

MAX_CHUNK = 256  # queries in one message
FIRST_CHUNK = 8  # the same, before the first timing of a query
CHUNKS_PER_WORKER = 4  # of a batch, so that no worker waits long for the slowest
GROW_S = 0.15  # of a batch on ready workers, before more start: some 0.04 s of processor time each
CHUNK_S = 0.004  # of slow queries, for the same reason; long beside the 0.1 ms that a message costs
BACKSTOP_TICK_S = 0.25
MAX_GRANTED = 10_000  # files that a worker may read; then they are granted anew, as they are needed
MANY_SIBLINGS = 3  # databases side by side, from which on workers may read the others there too
MAX_LISTED = 2_000  # entries of folders that are searched for them
MAX_TRIES = 100  # of one query, on a file that changes while it is read
MAX_LOGGED = 100
MAX_STARTS = 10  # for one message, of workers killed from outside before they are ready

Query = tuple[str, str]  # location and SQL
Segment = tuple[str, list[str]]  # a location and the queries on it, one after the other
Asked = tuple["Future[Worker]", tuple[str, ...], int]  # a worker to start, what it may read, its version
Files = dict[str, tuple[int, int] | None]  # device and inode of each file; None if there is none

# Beside a database's file; those that are there when a worker starts are read, and none is made.
_SIDE_FILES: dict[Kind, tuple[str, ...]] = {
    "sqlite": ("-wal", "-shm", "-journal"),
    "duckdb": (".wal", ".wal.recovery", ".wal.checkpoint"),
}
_MARKS: dict[Kind, tuple[int, bytes]] = {"sqlite": (0, b"SQLite format 3\0"), "duckdb": (8, b"DUCK")}

_logger = logging.getLogger(__name__)
_logged: set[str] = set()


class Cancellation:
    """Handle of one query, by which another thread can stop it."""

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._worker: Worker | None = None

    def set(self) -> None:
        """Kill the worker that runs the query, now or when it begins; nothing after its end."""
        with self._lock:
            self.is_set = True
            if self._worker is not None:
                self._worker.kill()

    @contextmanager
    def watch(self, worker: Worker) -> Iterator[None]:
        """Let `set` kill this worker inside the block."""
        worker.wait_until_ready()  # a worker killed before that would be started again
        with self._lock:
            self._worker = worker
            if self.is_set:
                worker.kill()
        try:
            yield
        finally:
            with self._lock:
                self._worker = None


class WorkerPool:
    """At most `n_workers` processes for one kind of database, started when they are needed."""

    def __init__(
        self, kind: Kind, n_workers: int, *, require_sandbox: bool = False, folders: Iterable[str] = ()
    ) -> None:
        """Create a pool without workers.

        Args:
            kind: Engine of the databases.
            n_workers: Maximum number of processes.
            require_sandbox: whether to run nothing without the whole sandbox.
            folders: Folders of databases of this package's own, each granted with all that will be in it.
        """
        self._kind = kind
        self._n_workers = n_workers
        self._require_sandbox = require_sandbox
        self._folders = folders
        self._version = 0  # of what workers that start now may read
        self._readable: Files = {}
        self._since: dict[str, int] = {}  # version from which on a file is readable as it is
        self._granted: dict[str, int] = {}  # version from which on a location is readable
        self._searched: set[str] = set()  # folders
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._idle: list[Worker] = []  # the last one used comes first, for its memory is warm
        self._workers: set[Worker] = set()
        self._n_started = 0
        self._n_waiting = 0
        self._keeper: _Keeper | None = None

    def reset_after_fork(self) -> None:
        """Drop the parent's workers; this process starts its own."""
        if self._keeper is not None:
            for worker in self._keeper.living:
                worker.forget()
        self._reset()

    def close(self) -> None:
        """End the idle workers now and the busy ones after their current request."""
        with self._lock:
            idle, self._idle = self._idle, []
            self._workers = set()
            self._n_started = 0
            keeper, self._keeper = self._keeper, None
        for worker in idle:
            worker.end()
        if keeper is not None:
            for worker in keeper.living:
                if worker.is_dropped:
                    worker.end()
            keeper.close()

    def workers(self) -> dict[int, bool]:
        """Process ids of the workers, and whether each runs a query now."""
        with self._lock:
            return {worker.pid: worker.is_busy for worker in self._workers}

    def sandbox(self) -> tuple[str, ...]:
        """Parts of the sandbox that a worker's kernel enforces; starts one if none is idle."""
        worker = self._take()
        is_alive = False
        try:
            worker.wait_until_ready()
            is_alive = True
            return worker.sandbox
        finally:
            self._give_back(worker, is_alive)

    def run_one(
        self, location: str, sql: str, limits: Limits, cancellation: Cancellation | None = None
    ) -> Answer:
        """Run one query; a cancelled one ends as an error.

        Raises:
            RunError: The database is at fault, or the executor.
        """
        request = _request([(location, [sql])], limits)
        version = self._granted.get(location) or self._grant(location)
        has_died = False
        for _ in range(MAX_TRIES):
            (answers, ending), worker = self._ask(request, 1, limits, version, cancellation)
            if cancellation is not None and cancellation.is_set:
                return ("error", (), (), False, "cancelled", 0.0, False, True)
            answer = answers[0] if answers else None
            if answer is not None and len(answer) != 2:
                return answer
            if answer is not None:
                version = self._grant(location)
                if worker.version >= version:
                    return _checked(answer)
            elif ending == "crashed":
                if has_died or worker.is_late:
                    return _outcome_after_crash(limits, worker.is_late)
                has_died = True  # the process may have been killed from outside: run the query once more
        raise _restless(location)

    def run(self, queries: Sequence[Query], limits: Limits) -> list[Answer]:
        """Answers to many queries in order.

        Raises:
            RunError: A database is at fault, or the executor.
        """
        for location in {location for location, _ in queries} - self._granted.keys():
            self._grant(location)
        batch = Batch(queries, limits, self._n_workers, self._grant)
        threads = []
        for number in range(1, min(self._n_workers, len(queries))):
            waits = number >= len(self._idle)
            thread = threading.Thread(target=self._serve, args=(batch, waits), daemon=True)
            with suppress(RuntimeError):  # no more threads: the others do its work
                thread.start()
                threads.append(thread)
        try:
            self._serve(batch)
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C: the others stop after the message they wait for
            batch.stop()
            raise
        if batch.failure is not None:
            raise batch.failure
        return batch.answers

    def _serve(self, batch: "Batch", waits: bool = False) -> None:
        """Run messages of a batch until none is pending, on one worker at a time.

        Args:
            waits: Begin only if the batch lasts.
        """
        try:
            while waits and not batch.none_pending.wait(GROW_S):
                waits = not self._has_ready_worker()
            while positions := batch.next_positions():
                queries = [batch.queries[position] for position in positions]
                request = _request(_by_location(queries), batch.limits)
                started = time.perf_counter()
                version = max(self._granted.get(location) or self._grant(location) for location, _ in queries)
                reply, worker = self._ask(request, len(positions), batch.limits, version)
                batch.query_s = (time.perf_counter() - started) / len(positions)
                batch.take(positions, reply, worker)
        except Exception as error:
            batch.fail(error)

    def _has_ready_worker(self) -> bool:
        with self._lock:
            return any(worker.is_ready for worker in self._workers)

    def _ask(
        self,
        request: bytes,
        n_queries: int,
        limits: Limits,
        version: int,
        cancellation: Cancellation | None = None,
    ) -> tuple[Reply, Worker]:
        for _ in range(MAX_STARTS - 1):
            try:
                return self._ask_worker(request, n_queries, limits, version, cancellation)
            except KilledAtStart:
                continue
        return self._ask_worker(request, n_queries, limits, version, cancellation)

    def _ask_worker(
        self,
        request: bytes,
        n_queries: int,
        limits: Limits,
        version: int,
        cancellation: Cancellation | None,
    ) -> tuple[Reply, Worker]:
        worker = self._take(version)
        is_alive = False
        # A thread that polls takes time from others that work.
        is_soon = n_queries == 1 and len(self._idle) + 1 >= self._n_started
        try:
            with cancellation.watch(worker) if cancellation is not None else nullcontext():
                reply = worker.ask(request, n_queries, limits, is_soon=is_soon)
            is_alive = not reply.ending
            if reply.ending == "crashed" and (text := worker.stderr()):
                _log_once(f"a SQL worker crashed; its stderr:\n{text}")
            return reply, worker
        finally:
            self._give_back(worker, is_alive)

    def _take(self, version: int = 0) -> Worker:
        """Idle worker that may read what was granted up to this version, or a new one."""
        with self._lock:
            try:
                while True:
                    for index in range(len(self._idle) - 1, -1, -1):
                        if self._idle[index].version >= version:
                            return self._idle.pop(index)
                    if self._idle:
                        self._drop(self._idle.pop(0))
                    if self._n_started < self._n_workers:
                        return self._start()
                    self._n_waiting += 1
                    try:
                        self._free.wait()
                    finally:
                        self._n_waiting -= 1
            except BaseException:
                self._free.notify()  # the next one in the queue may have more luck, or fails as well
                raise

    def _give_back(self, worker: Worker, is_alive: bool) -> None:
        with self._lock:
            is_member = worker in self._workers
            if is_member and is_alive:
                self._idle.append(worker)
            elif is_member:
                self._drop(worker)
                with suppress(RunError):  # raised again in a thread that needs one
                    if not self._idle and self._n_started + 1 < self._n_workers:
                        self._idle.insert(0, self._start())  # a spare: late queries come in series
                    self._idle.insert(0, self._start())  # gets ready while others work
            if self._n_waiting:
                self._free.notify()
        if not is_member:
            worker.end()

    def _drop(self, worker: Worker) -> None:
        self._workers.discard(worker)
        self._n_started -= 1
        worker.kill()
        worker.is_dropped = True  # the keeper waits for it, because its memory may take long to free

    def _start(self) -> Worker:
        if self._keeper is None:
            self._keeper = _Keeper(self._kind, require_sandbox=self._require_sandbox)
        worker = self._keeper.start(tuple(self._readable), self._version)
        self._n_started += 1
        self._workers.add(worker)
        return worker

    def _grant(self, location: str) -> int:
        """Let workers that start from now on read a database; the version of those that may.

        Raises:
            DataError: It is not a file.
        """
        with self._lock:
            if len(self._readable) > MAX_GRANTED:
                for known in (self._readable, self._granted, self._searched):
                    known.clear()
            found = {location: self._files_of(location)}
            if any(self._is_new(path, identity) for path, identity in found[location].items()):
                self._version += 1
                found |= {path: self._files_of(path) for path in self._siblings_of(location)}
            for place, files in found.items():
                for path, identity in files.items():
                    if self._is_new(path, identity):
                        self._readable[path], self._since[path] = identity, self._version
                self._granted[place] = max(self._since[path] for path in files)
            return self._granted[location]

    def _is_new(self, path: str, identity: tuple[int, int] | None) -> bool:
        return path not in self._readable or self._readable[path] != identity

    def _files_of(self, location: str) -> Files:
        """Files and folders that a worker reads for a database besides Python's own."""
        if ENGINES[self._kind].is_server:
            return {path: _identity(path) for path in _client_files(location)}
        path = os.path.realpath(location)
        identity = _identity(path, self._kind)
        for folder in map(os.path.realpath, self._folders):
            if path.startswith(folder + os.sep):
                return {folder: _identity(folder)}
        beside = {path + suffix: _identity(path + suffix) for suffix in _SIDE_FILES[self._kind]}
        return {path: identity} | {path: known for path, known in beside.items() if known}

    def _siblings_of(self, location: str) -> list[str]:
        """Databases beside this one, or in folders beside its own, where several were asked for."""
        if ENGINES[self._kind].is_server:
            return []
        folder, suffix = os.path.dirname(location), os.path.splitext(location)[1]
        above = os.path.dirname(folder)
        folders = [os.path.dirname(known) for known in self._granted]
        found: list[str] = []
        for place, known in ((folder, folders), (above, [os.path.dirname(each) for each in set(folders)])):
            if known.count(place) + 1 < MANY_SIBLINGS or place in self._searched:
                continue
            self._searched.add(place)
            paths = [place] if place == folder else [each for each in _listed(place) if os.path.isdir(each)]
            found += islice(chain.from_iterable(map(_listed, paths)), MAX_LISTED)
        return [
            path
            for path in found
            if path.endswith(suffix) and path not in self._granted and _is_database(path, self._kind)
        ]


class _Keeper:
    """Thread that starts the workers of a pool, kills late ones, and waits for those that ended.

    The kernel ends a worker together with the thread that started it, so this one outlives them all.

    Attributes:
        living: Its workers that were not waited for.
    """

    def __init__(self, kind: Kind, *, require_sandbox: bool) -> None:
        self.living: list[Worker] = []
        self._kind = kind
        self._require_sandbox = require_sandbox
        self._asked: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        try:
            threading.Thread(target=self._run, daemon=True).start()
        except RuntimeError as error:
            raise RunError(f"cannot start a SQL worker: {error}") from error

    def start(self, readable: tuple[str, ...], version: int) -> Worker:
        """Start a worker, and wait until its process exists."""
        started: Future[Worker] = Future()
        self._asked.put((started, readable, version))
        try:
            return started.result()
        except KeyboardInterrupt:
            started.add_done_callback(lambda worker: worker.result().kill())
            raise

    def close(self) -> None:
        """End the thread after the last worker."""
        self._asked.put(None)

    def _run(self) -> None:
        is_open = True
        while is_open or self.living:
            with suppress(queue.Empty):
                asked = self._asked.get(timeout=BACKSTOP_TICK_S)
                is_open = is_open and asked is not None
                if asked is not None:
                    self._start(*asked)
            now = time.perf_counter()
            for worker in self.living:
                worker.stderr()  # before it is full
                if worker.is_dropped:
                    worker.end()
                elif now > worker.due:  # the backstop: it let a deadline pass without an answer
                    worker.is_late = True
                    worker.due = float("inf")
                    worker.kill()
            self.living = [worker for worker in self.living if not worker.is_ended]

    def _start(self, started: "Future[Worker]", readable: tuple[str, ...], version: int) -> None:
        try:
            worker = Worker(self._kind, readable, version=version, require_sandbox=self._require_sandbox)
        except Exception as error:
            started.set_exception(error)
        else:
            self.living.append(worker)
            started.set_result(worker)


class Batch:
    """Queries of one batch, shared by the threads that each wait for one worker.

    Attributes:
        query_s: Mean seconds of a query of the last message.
        none_pending: Set once no query was left to take.
    """

    def __init__(
        self,
        queries: Sequence[Query],
        limits: Limits,
        n_workers: int,
        grant: Callable[[str], int] = lambda _: 0,
    ) -> None:
        self.queries = queries
        self.limits = limits
        self.answers: list[Any] = [None] * len(queries)
        self.is_over = False
        self.query_s = CHUNK_S / FIRST_CHUNK
        self.failure: Exception | None = None
        self.none_pending = threading.Event()
        self._n_workers = n_workers
        self._grant = grant
        self._tries: Counter[int] = Counter()
        self._lock = threading.Lock()
        # Sorted by database, so that each worker opens fewer files, the largest taken first: a slow query at
        # the end would leave the other workers idle.
        keys = {
            location: (_size_of(location), location) for location in {location for location, _ in queries}
        }
        self._pending = sorted(range(len(queries)), key=lambda position: keys[queries[position][0]])
        self._alone: list[int] = []  # one of them crashed its worker
        self._died: set[int] = set()  # crashed their worker when run alone

    def next_positions(self) -> list[int]:
        """Positions of the next message's queries; empty if none is pending."""
        with self._lock:
            if self.is_over or not (self._alone or self._pending):
                self.none_pending.set()
                return []
            if self._alone:
                return [self._alone.pop()]
            size = -(-len(self._pending) // (self._n_workers * CHUNKS_PER_WORKER))
            size = min(size, MAX_CHUNK, max(1, int(CHUNK_S / self.query_s)))
            positions = self._pending[: -size - 1 : -1]
            del self._pending[len(self._pending) - len(positions) :]
            return positions

    def take(self, positions: list[int], reply: Reply, worker: Worker) -> None:
        """Store the answers, and put back queries without one."""
        answers = self.answers
        with self._lock:
            unanswered = positions[len(reply.answers) :]
            if reply.ending == "crashed" and len(positions) == 1 and unanswered:
                if worker.is_late or self._died.issuperset(unanswered):
                    answers[positions[0]] = _outcome_after_crash(self.limits, worker.is_late)
                else:
                    self._died.update(unanswered)
                    self._alone += unanswered
            elif reply.ending == "crashed":
                self._alone += unanswered
            else:
                self._pending += unanswered[::-1]
            for position, answer in zip(positions, reply.answers, strict=False):
                location = self.queries[position][0]
                if answer is None or (len(answer) == 2 and self._grant(location) > worker.version):
                    self._tries[position] += 1
                    if self._tries[position] >= MAX_TRIES:
                        raise _restless(location)
                    self._pending.append(position)
                else:
                    answers[position] = _checked(answer)

    def fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self.stop()

    def stop(self) -> None:
        """Let no thread take a further query."""
        self.is_over = True
        self.none_pending.set()


def _request(segments: list[Segment], limits: Limits) -> bytes:
    bounds = (limits.timeout_s, limits.max_rows, limits.max_bytes, limits.max_sql_bytes)
    return framed(marshalled((*bounds, segments)))


def _size_of(location: str) -> int:
    """Bytes of a database's file; 0 if there is none."""
    try:
        return os.stat(location).st_size
    except (OSError, ValueError):  # opening it raises the error
        return 0


def _by_location(queries: Iterable[Query]) -> list[Segment]:
    segments: list[Segment] = []
    last = None
    for location, sql in queries:
        if location != last:
            texts: list[str] = []
            segments.append((location, texts))
            last = location
        texts.append(sql)
    return segments


def _checked(answer: Answer) -> Answer:
    if len(answer) != 2:
        return answer
    name, text = answer
    if name != UNFORESEEN:
        kind = getattr(errors, name, None)
        raise (kind if isinstance(kind, type) and issubclass(kind, RunError) else RunError)(text)
    _log_once(f"internal error in a SQL worker, taken as an error of its query:\n{text}")
    return ("error", (), (), False, "the database engine failed on this query", 0.0, False, True)


def _log_once(text: str) -> None:
    if text not in _logged and len(_logged) < MAX_LOGGED:
        _logged.add(text)
        _logger.error(text)


def _restless(location: str) -> DataError:
    return DataError(
        f"the database file changed in each of {MAX_TRIES} tries to read it (at {location}): use a copy"
    )


def _identity(path: str, kind: Kind | None = None) -> tuple[int, int] | None:
    """Device and inode; None if there is nothing.

    Raises:
        DataError: It is neither a file nor a folder, and opening it as a database (of this kind) would wait.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # opening it raises the error
        return None
    if kind is not None and not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise DataError(f"cannot read the {kind} database file: it is not a regular file (at {path})")
    return (status.st_dev, status.st_ino)


def _listed(folder: str) -> list[str]:
    """Entries of a folder, without hidden ones; empty if it cannot be read."""
    try:
        names = sorted(os.listdir(folder))[:MAX_LISTED]
    except OSError:
        return []
    return [os.path.join(folder, name) for name in names if not name.startswith(".")]


def _is_database(path: str, kind: Kind) -> bool:
    """True for a regular file, not a link, with the engine's mark."""
    offset, mark = _MARKS[kind]
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        with open(path, "rb", buffering=0) as file:
            return file.read(offset + len(mark))[offset:] == mark
    except OSError:
        return False


def _client_files(location: str) -> set[str]:
    """Files of PostgreSQL's client that the user, the environment or the URL names."""
    home = [os.path.expanduser(f"~/{name}") for name in (".pgpass", ".postgresql", ".pg_service.conf")]
    values = [value for name, value in os.environ.items() if name.startswith("PG")]
    with suppress(ValueError):  # a malformed URL, which the worker reports
        values += [value for _, value in parse_qsl(urlsplit(location).query)]
    return {*home, *filter(os.path.isabs, values)}


def _outcome_after_crash(limits: Limits, is_late: bool) -> Answer:
    """Answer to a lone query whose worker was killed at the deadline, or crashed twice."""
    if is_late:
        return (
            "timeout",
            (),
            (),
            False,
            late_text(limits.timeout_s),
            limits.timeout_s + PATIENCE_S,
            False,
            True,
        )
    return ("error", (), (), False, "the database engine crashed on this query", 0.0, False, True)
