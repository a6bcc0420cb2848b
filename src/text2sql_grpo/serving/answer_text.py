"""Answers in Markdown, and as records for the page."""

from typing import Any

from text2sql_grpo.environment.episode import Action, Episode
from text2sql_grpo.environment.observation import ObservationLimits, cell_text, observation_text
from text2sql_grpo.evaluation.bench import Asked
from text2sql_grpo.reporting.shown import outcome_record
from text2sql_grpo.serving.agent import Reply
from text2sql_grpo.sql import ExecutionOutcome

MAX_ROWS, MAX_CELL = 20, 60
_LOOK = ObservationLimits(max_rows=8, max_cell_chars=MAX_CELL, max_chars=2_000)
_ESCAPED = str.maketrans({mark: f"\\{mark}" for mark in "\\`|*_[]"} | {"<": "&lt;", ">": "&gt;"})


def look_text(action: Action) -> str:
    """One turn before the answer: its query with the rows, or why it could not be read.

    In a code block, since front ends show it as Markdown: an image in a cell would be fetched.
    """
    if action.kind == "malformed":
        return f"A turn could not be read:\n\n{_fenced(action.error)}\n\n"
    rows = observation_text(action.outcome, _LOOK) if action.outcome is not None else ""
    return _fenced(f"{action.sql}\n\n{rows}") + "\n\n"


def reply_text(reply: Reply) -> str:
    """The answer in Markdown: query and table; of a failure the query to edit. Never empty."""
    parts = [_asked_text(reply.asked)]
    if reply.confidence is not None and not reply.is_sure:
        parts.insert(0, f"I am not sure: {reply.confidence:.0%} of the answers agree on this one.")
        if reply.other is not None:
            parts.append(f"Another reading:\n\n{_asked_text(reply.other)}")
    return "\n\n".join(parts)


def _asked_text(asked: Asked) -> str:
    sql = _last_sql(asked.episode)
    if asked.result is None or not asked.result.is_ok:
        which = "Its last" if asked.result is None else "The"
        query = f"\n\n{which} query, to edit:\n\n{_fenced(sql, 'sql')}" if sql else ""
        return f"There is no answer:\n\n{_fenced(asked.failure)}{query}"
    return f"{_fenced(sql, 'sql')}\n\n{table_text(asked.result)}"


def _last_sql(episode: Episode) -> str:
    """The final query, else the last one that was tried; empty if there is none."""
    return next((action.sql for action in reversed(episode.actions) if action.sql), "")


def table_text(outcome: ExecutionOutcome) -> str:
    """Table of the first rows in Markdown; markup in cells is escaped."""
    rows = [
        [cell_text(cell, MAX_CELL).translate(_ESCAPED) for cell in row]
        for row in (outcome.columns, *outcome.rows[:MAX_ROWS])
    ]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, f"|{' --- |' * len(outcome.columns)}")
    total = f"{len(outcome.rows)}{' or more' if outcome.is_truncated else ''}"
    return "\n".join(lines) + f"\n\n{total} row{'' if total == '1' else 's'}"


def reply_record(reply: Reply) -> dict[str, Any]:
    """Answer for the page."""

    def one(asked: Asked) -> dict[str, Any]:
        result = outcome_record(asked.result, is_for_page=True)
        question, sql = asked.episode.example.question, _last_sql(asked.episode)
        return {"question": question, "sql": sql, "failure": asked.failure, "result": result}

    return one(reply.asked) | {
        "confidence": reply.confidence,
        "is_sure": reply.is_sure,
        "other": None if reply.other is None else one(reply.other),
        "seconds": round(reply.seconds, 2),
    }


def _fenced(text: str, language: str = "") -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"
