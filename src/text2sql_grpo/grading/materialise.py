"""Small SQLite databases made from rows, gold queries on them, and whether these have one result there."""

import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from text2sql_grpo.grading.base_sample import MAX_BYTES, DatabaseSample, quoted
from text2sql_grpo.grading.gold_result import GoldResult
from text2sql_grpo.grading.regular_expressions import matches
from text2sql_grpo.sql.outcome import Cell, ExecutionOutcome, Row

MAX_STEPS = 5_000_000  # SQLite instructions of one query; a count, so that load changes no choice
MAX_ROWS = 2_000
_COLUMNS = "SELECT name, type FROM pragma_table_xinfo(?) WHERE hidden <> 1"
_HAS_ROW_IDS = "SELECT 1 FROM pragma_table_list(?) WHERE NOT wr"
# A value of the wrong type in a STRICT table, a value over the limit, an integer of more than 64 bits.
_REFUSALS = (sqlite3.IntegrityError, sqlite3.DataError, OverflowError)
PAGE_BYTES = 512  # most tables hold a few rows: a test database of ten tables stays under 20 kB

IN_MEMORY = Path(":memory:")
Content = Mapping[str, Sequence[Row]]  # rows of each table, parents first
R = TypeVar("R")


class SmallDatabase(sqlite3.Connection):
    """Connection to a database of this process, whose values have a bounded length.

    Attributes:
        time: Budget of its expressions.
    """

    def __init__(
        self,
        base: DatabaseSample,
        path: Path = IN_MEMORY,
        *,
        max_bytes: int = MAX_BYTES,
        cached_statements: int = 0,
    ) -> None:
        """Make one without tables, of a new file or in memory."""
        super().__init__(path, isolation_level=None, cached_statements=cached_statements)
        self.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, max_bytes)
        self.time = base.time
        for setting in (f"page_size = {PAGE_BYTES}", "journal_mode = MEMORY", "synchronous = OFF"):
            self.execute(f"PRAGMA {setting}")
        if base.is_like_exact:
            self.execute("PRAGMA case_sensitive_like = ON")


def materialise(base: DatabaseSample, content: Content, path: Path = IN_MEMORY) -> SmallDatabase:
    """Make a database with the sample's tables, views and constraints, and other rows.

    Rows that a constraint refuses are left out, and so are rows that then lack their parent. Longer values
    than `MAX_BYTES` are cut, rows with longer JSON left out.

    Args:
        path: A new file, or `IN_MEMORY`.

    Raises:
        SlowExpressionsError: See `ExpressionTime.metered`.
    """
    connection = SmallDatabase(base, path)
    try:
        with base.time.metered(connection):
            connection.execute("BEGIN")
            with regular_expressions_in(connection):
                for statement in base.statements:
                    with suppress(sqlite3.OperationalError):  # a virtual table whose module is missing
                        connection.execute(statement.sql)
                for table in base.tables.values():
                    insert = partial(_insert, connection, table.name, table.columns)
                    insert_rows(insert, content.get(table.name, ()), _REFUSALS)
            before = -1
            while before != connection.total_changes:  # a row without its parent may be a parent
                before = connection.total_changes
                for orphans in (table.orphans(r) for table in base.tables.values() for r in table.references):
                    connection.execute(f"DELETE {orphans}")
            connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def regular_expressions_in(connection: sqlite3.Connection) -> Iterator[None]:
    """Context in which SQLite computes regular expressions of CHECKs; queries run without, as in workers."""
    functions: dict[str, Callable[[Any, Any], bool | None]] = {
        "regexp": lambda expression, text: matches(str(expression), text),
        "regexp_i_like": lambda text, expression: matches(f"(?i){expression}", text),
        "regexp_full_match": lambda text, expression: matches(f"^(?:{expression})$", text),
    }
    for name, function in functions.items():
        connection.create_function(name, 2, function)
    try:
        yield
    finally:
        for name in functions:
            connection.create_function(name, 2, None)


@contextmanager
def row_test(base: DatabaseSample, table: str) -> Iterator[Callable[[Sequence[Cell]], bool]]:
    """Test of a row against the types and CHECKs of a table, its keys and references aside.

    Raises:
        SlowExpressionsError: See `ExpressionTime.metered`.
    """
    columns = base.tables[table].columns
    insert = f"INSERT INTO {quoted(table)} ({', '.join(map(quoted, columns))}) VALUES"
    insert = f"{insert} ({', '.join('?' * len(columns))})"
    with closing(SmallDatabase(base, cached_statements=2)) as connection, regular_expressions_in(connection):
        for statement in base.statements:
            if statement.table == table:
                with suppress(sqlite3.OperationalError):  # a function that is missing
                    connection.execute(statement.sql)
        connection.execute("BEGIN")

        def accepts(row: Sequence[Cell]) -> bool:
            try:
                with base.time.metered(connection):
                    connection.execute(insert, row)
                    connection.execute(f"DELETE FROM {quoted(table)}")
            except _REFUSALS:
                return False
            except sqlite3.OperationalError:
                return True
            return True

        yield accepts


