"""Verdicts on a help desk's tickets: open ones are NULL, codes have one length, sizes are texts."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from text2sql_grpo.grading import search
from text2sql_grpo.grading.suite import TestSuite
from text2sql_grpo.grading.verdict import Grader
from text2sql_grpo.sql import SQLExecutor

TABLES = """
CREATE TABLE agent (agent_id INTEGER PRIMARY KEY, login TEXT NOT NULL UNIQUE, left_on DATE);
CREATE TABLE ticket (ticket_id INTEGER PRIMARY KEY, subject TEXT NOT NULL, agent_id INTEGER REFERENCES agent,
    opened_at TEXT NOT NULL, closed_at TEXT CHECK (closed_at >= opened_at), height TEXT,
    postcode TEXT NOT NULL CHECK (length(postcode) = 5), country TEXT NOT NULL CHECK (length(country) = 2),
    vat TEXT NOT NULL);
"""
OPEN = "SELECT ticket_id FROM ticket WHERE agent_id IS NULL AND closed_at IS NULL ORDER BY opened_at LIMIT 3"
SUBJECTS = (
    "SELECT t.subject FROM ticket t JOIN agent a USING (agent_id) WHERE left_on IS NULL AND height IS NULL"
)
HIGH = "SELECT ticket_id FROM ticket WHERE CAST(height AS REAL) > 100"
LEIPZIG = "SELECT count(*) FROM ticket WHERE postcode LIKE '04%'"
ABROAD = "SELECT ticket_id FROM ticket WHERE substr(vat, 1, 2) <> country"
HOURS = (
    "SELECT country, round(avg((julianday(closed_at) - julianday(opened_at)) * 24), 1) FROM ticket"
    " WHERE closed_at IS NOT NULL GROUP BY country"
)
YEARS = (
    "SELECT strftime('%Y', opened_at) AS year, count(*) FROM ticket WHERE height IS NOT NULL GROUP BY year"
)
WRONG = [
    (YEARS, YEARS.replace("opened_at", "opened_at, '+2 hours'")),
    (YEARS, YEARS.replace("opened_at", "datetime(opened_at, '-60 minutes')")),
    (OPEN, OPEN.replace("opened_at LIMIT", "date(opened_at), ticket_id LIMIT")),
    (SUBJECTS, SUBJECTS.replace("SELECT", "SELECT DISTINCT")),
    (HIGH, HIGH.replace("REAL", "INTEGER")),
    (HIGH, HIGH.replace("> 100", ">= 101")),
    (LEIPZIG, LEIPZIG.replace("04%", "%04%")),
    (ABROAD, "SELECT ticket_id FROM ticket WHERE substr(vat, 1, 1) <> substr(country, 1, 1)"),
]
RIGHT = [
    (YEARS, YEARS.replace("opened_at", "datetime(opened_at, '+90 minutes'), '-90 minutes'")),
    (HOURS, HOURS.replace("(julianday(closed_at) - julianday(opened_at)) * 24", "({} / 3600.0)")),
    (HIGH, "SELECT ticket_id FROM ticket WHERE height + 0.0 > 100"),
    (ABROAD, "SELECT ticket_id FROM ticket WHERE NOT substr(vat, 1, length(country)) = country"),
]
SECONDS = "(strftime('%s', closed_at) - strftime('%s', opened_at))"


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("desk") / "desk.sqlite"
    start = datetime(2023, 1, 2, 8)
    agents = [(n, f"agent{n}", "2023-05-01" if n == 3 else None) for n in range(1, 6)]
    tickets = [
        (
            *(n, f"Subject {n % 17 if n % 9 else n}", None if n % 8 == 3 else 1 + n % 5),
            str(start + timedelta(minutes=1_517 * n)),
            None if n % 6 == 5 else str(start + timedelta(minutes=1_517 * n + 97 * (n % 50) + 5)),
            None if n % 9 == 0 else ("9.5", "30", "45.0", "120.5", "210", "100")[n % 6],
            ("04109", "20095", "80331", "10115")[n % 4],
            *(("PT", "DE")[n % 2], ("PT", "DE")[n // 2 % 2] + str(100_000_000 + 7_919 * n)),
        )
        for n in range(1, 61)
    ]
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(TABLES)
        connection.executemany("INSERT INTO agent VALUES (?, ?, ?)", agents)
        connection.executemany(f"INSERT INTO ticket VALUES ({', '.join('?' * 9)})", tickets)
    return path


@pytest.fixture(scope="module")
def grader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grader]:
    with SQLExecutor(workers=2) as executor:
        yield Grader(executor, suite=TestSuite(executor, tmp_path_factory.mktemp("suites")))


@pytest.mark.parametrize(("gold", "wrong"), WRONG)
def test_what_is_right_on_the_rows_alone_is_refused(
    desk: Path, grader: Grader, executor: SQLExecutor, gold: str, wrong: str
) -> None:
    assert Grader(executor).grade(desk, gold, wrong).strict
    assert grader.grade(desk, gold, wrong).reason == "test_database"


@pytest.mark.parametrize(("gold", "right"), RIGHT)
def test_right_rewrites_are_accepted(desk: Path, grader: Grader, gold: str, right: str) -> None:
    assert grader.grade(desk, gold, right.format(SECONDS)).reason == "equal"


def test_a_size_that_only_the_answer_asks_for_makes_few_candidates_large(
    desk: Path, grader: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    draw_rows = search.draw_rows

    def counted(*arguments: Any, **named: Any) -> dict[str, list[Any]]:
        rows = draw_rows(*arguments, **named)
        drawn.append(len(rows["ticket"]))
        return rows

    gold = "SELECT country FROM ticket GROUP BY country HAVING count(*) > 2"
    assert grader.grade(desk, gold, gold).strict
    monkeypatch.setattr(search, "draw_rows", counted)
    assert grader.grade(desk, gold, f"{gold} AND count(*) < 100000").strict
    assert 0 < sum(n > 100 for n in drawn) <= search.N_LARGE
