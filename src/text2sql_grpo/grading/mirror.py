"""SQLite mirror of a DuckDB or PostgreSQL database, on which its test databases are searched.

A search runs thousands of small queries, which take the other engines 10 to 100 times as long as SQLite. So
it runs on a mirror: the same tables, keys and rows, with every value as a number or the engine's own text.
The databases that it finds are copied to the engine (`copies.py`), and only results there decide.
"""

import hashlib
import re
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from sqlglot import exp

from text2sql_grpo.errors import DataError
from text2sql_grpo.files import draft, is_kept, prune_once
from text2sql_grpo.grading.base_sample import (
    DatabaseSample,
    Statement,
    TableSample,
    parents_first,
    quoted,
    without_rows,
)
from text2sql_grpo.grading.gold_result import GoldResult
from text2sql_grpo.grading.materialise import Content, materialise, regular_expressions_in
from text2sql_grpo.grading.nested import read_nested
from text2sql_grpo.grading.translation import as_sqlite, plain_value
from text2sql_grpo.sql.address import Database, parse_address
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Cell, Limits, Row
from text2sql_grpo.sql.query import in_dialect, read_query, write_query
from text2sql_grpo.sql.schema import Column, Schema, Table, read_schema

MAX_ROWS = 20_000  # of a table: keys, links and NULLs are read off them
MAX_ROWS_TRANSLATED = 200_000  # of a table; on a longer one queries must return the same on all rows
LIMITS = Limits(timeout_s=60.0, max_rows=10 * MAX_ROWS, max_bytes=200_000_000)
MAX_ALLOWED = 400  # rows whose values are allowed

_KINDS = {
    "INTEGER": re.compile(r"U?(TINYINT|SMALLINT|INTEGER|BIGINT|HUGEINT)"),
    "REAL": re.compile(r"FLOAT|DOUBLE|REAL|DECIMAL|NUMERIC"),
    "BOOLEAN": re.compile(r"BOOLEAN"),
    "DATE": re.compile(r"DATE"),
    "TIMESTAMP": re.compile(r"TIMESTAMP\w*"),
    "TEXT": re.compile(r"VARCHAR|CHARACTER|CHAR|BPCHAR|TEXT|CITEXT"),
}
_KIND_NAMES = {"DATE": "date", "TIMESTAMP": "moment", "INTEGER": "number", "REAL": "number"}
_NESTED = re.compile(r".*\]|(JSON|STRUCT|MAP|UNION|BLOB|BYTEA|XML|TSVECTOR|INTERVAL).*", re.I | re.S)
_DIGITS = re.compile(r"(?<=DECIMAL|NUMERIC)\(\d+, ?\d+\)", re.IGNORECASE)
_OFFSET = re.compile(r"[+-]\d\d$")


def mirror_type(column: Column) -> str:
    """Type in the mirror: INTEGER, REAL, BOOLEAN, DATE, TIMESTAMP, TEXT, or OPAQUE.

    An opaque value, such as a label of an enum, is copied, and changed at most to another of the column.
    """
    kind = column.cast_type
    name = "" if kind.endswith("]") else re.split(r"\W", kind.upper())[0]
    return next((shown for shown, pattern in _KINDS.items() if pattern.fullmatch(name)), "OPAQUE")


def table_sql(table: Table) -> str:
    """Name of a table in SQL."""
    return ".".join(quoted(part) for part in (table.namespace, table.name) if part)


@dataclass(frozen=True)
class Catalogue:
    """How a database of another engine is made, without rows.

    Attributes:
        dialect: Name of its SQL in sqlglot.
        views: Name and query of each view.
        script: Statements that make the database without rows and foreign keys, in their order.
        gaps: Each table and view whose statement fails on an empty database, and the reason.
        search_path: Schemas in which bare names are found (PostgreSQL).
    """

    dialect: str
    views: tuple[tuple[str, str], ...]
    script: tuple[str, ...]
    gaps: tuple[tuple[str, str], ...] = ()
    search_path: str = ""


