"""Episode rebuilt from the messages of a trace."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment import tool_calls
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.environment.session import SQLEnvironment, SQLSession
from text2sql_grpo.environment.tools import ToolResult

if TYPE_CHECKING:
    import verifiers.v1 as vf  # type: ignore[import-untyped, import-not-found, unused-ignore]

OUT_OF_TOKENS = "max_total_tokens"  # a stop condition of verifiers


def turn_text(message: "vf.AssistantMessage") -> str:
    """Text of an assistant message for the protocols."""
    calls = [(call.name, call.arguments) for call in message.tool_calls or []]
    return tool_calls.turn_text(message.reasoning_content, message.content, calls)


def is_cut(trace: "vf.Trace") -> bool:
    """True if the last turn was truncated, so that it is no action."""
    answered = [call for call in trace.calls if call.error is None]
    return trace.stop_condition == OUT_OF_TOKENS or bool(answered and answered[-1].finish_reason == "length")


@dataclass(frozen=True)
class _Replay:
    """Tool backend that runs nothing, to rebuild actions without outcomes."""

    tools: list[dict[str, Any]]

    def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult("")


def played_episode(trace: "vf.Trace", example: Example, environment: SQLEnvironment) -> Episode:
    """Rebuild the episode with its actions (without outcomes) and its final SQL.

    Turns after the submission or the turn limit do not count. A truncated episode has no submission; see
    `trace.is_truncated`.
    """
    backend = _Replay(environment.tools)
    session = SQLSession(example, schema_text="", backend=backend, settings=environment.settings)
    session.episode.completion_mask = [1] * trace.num_output_tokens
    turns = [turn_text(message) for message in trace.assistant_messages]
    for text in turns[:-1] if is_cut(trace) else turns:
        if session.step(text) is None:
            break
    return session.episode
