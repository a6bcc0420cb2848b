"""Sample of a database for small variants of it: schema, rows, and keys that hold.

Variants are made in this process, so the generated columns, CHECKs, indexes and views of a file run here too.
SQLite counts its instructions, but one instruction may call a function that takes seconds: `replace` on long
texts. A function's time grows with the lengths of its arguments, so values are short in test databases. Time
beyond what the count explains is taken from a budget of the database.
"""

import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

from sqlglot import exp

from text2sql_grpo.errors import DataError
from text2sql_grpo.grading.near_values import DateFormat, common_parts, date_format, shape
from text2sql_grpo.grading.nested import Nested, read_nested
from text2sql_grpo.grading.query_values import literal_value
from text2sql_grpo.sql.executor import fingerprint
from text2sql_grpo.sql.outcome import Cell, Row
from text2sql_grpo.sql.query import read_query
from text2sql_grpo.sql.schema import Schema, Table, read_schema
from text2sql_grpo.sql.sqlite_file import limit_steps, open_database

MAX_ROWS_READ = 400
MIN_IDENTIFYING_ROWS = 5  # without a repeated text, from which it is assumed that none repeats
MIN_ORDERED_ROWS = 10  # in which one date is never after another, from which it is assumed that none is
MIN_APART_ROWS = 10  # with a moment for each of a parent's rows, from which it is assumed that none repeats
MAX_STEPS = 5_000_000  # SQLite instructions of one scan of a whole table, some tenths of a second
_DIGITS = re.compile(r"(?:DEC|NUM|REAL)\w*\s*\(\s*\d+\s*,\s*(\d+)\s*\)", re.IGNORECASE)
_WORD = re.compile(r"\w+")
_REFUSING = re.compile(r"\b(check|strict)\b", re.IGNORECASE)

MAX_BYTES = 16_000  # of a value: a call of `replace` takes 10 ms at most
BUDGET_S = 5.0  # processor seconds
_STEP_S = 2e-6  # of one instruction, ten times what most take
_FREE_S = 1e-3  # of one statement
_STEPS_OF_A_CALL = 500


class SlowExpressionsError(DataError):
    """The expressions of a schema have used up their budget."""

    def __init__(self) -> None:
        super().__init__(
            f"generated columns, CHECKs, indexes or views of the database took {BUDGET_S:g} s longer than"
            " their number of instructions explains"
        )


class ExpressionTime:
    """Budget of one database.

    Attributes:
        left_s: Processor seconds that are left.
    """

    def __init__(self) -> None:
        self.left_s = BUDGET_S

    @contextmanager
    def metered(self, connection: sqlite3.Connection, max_steps: float = float("inf")) -> Iterator[None]:
        """Context of one statement, or a few; SQLite interrupts it after `max_steps` instructions.

        Raises:
            SlowExpressionsError: The budget is used up, before or by this statement.
        """
        if self.left_s <= 0:
            raise SlowExpressionsError
        started, calls = time.thread_time(), 0

        def excess_s() -> float:
            return time.thread_time() - started - _FREE_S - calls * _STEPS_OF_A_CALL * _STEP_S

        def is_over() -> bool:
            nonlocal calls
            calls += 1
            return calls * _STEPS_OF_A_CALL >= max_steps or excess_s() > self.left_s

        connection.set_progress_handler(is_over, _STEPS_OF_A_CALL)
        try:
            yield
        finally:
            connection.set_progress_handler(None, 0)
            self.left_s -= max(0.0, excess_s())
            if self.left_s <= 0:
                raise SlowExpressionsError


@dataclass(frozen=True)
class Reference:
    """Foreign key of columns (by position) to columns of `parent` (by name)."""

    columns: tuple[int, ...]
    parent: str
    parent_columns: tuple[str, ...]


