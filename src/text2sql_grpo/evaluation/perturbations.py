"""Held-out questions asked in another form, to see what an accuracy depends on.

Each perturbation leaves the right answer as it is, or rewrites the gold query with the database (Dr.Spider,
Chang et al. 2023, arXiv:2301.08881, measured seventeen such forms).
"""

import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation import Perturbation
from text2sql_grpo.evaluation.bench import Bench, Environment
from text2sql_grpo.grading import compare_strict
from text2sql_grpo.sql.address import Kind, parse_address
from text2sql_grpo.sql.names import quote_name
from text2sql_grpo.sql.query import literals, read_query, write_query
from text2sql_grpo.sql.schema import Schema

SHORTEST_WITH_TYPO = 5  # letters of a word
N_DISTRACTORS = 3  # tables of another database, added to each
MAX_DISTRACTOR_ROWS = 20
_VOWELS = "aeiou"
_PHRASINGS = ("Could you tell me: {}", "I need this for a report. {}", "{} Thanks!", "Please answer this: {}")


@dataclass(frozen=True)
class Perturbed:
    """Held-out questions in another form.

    Attributes:
        environment: Open environment of their databases.
        sets: The questions by the name of their set.
        left_out: Number of questions that cannot be asked in this form.
    """

    environment: Environment
    sets: Mapping[str, Sequence[Example]]
    left_out: int = 0


def perturbed(
    kind: Perturbation,
    bench: Bench,
    sets: Mapping[str, Sequence[Example]],
    *,
    folder: Path,
    seed: int = 0,
) -> Perturbed:
    """Put questions into another form.

    `order` shuffles the tables, and their columns, of the schema that the model reads; `rename` shortens
    names of columns (`salary` to `slry`) in a copy of the database, and in the gold query; `distractors`
    adds three tables of another database; `typos` swaps two letters of one word; `phrasing` puts the question
    into another sentence; `no_schema` shows no schema: what is answered then was known before.

    Args:
        folder: Empty folder for copies of databases, of SQLite and DuckDB, for `rename` and `distractors`.

    Raises:
        DataError: A database is on a server or cannot be copied, or has no other to take distractors from.
    """
    if kind in _QUESTIONS:
        asked = {
            name: [replace(one, question=_QUESTIONS[kind](one, Random(f"{seed}/{one.id}"))) for one in named]
            for name, named in sets.items()
        }
        return Perturbed(Environment.of(bench.config), asked)
    if kind in _SCHEMAS:
        environment = Environment.of(bench.config)
        environment.sessions.arrange = lambda schema: _SCHEMAS[kind](schema, Random(f"{seed}/{schema.name}"))
        return Perturbed(environment, sets)
    databases = bench.environment.databases
    known = _files(kind, bench, sets)
    targets = {name: folder / f"{name}{copies.suffix}" for name, (copies, _) in known.items()}
    if kind == "distractors":
        for name, (copies, file) in known.items():
            other = Random(f"{seed}/{name}").choice(_donors(name, known))
            random = Random(f"{seed}/{name}/{other}")
            copies.with_tables_of(known[other][1], file, targets[name], random)
        return Perturbed(_environment(bench, folder), sets)
    renamed = {}
    for name, (copies, file) in known.items():
        hidden = bench.environment.sessions.hidden(name).columns.values()
        renamed[name] = copies.renamed(file, targets[name], frozenset().union(*hidden))
    environment = _environment(bench, folder)
    asked, left_out = {}, 0
    for name, named in sets.items():
        found = [_renamed(one, renamed[one.database], databases, environment) for one in named]
        asked[name] = [one for one in found if one is not None]
        left_out += found.count(None)
    return Perturbed(environment, asked, left_out)


def check_perturbations(
    kinds: Iterable[Perturbation], bench: Bench, sets: Mapping[str, Sequence[Example]]
) -> None:
    """Refuse forms that the databases of the questions do not allow, before any is answered.

    Raises:
        DataError: A database is on a server, or has no other to take distractors from.
    """
    for kind in kinds:
        if kind in ("rename", "distractors"):
            _files(kind, bench, sets)


def _files(
    kind: Perturbation, bench: Bench, sets: Mapping[str, Sequence[Example]]
) -> dict[str, tuple["Copies", Path]]:
    """Maker of copies and file of each database that is asked about."""
    names = sorted({one.database for named in sets.values() for one in named})
    addresses = {name: bench.environment.databases.address(name) for name in names}
    known = {name: copies_of(one, name, f"--perturb {kind}") for name, one in addresses.items()}
    for name in known if kind == "distractors" else ():
        if not _donors(name, known):
            raise DataError(
                f"--perturb distractors takes tables of another database like {name!r}: there is only one"
            )
    return known


