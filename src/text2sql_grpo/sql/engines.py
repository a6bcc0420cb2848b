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
    """One kind of database."""

    kind: str  # name in URLs and of the package's extra
    title: str  # name for people
    dialect: str  # name of its SQL in sqlglot
    version_sql = ""  # query for its version, where its SQL differs by it
    columns_sql: str  # query for a table's columns, for the model; it runs where columns are hidden too
    functions_sql = ""  # query for the names of functions that a database defines, where one can
    missing_column: str  # pattern of its error about a column that is not there; one group matches the name
    missing_table: str  # the same of a table
    # Query for `n` rows spread over a table: every `step`-th, or `percent` of all, the same rows each time.
    sample_sql: str
    module: str  # module of its connection, with `fingerprint_of` and the class `connection`
    connection: str
    schema_module: str  # module whose `read` reads a schema
    logs: tuple[str, ...] = ()  # suffixes of files next to a database that hold changes
    is_server = False  # True if a database is not a file, so that nothing of it is cached
    max_open: int | None = None  # connections of one worker; None for as many as files may be open
    address_space = 1 << 30  # maximum addresses of a worker, bytes
    variables: tuple[str, ...] = ()  # prefixes of the environment variables that its client reads
    needs_packages = True  # True if its driver lies outside of the standard library
    needs_mirror = True  # True if test databases are searched on a SQLite mirror, not on the database itself
    is_like_exact = True  # True if LIKE distinguishes upper from lower case
    has_quoted_texts = False  # True if text in double quotes may be a string, instead of a name
    has_dates = True  # True if dates and moments are values of their own types, not texts

    def loaded(self) -> tuple[Any, Any]:
        """Module of the connection, and its class.

        Raises:
            ConfigError: The driver is not installed.
        """
        with needs_extra(self.kind, f"a {self.kind} database"):
            module = importlib.import_module(f"text2sql_grpo.sql.{self.module}")
        return module, getattr(module, self.connection)


class _SQLite(Engine):
    kind = dialect = "sqlite"
    title = "SQLite"
    columns_sql = "PRAGMA table_info(name)"
    missing_column = "no such column: (.+)"
    missing_table = "no such table: (.+)"
    sample_sql = "SELECT {columns} FROM {table} WHERE rowid % {step} = 0 LIMIT {n}"
    module = "sqlite"
    connection = "HardenedDatabase"
    schema_module = "schema_sqlite"
    logs = ("-wal", "-journal")
    has_quoted_texts = True
    needs_packages = needs_mirror = is_like_exact = has_dates = False


class _DuckDB(Engine):
    kind = dialect = "duckdb"
    title = "DuckDB"
    columns_sql = "DESCRIBE name"
    missing_column = 'Referenced column "(.+?)" not found|does not have a column named "(.+?)"'
    missing_table = "Table with name (.+?) does not exist"
    functions_sql = "SELECT DISTINCT function_name FROM duckdb_functions() WHERE NOT internal"
    sample_sql = "SELECT {columns} FROM {table} USING SAMPLE reservoir({n} ROWS) REPEATABLE (0)"
    version_sql = "SELECT version()"
    module = "duckdb_database"
    connection = "HardenedDuckDB"
    schema_module = "schema_duckdb"
    logs = (".wal",)
    address_space = 4 << 30


class _PostgreSQL(Engine):
    kind = "postgresql"
    title = "PostgreSQL"
    columns_sql = "SELECT column_name, data_type FROM information_schema.columns WHERE table_name = 'name'"
    missing_column = 'column "?(.+?)"? does not exist'
    missing_table = 'relation "(.+)" does not exist'
    functions_sql = """
        SELECT proname FROM pg_proc p JOIN pg_language l ON l.oid = prolang
        WHERE lanname NOT IN ('internal', 'c')
            AND pronamespace::regnamespace::text NOT IN ('pg_catalog', 'information_schema')
    """
    sample_sql = "SELECT {columns} FROM {table} TABLESAMPLE BERNOULLI ({percent}) REPEATABLE (0)"
    dialect = "postgres"
    version_sql = "SELECT current_setting('server_version')"
    module = "postgres_database"
    connection = "HardenedPostgres"
    schema_module = "schema_postgres"
    is_server = True
    max_open = 4  # a server often allows 100, for all of its clients together
    variables = ("PG", "SSL_CERT_", "KRB5")


ENGINES = {engine.kind: engine for engine in (_SQLite(), _DuckDB(), _PostgreSQL())}
DIALECTS = {engine.dialect: engine for engine in ENGINES.values()}
