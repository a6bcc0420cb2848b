"""Schema of a database as plain data, the same for SQLite, DuckDB and PostgreSQL.

Reading one writes nothing, and its cost is bounded: rows are counted up to `MAX_COUNTED_ROWS`, examples come
from a table's first rows, and no view is run.
"""

import importlib
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import ClassVar

from text2sql_grpo.sql.address import Kind, parse_address

Example = str | int | float | Decimal

MAX_COUNTED_ROWS = 100_000  # rows of a table are counted up to here
READ_TIMEOUT_S = 30.0  # for the whole schema


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: Declared name, unquoted.
        type: Declared type (`VARCHAR(20)`); empty if none was.
        is_nullable: False for NOT NULL and for parts of the primary key.
        is_primary_key: True for every part of the primary key.
        comment: One line; empty if there is none.
        examples: Up to three distinct values; see `schema_catalogue`.
        expression: SQL of a generated column, which is computed from others and never inserted; `*` if it is
            not known, and empty for other columns.
        labels: Values of an enum type in its order; empty for other types.
        base_type: Type that the engine casts to, where it is not `type`: the type under a domain, or the
            whole of a type that is cut to be shown. Empty where it is `type`.
        is_domain_not_null: True if the column's type is a domain that refuses NULL.
    """

    name: str
    type: str
    is_nullable: bool
    is_primary_key: bool
    comment: str = ""
    examples: tuple[Example, ...] = ()
    expression: str = ""
    labels: tuple[str, ...] = ()
    base_type: str = ""
    is_domain_not_null: bool = False

    @property
    def is_generated(self) -> bool:
        """True if the column is computed."""
        return bool(self.expression)

    @property
    def accepts_null(self) -> bool:
        """False if the column or its domain refuses NULL."""
        return self.is_nullable and not self.is_domain_not_null

    @property
    def cast_type(self) -> str:
        """Type that a value of the column is cast to."""
        return self.base_type or self.type


@dataclass(frozen=True)
class ForeignKey:
    """Foreign key from `columns` of this table to columns `references` of `table`.

    Attributes:
        columns: One or more of this table's columns.
        table: The other table; may be missing in the database, because SQLite does not check.
        references: As many as `columns`; empty if the declaration names none and `table` is missing or
            has no such primary key.
        namespace: Namespace of the other table; see `Table`.
    """

    columns: tuple[str, ...]
    table: str
    references: tuple[str, ...]
    namespace: str = ""


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        n_rows: Number of rows, at most `MAX_COUNTED_ROWS`.
        has_more_rows: True if there are more than `n_rows`.
        comment: One line; empty if there is none.
        namespace: `schema_name`, or empty where a bare name finds the table.
        keys: Columns of each primary key, unique constraint and unique index without expressions or a
            condition, the primary key first.
        schema_name: The schema that holds it (DuckDB, PostgreSQL).
    """

    name: str
    columns: tuple[Column, ...]
    foreign_keys: tuple[ForeignKey, ...]
    n_rows: int
    has_more_rows: bool = False
    comment: str = ""
    namespace: str = ""
    keys: tuple[tuple[str, ...], ...] = ()
    schema_name: str = ""


@dataclass(frozen=True)
class View:
    """One view. Its query, `sql`, is never run for the schema: no row count, no examples, no keys."""

    name: str
    columns: tuple[Column, ...]
    comment: str = ""
    namespace: str = ""
    sql: str = ""
    schema_name: str = ""
    foreign_keys: ClassVar[tuple[ForeignKey, ...]] = ()


@dataclass(frozen=True)
class Schema:
    """Schema of one database.

    Attributes:
        tables: Tables in the database's order, mostly that of their creation; no system tables.
        views: Views in the same order, without those that no query can read any more.
        name: Name of the database.
        dialect: Rules for quoting names.
    """

    tables: tuple[Table, ...]
    views: tuple[View, ...] = ()
    name: str = ""
    dialect: Kind = "sqlite"

    @property
    def relations(self) -> tuple[Table | View, ...]:
        """The tables, then the views."""
        return (*self.tables, *self.views)


def read_schema(database: Path | str, *, timeout_s: float = READ_TIMEOUT_S) -> Schema:
    """Read the tables, views, columns, keys, comments, row counts and example values of a database.

    Args:
        database: A file, or a URL such as `duckdb:///sales.duckdb` or `postgresql://reader@host/sales`.
        timeout_s: Time limit of the whole schema.

    Raises:
        DataError: The database is missing, unreadable or corrupt, or it took too long.
    """
    address = parse_address(database)
    reader = importlib.import_module(f"text2sql_grpo.sql.{address.engine.schema_module}")
    schema: Schema = reader.read(address.location, timeout_s=timeout_s)
    return schema
