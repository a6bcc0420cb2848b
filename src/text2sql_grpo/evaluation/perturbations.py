"""Held-out questions asked in another form, to see what an accuracy depends on.

Each perturbation leaves the right answer as it is, or rewrites the gold query with the database (Dr.Spider,
Chang et al. 2023, arXiv:2301.08881, measured seventeen such forms).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Literal

from sqlglot import exp

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.bench import Bench, Environment
from text2sql_grpo.evaluation.perturbed_copies import copies_of
from text2sql_grpo.grading import compare_strict
from text2sql_grpo.sql.address import parse_address
from text2sql_grpo.sql.query import literals, read_query, write_query
from text2sql_grpo.sql.schema import Schema

Perturbation = Literal["order", "rename", "distractors", "typos", "phrasing", "no_schema"]

SHORTEST_WITH_TYPO = 5  # letters of a word
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
    names = sorted({one.database for named in sets.values() for one in named})
    known = {name: copies_of(databases.address(name), name, f"--perturb {kind}") for name in names}
    targets = {name: folder / f"{name}{copies.suffix}" for name, (copies, _) in known.items()}
    if kind == "distractors":
        for name, (copies, file) in known.items():
            donors = [one for one in names if one != name and known[one][0] is copies]
            if not donors:
                raise DataError(
                    f"--perturb distractors takes tables of another database like {name!r}: there is only one"
                )
            other = Random(f"{seed}/{name}").choice(donors)
            random = Random(f"{seed}/{name}/{other}")
            copies.with_tables_of(known[other][1], file, targets[name], random)
        return Perturbed(_environment(bench, folder), sets)
    renamed = {name: copies.renamed(file, targets[name]) for name, (copies, file) in known.items()}
    environment = _environment(bench, folder)
    asked, left_out = {}, 0
    for name, named in sets.items():
        found = [_renamed(one, renamed[one.database], databases, environment) for one in named]
        asked[name] = [one for one in found if one is not None]
        left_out += found.count(None)
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
    golds = [_with_names(sql, names, dialect) for sql in (example.gold_sql, *example.other_golds)]
    if None in golds:
        return None
    before, after = environment.executor.execute_many([(address, example.gold_sql), (renamed, str(golds[0]))])
    if not (before.is_ok and after.is_ok) or compare_strict(before, after, ordered=False) != "equal":
        return None
    first, *others = map(str, golds)
    return replace(example, gold_sql=first, other_golds=tuple(others))


def _with_names(sql: str, names: Mapping[str, str], dialect: str) -> str | None:
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
