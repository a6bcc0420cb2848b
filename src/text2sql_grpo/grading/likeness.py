"""SQLite likeness of a database of another engine, on which its neighbours are searched.

A search runs thousands of small queries, which take the other engines 10 to 100 times as long as SQLite. So
it runs on a likeness: the same tables, keys and rows, with every value as a number or the engine's own text.
The variants it finds are copied to the engine (`copies.py`), and only results there decide.
"""

import hashlib
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from sqlglot import exp
from sqlglot.errors import SqlglotError

from text2sql_grpo.errors import DataError
from text2sql_grpo.files import draft
from text2sql_grpo.grading.base_sample import BaseSample, Reference, TableSample, parents_first, quoted
from text2sql_grpo.grading.small_database import build
from text2sql_grpo.sql.address import Database
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Cell, Limits, Row
from text2sql_grpo.sql.query import read_query, write_query
from text2sql_grpo.sql.schema import ForeignKey, Schema

MAX_ROWS = 20_000  # of a table: keys, links and NULLs are read off them
LIMITS = Limits(timeout_s=60.0, max_rows=10 * MAX_ROWS, max_bytes=200_000_000)
MAX_ALLOWED = 400  # rows whose values are allowed
MAX_SQLITE_INTEGER = 2**63 - 1

_KINDS = {
    "INTEGER": re.compile(r"U?(TINYINT|SMALLINT|INTEGER|BIGINT|HUGEINT)"),
    "REAL": re.compile(r"FLOAT|DOUBLE|REAL|DECIMAL|NUMERIC"),
    "BOOLEAN": re.compile(r"BOOLEAN"),
    "DATE": re.compile(r"DATE"),
    "TIMESTAMP": re.compile(r"TIMESTAMP\w*"),
    "TEXT": re.compile(r"VARCHAR|CHARACTER|CHAR|BPCHAR|TEXT|CITEXT"),
}
_TIME_PARTS = {"YEAR": "%Y", "MONTH": "%m", "DAY": "%d", "HOUR": "%H", "MINUTE": "%M", "DOW": "%w"}
_PART_CLASSES: dict[type[exp.Expr], str] = {exp.Year: "YEAR", exp.Month: "MONTH", exp.Day: "DAY"}
_DAYS = (exp.DataType.Type.DATE, *exp.DataType.TEMPORAL_TYPES)
_OFFSET = re.compile(r"[+-]\d\d$")


@dataclass(frozen=True)
class NativeColumn:
    """One writable column.

    Attributes:
        type: Declared type, whole.
        plain_type: Type that it is written with: the base of a domain, else the same.
        labels: Values of an enum, empty for other types.
    """

    name: str
    type: str
    plain_type: str
    is_nullable: bool
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Type in the likeness: INTEGER, REAL, BOOLEAN, DATE, TIMESTAMP, TEXT, or OPAQUE.

        An opaque value, such as a list or a label of an enum, is only copied, never changed.
        """
        name = "" if self.plain_type.endswith("]") else re.split(r"\W", self.plain_type.upper())[0]
        return next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(name)), "OPAQUE")


@dataclass(frozen=True)
class NativeTable:
    """One table: its writable columns, and its unique keys, the primary one first."""

    namespace: str
    name: str
    columns: tuple[NativeColumn, ...]
    keys: tuple[tuple[str, ...], ...]

    @property
    def sql(self) -> str:
        """Name in SQL."""
        return ".".join(quoted(part) for part in (self.namespace, self.name) if part)


class Step(NamedTuple):
    """Statement that makes a part of a database; `name`: the table or view that it makes, or nothing."""

    sql: str
    name: str = ""


@dataclass(frozen=True)
class Catalogue:
    """Contents of a database of another engine, without rows.

    Attributes:
        dialect: Name of its SQL in sqlglot.
        tables: Tables.
        views: Name and query of each view.
        script: Statements that make the database without rows and foreign keys, in their order.
        unmade: Each table and view whose statement fails on an empty database, and the reason.
        search_path: Schemas in which bare names are found (PostgreSQL).
    """

    dialect: str
    tables: tuple[NativeTable, ...]
    views: tuple[tuple[str, str], ...]
    script: tuple[str, ...]
    unmade: tuple[tuple[str, str], ...] = ()
    search_path: str = ""


@dataclass(frozen=True)
class Likeness:
    """Likeness of a database.

    Attributes:
        path: SQLite file.
        catalogue: The database.
        schema: Schema of the database.
        uncovered: Reason for each table and view that it lacks, by the name in lower case.
        allowed: All values that a copy may hold, of each column (after its table) of few or opaque ones.
    """

    path: Path
    catalogue: Catalogue
    schema: Schema
    uncovered: dict[str, str]
    allowed: dict[tuple[str, str], tuple[Cell, ...]]

    @property
    def dialect(self) -> str:
        """Name of the database's SQL in sqlglot."""
        return self.catalogue.dialect

    @property
    def tables(self) -> tuple[NativeTable, ...]:
        """Tables that it has."""
        return tuple(table for table in self.catalogue.tables if table.name.lower() not in self.uncovered)


