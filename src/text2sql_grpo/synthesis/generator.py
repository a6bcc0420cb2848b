"""Generator of questions with checked golds from any databases, in separate splits."""

import logging
import random
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from text2sql_grpo.synthesis.candidates import Draft, Drafter, Side, stable_number
from text2sql_grpo.data.databases import WHAT_IS_READ, Databases, cache_folder
from text2sql_grpo.data.example import Example
from text2sql_grpo.synthesis.templates import BUNDLED, OWN, Template, templates
from text2sql_grpo.synthesis.words import Database, open_with_words
from text2sql_grpo.errors import DataError
from text2sql_grpo.files import jsonl_text
from text2sql_grpo.grading.mirror import Translator
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.sql.address import Database as Address

MAX_ROWS = 50
MAX_FAILURES = 60
MAX_STEPS = 400_000
"""SQLite instructions of a gold: a few milliseconds, but the same on every machine."""

_RANKED = re.compile(r"SELECT .*? (FROM .*) ORDER BY (.*?)( DESC)?(?: LIMIT (\d+))?")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuestionSet:
    """Plan of one question file.

    Attributes:
        databases: Split of its databases.
        lookup_share: Minimum share of the look-up family.
        side: Literals and columns held out for `test_values`, the others, or any.
        gold_thirds: Thirds of all gold SQL (by a hash) that it may use.
    """

    name: str
    databases: str
    count: int
    lookup_share: float
    side: Side
    is_held_out_templates: bool = False
    gold_thirds: tuple[int, ...] = (0, 1, 2)


QUESTION_SETS = (
    QuestionSet("test_databases", "test", 400, 0.42, "any"),
    QuestionSet("dev", "dev", 300, 0.42, "any"),
    QuestionSet("test_values", "train", 300, 0.42, "held_out"),
    QuestionSet("test_templates", "train", 300, 0.42, "seen", is_held_out_templates=True),
    QuestionSet("train", "train", 3000, 0.46, "seen", gold_thirds=(0,)),
    QuestionSet("demonstrations", "train", 6000, 0.46, "seen", gold_thirds=(1, 2)),
)


@dataclass
class Taken:
    """Questions and golds in the files so far; no other file repeats them."""

    questions: set[str] = field(default_factory=set)
    golds: dict[str, str] = field(default_factory=dict)


def make_questions(
    databases: Address, out: Path, *, seed: int = 0, question_sets: Sequence[QuestionSet] = QUESTION_SETS
) -> int:
    """Write one JSONL file per question set for some databases; return the number of questions.

    Questions for other engines than SQLite are made on a mirror; those whose SQL returns something else on
    the database are left out and counted.

    Args:
        databases: Folder of databases, each with optional words (`<name>.json`), or a file, a folder of rows
            or a URL. Without words a database counts as `train`. The templates are those of
            `templates.yaml` beside the folder, or of the package's `own_templates.yaml` if there is none.
        out: Folder of the files. Sets without databases are not written; sets that the databases cannot
            fill are shorter.
        seed: Random seed; held-out columns and literals do not depend on it.
        question_sets: The files to write; no two share a question or a gold.

    Raises:
        DataError: No databases, or one that cannot be read; or none of which a question can be made.
    """
    found = Databases(databases)
    if not found.names():
        raise DataError(f"no databases (at {databases}): give {WHAT_IS_READ}")
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(databases)  # nothing is there of a URL
    beside = folder.resolve().parent / BUNDLED.name
    every = templates(beside if beside.exists() else OWN)
    taken, n_questions = Taken(), 0
    with ExitStack() as stack:
        executor, opened = stack.enter_context(SQLExecutor()), list[Database]()
        translators: dict[str, Translator] = {}
        mirrors = cache_folder("test_suites") / "mirrors"
        for name in found.names():
            translator = Translator(executor, found.address(name), mirrors)
            is_inside = found.source(name) != folder  # else the JSON files are rows
            words = folder / (f"{name}.json" if is_inside else "no words")
            opened.append(replace(open_with_words(translator.path, name, words), native=translator.native))
            stack.callback(opened[-1].connection.close)
            translators[name] = translator
        splits = {database.split for database in opened}
        for question_set in (one for one in question_sets if one.databases in splits):
            examples = generate(opened, question_set, taken, seed=seed, every=every)
            if len(examples) < question_set.count:
                counts = (question_set.name, question_set.count, len(examples))
                _log.warning("%s: wanted %d questions, the databases gave %d different ones", *counts)
            n_questions += len(examples)
            if examples:
                path = out / f"{question_set.name}.jsonl"
                path.write_text(jsonl_text(map(_row, examples)), encoding="utf-8", newline="\n")
    for name, translator in translators.items():
        if count := translator.n_refused:
            _log.warning("%s: %d queries left out, which return something else than in SQLite", name, count)
    if not n_questions:
        raise DataError(
            f"no question can be made of {', '.join(found.names())}: are the tables empty? (at {databases})"
        )
    return n_questions


