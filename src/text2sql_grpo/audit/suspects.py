"""Suspects: golds that most sampled answers contradict, on the database or on random variants of it."""

import logging
import math
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from textwrap import indent
from typing import Any

from sqlglot import exp

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.observation import ObservationLimits, observation_text
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.files import read_jsonl, write_jsonl, write_text
from text2sql_grpo.grading import Grader
from text2sql_grpo.grading.base_sample import quoted, read_sample
from text2sql_grpo.grading.gold_query import GoldQuery
from text2sql_grpo.grading.gold_result import GoldResult, have_one_result
from text2sql_grpo.grading.materialise import materialise
from text2sql_grpo.grading.perturb import draw_rows
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Cell
from text2sql_grpo.sql.query import literals, read_query
from text2sql_grpo.sql.schema import read_schema

MIN_SHARE = 0.7  # of a question's answers, in one class
MIN_ANSWERS = 4
N_VARIANTS = 12
MAX_TEXTS = 8  # distinct answers of a question that are compared, the most frequent ones
LARGEST_LITERAL = 10**12  # planted in a variant
SHOWN = ObservationLimits(max_rows=12)

_HOW_TO = """\
# Suspects

Most answers to each of these questions have one result, and the gold another. Decide by the small database:

- the gold is right: delete the question's line in `{name}`;
- the gold is wrong: leave it out of training by `data.quarantine: {name}`, or correct it;
- both are right: add the answer to the question's `other_golds`, and delete its line.
"""
Record = dict[str, Any]
logger = logging.getLogger(__name__)


def read_samples(path: Path) -> dict[str, list[Record]]:
    """Answers of each question by its id, without masked episodes.

    Args:
        path: JSONL of episodes (`rollouts.jsonl`, `collect`, `evaluate`), or of predictions: `id` and `sql`.

    Raises:
        DataError: The file cannot be read, or a line is wrong.
    """
    samples: dict[str, list[Record]] = {}
    for sample in read_jsonl(path, "answers with example and final_sql, or id and sql", convert=_slim):
        if not sample.get("is_masked"):
            samples.setdefault(sample["example"], []).append(sample)
    return samples


def _slim(row: Record) -> Record:
    if "example" not in row:
        return {"example": row["id"], "final_sql": row["sql"]}
    names = ("example", "database", "question", "gold_sql", "final_sql", "is_masked", "strict")
    return {name: row[name] for name in names}


def find_suspects(
    examples: Iterable[Example],
    samples: Mapping[str, Sequence[Record]],
    sessions: SQLEnvironment,
    grader: Grader,
    *,
    budget_s: float = math.inf,
) -> list[Record]:
    """Suspects among the golds of questions with at least `MIN_ANSWERS` answers.

    Answers are one class if their results agree on the database and on random variants of it. A class is no
    evidence if it finds nothing, as wrong guesses of a stored value do.

    Args:
        samples: Answers by the id of the question.
        sessions: Have their databases; questions on others than SQLite are left out, and what is hidden from
            the model is not shown.
        budget_s: Seconds after which further questions are left out, with a warning.

    Returns:
        Lines that `data.quarantine` can read: question, gold, most frequent answer of the class, its share,
        and both results on a small database, or on the database itself if they differ there alone.
    """
    started, found = time.monotonic(), []
    asked = [
        (example, address)
        for example in examples
        if len(samples.get(example.id, ())) >= MIN_ANSWERS
        and isinstance(address := sessions.databases.address(example.database), Path)
    ]
    with tempfile.TemporaryDirectory(prefix="text2sql-grpo-") as folder:
        sessions.executor.grant_folder(Path(folder))
        for number, (example, database) in enumerate(asked):
            if time.monotonic() - started > budget_s:
                logger.warning("looked for wrong golds in %d of %d questions only", number, len(asked))
                break
            place = Path(folder) / str(number)
            try:
                suspect = _suspect(example, samples[example.id], database, sessions, grader, place)
            except Exception as error:  # whatever a model writes: a finished run must not fail here
                logger.warning("question %s was not looked at, an internal error: %r", example.id, error)
                continue
            found += [suspect] if suspect else []
    return found


def write_suspects(path: Path, suspects: Sequence[Record]) -> None:
    """Write the suspects as JSONL, and next to it, with the suffix `.md`, as a page to decide by.

    Raises:
        RunError: A file cannot be written.
    """
    write_jsonl(path, suspects)
    pages = [_HOW_TO.format(name=path.name), *map(_page, suspects)]
    write_text(path.with_suffix(".md"), "\n".join(pages))


def _page(suspect: Record) -> str:
    share = f"{suspect['share']:.0%} of {suspect['answers']} answers"
    head = (
        f"## {suspect['id']} (database {suspect['database']})\n\n{suspect['question']}\n\n"
        f"{share} contradict the gold on the {suspect['on']}.\n"
    )
    parts = {"gold": suspect["gold_sql"], "most frequent answer": suspect["answer_sql"]}
    parts |= {f"table {name}": rows for name, rows in suspect["tables"].items()}
    parts |= {"the gold returns": suspect["gold_result"], "the answer returns": suspect["answer_result"]}
    return head + "".join(f"\n{title}:\n\n{indent(text, '    ')}\n" for title, text in parts.items())


