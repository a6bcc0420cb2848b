"""Schema from the rows of a database's catalogue, the same for each engine, with examples of each column."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from text2sql_grpo.sql.address import Kind
from text2sql_grpo.sql.names import dotted_name
from text2sql_grpo.sql.schema import MAX_COUNTED_ROWS, Column, Example, ForeignKey, Schema, Table, View

Rows = list[tuple[Any, ...]]

EXAMPLE_ROWS = 1_000  # read only the first rows of a table
MAX_EXAMPLES = 3
LONG_CHARS = 20  # one example only, if any value is longer
MAX_CHARS = 50  # none, if any value is longer
READ_CHARS = MAX_CHARS + 1  # enough of a text to see that it is too long

_DATE_TYPE = re.compile(r"\s*(date|time)", re.IGNORECASE)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def schema_of(
    name: str,
    dialect: Kind,
    ask: Callable[[str], Rows],
    *,
    relations: Iterable[Sequence[Any]],
    columns: Iterable[Sequence[Any]],
    keys: Iterable[tuple[Hashable, Iterable[str | None]]],
    foreign_keys: Iterable[tuple[Hashable, ForeignKey]],
) -> Schema:
    """Join the rows of a catalogue, count the rows of each table and select examples.

    Each row begins with the identifier of its relation in the catalogue.

    Args:
        ask: Function that runs a query, until the deadline.
        relations: Namespace, name, True for a table and False for a view, comment, query of a view, schema.
        columns: SQL of an example, then the fields of `Column` in their order, without the examples.
        keys: Columns of each unique key, the primary key first; left out if one is not a column.
        foreign_keys: One a row.
    """
    columns_of: dict[Hashable, list[Column]] = defaultdict(list)
    values_of: dict[Hashable, list[str]] = defaultdict(list)
    for relation, value, *facts, comment, expression, labels, base_type, refuses_null in columns:
        fields = (*facts, one_line(comment), (), expression, tuple(labels or ()), base_type, refuses_null)
        columns_of[relation].append(Column(*fields))
        values_of[relation].append(value)
    keys_of: dict[Hashable, dict[tuple[str | None, ...], None]] = defaultdict(dict)
    for relation, names in keys:
        keys_of[relation][tuple(names)] = None
    foreign_of: dict[Hashable, list[ForeignKey]] = defaultdict(list)
    for relation, key in foreign_keys:
        foreign_of[relation].append(key)
    tables, views = [], []
    for relation, namespace, own_name, is_table, comment, query, schema_name in relations:
        own = columns_of[relation]
        if not is_table:
            views.append(View(own_name, tuple(own), one_line(comment), namespace, query or "", schema_name))
            continue
        n_rows, examples = _rows_of(ask, dotted_name(namespace, own_name, dialect), values_of[relation], own)
        names = {column.name for column in own}
        whole_keys = tuple(key for key in keys_of[relation] if names.issuperset(key))
        primary = {column.name for column in own if column.is_primary_key}
        if not any(primary == set(key) for key in whole_keys):  # the role may read a part of it
            own = [replace(column, is_primary_key=False) for column in own]
        table = Table(
            own_name,
            tuple(replace(column, examples=found) for column, found in zip(own, examples, strict=True)),
            tuple(foreign_of[relation]),
            min(n_rows, MAX_COUNTED_ROWS),
            n_rows > MAX_COUNTED_ROWS,
            one_line(comment),
            namespace,
            whole_keys,  # type: ignore[arg-type]
            schema_name,
        )
        tables.append(table)
    return Schema(tuple(tables), tuple(views), name, dialect)


def _rows_of(
    ask: Callable[[str], Rows], table: str, values: Sequence[str], columns: Sequence[Column]
) -> tuple[int, list[tuple[Any, ...]]]:
    """Number of rows, at most one more than `MAX_COUNTED_ROWS`, and the examples of each column."""
    rows = ask(f"SELECT {', '.join(values) or '1'} FROM {table} LIMIT {EXAMPLE_ROWS}")
    n_rows = len(rows)
    if n_rows == EXAMPLE_ROWS:
        ((n_rows,),) = ask(f"SELECT count(*) FROM (SELECT 1 FROM {table} LIMIT {MAX_COUNTED_ROWS + 1}) AS t")
    return n_rows, column_examples(rows, [column.type for column in columns])


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
