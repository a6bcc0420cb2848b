"""Schema of a DuckDB file, from its system tables."""

import logging
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from text2sql_grpo.errors import DataError, needs_extra
from text2sql_grpo.sql.names import quote_name
from text2sql_grpo.sql.schema_examples import EXAMPLE_ROWS, READ_CHARS, column_examples, one_line
from text2sql_grpo.sql.schema_types import MAX_COUNTED_ROWS, Column, Example, ForeignKey, Schema, Table, View

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

logger = logging.getLogger(__name__)

MAX_TYPE_CHARS = 100  # a longer type (an enumeration, a nested struct) is cut there

_NUMBERS = """
    BOOLEAN TINYINT SMALLINT INTEGER BIGINT HUGEINT UTINYINT USMALLINT UINTEGER UBIGINT UHUGEINT DECIMAL
    FLOAT DOUBLE
"""
_TEXTS = "VARCHAR ENUM DATE TIME TIMESTAMP TIMESTAMP_S TIMESTAMP_MS TIMESTAMP_NS UUID"
_LABEL = re.compile(r"'((?:[^']|'')*)'")

_Name = tuple[str, str]  # of the namespace and of the table


def read_duckdb(database: Path | str, *, timeout_s: float) -> Schema:
    """See `schema.read_schema`. DuckDB checks the time between two batches of rows only."""
    with needs_extra("duckdb", f"the DuckDB database {database}"):
        import duckdb

        # DuckDB refuses a second connection of this process to a file with another configuration.
        from text2sql_grpo.sql.duckdb_database import CONFIG, fingerprint_of
    fingerprint_of(str(database))  # a FIFO would be waited for
    try:
        with closing(duckdb.connect(str(database), read_only=True, config=CONFIG)) as connection:
            reader = _Reader(connection, timeout_s)
            with reader.interrupted_when_late():
                return reader.schema(Path(database).stem)
    except (duckdb.InterruptException, TimeoutError) as error:
        raise DataError(f"reading the schema of {database} took longer than {timeout_s:g} s") from error
    except duckdb.Error as error:
        raise DataError(f"cannot read the DuckDB schema: {error} (at {database})") from error