@dataclass(frozen=True)
class Mirror:
    """SQLite file in place of a database of another engine.

    Attributes:
        path: The SQLite file.
        catalogue: How the database is made.
        schema: Schema of the database, with the columns that the mirror has.
        gaps: Reason for each table and view that the mirror lacks, by the name in lower case.
        allowed: All values that a copy may hold, of each column (after its table) of few or opaque ones.
        is_whole: False if it lacks rows of a long table.
    """

    path: Path
    catalogue: Catalogue
    schema: Schema
    gaps: dict[str, str]
    allowed: dict[tuple[str, str], tuple[Cell, ...]]
    is_whole: bool = True

    @property
    def dialect(self) -> str:
        """Name of the database's SQL in sqlglot."""
        return self.catalogue.dialect

    @property
    def tables(self) -> tuple[Table, ...]:
        """Tables that it has."""
        return tuple(table for table in self.schema.tables if table.name.lower() not in self.gaps)

    def in_sqlite(self, sql: str) -> str | None:
        """Query in the mirror's SQL; None if it cannot be written."""
        return as_sqlite(sql, self.dialect, self.kinds)

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Kinds of the columns; see `kinds_of`."""
        return kinds_of(self.schema)

    def with_plain_values(self, sql: str) -> str:
        """Query in the database's SQL whose dates, intervals and labels are texts, as in the mirror."""
        tree = read_query(sql, self.dialect).tree
        plain = write_query(tree.transform(plain_value, copy=False), self.dialect) if tree else None
        return plain or sql

    def gap_of(self, sql: str) -> str:
        """Part of a query that the mirror lacks, and why; empty if it has all."""
        tree = read_query(sql, self.dialect).tree if sql and self.gaps else None
        for table in tree.find_all(exp.Table) if tree else ():
            reason = self.gaps.get(table.name.lower())
            if reason:
                return f"table {table.name} cannot be copied: {reason}"
        return ""


def kinds_of(schema: Schema) -> dict[str, str]:
    """Kind of the columns of each name in lower case, for `as_sqlite`, where all of a name have the same."""
    found = defaultdict[str, set[str]](set)
    for column in (column for table in schema.tables for column in table.columns):
        is_time = column.cast_type.upper().split()[:1] == ["TIME"]
        found[column.name.lower()].add("time" if is_time else _KIND_NAMES.get(mirror_type(column), ""))
    return {name: next(iter(kinds)) for name, kinds in found.items() if len(kinds) == 1}


