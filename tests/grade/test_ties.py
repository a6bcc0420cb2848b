import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from text2sql_grpo.grading.gold_result import tie_groups, widened_query
from text2sql_grpo.grading.strict import TieGroup
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.sql.outcome import Limits

SETUP = """
CREATE TABLE emp (id INTEGER, name TEXT COLLATE NOCASE, dept TEXT, age INTEGER, pay REAL);
INSERT INTO emp VALUES
  (1, 'Ann', 'IT', 30, 0.3), (2, 'Bob', 'IT', 30, 0.30000000000000004), (3, 'Cid', 'HR', 45, 9.5),
  (4, 'Dee', NULL, NULL, NULL), (5, 'ann', 'HR', 45, 1.0);
"""


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ties") / "emp.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SETUP)
    return path


def groups_of(
    executor: SQLExecutor, database: Path, sql: str, *, limits: Limits | None = None
) -> list[tuple[list[object], int]] | None:
    """Per group its sorted rows (bare values for one column) and how many of them are shown."""
    gold = executor.execute(database, sql)
    assert gold.is_ok, gold.error
    widened = widened_query(sql, gold.columns)
    assert widened is not None
    groups = tie_groups(widened, gold, executor.execute(database, widened.sql, limits=limits))
    if groups is None:
        return None
    return [
        (sorted((row[0] if len(row) == 1 else row for row in group.rows), key=repr), group.n_taken)
        for group in groups
    ]


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT id FROM emp ORDER BY age", [([4], 1), ([1, 2], 2), ([3, 5], 2)]),
        ("SELECT id FROM emp ORDER BY age DESC NULLS FIRST", [([4], 1), ([3, 5], 2), ([1, 2], 2)]),
        ("SELECT id FROM emp ORDER BY age, id DESC", [([4], 1), ([2], 1), ([1], 1), ([5], 1), ([3], 1)]),
        ("SELECT id FROM emp ORDER BY age LIMIT 2", [([4], 1), ([1, 2], 1)]),
        ("SELECT id FROM emp ORDER BY age LIMIT 2 OFFSET 2", [([1, 2], 1), ([3, 5], 1)]),
        ("SELECT id FROM emp ORDER BY age LIMIT 2, 2", [([1, 2], 1), ([3, 5], 1)]),
        ("SELECT id FROM emp ORDER BY age LIMIT 1 OFFSET 1;", [([1, 2], 1)]),
        ("SELECT id FROM emp LIMIT 2", [([1, 2, 3, 4, 5], 2)]),
        ("SELECT id FROM emp LIMIT 0", []),
        ("SELECT id, age FROM emp ORDER BY 2 LIMIT 1", [([(4, None)], 1)]),
        ("SELECT id, -id AS age FROM emp ORDER BY age LIMIT 1", [([(5, -5)], 1)]),
        ("SELECT id FROM emp ORDER BY name LIMIT 1", [([1, 5], 1)]),  # by the column's collation
        ("SELECT id FROM emp ORDER BY dept COLLATE NOCASE LIMIT 2", [([4], 1), ([3, 5], 1)]),
        ("SELECT id FROM emp ORDER BY pay", [([4], 1), ([1, 2], 2), ([5], 1), ([3], 1)]),  # but for rounding
        ("SELECT dept FROM emp GROUP BY dept ORDER BY count(*) DESC", [(["HR", "IT"], 2), ([None], 1)]),
        (
            "SELECT * FROM emp ORDER BY age DESC, dept LIMIT 1",
            [([(3, "Cid", "HR", 45, 9.5), (5, "ann", "HR", 45, 1.0)], 1)],
        ),
        (
            "SELECT dept FROM emp UNION ALL SELECT 'HR' ORDER BY dept",
            [([None], 1), (["HR"] * 3, 3), (["IT"] * 2, 2)],
        ),
        (
            "SELECT id, dept AS d FROM emp UNION SELECT 9, 'HR' ORDER BY d LIMIT 2",
            [([(4, None)], 1), ([(3, "HR"), (5, "HR"), (9, "HR")], 1)],
        ),
        ("SELECT lower(name) FROM emp UNION SELECT 'x' ORDER BY lower(name) LIMIT 1", [(["ann"], 1)]),
        ("WITH e AS (SELECT * FROM emp LIMIT 3) SELECT id FROM e ORDER BY age LIMIT 1", [([1, 2], 1)]),
        ("SELECT DISTINCT id FROM emp ORDER BY age LIMIT 2", [([4], 1), ([1, 2], 1)]),
        ("SELECT id -- every one\nFROM emp ORDER BY age LIMIT 1 -- first", [([4], 1)]),
        (
            "SELECT a.id FROM emp AS a JOIN emp AS b ON a.id = b.id ORDER BY b.dept DESC LIMIT 1",
            [([1, 2], 1)],
        ),
        ("SELECT id, age AS id FROM emp ORDER BY emp.id LIMIT 1", [([(1, 30)], 1)]),
    ],
)
def test_groups(
    executor: SQLExecutor, database: Path, sql: str, expected: list[tuple[list[object], int]]
) -> None:
    assert groups_of(executor, database, sql) == expected


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT DISTINCT dept FROM emp ORDER BY pay",  # a department has several
        "SELECT id AS n FROM emp ORDER BY -n",  # the alias is not known inside a column of its query
        "SELECT id FROM emp ORDER BY random() LIMIT 3",  # groups of one row, other ones than the gold's
    ],
)
def test_a_gold_that_its_keys_do_not_explain_has_no_groups(
    executor: SQLExecutor, database: Path, sql: str
) -> None:
    assert [groups_of(executor, database, sql) for _ in range(3)].count(None) >= 1


def test_more_rows_than_the_limits_allow_give_no_groups(executor: SQLExecutor, database: Path) -> None:
    sql = "SELECT id FROM emp ORDER BY age LIMIT 1"
    assert groups_of(executor, database, sql, limits=Limits(max_rows=3)) is None


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT id FROM emp",
        "SELECT id FROM (SELECT id FROM emp ORDER BY age LIMIT 1)",
        "SELECT id FROM emp ORDER BY age LIMIT 1 + 1",
        "SELECT id FROM emp LIMIT -1",
        "SELECT id FROM emp UNION SELECT age FROM emp ORDER BY id + 1",
        "VALUES (1), (2)",
        "SELECT (id FROM emp ORDER BY age",
        "",
    ],
)
def test_nothing_to_widen(sql: str) -> None:
    assert widened_query(sql, ["id"]) is None


def test_only_rows_near_the_limit_are_read(executor: SQLExecutor, tmp_path: Path) -> None:
    path = tmp_path / "many.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (a)")
        connection.executemany("INSERT INTO t VALUES (?)", [(number // 2,) for number in range(50_000)])
        connection.commit()
    sql = "SELECT rowid FROM t ORDER BY a LIMIT 1"
    gold = executor.execute(path, sql)
    widened = widened_query(sql, gold.columns)
    assert widened is not None
    outcome = executor.execute(path, widened.sql)
    assert len(outcome.rows) < 20
    assert tie_groups(widened, gold, outcome) == (TieGroup(((1,), (2,)), 1),)
