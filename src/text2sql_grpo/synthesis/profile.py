"""Profile of a database: its tables, with the values and keys that questions can be made of."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from text2sql_grpo.errors import DataError
from text2sql_grpo.grading.mirror import mirror_type, table_sql
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.sql.address import Database, parse_address
from text2sql_grpo.sql.hidden import read_hidden
from text2sql_grpo.sql.names import plain_name, quote_name
from text2sql_grpo.sql.outcome import Limits, Row
from text2sql_grpo.sql.query import in_dialect
from text2sql_grpo.sql.schema import Column, ForeignKey, Table

Value = str | int | float
Kind = Literal["number", "date", "text"]

SAMPLE_ROWS = 20_000  # of a table, whose values are read; every gold query runs on the whole table
MAX_VALUES = 10_000
MIN_REFERRING = 3  # different values of a column that is taken for a foreign key by its values
TIMEOUT_S = 5.0  # time limit of a query of the profile and of a gold query, seconds
_SAMPLE = Limits(timeout_s=60.0, max_rows=SAMPLE_ROWS, max_bytes=200_000_000)
_GOLD = Limits(timeout_s=TIMEOUT_S)
_KEY_NAME = re.compile(r"(id|nr|no|num|number|nummer|code|key|cod|uuid)$")
# Neither `grid` nor `lap_no`.
_KEY_WORD = re.compile(r"([\W_]|(?<=[a-z])(?=[A-Z]))(?i:id|code|key|cod|uuid)$")
_FAR = "2100"
_DATE = re.compile(r"\d{4}-\d\d-\d\d")


@dataclass(frozen=True)
class Values:
    """Values of one column in the rows that were read.

    Attributes:
        kind: Kind of the stored values, not of the declared type; None if some are infinite, nested or
            binary, or if kinds are mixed.
        values: Distinct values without NULL, sorted; evenly spread ones of them if they are more than
            `MAX_VALUES`.
        is_unique: True if no value repeats in the whole table, and none is NULL.
        repeated: Values that several rows hold; None if not all rows were read.
    """

    kind: Kind | None
    values: tuple[Value, ...]
    has_nulls: bool
    is_unique: bool
    repeated: frozenset[Value] | None


@dataclass(frozen=True)
class TableProfile:
    """One table.

    Attributes:
        table: Its schema; foreign keys of columns that declare none are mined from names and values.
        n_rows: Number of all rows; that of the schema if they cannot be counted in time.
        n_read: Number of rows whose values were read.
        columns: Values by name of the column.
        declared: Foreign keys that the schema declares.
    """

    table: Table
    n_rows: int
    n_read: int
    columns: Mapping[str, Values]
    declared: tuple[ForeignKey, ...]

    @property
    def key(self) -> str | None:
        """Column that identifies a row: the primary key, or one without repeats that is named like a key."""
        primary = [column.name for column in self.table.columns if column.is_primary_key]
        if primary:
            return primary[0] if len(primary) == 1 else None
        fitting = (name for name, found in self.columns.items() if found.is_unique)
        return next((name for name in fitting if _KEY_NAME.search(plain_name(name))), None)

    @property
    def is_link(self) -> bool:
        """True if its rows only link rows of two other tables, each pair once.

        Its key is two foreign keys, and nothing else but a moment is stored. A second moment, NULL or a far
        year ends a link: a count of its rows would count past links too.
        """
        keys = [key for key in self.table.foreign_keys if len(key.columns) == 1]
        linked = {key.columns[0] for key in keys}
        others = [found for name, found in self.columns.items() if name not in linked]
        dates = [found for found in others if found.kind == "date"]
        has_ends = len(dates) > 1 or any(one.has_nulls or str(one.values[-1]) > _FAR for one in dates)
        is_bare = not has_ends and all(found.kind in ("date", None) for found in others)
        return len(keys) == 2 and is_bare and any(set(key) == linked for key in self.table.keys)


class Profile:
    """Tables of one database by name, and its queries.

    Attributes:
        schema: Its schema, without what is hidden.
        hidden: Names of the tables and columns that are hidden, in lower case.
        hidden_tables: Tables and views whose columns are all hidden, in lower case.
        unmatched: Patterns of what to hide that name nothing here.
        refusal: Reason why a query of the database might read what is hidden; empty if it does not.
        ambiguous: Tables that are left out, as another one has their name, which finds that one or none.
        executor: Runs its queries.
        native: A query of SQLite in the SQL of the database; None if it cannot be said there.
    """

    def __init__(self, executor: SQLExecutor, database: Database, hidden: Sequence[str] = ()) -> None:
        """Read the database without the tables and columns of `hidden`, as `data.hide`.

        Raises:
            DataError: The database cannot be read.
        """
        self.database = database
        self.executor = executor
        self._engine = parse_address(database).engine
        self.native = cache(self._native)
        found = read_hidden(database, hidden, executor)
        self.schema, self.hidden, self.unmatched = found.schema, found.names(), found.unmatched
        self.hidden_tables = [name for name in self.hidden if not found.visible.get(name, True)]
        self.refusal = found.refusal
        tables = self.schema.tables
        names = Counter(table.name.lower() for table in tables)
        self.ambiguous = tuple(one for one in tables if one.namespace and names[one.name.lower()] > 1)
        self.tables = {one.name: self._table(one) for one in tables if one not in self.ambiguous}
        for name, key in list(self._mined_keys()):
            profile = self.tables[name]
            table = replace(profile.table, foreign_keys=(*profile.table.foreign_keys, key))
            self.tables[name] = replace(profile, table=table)

    def _native(self, sql: str) -> str | None:
        return in_dialect(sql, self.schema, self._engine.dialect) if self._engine.needs_mirror else sql

    def rows(self, sql: str) -> tuple[Row, ...] | None:
        """Rows of a query of SQLite, run on the whole database; None if it fails or is cut.

        Raises:
            TimeoutError: It takes more than `TIMEOUT_S`.
        """
        native = self.native(sql)
        if native is None:
            return None
        outcome = self.executor.execute(self.database, native, limits=_GOLD)
        if outcome.status == "timeout":
            raise TimeoutError(f"a query takes more than {TIMEOUT_S:g} s: {native}")
        return outcome.rows if outcome.is_ok and not outcome.is_truncated else None

    def _table(self, table: Table) -> TableProfile:
        shown = [column for column in table.columns if self._is_plain(column)]
        rows, n_rows = self._sample(table, shown)
        cells = list(zip(*rows, strict=True)) if shown and rows else [()] * len(shown)
        columns = {
            column.name: self._values(table, column, found, is_whole=len(rows) >= n_rows)
            for column, found in zip(shown, cells, strict=True)
        }
        left_out = {(one.namespace, one.name) for one in self.ambiguous}
        keys = tuple(key for key in table.foreign_keys if (key.namespace, key.table) not in left_out)
        table = replace(table, foreign_keys=keys)
        return TableProfile(table, n_rows, len(rows), columns, keys)

    def _is_plain(self, column: Column) -> bool:
        """True for a column of numbers, texts, moments or labels; a column of SQLite may hold anything."""
        return not self._engine.needs_mirror or mirror_type(column) != "OPAQUE" or bool(column.labels)

    def _sample(self, table: Table, columns: Sequence[Column]) -> tuple[tuple[Row, ...], int]:
        """Rows spread over the table, all if it holds few, and the number of all."""
        name = table_sql(table)
        listed = ", ".join(quote_name(one.name, self.schema.dialect) for one in columns) or "1"
        n_rows = table.n_rows
        if table.has_more_rows:
            counted = self.executor.execute(self.database, f"SELECT COUNT(*) FROM {name}", limits=_GOLD)
            n_rows = int(str(counted.rows[0][0])) if counted.is_ok else n_rows
        if n_rows > SAMPLE_ROWS:
            spread = self._engine.sample_sql.format(
                columns=listed,
                table=name,
                step=n_rows // SAMPLE_ROWS + 1,
                percent=round(100 * SAMPLE_ROWS / n_rows, 3),
                n=SAMPLE_ROWS,
            )
            outcome = self.executor.execute(self.database, spread, limits=_SAMPLE)
            if outcome.is_ok and outcome.rows:
                return outcome.rows, n_rows
        first = f"SELECT {listed} FROM {name} LIMIT {SAMPLE_ROWS}"
        outcome = self.executor.execute(self.database, first, limits=_SAMPLE)
        if not outcome.is_ok:
            raise DataError(f"cannot read the table {table.name!r}: {outcome.error} (of {self.database})")
        return outcome.rows, n_rows

    def _values(self, table: Table, column: Column, cells: Sequence[Any], *, is_whole: bool) -> Values:
        counts = Counter(_clean(column, cell) for cell in cells)
        distinct = set(counts)
        has_nulls = None in distinct
        kind = _kind(distinct - {None})
        ordered = sorted(distinct - {None}) if kind else []
        values = tuple(ordered[:: 1 + len(ordered) // MAX_VALUES])
        is_unique = not has_nulls and len(distinct) == len(cells) > 0
        if is_unique and not is_whole and kind:
            name = quote_name(column.name)
            query = f"SELECT COUNT(*) - COUNT(DISTINCT {name}) FROM {quote_name(table.name)}"
            is_unique = self._is_zero(query)
        repeated = frozenset(value for value, count in counts.items() if count > 1) if is_whole else None
        return Values(kind, values, has_nulls, is_unique, repeated)

    def _is_zero(self, sql: str) -> bool:
        try:
            return self.rows(sql) == ((0,),)
        except TimeoutError:
            return False

    def _mined_keys(self) -> Iterator[tuple[str, ForeignKey]]:
        """Foreign keys that the schema does not declare, each with its table.

        A column is taken for one if another table has a column without repeats of the same name, or of the
        name without that table's, and holds each of its values; if two tables do, for none. In a database
        that declares no foreign key, as of CSV files, names may also be no key's, and the texts of a
        column with repeats may refer to the first column of a table, whatever the names. The names of
        numbers must tell, as many columns hold some of 1, 2, 3 ..
        """
        declares = any(table.foreign_keys for table in self.schema.tables)
        targets = [
            (name, column)
            for name, profile in self.tables.items()
            for column, values in profile.columns.items()
            if values.is_unique and len(values.values) > 1 and _looks_like_key(profile, column)
        ]
        for name, profile in self.tables.items():
            declared = {column for key in profile.table.foreign_keys for column in key.columns}
            declared |= {key[0] for key in profile.table.keys if len(key) == 1}
            for column in (each for each in profile.columns if each not in declared):
                fitting = [
                    (other, key)
                    for other, key in targets
                    if other != name
                    and (
                        _refers(column, other, key)
                        or (not declares and self._looks_like(name, column, other, key))
                    )
                    and self._is_telling(name, column, other, key)
                    and self._is_within(name, column, other, key)
                ]
                if len(fitting) == 1:
                    other, key = fitting[0]
                    namespace = self.tables[other].table.namespace
                    yield name, ForeignKey((column,), other, (key,), namespace)

    def _looks_like(self, table: str, column: str, other: str, key: str) -> bool:
        """True if equal names, or the sampled texts, make a column look like a foreign key."""
        own, parent = self.tables[table].columns[column], self.tables[other].columns[key]
        if own.is_unique or len(own.values) < MIN_REFERRING or not set(own.values) <= set(parent.values):
            return False
        is_first = key == self.tables[other].table.columns[0].name
        return plain_name(column) == plain_name(key) or (is_first and own.kind == "text")

    def _is_telling(self, table: str, column: str, other: str, key: str) -> bool:
        """True if a column has the name of another table, or values that are in its key by no chance.

        Key numbers without gaps hold any rank or count: then the column must be named like a key.
        """
        parent, name = self.tables[other], plain_name(column)
        if _is_named(_KEY_NAME.sub("", name), plain_name(other)):
            return True
        values = parent.columns[key].values
        if all(str(value).isdecimal() for value in values) and max(map(int, values)) <= 2 * parent.n_rows:
            return bool(_KEY_WORD.search(column))
        return self.tables[table].columns[column].kind == "text" or bool(_KEY_NAME.search(name))

    def _is_within(self, table: str, column: str, other: str, key: str) -> bool:
        """True if a column has values, all of the kind of a key and among its values."""
        known = self.tables[table].columns[column]
        if not known.values or known.kind != self.tables[other].columns[key].kind:
            return False
        own, parent = (quote_name(each) for each in (column, key))
        return self._is_zero(
            f"SELECT COUNT(*) FROM {quote_name(table)} WHERE {own} IS NOT NULL "
            f"AND {own} NOT IN (SELECT {parent} FROM {quote_name(other)})"
        )


def _clean(column: Column, cell: Any) -> Any:
    """Cell without the blanks that fill up a `character(20)`."""
    is_padded = isinstance(cell, str) and column.cast_type.startswith(("character(", "CHAR("))
    return cell.rstrip(" ") if is_padded else cell


def _kind(values: set[Any]) -> Kind | None:
    if not values:
        return None
    if all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        return "number"
    if not all(isinstance(value, str) for value in values):
        return None
    return "date" if all(_DATE.match(value) for value in values) else "text"


def _looks_like_key(profile: TableProfile, column: str) -> bool:
    keys = profile.table.keys
    return (column,) in keys if keys else profile.columns[column].kind in ("number", "text")


def _refers(column: str, other: str, key: str) -> bool:
    """True if a column is named like a key of another table, or like the table and its key.

    >>> _refers("Kunde ID", "Kunden", "Kunde ID"), _refers("customer_id", "customers", "id")
    (True, True)
    >>> _refers("name", "customers", "name"), _refers("id", "customers", "id")
    (False, False)
    """
    own, target, table = map(plain_name, (column, key, other))
    if not _KEY_NAME.search(target):
        return False
    if own == target:
        return len(own) > 4
    stem = own.removesuffix(target)
    return own != stem and _is_named(stem, table)


def _is_named(stem: str, table: str) -> bool:
    return len(stem) > 2 and (table.startswith(stem) or table.endswith((stem, f"{stem}s")))
