"""Review of questions: which are drawn, what is shown next to each, and the check of an edited one."""

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path

from sqlglot import exp

from text2sql_grpo.audit.mutations import mutants
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.question_rows import Question
from text2sql_grpo.environment.observation import cell_text
from text2sql_grpo.errors import DataError
from text2sql_grpo.grading.gold_query import read_gold
from text2sql_grpo.grading.gold_result import GoldResult
from text2sql_grpo.grading.strict import find_nothing
from text2sql_grpo.grading.suite import TestSuite
from text2sql_grpo.reporting.shown import formatted
from text2sql_grpo.serving.verdicts import (
    VERDICTS,
    Record,
    check_same_questions,
    read_verdicts,
    save_verdict,
    verdict_of,
)
from text2sql_grpo.sql.address import Database, parse_address
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits
from text2sql_grpo.sql.query import read_query
from text2sql_grpo.sql.schema import Schema, read_schema

ROWS_SHOWN, CELL_CHARS = 20, 200
MAX_NEAR = 24  # near wrong queries that are tried on the test databases
MAX_COMPARED = 8  # of these, on the database itself
NEAR_LIMITS = Limits(timeout_s=1.0)
MAX_PHRASINGS = 20

_TABLE = re.compile(r"\b(?:FROM|JOIN)\s+([\"`\[][^\"`\]]+[\"`\]]|[\w.$]+)", re.I)


def drawn(questions: Sequence[Question], count: int, *, seed: int = 0) -> list[Question]:
    """Draw questions evenly over templates, and within a template over tables; a larger count adds to them.

    A question without a template counts by its family.
    """
    shuffled = random.Random(seed).sample(questions, len(questions))
    pools: dict[str, list[tuple[Question, frozenset[str]]]] = {}
    for question in shuffled:
        example = question.example
        tables = frozenset(name.strip('"`[]').lower() for name in _TABLE.findall(example.gold_sql))
        pools.setdefault(example.template or example.family, []).append((question, tables))
    chosen, shown = list[Question](), Counter[str]()
    while len(chosen) < min(count, len(questions)):
        for pool in filter(None, pools.values()):
            best = min(pool, key=lambda one: max((shown[name] for name in one[1]), default=0))
            pool.remove(best)
            chosen.append(best[0])
            shown.update(best[1])
    return chosen[:count]


class InvalidVerdictError(DataError):
    """A verdict that a person can correct: a query that fails, or an empty question."""


