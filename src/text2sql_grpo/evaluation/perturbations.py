"""Held-out questions asked in another form, to see what an accuracy depends on.

Each perturbation leaves the right answer as it is, or rewrites the gold query with the database (Dr.Spider,
Chang et al. 2023, arXiv:2301.08881, measured seventeen such forms).
"""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Literal

from sqlglot import exp

from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.bench import Bench, Environment
from text2sql_grpo.grading import compare_strict
from text2sql_grpo.sql.names import quote_name
from text2sql_grpo.sql.query import literals, read_query, write_query
from text2sql_grpo.sql.schema_types import Schema

Perturbation = Literal["order", "rename", "distractors", "typos", "phrasing", "no_schema"]

N_DISTRACTORS = 3  # tables of another database, added to each
MAX_DISTRACTOR_ROWS = 20
SHORTEST_WITH_TYPO = 5  # letters of a word
_PHRASINGS = ("Could you tell me: {}", "I need this for a report. {}", "{} Thanks!", "Please answer this: {}")
_VOWELS = "aeiou"


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
        folder: Empty folder for copies of databases, which are SQLite's for `rename` and `distractors`.

    Raises:
        DataError: A database cannot be copied, or there is only one to take distractors from.
    """
    config = bench.config
    if kind in ("typos", "phrasing"):
        change = _with_typo if kind == "typos" else _phrased
        asked = {
            name: [replace(one, question=change(one, Random(f"{seed}/{one.id}"))) for one in named]
            for name, named in sets.items()
        }
        return Perturbed(Environment.of(config), asked)
    if kind in ("order", "no_schema"):
        environment = Environment.of(config)
        environment.sessions.arrange = (
            (lambda schema: _shuffled(schema, Random(f"{seed}/{schema.name}")))
            if kind == "order"
            else (lambda schema: replace(schema, tables=(), views=()))
        )
        return Perturbed(environment, sets)
    databases = bench.environment.databases
    names = sorted({one.database for named in sets.values() for one in named})
    files = {name: databases.sqlite_file(name, f"--perturb {kind}") for name in names}
    copies = {name: _copied(file, folder / f"{name}.sqlite") for name, file in files.items()}
    if kind == "distractors":
        if len(files) < 2:
            raise DataError("--perturb distractors takes tables of another database, and there is only one")
        for name, copy in copies.items():
            other = Random(f"{seed}/{name}").choice([one for one in names if one != name])
            _add_tables(copy, files[other], Random(f"{seed}/{name}/{other}"))
        return Perturbed(_environment(bench, folder), sets)
    renamed = {name: _rename_columns(copy) for name, copy in copies.items()}
    environment = _environment(bench, folder)
    asked, left_out = {}, 0
    for name, named in sets.items():
        known = [_renamed(one, renamed[one.database], files, environment) for one in named]
        asked[name] = [one for one in known if one is not None]
        left_out += known.count(None)
    return Perturbed(environment, asked, left_out)


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


def _copied(source: Path, target: Path) -> Path:
    with (
        closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as known,
        closing(sqlite3.connect(target)) as copy,
    ):
        known.backup(copy)
    return target


def _tables(connection: sqlite3.Connection, schema: str = "main") -> dict[str, str]:
    """Statements that create the tables, by name."""
    found = connection.execute(
        f"SELECT name, sql FROM {schema}.sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' "
        "ESCAPE '\\'"
    )
    return dict(found.fetchall())


def _add_tables(database: Path, donor: Path, random: Random) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("ATTACH ? AS donor", (f"{donor}",))
        own = {name.lower() for name in _tables(connection)}
        others = {name: sql for name, sql in _tables(connection, "donor").items() if name.lower() not in own}
        for name in random.sample(sorted(others), min(N_DISTRACTORS, len(others))):
            connection.execute(others[name])
            quoted = quote_name(name)
            rows = f"SELECT * FROM donor.{quoted} LIMIT {MAX_DISTRACTOR_ROWS}"
            connection.execute(f"INSERT INTO main.{quoted} {rows}")
        connection.commit()


def _short(name: str) -> str:
    """A name without its inner vowels: `salary` becomes `slry`."""
    return name[0] + "".join(letter for letter in name[1:] if letter.lower() not in _VOWELS)


def _rename_columns(database: Path) -> dict[str, str]:
    """Shorten the names of columns; returns the new name by each old one, in lower case.

    One name is shortened alike in all tables, and stays where two of a table would become one.
    """
    with closing(sqlite3.connect(database)) as connection:
        columns = {
            table: [row[1] for row in connection.execute(f"PRAGMA table_info({quote_name(table)})")]
            for table in _tables(connection)
        }
        kept: set[str] = set()
        for names in columns.values():
            short = [_short(name).lower() for name in names]
            kept |= {name.lower() for name, new in zip(names, short, strict=True) if short.count(new) > 1}
        renamed = {}
        for table, names in columns.items():
            for name in names:
                new = _short(name)
                if new != name and name.lower() not in kept and not name.startswith("_"):
                    change = f"RENAME COLUMN {quote_name(name)} TO {quote_name(new)}"
                    connection.execute(f"ALTER TABLE {quote_name(table)} {change}")
                    renamed[name.lower()] = new
        connection.commit()
    return renamed


def _renamed(
    example: Example, names: Mapping[str, str], files: Mapping[str, Path], environment: Environment
) -> Example | None:
    """The question with its gold queries on the renamed columns; None if their results would be others."""
    golds = [_with_names(sql, names) for sql in (example.gold_sql, *example.other_golds)]
    if None in golds:
        return None
    before, after = environment.executor.execute_many(
        [
            (files[example.database], example.gold_sql),
            (environment.databases.address(example.database), str(golds[0])),
        ]
    )
    if not (before.is_ok and after.is_ok) or compare_strict(before, after, ordered=False) != "equal":
        return None
    first, *others = map(str, golds)
    return replace(example, gold_sql=first, other_golds=tuple(others))


def _with_names(sql: str, names: Mapping[str, str]) -> str | None:
    tree = read_query(sql).tree
    if tree is None or {alias.alias.lower() for alias in tree.find_all(exp.Alias)} & names.keys():
        return None
    tree = tree.copy()
    for identifier in _column_names(tree):
        if new := names.get(identifier.name.lower()):
            identifier.set("this", new)
            identifier.set("quoted", True)
    return write_query(tree)


def _column_names(tree: exp.Expr) -> Iterable[exp.Identifier]:
    """Identifiers that name columns, also in USING."""
    for column in tree.find_all(exp.Column):
        if isinstance(column.this, exp.Identifier):
            yield column.this
    for join in tree.find_all(exp.Join):
        yield from (name for name in join.args.get("using") or () if isinstance(name, exp.Identifier))
