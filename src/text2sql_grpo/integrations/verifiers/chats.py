"""Traces of `vf-eval` or a training run as records for filters of chats."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-untyped, import-not-found, unused-ignore]
from pydantic import ValidationError
from verifiers.v1.utils.trace_store import TRACES_FILE, read_episodes  # type: ignore[import-untyped, import-not-found, unused-ignore]

from text2sql_grpo.environment.protocols import tool_schema
from text2sql_grpo.errors import DataError
from text2sql_grpo.integrations.verifiers.task_session import plain
from text2sql_grpo.integrations.verifiers.transcript import turn_text

FULL_REWARD = 1.0


def trace_records(folder: Path) -> Iterator[dict[str, Any]]:
    """Record of each trace: its task, messages, tools, reward, and `strict`.

    A trace is right (`strict`) if its reward is 1 or more. It is masked if it is not ok, was truncated, has
    several branches, or more than one reply to a turn.

    Raises:
        DataError: No such file, or it holds something else.
    """
    try:
        episodes = read_episodes(folder, vf.WireTrace)
    except (OSError, ValueError, KeyError, ValidationError) as error:
        raise DataError(f"cannot read traces of verifiers: {error} ({folder / TRACES_FILE})") from error
    seen: Counter[str] = Counter()
    for trace in (trace for episode in episodes for trace in episode.traces):
        name = str(trace.task.key)
        tools = trace.branches[-1].tools if trace.branches else []
        schemas = [tool_schema(tool.name, tool.description, tool.parameters) for tool in tools]
        messages = [_message(message) for message in trace.messages]
        is_whole = trace.ok and not trace.is_truncated and trace.num_branches == 1
        yield {
            "example": name,
            "sample": seen[name],
            "messages": messages,
            "stop_reason": "submitted",
            "is_masked": not (is_whole and _takes_turns(messages)),
            "strict": trace.reward >= FULL_REWARD,
            "reward": trace.reward,
            **({"tools": schemas} if schemas else {}),
        }
        seen[name] += 1


def _takes_turns(messages: Sequence[dict[str, str]]) -> bool:
    said = [message["role"] == "assistant" for message in messages]
    turns = said[said.index(True) :] if any(said) else []
    return turns == [number % 2 == 0 for number in range(len(turns))] and len(turns) % 2 == 1


def _message(message: Any) -> dict[str, str]:
    if message.role == "assistant":
        return {"role": "assistant", "content": turn_text(message)}
    return dict(plain(message))
