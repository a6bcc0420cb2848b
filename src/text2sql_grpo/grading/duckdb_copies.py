"""Copies of test databases as DuckDB files."""

import hashlib
import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import duckdb

from text2sql_grpo.errors import DataError
from text2sql_grpo.files import draft, is_kept, prune_once
from text2sql_grpo.grading.copies import ScriptStep, as_text, fill, run_script
from text2sql_grpo.grading.mirror import Catalogue, Mirror, read, table_sql
from text2sql_grpo.sql.address import Database
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.names import quote_name
from text2sql_grpo.sql.outcome import Row
from text2sql_grpo.sql.schema import Column, Table

BLOCK_BYTES = 16_384  # the smallest: most tables hold a few rows
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "threads": 1,
    "external_threads": 1,
    "python_enable_replacements": False,
    **dict.fromkeys(
        ("autoload_known_extensions", "autoinstall_known_extensions", "allow_community_extensions"), False
    ),
}
_HERE = "database_name = current_database() AND NOT internal"
_TABLES = f"SELECT schema_name, table_name, sql FROM duckdb_tables() WHERE {_HERE} ORDER BY table_oid"
_FOREIGN_KEYS = """
    SELECT schema_name, table_name, constraint_text FROM duckdb_constraints()
    WHERE database_name = current_database() AND constraint_type = 'FOREIGN KEY'
"""
_INDEXES = """
    SELECT sql FROM duckdb_indexes()
    WHERE database_name = current_database() AND is_unique AND NOT is_primary ORDER BY index_oid
"""
_VIEWS = f"SELECT view_name, sql FROM duckdb_views() WHERE {_HERE} ORDER BY view_oid"
_BEFORE_TABLES = f"""
    SELECT format('CREATE SCHEMA IF NOT EXISTS "{{}}"', replace(schema_name, '"', '""')) FROM duckdb_schemas()
    WHERE {_HERE}
    UNION ALL SELECT format('CREATE TYPE "{{}}"."{{}}" AS ENUM ({{}})', schema_name, type_name,
        list_aggregate(list_transform(labels, lambda label: format('''{{}}''', replace(label, '''', ''''''))),
            'string_agg', ', '))
    FROM duckdb_types() WHERE {_HERE} AND labels IS NOT NULL
    UNION ALL SELECT sql FROM duckdb_sequences() WHERE database_name = current_database()
    UNION ALL SELECT format('CREATE MACRO "{{}}"."{{}}"({{}}) AS {{}}', schema_name, function_name,
        list_aggregate(parameters, 'string_agg', ', '), macro_definition)
    FROM duckdb_functions() WHERE {_HERE} AND function_type = 'macro'
"""
_QUERY = re.compile(r"\bAS\b", re.IGNORECASE)


class DuckDBCopies:
    """Copies as files of one folder, by the names of their originals; see `copies.CopyEngine`.

    Args:
        folder: One folder for all: workers start again when they need another one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._connection = duckdb.connect(":memory:", config=_CONFIG)  # attaches one file after the other

    def catalogue(self, executor: SQLExecutor, database: Database) -> Catalogue:
        """See `copies.CopyEngine`."""
        foreign_keys = read(executor, database, _FOREIGN_KEYS)
        views = [(str(name), str(sql)) for name, sql in read(executor, database, _VIEWS)]
        script = [ScriptStep(str(sql)) for (sql,) in read(executor, database, _BEFORE_TABLES)]
        for *table, sql in read(executor, database, _TABLES):
            create = str(sql)
            for *child, text in foreign_keys:
                create = create.replace(f", {text!s}", "") if child == table else create
            script.append(ScriptStep(create, str(table[1])))
        script += [ScriptStep(str(sql)) for (sql,) in read(executor, database, _INDEXES)]
        script += [ScriptStep(sql, name) for name, sql in views]
        queries = tuple((name, _QUERY.split(sql, maxsplit=1)[1].rstrip("; ")) for name, sql in views)
        with closing(duckdb.connect(":memory:", config=_CONFIG)) as connection:
            kept, gaps = run_script(script, connection.execute, duckdb.Error)
        return Catalogue("duckdb", queries, kept, gaps)

    def create(self, path: Path, mirror: Mirror) -> str:
        """See `copies.CopyEngine`."""
        script = hashlib.sha256("\0".join(mirror.catalogue.script).encode()).hexdigest()[:12]
        copy = self._folder / f"{path.parent.name}-{path.stem}-{script}.duckdb"
        if not is_kept(copy):
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                prune_once(self._folder)
                with draft(copy) as scratch:
                    scratch.unlink(missing_ok=True)
                    _build(self._connection, scratch, path, mirror)
            except (OSError, duckdb.Error) as error:
                self._connection = duckdb.connect(":memory:", config=_CONFIG)
                raise DataError(f"cannot write a test database: {error} (at {copy})") from error
        return f"duckdb:///{copy.absolute()}"

    def drop(self, url: str) -> None:
        """See `copies.CopyEngine`."""
        Path(url.removeprefix("duckdb:///")).unlink(missing_ok=True)


def _build(connection: duckdb.DuckDBPyConnection, copy: Path, path: Path, mirror: Mirror) -> None:
    quoted_path = str(copy).replace("'", "''")
    connection.execute(f"ATTACH '{quoted_path}' AS copy_ (BLOCK_SIZE {BLOCK_BYTES})")
    connection.execute("USE copy_")

    def insert(table: Table, rows: Sequence[Row]) -> None:
        listed = ", ".join(quote_name(column.name, "duckdb") for column in table.columns)
        values = ", ".join(f"CAST(unnest(?::VARCHAR[]) AS {column.cast_type})" for column in table.columns)
        cells = [[as_text(cell) for cell in column] for column in zip(*rows, strict=True)]
        connection.execute(f"INSERT INTO {table_sql(table)} ({listed}) SELECT {values}", cells)

    def accepts(column: Column, text: str) -> bool:
        tried = connection.execute(f"SELECT TRY_CAST(? AS {column.cast_type}) IS NOT NULL", [text])
        return bool(tried.fetchall()[0][0])

    def make(*errors: type[Exception]) -> None:
        for statement in mirror.catalogue.script:
            connection.execute(statement)
        fill(path, mirror, insert=insert, accepts=accepts, execute=connection.execute, errors=errors)

    try:
        try:
            connection.execute("BEGIN")
            make()
            connection.execute("COMMIT")
        except duckdb.Error:  # a row was refused, which ends the transaction: without one, which takes longer
            connection.execute("ROLLBACK")
            make(duckdb.Error)
    finally:
        connection.execute("USE memory")
        connection.execute("DETACH copy_")
