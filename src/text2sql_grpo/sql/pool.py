"""Pool of worker processes that can be killed: scheduling of queries, restarts, retries.

Needs neither signals nor fork nor readiness of pipes: a thread that waits for a worker blocks in a read, and
the worker, or the backstop thread here, ends that wait.
"""

import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from text2sql_grpo import errors
from text2sql_grpo.sql.address import Kind
from text2sql_grpo.sql.failure_text import late_text
from text2sql_grpo.sql.frames import framed, marshalled
from text2sql_grpo.sql.outcome import Limits
from text2sql_grpo.sql.worker_process import PATIENCE_S, Answer, KilledAtStart, Reply, Worker

MAX_CHUNK = 256  # queries in one message
FIRST_CHUNK = 8  # the same, before the first timing of a query
CHUNKS_PER_WORKER = 4  # of a batch, so that no worker waits long for the slowest
CHUNK_S = 0.004  # of slow queries, for the same reason; long beside the 0.1 ms that a message costs
BACKSTOP_TICK_S = 0.25
MAX_STARTS = 10  # for one message, of workers killed from outside before they are ready

Query = tuple[str, str]  # location and SQL
Segment = tuple[str, list[str]]  # a location and the queries on it, one after the other


class WorkerPool:
    """At most `n_workers` processes for one kind of database, started when they are needed."""

    def __init__(self, kind: Kind, n_workers: int) -> None:
        self._kind = kind
        self._n_workers = n_workers
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._idle: list[Worker] = []  # the last one used comes first, for its memory is warm
        self._workers: set[Worker] = set()
        self._ended: list[Worker] = []  # not waited for yet
        self._n_started = 0
        self._n_waiting = 0
        self._is_over = threading.Event()
        self._is_watched = False

    def reset_after_fork(self) -> None:
        """Drop the parent's workers; this process starts its own."""
        for worker in [*self._workers, *self._ended]:
            worker.forget()
        self._reset()

    def close(self) -> None:
        """End the idle workers now and the busy ones after their current request."""
        with self._lock:
            idle, self._idle = self._idle, []
            self._workers = set()
            self._n_started = 0
            self._is_watched = False
            self._is_over.set()
            self._is_over = threading.Event()
        for worker in idle:
            worker.end()
        self._reap()

    def run_one(self, location: str, sql: str, limits: Limits) -> Answer:
        """Run one query.

        Raises:
            RunError: The database is at fault, or the executor.
        """
        request = _request([(location, [sql])], limits)
        has_died = False
        while True:
            (answers, _, ending), is_late = self._ask(request, 1, limits)
            answer = answers[0] if answers else None
            if answer is not None:
                return answer if len(answer) != 2 else _checked(answer)
            if ending == "crashed":
                if has_died or is_late:
                    return _outcome_after_crash(limits, is_late)
                has_died = True  # the process may have been killed from outside: run the query once more

    def run(self, queries: Sequence[Query], limits: Limits) -> tuple[list[Answer], bool]:
        """Answers to many queries in order, and whether all of them are cacheable.

        Raises:
            RunError: A database is at fault, or the executor.
        """
        batch = _Batch(queries, limits, self._n_workers)
        n_threads = min(self._n_workers, len(queries)) - 1
        threads = [threading.Thread(target=self._serve, args=(batch,), daemon=True) for _ in range(n_threads)]
        for thread in threads:
            thread.start()
        try:
            self._serve(batch)
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C: the others stop after the message they wait for
            batch.is_over = True
            raise
        if batch.failure is not None:
            raise batch.failure
        return batch.answers, batch.is_plain

    def _serve(self, batch: "_Batch") -> None:
        try:
            while positions := batch.next_positions():
                queries = [batch.queries[position] for position in positions]
                request = _request(_by_location(queries), batch.limits)
                started = time.perf_counter()
                reply, is_late = self._ask(request, len(positions), batch.limits)
                batch.query_s = (time.perf_counter() - started) / len(positions)
                batch.take(positions, reply, is_late)
        except Exception as error:
            batch.fail(error)

    def _ask(self, request: bytes, n_queries: int, limits: Limits) -> tuple[Reply, bool]:
        for _ in range(MAX_STARTS - 1):
            try:
                return self._ask_worker(request, n_queries, limits)
            except KilledAtStart:
                continue
        return self._ask_worker(request, n_queries, limits)

    def _ask_worker(self, request: bytes, n_queries: int, limits: Limits) -> tuple[Reply, bool]:
        worker = self._take()
        is_alive = False
        # A thread that polls takes time from others that work.
        is_soon = n_queries == 1 and len(self._idle) + 1 >= self._n_started
        try:
            reply = worker.ask(request, n_queries, limits.timeout_s, is_soon=is_soon)
            is_alive = not reply.ending
            return reply, worker.is_late
        finally:
            self._give_back(worker, is_alive)

    def _take(self) -> Worker:
        with self._lock:
            while not self._idle:
                if self._n_started < self._n_workers:
                    return self._start()
                self._n_waiting += 1
                self._free.wait()
                self._n_waiting -= 1
            return self._idle.pop()

    def _give_back(self, worker: Worker, is_alive: bool) -> None:
        with self._lock:
            is_member = worker in self._workers
            if is_member and is_alive:
                self._idle.append(worker)
            elif is_member:
                self._workers.discard(worker)
                self._n_started -= 1
                worker.kill()
                self._ended.append(worker)  # its memory may take long to free
                if not self._idle and self._n_started + 1 < self._n_workers:
                    self._idle.insert(0, self._start())  # a spare: late queries come in series
                self._idle.insert(0, self._start())  # gets ready while others work
            if self._n_waiting:
                self._free.notify()
        if not is_member:
            worker.end()

    def _start(self) -> Worker:
        worker = Worker(self._kind)
        self._n_started += 1
        self._workers.add(worker)
        if not self._is_watched:
            self._is_watched = True
            threading.Thread(target=self._kill_late, args=(self._is_over,), daemon=True).start()
        return worker

    def _reap(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        for worker in ended:
            worker.end()

    def _kill_late(self, is_over: threading.Event) -> None:
        """Kill workers that let a deadline pass without an answer (the backstop)."""
        while not is_over.wait(BACKSTOP_TICK_S):
            self._reap()
            now = time.perf_counter()
            for worker in self._workers.copy():
                if now > worker.due:
                    worker.is_late = True
                    worker.due = float("inf")
                    worker.kill()


class _Batch:
    """Queries of one batch, shared by the threads that each wait for one worker.

    Attributes:
        query_s: Mean seconds of a query of the last message.
    """

    def __init__(self, queries: Sequence[Query], limits: Limits, n_workers: int) -> None:
        self.queries = queries
        self.limits = limits
        self.answers: list[Any] = [None] * len(queries)
        self.is_plain = True
        self.is_over = False
        self.query_s = CHUNK_S / FIRST_CHUNK
        self.failure: Exception | None = None
        self._n_workers = n_workers
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
            if self.is_over:
                return []
            if self._alone:
                return [self._alone.pop()]
            size = -(-len(self._pending) // (self._n_workers * CHUNKS_PER_WORKER))
            size = min(size, MAX_CHUNK, max(1, int(CHUNK_S / self.query_s)))
            positions = self._pending[: -size - 1 : -1]
            del self._pending[len(self._pending) - len(positions) :]
            return positions

    def take(self, positions: list[int], reply: Reply, is_late: bool) -> None:
        """Store the answers, and put back queries without one."""
        answers = self.answers
        for position, answer in zip(positions, reply.answers, strict=False):
            answers[position] = answer
        if reply.is_plain and not reply.ending:
            return
        with self._lock:
            self.is_plain = False
            unanswered = positions[len(reply.answers) :]
            if reply.ending == "crashed" and len(positions) == 1 and unanswered:
                if is_late or self._died.issuperset(unanswered):
                    answers[positions[0]] = _outcome_after_crash(self.limits, is_late)
                else:
                    self._died.update(unanswered)
                    self._alone += unanswered
            elif reply.ending == "crashed":
                self._alone += unanswered
            else:
                self._pending += unanswered[::-1]
            for position, answer in zip(positions, reply.answers, strict=False):
                if answer is None:
                    self._pending.append(position)
                else:
                    _checked(answer)

    def fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self.is_over = True


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
    if len(answer) == 2:
        name, text = answer
        raise getattr(errors, name)(text)
    return answer


def _outcome_after_crash(limits: Limits, is_late: bool) -> Answer:
    """Answer to a lone query whose worker was killed at the deadline, or crashed twice."""
    if is_late:
        return ("timeout", (), (), False, late_text(limits.timeout_s), limits.timeout_s + PATIENCE_S, True)
    return ("error", (), (), False, "the database engine crashed on this query", 0.0, True)
