"""Schema of a PostgreSQL database, from its catalog, in one read-only transaction."""

import time
from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from text2sql_grpo.errors import DataError, needs_extra
from text2sql_grpo.sql.failure_text import NO_PASSWORD
from text2sql_grpo.sql.names import quote_name
from text2sql_grpo.sql.schema_examples import EXAMPLE_ROWS, READ_CHARS, column_examples, one_line
from text2sql_grpo.sql.schema_types import MAX_COUNTED_ROWS, Column, Example, ForeignKey, Schema, Table, View

if TYPE_CHECKING:
    from psycopg import Connection

CONNECT_TIMEOUT_S = 10

# Relations that the role may read, by oid, without partitions.
_RELATIONS = """
    SELECT c.oid, CASE WHEN pg_table_is_visible(c.oid) THEN '' ELSE n.nspname END, c.relname,
        c.relkind IN ('r', 'p'), obj_description(c.oid, 'pg_class'),
        CASE WHEN c.relkind IN ('v', 'm') THEN pg_get_viewdef(c.oid) ELSE '' END
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND NOT c.relispartition
        AND n.nspname <> 'information_schema' AND n.nspname NOT LIKE 'pg\\_%'
        AND has_schema_privilege(n.oid, 'USAGE') AND has_any_column_privilege(c.oid, 'SELECT')
    ORDER BY c.oid
"""
# A domain may be one of another domain.
_COLUMNS = """
    WITH RECURSIVE step (domain, type, modifier, not_null) AS (
        SELECT oid, typbasetype, typtypmod, typnotnull FROM pg_type WHERE typtype = 'd'
        UNION ALL
        SELECT s.domain, t.typbasetype, t.typtypmod, s.not_null OR t.typnotnull
        FROM step s JOIN pg_type t ON t.oid = s.type WHERE t.typtype = 'd'
    ), base AS (
        SELECT s.* FROM step s JOIN pg_type t ON t.oid = s.type WHERE t.typtype <> 'd'
    )
    SELECT a.attrelid, a.attname, format_type(a.atttypid, a.atttypmod), NOT a.attnotnull,
        coalesce(a.attnum = ANY (k.conkey), false), col_description(a.attrelid, a.attnum), t.typcategory,
        t.typname, a.attgenerated <> '', coalesce(format_type(b.type, b.modifier), ''),
        coalesce(b.not_null, false),
        (SELECT array_agg(e.enumlabel::text ORDER BY e.enumsortorder) FROM pg_enum e
            WHERE e.enumtypid = coalesce(b.type, a.atttypid))
    FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
        JOIN pg_type t ON t.oid = a.atttypid
        LEFT JOIN base b ON b.domain = a.atttypid
        LEFT JOIN pg_constraint k ON k.conrelid = a.attrelid AND k.contype = 'p'
    WHERE a.attnum > 0 AND NOT a.attisdropped AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
        AND has_column_privilege(a.attrelid, a.attnum, 'SELECT')
    ORDER BY a.attrelid, a.attnum
"""
_UNIQUE_KEYS = """
    SELECT i.indrelid,
        (SELECT array_agg(a.attname::text ORDER BY p.place)
            FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS p (number, place)
            JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = p.number
            WHERE p.place <= i.indnkeyatts)
    FROM pg_index i WHERE i.indisunique AND i.indexprs IS NULL
    ORDER BY NOT i.indisprimary, i.indexrelid
"""
_FOREIGN_KEYS = """
    SELECT k.conrelid, k.confrelid,
        (SELECT array_agg(a.attname::text ORDER BY p.place)
            FROM unnest(k.conkey) WITH ORDINALITY AS p (number, place)
            JOIN pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = p.number),
        (SELECT array_agg(a.attname::text ORDER BY p.place)
            FROM unnest(k.confkey) WITH ORDINALITY AS p (number, place)
            JOIN pg_attribute a ON a.attrelid = k.confrelid AND a.attnum = p.number)
    FROM pg_constraint k WHERE k.contype = 'f' AND k.conparentid = 0 ORDER BY k.oid
"""


