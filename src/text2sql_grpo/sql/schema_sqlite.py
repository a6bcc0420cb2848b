"""Schema of a SQLite file, from its pragmas, the stored CREATE statements and BIRD's descriptions."""

import csv
import logging
import re
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from io import StringIO
from pathlib import Path

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.names import quote_name
from text2sql_grpo.sql.schema_examples import EXAMPLE_ROWS, READ_CHARS, column_examples, one_line
from text2sql_grpo.sql.schema_types import MAX_COUNTED_ROWS, Column, Example, ForeignKey, Schema, Table, View
from text2sql_grpo.sql.sqlite_file import open_database

logger = logging.getLogger(__name__)

_DESCRIPTION = ("original_column_name", "column_name", "column_description", "value_description")
_PROGRESS_STEPS = 100  # SQLite instructions between two checks of the deadline
_COMMENT = re.compile(r"^(?P<code>[^'\n]*?)--(?P<comment>.*)$")
_TABLE_START = re.compile(r"\s*CREATE\s+TABLE\b[^(]*\(\s*", re.IGNORECASE)
_COLUMN_START = re.compile(r'\s*,?\s*(?:"(?P<a>(?:[^"]|"")+)"|\[(?P<b>[^]]+)\]|`(?P<c>[^`]+)`|(?P<d>\w+))')


def read_sqlite(database: Path | str, *, timeout_s: float) -> Schema:
    """See `schema.read_schema`. Comments come from the CREATE statements, then from `described`."""
    deadline = time.monotonic() + timeout_s
    try:
        with closing(open_database(database)) as connection:
            connection.set_progress_handler(lambda: time.monotonic() > deadline, _PROGRESS_STEPS)
            connection.text_factory = _text_of
            schema = _schema(connection, Path(database).stem)
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            raise DataError(f"reading the schema of {database} took longer than {timeout_s:g} s") from error
        raise DataError(f"cannot read the schema: {error} (at {database})") from error
    return described(schema, Path(database).parent / "database_description")


def described(schema: Schema, folder: Path) -> Schema:
    """Schema with BIRD's descriptions (`<table>.csv` in `folder`) as comments of columns without one.

    Raises:
        DataError: A file cannot be read.
    """
    comments: dict[tuple[str, str], str] = {}
    for path in sorted(folder.glob("*.csv")):
        try:  # some of BIRD's files are in other encodings
            text = path.read_text("utf-8-sig", errors="replace")
            rows = list(csv.DictReader(StringIO(text, newline="")))
        except (OSError, csv.Error) as error:
            raise DataError(f"cannot read the descriptions: {error} (at {path})") from error
        for row in rows:
            column, name, *notes = ((row.get(field) or "").strip() for field in _DESCRIPTION)
            meaning = notes if notes[0] else [name, *notes[1:]]
            comments[path.stem.lower(), column.lower()] = one_line("; ".join(filter(None, meaning)))

    def commented(table: str, column: Column) -> Column:
        return replace(
            column, comment=column.comment or comments.get((table.lower(), column.name.lower()), "")
        )

    tables = [
        replace(table, columns=tuple(commented(table.name, column) for column in table.columns))
        for table in schema.tables
    ]
    return replace(schema, tables=tuple(tables))


def _text_of(raw: bytes) -> str:
    """Decode text; invalid UTF-8 becomes unprintable, so that no example shows it."""
    return raw.decode("utf-8", "surrogateescape")


def _schema(connection: sqlite3.Connection, name: str) -> Schema:
    shadows = _shadow_tables(connection)
    names = [table for table in _names(connection, "table") if table not in shadows]
    columns = {table: _columns(connection, table) for table in names}
    views = []
    for view, sql in connection.execute(
        "SELECT name, sql FROM sqlite_master WHERE type = 'view' ORDER BY rowid"
    ):
        try:
            views.append(View(view, tuple(column for column, _ in _columns(connection, view)), sql=sql))
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                raise
            logger.warning("view %s is left out of the schema: no query can read it: %s", view, error)
    return Schema(
        tuple(_table(connection, table, columns) for table in names), tuple(views), name, dialect="sqlite"
    )


def _names(connection: sqlite3.Connection, kind: str) -> list[str]:
    query = "SELECT name FROM sqlite_master WHERE type = ? ORDER BY rowid"
    return [name for (name,) in connection.execute(query, (kind,)) if not name.startswith("sqlite_")]


