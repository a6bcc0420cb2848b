"""Grading of golds whose results are over the limits."""

import sqlite3
from pathlib import Path

import pytest

from text2sql_grpo.grading.verdict import Grader
from text2sql_grpo.sql import Limits, SQLExecutor

GOLD = "SELECT a, name FROM t"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "shop.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (a INTEGER, name TEXT, b INTEGER)")
        rows = [(i % 40, None if i % 7 == 0 else f"n{i % 30}", i) for i in range(120)]
        connection.executemany("INSERT INTO t VALUES (?, ?, ?)", rows)
    connection.close()
    return path


@pytest.mark.parametrize(
    ("gold", "predicted", "reason"),
    [
        (GOLD, f"{GOLD};", "equal"),
        (GOLD, f"{GOLD} ORDER BY b DESC -- all", "equal"),
        (f"{GOLD}; -- all", f"{GOLD};\n/* done; */", "equal"),
        (GOLD, "WITH u AS (SELECT * FROM t) SELECT name, a FROM u", "equal"),  # columns in another order
        (GOLD, f"{GOLD} WHERE b <> 100", "values"),
        (GOLD, f"{GOLD} UNION ALL SELECT 1, 'n1'", "values"),
        (GOLD, f"SELECT DISTINCT * FROM ({GOLD}) LIMIT 3", "truncated"),
        (GOLD, "SELECT a, name, b FROM t", "columns"),
        (GOLD, f"{GOLD} /* open", "truncated"),
        (GOLD, "SELECT * FROM gold_5d0c71e8a6", "query_failed"),
        (f"{GOLD} ORDER BY b", f"{GOLD} ORDER BY b, a", "equal"),
        (f"{GOLD} ORDER BY b", f"{GOLD} ORDER BY b DESC", "order"),
        (f"{GOLD} WHERE random() % 2", GOLD, "gold_failed"),
    ],
)
def test_rows_over_the_limit_are_compared_in_the_database(
    database: Path, gold: str, predicted: str, reason: str
) -> None:
    with SQLExecutor(Limits(max_rows=20), workers=1) as executor:
        verdict = Grader(executor).grade(database, gold, predicted)

    assert verdict.reason == reason
    assert verdict.strict == (reason == "equal")
    assert verdict.official == (reason in ("equal", "order"))