def read_postgres(url: str, *, timeout_s: float) -> Schema:
    """See `schema.read_schema`. Materialized views and foreign tables count as views."""
    with needs_extra("postgresql", "a PostgreSQL database"):
        import psycopg
    try:
        parts = psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        # The URL and the original error may hold a password.
        raise DataError(
            "malformed PostgreSQL URL: write one such as postgresql://reader@localhost/sales"
        ) from None
    where = f"database {parts.get('dbname', 'of the user')} on {parts.get('host', 'this machine')}"
    try:
        connection = psycopg.connect(
            url,
            connect_timeout=CONNECT_TIMEOUT_S,
            client_encoding="UTF8",
            fallback_application_name="text2sql-grpo",
        )
        with closing(connection):
            connection.read_only = True
            schema = _Reader(connection, timeout_s).schema()
    except (psycopg.errors.QueryCanceled, TimeoutError) as error:
        raise DataError(f"reading the schema of {where} took longer than {timeout_s:g} s") from error
    except (psycopg.Error, UnicodeError) as error:
        text = one_line(str(error))
        hint = f": {NO_PASSWORD}" if "password" in text else ""
        raise DataError(f"cannot read the PostgreSQL schema: {text} (at {where}){hint}") from error
    if not schema.tables and not schema.views:
        raise DataError(
            f"no table or view that this role may read (in {where}): grant it some, as the SQL of"
            " `text2sql-grpo role --print` does"
        )
    return schema


class _Reader:
    """One reading transaction; each statement gets the remaining time."""

    def __init__(self, connection: "Connection[tuple[Any, ...]]", timeout_s: float) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + timeout_s

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.execute(f"SET LOCAL statement_timeout = {max(1, round(left_s * 1000))}".encode())
        return self._connection.execute(query.encode()).fetchall()

    def schema(self) -> Schema:
        for setting in ("lock_timeout = '5s'", "synchronize_seqscans = off", "timezone = 'UTC'"):
            self._connection.execute(f"SET LOCAL {setting}".encode())
        self._connection.execute("SET LOCAL datestyle = 'ISO, YMD'")
        relations = {number: rest for number, *rest in self._rows(_RELATIONS)}
        columns: dict[int, list[Column]] = defaultdict(list)
        values: dict[int, list[str]] = defaultdict(list)
        for number, name, kind, is_nullable, is_primary, comment, category, type_name, *more in self._rows(
            _COLUMNS
        ):
            is_generated, base_type, is_domain_not_null, labels = more
            column = Column(
                name,
                kind,
                is_nullable,
                is_primary,
                one_line(comment),
                is_generated=is_generated,
                labels=tuple(labels or ()),
                base_type=base_type,
                is_domain_not_null=is_domain_not_null,
            )
            columns[number].append(column)
            values[number].append(_value(name, category, type_name))
        unique: dict[int, list[tuple[str, ...]]] = defaultdict(list)
        for number, own in self._rows(_UNIQUE_KEYS):
            if {column.name for column in columns[number]}.issuperset(own):  # all may be read
                unique[number].append(tuple(own))
        keys: dict[int, list[ForeignKey]] = defaultdict(list)
        for number, parent, own, references in self._rows(_FOREIGN_KEYS):
            if parent in relations:
                namespace, name, *_ = relations[parent]
                keys[number].append(ForeignKey(tuple(own), name, tuple(references), namespace))
        tables, views = [], []
        for number, (namespace, name, is_table, comment, query) in relations.items():
            if not is_table:
                views.append(View(name, tuple(columns[number]), one_line(comment), namespace, query))
                continue
            sql = ".".join(quote_name(part, "postgresql") for part in (namespace, name) if part)
            n_rows, examples = self._rows_of(sql, columns[number], values[number])
            shown = tuple(
                replace(column, examples=found)
                for column, found in zip(columns[number], examples, strict=True)
            )
            tables.append(
                Table(
                    name,
                    shown,
                    tuple(keys[number]),
                    min(n_rows, MAX_COUNTED_ROWS),
                    n_rows > MAX_COUNTED_ROWS,
                    one_line(comment),
                    namespace,
                    tuple(dict.fromkeys(unique[number])),
                )
            )
        return Schema(tuple(tables), tuple(views), self._connection.info.dbname, dialect="postgresql")

    def _rows_of(
        self, table: str, columns: list[Column], values: list[str]
    ) -> tuple[int, list[tuple[Example, ...]]]:
        """Number of rows, at most one more than `MAX_COUNTED_ROWS`, and the examples of each column."""
        rows = self._rows(f"SELECT {', '.join(values)} FROM {table} LIMIT {EXAMPLE_ROWS}")
        n_rows = len(rows)
        if n_rows == EXAMPLE_ROWS:
            counted = f"SELECT count(*) FROM (SELECT 1 FROM {table} LIMIT {MAX_COUNTED_ROWS + 1}) AS rows"
            ((n_rows,),) = self._rows(counted)
        return n_rows, column_examples(rows, [column.type for column in columns])


def _value(name: str, category: str, type_name: str) -> str:
    """SQL of a column's example: numbers as they are, others as text; NULL for lists, bytes and the like."""
    sql = quote_name(name, "postgresql")
    if category in ("N", "B"):
        return sql
    is_text = category in ("S", "E", "D", "T", "I") or type_name == "uuid"
    return f"left({sql}::text, {READ_CHARS})" if is_text else "NULL"
