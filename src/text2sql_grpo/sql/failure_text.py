"""Answers to failed queries with their texts for the model, checks of a query, and cuts of its values.

Imported by the workers: nothing heavy here.
"""

from __future__ import annotations

TYPE_CHECKING = False  # see `sqlite`
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from text2sql_grpo.sql.outcome import Limits, Row

MAX_ERROR_CHARS = 300

NOTHING_TO_RUN = "expected one SELECT query, got nothing that returns rows"
SEVERAL_STATEMENTS = "expected one SELECT query, got several statements"
NO_MEMORY = "stopped: the query needs too much memory"
NO_TEMPORARY_FILE = "stopped: the query needs a temporary file, and none can be written"
NO_PASSWORD = "set PGPASSWORD or ~/.pgpass"
ONLY_READING = "only queries that read the tables run"


def late_text(timeout_s: float) -> str:
    """Text of a query that reached its time limit."""
    return f"stopped: the query ran longer than {timeout_s:g} s"


def short_line(text: str) -> str:
    """Error text for the model: one line, at most `MAX_ERROR_CHARS`."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR_CHARS else line[: MAX_ERROR_CHARS - 3] + "..."


def failed(status: str, text: str, elapsed_s: float = 0.0, *, may_change: bool = True) -> tuple[Any, ...]:
    """Answer of a worker to a query without rows; see `worker_process.Answer`."""
    return (status, (), (), False, short_line(text), elapsed_s, False, may_change)


def cut_values(rows: Sequence[Row], max_length: int) -> tuple[list[Row], bool]:
    """Rows whose texts and blobs have at most this length, and whether any was longer.

    >>> cut_values([(1, "abc"), (None, b"ab")], 2)
    ([(1, 'ab'), (None, b'ab')], True)
    """
    cut: list[Row] = []
    is_cut = False
    for row in rows:
        if any([isinstance(cell, str | bytes) and len(cell) > max_length for cell in row]):
            row = tuple([cell[:max_length] if isinstance(cell, str | bytes) else cell for cell in row])
            is_cut = True
        cut.append(row)
    return cut, is_cut


def why_unfit(sql: str, limits: Limits) -> str:
    """Reason why no database could run the text; empty if there is none."""
    if "\0" in sql:
        return "the query contains a NUL character"
    try:
        n_bytes = len(sql.encode())
    except UnicodeEncodeError:
        return "the query contains a character that is not valid Unicode (a lone surrogate)"
    if n_bytes > limits.max_sql_bytes:
        return f"the query is too long: expected at most {limits.max_sql_bytes} bytes, got {n_bytes}"
    return ""
