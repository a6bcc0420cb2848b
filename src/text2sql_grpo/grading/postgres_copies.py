"""Copies of test databases as databases of a PostgreSQL server."""

import secrets
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg

from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.grading.base_sample import quoted
from text2sql_grpo.grading.copies import ScriptStep, as_text, fill, run_script
from text2sql_grpo.grading.mirror import Catalogue, Mirror, read, table_sql
from text2sql_grpo.grading.postgres_server import PostgresServer
from text2sql_grpo.sql.address import Database
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Row
from text2sql_grpo.sql.postgres_role import COPY_PREFIX, restricted_role_sql
from text2sql_grpo.sql.schema import Column, Table

RENAMES = 20  # tries, a hundredth of a second apart
Connection = psycopg.Connection[tuple[Any, ...]]
_OWN = "n.nspname <> 'information_schema' AND n.nspname NOT LIKE 'pg\\_%'"
_NAME = "quote_ident(n.nspname) || '.' || quote_ident({}.{}name)"
_COLUMNS = f"""
    SELECT n.nspname, c.relname, quote_ident(a.attname) || ' ' || format_type(a.atttypid, a.atttypmod)
        || coalesce((SELECT ' COLLATE ' || quote_ident(l.collname) FROM pg_collation l
            WHERE l.oid = a.attcollation AND a.attcollation <> t.typcollation), '')
        || CASE WHEN a.attgenerated <> ''
            THEN ' GENERATED ALWAYS AS (' || pg_get_expr(d.adbin, d.adrelid) || ') STORED' ELSE '' END
        || CASE WHEN a.attnotnull THEN ' NOT NULL' ELSE '' END
    FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        JOIN pg_type t ON t.oid = a.atttypid
        LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
    WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND {_OWN} AND a.attnum > 0 AND NOT a.attisdropped
        AND has_schema_privilege(n.oid, 'USAGE') AND has_column_privilege(c.oid, a.attnum, 'SELECT')
    ORDER BY c.oid, a.attnum
"""
_CONSTRAINTS = f"""
    SELECT n.nspname, c.relname, pg_get_constraintdef(k.oid)
    FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE k.contype IN ('p', 'u', 'c') AND {_OWN} ORDER BY k.contype <> 'p', k.oid
"""
_INDEXES = f"""
    SELECT pg_get_indexdef(i.indexrelid)
    FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE i.indisunique AND c.relkind IN ('r', 'p') AND NOT c.relispartition AND {_OWN}
        AND NOT EXISTS (SELECT 1 FROM pg_constraint k WHERE k.conindid = i.indexrelid)
    ORDER BY i.indexrelid
"""
_VIEWS = f"""
    SELECT {_NAME.format("c", "rel")}, c.relname, pg_get_viewdef(c.oid)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('v', 'm') AND {_OWN} AND has_table_privilege(c.oid, 'SELECT') ORDER BY c.oid
"""
_BEFORE_TABLES = f"""
    SELECT 'CREATE SCHEMA IF NOT EXISTS ' || quote_ident(n.nspname) FROM pg_namespace n WHERE {_OWN}
    UNION ALL SELECT 'CREATE EXTENSION IF NOT EXISTS ' || quote_ident(extname) FROM pg_extension
        WHERE extname <> 'plpgsql'
    UNION ALL SELECT 'CREATE TYPE ' || {_NAME.format("t", "typ")} || ' AS ENUM ('
            || (SELECT string_agg(quote_literal(e.enumlabel), ', ' ORDER BY e.enumsortorder) FROM pg_enum e
                WHERE e.enumtypid = t.oid) || ')'
        FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace WHERE t.typtype = 'e' AND {_OWN}
    UNION ALL SELECT 'CREATE DOMAIN ' || {_NAME.format("t", "typ")} || ' AS '
            || format_type(t.typbasetype, t.typtypmod) || CASE WHEN t.typnotnull THEN ' NOT NULL' ELSE '' END
            || coalesce((SELECT string_agg(' ' || pg_get_constraintdef(k.oid), '') FROM pg_constraint k
                WHERE k.contypid = t.oid AND k.contype = 'c'), '')
        FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace WHERE t.typtype = 'd' AND {_OWN}
    UNION ALL SELECT 'CREATE TYPE ' || {_NAME.format("t", "typ")} || ' AS ('
            || (SELECT string_agg(quote_ident(a.attname) || ' ' || format_type(a.atttypid, a.atttypmod), ', '
                ORDER BY a.attnum) FROM pg_attribute a WHERE a.attrelid = c.oid AND NOT a.attisdropped) || ')'
        FROM pg_type t JOIN pg_class c ON c.oid = t.typrelid JOIN pg_namespace n ON n.oid = t.typnamespace
        WHERE c.relkind = 'c' AND {_OWN}
    UNION ALL SELECT 'CREATE TYPE ' || {_NAME.format("t", "typ")} || ' AS RANGE (subtype = '
            || format_type(r.rngsubtype, NULL) || ')'
        FROM pg_range r JOIN pg_type t ON t.oid = r.rngtypid JOIN pg_namespace n ON n.oid = t.typnamespace
        WHERE {_OWN}
    UNION ALL SELECT pg_get_functiondef(p.oid) FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
        WHERE p.prokind = 'f' AND {_OWN} AND NOT EXISTS
            (SELECT 1 FROM pg_depend d WHERE d.objid = p.oid AND d.deptype = 'e')
"""


