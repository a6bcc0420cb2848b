"""Queue of the queries of many sessions, served in rotation."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class TooManyQueries(Exception):
    """A session has as many waiting queries as it may have; the text is shown to the client."""


@dataclass
class _Session:
    """Places of one session, and its turn: only one of its queries at a time is in the common queue."""

    places: asyncio.Semaphore
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0


class FairQueue:
    """Turns at running queries, dealt to the sessions in rotation. Belongs to one event loop.

    Args:
        running: Maximum number of queries that run at the same time, >= 1.
        waiting_each: Maximum number of waiting queries of one session.
    """

    def __init__(self, running: int, *, waiting_each: int) -> None:
        self._places = asyncio.Semaphore(running)
        self._places_each = max(1, running // 2)  # the other half is free for the next session
        self._waiting_each = waiting_each
        self._sessions: WeakValueDictionary[str, _Session] = WeakValueDictionary()  # while they have queries

    async def run(self, session: str, query: Callable[[], Awaitable[T]]) -> T:
        """Run a query in its session's turn.

        If the caller is cancelled, a waiting query leaves the queue, and a running one is cancelled.

        Raises:
            TooManyQueries: Too many of the session's queries wait.
        """
        own = self._sessions.setdefault(session, _Session(asyncio.Semaphore(self._places_each)))
        if own.waiting >= self._waiting_each:
            raise TooManyQueries(
                f"{own.waiting} queries of this session wait already: send more when they are answered"
            )
        async with AsyncExitStack() as places:
            own.waiting += 1
            try:
                async with own.turn:
                    await places.enter_async_context(own.places)
                    await places.enter_async_context(self._places)
            finally:
                own.waiting -= 1
            return await query()
