"""Texts of an answer, for clients that show Markdown."""

from typing import Any

from text2sql_grpo.environment.episode import Action
from text2sql_grpo.environment.observation import ObservationLimits, cell_text, observation_text
from text2sql_grpo.evaluation.bench import Asked
from text2sql_grpo.serving.agent import Reply
from text2sql_grpo.sql import ExecutionOutcome

MAX_ROWS, MAX_CELL = 20, 60
MAX_SENT_ROWS = 500
_LOOK = ObservationLimits(max_rows=8, max_cell_chars=MAX_CELL, max_chars=2_000)


def look_text(action: Action) -> str:
    """One turn before the answer: its query with the rows, or why it could not be read."""
    if action.kind == "malformed":
        return f"A turn could not be read: {action.error}\n\n"
    rows = observation_text(action.outcome, _LOOK) if action.outcome is not None else ""
    return f"{action.sql}\n\n{rows}\n\n"


def reply_text(reply: Reply) -> str:
    """The answer in Markdown: query and table; of a failure the query to edit. Never empty."""
    parts = [_asked_text(reply.asked)]
    if reply.confidence is not None and not reply.is_sure:
        parts.insert(0, f"I am not sure: {reply.confidence:.0%} of the answers agree on this one.")
        if reply.other is not None:
            parts.append(f"Another reading:\n\n{_asked_text(reply.other)}")
    return "\n\n".join(parts)


def _asked_text(asked: Asked) -> str:
    sql = asked.episode.final_sql
    if sql is None:
        tried = [action.sql for action in asked.episode.actions if action.sql]
        last = f" Its last query, to edit:\n\n{_fenced(tried[-1])}" if tried else ""
        return f"There is no answer: {asked.failure}.{last}"
    if asked.failure:
        return f"There is no answer: {asked.failure}. The query, to edit:\n\n{_fenced(sql)}"
    assert asked.result is not None
    return f"{_fenced(sql)}\n\n{table_text(asked.result)}"


def table_text(outcome: ExecutionOutcome) -> str:
    """Table of the first rows in Markdown; markup in cells is escaped."""
    rows = [outcome.columns, *outcome.rows[:MAX_ROWS]]
    lines = [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    lines.insert(1, f"|{' --- |' * len(outcome.columns)}")
    total = f"{len(outcome.rows)}{' or more' if outcome.is_truncated else ''}"
    return "\n".join(lines) + f"\n\n{total} row{'' if total == '1' else 's'}"


def outcome_record(outcome: ExecutionOutcome | None) -> dict[str, Any] | None:
    """Rows for the page: at most 500, numbers as they are, everything else as text."""
    if outcome is None:
        return None
    rows = [
        [cell if isinstance(cell, int | float) or cell is None else str(cell)[:1_000] for cell in row]
        for row in outcome.rows[:MAX_SENT_ROWS]
    ]
    return {
        "ok": outcome.is_ok,
        "error": outcome.error,
        "columns": list(outcome.columns),
        "rows": rows,
        "more": outcome.is_truncated or len(outcome.rows) > MAX_SENT_ROWS,
    }


def _fenced(sql: str) -> str:
    fence = "```"
    while fence in sql:
        fence += "`"
    return f"{fence}sql\n{sql}\n{fence}"


def _cell(cell: Any) -> str:
    text = cell_text(cell, MAX_CELL).replace("\n", " ")
    for mark in "\\`|<>*_[]":
        text = text.replace(mark, f"\\{mark}" if mark not in "<>" else {"<": "&lt;", ">": "&gt;"}[mark])
    return text