def insert_rows(
    insert: Callable[[Sequence[R]], None], rows: Sequence[R], errors: tuple[type[Exception], ...]
) -> bool:
    """Insert all rows except those that the engine refuses; return whether it refused none.

    Args:
        insert: Inserts some rows, all or none.
        errors: Errors by which it refuses.
    """
    if not rows:
        return True
    try:
        insert(rows)
    except errors:
        if len(rows) == 1:
            return False
        half = len(rows) // 2
        parts = [insert_rows(insert, part, errors) for part in (rows[:half], rows[half:])]
        return all(parts)
    return True


def reversed_copy(
    base: DatabaseSample,
    built: sqlite3.Connection,
    path: Path = IN_MEMORY,
    *,
    row_ids: Collection[str] = (),
    max_bytes: int = MAX_BYTES,
) -> SmallDatabase:
    """Copy the tables that are there, rows in the reverse order and without keys, see `SmallDatabase`.

    A query whose result depends on the order of the scan returns different rows there.

    Args:
        row_ids: Names of `ROW_IDS` that become columns with the row ids of `built`.
    """
    connection = SmallDatabase(base, path, max_bytes=max_bytes)
    connection.execute("BEGIN")
    there = {name for (name,) in built.execute("SELECT name FROM sqlite_master")}
    for table in (table for table in base.tables.values() if table.name in there):
        described = built.execute(_COLUMNS, (table.name,)).fetchall()  # generated ones become plain
        names = [name for name, _ in described]
        collations = _collations(built, base, table.name, names)
        if row_ids and built.execute(_HAS_ROW_IDS, (table.name,)).fetchone():
            added = sorted(set(row_ids).difference(map(str.lower, names)))
            names += added
            described += [(name, "INTEGER") for name in added]
            collations += [""] * len(added)
        listed = ", ".join(map(quoted, names))
        with base.time.metered(built):
            rows = built.execute(f"SELECT {listed} FROM {quoted(table.name)}").fetchall()
        columns = ", ".join(
            f"{quoted(name)} {kind} {collation}"
            for (name, kind), collation in zip(described, collations, strict=True)
        )
        connection.execute(f"CREATE TABLE {quoted(table.name)} ({columns})")
        _insert(connection, table.name, names, rows[::-1])
    for statement in base.statements:
        if not statement.table:
            connection.execute(statement.sql)
    connection.execute("COMMIT")
    return connection


def run_gold(connection: SmallDatabase, sql: str, *, max_steps: int = MAX_STEPS) -> ExecutionOutcome:
    """Run the gold, or a mutant of it; `timeout` after `max_steps`.

    Raises:
        SlowExpressionsError: See `ExpressionTime.metered`.
    """
    try:
        with connection.time.metered(connection, max_steps), closing(connection.execute(sql)) as cursor:
            rows = cursor.fetchmany(MAX_ROWS + 1)
            columns = tuple(entry[0] for entry in cursor.description or ())
    except (sqlite3.Error, sqlite3.Warning) as error:
        is_late = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_INTERRUPT
        return ExecutionOutcome("timeout" if is_late else "error", error=str(error))
    return ExecutionOutcome("ok", columns, tuple(rows[:MAX_ROWS]), len(rows) > MAX_ROWS)


def is_stable(
    base: DatabaseSample, connection: SmallDatabase, gold: GoldResult, again: Sequence[str]
) -> bool:
    """True if the gold has one result in any order of the scan, except for ties of its outermost order.

    Then no bare column of a group and no inner tie decides, so that a right query with another plan agrees.

    Args:
        gold: Its result on the small database.
        again: The gold with ties broken in other ways.
    """
    if not all(gold.accepts(run_gold(connection, sql)) for sql in again):
        return False
    with closing(reversed_copy(base, connection)) as copy:
        return gold.accepts(run_gold(copy, gold.sql))


def _insert(connection: sqlite3.Connection, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Insert rows, all or none; those that break a key or a CHECK are ignored, long values are cut."""
    listed, marks = ", ".join(map(quoted, columns)), ", ".join("?" * len(columns))
    connection.execute("SAVEPOINT rows_")
    insert = f"INSERT OR IGNORE INTO {quoted(table)} ({listed}) VALUES ({marks})"
    try:
        try:
            connection.executemany(insert, rows)
        except sqlite3.DataError:  # a value over the limit
            connection.execute("ROLLBACK TO rows_")
            connection.executemany(insert, [tuple(map(_cut, row)) for row in rows])
    except _REFUSALS:
        connection.execute("ROLLBACK TO rows_")
        raise
    finally:
        connection.execute("RELEASE rows_")


def _cut(value: Cell) -> Cell:
    """Begin of a long text or BLOB; JSON stays whole, so that its row is refused."""
    if not isinstance(value, str | bytes) or value[:1] in ("[", "{"):
        return value
    return value[: MAX_BYTES // 4]  # a letter has up to 4 bytes


def _collations(
    connection: sqlite3.Connection, base: DatabaseSample, table: str, columns: Sequence[str]
) -> list[str]:
    """`COLLATE ..` of each column, read from a temporary index on it."""
    if not any("collate" in statement.sql.lower() for statement in base.statements):
        return [""] * len(columns)
    found = []
    for column in columns:
        connection.execute(f"CREATE INDEX probe_ ON {quoted(table)} ({quoted(column)})")
        (name,) = connection.execute("SELECT coll FROM pragma_index_xinfo('probe_') WHERE key").fetchone()
        connection.execute("DROP INDEX probe_")
        found.append(f"COLLATE {name}")
    return found
