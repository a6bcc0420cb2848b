import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from tests.shop_database import make_shop
from text2sql_grpo.grading.base_sample import BaseSample, read_sample
from text2sql_grpo.grading.gold_query import read_gold
from text2sql_grpo.grading.perturb import perturbed
from text2sql_grpo.grading.small_database import build
from text2sql_grpo.sql.outcome import Row

SEEDS = range(40)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseSample:
    return read_sample(make_shop(tmp_path_factory.mktemp("shop") / "shop.sqlite"))


def contents(base: BaseSample, sql: str, seeds: Sequence[int] = SEEDS) -> list[dict[str, list[Row]]]:
    gold = read_gold(sql, base.schema)
    assert gold is not None
    return [perturbed(base, gold, Random(seed)) for seed in seeds]


def results(base: BaseSample, sql: str) -> list[list[Row]]:
    found = []
    for content in contents(base, sql):
        with closing(build(base, content)) as connection:
            found.append(connection.execute(sql).fetchall())
    return found


JOIN = (
    "SELECT T2.name, count(*) FROM person AS T1 JOIN city AS T2 ON T1.city = T2.id JOIN friend AS T3 "
    "ON T3.a = T1.code WHERE T1.age >= 30 AND T2.country = 'Italy' GROUP BY T2.name"
)


def test_keys_references_and_types_are_kept(base: BaseSample) -> None:
    for content in contents(base, JOIN):
        with closing(build(base, content)) as connection:
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            kinds = "SELECT DISTINCT typeof(age), typeof(joined), typeof(rating), typeof(name) FROM person"
            assert set(connection.execute(kinds).fetchall()) <= {("integer", "text", "real", "text")}
            assert connection.execute("SELECT count(*) FROM person").fetchone()[0] >= 2
            assert connection.execute("SELECT count(*) FROM friend").fetchone()[0] >= 1


def test_the_same_seed_makes_the_same_rows(base: BaseSample) -> None:
    assert contents(base, JOIN, [7, 8])[0] == contents(base, JOIN, [7])[0]
    assert contents(base, JOIN, [7])[0] != contents(base, JOIN, [8])[0]


def test_results_are_empty_and_not_and_differ(base: BaseSample) -> None:
    found = results(base, JOIN)
    assert any(not rows for rows in found) and any(len(rows) > 1 for rows in found)
    assert len({str(sorted(rows)) for rows in found}) > 10


def test_an_empty_result_becomes_one_with_rows(base: BaseSample) -> None:
    sql = "SELECT name FROM person WHERE age = 77 AND note = 'never seen' AND joined > '2031-01-01'"
    assert any(results(base, sql))


def test_values_beside_a_literal_and_the_literal_occur(base: BaseSample) -> None:
    found = {
        row[2]
        for content in contents(base, "SELECT name FROM person WHERE age > 59")
        for row in content["person"]
    }
    assert {58, 59, 60} <= found


def test_group_sizes_around_the_asked_one_occur(base: BaseSample) -> None:
    sql = "SELECT kind FROM visit GROUP BY kind HAVING count(*) >= 25"
    sizes = set()
    for content in contents(base, sql):
        kinds = [row[3] for row in content["visit"]]
        sizes |= {kinds.count(kind) for kind in kinds}
    assert {24, 25, 26} <= sizes


def test_nulls_come_only_where_the_base_has_some(base: BaseSample) -> None:
    for content in contents(base, "SELECT name, note, age FROM person"):
        assert all(None not in (row[0], row[1], row[2]) for row in content["person"])
    notes = [row[5] for content in contents(base, "SELECT note FROM person") for row in content["person"]]
    assert None in notes


def test_duplicates_ties_and_missing_matches_occur(base: BaseSample) -> None:
    names = [
        [row[1] for row in content["person"]] for content in contents(base, "SELECT name, age FROM person")
    ]
    assert any(len(set(column)) < len(column) / 2 for column in names)
    childless = "SELECT id FROM city EXCEPT SELECT city FROM person"
    found = results(base, childless)
    assert any(found) and not all(found)


def test_dates_keep_their_format(base: BaseSample) -> None:
    sql = (
        "SELECT name FROM person WHERE strftime('%Y-%m', joined) = '2015-04' "
        "AND joined > date('now', '-30 days') AND joined LIKE '%-07-%'"
    )
    days = {row[4] for content in contents(base, sql) for row in content["person"]}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", str(day)) for day in days) and len(days) > 20
    assert {"2015-03-31", "2015-04-01", "2015-04-30", "2015-05-01"} <= days


def test_a_table_without_rows_gets_some(base: BaseSample) -> None:
    assert any(results(base, "SELECT label FROM empty WHERE id > 2"))


def test_variants_of_a_large_table_stay_small(tmp_path: Path) -> None:
    path = tmp_path / "large.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a INT, b TEXT)")
        connection.executemany(
            "INSERT INTO t VALUES (?, ?, ?)", [(n, n % 50, f"b{n % 7}") for n in range(50_000)]
        )
    base = read_sample(path)
    for content in contents(base, "SELECT b, count(*) FROM t GROUP BY b HAVING count(*) > 5000"):
        assert 1 <= len(content["t"]) <= 300


def test_references_in_a_circle_and_to_the_own_table_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "circle.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(
            "CREATE TABLE a (id INTEGER PRIMARY KEY, b INT REFERENCES b (id), boss INT REFERENCES a (id), "
            "v INT);"
            "CREATE TABLE b (id INTEGER PRIMARY KEY, a INT REFERENCES a (id));"
        )
        connection.executemany("INSERT INTO b VALUES (?, ?)", [(n, n) for n in range(1, 9)])
        connection.executemany(
            "INSERT INTO a VALUES (?, ?, ?, ?)", [(n, 9 - n, 1 + n // 2, n) for n in range(1, 9)]
        )
    base = read_sample(path)
    n_rows = 0
    for content in contents(base, "SELECT x.v FROM a AS x JOIN a AS y ON x.boss = y.id JOIN b ON b.a = x.id"):
        with closing(build(base, content)) as connection:
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
            n_rows += connection.execute("SELECT count(*) FROM a").fetchone()[0]
    assert n_rows > 0
