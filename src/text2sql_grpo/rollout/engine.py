"""Rollout of many sessions at once against one policy: tokens in, tokens out, observations masked.

One `run`, two engines. `generation` is the loop in it, for anything that continues token ids, such as TRL's
generation, and vLLM through it. `slots` is for a `SlotPolicy`, a transformers model whose layers are all
attention: it keeps keys and values across turns and computes nothing twice.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.policy import SlotPolicy
from text2sql_grpo.rollout.slots import Scheduler
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
    on_end: Callable[[R], None] | None = None,
) -> list[R]:
    """Play every session to its end, side by side.

    The loop below generates the next turn of all sessions in one call, then lets each environment reply.
    `slots` computes the same for a `SlotPolicy`, without waiting for the longest turn.

    Episodes that ran out of tokens stop with `budget` (the turn's or the episode's limit) or
    `context` (the model's) and are marked `is_masked`. No episode outgrows a limit: an observation
    that leaves no room for an answer is not appended.

    Args:
        on_end: Called with each episode as soon as it is over, in this thread; None for nothing.

    Returns:
        The episodes, in the order of the sessions.
    """
    start_all(sessions, chat, budgets)
    episodes = [session.episode for session in sessions]
    for episode in episodes:
        if on_end and episode.stop_reason is not None:  # its prompt left no room for an answer
            on_end(episode)
    if isinstance(policy, SlotPolicy):
        if waiting := [session for session in sessions if session.episode.stop_reason is None]:
            with policy.attending():
                Scheduler(waiting, policy, chat, budgets, on_end).run()
        return episodes
    while active := [i for i, episode in enumerate(episodes) if episode.stop_reason is None]:
        written = policy.generate(
            [episodes[i].prompt_ids + episodes[i].completion_ids for i in active],
            max_new_tokens=max(budgets.turn(episodes[i]) for i in active),
        )
        log_probs = [None] * len(active) if written.log_probs is None else written.log_probs
        for i, sampled, probs in zip(active, written.ids, log_probs, strict=True):
            take_turn(sessions[i], sampled, chat, budgets, log_probs=probs)  # and the reply to it
            if on_end and episodes[i].stop_reason is not None:
                on_end(episodes[i])
    return episodes
