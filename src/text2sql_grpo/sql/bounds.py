"""Code shared by DuckDB and PostgreSQL: first word of a query, row caps, outcome of a failed query."""

import re
import time
from collections.abc import Iterator
from decimal import Decimal

from text2sql_grpo.sql.failure_text import short_line
from text2sql_grpo.sql.outcome import Cell, ExecutionOutcome, Limits, Row, Status

# PostgreSQL ends a line at a carriage return too, and nests comments: a nested one does not match, so that
# no statement is taken for another.
_BEFORE_FIRST_WORD = re.compile(
    r"(?:[\s(;]|--[^\n\r]*(?:[\n\r]|\Z)|/\*(?:(?!/\*).)*?\*/)*", re.DOTALL | re.ASCII
)
_WORD = re.compile(r"\w*")


class TimeLimitReachedError(Exception):
    """The deadline passed while rows were fetched; caught in the module that raised it."""


def failure(status: Status, text: str) -> ExecutionOutcome:
    """Outcome of a query without rows, with a text for the model."""
    return ExecutionOutcome(status, error=short_line(text))


def first_word(sql: str) -> str:
    """First word after blanks, comments and brackets, in capitals; empty if there is none.

    >>> first_word("/* all */ (select 1)")
    'SELECT'
    """
    start = _BEFORE_FIRST_WORD.match(sql)
    assert start is not None  # the pattern matches the empty text too
    found = _WORD.match(sql, start.end())
    return found.group().upper() if found else ""


def is_blank(sql: str) -> bool:
    """True for blanks, comments and semicolons alone."""
    return _BEFORE_FIRST_WORD.fullmatch(sql) is not None


def exact_number(value: Decimal) -> int | float:
    """Convert to an integer if the value is one, else to the nearest float: 2.00 to 2, 1.50 to 1.5.

    >>> exact_number(Decimal("12345678901234567890.00")), exact_number(Decimal("0.10"))
    (12345678901234567890, 0.1)
    """
    if value.is_finite() and value == value.to_integral_value():
        return int(value)
    return float(value)


def keep_rows(rows: Iterator[Row], limits: Limits, deadline: float) -> tuple[tuple[Row, ...], bool]:
    """Rows up to the caps, and whether there were more.

    Args:
        rows: Fetched one by one.
        limits: Its `max_rows` and `max_bytes` are the caps.
        deadline: Seconds of `time.monotonic`.

    Raises:
        TimeLimitReachedError: The deadline passed.
    """
    kept: list[Row] = []
    n_bytes = 0
    for row in rows:
        n_bytes += sum([_size_of(cell) for cell in row])
        if len(kept) == limits.max_rows or n_bytes > limits.max_bytes:
            return tuple(kept), True
        if time.monotonic() > deadline:
            raise TimeLimitReachedError
        kept.append(row)
    return tuple(kept), False


def _size_of(cell: Cell) -> int:
    if isinstance(cell, str | bytes):
        return len(cell)
    return max(8, cell.bit_length() // 8) if isinstance(cell, int) else 8  # DECIMAL may have 100,000 digits
