"""Schema of a PostgreSQL database, from its catalog, in one read-only transaction."""

import socket
import time
from contextlib import closing
from threading import Timer
from typing import TYPE_CHECKING, Any

from text2sql_grpo.errors import DataError, needs_extra
from text2sql_grpo.sql.failure_text import NO_PASSWORD
from text2sql_grpo.sql.schema import ForeignKey, Schema
from text2sql_grpo.sql.schema_catalogue import READ_CHARS, Rows, one_line, schema_of

if TYPE_CHECKING:
    from psycopg import Connection

_SETTINGS = b"""
    SET LOCAL lock_timeout = '5s'; SET LOCAL synchronize_seqscans = off;
    SET LOCAL timezone = 'UTC'; SET LOCAL datestyle = 'ISO, YMD'
"""
# Relations that the role may read, by oid, without partitions.
_RELATIONS = """
    SELECT c.oid, CASE WHEN pg_table_is_visible(c.oid) THEN '' ELSE n.nspname END, c.relname,
        c.relkind IN ('r', 'p'), obj_description(c.oid, 'pg_class'),
        CASE WHEN c.relkind IN ('v', 'm') THEN pg_get_viewdef(c.oid) ELSE '' END, n.nspname
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND NOT c.relispartition
        AND n.nspname <> 'information_schema' AND n.nspname NOT LIKE 'pg\\_%'
        AND has_schema_privilege(n.oid, 'USAGE') AND has_any_column_privilege(c.oid, 'SELECT')
    ORDER BY c.oid
"""
# A domain may be one of another domain. Examples are numbers as they are and others as text; NULL for lists,
# bytes and the like.
_COLUMNS = f"""
    WITH RECURSIVE step (domain, type, modifier, not_null) AS (
        SELECT oid, typbasetype, typtypmod, typnotnull FROM pg_type WHERE typtype = 'd'
        UNION ALL
        SELECT s.domain, t.typbasetype, t.typtypmod, s.not_null OR t.typnotnull
        FROM step s JOIN pg_type t ON t.oid = s.type WHERE t.typtype = 'd'
    ), base AS (
        SELECT s.* FROM step s JOIN pg_type t ON t.oid = s.type WHERE t.typtype <> 'd'
    )
    SELECT a.attrelid,
        CASE WHEN t.typcategory IN ('N', 'B') THEN quote_ident(a.attname)
            WHEN t.typcategory IN ('S', 'E', 'D', 'T', 'I') OR t.typname = 'uuid'
                THEN format('left(%I::text, {READ_CHARS})', a.attname)
            ELSE 'NULL' END,
        a.attname, format_type(a.atttypid, a.atttypmod), NOT a.attnotnull,
        coalesce(a.attnum = ANY (k.conkey), false), col_description(a.attrelid, a.attnum),
        CASE WHEN a.attgenerated <> '' THEN coalesce((SELECT pg_get_expr(d.adbin, d.adrelid) FROM pg_attrdef d
            WHERE d.adrelid = a.attrelid AND d.adnum = a.attnum), '*') ELSE '' END,
        (SELECT array_agg(e.enumlabel::text ORDER BY e.enumsortorder) FROM pg_enum e
            WHERE e.enumtypid = coalesce(b.type, a.atttypid)),
        coalesce(format_type(b.type, b.modifier), ''), coalesce(b.not_null, false)
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
    FROM pg_index i WHERE i.indisunique AND i.indexprs IS NULL AND i.indpred IS NULL
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


def read(url: str, *, timeout_s: float) -> Schema:
    """See `schema.read_schema`. Materialized views and foreign tables count as views."""
    with needs_extra("postgresql", "a PostgreSQL database"):
        import psycopg

        from text2sql_grpo.sql.postgres_database import GRACE_S, connected, without_password
    where = without_password(url)
    deadline = time.monotonic() + timeout_s
    try:
        with closing(connected(url)) as connection:
            connection.read_only = True
            end = Timer(timeout_s + GRACE_S, _shut, [connection])  # the server may not keep its own limit
            end.start()
            try:
                schema = _schema(connection, timeout_s)
            finally:
                end.cancel()
    except (psycopg.Error, UnicodeError, TimeoutError) as error:
        late = (psycopg.errors.QueryCanceled, TimeoutError)
        if isinstance(error, late) or time.monotonic() > deadline + GRACE_S:
            raise DataError(f"reading the schema of {where} took longer than {timeout_s:g} s") from error
        text = one_line(str(error))
        hint = f": {NO_PASSWORD}" if "password" in text else ""
        raise DataError(f"cannot read the PostgreSQL schema: {text} (at {where}){hint}") from error
    if not schema.tables and not schema.views:
        raise DataError(
            f"no table or view that this role may read (in {where}): grant it some, as the SQL of"
            " `text2sql-grpo role --print` does"
        )
    return schema


def _shut(connection: "Connection[tuple[Any, ...]]") -> None:
    with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as copy:
        copy.shutdown(socket.SHUT_RDWR)


def _schema(connection: "Connection[tuple[Any, ...]]", timeout_s: float) -> Schema:
    """Schema, read in one transaction; each statement gets the remaining time."""
    deadline = time.monotonic() + timeout_s

    def ask(query: str) -> Rows:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.execute(f"SET LOCAL statement_timeout = {max(1, round(left_s * 1000))}".encode())
        return connection.execute(query.encode()).fetchall()

    connection.execute(_SETTINGS)
    relations = ask(_RELATIONS)
    places = {oid: (namespace, name) for oid, namespace, name, *_ in relations}
    return schema_of(
        connection.info.dbname,
        "postgresql",
        ask,
        relations=relations,
        columns=ask(_COLUMNS),
        keys=ask(_UNIQUE_KEYS),
        foreign_keys=(
            (oid, ForeignKey(tuple(own), places[parent][1], tuple(references), places[parent][0]))
            for oid, parent, own, references in ask(_FOREIGN_KEYS)
            if parent in places
        ),
    )
