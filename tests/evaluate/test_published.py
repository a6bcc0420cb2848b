"""The official evaluators of Spider and BIRD."""

import json
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import cycle, permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.errors import RunError
from text2sql_grpo.evaluation.published import (
    PublishedVerdicts,
    bird_r_ves,
    bird_soft_f1,
    bird_time_ratio,
    bird_ves_reward,
    measure_ves_reward,
    published_verdicts,
    with_published,
)
from text2sql_grpo.evaluation.spider import spider_execution_accuracy, spider_order_matters, spider_text
from text2sql_grpo.evaluation.summary import summary
from text2sql_grpo.grading import Verdict
from text2sql_grpo.grading.strict import bird_execution_accuracy
from text2sql_grpo.rewards import Answer
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits, Row

# Joins of large tables without an index: 22 pairs that take thirty times as long as the other 2,540.
SLOW_DATABASE = "baseball_1"
RUNS_SLOW = os.environ.get("TEXT2SQL_GRPO_ALL_VERDICTS") == "1"

WRONG = PublishedVerdicts(spider_exec=False, spider_exec_default=False, bird_ex=False, bird_f1=0.0)
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
            ours = published_verdicts(executor, database, pair["gold"], pair["pred"])
            recorded = PublishedVerdicts(
                spider_exec=pair["spider_exec"],
                spider_exec_default=pair["spider_exec_default"],
                bird_ex=bool(pair["bird_ex"]),
                bird_f1=pytest.approx(pair["bird_f1"], abs=1e-12),
            )
            if ours != recorded:
                found.append((pair["kind"], pair["gold"], pair["pred"], ours, recorded))
    return len(pairs), found


@pytest.mark.thorough
def test_agrees_with_recorded_verdicts(shared_data: Path, database: Path) -> None:
    assert disagreements(shared_data, database, is_slow=False) == (2540, [])


@pytest.mark.skipif(
    not RUNS_SLOW, reason=f"half a minute on {SLOW_DATABASE}: TEXT2SQL_GRPO_ALL_VERDICTS=1 runs it"
)
def test_agrees_with_recorded_verdicts_of_slow_pairs(shared_data: Path, database: Path) -> None:
    assert disagreements(shared_data, database, is_slow=True) == (22, [])


def test_each_evaluator_runs_its_own_text(database: Path, executor: SQLExecutor) -> None:
    verdicts = published_verdicts(
        executor, database, "SELECT DISTINCT a FROM t", "SELECT a FROM t WHERE a > = 0; SELECT 1"
    )
    assert verdicts == PublishedVerdicts(
        spider_exec=False, spider_exec_default=True, bird_ex=False, bird_f1=0.0
    )
    verdicts = published_verdicts(executor, database, "SELECT count(DISTINCT a) FROM t", "SELECT 3")
    assert verdicts == PublishedVerdicts(
        spider_exec=False, spider_exec_default=True, bird_ex=False, bird_f1=0.0
    )


@pytest.mark.parametrize("name", DIFFERENCES)
def test_text_that_does_not_read_is_wrong_where_official_code_takes_it_for_an_empty_result(
    database: Path, executor: SQLExecutor, name: str
) -> None:
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:  # as the official code
        predicted = connection.execute(DIFFERENCES[name]).fetchall()
    assert set(predicted) == set()
    assert published_verdicts(executor, database, EMPTY_GOLD, "SELECT 1 WHERE 0").bird_ex
    assert published_verdicts(executor, database, EMPTY_GOLD, DIFFERENCES[name]) == WRONG


def test_published_metrics_are_added_to_a_submitted_answer(database: Path, executor: SQLExecutor) -> None:
    example = Example(id="a", database="t", question="?", gold_sql="SELECT a FROM t")
    verdict = Verdict(official=True, strict=True, reason="equal", executes=True)
    submitted = Answer(Episode(example, final_sql="SELECT a FROM t"), verdict)
    found = with_published(submitted, executor, database).published
    assert found == {"spider_exec": 1.0, "spider_exec_default": 1.0, "bird_ex": 1.0, "bird_f1": 1.0}
    assert summary([replace(submitted, published=found), submitted])["published"]["bird_f1"] == 0.5
    assert not any(with_published(Answer(Episode(example), verdict), executor, database).published.values())


def test_texts_are_rewritten_in_linear_time() -> None:
    start = time.process_time()
    for text in ("/* ", "/*", "'\"", "[a", "\\'"):
        text *= 100_000 // len(text)
        assert spider_text(text, keep_distinct=False) == text
    assert time.process_time() - start < 2  # 29 s for the first one alone, once


def test_results_over_the_limits_are_wrong(database: Path, executor: SQLExecutor) -> None:
    gold = "SELECT a FROM t"
    assert published_verdicts(executor, database, gold, gold).bird_f1 == 1
    with SQLExecutor(Limits(max_rows=2)) as narrow:
        assert published_verdicts(narrow, database, gold, gold) == WRONG