def generate(
    databases: Sequence[Database],
    question_set: QuestionSet,
    taken: Taken,
    *,
    seed: int = 0,
    every: Sequence[Template],
) -> list[Example]:
    """Examples of one set, shuffled; evenly over databases, and over templates by their weights.

    If one is exhausted, the others fill in.

    Args:
        databases: All databases; only those of the set's split are used.
        question_set: The set.
        taken: Questions and golds of other sets; grows by the returned ones.
        seed: Random seed.
        every: All templates.
    """
    used = [database for database in databases if database.split == question_set.databases]
    rng = random.Random(f"{seed}-{question_set.name}")
    drawn: list[tuple[Database, Template, Draft]] = []
    quota = -int(-question_set.count * question_set.lookup_share // 1)
    for is_lookup, total in ((True, quota), (False, question_set.count)):
        cells = [
            (database, template)
            for template in every
            for database in used
            if (template.family == "lookup") == is_lookup
            and template.is_held_out == question_set.is_held_out_templates
        ]
        streams = [
            (database, template, _accepted(database, template, question_set, taken, rng))
            for database, template in cells
        ]
        while streams and len(drawn) < total:
            rng.shuffle(streams)
            alive = []
            for database, template, stream in streams:
                drafts = list(islice(stream, min(template.weight, total - len(drawn))))
                drawn += [(database, template, draft) for draft in drafts]
                if drafts:
                    alive.append((database, template, stream))
            streams = alive
    rng.shuffle(drawn)
    return [
        _example(f"{question_set.name}-{number:05}", question_set.name, *parts)
        for number, parts in enumerate(drawn)
    ]


def _example(name: str, split: str, database: Database, template: Template, draft: Draft) -> Example:
    return Example(
        id=name,
        database=database.name,
        difficulty=template.difficulty,
        split=split,
        family=template.family,
        template=template.name,
        **asdict(draft),
    )


def _row(example: Example) -> dict[str, Any]:
    return {name: value for name, value in asdict(example).items() if value not in (None, False, ())}


def _accepted(
    database: Database, template: Template, question_set: QuestionSet, taken: Taken, rng: random.Random
) -> Iterator[Draft]:
    """Accepted drafts, until `MAX_FAILURES` draws in a row fail."""
    drafter = Drafter(database, template, side=question_set.side)
    is_good: dict[str, bool] = {}
    used: set[str] = set()
    failures = 0
    while drafter.sources and failures < MAX_FAILURES:
        failures += 1
        draft = drafter.draw(rng)
        if draft is None or draft.question in taken.questions:
            continue
        gold = draft.gold_sql
        if taken.golds.get(gold, question_set.name) != question_set.name:
            continue
        is_bare = template.is_plain and not template.slots
        if gold in used and (failures < MAX_FAILURES // 2 or is_bare):
            continue  # a second question with the same gold only if new golds are rare
        if stable_number("gold", gold) % 3 not in question_set.gold_thirds:
            continue
        if gold not in is_good:
            is_good[gold] = _is_good(database.connection, draft)
        if is_good[gold] and (native := _native(draft, database)):
            failures = 0
            used.add(gold)
            taken.questions.add(draft.question)
            taken.golds[gold] = question_set.name
            yield native


def _native(draft: Draft, database: Database) -> Draft | None:
    """Draft in the SQL of its database; None if one of its queries returns something else there."""
    names = ("gold_sql", "look_sql", "guess_sql", "check_sql")
    found: dict[str, Any] = {name: database.native(sql) for name in names if (sql := getattr(draft, name))}
    return None if None in found.values() else replace(draft, **found)


def _is_good(connection: sqlite3.Connection, draft: Draft) -> bool:
    """True for a gold with a plain answer: some rows, not many, no zero, no tie cut in two."""
    rows = _rows(connection, draft.gold_sql)
    if not rows or len(rows) > MAX_ROWS or rows in ([(None,)], [(0,)]):
        return False
    if all(cell is None for row in rows for cell in row):
        return False
    if ranked := _RANKED.fullmatch(draft.gold_sql):
        source, key, direction, limit = ranked.groups()
        taken = int(limit) + 1 if limit else -1
        query = f"SELECT {key} {source} ORDER BY {key}{direction or ''} LIMIT {taken}"
        keys = _rows(connection, query) or []
        if (None,) in keys or (limit and (len(keys) < taken or len(set(keys)) < taken)):
            return False
    return draft.guess_sql is None or Counter(_rows(connection, draft.guess_sql) or []) != Counter(rows)


def _rows(connection: sqlite3.Connection, sql: str) -> list[tuple[Any, ...]] | None:
    """Rows of a query; None if it takes more than `MAX_STEPS` steps."""
    connection.set_progress_handler(lambda: 1, MAX_STEPS)
    try:
        return connection.execute(sql).fetchall()
    except sqlite3.OperationalError as error:
        if "interrupted" in str(error):
            return None
        raise
    finally:
        connection.set_progress_handler(None, 0)
