import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from text2sql_grpo.errors import RunError
from text2sql_grpo.grading.official import OfficialVerdicts, measure_ves_reward, official_verdicts
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Limits

# Joins of large tables without an index: 22 pairs that take thirty times as long as the other 2,540.
SLOW_DATABASE = "baseball_1"
RUNS_SLOW = os.environ.get("TEXT2SQL_GRPO_ALL_VERDICTS") == "1"

WRONG = OfficialVerdicts(spider_exec=False, spider_exec_default=False, bird_ex=False, bird_f1=0.0)
EMPTY_GOLD = "SELECT a FROM t WHERE a > 9"
# By their names in the table of the module: predictions that run officially and return no rows.
DIFFERENCES = {
    "write": "UPDATE t SET a = 1",
    "empty_statement": "-- nothing",
    "transaction": "BEGIN",
    "pragma": "PRAGMA foreign_keys = ON",
    "attach": "ATTACH ':memory:' AS other",
}


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "d.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE t (a); INSERT INTO t VALUES (1), (1), (2);")
    return path


@pytest.fixture
def executor() -> Iterator[SQLExecutor]:
    with SQLExecutor() as executor:
        yield executor


def disagreements(shared_data: Path, empty: Path, *, is_slow: bool) -> tuple[int, list[object]]:
    """Pairs checked, and those whose recorded verdicts are others than ours."""
    lines = (shared_data / "evaluator_verdicts" / "verdicts.jsonl").read_text("utf-8").splitlines()
    pairs = [
        pair for line in lines if ((pair := json.loads(line))["db_path"].count(SLOW_DATABASE) > 0) is is_slow
    ]
    found: list[object] = []
    with SQLExecutor(Limits(timeout_s=60, max_rows=1_000_000, max_bytes=1_000_000_000)) as executor:
        for pair in sorted(pairs, key=lambda pair: str(pair["db_path"])):  # each file is opened once
            # Pairs of source `values` read no table.
            database = empty if pair["source"] == "values" else shared_data / pair["db_path"]
            ours = official_verdicts(executor, database, pair["gold"], pair["pred"])
            recorded = OfficialVerdicts(
                spider_exec=pair["spider_exec"],
                spider_exec_default=pair["spider_exec_default"],
                bird_ex=bool(pair["bird_ex"]),
                bird_f1=pytest.approx(pair["bird_f1"], abs=1e-12),
            )
            if ours != recorded:
                found.append((pair["kind"], pair["gold"], pair["pred"], ours, recorded))
    return len(pairs), found


def test_agrees_with_recorded_verdicts(shared_data: Path, database: Path) -> None:
    assert disagreements(shared_data, database, is_slow=False) == (2540, [])


@pytest.mark.skipif(
    not RUNS_SLOW, reason=f"half a minute on {SLOW_DATABASE}: TEXT2SQL_GRPO_ALL_VERDICTS=1 runs it"
)
def test_agrees_with_recorded_verdicts_of_slow_pairs(shared_data: Path, database: Path) -> None:
    assert disagreements(shared_data, database, is_slow=True) == (22, [])


def test_each_evaluator_runs_its_own_text(database: Path, executor: SQLExecutor) -> None:
    verdicts = official_verdicts(
        executor, database, "SELECT DISTINCT a FROM t", "SELECT a FROM t WHERE a > = 0; SELECT 1"
    )
    assert verdicts == OfficialVerdicts(
        spider_exec=False, spider_exec_default=True, bird_ex=False, bird_f1=0.0
    )
    verdicts = official_verdicts(executor, database, "SELECT count(DISTINCT a) FROM t", "SELECT 3")
    assert verdicts == OfficialVerdicts(
        spider_exec=False, spider_exec_default=True, bird_ex=False, bird_f1=0.0
    )


@pytest.mark.parametrize("name", DIFFERENCES)
def test_text_that_does_not_read_is_wrong_where_official_code_takes_it_for_an_empty_result(
    database: Path, executor: SQLExecutor, name: str
) -> None:
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:  # as the official code
        predicted = connection.execute(DIFFERENCES[name]).fetchall()
    assert set(predicted) == set()
    assert official_verdicts(executor, database, EMPTY_GOLD, "SELECT 1 WHERE 0").bird_ex
    assert official_verdicts(executor, database, EMPTY_GOLD, DIFFERENCES[name]) == WRONG


def test_results_over_the_limits_are_wrong(database: Path, executor: SQLExecutor) -> None:
    gold = "SELECT a FROM t"
    assert official_verdicts(executor, database, gold, gold).bird_f1 == 1
    assert official_verdicts(executor, database, gold, gold, limits=Limits(max_rows=2)) == WRONG


def test_bytes_that_are_not_utf8_must_be_equal(database: Path, executor: SQLExecutor) -> None:
    gold, other = "SELECT CAST(x'61ff' AS TEXT)", "SELECT 'a'"  # equal officially: the byte is dropped
    assert official_verdicts(executor, database, gold, other) == WRONG
    assert official_verdicts(executor, database, gold, gold).spider_exec


def test_ves_reward_runs_both_queries_in_turn(database: Path) -> None:
    slow = "SELECT count(*) FROM " + ", ".join(f"t t{i}" for i in range(8))  # 3 rows to the power of 8
    with SQLExecutor(cache_entries=0) as executor:
        assert measure_ves_reward(executor, database, slow, "SELECT 6561", repeats=5) == 1.25
        assert executor.queries == 2 + 2 * 5
        assert measure_ves_reward(executor, database, "SELECT 6561", slow, repeats=5) < 1


def test_a_wrong_prediction_earns_no_ves_and_is_not_timed(database: Path) -> None:
    with SQLExecutor(cache_entries=0) as executor:
        assert measure_ves_reward(executor, database, "SELECT 1", "SELECT 2") == 0
        assert executor.queries == 2


def test_remembered_results_are_not_timed(database: Path, executor: SQLExecutor) -> None:
    os.utime(database, (1e9, 1e9))  # results on a file that was just written are not remembered
    with pytest.raises(RunError, match=r"cannot time 'SELECT a FROM t.*cache_entries=0"):
        measure_ves_reward(executor, database, "SELECT a FROM t", "SELECT a FROM t WHERE 1", repeats=2)
