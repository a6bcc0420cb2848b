"""The schema of a SQLite file, and the two texts of it that a model is shown; never a row's value."""

import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.sqlite import open_database

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: As declared, unquoted.
        type: As declared (`VARCHAR(20)`); empty if none was.
        is_nullable: False for NOT NULL and for parts of the primary key.
        is_primary_key: True for every part of the primary key.
    """

    name: str
    type: str
    is_nullable: bool
    is_primary_key: bool


@dataclass(frozen=True)
class ForeignKey:
    """`columns` of this table name a row of `table` by its columns `references`.

    Attributes:
        columns: One or more of this table's columns.
        table: The other table; may be missing in the database, for SQLite does not check.
        references: As many as `columns`; empty if the declaration names none and `table` is missing or
            has no such primary key.
    """

    columns: tuple[str, ...]
    table: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    name: str
    columns: tuple[Column, ...]
    foreign_keys: tuple[ForeignKey, ...]
    n_rows: int


@dataclass(frozen=True)
class Schema:
    """The tables in the order of their creation, without views and SQLite's own tables."""

    tables: tuple[Table, ...]


def read_schema(database: Path) -> Schema:
    """The tables, columns, keys and row counts of a SQLite file.

    Raises:
        DataError: The file is missing, unreadable, corrupt or no database.
    """
    try:
        with closing(open_database(database)) as connection:
            names = _table_names(connection)
            columns = {name: _columns(connection, name) for name in names}
            return Schema(
                tuple(
                    Table(
                        name,
                        tuple(column for column, _ in columns[name]),
                        _foreign_keys(connection, name, columns),
                        connection.execute(f"SELECT count(*) FROM {quote_name(name)}").fetchone()[0],
                    )
                    for name in names
                )
            )
    except sqlite3.Error as error:
        raise DataError(f"expected a readable schema, got: {error} (at {database})") from error


def _table_names(connection: sqlite3.Connection) -> list[str]:
    names = [
        name
        for (name,) in connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid"
        )
        if not name.startswith("sqlite_")
    ]
    if sqlite3.sqlite_version_info < (3, 37):
        return names
    # The tables behind a full-text or rtree table.
    shadows = {
        name for (name,) in connection.execute("SELECT name FROM pragma_table_list WHERE type = 'shadow'")
    }
    return [name for name in names if name not in shadows]


def _columns(connection: sqlite3.Connection, table: str) -> list[tuple[Column, int]]:
    """Each column with its place in the primary key, from 1; 0 if it has none."""
    rows = connection.execute('SELECT name, type, "notnull", pk, hidden FROM pragma_table_xinfo(?)', (table,))
    return [
        (Column(name, kind, not (notnull or place), bool(place)), place)
        for name, kind, notnull, place, hidden in rows
        if hidden != 1  # 1: a virtual table's hidden column; 2 and 3: generated columns
    ]


def _foreign_keys(
    connection: sqlite3.Connection, table: str, columns: dict[str, list[tuple[Column, int]]]
) -> tuple[ForeignKey, ...]:
    declared: dict[int, list[tuple[str, str, str | None]]] = {}
    query = 'SELECT id, "table", "from", "to" FROM pragma_foreign_key_list(?) ORDER BY id DESC, seq'
    for key, parent, column, reference in connection.execute(query, (table,)):  # the last declared has id 0
        declared.setdefault(key, []).append((parent, column, reference))
    tables = {name.lower(): name for name in columns}
    keys = []
    for parts in declared.values():
        parent = tables.get(parts[0][0].lower(), parts[0][0])
        parent_columns = columns.get(parent, [])
        primary = [column.name for column, place in sorted(parent_columns, key=lambda pair: pair[1]) if place]
        named = [reference for _, _, reference in parts if reference is not None]
        references = named or (primary if len(primary) == len(parts) else [])
        spelling = {column.name.lower(): column.name for column, _ in parent_columns}
        own = {column.name.lower(): column.name for column, _ in columns[table]}
        keys.append(
            ForeignKey(
                tuple(own.get(column.lower(), column) for _, column, _ in parts),
                parent,
                tuple(spelling.get(name.lower(), name) for name in references),
            )
        )
    return tuple(keys)


@lru_cache(maxsize=10_000)
def quote_name(name: str) -> str:
    """The name as SQL needs it: in double quotes only if it could not stand without them.

    >>> quote_name("ward"), quote_name("order"), quote_name("unit price")
    ('ward', '"order"', '"unit price"')
    """
    return (
        name
        if _PLAIN_NAME.fullmatch(name) and _is_allowed_bare(name)
        else '"' + name.replace('"', '""') + '"'
    )


def _is_allowed_bare(name: str) -> bool:
    """Asked of SQLite itself, whose list of reserved words depends on the place and the version."""
    try:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.execute(f"CREATE TABLE {name} ({name} TEXT, x_ TEXT)")
            connection.execute(f"INSERT INTO {name} ({name}) VALUES ('a')")
            query = (
                f"SELECT {name}, {name}.{name}, max({name}) FROM {name} WHERE {name} = 'a' GROUP BY {name}"
            )
            return connection.execute(query).fetchall() == [("a", "a", "a")]
    except sqlite3.Error:
        return False


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(quote_name(name) for name in names)


def ddl_text(schema: Schema) -> str:
    """CREATE TABLE statements with types and keys, one column a line."""
    return "\n\n".join(_create_table(table) for table in schema.tables)


def _create_table(table: Table) -> str:
    primary = [column.name for column in table.columns if column.is_primary_key]
    lines = []
    for column in table.columns:
        line = f"{quote_name(column.name)} {column.type}".rstrip()
        if column.is_primary_key and len(primary) == 1:
            line += " PRIMARY KEY"
        elif not column.is_nullable:
            line += " NOT NULL"
        lines.append(line)
    if len(primary) > 1:
        lines.append(f"PRIMARY KEY ({_quoted(primary)})")
    for key in table.foreign_keys:
        references = f" ({_quoted(key.references)})" if key.references else ""
        lines.append(f"FOREIGN KEY ({_quoted(key.columns)}) REFERENCES {quote_name(key.table)}{references}")
    return f"CREATE TABLE {quote_name(table.name)} (\n  " + ",\n  ".join(lines) + "\n);"


def compact_text(schema: Schema) -> str:
    """One line a table, such as `table visit: visit_id, ward, fee, staff_id = staff`; no types.

    A foreign key names the other table, and its column too where that is not of the same name.
    """
    return "\n".join(
        f"table {quote_name(table.name)}: "
        + ", ".join(_compact_column(table, column) for column in table.columns)
        for table in schema.tables
    )


def _compact_column(table: Table, column: Column) -> str:
    text = quote_name(column.name)
    for key in table.foreign_keys:
        if column.name in key.columns:
            text += f" = {quote_name(key.table)}"
            reference = key.references[key.columns.index(column.name)] if key.references else column.name
            if reference != column.name:
                text += f".{quote_name(reference)}"
    return text