def test_bytes_that_are_not_utf8_must_be_equal(database: Path, executor: SQLExecutor) -> None:
    gold, other = "SELECT CAST(x'61ff' AS TEXT)", "SELECT 'a'"  # equal officially: the byte is dropped
    assert published_verdicts(executor, database, gold, other) == WRONG
    assert published_verdicts(executor, database, gold, gold).spider_exec


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


def ok(*rows: Row, is_truncated: bool = False) -> ExecutionOutcome:
    columns = tuple(f"c{i}" for i in range(len(rows[0]))) if rows else ("c0",)
    return ExecutionOutcome("ok", columns, rows, is_truncated)


@pytest.mark.parametrize(
    ("gold", "predicted", "as_bags", "as_lists"),
    [
        (ok((1,), (2,)), ok((2,), (1,)), True, False),
        (ok((1,), (1,)), ok((1,)), False, False),
        (ok((1,), (1,), (2,)), ok((1,), (2,), (2,)), False, False),
        (ok((1, "a")), ok(("a", 1)), True, True),
        (ok((1, 2), (2, 1)), ok((2, 1), (1, 2)), True, True),  # by swapping columns
        (ok((1, 2), (3, 4)), ok((1, 2), (4, 3)), False, False),  # cells swapped in one row
        (ok((1, 2, 3, 4), (5, 6, 7, 8)), ok((4, 3, 2, 1), (8, 7, 6, 5)), True, True),
        (ok((1, 2)), ok((1,)), False, False),
        (ok(), ExecutionOutcome("ok", ("a", "b")), True, True),
        (ok((1,)), ok(("1",)), False, False),
        (ok((1,)), ok((1.0,)), True, True),
        (ok((1, 1.5)), ok((1.0, 1.5)), False, False),  # sorted by text and type they fall apart
        (ok((None,)), ok((None,)), True, True),
        (ok((0.3,)), ok((0.1 + 0.2,)), False, False),
        (ok((1,)), ok((1,), is_truncated=True), False, False),
        (ok((1,), is_truncated=True), ok((1,)), False, False),
        (ok(), ExecutionOutcome("error", error="no such column"), False, False),
        (ExecutionOutcome("timeout"), ExecutionOutcome("timeout"), False, False),
    ],
)
def test_comparison(
    gold: ExecutionOutcome, predicted: ExecutionOutcome, as_bags: bool, as_lists: bool
) -> None:
    assert spider_execution_accuracy(gold, predicted, order_matters=False) is as_bags
    assert spider_execution_accuracy(gold, predicted, order_matters=True) is as_lists


small_tables = st.tuples(st.integers(1, 4), st.integers(1, 3)).flatmap(
    lambda shape: st.tuples(
        *[
            st.lists(st.tuples(*[st.integers(0, 1)] * shape[0]), min_size=shape[1], max_size=shape[1])
            for _ in range(2)
        ]
    )
)


@given(small_tables, st.booleans())
def test_column_search_agrees_with_trying_every_order(
    pair: tuple[list[Row], list[Row]], order_matters: bool
) -> None:
    gold, predicted = pair

    def equal(rows: list[Row]) -> bool:
        return rows == gold if order_matters else Counter(rows) == Counter(gold)

    expected = any(
        equal([tuple(row[i] for i in order) for row in predicted])
        for order in permutations(range(len(gold[0])))
    )
    assert spider_execution_accuracy(ok(*gold), ok(*predicted), order_matters=order_matters) is expected


def test_many_identical_columns_do_not_multiply_the_orders_tried() -> None:
    gold, predicted = ok((0,) * 20, (1,) * 20), ok((0,) * 20, (1,) * 20)
    assert spider_execution_accuracy(gold, predicted, order_matters=True)
    last = (0,) * 19
    gold, predicted = ok((*last, 1), (*last, 2)), ok((*last, 2), (*last, 1))
    assert spider_execution_accuracy(gold, predicted, order_matters=False)
    assert not spider_execution_accuracy(gold, predicted, order_matters=True)


