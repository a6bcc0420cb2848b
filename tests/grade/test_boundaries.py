"""Small databases whose rows are changed until amounts that a gold query compares are equal."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from random import Random

import pytest

from text2sql_grpo.grading.base_sample import DatabaseSample, sample_of
from text2sql_grpo.grading.boundaries import probes, with_equal_amounts
from text2sql_grpo.grading.gold_query import GoldQuery, read_gold
from text2sql_grpo.grading.materialise import materialise

SCRIPT = """
CREATE TABLE client (id INTEGER PRIMARY KEY, name TEXT, allowed INTEGER NOT NULL CHECK (allowed > 0));
CREATE TABLE job (id INTEGER PRIMARY KEY, client INTEGER NOT NULL REFERENCES client (id), began DATE NOT NULL,
    ended DATE NOT NULL CHECK (ended >= began), hours REAL NOT NULL, rate INTEGER NOT NULL);
"""
TRIES = 8


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> DatabaseSample:
    path = tmp_path_factory.mktemp("jobs") / "jobs.sqlite"
    clients = [(n, f"Client {n}", 300 * n) for n in range(1, 6)]
    jobs = [
        (
            n,
            1 + n % 5,
            f"2024-0{1 + n % 9}-10",
            f"2024-0{1 + n % 9}-{11 + n % 15}",
            n * 7 % 11 + 0.5,
            40 + n * 3 % 17,
        )
        for n in range(1, 25)
    ]
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(SCRIPT)
        connection.executemany("INSERT INTO client VALUES (?, ?, ?)", clients)
        connection.executemany("INSERT INTO job VALUES (?, ?, ?, ?, ?, ?)", jobs)
    return sample_of(path)


def read(base: DatabaseSample, sql: str) -> GoldQuery:
    gold = read_gold(sql, base.schema)
    assert gold is not None
    return gold


def changed(base: DatabaseSample, sql: str) -> Iterator[sqlite3.Connection]:
    """Databases of the sample's rows, changed for a gold query."""
    content = {name: table.rows for name, table in base.tables.items()}
    for seed in range(TRIES):
        rows = with_equal_amounts(base, content, probes(read(base, sql)), Random(seed))
        with closing(materialise(base, rows)) as connection:
            yield connection


JOBS = "FROM client c JOIN job j ON j.client = c.id"
GAPS = "SELECT client, began, lag(ended) OVER (PARTITION BY client ORDER BY began) AS earlier FROM job"


@pytest.mark.parametrize(
    ("sql", "difference"),
    [
        (
            "SELECT client FROM job GROUP BY client HAVING avg(rate) > 47.5",
            "SELECT avg(rate) - 47.5 FROM job GROUP BY client",
        ),
        (
            f"SELECT c.id {JOBS} GROUP BY c.id HAVING sum(j.rate) > c.allowed",
            f"SELECT sum(j.rate) - c.allowed {JOBS} GROUP BY c.id",
        ),
        (
            "SELECT id FROM client AS c WHERE allowed > (SELECT sum(hours) FROM job WHERE job.client = c.id)",
            "SELECT allowed - (SELECT sum(hours) FROM job WHERE job.client = c.id) FROM client AS c",
        ),
        (
            "SELECT a.id FROM job a JOIN job b ON a.client = b.client AND abs(a.rate - b.rate) > 20",
            "SELECT abs(a.rate - b.rate) - 20 FROM job a JOIN job b ON a.client = b.client",
        ),
        (
            f"SELECT client FROM ({GAPS}) AS g WHERE julianday(began) - julianday(earlier) > 60",
            f"SELECT julianday(began) - julianday(earlier) - 60 FROM ({GAPS}) AS g",
        ),
        (
            "SELECT client FROM job GROUP BY client HAVING 100.0 * sum(rate > 50) / count(*) > 25",
            "SELECT 100.0 * sum(rate > 50) / count(*) - 25 FROM job GROUP BY client",
        ),
    ],
)
def test_a_bound_is_met_that_no_row_met(base: DatabaseSample, sql: str, difference: str) -> None:
    def is_met(connection: sqlite3.Connection) -> bool:
        return any(amount == 0 for (amount,) in connection.execute(difference))

    with closing(materialise(base, {name: table.rows for name, table in base.tables.items()})) as connection:
        assert not is_met(connection)
    assert sum(map(is_met, changed(base, sql))) >= TRIES // 4


def test_sums_of_groups_become_equal(base: DatabaseSample) -> None:
    sql = "SELECT client, sum(rate) AS paid FROM job GROUP BY client ORDER BY paid DESC LIMIT 1"

    def has_ties(connection: sqlite3.Connection) -> bool:
        sums = [paid for (paid,) in connection.execute("SELECT sum(rate) FROM job GROUP BY client")]
        return len(set(sums)) < len(sums)

    assert sum(map(has_ties, changed(base, sql))) >= TRIES // 4


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT id FROM job WHERE hours > 5",
        "SELECT client FROM job GROUP BY client HAVING count(*) > 3",
        "SELECT j.id FROM job j JOIN client c ON c.id = j.client",
        "SELECT id FROM (SELECT id, rank() OVER (ORDER BY hours) AS place FROM job) AS r WHERE place = 1",
    ],
)
def test_what_rows_are_drawn_for_anyway_is_left_to_that(base: DatabaseSample, sql: str) -> None:
    assert probes(read(base, sql)) == []


def test_rows_keep_their_constraints(base: DatabaseSample) -> None:
    sql = f"SELECT client FROM ({GAPS}) AS g WHERE julianday(began) - julianday(earlier) > 60"
    for connection in changed(base, sql):
        assert not connection.execute("SELECT 1 FROM job WHERE ended < began").fetchall()
        assert connection.execute("SELECT count(*) FROM job").fetchone() == (24,)
