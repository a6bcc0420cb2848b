import json
import random
import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from text2sql_grpo.errors import DataError
from text2sql_grpo.grading import Grader, Verdict, verdict
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
def test_golden_case(case: dict[str, str], golden_databases: dict[str, Path], executor: SQLExecutor) -> None:
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


def test_least_recently_used_gold_is_dropped(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "MAX_GOLD_BYTES", 20)  # two results of one number
    with SQLExecutor() as executor:
        grader = Grader(executor)
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
    with SQLExecutor(Limits(max_rows=1)) as executor:
        grader = Grader(executor)
        assert grader.grade(database, "SELECT max(a) FROM t", "SELECT a FROM t").reason == "truncated"
        assert grader.grade(database, "SELECT random()", "SELECT a FROM t").reason == "truncated"
        assert grader.grade(database, "SELECT random() FROM t", "SELECT a FROM t").reason == "gold_failed"


def test_missing_database_stops_the_run(tmp_path: Path) -> None:
    with SQLExecutor() as executor, pytest.raises(DataError, match=r"absent\.sqlite"):
        Grader(executor).grade(tmp_path / "absent.sqlite", "SELECT 1", "SELECT 1")


def test_widened_gold_runs_once_and_only_for_rows_that_are_not_the_golds(database: Path) -> None:
    gold = "SELECT a FROM t ORDER BY a > 9"
    with SQLExecutor() as executor:
        grader = Grader(executor)
        assert grader.grade(database, gold, gold).strict
        assert executor.queries == 2
        for _ in range(3):
            assert grader.grade(database, gold, "SELECT a FROM t ORDER BY a DESC").strict
        assert executor.queries == 2 + 1 + 3


def test_any_of_several_golds_is_accepted(database: Path) -> None:
    with SQLExecutor() as executor:
        grader = Grader(executor)

        def grade(predicted_sql: str, *other_golds: str) -> tuple[bool, bool, str]:
            verdict = grader.grade(database, "SELECT min(a) FROM t", predicted_sql, other_golds=other_golds)
            return verdict.official, verdict.strict, verdict.reason

        others = ("SELECT max(a) FROM t", "SELECT a FROM t ORDER BY a DESC")
        assert grade("SELECT 1", *others) == (True, True, "equal")
        assert grade("SELECT 2", *others) == (False, True, "equal")
        assert grade("SELECT a FROM t ORDER BY -a", *others) == (False, True, "equal")
        assert grade("SELECT a FROM t ORDER BY a", *others) == (False, False, "row_count")
        assert grade("SELECT 3", *others) == (False, False, "values")
        assert grade("SELECT 3", "SELECT b FROM t") == (False, False, "gold_failed")
        assert grade("SELECT 2", "SELECT b FROM t", *others) == (False, True, "equal")
        assert grade("SELECT 1", "SELECT b FROM t") == (True, True, "equal")


def test_accepted_queries_are_read_again_when_the_database_changes(
    tmp_path: Path, executor: SQLExecutor
) -> None:
    path = make_database(tmp_path / "shop.sqlite", "CREATE TABLE t (a); INSERT INTO t VALUES (1);")
    golds = ("SELECT 7", "SELECT count(*) FROM t")
    grader = Grader(executor)
    assert grader.grade(path, *golds, other_golds=golds[1:]).strict
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO t VALUES (2)")
    assert grader.grade(path, *golds, other_golds=golds[1:]).strict
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE t")
    assert grader.grade(path, golds[1], "SELECT 2").reason == "gold_failed"
    assert grader.changed_golds == {(path, golds[1])}


# The schema of `rewrites.jsonl`: pairs of queries that ask the same of any database of it.
SCHEMA = """
CREATE TABLE ward (id INTEGER PRIMARY KEY, title TEXT);
CREATE TABLE staff (id INTEGER PRIMARY KEY, name TEXT, ward_id INTEGER, pay REAL, age INTEGER);
"""
REWRITES = [json.loads(line) for line in (GOLDEN.parent / "rewrites.jsonl").read_text("utf-8").splitlines()]

