"""SFT data: golds demonstrated in the real environment, and collected chats."""

import json
from dataclasses import dataclass
from typing import Any

from text2sql_grpo.config import SFTSettings
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Episode, Message
from text2sql_grpo.environment.protocols import Protocol
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.environment.tool_calls import call_text
from text2sql_grpo.errors import DataError
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.slots import shared_length


@dataclass(frozen=True)
class Demonstration:
    """One chat to train on.

    Attributes:
        ids: T token ids of the whole chat.
        weights: T weights in the loss; 0 for tokens that are not the assistant's.
    """

    ids: list[int]
    weights: list[float]


def action_text(name: str, sql: str, protocol: Protocol) -> str:
    """Text of an assistant turn that calls `run_sql` or `submit_sql`.

    >>> action_text("submit_sql", "SELECT 1", "tags")
    '<answer>SELECT 1</answer>'
    """
    if protocol == "native":
        return call_text(name, {"sql": sql})
    tag = "sql" if name == "run_sql" else "answer"
    return f"<{tag}>{sql}</{tag}>"


def scripted_episode(
    example: Example, query: str | None, answer: str, environment: SQLEnvironment, chat: ChatFormat
) -> Episode:
    """Episode that runs a query and submits an answer; tokens and mask are as in training.

    Args:
        query: None for none; left out where the environment allows a single turn.
    """
    session = environment.session(example)
    episode, settings = session.episode, environment.settings
    episode.prompt_ids = chat.prompt_ids(session.start())
    turns = [action_text("submit_sql", answer, settings.protocol)]
    if query is not None and settings.max_turns > 1:
        turns.insert(0, action_text("run_sql", query, settings.protocol))
    for turn in turns:
        sampled = chat.turn_ids(turn)
        episode.completion_ids += sampled
        episode.completion_mask += [1] * len(sampled)
        reply = session.step(turn)
        if reply is None:
            break
        bridge = chat.bridge_ids(reply, last_token_id=sampled[-1])
        episode.completion_ids += bridge
        episode.completion_mask += [0] * len(bridge)
    return episode


def weighted_demonstrations(
    example: Example, environment: SQLEnvironment, chat: ChatFormat, settings: SFTSettings
) -> list[Demonstration]:
    """Demonstrations of a question with and without its exploratory query, weighted by their shares.

    Both are in every batch with the question, so that the shares are exact instead of sampled.
    """
    share = settings.look_share if example.look_sql else settings.check_share if example.check_sql else 0.0
    if environment.settings.max_turns == 1:
        share = 0.0
    return [
        demonstrate(
            example, environment, chat, looks=looks, weight=weight, choice_weight=settings.choice_weight
        )
        for looks, weight in ((True, share), (False, 1 - share))
        if weight
    ]


def demonstrate(
    example: Example,
    environment: SQLEnvironment,
    chat: ChatFormat,
    *,
    looks: bool = True,
    weight: float = 1.0,
    choice_weight: float = 1.0,
) -> Demonstration:
    """Demonstrate the gold answer of a question.

    Args:
        looks: Run the question's exploratory query first, if it has one and the environment allows two turns.
            Without it, a look-up question is answered with `guess_sql`.
        weight: Weight of an assistant's token.
        choice_weight: Factor of the first token by which the turns of both choices differ.
    """
    query = example.look_sql or example.check_sql
    looks = looks and query is not None and environment.settings.max_turns > 1
    answer = example.gold_sql if looks else example.guess_sql or example.gold_sql
    protocol = environment.settings.protocol
    first = chat.turn_ids(action_text("run_sql", query or answer, protocol))
    last = chat.turn_ids(action_text("submit_sql", answer, protocol))
    episode = scripted_episode(example, query if looks else None, answer, environment, chat)
    weights = [weight * flag for flag in episode.completion_mask]
    weights[shared_length(first, last)] *= choice_weight
    return Demonstration(
        episode.prompt_ids + episode.completion_ids, [0.0] * len(episode.prompt_ids) + weights
    )


def chat_demonstration(record: dict[str, Any], chat: ChatFormat) -> Demonstration:
    """Tokenize a collected chat turn by turn, as a rollout does; needs no template with generation marks.

    Args:
        record: `messages`, the last one an assistant's, and `tools` if the chat has its own.

    Raises:
        DataError: `messages` are missing or malformed, or two turns are in a row.
    """
    messages = _messages(record)
    roles = [message["role"] for message in messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    is_turn = [role == "assistant" for role in roles[first:]]
    if not first or len(is_turn) % 2 == 0:
        raise DataError(f"a chat must end with an assistant, got the roles {', '.join(roles)}")
    if any(is_turn[1::2]) or not all(is_turn[::2]):
        raise DataError(f"a reply must stand between two turns, got the roles {', '.join(roles)}")
    ids = chat.prompt_ids(messages[:first])
    weights = [0.0] * len(ids)
    for message in messages[first:]:
        if message["role"] == "assistant":
            written, weight = chat.turn_ids(message["content"]), 1.0
        else:
            written, weight = chat.bridge_ids(message, last_token_id=ids[-1]), 0.0
        ids += written
        weights += [weight] * len(written)
    return Demonstration(ids, weights)


def _messages(record: dict[str, Any]) -> list[Message]:
    messages = record.get("messages")
    if not isinstance(messages, list):
        raise DataError(f"the chat has no list of messages, only {', '.join(record) or 'nothing'}")
    for message in messages:
        texts = [message.get(name) for name in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"a message needs a role and content (text), got {json.dumps(message)[:200]}")
    return messages