@pytest.mark.parametrize(
    ("sql", "kept", "default"),
    [
        ("SELECT DISTINCT a FROM t", "SELECT DISTINCT a FROM t", "SELECT  a FROM t"),
        ("select Count(distinct a)", "select Count(distinct a)", "select Count( a)"),
        ("SELECT 'distinct', \"distinct\", `distinct`, [distinct]",) * 3,
        ("SELECT 'it''s distinct', distinct_id -- distinct\n/* distinct */",) * 3,
        ("SELECT t.distinct FROM t", "SELECT t.distinct FROM t", "SELECT t. FROM t"),
        ("SELECT 'open distinct", "SELECT 'open distinct", "SELECT 'open "),
        ("SELECT a WHERE a > = 1 AND b < = 2 AND c ! = 3",)
        + ("SELECT a WHERE a >= 1 AND b <= 2 AND c != 3",) * 2,
        ("SELECT '> ='",) + ("SELECT '>='",) * 2,
        ("SELECT 1; SELECT DISTINCT 2", "SELECT 1; SELECT DISTINCT 2", "SELECT 1;"),
        ("SELECT ';'; SELECT 2", "SELECT ';'; SELECT 2", "SELECT ';';"),
        ("SELECT (1; 2); 3", "SELECT (1; 2); 3", "SELECT (1; 2);"),
        ("SELECT YEAR ( CURDATE() ) - 1",) + ("SELECT 2020- 1",) * 2,
        ("",) * 3,
    ],
)
def test_text_that_is_run(sql: str, kept: str, default: str) -> None:
    assert spider_text(sql, keep_distinct=True) == kept
    assert spider_text(sql, keep_distinct=False).rstrip() == default.rstrip()


def test_order_matters_where_the_words_stand() -> None:
    assert spider_order_matters("SELECT a FROM t Order By a")
    assert spider_order_matters("SELECT * FROM (SELECT a FROM t ORDER BY a)")
    assert spider_order_matters("SELECT 'order by'")
    assert not spider_order_matters("SELECT a FROM t ORDER  BY a")


@pytest.mark.parametrize(
    ("gold", "predicted", "accuracy", "f1"),
    [
        (ok((1,), (2,)), ok((2,), (1,)), True, 0.0),
        (ok((1,), (1,)), ok((1,)), True, 1.0),
        (ok((1, "a")), ok(("a", 1)), False, 1.0),
        (ok((1,)), ok((1.0,)), True, 1.0),
        (ok((1,)), ok(("1",)), False, 0.0),
        (ok((None,)), ok((None,)), True, 1.0),
        (ok((0.3,)), ok((0.1 + 0.2,)), False, 0.0),
        (ok(), ExecutionOutcome("ok", ("a", "b")), True, 1.0),
        (ok((1,)), ok(), False, 0.0),
        (ok((1, 2)), ok((1, 3)), False, 0.5),
        (ok((1, 2)), ok((1,)), False, 2 / 3),  # precision 1, recall 1/2
        (ok((1, 2)), ok((1, 1, 1)), False, 0.75 / 0.875),  # a repeated cell counts each time: recall 3/4
        (ok((1,), (2,)), ok((1,)), False, 2 / 3),
        (ok((1,)), ok((1,), (2,)), False, 2 / 3),
        (ok((1,)), ok((1,), is_truncated=True), False, 0.0),
        (ok((1,), is_truncated=True), ok((1,)), False, 0.0),
        (ok(), ExecutionOutcome("error", error="no such column"), False, 0.0),
        (ExecutionOutcome("timeout"), ExecutionOutcome("timeout"), False, 0.0),
    ],
)
def test_execution_accuracy_and_soft_f1(
    gold: ExecutionOutcome, predicted: ExecutionOutcome, accuracy: bool, f1: float
) -> None:
    assert bird_execution_accuracy(gold, predicted) is accuracy
    assert bird_soft_f1(gold, predicted) == pytest.approx(f1, abs=1e-12)


def test_times_alternate_prediction_first() -> None:
    calls = []

    def time(name: str, seconds: float) -> float:
        calls.append(name)
        return seconds

    ratio = bird_time_ratio(lambda: time("gold", 3.0), lambda: time("predicted", 2.0), repeats=3)
    assert ratio == pytest.approx(1.5)
    assert calls == ["predicted", "gold"] * 3


def test_time_ratios_far_from_the_mean_are_dropped() -> None:
    times: Iterator[float] = cycle([1.0, 1.1] * 49 + [1.05, 1000.0])
    assert bird_time_ratio(lambda: next(times), lambda: 1.0) == pytest.approx(1.05, abs=1e-3)
    times = cycle([1.0, 3.0])  # within three deviations: kept
    assert bird_time_ratio(lambda: next(times), lambda: 1.0) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("ratio", "reward"),
    [
        (9, 1.25),
        (2, 1.25),
        (1.99, 1),
        (1, 1),
        (0.99, 0.75),
        (0.5, 0.75),
        (0.49, 0.5),
        (0.25, 0.5),
        (0.24, 0.25),
    ],
)
def test_ves_reward_at_its_thresholds(ratio: float, reward: float) -> None:
    assert bird_ves_reward(ratio) == reward


def test_r_ves_is_the_mean_square_root_in_percent() -> None:
    assert bird_r_ves([1.0, 0.0]) == 50.0
    assert bird_r_ves([1.25]) == pytest.approx(111.803, abs=1e-3)
