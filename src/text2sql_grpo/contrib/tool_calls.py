"""Tools, calls and their answers between the chat format of OpenAI and the text of the native protocol."""

import json
from collections.abc import Iterable
from typing import Any


def turn_text(thinking: str | None, content: str | None, calls: Iterable[tuple[str, str]]) -> str:
    """An assistant message as the protocols read it.

    Args:
        thinking: What the server took out of the text.
        calls: Those that the server parsed: names, and arguments as it wrote them.
    """
    return "".join(
        [
            f"<think>{thinking}</think>" if thinking else "",
            content or "",
            *(call_text(name, _read(arguments)) for name, arguments in calls),
        ]
    )


def tool_schema(name: str, description: str | None, parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool as chat templates and endpoints take it."""
    function = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def reply_messages(calls: Iterable[Any] | None, text: str) -> list[dict[str, str]]:
    """A session's reply: every structured call must be answered, text is answered by the user."""
    answers = [{"role": "tool", "tool_call_id": call.id, "content": text} for call in calls or ()]
    return answers or [{"role": "user", "content": text}]


def call_text(name: str, arguments: Any) -> str:
    """One call as Qwen's template writes it; what is wrong with it is left for the protocol to say.

    >>> print(call_text("run_sql", {"sql": "SELECT 'é'"}))
    <tool_call>
    {"name": "run_sql", "arguments": {"sql": "SELECT 'é'"}}
    </tool_call>
    """
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _read(arguments: str) -> object:
    """Arguments as a server wrote them, which may be no JSON: then the protocol says so."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
