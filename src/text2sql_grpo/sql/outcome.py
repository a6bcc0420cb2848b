"""Limits and outcome of one execution."""

from typing import Literal, NamedTuple

from text2sql_grpo.checked import AboveZero, Positive, checked

Cell = None | int | float | str | bytes
Row = tuple[Cell, ...]
Status = Literal["ok", "error", "timeout", "memory", "denied"]


@checked
class Limits:
    """Bounds of one execution.

    Attributes:
        timeout_s: Seconds until the query is stopped, > 0.
        max_rows: Maximum number of rows kept; more sets `ExecutionOutcome.is_truncated`.
        max_bytes: Maximum size of the rows kept: text and blobs by length, numbers as 5 to 9, and a few
            bytes for each value and row.
        max_sql_bytes: Maximum length of the SQL text, in UTF-8 bytes.
    """

    timeout_s: AboveZero = 5.0
    max_rows: Positive = 10_000
    max_bytes: Positive = 5_000_000
    max_sql_bytes: Positive = 100_000


class ExecutionOutcome(NamedTuple):
    """Typed outcome of one execution; a failure of the model's query is a status, never an exception.

    A named tuple, because hundreds of thousands of them are built.

    Attributes:
        status: `ok`, or why there are no rows.
        columns: Column names; empty unless `ok`.
        rows: At most `Limits.max_rows` rows; empty unless `ok`.
        is_truncated: True if rows were cut at a limit. Never equal to anything in grading.
        error: Text for the model; empty if `ok`.
        elapsed_s: Wall-clock seconds inside the database; those of the first execution if `from_cache`.
        is_volatile: True if the engine may return other rows the next time: the query reads the clock,
            samples, or calls a function that changes.
        from_cache: True if the result came from the cache.
    """

    status: Status
    columns: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    is_truncated: bool = False
    error: str = ""
    elapsed_s: float = 0.0
    is_volatile: bool = False
    from_cache: bool = False

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"