def _donors(name: str, known: Mapping[str, tuple["Copies", Path]]) -> list[str]:
    return [other for other in known if other != name and known[other][0] is known[name][0]]


def _environment(bench: Bench, folder: Path) -> Environment:
    return Environment.of(replace(bench.config, data=replace(bench.config.data, databases=folder)))


def _phrased(example: Example, random: Random) -> str:
    return random.choice(_PHRASINGS).format(example.question)


def _with_typo(example: Example, random: Random) -> str:
    """The question with two letters swapped in a word that no value of the gold query holds."""
    values = " ".join(str(value) for value in literals(example.gold_sql)).casefold()
    words = example.question.split(" ")
    places = [
        (i, at)
        for i, word in enumerate(words)
        if len(word) >= SHORTEST_WITH_TYPO and word.isalpha() and word.casefold() not in values
        for at in range(1, len(word) - 2)
        if word[at] != word[at + 1]
    ]
    if not places:
        return example.question
    i, at = random.choice(places)
    word = words[i]
    words[i] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)


def _shuffled(schema: Schema, random: Random) -> Schema:
    tables = [
        replace(table, columns=tuple(random.sample(table.columns, len(table.columns))))
        for table in schema.tables
    ]
    return replace(schema, tables=tuple(random.sample(tables, len(tables))))


_QUESTIONS = {"typos": _with_typo, "phrasing": _phrased}
_SCHEMAS: dict[str, Callable[[Schema, Random], Schema]] = {
    "order": _shuffled,
    "no_schema": lambda schema, random: replace(schema, tables=(), views=()),
}


def _renamed(
    example: Example, names: Mapping[str, str], databases: Databases, environment: Environment
) -> Example | None:
    """The question with its gold queries on the renamed columns; None if their results would be others."""
    address, renamed = (known.address(example.database) for known in (databases, environment.databases))
    dialect = parse_address(address).dialect
    golds = [_renamed_query(sql, names, dialect) for sql in (example.gold_sql, *example.other_golds)]
    if None in golds:
        return None
    before, after = environment.executor.execute_many([(address, example.gold_sql), (renamed, str(golds[0]))])
    if not (before.is_ok and after.is_ok) or compare_strict(before, after, ordered=False) != "equal":
        return None
    first, *others = map(str, golds)
    return replace(example, gold_sql=first, other_golds=tuple(others))


def _renamed_query(sql: str, names: Mapping[str, str], dialect: str) -> str | None:
    tree = read_query(sql, dialect).tree
    if tree is None or {alias.alias.lower() for alias in tree.find_all(exp.Alias)} & names.keys():
        return None
    columns = [column.this for column in tree.find_all(exp.Column)]
    columns += [name for join in tree.find_all(exp.Join) for name in join.args.get("using") or ()]
    for identifier in columns:
        if isinstance(identifier, exp.Identifier) and (new := names.get(identifier.name.lower())):
            identifier.set("this", new)
            identifier.set("quoted", True)
    return write_query(tree, dialect)


class SQLiteCopies:
    """Copies of SQLite files, whose columns SQLite renames in views too; virtual tables stay as they are.

    Attributes:
        suffix: Ending of a copy's name, by which a folder's databases are found.
    """

    suffix = ".sqlite"

    def renamed(self, source: Path, target: Path, hidden: Collection[str] = ()) -> Mapping[str, str]:
        """Copy with shorter names of columns but `hidden` ones; returns the new name by each old one."""
        with self._copied(source, target) as connection:
            self._drop_unused(connection)
            columns = {
                table: [row[1] for row in connection.execute(f"PRAGMA table_info({quote_name(table)})")]
                for table in self._tables(connection)
            }
            names = _new_names(columns, hidden)
            for table, old_names in columns.items():
                for old in old_names:
                    if new := names.get(old.lower()):
                        change = f"RENAME COLUMN {quote_name(old)} TO {quote_name(new)}"
                        connection.execute(f"ALTER TABLE {quote_name(table)} {change}")
        return names

    def with_tables_of(self, donor: Path, source: Path, target: Path, random: Random) -> None:
        """Copy with a few tables of a donor, and a few of their rows."""
        with self._copied(source, target) as connection, _reported(donor, sqlite3.Error):
            connection.execute("ATTACH ? AS donor", (f"{donor}",))
            scripts = self._tables(connection, "donor")
            taken = [row[0] for row in connection.execute("SELECT name FROM main.sqlite_schema")]
            for name in _distractors(scripts, taken, random):
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
        """Statements that create the tables, by name; without virtual tables and those behind them."""
        # No rows before SQLite 3.37.
        kinds = {row[1]: row[2] for row in connection.execute(f"PRAGMA {schema}.table_list")}
        found = connection.execute(
            f"SELECT name, sql FROM {schema}.sqlite_schema WHERE type = 'table' "
            "AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
        )
        return {name: sql for name, sql in found if kinds.get(name, "table") == "table"}

    def _drop_unused(self, connection: sqlite3.Connection) -> None:
        """Drop triggers, and views that no query can read: next to a broken one no column can be renamed."""
        found = connection.execute("SELECT type, name FROM sqlite_schema WHERE type IN ('trigger', 'view')")
        for kind, name in found.fetchall():
            try:
                if kind == "view":
                    connection.execute(f"EXPLAIN SELECT * FROM {quote_name(name)}")
                    continue
            except sqlite3.OperationalError:
                pass
            connection.execute(f"DROP {kind} IF EXISTS {quote_name(name)}")