def build_mirror(
    executor: SQLExecutor,
    database: Database,
    catalogue: Catalogue,
    schema: Schema,
    folder: Path,
    *,
    max_rows: int = MAX_ROWS,
    is_copied: bool = True,
) -> Mirror:
    """Make the mirror of a database, or find it in the folder.

    Args:
        catalogue: How the database is made.
        schema: Its tables, with the columns that the mirror is to have.
        folder: Where mirrors are kept, by their content.
        max_rows: Rows read of each table.
        is_copied: True if rows of the mirror will be written to the engine, which must read them back. Then
            the mirror computes generated columns; else it holds them.

    Raises:
        DataError: The database cannot be read, or the folder cannot be written.
    """
    computed: dict[str, list[Column]] = {}
    if is_copied:
        computed = {t.name: [c for c in t.columns if c.is_generated] for t in schema.tables}
        stored = (
            replace(t, columns=tuple(c for c in t.columns if not c.is_generated)) for t in schema.tables
        )
        schema = replace(schema, tables=tuple(stored))
    names, kinds = [table.name.lower() for table in schema.tables], kinds_of(schema)
    gaps = {name.lower(): reason for name, reason in catalogue.gaps}
    gaps |= {name: "several tables have this name" for name in names if names.count(name) > 1}
    samples, rows = [], {}
    allowed: dict[tuple[str, str], tuple[Cell, ...]] = {}
    for table in schema.tables:
        if table.name.lower() in gaps:
            continue
        try:
            if is_copied:
                _check_text_forms(executor, database, table)
            found = _rows(executor, database, table, schema, max_rows)
        except DataError as error:
            gaps[table.name.lower()] = str(error)
            continue
        samples.append(without_rows(table))
        rows[table.name] = found
        for place, column in enumerate(table.columns):
            shown = [row[place] for row in found[:MAX_ALLOWED] if row[place] is not None]
            kind = mirror_type(column)
            if kind == "BOOLEAN" or (kind == "OPAQUE" and not read_nested(shown)):
                values = column.labels or dict.fromkeys(shown)
                allowed[table.name, column.name] = (0, 1) if kind == "BOOLEAN" else tuple(values)
    for name, text in catalogue.views:
        tree = read_query(text, catalogue.dialect).tree
        lost = [t.name for t in tree.find_all(exp.Table) if t.name.lower() in gaps] if tree else []
        if lost:
            gaps[name.lower()] = f"it reads {lost[0]}: {gaps[lost[0].lower()]}"
    samples = [
        replace(sample, references=tuple(r for r in sample.references if r.parent in rows))
        for sample in samples
    ]
    by_name = {table.name: table for table in schema.tables}
    statements = []
    checks = _checks(catalogue, kinds)
    for one in samples:
        table, added = by_name[one.name], computed.get(one.name, ())
        create = _create(one, table.columns, added, catalogue.dialect, kinds)
        own = checks.get(one.name, ())
        statements.append(Statement(_with_checks(create, own, rows[one.name], one), one.name))
    statements += [
        Statement(f"CREATE VIEW {quoted(name)} AS {query}", view=name)
        for name, text in catalogue.views
        if name.lower() not in {*names, *gaps} and (query := as_sqlite(text, catalogue.dialect, kinds))
    ]
    base = DatabaseSample(schema, tuple(statements), {}, parents_first(samples))
    digest = hashlib.sha256(repr((statements, rows)).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    path = folder / f"{digest}.sqlite"
    if not is_kept(path):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            prune_once(folder)
            _write(base, rows, path)
        except (OSError, sqlite3.Error) as error:
            raise DataError(f"cannot write the mirror of a database: {error} (at {path})") from error
    is_whole = all(len(found) < max_rows for found in rows.values())
    return Mirror(path, catalogue, schema, gaps, allowed, is_whole)


def _write(base: DatabaseSample, rows: Content, path: Path) -> None:
    """Write the mirror's file atomically, without views that SQLite cannot read."""
    with draft(path) as scratch, closing(materialise(base, rows, scratch)) as connection:
        for view in (quoted(statement.view) for statement in base.statements if statement.view):
            try:
                connection.execute(f"SELECT * FROM {view} LIMIT 0").close()
            except sqlite3.Error:  # no warning, which would mean the user's
                connection.execute(f"DROP VIEW {view}")


def read_rows(path: Path, table: Table) -> list[Row]:
    """Rows of one table of a mirror, or of a test database of one, in its columns' order."""
    listed = ", ".join(quoted(column.name) for column in table.columns)
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table.name,)).fetchall():
            return []  # a candidate holds the tables that are read
        return connection.execute(f"SELECT {listed} FROM {quoted(table.name)}").fetchall()


def read(executor: SQLExecutor, database: Database, sql: str) -> tuple[Row, ...]:
    """Rows of a query of this package.

    Raises:
        DataError: It failed.
    """
    outcome = executor.execute(database, sql, limits=LIMITS)
    if not outcome.is_ok:
        raise DataError(f"cannot read the database for its test databases: {outcome.error}")
    return outcome.rows


def _check_text_forms(executor: SQLExecutor, database: Database, table: Table) -> None:
    """Refuse a table whose values the engine does not read back from their texts: they would be changed.

    Raises:
        DataError: With the reason.
    """
    folded = [column.name.lower() for column in table.columns]
    if len(set(folded)) < len(folded):
        raise DataError("two columns differ only in case")
    others = [column for column in table.columns if mirror_type(column) in ("TEXT", "OPAQUE")]
    lost = [
        f"count(*) FILTER (WHERE {quoted(c.name)} IS NOT NULL AND CAST(CAST(CAST({quoted(c.name)} AS TEXT)"
        f" AS {c.cast_type}) AS TEXT) IS DISTINCT FROM CAST({quoted(c.name)} AS TEXT))"
        for c in others
    ]
    if not lost:
        return
    listed = ", ".join(quoted(column.name) for column in table.columns)
    source = f"(SELECT {listed} FROM {table_sql(table)} LIMIT {MAX_ROWS}) AS rows_"
    outcome = executor.execute(database, f"SELECT {', '.join(lost)} FROM {source}", limits=LIMITS)
    if not outcome.is_ok:
        raise DataError(f"a type is not read back from its text ({outcome.error})")
    for column, n_lost in zip(others, outcome.rows[0], strict=True):
        if n_lost:
            raise DataError(f"column {column.name} of type {column.type} is not read back from its text")


