"""Many sessions at once against one policy: tokens in, tokens out, observations masked.

One `run`, two engines. `slots` keeps keys and values across turns and computes nothing twice; it plays
a `SlotPolicy`, a transformers model with full attention. `generation` plays anything that continues
token ids: TRL's own generation, and vLLM through it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from text2sql_grpo.rollout import slots
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.policy import SlotPolicy
from text2sql_grpo.rollout.turns import Budgets, Continuations, R, Session, start_all, take_turn

__all__ = ["Budgets", "Continuations", "Policy", "Session", "SlotPolicy", "run"]


class Policy(Protocol):
    """Anything that continues token ids."""

    def generate(self, prompts: list[list[int]], *, max_new_tokens: int) -> Continuations:
        """One continuation per prompt, 1 to `max_new_tokens` tokens, its end-of-turn token included."""


def run(
    sessions: Sequence[Session[R]],
    policy: Policy | SlotPolicy,
    chat: ChatFormat,
    budgets: Budgets,
    *,
    first_turns: Sequence[str] | None = None,
    on_end: Callable[[R], None] = lambda episode: None,
) -> list[R]:
    """Plays every session to its end, side by side: by slots a `SlotPolicy`, else turn by turn.

    Episodes that ran out of tokens stop with `budget` (the turn's or the episode's limit) or
    `context` (the model's) and are marked `is_masked`. No episode outgrows a limit: an observation
    that leaves no room for an answer is not appended.

    Args:
        first_turns: One first assistant turn per session that is given, not sampled; the rest is the
            policy's own. None to let the policy begin.
        on_end: Called with each episode as soon as it is over, in this thread.

    Returns:
        The episodes, in the order of the sessions.
    """
    start_all(sessions, chat, budgets)
    for session in sessions:
        if session.episode.stop_reason is not None:
            on_end(session.episode)
    if isinstance(policy, SlotPolicy):
        slots.play(sessions, policy, chat, budgets, first_turns=first_turns, on_end=on_end)
    else:
        _play_turn_by_turn(sessions, policy, chat, budgets, first_turns=first_turns, on_end=on_end)
    return [session.episode for session in sessions]


def _play_turn_by_turn(
    sessions: Sequence[Session[R]],
    policy: Policy,
    chat: ChatFormat,
    budgets: Budgets,
    *,
    first_turns: Sequence[str] | None,
    on_end: Callable[[R], None],
) -> None:
    """The `generation` engine: everybody's turn is generated in one call, then everybody's reply made."""

    def take(session: Session[R], turn: list[int], log_probs: list[float] | None) -> None:
        take_turn(session, turn, chat, budgets, log_probs=log_probs)
        if session.episode.stop_reason is not None:
            on_end(session.episode)

    if first_turns is not None:
        for session, text in zip(sessions, first_turns, strict=True):
            if session.episode.stop_reason is None:
                turn = chat.turn_ids(text)
                take(session, turn, [0.0] * len(turn))
    while active := [session for session in sessions if session.episode.stop_reason is None]:
        written = policy.generate(
            [session.episode.prompt_ids + session.episode.completion_ids for session in active],
            max_new_tokens=max(budgets.turn(session.episode) for session in active),
        )
        log_probs = [None] * len(active) if written.log_probs is None else written.log_probs
        for session, sampled, probs in zip(active, written.ids, log_probs, strict=True):
            take(session, sampled, probs)
