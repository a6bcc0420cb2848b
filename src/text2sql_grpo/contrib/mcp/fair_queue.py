"""Queue of the queries of many sessions, served in rotation."""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class TooManyQueries(Exception):
    """A session has as many waiting queries as it may have; the text is shown to the client."""


class FairQueue:
    """Turns at running queries, dealt to the sessions in rotation. Belongs to one event loop.

    Args:
        running: Maximum number of queries that run at the same time, >= 1.
        waiting_each: Maximum number of waiting queries of one session.
    """

    def __init__(self, running: int, *, waiting_each: int) -> None:
        self._free = running
        self._running_each = max(1, running // 2)  # the other half is free for the next session
        self._waiting_each = waiting_each
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the session whose turn it is comes first

    async def run(self, session: str, query: Callable[[], Awaitable[T]]) -> T:
        """Run a query in its session's turn.

        If the caller is cancelled, a waiting query leaves the queue, and a running one is cancelled.

        Raises:
            TooManyQueries: Too many of the session's queries wait.
        """
        waiting = self._waiting.setdefault(session, deque())
        if len(waiting) >= self._waiting_each:
            raise TooManyQueries(
                f"{len(waiting)} queries of this session wait already: send more when they are answered"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        self._deal()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn came at the same time
                self._end(session)
            elif turn in waiting:
                waiting.remove(turn)
            raise
        try:
            return await query()
        finally:
            self._end(session)

    def _end(self, session: str) -> None:
        self._free += 1
        self._running[session] -= 1
        self._deal()

    def _deal(self) -> None:
        for session in list(self._waiting):
            waiting = self._waiting[session]
            while waiting and waiting[0].cancelled():
                waiting.popleft()
            if waiting and self._free and self._running[session] < self._running_each:
                waiting.popleft().set_result(None)
                self._free -= 1
                self._running[session] += 1
                self._waiting[session] = self._waiting.pop(session)  # to the end
            if not waiting:
                self._waiting.pop(session)
        self._running += Counter()  # drops zeros
        if self._free and any(self._can_run(session) for session in self._waiting):
            self._deal()

    def _can_run(self, session: str) -> bool:
        waiting = self._waiting[session]
        return bool(waiting) and self._running[session] < self._running_each
