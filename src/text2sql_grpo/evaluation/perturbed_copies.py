"""Copies of a database with shorter names of columns, or with tables of another database."""

import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.address import Kind, parse_address
from text2sql_grpo.sql.names import quote_name

N_DISTRACTORS = 3  # tables of another database, added to each
MAX_DISTRACTOR_ROWS = 20
_VOWELS = "aeiou"


class SQLiteCopies:
    """Copies of SQLite files, whose columns SQLite renames in views and triggers too.

    Attributes:
        suffix: Ending of a copy's name, by which a folder's databases are found.
    """

    suffix = ".sqlite"

    def renamed(self, source: Path, target: Path) -> Mapping[str, str]:
        """Copy with shorter names of columns; returns the new name by each old one, in lower case."""
        with self._copied(source, target) as connection:
            columns = {
                table: [row[1] for row in connection.execute(f"PRAGMA table_info({quote_name(table)})")]
                for table in self._tables(connection)
            }
            names = _new_names(columns)
            for table, old_names in columns.items():
                for old in old_names:
                    if new := names.get(old.lower()):
                        change = f"RENAME COLUMN {quote_name(old)} TO {quote_name(new)}"
                        connection.execute(f"ALTER TABLE {quote_name(table)} {change}")
        return names

    def with_tables_of(self, donor: Path, source: Path, target: Path, random: Random) -> None:
        """Copy with a few tables of a donor, and a few of their rows."""
        with self._copied(source, target) as connection:
            connection.execute("ATTACH ? AS donor", (f"{donor}",))
            scripts = self._tables(connection, "donor")
            for name in _distractors(scripts, self._tables(connection), random):
                connection.execute(scripts[name])
                quoted = quote_name(name)
                plain = connection.execute(f"PRAGMA donor.table_info({quoted})")  # without generated ones
                columns = ", ".join(quote_name(row[1]) for row in plain)
                rows = f"SELECT {columns} FROM donor.{quoted} LIMIT {MAX_DISTRACTOR_ROWS}"
                connection.execute(f"INSERT INTO main.{quoted} ({columns}) {rows}")

    @contextmanager
    def _copied(self, source: Path, target: Path) -> Iterator[sqlite3.Connection]:
        with (
            _reported(source, sqlite3.Error),
            closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)) as known,
            closing(sqlite3.connect(target)) as copy,
        ):
            known.backup(copy)
            yield copy
            copy.commit()

    def _tables(self, connection: sqlite3.Connection, schema: str = "main") -> dict[str, str]:
        """Statements that create the tables, by name."""
        found = connection.execute(
            f"SELECT name, sql FROM {schema}.sqlite_schema WHERE type = 'table' "
            "AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
        )
        return dict(found.fetchall())


class DuckDBCopies:
    """Copies of DuckDB files by EXPORT DATABASE, as DuckDB renames no column of a key; without comments."""

    suffix = ".duckdb"

    def renamed(self, source: Path, target: Path) -> Mapping[str, str]:
        import duckdb

        with _reported(source, duckdb.Error, SqlglotError), tempfile.TemporaryDirectory() as folder:
            with duckdb.connect(str(source), read_only=True) as known:
                known.execute(f"EXPORT DATABASE '{folder}' (FORMAT parquet)")
                columns: dict[str, list[str]] = {}
                for schema, table, column in known.execute(_COLUMNS).fetchall():
                    columns.setdefault(f"{schema}.{table}", []).append(column)
            names = _new_names(columns)
            script = (Path(folder) / "schema.sql").read_text("utf-8")
            with duckdb.connect(str(target)) as copy:
                for statement in filter(None, sqlglot.parse(script, dialect="duckdb")):
                    copy.execute(_with_names(statement, names).sql("duckdb"))
                copy.execute((Path(folder) / "load.sql").read_text("utf-8"))
        return names

    def with_tables_of(self, donor: Path, source: Path, target: Path, random: Random) -> None:
        import duckdb

        with _reported(source, duckdb.Error), duckdb.connect(str(target)) as copy:
            for name, path in (("known", source), ("donor", donor)):
                quoted_path = str(path).replace("'", "''")
                copy.execute(f"ATTACH '{quoted_path}' AS {name} (READ_ONLY)")
            copy.execute(f"COPY FROM DATABASE known TO {quote_name(target.stem, 'duckdb')}")
            own, others = (
                [row[0] for row in copy.execute(_TABLES, [name]).fetchall()] for name in ("known", "donor")
            )
            for name in _distractors(others, own, random):
                quoted = quote_name(name, "duckdb")
                rows = f"SELECT * FROM donor.{quoted} LIMIT {MAX_DISTRACTOR_ROWS}"
                copy.execute(f"CREATE TABLE {quoted} AS {rows}")


_COLUMNS = "SELECT schema_name, table_name, column_name FROM duckdb_columns() WHERE NOT internal"
_TABLES = "SELECT table_name FROM duckdb_tables() WHERE database_name = ? AND schema_name = 'main'"
Copies = SQLiteCopies | DuckDBCopies
_COPIES: Mapping[Kind, Copies] = {"sqlite": SQLiteCopies(), "duckdb": DuckDBCopies()}


def copies_of(address: Path | str, name: str, purpose: str) -> tuple[Copies, Path]:
    """The maker of copies for a database, and its file; `purpose` is the start of the error.

    Raises:
        DataError: The database is on a server.
    """
    kind, path, *_ = parse_address(address)
    if kind not in _COPIES:
        raise DataError(
            f"{purpose} copies files of SQLite and DuckDB, and {name!r} is on a server: {address}"
        )
    return _COPIES[kind], Path(path)


@contextmanager
def _reported(source: Path, *errors: type[Exception]) -> Iterator[None]:
    """Raise a `DataError` for what cannot be copied."""
    try:
        yield
    except errors as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"cannot copy the database: {reason} (at {source})") from error


def _new_names(columns: Mapping[str, Sequence[str]]) -> Mapping[str, str]:
    """Shorter name by each old one, in lower case, for the columns of each table.

    One name is shortened alike in all tables, and stays where two of a table would become one.
    """
    kept: set[str] = set()
    for names in columns.values():
        count = Counter(_short(name).lower() for name in names)
        kept |= {name.lower() for name in names if count[_short(name).lower()] > 1 or name.startswith("_")}
    short = {name: _short(name) for names in columns.values() for name in names}
    return {name.lower(): new for name, new in short.items() if new != name and name.lower() not in kept}


def _with_names(statement: exp.Expr, names: Mapping[str, str]) -> exp.Expr:
    """A statement that creates something, with the new names of columns."""
    for identifier in list(statement.find_all(exp.Identifier)):
        new = names.get(identifier.name.lower())
        if new and not isinstance(identifier.parent, exp.Table):
            identifier.replace(exp.to_identifier(new, quoted=True))
    return statement


def _short(name: str) -> str:
    """A name without its inner vowels: `salary` becomes `slry`."""
    return name[0] + "".join(letter for letter in name[1:] if letter.lower() not in _VOWELS)


def _distractors(donors: Iterable[str], own: Iterable[str], random: Random) -> list[str]:
    """Tables of a donor to add, of those that have no name of an own one."""
    taken = {name.lower() for name in own}
    others = sorted(name for name in donors if name.lower() not in taken)
    return random.sample(others, min(N_DISTRACTORS, len(others)))
