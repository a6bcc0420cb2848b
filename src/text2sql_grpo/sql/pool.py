"""Pool of worker processes that can be killed: scheduling of queries, restarts, retries.

Needs neither signals nor fork nor readiness of pipes: a thread that waits for a worker blocks in a read, and
the worker, or the backstop thread here, ends that wait.
"""

import logging
import queue
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import Any

from text2sql_grpo import errors
from text2sql_grpo.errors import DataError, RunError
from text2sql_grpo.sql.address import Kind
from text2sql_grpo.sql.failure_text import failed, late_text
from text2sql_grpo.sql.frames import UNFORESEEN, framed, marshalled
from text2sql_grpo.sql.grants import Grants
from text2sql_grpo.sql.outcome import Limits
from text2sql_grpo.sql.worker_process import PATIENCE_S, Answer, KilledAtStart, Worker

MAX_CHUNK = 256  # queries in one message
CHUNKS_PER_WORKER = 4  # of what is left of a batch, so that no worker waits long for the slowest
GROW_S = 0.15  # of a batch on idle workers, before more start: some 0.04 s of processor time each
BACKSTOP_TICK_S = 0.25
MAX_TRIES = 100  # of one query, on a file that changes while it is read
MAX_LOGGED = 100
MAX_STARTS = 10  # for one message, of workers killed from outside before they are ready

Query = tuple[str, str]  # location and SQL

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

    def watch(self, worker: Worker | None) -> None:
        """Let `set` kill this worker, and no other."""
        with self._lock:
            self._worker = worker
            if worker is not None and self.is_set:
                worker.kill()


class WorkerPool:
    """At most `n_workers` processes for one kind of database, started when they are needed."""

    def __init__(
        self, kind: Kind, n_workers: int, *, require_sandbox: bool = False, folders: Iterable[str] = ()
    ) -> None:
        """Create a pool without workers; see `SQLExecutor` and `Grants` for the options."""
        self._kind = kind
        self._n_workers = n_workers
        self._require_sandbox = require_sandbox
        self._grants = Grants(kind, folders)
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._idle: list[Worker] = []  # the last one used comes first, for its memory is warm
        self._workers: set[Worker] = set()  # those that are idle or in use
        self._keeper: _Keeper | None = None

    def forget(self) -> None:
        """Close the pipes of the workers, after a fork: they are the parent's."""
        if self._keeper is not None:
            for worker in self._keeper.living:
                worker.forget()

    def close(self) -> None:
        """End the idle workers now and the busy ones after their current request."""
        with self._lock:
            ended, self._idle, self._workers = self._idle, [], set()
            keeper, self._keeper = self._keeper, None
        if keeper is not None:
            for worker in ended + [worker for worker in keeper.living if worker.is_dropped]:
                worker.end()
            keeper.close()

    def workers(self) -> dict[int, bool]:
        """Process ids of the workers, and whether each runs a query now."""
        with self._lock:
            return {worker.pid: worker.is_busy for worker in self._workers}

    def sandbox(self) -> tuple[str, ...]:
        """Parts of the sandbox that a worker's kernel enforces; starts one if none is idle."""
        return self._ask([], Limits(), Cancellation())[1].sandbox

    def run(
        self, queries: Sequence[Query], limits: Limits, cancellation: Cancellation | None = None
    ) -> list[Answer]:
        """Answers to queries in order.

        Args:
            queries: Run in parallel, if they take longer than starting more workers.
            limits: Bounds of each query.
            cancellation: Stops a lone query, which ends as an error; None if nothing does.

        Raises:
            RunError: A database is at fault, or the executor.
        """
        if len(queries) == 1:
            return self._answers(queries, limits, cancellation)
        answers: list[Any] = [None] * len(queries)
        chunks = iter(list(_chunks(queries, self._n_workers)))  # shared: a list's iterator is thread-safe
        failures: list[BaseException] = []
        none_pending = threading.Event()

        def serve(wait_s: float) -> None:
            none_pending.wait(wait_s)
            try:
                for positions in chunks:
                    found = self._answers([queries[position] for position in positions], limits)
                    for position, answer in zip(positions, found, strict=True):
                        answers[position] = answer
                    if failures:
                        break
            except Exception as error:
                failures.append(error)
            none_pending.set()

        threads = []
        for number in range(1, min(self._n_workers, len(queries))):
            wait_s = 0.0 if number < len(self._idle) else GROW_S
            thread = threading.Thread(target=serve, args=(wait_s,), daemon=True)
            with suppress(RuntimeError):  # no more threads: the others do its work
                thread.start()
                threads.append(thread)
        try:
            serve(0.0)
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C: the others stop after the message they wait for
            failures.append(error)
            raise
        if failures:
            raise failures[0]
        return answers

    def _answers(
        self, queries: Sequence[Query], limits: Limits, cancellation: Cancellation | None = None
    ) -> list[Answer]:
        """Answers to the queries of one message, which is sent again from the first one without an answer."""
        cancellation = cancellation or Cancellation()
        answers: list[Answer] = []
        n_asked = len(queries)
        n_tries = n_crashes = 0  # of the first query without an answer
        while len(answers) < len(queries):
            n_before = len(answers)
            asked = queries[n_before : n_before + n_asked]
            found, worker = self._ask(asked, limits, cancellation)
            if cancellation.is_set:
                return [failed("error", "cancelled")]
            for (location, _), answer in zip(asked, found, strict=False):
                if answer is None or (len(answer) == 2 and self._grants.grant(location) > worker.version):
                    break  # its file changed, or another one took its place
                answers.append(_checked(answer))
            if len(answers) > n_before:
                n_tries = n_crashes = 0
            n_tries += 1
            if n_tries == MAX_TRIES:
                raise DataError(
                    f"the database file changed in each of {MAX_TRIES} tries to read it"
                    f" (at {asked[0][0]}): use a copy"
                )
            if worker.has_crashed and len(asked) > 1:
                n_asked = 1  # one of them crashed it
            elif worker.has_crashed:
                n_crashes += 1  # the first may come from outside: run the query once more
                if worker.is_late or n_crashes == 2:
                    late = failed("timeout", late_text(limits.timeout_s), limits.timeout_s + PATIENCE_S)
                    crashed = failed("error", "the database engine crashed on this query")
                    answers.append(late if worker.is_late else crashed)
                    n_tries = n_crashes = 0
        return answers

    def _ask(
        self, queries: Sequence[Query], limits: Limits, cancellation: Cancellation
    ) -> tuple[list[Answer | None], Worker]:
        """Answers of one worker, and the worker; fewer than queries if it ended."""
        segments: list[tuple[str, list[str]]] = []  # a location, and the queries on it one after the other
        version = 0
        for location, same in groupby(queries, itemgetter(0)):
            version = max(version, self._grants.version_of(location))
            segments.append((location, [sql for _, sql in same]))
        request = framed(marshalled((vars(limits), segments)))
        n_starts = 0
        while True:
            worker = self._take(version)
            try:
                worker.wait_until_ready(require_sandbox=self._require_sandbox)
                cancellation.watch(worker)
                answers = worker.ask(request, len(queries), limits)
                if worker.has_crashed and (text := worker.stderr()):
                    _log_once(f"a SQL worker crashed; its stderr:\n{text}")
                return answers, worker
            except KilledAtStart:
                n_starts += 1
                if n_starts == MAX_STARTS:
                    raise
            finally:
                cancellation.watch(None)
                self._give_back(worker)

    def _take(self, version: int) -> Worker:
        """Idle worker that may read what was granted up to this version, or a new one."""
        with self._lock:
            try:
                while True:
                    for index in range(len(self._idle) - 1, -1, -1):
                        if self._idle[index].version >= version:
                            return self._idle.pop(index)
                    if self._idle:
                        self._drop(self._idle.pop(0))
                    if len(self._workers) < self._n_workers:
                        return self._start()
                    self._free.wait()
            except BaseException:
                self._free.notify()  # the next one in the queue may have more luck, or fails as well
                raise

    def _give_back(self, worker: Worker) -> None:
        with self._lock:
            is_member = worker in self._workers
            if is_member and worker.is_free:
                self._idle.append(worker)
            elif is_member:
                self._drop(worker)
                with suppress(RunError):  # raised again in a thread that needs one
                    self._idle.insert(0, self._start())  # gets ready while others work
            self._free.notify()
        if not is_member:
            worker.end()

    def _drop(self, worker: Worker) -> None:
        self._workers.discard(worker)
        worker.kill()
        worker.is_dropped = True  # the keeper waits for it, because its memory may take long to free

    def _start(self) -> Worker:
        if self._keeper is None:
            self._keeper = _Keeper(self._kind)
        worker = self._keeper.start(*self._grants.snapshot())
        self._workers.add(worker)
        return worker


