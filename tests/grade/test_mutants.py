import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from text2sql_grpo.audit.mutations import mutants
from text2sql_grpo.grading.gold_query import read_gold
from text2sql_grpo.grading.mutants import MAX_PER_OPERATOR
from text2sql_grpo.sql.outcome import Row
from text2sql_grpo.sql.schema import read_schema


@pytest.fixture(scope="module")
def connection(shop: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(shop)) as opened:
        yield opened


def mutants_of(shop: Path, sql: str, connection: sqlite3.Connection | None = None) -> dict[str, str]:
    def run(query: str) -> Sequence[Row] | None:
        assert connection is not None
        return connection.execute(query).fetchall()

    schema = read_schema(shop)
    gold = read_gold(sql, schema)
    assert gold is not None
    return mutants(gold, schema, run if connection else None)


CASES = [
    ("SELECT name FROM person WHERE age > 20", "comparison", "SELECT name FROM person WHERE age >= 20"),
    ("SELECT name FROM person WHERE age > 20", "literal", "SELECT name FROM person WHERE age > 21"),
    ("SELECT name FROM person WHERE age > 20", "condition_dropped", "SELECT name FROM person"),
    ("SELECT name FROM person WHERE age > 20", "distinct", "SELECT DISTINCT name FROM person WHERE age > 20"),
    ("SELECT name FROM person WHERE age > 20", "column", 'SELECT "note" FROM person WHERE age > 20'),
    (
        "SELECT name FROM person WHERE note = 'x'",
        "comparison",
        "SELECT name FROM person WHERE note LIKE '%x%'",
    ),
    (
        "SELECT name FROM person WHERE note LIKE '%x%'",
        "comparison",
        "SELECT name FROM person WHERE note LIKE 'x%'",
    ),
    (
        "SELECT name FROM person WHERE age BETWEEN 3 AND 9",
        "comparison",
        "SELECT name FROM person WHERE age > 3 AND age <= 9",
    ),
    (
        "SELECT name FROM person WHERE age > 2 AND city = 1",
        "connector",
        "SELECT name FROM person WHERE age > 2 OR city = 1",
    ),
    ("SELECT sum(paid) FROM visit", "aggregate", "SELECT AVG(paid) FROM visit"),
    ("SELECT count(person) FROM visit", "aggregate", "SELECT COUNT(DISTINCT person) FROM visit"),
    (
        "SELECT p.name FROM person AS p JOIN city AS c ON p.city = c.id",
        "join",
        "SELECT p.name FROM person AS p LEFT JOIN city AS c ON p.city = c.id",
    ),
    (
        "SELECT p.name FROM person AS p INNER JOIN city AS c ON p.city = c.id",
        "join",
        "SELECT p.name FROM person AS p LEFT JOIN city AS c ON p.city = c.id",
    ),
    (
        "SELECT p.name FROM person AS p JOIN city AS c ON p.city = c.id WHERE c.name = 'Rome'",
        "join_dropped",
        "SELECT p.name FROM person AS p WHERE TRUE",
    ),
    (
        "SELECT name FROM person ORDER BY age LIMIT 1",
        "order",
        "SELECT name FROM person ORDER BY age DESC LIMIT 1",
    ),
    ("SELECT name FROM person ORDER BY age LIMIT 1", "order", "SELECT name FROM person ORDER BY age"),
    ("SELECT name FROM person ORDER BY age LIMIT 1", "limit", "SELECT name FROM person ORDER BY age LIMIT 2"),
    ("SELECT a FROM friend UNION SELECT b FROM friend", "set_operation", "SELECT a FROM friend"),
    (
        "SELECT a FROM friend EXCEPT SELECT b FROM friend",
        "set_operation",
        "SELECT b FROM friend EXCEPT SELECT a FROM friend",
    ),
    (
        "SELECT count(*) FROM visit GROUP BY kind, person",
        "group",
        "SELECT COUNT(*) FROM visit GROUP BY person",
    ),
]


@pytest.mark.parametrize(("gold", "operator", "expected"), CASES)
def test_each_operator_makes_its_edit(shop: Path, gold: str, operator: str, expected: str) -> None:
    assert mutants_of(shop, gold)[expected] == operator


def test_constants_are_read_from_the_base(shop: Path, connection: sqlite3.Connection) -> None:
    found = mutants_of(shop, "SELECT name FROM person WHERE age = (SELECT max(age) FROM person)", connection)
    constants = [sql for sql, operator in found.items() if operator == "constants"]
    assert "SELECT name FROM person WHERE age = 54" in constants
    assert 'SELECT name FROM person WHERE "person"."code" IN (\'p13\')' in constants
    found = mutants_of(shop, "SELECT name FROM city WHERE id NOT IN (SELECT city FROM person)", connection)
    assert "SELECT name FROM city WHERE NOT id IN (1, 2, 3, 4)" in found


def test_mutants_run_differ_from_the_gold_and_are_bounded(shop: Path, connection: sqlite3.Connection) -> None:
    gold = (
        "SELECT DISTINCT T1.name, count(*) FROM person AS T1 JOIN city AS T2 ON T1.city = T2.id "
        "WHERE T2.country = 'Italy' AND T1.age > 20 OR T1.note LIKE 'note%' GROUP BY T1.name "
        "HAVING count(*) > 1 ORDER BY count(*) DESC LIMIT 3"
    )
    found = mutants_of(shop, gold, connection)
    assert 60 < len(found) < 16 * MAX_PER_OPERATOR
    n_failing = 0
    for sql in found:
        assert sql.replace("COUNT", "count").replace(" t", " T") != gold
        try:
            connection.execute(sql).fetchall()
        except sqlite3.OperationalError:  # a joined table dropped while its columns are still read
            n_failing += 1
    assert n_failing <= 3
