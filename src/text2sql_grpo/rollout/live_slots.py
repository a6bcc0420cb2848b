"""Engine `slots` for sessions that arrive while others run, as a server gets them.

Prefixes that sessions share, such as the schema of a database, stay in the cache between sessions.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.policy import SlotPolicy
from text2sql_grpo.rollout.slots import Family, Row, Scheduler
from text2sql_grpo.rollout.turns import Budgets, Session

MAX_PREFIXES = 8


@dataclass(frozen=True)
class Arrival:
    """A started session.

    Attributes:
        session: The session; its prompt has at least one token more than `prefix`.
        prefix: Token ids that its prompt begins with and that other sessions share; may be empty.
    """

    session: Session[Any]
    prefix: tuple[int, ...]


class Inbox(Protocol):
    """Source of sessions, and receiver of their ends."""

    def take(self, *, wait: bool) -> Sequence[Arrival] | None:
        """Sessions that arrived since the last call, after a `wait` for one; None if no more will come."""

    def end(self, session: Session[Any], error: BaseException | None) -> None:
        """Receive a finished session, with the internal failure that ended it."""


def serve(inbox: Inbox, policy: SlotPolicy, chat: ChatFormat, budgets: Budgets, *, max_rows: int) -> None:
    """Roll out arriving sessions, at most `max_rows` at once, until the inbox ends."""
    with policy.attending():
        _LiveScheduler(inbox, policy, chat, budgets, max_rows).run()


class _LiveScheduler(Scheduler):
    """Scheduler that receives sessions between two forward passes."""

    def __init__(
        self, inbox: Inbox, policy: SlotPolicy, chat: ChatFormat, budgets: Budgets, max_rows: int
    ) -> None:
        super().__init__([], policy, chat, budgets, None, max_rows=max_rows)
        self._inbox = inbox
        self._draws = list(range(self._max_rows))  # free rows of uniform numbers
        self._kept: OrderedDict[tuple[int, ...], Family] = OrderedDict()

    def _play(self) -> None:
        while self._receive():
            self._admit()
            self._take_replies()
            if self._rows:
                self._step()

    def _receive(self) -> bool:
        is_idle = not self._rows and not self._families
        arrived = self._inbox.take(wait=is_idle)
        for one in arrived or ():
            family = self._family(one.prefix)
            family.waiting.append(one.session)
            if family not in self._families:
                self._families.append(family)
        return arrived is not None or not is_idle

    def _family(self, prefix: tuple[int, ...]) -> Family:
        """Family of a prefix, which stays until `MAX_PREFIXES` others were used after it."""
        family = self._kept.pop(prefix, None) or Family(list(prefix), deque(), is_kept=True)
        self._kept[prefix] = family
        while len(self._kept) > MAX_PREFIXES:
            _, oldest = self._kept.popitem(last=False)
            oldest.is_kept = False
            self._drop_unused(oldest)
        return family

    def _add_row(self, session: Session[Any], family: Family) -> None:
        draw = self._draws.pop()
        self._order[id(session)] = draw
        self._uniforms[draw] = self._policy.sampling.uniforms(1, self._uniforms.shape[1])[0]
        super()._add_row(session, family)

    def _end(self, row: Row, error: BaseException | None) -> None:
        self._evict(row)
        self._draws.append(self._order.pop(id(row.session)))
        self._inbox.end(row.session, error)
