"""The probe battery and mutants, under the default reward and under published ones."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.databases import make_shop
from text2sql_grpo.audit.probes import RIGHT, WRONG
from text2sql_grpo.audit.rewards import Answer, RewardAudit, rewrites
from text2sql_grpo.audit.rewards import misjudged as rate
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.grading import Grader
from text2sql_grpo.grading.suite import TestSuite
from text2sql_grpo.rewards import RewardMix
from text2sql_grpo.sql import SQLExecutor

GOLDS = (
    "SELECT name FROM person WHERE age > 40",
    "SELECT count(*) FROM city WHERE country = 'Italy'",
    "SELECT country, count(*) FROM city GROUP BY country",
    "SELECT label FROM empty WHERE id = 3",
)


@pytest.fixture(scope="module")
def grader(executor: SQLExecutor, tmp_path_factory: pytest.TempPathFactory) -> Grader:
    return Grader(executor, suite=TestSuite(executor, tmp_path_factory.mktemp("suites")))


def misjudged(answers: list[Answer]) -> list[str]:
    return [answer.name for answer in answers if answer.is_misjudged]


@pytest.mark.thorough
def test_the_default_pays_no_wrong_probe_and_refuses_no_right_one(
    executor: SQLExecutor, grader: Grader
) -> None:
    answers = RewardAudit(RewardMix({"preset": "strict"}), grader, executor).probes()

    assert misjudged(answers) == []
    asked = [(probe[0], probe in RIGHT) for probe in (*WRONG, *RIGHT)]
    assert [(answer.name, answer.is_right) for answer in answers] == asked
    wrong = [answer for answer in answers if not answer.is_right]
    assert {answer.share for answer in wrong} == {0.0, None}  # not a part of it either
    assert [answer.name for answer in wrong if answer.share is None] == ["a gold that fails"]


@pytest.mark.parametrize(
    ("settings", "paid", "not_paid"),
    [
        ({"preset": "skyrl"}, "a hard-coded number", "a column too many"),
        pytest.param(
            {"preset": "arctic"}, "nothing for an empty gold", "a row too many", marks=pytest.mark.thorough
        ),
        pytest.param({"preset": "qatch"}, "swapped columns", "a row too many", marks=pytest.mark.thorough),
        pytest.param(
            *({"preset": "skyrl", "on_error": "penalty"}, "a coincidence", "a gold that fails"),
            marks=pytest.mark.thorough,
        ),
        ({"execution": 1.0, "turn_cost": 0.5}, "", "a hard-coded number"),
    ],
)
def test_other_rewards_are_told_apart(
    executor: SQLExecutor, grader: Grader, settings: dict[str, Any], paid: str, not_paid: str
) -> None:
    wrong = [a for a in RewardAudit(RewardMix(settings), grader, executor).probes() if not a.is_right]
    names = misjudged(wrong)

    assert not_paid not in names
    assert paid in names if paid else names == []


def test_probes_beside_official_execution_accuracy(executor: SQLExecutor) -> None:
    answers = RewardAudit(RewardMix({"execution": 1.0}), Grader(executor), executor).probes()
    wrong = [answer for answer in answers if not answer.is_right]
    right = [answer for answer in answers if answer.is_right]

    assert rate(wrong).official == 11
    assert (rate(right).reward, rate(right).official) == (0, 3)
    # Without test databases a reward that judges the rows alone cannot know better on one database.
    assert set(misjudged(wrong)) == {
        "nothing for an empty gold",
        "a hard-coded number",
        "hard-coded rows by UNION",
        "hard-coded rows by VALUES",
        "hard-coded keys",
        "a coincidence",
    }


@pytest.mark.thorough
def test_mutants_of_own_questions(tmp_path: Path, executor: SQLExecutor, grader: Grader) -> None:
    make_shop(tmp_path / "shop.sqlite")
    databases = Databases(tmp_path)
    golds = [*GOLDS, "SELECT nope FROM city", "SELECT 3"]  # the last two give nothing
    examples = [Example(id=gold, database="shop", question="?", gold_sql=gold) for gold in golds]
    asked: list[None] = []

    def run(settings: dict[str, Any]) -> list[Answer]:
        audit = RewardAudit(RewardMix(settings), grader, executor)
        return audit.mutations(examples, databases, seed=1, on_gold=lambda: asked.append(None))

    strict, official = run({"execution": 1.0}), run({"preset": "skyrl"})

    assert len(asked) == 2 * len(golds)
    assert {answer.kind for answer in strict} == {"mutant", "hard-coded", "rewrite"}
    assert {answer.gold_sql for answer in strict} == set(GOLDS)
    assert [answer.sql for answer in strict] == [answer.sql for answer in official]
    assert misjudged(strict) == []
    assert len(misjudged(official)) >= len(GOLDS)
    assert {answer.share for answer in official if answer.kind == "hard-coded"} == {1.0}
    assert all(answer.is_official == answer.is_accepted for answer in official)


@pytest.mark.parametrize("end", ["", ";", " -- all of them", "; -- all;\n", " /* all */ ;"])
def test_rewrites_run_whatever_ends_the_gold(end: str) -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        for _, sql in rewrites(f"SELECT 3 AS a WHERE 2 < 3{end}"):
            assert connection.execute(sql).fetchall() == [(3,)]


@pytest.mark.thorough
def test_mutants_on_another_engine(tmp_path: Path, executor: SQLExecutor, grader: Grader) -> None:
    make_shop(tmp_path / "shop.sqlite")
    with duckdb.connect(str(tmp_path / "shop.duckdb")) as connection:
        with closing(sqlite3.connect(tmp_path / "shop.sqlite")) as source:
            for table in ("city", "person"):
                found = source.execute(f"SELECT * FROM {table}")
                names = ", ".join(name for name, *_ in found.description)
                rows = found.fetchall()
                connection.execute(f"CREATE TABLE {table} ({names.replace(',', ' VARCHAR,')} VARCHAR)")
                for row in rows:
                    connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
        connection.execute("ALTER TABLE person ALTER age TYPE INTEGER")
    # There LIKE without a wildcard is the gold's =, and no mutant of it.
    golds = ["SELECT count(*) FROM city WHERE country = 'Italy'", "SELECT name FROM person WHERE age > 40"]
    golds += ["SELECT name ILIKE '%a%' FROM city", "SELECT nope"]
    assert "age // 2" in dict(rewrites("SELECT age // 2 FROM person", "duckdb"))["formatted"]
    examples = [Example(id=gold, database="shop", question="?", gold_sql=gold) for gold in golds]
    audit = RewardAudit(RewardMix({"execution": 1.0}), grader, executor)
    answers = audit.mutations(examples, Databases({"shop": tmp_path / "shop.duckdb"}), seed=1)

    assert audit.left_out == 1
    assert {answer.kind for answer in answers} == {"mutant", "hard-coded", "rewrite"}
    assert {answer.gold_sql for answer in answers} == set(golds[:3])
    assert misjudged(answers) == []


@pytest.mark.thorough
def test_mutants_of_a_gold_on_a_computed_column(
    tmp_path: Path, executor: SQLExecutor, grader: Grader
) -> None:
    """DuckDB computes it; the mirror, in which mutants are chosen, holds its values."""
    with duckdb.connect(str(tmp_path / "shop.duckdb")) as connection:
        connection.execute("CREATE TABLE item (price INTEGER, quantity INTEGER, total AS (price * quantity))")
        connection.execute("INSERT INTO item (price, quantity) SELECT i, i % 5 FROM range(40) AS r(i)")
    gold = "SELECT count(*) FROM item WHERE total > 20"
    audit = RewardAudit(RewardMix({"execution": 1.0}), grader, executor)
    examples = [Example(id="", database="shop", question="?", gold_sql=gold)]
    answers = audit.mutations(examples, Databases({"shop": tmp_path / "shop.duckdb"}), seed=1)

    assert {answer.kind for answer in answers} == {"mutant", "hard-coded", "rewrite"}
    assert misjudged(answers) == []
