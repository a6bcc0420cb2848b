"""Conversion of calls and replies between OpenAI's chat format and the native protocol's text."""

import json
from collections.abc import Iterable
from typing import Any

from text2sql_grpo.environment.protocols import is_deep


def turn_text(thinking: str | None, content: str | None, calls: Iterable[tuple[str, str]]) -> str:
    """Text of an assistant message for the protocols.

    Args:
        thinking: Reasoning that the server split off the text.
        calls: Tool calls that the server parsed: names, and arguments as text.
    """
    thoughts = f"<think>{thinking}</think>" if thinking else ""
    written = [call_text(name, _read(arguments)) for name, arguments in calls]
    return "".join([thoughts, content or "", *written])


def reply_messages(calls: Iterable[Any] | None, text: str) -> list[dict[str, str]]:
    """Messages of a session's reply: one per structured call, or a user message."""
    answers = [{"role": "tool", "tool_call_id": call.id, "content": text} for call in calls or ()]
    return answers or [{"role": "user", "content": text}]


def call_text(name: str, arguments: Any) -> str:
    """Text of one call in the form of Qwen's template, malformed ones too.

    >>> print(call_text("run_sql", {"sql": "SELECT 'é'"}))
    <tool_call>
    {"name": "run_sql", "arguments": {"sql": "SELECT 'é'"}}
    </tool_call>
    """
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _read(arguments: str) -> object:
    """Parse arguments; text that is no JSON, or nested too deeply, is kept for the protocol to refuse."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return arguments if is_deep(value) else value
