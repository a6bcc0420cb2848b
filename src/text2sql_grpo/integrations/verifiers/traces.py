"""Traces of verifiers: as episodes of this package, and as records for filters of chats."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment import tool_calls
from text2sql_grpo.environment.episode import Episode, Message
from text2sql_grpo.environment.protocols import tool_schema
from text2sql_grpo.environment.session import SQLEnvironment, SQLSession
from text2sql_grpo.environment.tools import FunctionBackend, ToolResult
from text2sql_grpo.errors import RunError
from text2sql_grpo.files import read_jsonl
from text2sql_grpo.grading import Verdict
from text2sql_grpo.rewards import Answer
from text2sql_grpo.run_folder import TRACES

OUT_OF_TOKENS = "max_total_tokens"  # a stop condition of verifiers
FULL_REWARD = 1.0


def turn_text(message: vf.AssistantMessage) -> str:
    """Text of an assistant message for the protocols."""
    calls = [(call.name, call.arguments) for call in message.tool_calls or []]
    return tool_calls.turn_text(message.reasoning_content, message.content, calls)


def is_cut(trace: vf.Trace) -> bool:
    """True if the last turn was truncated."""
    answered = [call for call in trace.calls if call.error is None]
    return trace.stop_condition == OUT_OF_TOKENS or bool(answered and answered[-1].finish_reason == "length")


def rebuilt_episode(trace: vf.Trace, example: Example, environment: SQLEnvironment) -> Episode:
    """Rebuild the episode of a trace, with its actions (without outcomes) and its final SQL.

    Turns after the submission or the turn limit do not count. A truncated episode has no submission; see
    `trace.is_truncated`.
    """
    backend = FunctionBackend(environment.tools, lambda name, arguments: ToolResult(""))
    session = SQLSession(example, schema_text="", backend=backend, settings=environment.settings)
    session.episode.completion_mask = [1] * trace.num_output_tokens
    turns = [turn_text(message) for message in trace.assistant_messages]
    if is_cut(trace) and (trace.stop_condition == OUT_OF_TOKENS or not session.holds_action(turns[-1])):
        turns.pop()
    for text in turns:
        if session.step(text) is None:
            break
    return session.episode


def plain(message: Any) -> Message:
    """Message for chat templates.

    Raises:
        RunError: It holds more than text.
    """
    content = message.content or ""
    if not isinstance(content, str):
        if others := [part.type for part in content if part.type != "text"]:
            raise RunError(f"messages must be text only, got {others[0]} ({message.role})")
        content = "\n".join(part.text for part in content)
    return {"role": message.role, "content": content}


def trace_records(folder: Path) -> Iterator[dict[str, Any]]:
    """Record of each trace of `vf-eval` or a training run: its task, messages, tools, reward, and `strict`.

    A trace is right (`strict`) if its reward is 1 or more. It is masked if it is not ok, was truncated, has
    several branches, or more than one reply to a turn.

    Raises:
        DataError: The file is missing, or it holds something else.
    """
    seen: Counter[str] = Counter()
    for trace in _traces(folder):
        name = str(trace.task.key)
        yield _record(trace) | {"example": name, "sample": seen[name]}
        seen[name] += 1


def episode_records(
    folder: Path, examples: Mapping[str, Example], environment: SQLEnvironment
) -> Iterator[dict[str, Any]]:
    """Record of each trace whose question is known, as `Answer.record` writes one; see `rebuilt_episode`."""
    for trace in _traces(folder):
        if (example := examples.get(str(trace.task.data.id))) is None:
            continue
        episode = rebuilt_episode(trace, example, environment)
        unjudged = Verdict(official=False, strict=False, reason="not_submitted", executes=False)
        strict = bool(trace.metrics.get("strict", trace.reward >= FULL_REWARD))
        stop = episode.stop_reason  # None of one that was cut
        ended = {"stop_reason": stop or "budget", "is_masked": stop is None or not trace.ok}
        yield Answer(episode, unjudged).record() | _record(trace) | ended | {"strict": strict}


def _traces(folder: Path) -> Iterator[vf.Trace]:
    def read(episode: dict[str, Any]) -> list[vf.Trace]:
        return [vf.WireTrace.model_validate(trace) for trace in episode["traces"]]

    for traces in read_jsonl(folder / TRACES, "traces of verifiers", convert=read):
        yield from traces


def _record(trace: vf.Trace) -> dict[str, Any]:
    messages = [
        {"role": "assistant", "content": turn_text(message)}
        if message.role == "assistant"
        else dict(plain(message))
        for message in trace.messages
    ]
    tools = trace.branches[-1].tools if trace.branches else []
    schemas = [tool_schema(tool.name, tool.description, tool.parameters) for tool in tools]
    is_whole = trace.ok and not trace.is_truncated and trace.num_branches == 1
    return {
        "messages": messages,
        "stop_reason": "submitted",
        "is_masked": not (is_whole and _alternates(messages)),
        "strict": trace.reward >= FULL_REWARD,
        "reward": trace.reward,
        **({"tools": schemas} if schemas else {}),
    }


def _alternates(messages: Sequence[dict[str, str]]) -> bool:
    """True if assistant turns and single replies alternate from the first turn to the last."""
    is_turn = [message["role"] == "assistant" for message in messages]
    turns = is_turn[is_turn.index(True) :] if any(is_turn) else []
    return turns == [number % 2 == 0 for number in range(len(turns))] and len(turns) % 2 == 1