class _Reader:
    """One connection with a deadline."""

    def __init__(self, connection: "DuckDBPyConnection", timeout_s: float) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + timeout_s

    @contextmanager
    def interrupted_when_late(self) -> Iterator[None]:
        """Interrupt the query at the deadline, repeatedly: an interrupt between two queries is lost."""
        is_done = threading.Event()

        def watch() -> None:
            is_done.wait(self._deadline - time.monotonic())
            while not is_done.wait(0.05):
                self._connection.interrupt()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_done.set()
            watcher.join()

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        if time.monotonic() > self._deadline:
            raise TimeoutError
        return self._connection.execute(query).fetchall()

    def schema(self, name: str) -> Schema:
        keys, foreign = self._keys()
        columns = self._columns()
        for place, parts in self._unique_indexes():
            names = tuple(_unquoted(part) for part in parts)
            if {column.name for column in columns[place]}.issuperset(names):  # no expression
                keys[place].append(names)
        query = """
            SELECT schema_name, {kind}_name, comment, sql FROM duckdb_{kind}s()
            WHERE database_name = current_database() AND NOT internal AND NOT temporary ORDER BY {kind}_oid
        """
        tables = []
        for namespace, table, comment, _ in self._rows(query.format(kind="table")):
            own = columns[namespace, table]
            sql = f"{quote_name(namespace, 'duckdb')}.{quote_name(table, 'duckdb')}"
            n_rows, examples = self._rows_of(sql, own)
            shown = [
                replace(_cut(column), examples=values) for column, values in zip(own, examples, strict=True)
            ]
            tables.append(
                Table(
                    table,
                    tuple(shown),
                    tuple(foreign[namespace, table]),
                    min(n_rows, MAX_COUNTED_ROWS),
                    n_rows > MAX_COUNTED_ROWS,
                    one_line(comment),
                    _shown(namespace),
                    tuple(dict.fromkeys(keys[namespace, table])),
                )
            )
        views = []
        for namespace, view, comment, sql in self._rows(query.format(kind="view")):
            if self._is_readable(namespace, view):
                own = [_cut(column) for column in columns[namespace, view]]
                views.append(View(view, tuple(own), one_line(comment), _shown(namespace), sql))
        return Schema(tuple(tables), tuple(views), name, dialect="duckdb")

    def _keys(self) -> tuple[dict[_Name, list[tuple[str, ...]]], dict[_Name, list[ForeignKey]]]:
        """Unique and foreign keys of each table; foreign keys never leave their namespace."""
        unique: dict[_Name, list[tuple[str, ...]]] = defaultdict(list)
        foreign: dict[_Name, list[ForeignKey]] = defaultdict(list)
        query = """
            SELECT schema_name, table_name, constraint_type, constraint_column_names, referenced_table,
                referenced_column_names
            FROM duckdb_constraints() WHERE database_name = current_database()
            ORDER BY constraint_type <> 'PRIMARY KEY', constraint_index
        """
        for namespace, table, kind, columns, parent, references in self._rows(query):
            if kind in ("PRIMARY KEY", "UNIQUE"):
                unique[namespace, table].append(tuple(columns))
            elif kind == "FOREIGN KEY":
                key = ForeignKey(tuple(columns), parent, tuple(references), _shown(namespace))
                foreign[namespace, table].append(key)
        return unique, foreign

    def _unique_indexes(self) -> list[tuple[_Name, list[str]]]:
        query = """
            SELECT schema_name, table_name, expressions::VARCHAR[] FROM duckdb_indexes()
            WHERE database_name = current_database() AND is_unique AND NOT is_primary ORDER BY index_oid
        """
        return [((namespace, table), parts) for namespace, table, parts in self._rows(query)]

    def _columns(self) -> dict[_Name, list[Column]]:
        columns: dict[_Name, list[Column]] = defaultdict(list)
        query = """
            SELECT schema_name, table_name, column_name, data_type, is_nullable, is_primary, comment,
                is_generated
            FROM duckdb_columns() LEFT JOIN (
                SELECT table_oid, unnest(constraint_column_names) AS column_name, true AS is_primary
                FROM duckdb_constraints()
                WHERE database_name = current_database() AND constraint_type = 'PRIMARY KEY'
            ) USING (table_oid, column_name)
            WHERE database_name = current_database() AND NOT internal ORDER BY column_index
        """
        for namespace, table, name, kind, is_nullable, is_primary, comment, is_generated in self._rows(query):
            columns[namespace, table].append(
                Column(
                    name,
                    kind,
                    is_nullable and not is_primary,
                    bool(is_primary),
                    one_line(comment),
                    is_generated=is_generated,
                    labels=_labels(kind),
                )
            )
        return columns

    def _rows_of(self, table: str, columns: Sequence[Column]) -> tuple[int, list[tuple[Example, ...]]]:
        """Number of rows, at most one more than `MAX_COUNTED_ROWS`, and the examples of each column."""
        values = ", ".join(_value(column) for column in columns)
        rows = self._rows(f"SELECT {values} FROM {table} LIMIT {EXAMPLE_ROWS}")
        n_rows = len(rows)
        if n_rows == EXAMPLE_ROWS:
            counted = f"SELECT count(*) FROM (SELECT 1 FROM {table} LIMIT {MAX_COUNTED_ROWS + 1})"
            ((n_rows,),) = self._rows(counted)
        return n_rows, column_examples(rows, [column.type for column in columns])

    def _is_readable(self, namespace: str, view: str) -> bool:
        """True if all that the view reads still exists and is readable; does not run the view."""
        import duckdb

        try:
            self._rows(f"DESCRIBE {quote_name(namespace, 'duckdb')}.{quote_name(view, 'duckdb')}")
        except (duckdb.CatalogException, duckdb.BinderException, duckdb.PermissionException) as error:
            logger.warning("view %s is left out of the schema: no query can read it: %s", view, error)
            return False
        return True


def _shown(namespace: str) -> str:
    return "" if namespace == "main" else namespace


def _cut(column: Column) -> Column:
    """Column with a type short enough to be shown."""
    if len(column.type) <= MAX_TYPE_CHARS:
        return column
    return replace(column, type=column.type[: MAX_TYPE_CHARS - 3] + "...", base_type=column.type)


def _labels(kind: str) -> tuple[str, ...]:
    """Labels of an enum, which DuckDB writes out as its type.

    >>> _labels("ENUM('a', 'it''s')")
    ('a', "it's")
    """
    if not kind.startswith("ENUM(") or kind.endswith("]"):
        return ()
    return tuple(label.replace("''", "'") for label in _LABEL.findall(kind))


def _unquoted(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


def _value(column: Column) -> str:
    """SQL of a column's example: NULL for lists, structs, blobs, and times that depend on the time zone."""
    name, kind = quote_name(column.name, "duckdb"), column.type.partition("(")[0]
    if column.type.endswith("]"):
        return "NULL"
    if kind in _NUMBERS.split():
        return name
    return f"left({name}::VARCHAR, {READ_CHARS})" if kind in _TEXTS.split() else "NULL"
