"""Votes on real databases, what confidence is worth, and the skills of gold queries."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.databases import sqlite_file
from text2sql_grpo.data.example import Example
from text2sql_grpo.evaluation.report import Report
from text2sql_grpo.evaluation.skills import skills
from text2sql_grpo.evaluation.votes import Vote, Votes, risk_coverage, vote, votes
from text2sql_grpo.grading import Grader
from text2sql_grpo.rewards import open_grader
from text2sql_grpo.sql import SQLExecutor


@pytest.fixture
def grader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Grader]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with SQLExecutor(workers=1) as executor:
        yield open_grader(executor, test_databases=4)


@pytest.fixture
def staff(tmp_path: Path) -> Path:
    script = "CREATE TABLE staff (id INTEGER PRIMARY KEY, city TEXT, age INTEGER);"
    rows = [(i, "Rome" if i % 2 else "Oslo", 20 + i) for i in range(1, 11)]
    return sqlite_file(tmp_path / "staff.sqlite", script, {"staff": rows})


def test_a_vote_is_by_result_and_counts_empty_results(staff: Path, grader: Grader) -> None:
    five = [
        "SELECT count(*) FROM staff WHERE city = 'Rome'",
        "SELECT 5",
        "SELECT sum(city = 'Rome') FROM staff",
    ]
    assert vote([None, "SELECT 4", *five, "SELECT no FROM staff"], [staff], grader) == Vote(2, 0.5)
    empty = ["SELECT id FROM staff WHERE age > 90", "SELECT id FROM staff WHERE city = 'Bonn'"]
    assert vote([five[0], *empty], [staff], grader) == Vote(1, pytest.approx(2 / 3))
    assert vote([None, "SELECT no FROM staff"], [staff], grader) == Vote(None, 0.0)
    assert vote(five * 2, [staff] * 7, grader) == Vote(0, 1.0)  # 7 floats of 1 / 7 sum to less


def test_test_databases_part_answers_that_agree_by_accident(staff: Path, grader: Grader) -> None:
    """All people of Rome have odd ids in this database alone, and a number holds nowhere else."""
    right = [
        "SELECT count(*) FROM staff WHERE city = 'Rome'",
        "SELECT count(*) FROM staff WHERE 'Rome' = city",
    ]
    wrong = ["SELECT count(*) FROM staff WHERE id % 2 = 1", "SELECT 5", "SELECT count(*) / 2 FROM staff"]
    found = votes([*wrong, *right], staff, grader)
    assert found.plain == Vote(0, 1.0)
    assert found.soft.place == 3
    assert 0.4 <= found.soft.share < 0.9


def test_the_threshold_is_that_of_the_vote_on_the_database() -> None:
    """The only right answer has all votes on the database, and half of them with test databases."""
    answers: Any = [
        SimpleNamespace(
            verdict=SimpleNamespace(strict=is_right),
            example=SimpleNamespace(database="staff"),
            episode=SimpleNamespace(completion_mask=[1]),
        )
        for is_right in (True, False, False, False)
    ]
    found = [Votes(Vote(0, 1.0), Vote(0, 0.5)), Votes(Vote(0, 0.5), Vote(1, 1.0))]
    assert Report(answers, 2, found).record()["sure_from"] == 1.0


def test_coverage_shares_ties_evenly_and_sees_an_order() -> None:
    right = [True, True, False, False]
    best = risk_coverage([0.9, 0.8, 0.2, 0.1], right)
    worst = risk_coverage([0.1, 0.2, 0.8, 0.9], right)
    blind = risk_coverage([0.5] * 4, right)
    assert best["accuracy_at"]["50"] == 1
    assert worst["accuracy_at"]["50"] == 0
    assert blind["accuracy_at"] == {"50": 0.5, "70": 0.5, "90": 0.5}
    assert (best["aurc"], blind["aurc"]) == (pytest.approx((1 / 3 + 1 / 2) / 4, abs=1e-6), 0.5)
    assert worst["aurc"] > blind["aurc"]
    assert best["calibration"] == [[1, 0.1, 0.0], [1, 0.2, 0.0], [2, 0.85, 1.0]]
    assert risk_coverage([], []) == {}
    generator = np.random.default_rng(0)
    confident = generator.random(20_000)
    calibrated = risk_coverage(list(confident), list(generator.random(20_000) < confident))
    assert calibrated["ece"] < 0.02


@pytest.mark.parametrize(
    ("sql", "found"),
    [
        ("SELECT a FROM t", ["plain"]),
        ("SELECT a FROM t JOIN u USING (a)", ["join"]),
        ("SELECT a FROM t WHERE b > (SELECT avg(b) FROM t)", ["nesting"]),
        ("WITH u AS (SELECT a FROM t) SELECT a FROM u", ["nesting"]),
        ("SELECT a FROM t WHERE a IN (SELECT a FROM u)", ["nesting"]),
        ("SELECT a, count(*) FROM t GROUP BY a", ["grouping"]),
        ("SELECT a FROM t EXCEPT SELECT a FROM u", ["set operation"]),
        ("SELECT row_number() OVER (ORDER BY a) FROM t", ["window"]),
        ("SELECT a FROM t ORDER BY a", ["order"]),
        ("SELECT strftime('%Y', d) FROM t", ["dates"]),
        ("SELECT a FROM t WHERE d >= '2024-01-01'", ["dates"]),
        ("SELECT a FROM t WHERE a LIKE 'x%'", ["string match"]),
        ("SELECT a FROM t WHERE a = 'LSB'", ["look-up"]),
        ("SELECT a FROM t WHERE a = 'lisbon'", ["plain"]),
        ("SELECT a FROM t WHERE a NOT IN ('LSB', 'PRT')", ["look-up"]),
        ("SELECT " + "DATE(" * 60 + "1" + ")" * 60, ["unread"]),
    ],
)
def test_skills(sql: str, found: list[str]) -> None:
    assert skills(Example("1", "d", "Who lives in Lisbon?", sql)) == found