class _Keeper:
    """Thread that starts the workers of a pool, kills late ones, and waits for those that ended.

    The kernel ends a worker together with the thread that started it, so this one outlives them all.
    """

    def __init__(self, kind: Kind) -> None:
        self.living: list[Worker] = []  # those that were not waited for
        self._kind = kind
        self._asked = queue.SimpleQueue[tuple[Future[Worker], tuple[str, ...], int] | None]()
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
                if worker.is_dropped:
                    worker.end()
                elif now > worker.due:  # the backstop: it let a deadline pass without an answer
                    worker.is_late = True
                    worker.due = float("inf")
                    worker.kill()
            self.living = [worker for worker in self.living if not worker.is_ended]

    def _start(self, started: "Future[Worker]", readable: tuple[str, ...], version: int) -> None:
        try:
            worker = Worker(self._kind, readable, version=version)
        except Exception as error:
            started.set_exception(error)
        else:
            self.living.append(worker)
            started.set_result(worker)


def _chunks(queries: Sequence[Query], n_workers: int) -> Iterator[list[int]]:
    """Positions of the queries of each message: by database, so that a worker opens few, and ever fewer."""
    positions = sorted(range(len(queries)), key=[location for location, _ in queries].__getitem__)
    while positions:
        n_queries = min(MAX_CHUNK, -(-len(positions) // (n_workers * CHUNKS_PER_WORKER)))
        yield positions[:n_queries]
        positions = positions[n_queries:]


def _checked(answer: Answer) -> Answer:
    if len(answer) != 2:
        return answer
    name, text = answer
    if name != UNFORESEEN:
        kind = getattr(errors, name, None)
        raise (kind if isinstance(kind, type) and issubclass(kind, RunError) else RunError)(text)
    _log_once(f"internal error in a SQL worker, taken as an error of its query:\n{text}")
    return failed("error", "the database engine failed on this query")


def _log_once(text: str) -> None:
    words = re.sub(r"\w*\d\w*", "", text)  # addresses and line numbers differ each time
    if words not in _logged and len(_logged) < MAX_LOGGED:
        _logged.add(words)
        _logger.error(text)