_OWN_PARTS = (
    ("DROP DATABASE {} WITH (FORCE)", "datname", "pg_database"),
    ("DROP ROLE {}", "rolname", "pg_roles"),
)
_END_SESSIONS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
_SEARCH_PATH = "SELECT string_agg(quote_ident(name), ', ') FROM unnest(current_schemas(false)) AS name"


@dataclass(frozen=True)
class _Template:
    """Empty copy of a database, the role that reads its copies, and the one that fills them.

    A copy runs functions of the database, in CHECKs say, so no superuser fills it.
    """

    database: str
    reader: str
    owner: str
    password: str


class PostgresCopies:
    """Copies on a server of this process alone, or on the server of a URL; see `copies.CopyEngine`.

    Args:
        cache: Parent of the private server's folder.
        url: URL of a superuser of another server; empty for the private one.

    Raises:
        ConfigError: The server cannot be started or used.
    """

    def __init__(self, cache: Path, url: str = "") -> None:
        self._cache = cache
        self._url = url
        self._server: PostgresServer | None = None
        self._opened: Connection | None = None
        self._templates: dict[Catalogue, _Template] = {}
        self._made: dict[str, _Template] = {}  # copies, by their names
        self._spares: dict[_Template, str] = {}
        self._numbers = count()
        self._token = secrets.token_hex(4)
        self._admin()

    def catalogue(self, executor: SQLExecutor, database: Database) -> Catalogue:
        """See `copies.CopyEngine`."""
        columns = read(executor, database, _COLUMNS)
        constraints = read(executor, database, _CONSTRAINTS)
        views = read(executor, database, _VIEWS)
        search_path = str(read(executor, database, _SEARCH_PATH)[0][0])
        script = [ScriptStep(str(sql)) for (sql,) in read(executor, database, _BEFORE_TABLES)]
        for table in dict.fromkeys(row[:2] for row in columns):
            parts = [str(text) for *place, text in (*columns, *constraints) if tuple(place) == table]
            full = ".".join(quoted(str(part)) for part in table)
            script.append(ScriptStep(f"CREATE TABLE {full} ({', '.join(parts)})", str(table[1])))
        script += [ScriptStep(str(sql)) for (sql,) in read(executor, database, _INDEXES)]
        script += [ScriptStep(f"CREATE VIEW {full!s} AS {sql!s}", str(name)) for full, name, sql in views]
        template = _Template(self._new_name(), self._new_name(), self._new_name(), secrets.token_hex(16))
        self._admin().execute(f"CREATE ROLE {template.owner} LOGIN PASSWORD '{template.password}'")
        self._admin().execute(f"CREATE DATABASE {template.database} OWNER {template.owner}")
        with self._connected(template, template.database, search_path) as connection:
            connection.execute("SET check_function_bodies = off")  # functions come before their tables
            kept, gaps = run_script(script, connection.execute, psycopg.Error)
        schemas = sorted({str(row[0]) for row in columns}) or ["public"]
        with psycopg.connect(self._address(template.database), autocommit=True) as admin:
            rights = restricted_role_sql(
                template.reader, template.password, template.database, schemas=schemas
            )
            admin.execute(f"REVOKE TEMPORARY, CREATE ON DATABASE {template.database} FROM PUBLIC")
            admin.execute(rights)
            admin.execute(f"ALTER ROLE {template.reader} SET search_path = {search_path}")
        queries = tuple((str(name), str(sql)) for _, name, sql in views)
        found = Catalogue("postgres", queries, kept, gaps, search_path)
        self._templates[found] = template
        return found

    def create(self, path: Path, mirror: Mirror) -> str:
        """See `copies.CopyEngine`."""
        template = self._templates[mirror.catalogue]
        name = self._new_name()
        try:
            is_used = self._reused(template, name)
            if not is_used:
                self._make(template, name)
            self._made[name] = template
            opened = self._connected(template, name, mirror.catalogue.search_path)
            with opened as connection, connection.transaction():
                for table in mirror.tables if is_used else ():
                    connection.execute(f"DELETE FROM {table_sql(table)}")

                def insert(table: Table, rows: Sequence[Row]) -> None:
                    with connection.transaction():
                        connection.execute(*_insertion(table, rows))

                def accepts(column: Column, text: str) -> bool:
                    with suppress(psycopg.Error), connection.transaction():
                        connection.execute(
                            f"SELECT CAST(%s AS {column.cast_type.replace('%', '%%')})", [text]
                        )
                        return True
                    return False

                execute, errors = connection.execute, (psycopg.Error,)
                fill(path, mirror, insert=insert, accepts=accepts, execute=execute, errors=errors)
        except psycopg.Error as error:
            raise DataError(f"cannot make a test database on PostgreSQL: {error}") from None
        return self._address(name, f"{template.reader}:{template.password}")

    def _make(self, template: _Template, name: str) -> None:
        admin = self._admin()
        strategy = " STRATEGY file_copy" if admin.info.server_version >= 150_000 else ""
        admin.execute(f"CREATE DATABASE {name} OWNER {template.owner} TEMPLATE {template.database}{strategy}")
        admin.execute(f"REVOKE TEMPORARY, CREATE ON DATABASE {name} FROM PUBLIC")

    def _reused(self, template: _Template, name: str) -> bool:
        """True if a copy that is no longer needed got the name, which takes a third of the time.

        The name is new, as results may be known by it.
        """
        spare = self._spares.pop(template, "")
        for _ in range(RENAMES if spare else 0):
            self._admin().execute(_END_SESSIONS, [spare])
            with suppress(psycopg.errors.ObjectInUse):  # a session is ending
                self._admin().execute(f"ALTER DATABASE {spare} RENAME TO {name}")
                return True
            time.sleep(0.01)
        if spare:
            self._admin().execute(f"DROP DATABASE IF EXISTS {spare} WITH (FORCE)")
        return False

    def drop(self, url: str) -> None:
        """See `copies.CopyEngine`; one of each database is kept for the next copy."""
        name = urlsplit(url).path[1:]
        template = self._made.pop(name, None)
        if template is None or template in self._spares:
            self._admin().execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        else:
            self._spares[template] = name

    def _admin(self) -> Connection:
        """Connection of the superuser to the server, which is started first."""
        if self._opened is not None and not self._opened.closed:
            return self._opened
        if not self._url:
            self._server = self._server or PostgresServer(self._cache)
        try:
            opened: Connection = psycopg.connect(self._address(), autocommit=True)
        except psycopg.Error as error:
            raise ConfigError(f"the PostgreSQL server for test databases cannot be used: {error}") from None
        if opened.info.parameter_status("is_superuser") != "on":
            opened.close()
            raise ConfigError(
                "grading.server_url needs a superuser, who makes databases and roles that can only read"
            )
        weakref.finalize(self, _end, opened, f"{COPY_PREFIX}{self._token}_" if self._url else "")
        self._opened = opened
        return opened

    def _connected(self, template: _Template, database: str, search_path: str) -> Connection:
        """Connection of the role that fills copies."""
        address = self._address(database, f"{template.owner}:{template.password}")
        connection: Connection = psycopg.connect(address, autocommit=True)
        connection.execute(
            f"SET search_path = {search_path}; SET TimeZone = 'UTC'; SET DateStyle = 'ISO, YMD'"
        )
        return connection

    def _address(self, database: str = "", user: str = "") -> str:
        """URL on the server; by default of the superuser, and of the database that the URL names."""
        parts = urlsplit(self._server.url if self._server else self._url)
        host = parts.netloc.rpartition("@")[2]
        netloc = f"{user}@{host}" if user else parts.netloc
        return urlunsplit(parts._replace(netloc=netloc, path=f"/{database}" if database else parts.path))

    def _new_name(self) -> str:
        return f"{COPY_PREFIX}{self._token}_{next(self._numbers)}"


def _insertion(table: Table, rows: Sequence[Row]) -> tuple[str, list[list[str | None]]]:
    """INSERT of all rows with its parameters, an array a column."""
    names = ", ".join(quoted(column.name) for column in table.columns)
    values = ", ".join(f"CAST(c{i} AS {column.cast_type})" for i, column in enumerate(table.columns))
    target = f"INSERT INTO {table_sql(table)} ({names}) OVERRIDING SYSTEM VALUE SELECT {values}".replace(
        "%", "%%"
    )
    arrays = ", ".join(["%s::text[]"] * len(table.columns))
    listed = ", ".join(f"c{i}" for i in range(len(table.columns)))
    cells = [[as_text(cell) for cell in column] for column in zip(*rows, strict=True)]
    return f"{target} FROM unnest({arrays}) AS rows_ ({listed})", cells


def _end(admin: Connection, prefix: str) -> None:
    """Drop the databases and roles of this process, if the server goes on, and close the connection."""
    with suppress(psycopg.Error), admin:
        for what, column, table in _OWN_PARTS if prefix else ():
            query = f"SELECT {column} FROM {table} WHERE starts_with({column}, %s)"
            for (name,) in admin.execute(query, [prefix]).fetchall():
                admin.execute(what.format(name))
