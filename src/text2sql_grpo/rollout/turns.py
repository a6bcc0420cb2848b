"""Budget and effect of a turn, the same for every engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from text2sql_grpo.environment.episode import Message, Rollout, StopReason
from text2sql_grpo.rollout.chat_format import ChatFormat

R = TypeVar("R", bound=Rollout)
R_co = TypeVar("R_co", bound=Rollout, covariant=True)


class Session(Protocol[R_co]):
    """Interface of `SQLSession`, or of anything else that answers a policy's turns.

    Attributes:
        episode: Its record; engines fill in the tokens.
    """

    @property
    def episode(self) -> R_co: ...

    def start(self) -> list[Message]:
        """Build the prompt."""

    def step(self, assistant_text: str) -> Message | None:
        """Reply to one assistant turn; None if the episode is over, its stop reason set."""

    def holds_action(self, cut_text: str) -> bool:
        """True if a turn that was cut by its limit of tokens is taken as it is; else the episode ends."""


@dataclass(frozen=True)
class Budgets:
    """Token limits of an episode.

    Attributes:
        max_turn_tokens: Maximum sampled tokens of one turn.
        max_episode_tokens: Maximum tokens after the prompt, observations included.
        max_context: Maximum tokens of prompt and episode together: the model's context length.
    """

    max_turn_tokens: int
    max_episode_tokens: int
    max_context: int

    def left(self, episode: Rollout) -> int:
        """Tokens left to the episode."""
        written = len(episode.completion_ids)
        return min(
            self.max_episode_tokens - written,
            self.max_context - len(episode.prompt_ids) - written,
        )

    def turn(self, episode: Rollout) -> int:
        """Maximum tokens of its next turn."""
        return min(self.max_turn_tokens, self.left(episode))


@dataclass(frozen=True)
class Continuations:
    """Continuations of some prompts.

    Attributes:
        ids: Token ids of each continuation, 1 or more, an end-of-turn token included.
        log_probs: Log-probability of each token at sampling, NaN if unknown; None if the policy has none.
    """

    ids: list[list[int]]
    log_probs: list[list[float]] | None = None


def start_all(sessions: Sequence[Session[Rollout]], chat: ChatFormat, budgets: Budgets) -> None:
    """Start every session; a prompt that leaves no room for an answer ends its episode at once."""
    encoded: dict[tuple[str, ...], list[int]] = {}
    for session in sessions:
        messages = session.start()
        key = tuple(text for message in messages for text in message.values())
        if key not in encoded:
            encoded[key] = chat.prompt_ids(messages)
        session.episode.prompt_ids = list(encoded[key])
        if budgets.left(session.episode) <= 0:
            _cut(session.episode, budgets)


def take_turn(
    session: Session[Rollout],
    sampled: list[int],
    chat: ChatFormat,
    budgets: Budgets,
    *,
    log_probs: Sequence[float] | None = None,
) -> None:
    """Append a turn to the episode, step the session, and append the reply.

    Sets a stop reason if the episode ended with it. A turn that is cut by its own limit counts if it holds a
    whole action. An observation that leaves no room for an answer is not appended.

    Args:
        sampled: 1 or more token ids; those over the budget are dropped.
        log_probs: One per sampled token; None if the engine has none.
    """
    episode = session.episode
    is_turn_limit = budgets.max_turn_tokens < budgets.left(episode)
    sampled = sampled[: budgets.turn(episode)]
    _append(episode, sampled, 1, log_probs)
    text = chat.text(sampled)
    if sampled[-1] not in chat.eos_token_ids and not (is_turn_limit and session.holds_action(text)):
        episode.messages.append({"role": "assistant", "content": text})
        _cut(episode, budgets, is_turn_limit=is_turn_limit)
        return
    reply = session.step(text)
    if reply is None:
        return
    bridge = chat.bridge_ids(reply, last_token_id=sampled[-1])
    if len(bridge) >= budgets.left(episode):
        _cut(episode, budgets, unwritten=len(bridge))
        return
    _append(episode, bridge, 0, None if log_probs is None else [0.0] * len(bridge))


def _append(episode: Rollout, ids: list[int], flag: int, log_probs: Sequence[float] | None) -> None:
    episode.completion_ids += ids
    episode.completion_mask += [flag] * len(ids)
    episode.log_probs = [] if log_probs is None else [*episode.log_probs, *log_probs[: len(ids)]]


def _cut(episode: Rollout, budgets: Budgets, *, unwritten: int = 0, is_turn_limit: bool = False) -> None:
    wanted = len(episode.prompt_ids) + len(episode.completion_ids) + unwritten
    reason: StopReason = "turn_length" if is_turn_limit else "budget"
    episode.stop_reason = "context" if wanted >= budgets.max_context else reason
    episode.is_masked = True
