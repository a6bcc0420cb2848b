"""Episodes shown on a terminal, by a `TextConsole`."""

import math
from typing import Any

import sqlparse
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from sqlparse.exceptions import SQLParseError

from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.environment.observation import cell_text
from text2sql_grpo.evaluation.bench import Asked
from text2sql_grpo.phrases import many
from text2sql_grpo.rewards import Answer
from text2sql_grpo.sql.outcome import Cell, ExecutionOutcome

_MAX_ROWS, _MAX_CELL_CHARS = 20, 60


def formatted(sql: str) -> str:
    """Format a query over several lines; only blanks change, and none inside one too deep for sqlparse."""
    try:
        return str(sqlparse.format(sql, reindent=True)).strip()
    except (SQLParseError, RecursionError):
        return sql.strip()


def show_answer(answer: Answer, set_name: str, console: Console) -> None:
    """Print one question whole."""
    episode, verdict, example = answer.episode, answer.verdict, answer.example
    console.print(Rule(f"{set_name}: {example.id} (database {example.database})", align="left"))
    console.print(f"question: {example.question}", style="bold")
    _show_turns(episode, console)
    console.print("final SQL:", style="cyan")
    console.print(_indented(formatted(episode.final_sql) if episode.final_sql else "none submitted"))
    if not verdict.strict:
        console.print("gold SQL:", style="cyan")
        console.print(_indented(formatted(example.gold_sql)))
    console.print(
        Text.assemble(
            ("RIGHT" if verdict.strict else "WRONG", "bold green" if verdict.strict else "bold red"),
            f" ({verdict.reason})  strict: {_yes(verdict.strict)}  official: {_yes(verdict.official)}",
            f"  stopped: {episode.stop_reason}\n",
        )
    )


def show_line(answer: Answer, console: Console) -> None:
    """Print a question and its final query, a line each."""
    verdict, sql = answer.verdict, answer.episode.final_sql
    mark = ("right ", "bold green") if verdict.strict else ("wrong ", "bold red")
    reason = "" if verdict.strict else f" ({verdict.reason.replace('_', ' ')})"
    question = Text.assemble(mark, f"{answer.example.question}{reason}")
    query = Text(f"      {' '.join(sql.split()) if sql else 'no query'}", "dim")
    for line in (question, query):
        console.print(line, no_wrap=True, overflow="ellipsis")


def _yes(is_right: bool) -> str:
    return "yes" if is_right else "no"


def show_asked(asked: Asked, console: Console) -> None:
    """Print an answer."""
    episode = asked.episode
    _show_turns(episode, console)
    if episode.final_sql is not None:
        console.print("answer", style="bold green" if not asked.failure else "bold red")
        show_query(episode.final_sql, asked.result, console)
    if asked.failure:
        console.print(asked.failure, style="bold red", soft_wrap=True)


def _show_turns(episode: Episode, console: Console) -> None:
    """Print the turns before the final query."""
    for turn, action in enumerate(episode.actions, 1):
        if action.kind == "submit_sql":
            continue
        console.print(f"turn {turn} of {episode.max_turns}: {action.kind}", style="cyan")
        if action.kind == "malformed":
            console.print(_indented(action.error))
        else:
            show_query(action.sql, action.outcome, console)


def show_query(sql: str, outcome: ExecutionOutcome | None, console: Console) -> None:
    """Print a query, and its rows or its error if it ran."""
    console.print(_indented(formatted(sql)))
    if outcome is None:
        return
    if not outcome.is_ok:
        console.print(_indented(f"Error: {outcome.error}"), style="red")
        return
    header, *rows = (
        [cell_text(cell, _MAX_CELL_CHARS) for cell in row]
        for row in (outcome.columns, *outcome.rows[:_MAX_ROWS])
    )
    table = Table(*header, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    console.print(table if outcome.rows else _indented("no rows"))
    if len(outcome.rows) > len(rows) or outcome.is_truncated:
        more = "more than " if outcome.is_truncated else ""
        console.print(_indented(f"{len(rows)} of {more}{many(len(outcome.rows), 'row')}"))


def _indented(text: str) -> Padding:
    return Padding(text, (0, 2))


def asked_record(asked: Asked) -> dict[str, Any]:
    """Fields of `ask --json`."""
    episode = asked.episode
    return {
        "question": episode.example.question,
        "turns": [
            {"kind": one.kind, "sql": one.sql, "error": one.error, "result": outcome_record(one.outcome)}
            for one in episode.actions
        ],
        "final_sql": episode.final_sql,
        "result": outcome_record(asked.result),
        "stop_reason": episode.stop_reason,
        "failure": asked.failure,
    }


def outcome_record(
    outcome: ExecutionOutcome | None, max_rows: int | None = None, *, is_for_page: bool = False
) -> dict[str, Any] | None:
    """Record for JSON, with bytes and infinity as text; at most `max_rows` rows, all for None.

    For a page, integers are text too beyond 2^53 - 1, from where JavaScript rounds them.
    """
    if outcome is None:
        return None
    largest = 2**53 - 1 if is_for_page else math.inf
    rows = [[_json_cell(cell, largest) for cell in row] for row in outcome.rows[:max_rows]]
    return {
        "status": outcome.status,
        "columns": list(outcome.columns),
        "rows": rows,
        "is_truncated": outcome.is_truncated or len(rows) < len(outcome.rows),
        "error": outcome.error,
    }


def _json_cell(cell: Cell, largest_int: float) -> Cell:
    if isinstance(cell, int) and abs(cell) > largest_int:
        return str(cell)
    is_number = not isinstance(cell, float) or math.isfinite(cell)
    return cell if is_number and not isinstance(cell, bytes) else cell_text(cell, _MAX_CELL_CHARS)