def as_sqlite(sql: str, dialect: str) -> str | None:
    """Query in SQLite's SQL, for the likeness; None if sqlglot cannot parse it.

    Namespaces are dropped, and a date is its text.

    >>> as_sqlite("SELECT a FROM sales.t WHERE d >= DATE '2020-01-31' AND EXTRACT(YEAR FROM d) = 2020", "duckdb")
    "SELECT a FROM t WHERE d >= '2020-01-31' AND CAST(STRFTIME('%Y', d) AS INTEGER) = 2020"
    """  # noqa: E501 (an example)
    tree = read_query(sql, dialect).tree
    if not isinstance(tree, exp.Query):
        return None
    tree = tree.copy()
    for part in tree.find_all(exp.Table, exp.Column):
        part.set("db", None)
        part.set("catalog", None)
    try:
        return write_query(tree.transform(_in_sqlite, copy=False))
    except (SqlglotError, ValueError, RecursionError):
        return None


def _in_sqlite(node: exp.Expr) -> exp.Expr:
    if isinstance(node, exp.Cast) and node.to.this in _DAYS:
        if isinstance(node.this, exp.Literal):
            return node.this
        return exp.func("DATE" if node.is_type("date") else "DATETIME", node.this)
    part = _PART_CLASSES.get(type(node)) or (node.name.upper() if isinstance(node, exp.Extract) else "")
    if part in _TIME_PARTS:
        moment = node.expression if isinstance(node, exp.Extract) else node.this
        read = exp.func("STRFTIME", exp.Literal.string(_TIME_PARTS[part]), moment)
        return exp.cast(read, "INTEGER")
    return node