def _create(
    sample: TableSample,
    columns: Sequence[Column],
    computed: Sequence[Column],
    dialect: str,
    kinds: dict[str, str],
) -> str:
    """CREATE TABLE of a table of the mirror, without generated columns that SQLite cannot compute."""
    parts = []
    for column in columns:
        digits = _DIGITS.search(column.cast_type)
        kind = mirror_type(column).replace("OPAQUE", "TEXT") + (digits.group() if digits else "")
        labels = ", ".join(exp.Literal.string(label).sql() for label in column.labels)
        check = f" CHECK ({quoted(column.name)} IN ({labels}))" if labels else ""
        parts.append(f"{quoted(column.name)} {kind}{'' if column.accepts_null else ' NOT NULL'}{check}")
    with closing(sqlite3.connect(":memory:")) as connection:
        for column in computed:
            query = as_sqlite(f"SELECT {column.expression}", dialect, kinds)
            part = f"{quoted(column.name)} AS ({query.removeprefix('SELECT ')})" if query else ""
            with suppress(sqlite3.Error):
                connection.execute(f"CREATE TABLE t{len(parts)} ({', '.join([*parts, part])})")
                parts.append(part)
    for index, key in enumerate(sample.keys):
        listed = ", ".join(quoted(sample.columns[place]) for place in key)
        is_primary = index == 0 and not any(columns[place].accepts_null for place in key)
        parts.append(f"{'PRIMARY KEY' if is_primary else 'UNIQUE'} ({listed})")
    for reference in sample.references:
        own = ", ".join(quoted(sample.columns[place]) for place in reference.columns)
        others = ", ".join(map(quoted, reference.parent_columns))
        parts.append(f"FOREIGN KEY ({own}) REFERENCES {quoted(reference.parent)} ({others})")
    return f"CREATE TABLE {quoted(sample.name)} ({', '.join(parts)})"


def _checks(catalogue: Catalogue, kinds: dict[str, str]) -> dict[str, list[str]]:
    """CHECKs in SQLite's SQL, by the name of their table; the mirror has one table of a name at most."""
    found = defaultdict[str, list[str]](list)
    for statement in catalogue.script:
        tree = read_query(statement, catalogue.dialect).tree if "CHECK" in statement.upper() else None
        table = tree.find(exp.Table) if isinstance(tree, exp.Create) else None
        for check in tree.find_all(exp.CheckColumnConstraint) if tree and table else ():
            test = f"SELECT {check.this.sql(catalogue.dialect)}"
            query = as_sqlite(test, catalogue.dialect, kinds, has_regexp=True)
            if table and query:
                found[table.name].append(query.removeprefix("SELECT "))
    return found


def _with_checks(create: str, checks: Sequence[str], rows: Sequence[Row], sample: TableSample) -> str:
    """CREATE TABLE with those CHECKs that SQLite can compute, and that the table's rows pass there."""
    marks = ", ".join("?" * len(sample.columns))
    listed = ", ".join(map(quoted, sample.columns))
    for check in checks:
        wider = f"{create.removesuffix(')')}, CHECK ({check}))"
        with closing(sqlite3.connect(":memory:")) as connection, suppress(sqlite3.Error):
            insert = f"INSERT INTO {quoted(sample.name)} ({listed}) VALUES ({marks})"
            with regular_expressions_in(connection):
                connection.execute(wider)
                connection.executemany(insert, rows)
            create = wider
    return create


