"""Small variants of a database, and trusted queries on them in memory."""

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from text2sql_grpo.grading.base_sample import BaseSample, orphans, quoted
from text2sql_grpo.sql.outcome import ExecutionOutcome, Row

MAX_STEPS = 5_000_000  # SQLite instructions of one query; a count, so that load changes no choice
MAX_ROWS = 2_000
_COLUMNS = "SELECT name, type FROM pragma_table_xinfo(?) WHERE hidden <> 1"
PAGE_BYTES = 512  # most tables hold a few rows: a variant of ten tables stays under 20 kB


def build(
    base: BaseSample, rows: Mapping[str, Sequence[Row]], path: Path | None = None
) -> sqlite3.Connection:
    """Build a database with the base's tables, views and constraints from rows.

    Rows that a constraint refuses are left out, and so are rows that then lack their parent.

    Args:
        base: The database with the schema.
        rows: Rows of each table, parents first.
        path: A new file; None for a database in memory.
    """
    connection = sqlite3.connect(path or ":memory:", isolation_level=None, cached_statements=0)
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute("PRAGMA journal_mode = OFF")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("BEGIN")
    for statement in base.statements:
        with suppress(sqlite3.OperationalError):  # a virtual table whose module is missing
            connection.execute(statement)
    for table in base.tables.values():
        _insert(connection, table.name, table.columns, rows.get(table.name, ()))
    _delete_orphans(connection, base)
    connection.execute("COMMIT")
    return connection


def without_keys(base: BaseSample, built: sqlite3.Connection, *, is_reversed: bool) -> sqlite3.Connection:
    """Copy the rows into tables without keys and indexes, in their order or the reverse.

    It exposes a query whose result depends on the order of the scan.
    """
    connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
    for table in base.tables.values():
        rows = built.execute(f"SELECT * FROM {quoted(table.name)}").fetchall()
        described = built.execute(_COLUMNS, (table.name,)).fetchall()  # generated ones become plain
        names = [name for name, _ in described]
        columns = ", ".join(
            f"{quoted(name)} {kind} {collation}"
            for (name, kind), collation in zip(
                described, _collations(built, base, table.name, names), strict=True
            )
        )
        connection.execute(f"CREATE TABLE {quoted(table.name)} ({columns})")
        _insert(connection, table.name, names, rows[::-1] if is_reversed else rows)
    for statement in base.statements:
        if statement.upper().startswith("CREATE VIEW"):
            connection.execute(statement)
    return connection


def run_trusted(connection: sqlite3.Connection, sql: str) -> ExecutionOutcome:
    """Run the gold, or a mutant of it; `timeout` after `MAX_STEPS`."""
    connection.set_progress_handler(lambda: 1, MAX_STEPS)
    try:
        with closing(connection.execute(sql)) as cursor:
            rows = cursor.fetchmany(MAX_ROWS + 1)
            columns = tuple(entry[0] for entry in cursor.description or ())
    except (sqlite3.Error, sqlite3.Warning) as error:
        is_late = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_INTERRUPT
        return ExecutionOutcome("timeout" if is_late else "error", error=str(error))
    return ExecutionOutcome("ok", columns, tuple(rows[:MAX_ROWS]), len(rows) > MAX_ROWS)


def _insert(connection: sqlite3.Connection, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    listed, marks = ", ".join(map(quoted, columns)), ", ".join("?" * len(columns))
    connection.executemany(f"INSERT OR IGNORE INTO {quoted(table)} ({listed}) VALUES ({marks})", rows)


def _delete_orphans(connection: sqlite3.Connection, base: BaseSample) -> None:
    before = -1
    while before != connection.total_changes:
        before = connection.total_changes
        for table in base.tables.values():
            for reference in table.references:
                columns = [table.columns[position] for position in reference.columns]
                lost = orphans(table.name, columns, reference.parent, reference.parent_columns)
                connection.execute("DELETE " + lost)


def _collations(
    connection: sqlite3.Connection, base: BaseSample, table: str, columns: Sequence[str]
) -> list[str]:
    """`COLLATE ..` of each column, read from a temporary index on it."""
    if not any("collate" in statement.lower() for statement in base.statements):
        return [""] * len(columns)
    found = []
    for column in columns:
        connection.execute(f"CREATE INDEX probe_ ON {quoted(table)} ({quoted(column)})")
        (name,) = connection.execute("SELECT coll FROM pragma_index_xinfo('probe_') WHERE key").fetchone()
        connection.execute("DROP INDEX probe_")
        found.append(f"COLLATE {name}")
    return found
