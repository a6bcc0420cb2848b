"""Properties of each kind of database: one `Engine` for each.

Imported by the workers: nothing heavy here.
"""

from __future__ import annotations

import importlib

from text2sql_grpo.errors import needs_extra

TYPE_CHECKING = False  # see `sqlite`
if TYPE_CHECKING:
    from typing import Any


class Engine:
    """One kind of database.

    Attributes:
        kind: Name in URLs and of the package's extra.
        title: Name for people.
        dialect: Name of its SQL in sqlglot.
        version_sql: Query for its version, where its SQL differs by it; empty for none.
        functions_sql: Query for the names of functions that a database defines; empty where none can.
        module: Module of its connection, with `fingerprint_of` and the class `connection`.
        schema_reader: Module and function that read a schema.
        logs: Suffixes of files beside a database that hold changes; empty for a server.
        is_server: True if a database is no file, so that nothing of it is cached.
        max_open: Maximum number of connections of one worker; None for as many as files may be open.
        address_space: Maximum addresses of a worker, bytes.
        variables: Prefixes of the environment variables that its client reads.
        needs_packages: True if its driver lies outside of the standard library.
    """

    def __init__(
        self,
        kind: str,
        title: str,
        *,
        dialect: str,
        module: str,
        connection: str,
        schema_reader: tuple[str, str],
        version_sql: str = "",
        functions_sql: str = "",
        logs: tuple[str, ...] = (),
        max_open: int | None = None,
        address_space: int,
        variables: tuple[str, ...] = (),
        needs_packages: bool = True,
    ) -> None:
        self.kind = kind
        self.title = title
        self.dialect = dialect
        self.version_sql = version_sql
        self.functions_sql = functions_sql
        self.module = module
        self.connection = connection
        self.schema_reader = schema_reader
        self.logs = logs
        self.is_server = not logs
        self.max_open = max_open
        self.address_space = address_space
        self.variables = variables
        self.needs_packages = needs_packages

    def loaded(self) -> tuple[Any, Any]:
        """Module of the connection, and its class.

        Raises:
            ConfigError: The driver is not installed.
        """
        with needs_extra(self.kind, f"a {self.kind} database"):
            module = importlib.import_module(f"text2sql_grpo.sql.{self.module}")
        return module, getattr(module, self.connection)

    def read_schema(self, location: str, timeout_s: float) -> Any:
        """Schema of a database; see `schema.read_schema`."""
        module, function = self.schema_reader
        read = getattr(importlib.import_module(f"text2sql_grpo.sql.{module}"), function)
        return read(location, timeout_s=timeout_s)


ENGINES = {
    engine.kind: engine
    for engine in (
        Engine(
            "sqlite",
            "SQLite",
            dialect="sqlite",
            module="sqlite",
            connection="HardenedDatabase",
            schema_reader=("schema_sqlite", "read_sqlite"),
            logs=("-wal", "-journal"),
            address_space=1 << 30,
            needs_packages=False,
        ),
        Engine(
            "duckdb",
            "DuckDB",
            dialect="duckdb",
            module="duckdb_database",
            connection="HardenedDuckDB",
            schema_reader=("schema_duckdb", "read_duckdb"),
            version_sql="SELECT version()",
            functions_sql="SELECT DISTINCT function_name FROM duckdb_functions() WHERE NOT internal",
            logs=(".wal",),
            address_space=4 << 30,
        ),
        Engine(
            "postgresql",
            "PostgreSQL",
            dialect="postgres",
            module="postgres_database",
            connection="HardenedPostgres",
            schema_reader=("schema_postgres", "read_postgres"),
            version_sql="SELECT current_setting('server_version')",
            functions_sql="SELECT proname FROM pg_proc p JOIN pg_language l ON l.oid = prolang WHERE lanname "
            "NOT IN ('internal', 'c') AND pronamespace::regnamespace::text NOT IN "
            "('pg_catalog', 'information_schema')",
            max_open=4,  # a server often allows 100, for all of its clients together
            address_space=1 << 30,
            variables=("PG", "SSL_CERT_", "KRB5"),
        ),
    )
}
