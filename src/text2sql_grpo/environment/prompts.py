"""Prompt texts. An edit here is an experiment: it changes the model's input (EXPERIMENTS.md, prompts)."""

from collections.abc import Sequence
from typing import Any

from text2sql_grpo.environment.episode import Action
from text2sql_grpo.environment.protocols import TOOLS, Protocol

_TASK = (
    "You answer a question about a {engine} database with one SQL query. "
    "Values may be stored otherwise than the question says them: look before you answer."
)
_HOW = {
    "tags": (
        "Each turn is one action. Write <sql>SELECT ...</sql> to run a query and see its rows, or "
        "<answer>SELECT ...</answer> to submit the final query. You may think first inside <think></think>."
    ),
    "native": (
        "Each turn is one tool call alone, without other text: {names}, "
        "or submit_sql to submit the final query."
    ),
}
_HOW_AT_ONCE = {
    "tags": (
        "Submit the query inside <answer></answer>, for example: <answer>SELECT COUNT(*) FROM car</answer>\n"
        "You may think first inside <think></think>."
    ),
    "native": "Reply with one call of the tool submit_sql alone, without other text.",
}
_THE_QUERY = "Submit the SQL query itself, never its rows."
_EXAMPLE = {
    "tags": (
        "For example, to count the red cars, <sql>SELECT DISTINCT colour FROM car</sql> shows that red is "
        "stored as R, and <answer>SELECT COUNT(*) FROM car WHERE colour = 'R'</answer> ends the task."
    ),
    "native": (
        'For example, to count the red cars, {"name": "run_sql", "arguments": {"sql": '
        '"SELECT DISTINCT colour FROM car"}} shows that red is stored as R, and '
        '{"name": "submit_sql", "arguments": {"sql": "SELECT COUNT(*) FROM car WHERE colour = '
        "'R'\"}} ends the task."
    ),
}
_SUBMIT = {
    "tags": ("write <answer>{}</answer>", "SELECT ..."),
    "native": ("call submit_sql with {}", "the query"),
}
MAX_REPEATED_CHARS = 300  # of a query that the line under its rows repeats


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
    if max_turns == 1:
        how = f"{_HOW_AT_ONCE[protocol]}\n{_THE_QUERY}\nYou have 1 turn."
        return f"{_TASK.partition('. ')[0].format(engine=engine)}.\n{how}"
    names = [tool["function"]["name"] for tool in tools if tool["function"]["name"] != "submit_sql"]
    shown = ", ".join(names) if list(tools) != TOOLS else "run_sql to run a query and see its rows"
    how = _HOW[protocol].format(names=shown)
    rules = f"{how}\n{_THE_QUERY}\n{_EXAMPLE[protocol]}"
    return f"{_TASK.format(engine=engine)}\n{rules}\nYou have {max_turns} turns."


def turns_left_text(protocol: Protocol, turns_left: int, actions: Sequence[Action], *, is_error: bool) -> str:
    """Line under a reply for a model that was not trained on this format: what is left to do."""
    last = actions[-1]
    is_repeated = bool(last.sql) and any(action.sql == last.sql for action in actions[:-1])
    again = "the same query as before; " if is_repeated else ""
    how, query = _SUBMIT[protocol]
    if not is_error and 0 < len(last.sql) <= MAX_REPEATED_CHARS:
        query = last.sql
    submit = how.format(query)
    if turns_left == 1:
        return f"({again}1 turn left: {submit})"
    if last.kind == "call_tool":
        return ""
    if last.kind == "malformed":
        hint = submit
    else:
        hint = "write another query" if is_error else f"if these rows answer the question, {submit}"
    return f"({again}{turns_left} turns left: {hint})"


def not_a_query_text(protocol: Protocol) -> str:
    """Error of a submission that holds a result in place of a query."""
    how, query = _SUBMIT[protocol]
    return f"expected the SQL query itself, got a value or text: {how.format(query)}"


def user_text(question: str, schema_text: str) -> str:
    """Schema and question, in this order: questions about one database share the longest possible prefix."""
    return f"{schema_text}\n\n{question}"
