import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from text2sql_grpo.errors import DataError
from text2sql_grpo.grading import Grader, Verdict
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Limits

GOLDEN = Path(__file__).parents[1] / "golden" / "strict.jsonl"
CASES = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]


def make_database(path: Path, script: str) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script or "CREATE TABLE unused (a);")
    return path


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return make_database(tmp_path / "d.sqlite", "CREATE TABLE t (a); INSERT INTO t VALUES (1), (2);")


@pytest.fixture(scope="module")
def golden_databases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("golden")
    setups = sorted({case["setup"] for case in CASES})
    return {setup: make_database(folder / f"{i}.sqlite", setup) for i, setup in enumerate(setups)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_case(case: dict[str, str], golden_databases: dict[str, Path]) -> None:
    with SQLExecutor() as executor:
        verdict = Grader(executor).grade(golden_databases[case["setup"]], case["gold"], case["predicted"])
    assert verdict == Verdict(
        official=bool(case["official"]),
        strict=case["reason"] == "equal",
        reason=case["reason"],  # type: ignore[arg-type]
        executes=case["reason"] not in ("not_submitted", "query_failed", "gold_failed"),
    )


def test_gold_runs_once_for_many_predictions(database: Path) -> None:
    with SQLExecutor() as executor:
        grader = Grader(executor)
        verdicts = [grader.grade(database, "SELECT a FROM t", f"SELECT a FROM t LIMIT {i}") for i in range(4)]
        assert [verdict.strict for verdict in verdicts] == [False, False, True, True]
        assert executor.queries == 1 + 4


def test_same_gold_on_two_databases_is_not_confused(database: Path, tmp_path: Path) -> None:
    other = make_database(tmp_path / "other.sqlite", "CREATE TABLE t (a); INSERT INTO t VALUES (7);")
    with SQLExecutor() as executor:
        grader = Grader(executor)
        assert grader.grade(database, "SELECT max(a) FROM t", "SELECT 2").strict
        assert not grader.grade(other, "SELECT max(a) FROM t", "SELECT 2").strict


def test_least_recently_used_gold_is_dropped(database: Path) -> None:
    with SQLExecutor() as executor:
        grader = Grader(executor, max_cached_golds=2)
        for gold, queries in [
            ("SELECT 1", 1),
            ("SELECT 2", 2),
            ("SELECT 1", 2),  # now the most recently used
            ("SELECT 3", 3),  # drops SELECT 2
            ("SELECT 1", 3),
            ("SELECT 2", 4),
        ]:
            assert grader.grade(database, gold, None).reason == "not_submitted"
            assert executor.queries == queries


def test_failed_gold_is_asked_again(database: Path) -> None:
    with SQLExecutor() as executor:
        grader = Grader(executor)
        for queries in (1, 2):
            assert grader.grade(database, "SELECT b FROM t", "SELECT 1").reason == "gold_failed"
            assert executor.queries == queries


def test_limits_reach_the_executor(database: Path) -> None:
    with SQLExecutor() as executor:
        grader = Grader(executor, limits=Limits(max_rows=1))
        assert grader.grade(database, "SELECT max(a) FROM t", "SELECT a FROM t").reason == "truncated"
        assert grader.grade(database, "SELECT a FROM t", "SELECT a FROM t").reason == "gold_failed"


def test_missing_database_stops_the_run(tmp_path: Path) -> None:
    with SQLExecutor() as executor, pytest.raises(DataError, match=r"absent\.sqlite"):
        Grader(executor).grade(tmp_path / "absent.sqlite", "SELECT 1", "SELECT 1")