class DuckDBCopies:
    """Copies of DuckDB files by EXPORT DATABASE, as DuckDB renames no column of a key; without comments."""

    suffix = ".duckdb"

    def renamed(self, source: Path, target: Path, hidden: Collection[str] = ()) -> Mapping[str, str]:
        import duckdb

        with _reported(source, duckdb.Error, SqlglotError), tempfile.TemporaryDirectory() as folder:
            with duckdb.connect(str(source), read_only=True) as known:
                known.execute(f"EXPORT DATABASE '{folder}' (FORMAT parquet)")
                columns: dict[str, list[str]] = {}
                for schema, table, column in known.execute(_COLUMNS).fetchall():
                    columns.setdefault(f"{schema}.{table}", []).append(column)
            names = _new_names(columns, hidden)
            script = (Path(folder) / "schema.sql").read_text("utf-8")
            with duckdb.connect(str(target)) as copy:
                for statement in filter(None, sqlglot.parse(script, dialect="duckdb")):
                    copy.execute(_renamed_statement(statement, names).sql("duckdb"))
                copy.execute((Path(folder) / "load.sql").read_text("utf-8"))
        return names

    def with_tables_of(self, donor: Path, source: Path, target: Path, random: Random) -> None:
        import duckdb

        files = {"known": source, "donor": donor, "target": target}
        with _reported(source, duckdb.Error), duckdb.connect() as connection:
            for name, path in files.items():
                quoted_path = str(path).replace("'", "''")
                mode = "" if name == "target" else "(READ_ONLY)"
                connection.execute(f"ATTACH '{quoted_path}' AS {name} {mode}")
            connection.execute("COPY FROM DATABASE known TO target")
            own, others = (
                [row[0] for row in connection.execute(_TABLES, [name]).fetchall()]
                for name in ("known", "donor")
            )
            for name in _distractors(others, own, random):
                quoted = quote_name(name, "duckdb")
                plain = connection.execute(_PLAIN_COLUMNS, [name]).fetchall()
                columns = ", ".join(quote_name(row[0], "duckdb") for row in plain)
                rows = f"SELECT {columns} FROM donor.{quoted} LIMIT {MAX_DISTRACTOR_ROWS}"
                with _reported(donor, duckdb.Error):
                    connection.execute(f"CREATE TABLE target.{quoted} AS {rows}")


_COLUMNS = "SELECT schema_name, table_name, column_name FROM duckdb_columns() WHERE NOT internal"
_TABLES = "SELECT table_name FROM duckdb_tables() WHERE database_name = ? AND schema_name = 'main'"
# A generated column may be made of a hidden one; its copy would be a visible column.
_PLAIN_COLUMNS = (
    "SELECT column_name FROM duckdb_columns() WHERE database_name = 'donor' AND schema_name = 'main' "
    "AND table_name = ? AND NOT is_generated ORDER BY column_index"
)
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


def _new_names(columns: Mapping[str, Sequence[str]], hidden: Collection[str]) -> Mapping[str, str]:
    """Shorter name by each old one, in lower case, for the columns of each table.

    One name is shortened alike in all tables, and stays where two of a table would become one.
    """
    kept = set(hidden)
    for names in columns.values():
        count = Counter(_short(name).lower() for name in names)
        kept |= {name.lower() for name in names if count[_short(name).lower()] > 1 or name.startswith("_")}
    short = {name: _short(name) for names in columns.values() for name in names}
    return {name.lower(): new for name, new in short.items() if new != name and name.lower() not in kept}


def _renamed_statement(statement: exp.Expr, names: Mapping[str, str]) -> exp.Expr:
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
