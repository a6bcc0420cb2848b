"""Selection of the example values of a column."""

import math
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

from text2sql_grpo.sql.schema_types import Example

EXAMPLE_ROWS = 1_000  # read only the first rows of a table
MAX_EXAMPLES = 3
LONG_CHARS = 20  # one example only, if any value is longer
MAX_CHARS = 50  # none, if any value is longer
READ_CHARS = MAX_CHARS + 1  # enough of a text to see that it is too long

_DATE_TYPE = re.compile(r"\s*(date|time)", re.IGNORECASE)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def column_examples(rows: Iterable[Sequence[Any]], types: Sequence[str]) -> list[tuple[Example, ...]]:
    """First distinct values of each column: exact, or absent.

    Three; one for dates and for values over 20 characters; none if one is over 50, as in M-Schema. Skips
    NULL, empty text, text with line breaks or other unprintable characters, infinities and other types.

    Args:
        rows: Text cut at `READ_CHARS`; read only as far as needed.
        types: Declared type of each column.

    >>> column_examples([("a", "2024-01-05"), ("b", "2024-01-06"), ("a", None)], ["TEXT", "TEXT"])
    [('a', 'b'), ('2024-01-05',)]
    """
    found: list[dict[str, Example]] = [{} for _ in types]
    unfilled = set(range(len(types)))
    for row in rows:
        for index in list(unfilled):
            if _is_fit(row[index]):
                found[index].setdefault(str(row[index]), row[index])
                if len(found[index]) == MAX_EXAMPLES:
                    unfilled.remove(index)
        if not unfilled:
            break
    return [_shortened(tuple(values.values()), kind) for values, kind in zip(found, types, strict=True)]


def _is_fit(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip() != "" and value.isprintable()
    if isinstance(value, Decimal):
        return value.is_finite()
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _shortened(values: tuple[Example, ...], kind: str) -> tuple[Example, ...]:
    longest = max((len(str(value)) for value in values), default=0)
    if longest > MAX_CHARS:
        return ()
    is_date = _DATE_TYPE.match(kind) or any(_DATE.match(str(value)) for value in values)
    return values[:1] if is_date or longest > LONG_CHARS else values


def one_line(comment: str | None) -> str:
    """A comment without line breaks and unprintable characters; empty for None."""
    words = "".join(letter if letter.isprintable() else " " for letter in comment or "")
    return " ".join(words.split())