def build_likeness(
    executor: SQLExecutor,
    database: Database,
    catalogue: Catalogue,
    schema: Schema,
    folder: Path,
    *,
    max_rows: int = MAX_ROWS,
) -> Likeness:
    """Build the likeness of a database, or find it in the folder.

    Args:
        executor: Reads the rows.
        database: The database.
        catalogue: Its tables.
        schema: Its foreign keys.
        folder: Where likenesses are kept, by their content.
        max_rows: Rows read of each table.

    Raises:
        DataError: The database cannot be read, or the folder cannot be written.
    """
    names = [table.name.lower() for table in catalogue.tables]
    uncovered = {name.lower(): reason for name, reason in catalogue.unmade}
    uncovered |= {name: "several tables have this name" for name in names if names.count(name) > 1}
    samples, rows = [], {}
    allowed: dict[tuple[str, str], tuple[Cell, ...]] = {}
    for table in catalogue.tables:
        if table.name.lower() in uncovered:
            continue
        reason = _unlike(executor, database, table, catalogue.dialect)
        if reason:
            uncovered[table.name.lower()] = reason
            continue
        try:
            found = _rows(executor, database, table, schema, catalogue, max_rows)
        except DataError as error:
            uncovered[table.name.lower()] = str(error)
            continue
        if any(isinstance(cell, int) and abs(cell) > MAX_SQLITE_INTEGER for row in found for cell in row):
            uncovered[table.name.lower()] = "it holds an integer of more than 64 bits"
            continue
        samples.append(_sample(table, schema))
        rows[table.name] = found
        for place, column in enumerate(table.columns):
            if column.kind in ("BOOLEAN", "OPAQUE"):
                values = column.labels or dict.fromkeys(row[place] for row in found[:MAX_ALLOWED])
                others = tuple(value for value in values if value is not None)
                allowed[table.name, column.name] = (0, 1) if column.kind == "BOOLEAN" else others
    for name, text in catalogue.views:
        tree = read_query(text, catalogue.dialect).tree
        lost = [t.name for t in tree.find_all(exp.Table) if t.name.lower() in uncovered] if tree else []
        if lost:
            uncovered[name.lower()] = f"it reads {lost[0]}: {uncovered[lost[0].lower()]}"
    tables = {sample.name for sample in samples}
    samples = [
        replace(sample, references=tuple(r for r in sample.references if r.parent in tables))
        for sample in samples
    ]
    statements = [_create(sample, catalogue) for sample in samples]
    statements += [
        f"CREATE VIEW {quoted(name)} AS {query}"
        for name, text in catalogue.views
        if name.lower() not in {*names, *uncovered} and (query := as_sqlite(text, catalogue.dialect))
    ]
    base = BaseSample(schema, tuple(statements), {}, parents_first(samples))
    digest = hashlib.sha256(repr((statements, rows)).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    path = folder / f"{digest}.sqlite"
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with draft(path) as scratch:
                build(base, rows, scratch).close()
        except (OSError, sqlite3.Error) as error:
            raise DataError(f"cannot write the likeness of a database: {error} (at {path})") from error
    return Likeness(path, catalogue, schema, uncovered, allowed)


def read_rows(path: Path, table: NativeTable) -> list[Row]:
    """Rows of one table of a likeness, or of a variant of one, in its columns' order."""
    listed = ", ".join(quoted(column.name) for column in table.columns)
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return connection.execute(f"SELECT {listed} FROM {quoted(table.name)}").fetchall()


def read(executor: SQLExecutor, database: Database, sql: str) -> tuple[Row, ...]:
    """Rows of a query of this package.

    Raises:
        DataError: It failed.
    """
    outcome = executor.execute(database, sql, limits=LIMITS)
    if not outcome.is_ok:
        raise DataError(f"cannot read the database for its neighbours: {outcome.error}")
    return outcome.rows


def _unlike(executor: SQLExecutor, database: Database, table: NativeTable, dialect: str) -> str:
    """Reason why the likeness cannot hold a table; empty if it can.

    A value whose text the engine does not read back as the same value would be changed in silence.
    """
    folded = [column.name.lower() for column in table.columns]
    if len(set(folded)) < len(folded):
        return "two columns differ only in case"
    others = [column for column in table.columns if column.kind in ("TEXT", "OPAQUE")]
    text = "VARCHAR" if dialect == "duckdb" else "TEXT"
    lost = [
        f"count(*) FILTER (WHERE {quoted(c.name)} IS NOT NULL AND CAST(CAST(CAST({quoted(c.name)} AS {text})"
        f" AS {c.type}) AS {text}) IS DISTINCT FROM CAST({quoted(c.name)} AS {text}))"
        for c in others
    ]
    if not lost:
        return ""
    listed = ", ".join(quoted(column.name) for column in table.columns)
    source = f"(SELECT {listed} FROM {table.sql} LIMIT {MAX_ROWS}) AS rows_"
    outcome = executor.execute(database, f"SELECT {', '.join(lost)} FROM {source}", limits=LIMITS)
    if not outcome.is_ok:
        return f"a type is not read back from its text ({outcome.error})"
    for column, n_lost in zip(others, outcome.rows[0], strict=True):
        if n_lost:
            return f"column {column.name} of type {column.type} is not read back from its text"
    return ""


def _sample(table: NativeTable, schema: Schema) -> TableSample:
    columns = tuple(column.name for column in table.columns)
    references = []
    for key in _foreign_keys(table, schema):
        if set(key.columns) <= set(columns) and key.references:
            own = tuple(columns.index(column) for column in key.columns)
            references.append(Reference(own, key.table, key.references))
    keys = tuple(
        tuple(columns.index(column) for column in key) for key in table.keys if set(key) <= set(columns)
    )
    kinds = ("TEXT",) * len(columns)  # not read
    return TableSample(table.name, columns, kinds, keys, tuple(references), frozenset(), ())


def _foreign_keys(table: NativeTable, schema: Schema) -> Sequence[ForeignKey]:
    for other in schema.tables:
        if (other.namespace, other.name) == (table.namespace, table.name):
            return other.foreign_keys
    return ()


def _create(sample: TableSample, catalogue: Catalogue) -> str:
    table = next(table for table in catalogue.tables if table.name == sample.name)
    parts = []
    for column in table.columns:
        name = quoted(column.name)
        kind = "TEXT" if column.kind == "OPAQUE" else column.kind
        parts.append(f"{name} {kind}{'' if column.is_nullable else ' NOT NULL'}")
    for index, key in enumerate(sample.keys):
        listed = ", ".join(quoted(sample.columns[place]) for place in key)
        is_primary = index == 0 and not any(table.columns[place].is_nullable for place in key)
        parts.append(f"{'PRIMARY KEY' if is_primary else 'UNIQUE'} ({listed})")
    for reference in sample.references:
        own = ", ".join(quoted(sample.columns[place]) for place in reference.columns)
        others = ", ".join(map(quoted, reference.parent_columns))
        parts.append(f"FOREIGN KEY ({own}) REFERENCES {quoted(reference.parent)} ({others})")
    return f"CREATE TABLE {quoted(sample.name)} ({', '.join(parts)})"


def _rows(
    executor: SQLExecutor,
    database: Database,
    table: NativeTable,
    schema: Schema,
    catalogue: Catalogue,
    max_rows: int,
) -> list[Row]:
    """First rows of a table, and those that the first rows of other tables refer to."""
    text = "VARCHAR" if catalogue.dialect == "duckdb" else "TEXT"
    shown = ", ".join(
        quoted(column.name)
        if column.kind in ("INTEGER", "REAL", "BOOLEAN")
        else f"CAST({quoted(column.name)} AS {text})"
        for column in table.columns
    )
    rows = list(read(executor, database, f"SELECT {shown} FROM {table.sql} LIMIT {max_rows}"))
    if len(rows) == max_rows:
        for other in catalogue.tables:
            for key in _foreign_keys(other, schema):
                if (key.namespace, key.table) != (table.namespace, table.name) or other == table:
                    continue
                own, parents = (", ".join(map(quoted, names)) for names in (key.columns, key.references))
                used = f"SELECT {own} FROM (SELECT {own} FROM {other.sql} LIMIT {max_rows}) AS used_"
                query = f"SELECT {shown} FROM {table.sql} WHERE ({parents}) IN ({used})"
                known = set(rows)
                rows += [row for row in read(executor, database, query) if row not in known]
    columns = [
        _alike(column, cells) for column, cells in zip(table.columns, zip(*rows, strict=True), strict=False)
    ]
    return list(zip(*columns, strict=True))


def _alike(column: NativeColumn, cells: Sequence[Cell]) -> Sequence[Cell]:
    """Cells of a column; moments all in one form, by which the search knows a column of dates."""
    if column.kind != "TIMESTAMP":
        return cells
    texts = [None if cell is None else _moment(str(cell)) for cell in cells]
    if all(text is None or ".000000" in text for text in texts):
        texts = [text and text.replace(".000000", "") for text in texts]
    return texts


def _moment(text: str) -> str:
    """Moment with six digits of a second and minutes in its offset.

    >>> _moment("2020-01-31 10:00:00.5+00")
    '2020-01-31 10:00:00.500000+00:00'
    """
    offset = _OFFSET.search(text[10:])
    zone = offset.group() if offset else ""
    whole, _, digits = text.removesuffix(zone).partition(".")
    return f"{whole}.{digits:0<6}{zone and zone + ':00'}"