def _suspect(
    example: Example,
    samples: Sequence[Record],
    database: Path,
    sessions: SQLEnvironment,
    grader: Grader,
    folder: Path,
) -> Record | None:
    golds = (example.gold_sql, *example.other_golds)
    right = {s["final_sql"] for s in samples if s.get("strict") and s["gold_sql"] == golds[0]} | set(golds)
    counts = Counter(sample["final_sql"] for sample in samples if sample["final_sql"])
    common = [sql for sql, _ in counts.most_common(MAX_TEXTS)]
    texts = [sql for sql in common if _finds_something(grader.gold_result(database, sql))]

    def differ(place: Path, one: str, other: str) -> bool:
        return _differ(grader.gold_result(place, one), grader.gold_result(place, other))

    def alike(sql: str, others: Sequence[str], places: Sequence[Path]) -> list[str]:
        return [other for other in others if not any(differ(place, sql, other) for place in places)]

    def share(sqls: Iterable[str]) -> float:
        return sum(counts[sql] for sql in sqls) / len(samples)

    answer = max(texts, key=lambda sql: share(alike(sql, texts, [database])), default=None)
    if answer is None or answer in right or share(alike(answer, texts, [database])) < MIN_SHARE:
        return None
    variants = _write_variants(database, texts, folder)
    places = [database, *variants]
    found = alike(answer, texts, places)
    if alike(answer, golds, places) or share(found) < MIN_SHARE or right & {*found}:
        return None
    small, tables = _small_database(database, variants, golds[0], answer, sessions.executor, grader)
    backend = sessions.guarded(example.database)
    columns = {
        table.name: ", ".join(quoted(column.name) for column in table.columns)
        for table in backend.hidden.schema.tables
        if table.name in tables and table.columns
    }
    run = replace(backend, database=small, limits=sessions.executor.limits).run
    shown = [golds[0], answer, *(f"SELECT {names} FROM {quoted(name)}" for name, names in columns.items())]
    gold_result, answer_result, *rows = (observation_text(run(sql), SHOWN) for sql in shown)
    return {
        "id": example.id,
        "reasons": ["suspect"],
        "database": example.database,
        "question": example.question,
        "gold_sql": golds[0],
        "answer_sql": answer,
        "share": round(share(found), 3),
        "answers": len(samples),
        "on": "database" if all(differ(database, gold, answer) for gold in golds) else "variants",
        "gold_result": gold_result,
        "answer_result": answer_result,
        "tables": dict(zip(columns, rows, strict=True)),
    }


def _small_database(
    database: Path, variants: Sequence[Path], gold: str, answer: str, executor: SQLExecutor, grader: Grader
) -> tuple[Path, list[str]]:
    """Variant on which gold and answer differ, without the rows that this does not need, and its tables.

    The database itself and no tables if they differ on no variant.
    """
    results = {place: [grader.gold_result(place, sql) for sql in (gold, answer)] for place in variants}
    differing = [place for place, (known, other) in results.items() if _differ(known, other)]
    if not differing:
        return database, []
    finding = [place for place in differing if _finds_something(results[place][1])]
    smallest = min(finding or differing, key=lambda path: path.stat().st_size)
    small = smallest.with_suffix(".small")
    small.write_bytes(smallest.read_bytes())
    tables = _named_tables((one.name for one in read_schema(small).tables), (gold, answer))
    with closing(sqlite3.connect(small)) as connection:
        for name in map(quoted, tables):
            with suppress(sqlite3.Error):  # a table without rowid stays whole
                for row in connection.execute(f"SELECT rowid FROM {name}").fetchall():
                    before = small.read_bytes()
                    connection.execute(f"DELETE FROM {name} WHERE rowid = ?", row)
                    connection.commit()
                    known, other = (GoldResult.of(executor, small, sql) for sql in (gold, answer))
                    if not (_finds_something(other) and _differ(known, other)):
                        small.write_bytes(before)
    return small, tables


def _differ(first: GoldResult, second: GoldResult) -> bool:
    return first.is_usable and second.is_usable and not have_one_result(first, second)


def _finds_something(result: GoldResult) -> bool:
    return result.is_usable and any(cell not in (None, 0) for row in result.outcome.rows for cell in row)


def _named_tables(names: Iterable[str], sqls: Iterable[str]) -> list[str]:
    """Tables that one of the queries names."""
    trees = [tree for tree in (read_query(sql).tree for sql in sqls) if tree is not None]
    read = {table.name.lower() for tree in trees for table in tree.find_all(exp.Table)}
    return [name for name in names if name.lower() in read]


def _write_variants(database: Path, answers: Sequence[str], folder: Path) -> list[Path]:
    """Write small databases with values of the answers, which are untrusted: none is run to make them."""
    base, planted = read_sample(database), dict[Cell, None]()
    for value in (value for answer in answers for value in literals(answer)):
        is_small = isinstance(value, int | float) and abs(value) < LARGEST_LITERAL
        if is_small or (isinstance(value, str) and value.isprintable()):  # no lone surrogates
            planted[value] = None
    tables = _named_tables(base.tables, answers)
    columns = [(name, column) for name in tables for column in base.tables[name].columns]
    seeds = GoldQuery(
        tree=exp.select("1"),
        columns_of={},
        tables=frozenset(tables),
        columns=frozenset(columns),
        literals=dict.fromkeys(columns, tuple(planted)),
        patterns=frozenset(text for text in planted if isinstance(text, str) and "%" in text),
    )
    folder.mkdir()
    paths = [folder / f"{number}.sqlite" for number in range(N_VARIANTS)]
    for number, path in enumerate(paths):
        materialise(base, draw_rows(base, seeds, Random(number)), path).close()
    return paths
