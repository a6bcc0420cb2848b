import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from text2sql_grpo.audit.questions import REASONS, QuestionAudit, audit_questions, counts, write_quarantine
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.loading import read_quarantine
from text2sql_grpo.data.question_files import Question, read_questions
from text2sql_grpo.environment.session import EnvironmentSettings, SQLEnvironment
from text2sql_grpo.errors import DataError
from text2sql_grpo.grading.neighbours import Neighbours
from text2sql_grpo.sql import Limits, SQLExecutor


@pytest.fixture
def databases(tmp_path: Path) -> Databases:
    (tmp_path / "databases").mkdir()
    with closing(sqlite3.connect(tmp_path / "databases" / "shop.sqlite")) as connection:
        connection.executescript(
            "CREATE TABLE t (a INTEGER, b TEXT);INSERT INTO t VALUES (1, 'x'), (2, 'x');"
        )
    return Databases(tmp_path / "databases")


@pytest.fixture
def executor() -> Iterator[SQLExecutor]:
    with SQLExecutor(Limits(max_rows=50)) as executor:
        yield executor


def ask(id: str, gold_sql: str = "SELECT a FROM t", question: str | None = None, **fields: Any) -> Question:
    fields = {"database": "shop", "question": question or f"{id}?", **fields}
    return Question(Example(id=id, gold_sql=gold_sql, **fields), f"questions:{id}", True)


def audit(databases: Databases, executor: SQLExecutor, *questions: Question, **options: Any) -> QuestionAudit:
    environment = SQLEnvironment(databases, executor, EnvironmentSettings())
    return audit_questions(questions, databases, executor, environment, **options)


def found(result: QuestionAudit) -> list[tuple[str, str, str]]:
    return [(finding.id, finding.reason, finding.detail) for finding in result.findings]


def test_golds_that_fail_or_find_nothing(databases: Databases, executor: SQLExecutor) -> None:
    result = audit(
        databases,
        executor,
        ask("fine"),
        ask("broken", "SELECT c FROM t"),
        ask("other", other_golds=("SELECT a FROM t", "DELETE FROM t")),
        ask("large", "SELECT 1 FROM t, t, t, t, t, t /* open"),
        ask("lost", database="gone"),
        ask("empty", "SELECT a FROM t WHERE a > 9"),
        ask("null", "SELECT max(a) FROM t WHERE a > 9"),
        ask("meant", "SELECT a FROM t WHERE a > 9", gold_is_empty=True),
        ask("tied", "SELECT a FROM t ORDER BY b LIMIT 1"),
    )

    assert found(result) == [
        ("broken", "error", "error: no such column: c"),
        ("other", "error", "denied: not allowed: DELETE; only queries that read the tables run"),
        ("large", "error", "cut after 50 rows"),
        ("lost", "error", f"unknown database 'gone' (in {databases.shown}); known: shop"),
        ("empty", "empty", "no rows"),
        ("null", "empty", "only NULLs"),
        ("tied", "tie_dependent", "the limit takes 1 of 2 rows that tie"),
    ]
    assert result.findings[0].place == "questions:broken"
    assert counts(result) == {"error": 4, "empty": 2, "tie_dependent": 1}
    assert [row["id"] for row in result.quarantine()] == ["broken", "other", "large", "lost", "empty", "null"]
    assert [row["id"] for row in result.quarantine(keep=["error", "empty"])] == ["tied"]


def test_golds_without_neighbours_are_reported_and_kept(
    tmp_path: Path, databases: Databases, executor: SQLExecutor
) -> None:
    neighbours = Neighbours(executor, tmp_path / "cache")
    result = audit(databases, executor, ask("fine"), ask("three", "SELECT 3"), neighbours=neighbours)

    assert found(result) == [("three", "uncovered", "it reads no table whose columns are known")]
    assert result.quarantine() == []


def test_copies_and_leaks(databases: Databases, executor: SQLExecutor) -> None:
    result = audit(
        databases,
        executor,
        ask("a", question="How many?"),
        ask("b", question=" how  MANY? "),
        ask("c", "SELECT b FROM t", question="How many?"),
        ask("d", "SELECT count(*) FROM t"),
        ask("e", "SELECT max(a) FROM t", split="dev"),
        ask("f", "SELECT  MAX(a) FROM t"),
        others={"test.jsonl": [ask("z", "SELECT COUNT(*) FROM t"), ask("y", "SELECT 1", database="other")]},
    )

    assert found(result) == [
        ("b", "duplicated", "asked as a, with the same gold"),
        ("c", "duplicated", "asked as a, with another gold"),
        ("d", "leaking", "gold also in test.jsonl"),
        ("e", "leaking", "gold also in split train"),
        ("f", "leaking", "gold also in split dev"),
    ]


def test_slow_golds_and_long_prompts(databases: Databases, executor: SQLExecutor) -> None:
    slow = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000) "
        "SELECT NULL FROM n WHERE i = 300000"
    )
    long = ask("long", question="why " * 400)

    result = audit(databases, executor, ask("slow", slow), long, slow_s=0.01, max_prompt_tokens=400)

    assert [(finding.id, finding.reason) for finding in result.findings] == [
        ("slow", "empty"),
        ("slow", "slow"),
        ("long", "too_long"),
    ]
    assert result.findings[2].detail.startswith("about 49")


def test_several_reasons_are_one_row_that_training_honours(
    tmp_path: Path, databases: Databases, executor: SQLExecutor
) -> None:
    result = audit(databases, executor, ask("a"), ask("b", "SELECT c FROM t", question="a?"))
    path = tmp_path / "new" / "quarantine.jsonl"

    write_quarantine(path, result.quarantine())

    assert [json.loads(line) for line in path.read_text("utf-8").splitlines()] == [
        {
            "id": "b",
            "reasons": ["error", "duplicated"],
            "details": ["error: no such column: c", "asked as a, with another gold"],
        }
    ]
    assert read_quarantine(path) == {"b"}


def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot write the quarantine"):
        write_quarantine(tmp_path / "file" / "quarantine.jsonl", [])


def test_every_reason_has_a_place_in_the_report(databases: Databases, executor: SQLExecutor) -> None:
    assert list(audit(databases, executor, ask("a")).ids_by_reason) == list(REASONS)


def test_part_of_spider_is_audited_fast(shared_data: Path, executor: SQLExecutor) -> None:
    """One in 80 of Spider's train questions; generous beside other work."""
    folder = shared_data / "spider"
    databases = Databases(folder / "database")
    questions = read_questions(folder / "train_spider.json")[::80]

    started = time.monotonic()
    with SQLExecutor(Limits(timeout_s=30)) as patient:
        result = audit(databases, patient, *questions, others={"dev": read_questions(folder / "dev.json")})

    assert time.monotonic() - started < 60
    assert counts(result)["leaking"] == 0
    assert counts(result)["empty"] > 0
