"""Many sessions at once against one policy: tokens in, tokens out, observations masked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from text2sql_grpo.environment.episode import Episode, StopReason
from text2sql_grpo.environment.session import SQLSession
from text2sql_grpo.rollout.chat_format import ChatFormat


class Policy(Protocol):
    """Anything that continues token ids."""

    def generate(self, prompts: list[list[int]], *, max_new_tokens: int) -> list[list[int]]:
        """One continuation per prompt, 1 to `max_new_tokens` tokens, its end-of-turn token included."""


@dataclass(frozen=True)
class Budgets:
    """Token limits of an episode.

    Attributes:
        max_turn_tokens: Sampled in one turn.
        max_episode_tokens: After the prompt, observations included.
        max_context: Prompt and episode together: the model's longest context.
    """

    max_turn_tokens: int
    max_episode_tokens: int
    max_context: int


def run(sessions: Sequence[SQLSession], policy: Policy, chat: ChatFormat, budgets: Budgets) -> list[Episode]:
    """Plays every session to its end, all of them turn by turn side by side.

    Episodes that ran out of tokens stop with `budget` (the turn's or the episode's limit) or
    `context` (the model's) and are marked `is_masked`.

    Returns:
        The episodes, in the order of the sessions.
    """
    for session in sessions:
        session.episode.prompt_ids = chat.prompt_ids(session.start())
    active = list(sessions)
    while active:
        room = {id(session): _room(session.episode, budgets) for session in active}
        for session in active:
            if room[id(session)] <= 0:
                _cut(session.episode, budgets)
        active = [session for session in active if session.episode.stop_reason is None]
        if not active:
            break
        replies = policy.generate(
            [session.episode.prompt_ids + session.episode.completion_ids for session in active],
            max_new_tokens=max(room[id(session)] for session in active),
        )
        for session, sampled in zip(active, replies, strict=True):
            _take_turn(session, sampled[: room[id(session)]], chat, budgets)
        active = [session for session in active if session.episode.stop_reason is None]
    return [session.episode for session in sessions]


def _room(episode: Episode, budgets: Budgets) -> int:
    """Tokens that the next turn may hold."""
    written = len(episode.completion_ids)
    return min(
        budgets.max_turn_tokens,
        budgets.max_episode_tokens - written,
        budgets.max_context - len(episode.prompt_ids) - written,
    )


def _cut(episode: Episode, budgets: Budgets) -> None:
    used = len(episode.prompt_ids) + len(episode.completion_ids)
    reason: StopReason = "context" if used >= budgets.max_context else "budget"
    episode.stop_reason = reason
    episode.is_masked = True


def _take_turn(session: SQLSession, sampled: list[int], chat: ChatFormat, budgets: Budgets) -> None:
    episode = session.episode
    episode.completion_ids += sampled
    episode.completion_mask += [1] * len(sampled)
    if sampled[-1] not in chat.eos_token_ids:
        _cut(episode, budgets)
        return
    reply = session.step(chat.text(sampled))
    if reply is not None:
        bridge = chat.bridge_ids(reply, last_token_id=sampled[-1])
        episode.completion_ids += bridge
        episode.completion_mask += [0] * len(bridge)
