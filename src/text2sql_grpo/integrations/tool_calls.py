"""Tool calls that arrive as structures, written as the text that the native protocol reads."""

import json
from typing import Any


def call_text(name: str, arguments: Any) -> str:
    """One call as Qwen's template writes it; what is wrong with it is left for the protocol to say.

    >>> call_text("run_sql", {"sql": "SELECT 1"})
    '<tool_call>{"name": "run_sql", "arguments": {"sql": "SELECT 1"}}</tool_call>'
    """
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def read_arguments(arguments: str) -> object:
    """Arguments as a server wrote them, which may be no JSON: then the protocol says so."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