@dataclass(frozen=True)
class TableSample:
    """Some rows of one table and its constraints; columns are given by position.

    Attributes:
        columns: Names of the writable columns, without generated ones.
        types: Declared types.
        keys: The primary key and every unique index without a condition.
        references: Foreign keys without rows that break them.
        nullable: Columns that may be NULL and somewhere are.
        declared_nullable: Columns that may be NULL.
        rows: Up to `MAX_ROWS_READ` rows.
    """

    name: str
    columns: tuple[str, ...]
    types: tuple[str, ...]
    keys: tuple[tuple[int, ...], ...]
    references: tuple[Reference, ...]
    nullable: frozenset[int]
    rows: tuple[Row, ...]
    declared_nullable: frozenset[int] = frozenset()

    @cached_property
    def in_keys(self) -> frozenset[int]:
        """Columns of the keys."""
        return frozenset(place for key in self.keys for place in key)

    @cached_property
    def referring(self) -> frozenset[int]:
        """Columns that refer to a parent."""
        return frozenset(place for reference in self.references for place in reference.columns)

    def refers_once(self, reference: Reference) -> bool:
        """True if no two rows refer to the same parent by it."""
        return any(set(key) <= set(reference.columns) for key in self.keys)

    def orphans(self, reference: Reference) -> str:
        """`FROM .. WHERE ..` of the rows without their parent."""
        columns = [self.columns[position] for position in reference.columns]
        return orphans(quoted(self.name), columns, quoted(reference.parent), reference.parent_columns)

    @cached_property
    def values(self) -> list[list[Cell]]:
        """Distinct values of each column in order of appearance, without NULL; not to be changed."""
        columns = [dict.fromkeys(row[place] for row in self.rows) for place in range(len(self.columns))]
        return [[value for value in column if value is not None] for column in columns]

    @cached_property
    def booleans(self) -> frozenset[int]:
        """Columns declared as true or false that hold 0 and 1 alone."""
        declared = (place for place, kind in enumerate(self.types) if kind.upper().startswith("BOOL"))
        return frozenset(place for place in declared if set(self.values[place]) <= {0, 1})

    @cached_property
    def dates(self) -> dict[int, DateFormat]:
        """Formats of the columns of dates."""
        formats = enumerate(map(date_format, self.values))
        return {position: found for position, found in formats if found}

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Pairs of columns of dates of which the first is never after the second, such as start and end."""
        moments = {
            place: [dates.read(row[place]) for row in self.rows] for place, dates in self.dates.items()
        }
        spans = []
        for first, second in permutations(moments, 2):
            both = [(a, b) for a, b in zip(moments[first], moments[second], strict=True) if a and b]
            is_ordered = all(a <= b for a, b in both) and any(a < b for a, b in both)
            if is_ordered and len(both) >= MIN_ORDERED_ROWS:
                spans.append((first, second))
        return spans

    @cached_property
    def apart(self) -> list[tuple[int, ...]]:
        """References and a moment, to the minute at least, that no two rows share: calls of a customer."""
        found = []
        for place in (place for place, dates in self.dates.items() if dates.has_time):
            for reference in self.references:
                parents = [tuple(row[column] for column in reference.columns) for row in self.rows]
                sizes = Counter(parents)
                pairs = [(p, row[place]) for p, row in zip(parents, self.rows, strict=True) if sizes[p] > 1]
                if len(pairs) >= MIN_APART_ROWS and len(set(pairs)) == len(pairs):
                    found.append((*reference.columns, place))
        return found

    @cached_property
    def digits(self) -> dict[int, int]:
        """Digits behind the point of columns of decimal numbers, where all values keep to them."""
        found = {}
        for place, declared in enumerate(map(_DIGITS.search, self.types)):
            digits = int(declared.group(1)) if declared else -1
            numbers = [value for value in self.values[place] if isinstance(value, float)]
            if declared and all(round(number, digits) == number for number in numbers):
                found[place] = digits
        return found

    @cached_property
    def nested(self) -> dict[int, tuple[Nested, ...]]:
        """Parsed values of the columns of lists, structs, maps and JSON."""
        columns = enumerate(self.values)
        shown = {place: values for place, values in columns if values and str(values[0])[:1] in ("[", "{")}
        return {place: nested for place, values in shown.items() if (nested := read_nested(values))}

    @cached_property
    def common_parts(self) -> list[dict[str, int]]:
        """Words and signs that all texts of each column have, with their number."""
        return [common_parts(values) for values in self.values]

    @cached_property
    def shapes(self) -> list[tuple[str, ...]]:
        """Shape of the codes in each column; empty for any other."""
        return [shape(values) for values in self.values]


class Statement(NamedTuple):
    """CREATE statement of a table, of an index on a table, or of a view."""

    sql: str
    table: str = ""
    view: str = ""


@dataclass(frozen=True, eq=False)
class DatabaseSample:
    """Schema and sampled tables of a database; equal to itself alone.

    Attributes:
        statements: CREATE statements of tables, indexes and views, in their order.
        views: Query of each view, by its name in lower case; of each table with generated columns one on the
            table, with their expressions.
        tables: Tables by name, parents before children unless references form a cycle.
        is_like_exact: True if LIKE distinguishes upper from lower case, as on other engines.
        time: Budget of the expressions in the statements, shared by all samples of the database.
    """

    schema: Schema
    statements: tuple[Statement, ...]
    views: dict[str, str]
    tables: dict[str, TableSample]
    is_like_exact: bool = False
    time: ExpressionTime = field(default_factory=ExpressionTime, compare=False, repr=False)

    @cached_property
    def children(self) -> dict[str, list[tuple[TableSample, Reference]]]:
        """Tables that refer to each table, and by what; itself aside."""
        found: dict[str, list[tuple[TableSample, Reference]]] = {}
        for table in self.tables.values():
            for reference in table.references:
                if reference.parent != table.name:
                    found.setdefault(reference.parent, []).append((table, reference))
        return found

    @cached_property
    def checked(self) -> frozenset[str]:
        """Tables that may refuse rows for the values of their cells."""
        tables = (one for one in self.statements if one.sql.upper().startswith("CREATE TABLE"))
        return frozenset(one.table for one in tables if _REFUSING.search(one.sql))

    @cached_property
    def listed(self) -> dict[tuple[str, str], tuple[Cell, ...]]:
        """Values that a CHECK lists for a column, in lower case after its table: `kind IN ('a', 'b')`."""
        found = dict[tuple[str, str], tuple[Cell, ...]]()
        for statement in self.statements:
            tree = read_query(statement.sql).tree if statement.table in self.checked else None
            for test in tree.find_all(exp.In) if tree else ():
                values = [value for item in test.expressions if (value := literal_value(item)) is not None]
                if isinstance(test.this, exp.Column) and not isinstance(test.parent, exp.Not):
                    found[statement.table, test.this.name.lower()] = tuple(values)
        return found

    @cached_property
    def empty_together(self) -> dict[tuple[str, str], frozenset[str]]:
        """Columns whose NULLs one CHECK ties, after their table: `(paid IS NULL) = (paid_on IS NULL)`."""
        found = dict[tuple[str, str], frozenset[str]]()
        for statement in self.statements:
            tree = read_query(statement.sql).tree if statement.table in self.checked else None
            for check in tree.find_all(exp.CheckColumnConstraint) if tree else ():
                tests = [test for test in check.find_all(exp.Is) if isinstance(test.expression, exp.Null)]
                names = frozenset(
                    test.this.name.lower() for test in tests if isinstance(test.this, exp.Column)
                )
                if len(names) > 1:
                    found |= {(statement.table, name): names for name in names}
        return found

    def named_in(self, *sqls: str) -> set[str]:
        """Names of the tables that queries may read: their name, or that of a view on them, is in the text.

        A superset of the tables that a parser finds, also where it fails.
        """
        found, seen = set[str](), set[str]()
        texts = [sql.lower() for sql in sqls]
        while texts:
            text = texts.pop()
            words = set(_WORD.findall(text))
            if any(word.startswith(("sqlite_", "pragma_")) for word in words):  # reads the schema itself
                return {statement.table for statement in self.statements if statement.table}
            for statement in self.statements:
                name = (statement.table or statement.view).lower()
                if name not in (words if _WORD.fullmatch(name) else text):
                    continue
                if statement.table:
                    found.add(statement.table)
                elif name not in seen:
                    seen.add(name)
                    texts.append(statement.sql.lower())
        return found

    def with_nulls(self, columns: Iterable[tuple[str, str]] | None = None) -> "DatabaseSample":
        """Sample in which these columns, or all, somewhere are NULL, if they may be."""
        asked = None if columns is None else set(columns)
        tables = dict(self.tables)
        for table in self.tables.values():
            places = table.declared_nullable - table.nullable
            if asked is not None:
                own = {column.lower() for name, column in asked if name == table.name}
                own |= {other for name in own for other in self.empty_together.get((table.name, name), ())}
                places = frozenset(p for p in places if table.columns[p].lower() in own)
            if places:  # an unchanged table keeps its cached properties
                tables[table.name] = replace(table, nullable=table.nullable | places)
        return replace(self, tables=tables)

    def restricted(self, names: Iterable[str]) -> "DatabaseSample":
        """Sample of some tables and of those that they refer to, with all views."""
        kept, waiting = set[str](), list(names)
        while waiting:
            name = waiting.pop()
            if name not in kept:
                kept.add(name)
                references = self.tables[name].references if name in self.tables else ()
                waiting += [reference.parent for reference in references]
        return replace(
            self,
            tables={name: table for name, table in self.tables.items() if name in kept},
            statements=tuple(one for one in self.statements if not one.table or one.table in kept),
        )


def quoted(name: str) -> str:
    """Name in double quotes."""
    return '"' + name.replace('"', '""') + '"'


def read_sample(database: Path) -> DatabaseSample:
    """Read the schema, the constraints and some rows of a SQLite file.

    Raises:
        DataError: The file is missing, unreadable, corrupt or no database.
    """
    schema = read_schema(database)
    try:
        with closing(open_database(database)) as connection:
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            found = connection.execute(
                "SELECT sql, iif(type = 'view', '', tbl_name), iif(type = 'view', name, '')"
                " FROM sqlite_master WHERE sql IS NOT NULL AND substr(name, 1, 7) <> 'sqlite_'"
                " AND type IN ('table', 'index', 'view') ORDER BY type = 'view', type = 'index', rowid"
            ).fetchall()
            statements = tuple(Statement(*row) for row in found)
            virtual = {one.table for one in statements if one.sql.upper().startswith("CREATE VIRTUAL")}
            tables = [_read(connection, schema, t) for t in schema.tables if t.name not in virtual]
    except sqlite3.Error as error:
        raise DataError(f"cannot read the database: {error} (at {database})") from error
    views = {one.view.lower(): _view_query(one.sql) for one in statements if one.view}
    for table in schema.tables:
        expressions = [column.expression for column in table.columns if column.is_generated]
        if expressions and "*" not in expressions:
            views[table.name.lower()] = _computed_query(table)
    return DatabaseSample(schema, statements, views, parents_first(tables))


def sample_of(database: Path) -> DatabaseSample:
    """Sample as of `read_sample`, which is read again if the file changes."""
    return _sample_of_version(database, fingerprint(database))


@lru_cache(maxsize=32)
def _sample_of_version(database: Path, version: object) -> DatabaseSample:
    return read_sample(database)


def _computed_query(table: Table) -> str:
    """Query on a table with the expressions of its generated columns."""
    shown = (
        f"{column.expression} AS {quoted(column.name)}" if column.is_generated else quoted(column.name)
        for column in table.columns
    )
    return f"SELECT {', '.join(shown)} FROM {quoted(table.name)}"


def _view_query(create: str) -> str:
    """Query of a view, with the names of its list of columns as aliases; empty if sqlglot cannot parse it."""
    view = read_query(create).tree
    if not isinstance(view, exp.Create) or not isinstance(view.expression, exp.Query):
        return ""
    names = view.this.expressions if isinstance(view.this, exp.Schema) else []
    for name, projection in zip(names, view.expression.selects, strict=False):
        projection.replace(exp.alias_(projection.unalias(), name.copy()))
    return view.expression.sql("sqlite")


def with_links(
    base: DatabaseSample, database: Path, links: Iterable[tuple[tuple[str, str], tuple[str, str]]]
) -> DatabaseSample:
    """Copy of the base with a reference for each link of columns that holds like a foreign key.

    Many databases do not declare the keys that their queries join on. A link counts if one column is
    a key by itself and holds every value of the other.
    """
    tables = dict(base.tables)
    with closing(open_database(database)) as connection:
        for left, right in links:
            for (name, column), (parent, key) in ((left, right), (right, left)):
                if not {name, parent} <= tables.keys():
                    continue
                child, other = tables[name], tables[parent]
                if column not in child.columns or key not in other.columns:
                    continue
                position = child.columns.index(column)
                is_key = (other.columns.index(key),) in other.keys
                refers_back = name != parent and any(known.parent == name for known in other.references)
                if not is_key or refers_back or position in child.referring:
                    continue
                added = Reference((position,), parent, (key,))
                if not _exists(connection, child.orphans(added)):
                    tables[name] = replace(child, references=(*child.references, added))
    return replace(base, tables=parents_first(tables.values()))


def with_identifiers(
    base: DatabaseSample, database: Path, columns: Iterable[tuple[str, str]]
) -> tuple[DatabaseSample, tuple[str, ...]]:
    """Copy of the base in which some texts stay unique, and the `table.column` of each.

    A query that looks a row up by such a text, `(SELECT id FROM colour WHERE colour = 'Blue')`, relies on its
    uniqueness, which many schemas do not declare. A column of `columns` counts if other tables refer to its
    table, and if it holds `MIN_IDENTIFYING_ROWS` texts at least, no two of which are the same.
    """
    tables, assumed = dict(base.tables), []
    parents = {reference.parent for table in tables.values() for reference in table.references}
    with closing(open_database(database)) as connection:
        for name, column in sorted(columns):
            table = tables.get(name)
            if table is None or name not in parents or column not in table.columns:
                continue
            position = table.columns.index(column)
            values = [row[position] for row in table.rows if row[position] is not None]
            is_text = all(isinstance(value, str) for value in values) and position not in table.dates
            if (position,) in table.keys or not is_text or len(values) < MIN_IDENTIFYING_ROWS:
                continue
            shown = quoted(column)
            repeated = f"FROM {quoted(name)} WHERE {shown} IS NOT NULL GROUP BY {shown} HAVING count(*) > 1"
            if len(set(values)) == len(values) and not _exists(connection, repeated):
                tables[name] = replace(table, keys=(*table.keys, (position,)))
                assumed.append(f"{name}.{column}")
    return replace(base, tables=tables), tuple(assumed)


def _exists(connection: sqlite3.Connection, source: str) -> bool:
    """True if `FROM .. WHERE ..` has a row; False if the scan was stopped at `MAX_STEPS`."""
    connection.set_progress_handler(lambda: 1, MAX_STEPS)
    try:
        return connection.execute(f"SELECT 1 {source} LIMIT 1").fetchone() is not None
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        return False
    finally:
        limit_steps(connection)


def orphans(child: str, columns: Sequence[str], parent: str, references: Sequence[str]) -> str:
    """`FROM .. WHERE ..` of the rows of `child` without a row in `parent`, both quoted."""
    own = [f"c_.{quoted(column)}" for column in columns]
    matches = " AND ".join(f"p_.{quoted(r)} = {c}" for r, c in zip(references, own, strict=True))
    present = " AND ".join(f"{column} IS NOT NULL" for column in own)
    return f"FROM {child} AS c_ WHERE {present} AND NOT EXISTS (SELECT 1 FROM {parent} AS p_ WHERE {matches})"


def _read(connection: sqlite3.Connection, schema: Schema, table: Table) -> TableSample:
    """Sample of one table."""
    bare = without_rows(table)
    source, listed = quoted(table.name), ", ".join(map(quoted, bare.columns))
    known = {other.name: {column.name for column in other.columns} for other in schema.tables}
    return replace(
        bare,
        rows=tuple(connection.execute(f"SELECT {listed} FROM {source} LIMIT {MAX_ROWS_READ}")),
        nullable=frozenset(
            place
            for place in bare.declared_nullable
            if _exists(connection, f"FROM {source} WHERE {quoted(bare.columns[place])} IS NULL")
        ),
        references=tuple(
            reference
            for reference in bare.references
            if set(reference.parent_columns) <= known.get(reference.parent, set())
            and not _exists(connection, bare.orphans(reference))  # of a large table the key is trusted
        ),
    )


def without_rows(table: Table) -> TableSample:
    """Sample of a table with its columns, keys and declared foreign keys alone."""
    columns = [column for column in table.columns if not column.is_generated]
    names = tuple(column.name for column in columns)
    return TableSample(
        table.name,
        names,
        tuple(column.type for column in columns),
        tuple(tuple(map(names.index, key)) for key in table.keys if set(key) <= set(names)),
        tuple(
            Reference(tuple(map(names.index, key.columns)), key.table, key.references)
            for key in table.foreign_keys
            if set(key.columns) <= set(names) and key.references
        ),
        frozenset(),
        (),
        frozenset(place for place, column in enumerate(columns) if column.accepts_null),
    )


def parents_first(tables: Iterable[TableSample]) -> dict[str, TableSample]:
    """Tables by name, parents before children; a cycle of references is broken at any place."""
    waiting = {table.name: table for table in tables}
    ordered: dict[str, TableSample] = {}
    while waiting:
        ready = [
            table
            for table in waiting.values()
            if not any(r.parent in waiting and r.parent != table.name for r in table.references)
        ]
        for table in ready or list(waiting.values())[:1]:
            ordered[table.name] = waiting.pop(table.name)
    return ordered
