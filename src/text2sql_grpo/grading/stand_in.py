"""SQLite stand-in of a database, on which questions and wrong answers are made."""

import re
from pathlib import Path

from sqlglot import exp

from text2sql_grpo.grading.gold_result import GoldResult
from text2sql_grpo.grading.likeness import Catalogue, NativeColumn, NativeTable, as_sqlite, build_likeness
from text2sql_grpo.sql.address import Database, parse_address
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.query import read_query, write_query
from text2sql_grpo.sql.schema import Schema, quote_name, read_schema

MAX_ROWS = 200_000  # of a table; queries on a longer one hold only where they return the same on all rows

_NESTED = re.compile(r".*\]|(JSON|STRUCT|MAP|UNION|BLOB|BYTEA|XML|TSVECTOR|INTERVAL).*", re.I | re.S)


class StandIn:
    """SQLite file in place of a database: itself if it is one, else its likeness.

    Attributes:
        path: The SQLite file.
        n_refused: Number of queries that return something else on the database than on the file.
    """

    def __init__(self, executor: SQLExecutor, database: Database, folder: Path) -> None:
        """Make the stand-in, or find it in the folder.

        Raises:
            DataError: The database cannot be read, or the folder cannot be written.
        """
        kind, location = parse_address(database)
        self.n_refused = 0
        self._executor, self._database = executor, database
        self._known: dict[str, str | None] = {}
        self._schema: Schema | None = None
        self.path = Path(location)
        if kind != "sqlite":
            self._dialect = parse_address(database).dialect
            self._schema = schema = read_schema(database)
            catalogue = _catalogue(schema, self._dialect)
            self.path = build_likeness(executor, database, catalogue, schema, folder, max_rows=MAX_ROWS).path

    def native(self, sql: str) -> str | None:
        """Translate a query of SQLite to the database's SQL; None if it returns something else there."""
        if self._schema is None:
            return sql
        if sql not in self._known:
            found = _in_dialect(sql, self._schema, self._dialect)
            self._known[sql] = found if found and self._agree(found, sql) else None
            self.n_refused += self._known[sql] is None
        return self._known[sql]

    def in_sqlite(self, sql: str) -> str | None:
        """Translate a query of the database to SQLite; None if it returns something else there."""
        if self._schema is None:
            return sql
        found = as_sqlite(sql, self._dialect)
        return found if found and self._agree(sql, found) else None

    def _agree(self, native: str, sql: str) -> bool:
        gold = GoldResult(self._executor, self._database, native)
        outcome = self._executor.execute(self.path, sql)
        return gold.is_usable and outcome.is_ok and gold.difference(outcome, native) == "equal"


def _catalogue(schema: Schema, dialect: str) -> Catalogue:
    """Tables whose likeness is only read: each column whose type is no number or date is a text."""
    tables = []
    for table in schema.tables:
        kept = [column for column in table.columns if not _NESTED.fullmatch(column.type)]
        columns = tuple(NativeColumn(c.name, "TEXT", c.type, c.is_nullable) for c in kept)
        key = tuple(column.name for column in table.columns if column.is_primary_key)
        tables.append(NativeTable(table.namespace, table.name, columns, (key,) if key else ()))
    return Catalogue(dialect, tuple(table for table in tables if table.columns), (), ())


def _in_dialect(sql: str, schema: Schema, dialect: str) -> str | None:
    """Query with the namespaces of its tables, and with quotes where the dialect needs them."""
    parsed = read_query(sql).tree
    if parsed is None:
        return None
    tree = parsed.copy()
    namespaces = {table.name.lower(): table.namespace for table in schema.tables}
    for table in tree.find_all(exp.Table):
        if namespace := namespaces.get(table.name.lower()):
            table.set("db", exp.to_identifier(namespace))
    for identifier in tree.find_all(exp.Identifier):
        identifier.set("quoted", quote_name(identifier.name, schema.dialect) != identifier.name)
    return write_query(tree, dialect)
