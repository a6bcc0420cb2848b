"""Wrong answers that one database does not show, and right ones that look wrong on odd rows."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.grading_classes import Case, chosen, graded, made
from tests.postgres_server import PostgresServer
from text2sql_grpo.grading.suite import TestSuite
from text2sql_grpo.grading.verdict import Grader
from text2sql_grpo.sql.executor import SQLExecutor

PER_CLASS = {"sqlite": 2}  # cases of each class and side, 1 elsewhere; the benchmark runs them all


def some(engine: str) -> Iterator[Case]:
    """The first cases of each class and side."""
    seen: dict[tuple[str, bool], int] = {}
    for case in chosen(engine):
        seen[case.kind, case.is_right] = seen.get((case.kind, case.is_right), 0) + 1
        is_slow = case.kind == "fixed depth" and case.is_right
        if seen[case.kind, case.is_right] <= (1 if is_slow else PER_CLASS.get(engine, 1)):
            yield case


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["sqlite", "duckdb", "postgresql"])
def test_each_class_of_mistakes_is_refused_and_its_right_answers_are_paid(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = ""
    if engine == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        url = server.admin_url()
    outcomes = list(graded(engine, some(engine), tmp_path, url))
    assert len(outcomes) >= 20
    misjudged = [one.case for one in outcomes if one.agrees and one.is_paid != one.case.is_right]
    assert not misjudged
    assert all(one.agrees for one in outcomes)


def test_the_record_of_a_suite_names_the_texts_that_were_taken_as_unique(
    tmp_path: Path, executor: SQLExecutor
) -> None:
    database = made("sqlite", "heroes", tmp_path)
    suite = TestSuite(executor, tmp_path / "cache")
    gold = "SELECT h.name FROM hero h JOIN colour c ON h.eye = c.id WHERE c.colour = 'Blue'"
    found = suite.databases(database, gold)
    records = [path.read_text() for path in (tmp_path / "cache").rglob("record.json")]
    assert ['"assumed_unique": ["colour.colour"]' in record for record in records] == [True]
    for path in found.databases:
        with closing(sqlite3.connect(path)) as connection:
            repeated = "SELECT count(*) - count(DISTINCT colour) FROM colour"
            assert connection.execute(repeated).fetchone() == (0,)


def test_three_different_names_prove_no_uniqueness(tmp_path: Path, executor: SQLExecutor) -> None:
    path = tmp_path / "small.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE kind (id INTEGER PRIMARY KEY, kind TEXT)")
        connection.execute("CREATE TABLE pet (name TEXT, kind INTEGER REFERENCES kind (id))")
        connection.executemany("INSERT INTO kind VALUES (?, ?)", enumerate(("cat", "dog", "owl")))
        connection.executemany("INSERT INTO pet VALUES (?, ?)", [(f"pet {n}", n % 3) for n in range(30)])
    grader = Grader(executor, suite=TestSuite(executor, tmp_path / "cache"))
    gold = "SELECT count(*) FROM pet AS p JOIN kind AS k ON p.kind = k.id WHERE k.kind = 'dog'"
    answer = "SELECT count(*) FROM pet WHERE kind = (SELECT id FROM kind WHERE kind = 'dog')"
    assert not grader.grade(path, gold, answer).strict


@pytest.mark.parametrize("blob", [None, b"\x01\x02"])
def test_strict_tables_with_blobs_have_test_databases(
    tmp_path: Path, executor: SQLExecutor, blob: bytes | None
) -> None:
    path = tmp_path / "files.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE file (id INTEGER PRIMARY KEY, data BLOB, hash BLOB UNIQUE) STRICT")
        rows = [(n, blob and bytes([n]) + blob, bytes([n])) for n in range(20)]
        connection.executemany("INSERT INTO file VALUES (?, ?, ?)", rows)
    suite = TestSuite(executor, tmp_path / "cache")
    found = suite.databases(path, "SELECT hash, data FROM file WHERE length(hash) > 0 AND id > 3")
    assert (found.gap, len(found.databases)) == ("", 4)


def test_nulls_that_are_only_declared_are_tried_if_asked_for(tmp_path: Path, executor: SQLExecutor) -> None:
    database = made("sqlite", "shop", tmp_path)
    gold, answer = "SELECT count(*) FROM product", "SELECT count(price) FROM product"
    for declared_nulls in (False, True):
        suite = TestSuite(executor, tmp_path / "cache", declared_nulls=declared_nulls)
        grader = Grader(executor, suite=suite)
        assert grader.grade(database, gold, answer).strict != declared_nulls
        assert grader.grade(database, gold, "SELECT sum(1) FROM product").strict


def test_declared_booleans_are_true_or_false_and_hours_are_tried_at_their_ends(
    tmp_path: Path, executor: SQLExecutor
) -> None:
    path = tmp_path / "visits.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE visit (id INTEGER PRIMARY KEY, at DATETIME, paid BOOLEAN)")
        rows = [
            (n, f"2023-03-{1 + n % 28:02} {8 + n % 10:02}:{7 + n % 50:02}:00", n % 3 == 0) for n in range(60)
        ]
        connection.executemany("INSERT INTO visit VALUES (?, ?, ?)", rows)
    grader = Grader(executor, suite=TestSuite(executor, tmp_path / "cache"))
    late = "SELECT id FROM visit WHERE strftime('%H', at) >= '15'"
    right = [
        ("SELECT id FROM visit WHERE paid", "SELECT id FROM visit WHERE paid = 1"),
        ("SELECT sum(paid) FROM visit", "SELECT count(*) FROM visit WHERE paid = 1"),
        (late, "SELECT id FROM visit WHERE time(at) >= '15:00:00'"),
    ]
    wrong = [
        ("SELECT id FROM visit WHERE paid", "SELECT id FROM visit WHERE id % 3 = 0"),
        (late, "SELECT id FROM visit WHERE time(at) > '15:00:00'"),
        (late.replace("15", "18"), late.replace("15", "19")),
    ]
    assert [grader.grade(path, *pair).strict for pair in right] == [True] * 3
    assert [grader.grade(path, *pair).strict for pair in wrong] == [False] * 3


def test_an_answer_that_is_right_today_only_is_refused(tmp_path: Path, executor: SQLExecutor) -> None:
    path = tmp_path / "day.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE visit (id INTEGER PRIMARY KEY, year INTEGER)")
        connection.executemany("INSERT INTO visit VALUES (?, ?)", [(n, 2001 + n % 9) for n in range(40)])
    grader = Grader(executor, suite=TestSuite(executor, tmp_path / "cache"))
    gold = "SELECT id, {} - year FROM visit"
    answer = gold.format("CAST(strftime('%Y', 'now') AS INTEGER)")
    with closing(sqlite3.connect(path)) as connection:
        (year,) = connection.execute("SELECT CAST(strftime('%Y', 'now') AS INTEGER)").fetchone()
    assert not grader.grade(path, gold.format(year), answer).strict
    assert grader.grade(path, answer, answer.replace("CAST(", "CAST((").replace(" AS", ") AS")).strict


def test_a_row_that_another_table_lacks_may_be_named_by_a_text_but_not_lost_by_distinct(
    tmp_path: Path, executor: SQLExecutor
) -> None:
    database = made("sqlite", "heroes", tmp_path)
    grader = Grader(executor, suite=TestSuite(executor, tmp_path / "cache"))
    gold = "SELECT name FROM hero WHERE id NOT IN (SELECT hero FROM hero_power)"
    by_name = (
        "SELECT name FROM hero WHERE name NOT IN (SELECT h.name FROM hero h JOIN hero_power ON hero = h.id)"
    )
    assert grader.grade(database, gold, by_name).strict
    assert not grader.grade(database, gold, gold.replace("SELECT name", "SELECT DISTINCT name")).strict
