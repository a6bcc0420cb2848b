import pytest

from text2sql_grpo.rewards.episode_flags import literals_copied_from_observations, reads_no_table

OBSERVED = [(17, "Ann", 2.5), (3, "O'Hara", None)]


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT 'Ann' UNION ALL SELECT 'Bob'", True),
        ("SELECT * FROM (VALUES (1), (2))", True),
        ("WITH a AS (SELECT 1 AS x), b AS (SELECT x FROM a) SELECT x FROM b", True),
        ("SELECT value FROM json_each('[1, 2]')", True),
        ("SELECT 3 FROM sqlite_master LIMIT 1", True),
        ("WITH a AS (SELECT x FROM t) SELECT x FROM a", False),
        ("SELECT 1 WHERE EXISTS (SELECT 1 FROM t)", False),
        ("SELECT * FROM t, json_each(t.x)", False),
        ("SELECT )( 3", True),
        ("SELECT )( 3 FROM t", False),
        ('SELECT )( 3 FROM main."t" -- from', False),
        ("SELECT 3 'from t' )( /* from t", True),
        ("WITH RECURSIVE a AS (SELECT 1 AS x), b (y) AS (SELECT x FROM a) SELECT )( FROM b JOIN a", True),
        ("WITH a AS (SELECT 3 AS x WHERE " + "1=1 AND " * 1_500 + "1=1) SELECT x FROM a", True),
        ("WITH a AS (SELECT x FROM t WHERE " + "1=1 AND " * 1_500 + "1=1) SELECT x FROM a", False),
    ],
)
def test_a_query_that_reads_no_table_is_seen(sql: str, expected: bool) -> None:
    assert reads_no_table(sql) is expected


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT 'Ann'", ("Ann",)),
        ('SELECT a FROM t WHERE name = "Ann" AND "Bob" = b', ("Ann",)),
        ("SELECT a FROM t WHERE name = 'O''Hara'", ("O'Hara",)),
        ("SELECT a FROM t WHERE id IN (17, 18) AND x > 2.50", (17.0, 2.5)),
        ("SELECT a FROM t LIMIT 17", ()),
        ("SELECT a FROM t WHERE id = 3", ()),  # in the question
        ("SELECT a FROM t WHERE year > 1990 AND x = -4.5", ()),
        ("SELECT a FROM t WHERE town = 'rome'", ()),
        ("SELECT )(", ()),
        ("SELECT )( 'Ann' 17 LIMIT 2.5 -- 'O''Hara'", ("Ann", 17)),
        ("SELECT 'Ann'\n/* from", ("Ann",)),
        ("SELECT n FROM t WHERE id = 1e", ()),
    ],
)
def test_literals_that_were_only_seen_in_rows_are_named(sql: str, expected: tuple[object, ...]) -> None:
    rows = [*OBSERVED, ("rome", 1, 0), ("Oslo", 1990, -4.5)]
    question = "Who has 3 cars in Rome, since 1990, for $4.5?"
    assert literals_copied_from_observations(sql, question=question, observed=rows) == expected
