"""Prompt texts. An edit here is an experiment: it changes the model's input."""

from collections.abc import Sequence
from typing import Any

from text2sql_grpo.environment.protocols import TOOLS, Protocol

_TASK = (
    "You answer a question about a {engine} database with one SQL query. "
    "Values may be stored otherwise than the question says them: look before you answer."
)
_HOW = {
    "tags": (
        "Each turn is one action. Write <sql>query</sql> to run a query and see its rows, or "
        "<answer>query</answer> to submit the final query. You may think first inside <think></think>."
    ),
    "native": (
        "Each turn is one tool call: run_sql to run a query and see its rows, "
        "or submit_sql to submit the final query."
    ),
}


def system_text(
    protocol: Protocol,
    max_turns: int,
    *,
    tools: Sequence[dict[str, Any]] = TOOLS,
    engine: str = "SQLite",
) -> str:
    """Instructions for a model that was not trained on this format.

    Args:
        tools: JSON schemas of the tools, in the native protocol.
        engine: Name of the database's engine, with its version if that matters.
    """
    how = _HOW[protocol]
    if protocol == "native" and list(tools) != TOOLS:
        names = [tool["function"]["name"] for tool in tools if tool["function"]["name"] != "submit_sql"]
        how = f"Each turn is one tool call: {', '.join(names)}, or submit_sql to submit the final query."
    return f"{_TASK.format(engine=engine)}\n{how}\nYou have {max_turns} turns."


def user_text(question: str, schema_text: str) -> str:
    """Schema and question, in this order: questions about one database share the longest possible prefix."""
    return f"{schema_text}\n\n{question}"