class Review:
    """Questions under review, their evidence and verdicts; safe to use from several threads.

    Attributes:
        folder: Folder of the file of verdicts.
        by: Name of the person.
    """

    def __init__(
        self,
        folder: Path,
        questions: Sequence[Question],
        databases: Databases,
        executor: SQLExecutor,
        suite: TestSuite | None,
        *,
        by: str,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Check that the databases can be read, and that the verdicts so far are on these questions.

        Raises:
            DataError: They cannot, or are not.
        """
        self.folder, self.by = folder, by
        self._questions = {question.example.id: question.example for question in questions}
        self._databases, self._executor, self._suite, self._now = databases, executor, suite, now
        check_same_questions(read_verdicts(folder), questions, folder)
        for name in {example.database for example in self._questions.values()}:
            outcome = executor.execute(databases.address(name), "SELECT 1")
            if not outcome.is_ok:
                raise DataError(f"cannot read the database {name}: {outcome.error}")

    def state(self) -> Record:
        """Ids of the questions with their verdicts so far, and the name of the person."""
        verdicts = read_verdicts(self.folder)
        shown = [{"id": id, "verdict": verdicts.get(id, {}).get("verdict")} for id in self._questions]
        return {"by": self.by, "file": str(self.folder), "questions": shown}

    def shown(self, id: str) -> Record:
        """One question with its SQL and rows, as the verdict so far has them."""
        example, verdict = self._example(id), read_verdicts(self.folder).get(id)
        made = verdict or {"question": example.question, "sql": example.gold_sql}
        database = self._databases.address(example.database)
        return {
            "id": id,
            "question": made["question"],
            "sql": formatted(made["sql"]),
            "verdict": verdict,
            "database": example.database,
            "template": example.template or example.family,
            "result": _table(self._executor.execute(database, made["sql"])),
        }

    def evidence(self, id: str) -> Record:
        """Number of test databases of a query, their gap, and a near wrong query that they refute."""
        example, verdict = self._example(id), read_verdicts(self.folder).get(id)
        sql = verdict["sql"] if verdict else example.gold_sql
        database = self._databases.address(example.database)
        if self._suite is None:
            return {"databases": 0, "gap": "test databases are turned off", "near": None}
        suite = self._suite.databases(database, sql)
        near = near_miss(self._executor, database, sql, suite.databases) if suite.databases else None
        return {"databases": len(suite.databases), "gap": suite.gap, "near": near}

    def save(self, asked: Record) -> Record:
        """Check and save the verdict that a page sends, and return the state.

        Args:
            asked: `id` and `verdict`; `question` and `sql` as they are shown or edited, which `wrong` and
                `skip` do not need; `phrasings` and `as_example`.

        Raises:
            InvalidVerdictError: A field is wrong, or an edited query fails, writes or cannot be compared.
        """
        verdict, phrasings = asked.get("verdict"), asked.get("phrasings", [])
        as_example, id = asked.get("as_example", False), asked.get("id")
        if verdict not in VERDICTS or not isinstance(as_example, bool) or not isinstance(id, str):
            raise InvalidVerdictError(f"a verdict must be of {', '.join(VERDICTS)}, got {verdict!r}")
        are_texts = isinstance(phrasings, list) and all(isinstance(text, str) for text in phrasings)
        if not are_texts or len(phrasings) > MAX_PHRASINGS:
            raise InvalidVerdictError(f"phrasings must be at most {MAX_PHRASINGS} texts")
        example = self._example(id)
        question, sql = example.question, example.gold_sql
        if verdict in ("right", "edit"):
            question, sql = self._edited(asked, example)
            verdict = "right" if (question, sql) == (example.question, example.gold_sql) else "edit"
        fields = {
            "verdict": verdict,
            "verified_by": self.by,
            "verified_at": int(self._now()),
            "use_as_onboarding_question": as_example and verdict in ("right", "edit"),
            "phrasings": [text for text in map(str.strip, phrasings) if text],
        }
        save_verdict(self.folder, verdict_of(example, question, sql, fields))
        return self.state()

    def _edited(self, asked: Record, before: Example) -> tuple[str, str]:
        """Question and SQL of an edit, checked."""
        question, sql = (str(asked.get(name) or "").strip() for name in ("question", "sql"))
        if not question or not sql:
            raise InvalidVerdictError("the question and the query must not be empty")
        if question == before.question.strip():  # as it was shown
            question = before.question
        if sql == formatted(before.gold_sql):
            return question, before.gold_sql
        gold = GoldResult.of(self._executor, self._databases.address(before.database), sql)
        if not gold.outcome.is_ok:
            raise InvalidVerdictError(f"the query fails, so nothing was saved: {gold.outcome.error}")
        if not gold.is_usable:
            raise InvalidVerdictError("the query returns too many rows to compare, so nothing was saved")
        return question, sql

    def _example(self, id: str) -> Example:
        if id not in self._questions:
            raise InvalidVerdictError(f"no question with the id {id!r} is under review")
        return self._questions[id]


def near_miss(
    executor: SQLExecutor, database: Database, sql: str, test_databases: Sequence[Database]
) -> Record | None:
    """Query with one small mistake that a test database tells from the given one; None if none was found.

    One with the same rows on the database itself is preferred: only test databases refute it.
    """
    schema, dialect = read_schema(database), parse_address(database).dialect
    gold = read_gold(sql, schema, dialect=dialect)
    if gold is None:
        return None
    by_kind: dict[str, list[str]] = {}
    for text, kind in mutants(gold, schema).items():
        by_kind.setdefault(kind, []).append(text)
    texts = [text for text in chain.from_iterable(zip_longest(*by_kind.values())) if text][:MAX_NEAR]
    texts = [_native(text, schema, dialect) for text in texts]
    refuted: dict[str, tuple[ExecutionOutcome, ExecutionOutcome]] = {}
    for place in test_databases:
        right = GoldResult.of(executor, place, sql, limits=NEAR_LIMITS)
        outcomes = executor.execute_many([(place, text) for text in texts], limits=NEAR_LIMITS)
        for text, outcome in zip(texts, outcomes, strict=True):
            if text not in refuted and _differs(right, outcome, text):
                refuted[text] = right.outcome, outcome
    asked = list(islice(refuted, MAX_COMPARED))
    if not asked:
        return None
    here = GoldResult.of(executor, database, sql)
    outcomes = executor.execute_many([(database, text) for text in asked], limits=NEAR_LIMITS)
    same = [
        text for text, one in zip(asked, outcomes, strict=True) if one.is_ok and not _differs(here, one, text)
    ]
    text = min(same or asked, key=len)
    right_rows, rows = map(_table, refuted[text])
    return {"sql": formatted(text), "is_same_here": bool(same), "right": right_rows, "result": rows}


def _native(sql: str, schema: Schema, dialect: str) -> str:
    """Mutant in the engine's SQL, with names as the schema writes them, which a mutant has in lower case."""
    names = [name for table in schema.tables for name in (table.name, *(one.name for one in table.columns))]
    written, tree = {name.lower(): name for name in names}, read_query(sql).tree
    if tree is None:
        return sql
    for one in tree.find_all(exp.Identifier):
        one.set("this", written.get(one.name.lower(), one.name))
        one.set("quoted", one.quoted or (dialect == "postgres" and one.name != one.name.lower()))
    return tree.sql(dialect)


def _differs(right: GoldResult, outcome: ExecutionOutcome, sql: str) -> bool:
    if not right.is_usable or not outcome.is_ok or find_nothing(right.outcome, outcome):
        return False
    return not right.accepts(outcome, sql)


def _table(outcome: ExecutionOutcome) -> Record:
    """Result as a page shows it: cells as text, at most `ROWS_SHOWN` rows."""
    rows = [[cell_text(cell, CELL_CHARS) for cell in row] for row in outcome.rows[:ROWS_SHOWN]]
    total = f"more than {len(outcome.rows)}" if outcome.is_truncated else str(len(outcome.rows))
    columns = [cell_text(name, CELL_CHARS) for name in outcome.columns]
    return {"error": outcome.error, "columns": columns, "rows": rows, "total": total}
