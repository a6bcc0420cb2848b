"""Code shared by DuckDB and PostgreSQL: first word of a query, row caps, outcome of a failed query."""

import math
import re
import time
from collections.abc import Iterator
from decimal import Decimal

from text2sql_grpo.sql.failure_text import cut_values, short_line
from text2sql_grpo.sql.frames import marshalled
from text2sql_grpo.sql.outcome import Cell, ExecutionOutcome, Limits, Row, Status
from text2sql_grpo.sql.sqlite_guard import MAX_VALUE_BYTES

# PostgreSQL ends a line at a carriage return too, and nests comments: a nested one does not match, so that
# no statement is taken for another.
_BEFORE_FIRST_WORD = re.compile(
    r"(?:[\s(;]|--[^\n\r]*(?:[\n\r]|\Z)|/\*(?:(?!/\*).)*?\*/)*", re.DOTALL | re.ASCII
)
_WORD = re.compile(r"\w*")
MAX_INT_BITS = 1_023  # 308 digits: a longer integer is no float, which the grader computes with


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


def exact_number(value: Decimal) -> int | float | str:
    """Convert to an integer if the value is one, else to the nearest float: 2.00 to 2, 1.50 to 1.5.

    An integer of more than `MAX_INT_BITS` bits, or a fraction beyond floats, becomes text.

    >>> exact_number(Decimal("12345678901234567890.00")), exact_number(Decimal("0.10"))
    (12345678901234567890, 0.1)
    """
    if value.is_finite() and value == value.to_integral_value():
        is_short = value.adjusted() < 308 and int(value).bit_length() <= MAX_INT_BITS
        return int(value) if is_short else f"{value:.0f}"
    number = float(value)
    return f"{value:f}" if math.isinf(number) and value.is_finite() else number


def keep_rows(rows: Iterator[Row], limits: Limits, deadline: float) -> tuple[tuple[Row, ...], bool]:
    """Rows up to the caps, and whether there were more or a value was cut.

    Args:
        rows: Fetched one by one.
        limits: Its `max_rows` and `max_bytes` are the caps.
        deadline: Seconds of `time.monotonic`.

    Raises:
        TimeLimitReachedError: The deadline passed.
    """
    kept: list[Row] = []
    n_bytes = 0
    is_cut = False
    for row in rows:
        size = len(marshalled(row))
        if size > MAX_VALUE_BYTES:
            (row,), was_cut = cut_values([row], MAX_VALUE_BYTES)
            is_cut = is_cut or was_cut
            size = len(marshalled(row))
        n_bytes += size
        if len(kept) == limits.max_rows or n_bytes > limits.max_bytes:
            return tuple(kept), True
        if time.monotonic() > deadline:
            raise TimeLimitReachedError
        if size > MAX_INT_BITS // 8:
            row = tuple(map(_short_number, row))
        kept.append(row)
    return tuple(kept), is_cut


def _short_number(cell: Cell) -> Cell:
    is_long = isinstance(cell, int) and cell.bit_length() > MAX_INT_BITS
    return f"{Decimal(cell):f}" if is_long else cell  # type: ignore[arg-type]
