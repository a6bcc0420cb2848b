"""Observation of a query: a compact table with caps, or the error."""

from text2sql_grpo.checked import Positive, checked
from text2sql_grpo.sql.outcome import Cell, ExecutionOutcome


@checked
class ObservationLimits:
    """Caps on the shown part of a result; a note names what is cut.

    Attributes:
        max_rows: Rows shown.
        max_cell_chars: Characters shown of one cell.
        max_chars: Characters of the header and rows together, without the note.
    """

    max_rows: Positive = 20
    max_cell_chars: Positive = 60
    max_chars: Positive = 2_000


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[:max_chars] + "…"


def cell_text(cell: Cell, max_chars: int) -> str:
    """One cell on one line, cut at `max_chars`."""
    if cell is None:
        return "NULL"
    if isinstance(cell, bytes):
        return f"<{len(cell)} bytes>"
    if isinstance(cell, str):
        # Stored text that is not UTF-8 has lone surrogates, which no tokenizer accepts.
        cell = " ".join(cell.encode("utf-8", "replace").decode().split())
    return _cut(str(cell), max_chars)


def observation_text(outcome: ExecutionOutcome, limits: ObservationLimits, *, offset: int = 0) -> str:
    """Header line, one line per row, and a note on cut rows; or the error.

    Args:
        offset: Number of rows to skip.

    >>> rows = ExecutionOutcome("ok", columns=("ward", "n"), rows=(("02-LSB", 3), (None, 1)))
    >>> print(observation_text(rows, ObservationLimits(max_rows=1)))
    ward | n
    02-LSB | 3
    (1 of 2 rows shown)
    """
    if not outcome.is_ok:
        return f"Error: {outcome.error}"
    header = " | ".join(cell_text(name, limits.max_cell_chars) for name in outcome.columns)
    lines = [_cut(header, limits.max_chars)]
    size = len(lines[0])
    for row in outcome.rows[offset : offset + limits.max_rows]:
        line = " | ".join(cell_text(cell, limits.max_cell_chars) for cell in row)
        size += len(line) + 1
        if size > limits.max_chars:
            break
        lines.append(line)
    shown, total = len(lines) - 1, len(outcome.rows)
    if outcome.is_truncated:  # after some rows, or inside a value
        lines.append(f"({shown} of at least {total} rows shown)")
    elif total == 0:
        lines.append("(no rows)")
    elif shown < total:
        lines.append(f"({shown} of {total} rows shown)")
    return "\n".join(lines)
