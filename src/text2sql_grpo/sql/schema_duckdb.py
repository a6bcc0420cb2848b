"""Schema of a DuckDB file, from its system tables."""

import logging
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from text2sql_grpo.errors import DataError, needs_extra
from text2sql_grpo.sql.names import dotted_name, quote_name
from text2sql_grpo.sql.schema import ForeignKey, Schema
from text2sql_grpo.sql.schema_catalogue import READ_CHARS, Rows, schema_of

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

logger = logging.getLogger(__name__)

AGAIN_S = 0.05  # between two interrupts: one that comes before a statement starts is lost
MAX_TYPE_CHARS = 100  # a longer type (an enumeration, a nested struct) is cut there

_NUMBERS = """
    BOOLEAN TINYINT SMALLINT INTEGER BIGINT HUGEINT UTINYINT USMALLINT UINTEGER UBIGINT UHUGEINT DECIMAL
    FLOAT DOUBLE
"""
_TEXTS = "VARCHAR ENUM DATE TIME TIMESTAMP TIMESTAMP_S TIMESTAMP_MS TIMESTAMP_NS UUID"
_LABEL = re.compile(r"'((?:[^']|'')*)'")

_RELATIONS = """
    SELECT {kind}_oid, CASE WHEN schema_name <> 'main' THEN schema_name ELSE '' END, {kind}_name,
        '{kind}' = 'table', comment, sql, schema_name
    FROM duckdb_{kind}s() WHERE database_name = current_database() AND NOT internal AND NOT temporary
    ORDER BY {kind}_oid
"""
_COLUMNS = """
    SELECT table_oid, column_name, data_type, is_nullable AND is_primary IS NULL, is_primary IS NOT NULL,
        comment, CASE WHEN is_generated THEN coalesce(column_default, '*') ELSE '' END
    FROM duckdb_columns() LEFT JOIN (
        SELECT table_oid, unnest(constraint_column_names) AS column_name, true AS is_primary
        FROM duckdb_constraints()
        WHERE database_name = current_database() AND constraint_type = 'PRIMARY KEY'
    ) USING (table_oid, column_name)
    WHERE database_name = current_database() AND NOT internal ORDER BY column_index
"""
_KEYS = """
    SELECT table_oid, constraint_column_names FROM duckdb_constraints()
    WHERE database_name = current_database() AND constraint_type IN ('PRIMARY KEY', 'UNIQUE')
    ORDER BY constraint_type <> 'PRIMARY KEY', constraint_index
"""
_UNIQUE_INDEXES = """
    SELECT table_oid, expressions::VARCHAR[] FROM duckdb_indexes()
    WHERE database_name = current_database() AND is_unique AND NOT is_primary ORDER BY index_oid
"""
# They never leave their namespace.
_FOREIGN_KEYS = """
    SELECT table_oid, constraint_column_names, referenced_table, referenced_column_names,
        CASE WHEN schema_name <> 'main' THEN schema_name ELSE '' END
    FROM duckdb_constraints() WHERE database_name = current_database() AND constraint_type = 'FOREIGN KEY'
    ORDER BY constraint_index
"""


def read(database: Path | str, *, timeout_s: float) -> Schema:
    """See `schema.read_schema`. DuckDB checks the time between two batches of rows only."""
    with needs_extra("duckdb", f"the DuckDB database {database}"):
        import duckdb

        # DuckDB refuses a second connection of this process to a file with another configuration.
        from text2sql_grpo.sql.duckdb_database import CONFIG, fingerprint_of
    fingerprint_of(str(database))  # a FIFO would be waited for
    deadline = time.monotonic() + timeout_s
    try:
        with (
            closing(duckdb.connect(str(database), read_only=True, config=CONFIG)) as connection,
            ThreadPoolExecutor(1) as thread,
        ):
            read_schema = thread.submit(_schema, connection, Path(database).stem, deadline)
            while not wait([read_schema], max(AGAIN_S, deadline - time.monotonic())).done:
                connection.interrupt()
            return read_schema.result()
    except (duckdb.InterruptException, TimeoutError) as error:
        raise DataError(f"reading the schema of {database} took longer than {timeout_s:g} s") from error
    except duckdb.Error as error:
        raise DataError(f"cannot read the DuckDB schema: {error} (at {database})") from error


def _schema(connection: "DuckDBPyConnection", name: str, deadline: float) -> Schema:
    import duckdb

    def ask(query: str) -> Rows:
        if time.monotonic() > deadline:
            raise TimeoutError
        return connection.execute(query).fetchall()

    def readable_views() -> Iterator[tuple[Any, ...]]:
        """Views of which all that they read still exists; none is run."""
        for row in ask(_RELATIONS.format(kind="view")):
            try:
                ask(f"DESCRIBE {dotted_name(row[1], row[2], 'duckdb')}")
            except (duckdb.CatalogException, duckdb.BinderException, duckdb.PermissionException) as error:
                logger.warning("%s is left out of the schema: no query can read it: %s", row[2], error)
            else:
                yield row

    return schema_of(
        name,
        "duckdb",
        ask,
        relations=(*ask(_RELATIONS.format(kind="table")), *readable_views()),
        columns=map(_column, ask(_COLUMNS)),
        keys=(*ask(_KEYS), *((oid, map(_unquoted, names)) for oid, names in ask(_UNIQUE_INDEXES))),
        foreign_keys=(
            (oid, ForeignKey(tuple(own), table, tuple(references), namespace))
            for oid, own, table, references, namespace in ask(_FOREIGN_KEYS)
        ),
    )


def _column(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Row of `schema_of`; a long type is cut to be shown."""
    oid, name, kind, *facts = row
    is_long = len(kind) > MAX_TYPE_CHARS
    shown, base_type = (kind[: MAX_TYPE_CHARS - 3] + "...", kind) if is_long else (kind, "")
    return oid, _value(name, kind), name, shown, *facts, _labels(kind), base_type, False


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


def _value(name: str, kind: str) -> str:
    """SQL of a column's example: NULL for lists, structs, blobs, and times that depend on the time zone."""
    sql, base = quote_name(name, "duckdb"), kind.partition("(")[0]
    if kind.endswith("]"):
        return "NULL"
    if base in _NUMBERS.split():
        return sql
    return f"left({sql}::VARCHAR, {READ_CHARS})" if base in _TEXTS.split() else "NULL"