small = st.one_of(st.none(), st.integers(0, 3))
staff_rows = st.lists(
    st.tuples(
        st.sampled_from(["Ann", "Bob", "Cid"]),
        small,
        st.one_of(st.none(), st.integers(0, 9).map(lambda tenths: tenths * 0.1)),
        small,
    ),
    min_size=1,
    max_size=8,
)


def write_staff(path: Path, staff: Sequence[tuple[object, ...]]) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("PRAGMA synchronous = OFF;" + SCHEMA)
        connection.executemany("INSERT INTO ward VALUES (?, ?)", [(0, "A"), (1, "B"), (2, "B")])
        connection.executemany("INSERT INTO staff (name, ward_id, pay, age) VALUES (?, ?, ?, ?)", staff)
        connection.commit()
    return path


@settings(max_examples=20)
@given(staff_rows)
def test_correct_rewrites_are_never_refused(executor: SQLExecutor, staff: list[tuple[object, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        database = write_staff(Path(folder) / "d.sqlite", staff)
        grader = Grader(executor)
        refused = [
            (pair, reason)
            for pair in REWRITES
            for predicted in pair.values()
            if (reason := grader.grade(database, pair["gold"], predicted).reason) != "equal"
        ]
    assert refused == []


@pytest.mark.thorough
@settings(max_examples=60)
@given(staff_rows.filter(lambda rows: len(rows) <= 5), st.integers(1, 4), st.integers(0, 2), st.randoms())
def test_exactly_the_results_that_some_order_of_tied_rows_gives_are_accepted(
    executor: SQLExecutor,
    staff: list[tuple[str, int | None, float | None, int | None]],
    limit: int,
    offset: int,
    rng: random.Random,
) -> None:
    def result(rows: Sequence[tuple[str, int | None, float | None, int | None]]) -> tuple[str, ...]:
        by_age = sorted(rows, key=lambda row: -1 if row[3] is None else row[3])
        return tuple(row[0] for row in by_age[offset : offset + limit])

    allowed = {result(order) for order in permutations(staff)}
    names = [row[0] for row in staff]
    tried = {*sorted(allowed)[:4], *(tuple(rng.choices(names, k=len(result(staff)))) for _ in range(4))} - {
        ()
    }
    gold = f"SELECT name FROM staff ORDER BY age LIMIT {limit} OFFSET {offset}"
    with tempfile.TemporaryDirectory() as folder:
        database = write_staff(Path(folder) / "d.sqlite", staff)
        grader = Grader(executor)
        for rows in tried:
            predicted = "VALUES " + ", ".join(f"('{name}')" for name in rows)
            assert grader.grade(database, gold, predicted).strict is (rows in allowed)


def test_gold_and_answer_are_read_from_one_version_of_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "shop.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE sale (amount INTEGER); INSERT INTO sale VALUES (1);")
    gold, answer = "SELECT sum(amount) FROM sale", "SELECT total(amount) FROM sale"
    with SQLExecutor() as executor:
        grader = Grader(executor)
        assert grader.grade(path, gold, answer).strict
        execute_many = SQLExecutor.execute_many

        def sell_before_the_answer(self: SQLExecutor, asked: Any, **options: Any) -> Any:
            if (path, answer) in asked and not grader.changed_golds:
                with closing(sqlite3.connect(path)) as connection, connection:
                    connection.execute("INSERT INTO sale VALUES (2)")
                monkeypatch.undo()
            return execute_many(self, asked, **options)

        monkeypatch.setattr(SQLExecutor, "execute_many", sell_before_the_answer)
        assert grader.grade(path, gold, answer).strict
        assert not grader.grade(path, gold, "SELECT 1").strict
        assert grader.changed_golds == {(path, gold)}
    assert caplog.messages == [f"The database changed: this gold query has another result now: {gold}"]