def _rows(
    executor: SQLExecutor,
    database: Database,
    table: Table,
    schema: Schema,
    max_rows: int,
) -> list[Row]:
    """First rows of a table, and those that the first rows of other tables refer to.

    Raises:
        DataError: They cannot be read, or SQLite cannot hold them.
    """
    shown = ", ".join(
        quoted(column.name)
        if mirror_type(column) in ("INTEGER", "REAL", "BOOLEAN")
        else f"CAST({quoted(column.name)} AS TEXT)"
        for column in table.columns
    )
    rows = list(read(executor, database, f"SELECT {shown} FROM {table_sql(table)} LIMIT {max_rows}"))
    if len(rows) == max_rows:
        for other in schema.tables:
            for key in other.foreign_keys:
                if (key.namespace, key.table) != (table.namespace, table.name) or other == table:
                    continue
                own, parents = (", ".join(map(quoted, names)) for names in (key.columns, key.references))
                used = f"SELECT {own} FROM (SELECT {own} FROM {table_sql(other)} LIMIT {max_rows}) AS used_"
                query = f"SELECT {shown} FROM {table_sql(table)} WHERE ({parents}) IN ({used})"
                known = set(rows)
                rows += [row for row in read(executor, database, query) if row not in known]
    if any(isinstance(cell, int) and not -(2**63) <= cell < 2**63 for row in rows for cell in row):
        raise DataError("it holds an integer of more than 64 bits")
    columns = [
        _normalised(column, cells)
        for column, cells in zip(table.columns, zip(*rows, strict=True), strict=False)
    ]
    return list(zip(*columns, strict=True))


def _normalised(column: Column, cells: Sequence[Cell]) -> Sequence[Cell]:
    """Cells of a column; moments all in one form, by which the search knows a column of dates."""
    if mirror_type(column) != "TIMESTAMP":
        return cells
    texts = [None if cell is None else _padded_moment(str(cell)) for cell in cells]
    if all(text is None or ".000000" in text for text in texts):
        texts = [text and text.replace(".000000", "") for text in texts]
    return texts


def _padded_moment(text: str) -> str:
    """Moment with six digits of a second and minutes in its offset.

    >>> _padded_moment("2020-01-31 10:00:00.5+00")
    '2020-01-31 10:00:00.500000+00:00'
    """
    offset = _OFFSET.search(text[10:])
    zone = offset.group() if offset else ""
    whole, _, digits = text.removesuffix(zone).partition(".")
    return f"{whole}.{digits:0<6}{zone and zone + ':00'}"


class Translator:
    """Translator of queries between a database and its mirror, which keeps those with one result on both.

    A SQLite file is its own mirror.

    Attributes:
        path: The mirror.
    """

    def __init__(self, executor: SQLExecutor, database: Database, folder: Path) -> None:
        """Make the mirror, or find it in the folder.

        Raises:
            DataError: The database cannot be read, or the folder cannot be written.
        """
        address = parse_address(database)
        self._executor, self._database = executor, database
        self._known: dict[str, str | None] = {}
        self._schema: Schema | None = None
        self.path = Path(address.location)
        if address.engine.needs_mirror:
            self._dialect = address.dialect
            self._schema = read_schema(database)
            mirror = build_mirror(
                executor,
                database,
                Catalogue(self._dialect, (), ()),
                _readable(self._schema),
                folder,
                max_rows=MAX_ROWS_TRANSLATED,
                is_copied=False,
            )
            self.path = mirror.path

    def native(self, sql: str) -> str | None:
        """Translate a query of SQLite to the database's SQL; None if it returns something else there."""
        if self._schema is None:
            return sql
        if sql not in self._known:
            found = in_dialect(sql, self._schema, self._dialect)
            self._known[sql] = found if found and self._agree(found, sql) else None
        return self._known[sql]

    def in_sqlite(self, sql: str) -> str | None:
        """Translate a query of the database to SQLite; None if it returns something else there."""
        if self._schema is None:
            return sql
        found = as_sqlite(sql, self._dialect, kinds_of(self._schema))
        return found if found and self._agree(sql, found) else None

    def _agree(self, native: str, sql: str) -> bool:
        gold = GoldResult.of(self._executor, self._database, native)
        outcome = self._executor.execute(self.path, sql)
        return gold.is_usable and outcome.is_ok and gold.difference(outcome, native) == "equal"


def _readable(schema: Schema) -> Schema:
    """Schema without columns of nested or binary values, with the primary keys alone, nothing computed."""
    tables = []
    for table in schema.tables:
        columns = tuple(
            replace(column, expression="") for column in table.columns if not _NESTED.fullmatch(column.type)
        )
        primary = tuple(column.name for column in table.columns if column.is_primary_key)
        if columns:
            tables.append(replace(table, columns=columns, keys=(primary,) if primary else ()))
    return replace(schema, tables=tuple(tables))
