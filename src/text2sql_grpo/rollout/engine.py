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


def run(
    sessions: Sequence[SQLSession],
    policy: Policy,
    chat: ChatFormat,
    budgets: Budgets,
    *,
    first_turns: Sequence[str] | None = None,
) -> list[Episode]:
    """Plays every session to its end, all of them turn by turn side by side.

    Episodes that ran out of tokens stop with `budget` (the turn's or the episode's limit) or
    `context` (the model's) and are marked `is_masked`. No episode outgrows a limit: an observation
    that leaves no room for an answer is not appended.

    Args:
        first_turns: One first assistant turn per session that is given, not sampled; the rest is the
            policy's own. None to let the policy begin.

    Returns:
        The episodes, in the order of the sessions.
    """
    for session in sessions:
        session.episode.prompt_ids = chat.prompt_ids(session.start())
        if _left(session.episode, budgets) <= 0:
            _cut(session.episode, budgets)
    if first_turns is not None:
        for session, turn in zip(sessions, first_turns, strict=True):
            if session.episode.stop_reason is None:
                _take_turn(session, chat.turn_ids(turn), chat, budgets)
    while active := [session for session in sessions if session.episode.stop_reason is None]:
        replies = policy.generate(
            [session.episode.prompt_ids + session.episode.completion_ids for session in active],
            max_new_tokens=min(
                budgets.max_turn_tokens, max(_left(session.episode, budgets) for session in active)
            ),
        )
        for session, sampled in zip(active, replies, strict=True):
            _take_turn(session, sampled, chat, budgets)
    return [session.episode for session in sessions]


def _left(episode: Episode, budgets: Budgets) -> int:
    """Tokens that the episode may still grow by."""
    written = len(episode.completion_ids)
    return min(
        budgets.max_episode_tokens - written,
        budgets.max_context - len(episode.prompt_ids) - written,
    )


def _cut(episode: Episode, budgets: Budgets, *, unwritten: int = 0) -> None:
    wanted = len(episode.prompt_ids) + len(episode.completion_ids) + unwritten
    reason: StopReason = "context" if wanted >= budgets.max_context else "budget"
    episode.stop_reason = reason
    episode.is_masked = True


def _take_turn(session: SQLSession, sampled: list[int], chat: ChatFormat, budgets: Budgets) -> None:
    episode = session.episode
    sampled = sampled[: min(budgets.max_turn_tokens, _left(episode, budgets))]
    episode.completion_ids += sampled
    episode.completion_mask += [1] * len(sampled)
    if sampled[-1] not in chat.eos_token_ids:
        _cut(episode, budgets)
        return
    reply = session.step(chat.text(sampled))
    if reply is None:
        return
    bridge = chat.bridge_ids(reply, last_token_id=sampled[-1])
    if len(bridge) >= _left(episode, budgets):
        _cut(episode, budgets, unwritten=len(bridge))
        return
    episode.completion_ids += bridge
    episode.completion_mask += [0] * len(bridge)