def _shadow_tables(connection: sqlite3.Connection) -> set[str]:
    """Tables behind a full-text or rtree table; unknown before SQLite 3.37."""
    if sqlite3.sqlite_version_info < (3, 37):
        return set()
    return {
        name for (name,) in connection.execute("SELECT name FROM pragma_table_list WHERE type = 'shadow'")
    }


def _columns(connection: sqlite3.Connection, table: str) -> list[tuple[Column, int]]:
    """Each column with its 1-based place in the primary key; 0 if it has none."""
    rows = connection.execute('SELECT name, type, "notnull", pk, hidden FROM pragma_table_xinfo(?)', (table,))
    return [
        (Column(name, kind, not (notnull or place), bool(place), is_generated=hidden in (2, 3)), place)
        for name, kind, notnull, place, hidden in rows
        if hidden != 1  # 1: a virtual table's hidden column; 2 and 3: generated columns
    ]


def _table(connection: sqlite3.Connection, name: str, columns: dict[str, list[tuple[Column, int]]]) -> Table:
    own = [column for column, _ in columns[name]]
    query = "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?"
    (statement,) = connection.execute(query, (name,)).fetchone()
    comment, comments = _comments(statement)
    counted = f"SELECT count(*) FROM (SELECT 1 FROM {quote_name(name)} LIMIT {MAX_COUNTED_ROWS + 1})"
    (n_rows,) = connection.execute(counted).fetchone()
    return Table(
        name,
        tuple(
            replace(c, comment=comments.get(c.name.lower(), ""), examples=values)
            for c, values in zip(own, _examples(connection, name, own), strict=True)
        ),
        _foreign_keys(connection, name, columns),
        min(n_rows, MAX_COUNTED_ROWS),
        n_rows > MAX_COUNTED_ROWS,
        comment,
        keys=_keys(connection, name, columns[name]),
    )


def _keys(
    connection: sqlite3.Connection, table: str, columns: Sequence[tuple[Column, int]]
) -> tuple[tuple[str, ...], ...]:
    primary = [column.name for column, place in sorted(columns, key=lambda pair: pair[1]) if place]
    keys = [tuple(primary)] if primary else []
    indexes = 'SELECT name FROM pragma_index_list(?) WHERE "unique" ORDER BY seq DESC'
    for (index,) in connection.execute(indexes, (table,)).fetchall():
        parts = connection.execute("SELECT name FROM pragma_index_info(?) ORDER BY seqno", (index,))
        names = tuple(name for (name,) in parts)
        if None not in names:  # an expression
            keys.append(names)
    return tuple(dict.fromkeys(keys))


def _examples(
    connection: sqlite3.Connection, table: str, columns: Sequence[Column]
) -> list[tuple[Example, ...]]:
    if not columns:  # A virtual table may hide all of its own.
        return []
    values = ", ".join(
        f"CASE typeof({name}) WHEN 'text' THEN substr({name}, 1, {READ_CHARS}) "
        f"WHEN 'blob' THEN NULL ELSE {name} END"
        for name in (quote_name(column.name) for column in columns)
    )
    with closing(
        connection.execute(f"SELECT {values} FROM {quote_name(table)} LIMIT {EXAMPLE_ROWS}")
    ) as rows:
        return column_examples(rows, [column.type for column in columns])


def _comments(statement: str) -> tuple[str, dict[str, str]]:
    """Comment behind the opening bracket, and by lower-case name those behind a line of one column.

    Lines with a string or several columns are skipped.
    """
    table_comment, comments = "", dict[str, str]()
    for line in statement.splitlines():
        match = _COMMENT.match(line)
        if not match:
            continue
        code, comment = match["code"], one_line(match["comment"])
        start = _TABLE_START.match(code)
        if start and start.end() == len(code):
            table_comment = comment
            continue
        code = code[start.end() :] if start else code
        column = _COLUMN_START.match(code)
        rest = re.sub(r"\([^()]*\)", "", code[column.end() :]).rstrip() if column else ","
        if column and "," not in rest.removesuffix(","):
            name = next(filter(None, column.groups())).replace('""', '"')
            comments.setdefault(name.lower(), comment)
    return table_comment, comments


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
