"""Schema from the rows of a database's catalogue, the same for each engine."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from text2sql_grpo.sql.address import Kind
from text2sql_grpo.sql.names import dotted_name
from text2sql_grpo.sql.schema_examples import EXAMPLE_ROWS, column_examples, one_line
from text2sql_grpo.sql.schema_types import MAX_COUNTED_ROWS, Column, ForeignKey, Schema, Table, View

Rows = list[tuple[Any, ...]]


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
        name: Name of the database.
        dialect: Rules for quoting names.
        ask: Function that runs a query, until the deadline.
        relations: Namespace, name, True for a table and False for a view, comment, query of a view.
        columns: SQL of an example, then the fields of `Column` in their order, without the examples.
        keys: Columns of each unique key, the primary key first; left out if one is not a column.
        foreign_keys: One a row.
    """
    columns_of: dict[Hashable, list[Column]] = defaultdict(list)
    values_of: dict[Hashable, list[str]] = defaultdict(list)
    for relation, value, column, kind, is_nullable, is_primary, comment, *more in columns:
        expression, labels, base_type, refuses_null = more
        columns_of[relation].append(
            Column(
                column,
                kind,
                is_nullable,
                is_primary,
                one_line(comment),
                expression=expression,
                labels=tuple(labels or ()),
                base_type=base_type,
                is_domain_not_null=refuses_null,
            )
        )
        values_of[relation].append(value)
    keys_of: dict[Hashable, dict[tuple[str | None, ...], None]] = defaultdict(dict)
    for relation, names in keys:
        keys_of[relation][tuple(names)] = None
    foreign_of: dict[Hashable, list[ForeignKey]] = defaultdict(list)
    for relation, key in foreign_keys:
        foreign_of[relation].append(key)
    tables, views = [], []
    for relation, namespace, own_name, is_table, comment, query in relations:
        own = columns_of[relation]
        if not is_table:
            views.append(View(own_name, tuple(own), one_line(comment), namespace, query or ""))
            continue
        n_rows, examples = _rows_of(ask, dotted_name(namespace, own_name, dialect), values_of[relation], own)
        names = {column.name for column in own}
        table = Table(
            own_name,
            tuple(replace(column, examples=found) for column, found in zip(own, examples, strict=True)),
            tuple(foreign_of[relation]),
            min(n_rows, MAX_COUNTED_ROWS),
            n_rows > MAX_COUNTED_ROWS,
            one_line(comment),
            namespace,
            tuple(key for key in keys_of[relation] if names.issuperset(key)),  # type: ignore[misc]
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
