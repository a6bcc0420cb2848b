"""What a gold query reads, and the values near its literals."""

import pytest

from tests.databases import make_shop
from text2sql_grpo.grading.gold_query import GoldQuery, read_gold
from text2sql_grpo.grading.near_values import as_column_value, date_format, matching_texts, near_values
from text2sql_grpo.grading.time_steps import Step
from text2sql_grpo.sql.outcome import Cell
from text2sql_grpo.sql.query import read_query
from text2sql_grpo.sql.schema import Schema, read_schema


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Schema:
    return read_schema(make_shop(tmp_path_factory.mktemp("shop") / "shop.sqlite"))


def read(sql: str, schema: Schema) -> GoldQuery:
    gold = read_gold(sql, schema)
    assert gold is not None
    return gold


def test_columns_are_found_behind_aliases_subqueries_and_ctes(schema: Schema) -> None:
    gold = read(
        "WITH old AS (SELECT code AS c, City FROM person WHERE AGE > 60) SELECT T2.name FROM old AS T1 "
        "JOIN CITY AS T2 ON T1.city = T2.ID WHERE EXISTS (SELECT 1 FROM visit WHERE person = c) "
        "ORDER BY T2.NAME",
        schema,
    )
    assert gold.tables == {"person", "city", "visit"}
    assert gold.columns == {
        *(("person", name) for name in ("code", "city", "age")),
        *(("city", name) for name in ("id", "name")),
        ("visit", "person"),
    }
    assert gold.literals == {("person", "age"): (60,)}
    assert set(gold.links) == {
        (("person", "city"), ("city", "id")),
        (("visit", "person"), ("person", "code")),
    }


@pytest.mark.parametrize(
    ("sql", "aim", "group_sizes"),
    [
        ("SELECT d FROM (SELECT paid * 2 AS d FROM visit) AS t WHERE t.d > 9", "((:c0 * 2))", ()),
        ("WITH t AS (SELECT *, paid + 1 AS d FROM visit) SELECT kind FROM t WHERE d > 9", "((:c0 + 1))", ()),
        ("SELECT kind, sum(paid) AS d FROM visit GROUP BY kind HAVING d > 9", "(:c0)", ()),
        (
            "WITH t AS (SELECT paid * 2 AS a FROM visit), u AS (SELECT a - 1 AS b FROM t) "
            "SELECT b FROM u WHERE b > 9",
            "(((:c0 * 2) - 1))",
            (),
        ),
        ("SELECT k FROM (SELECT kind AS k, count(*) AS n FROM visit GROUP BY 1) WHERE n > 9", None, (9,)),
        (
            "SELECT kind FROM (SELECT kind, rank() OVER (ORDER BY paid) AS place FROM visit) WHERE place < 9",
            None,
            (9,),
        ),
        (
            "WITH RECURSIVE t AS (SELECT paid AS d FROM visit UNION SELECT d + 1 FROM t WHERE d < 9) "
            "SELECT * FROM t",
            None,
            (),
        ),
    ],
)
def test_conditions_on_what_is_computed_are_read(
    sql: str, aim: str | None, group_sizes: tuple[int, ...], schema: Schema
) -> None:
    gold = read(sql, schema)
    assert [(one.sql, one.value) for one in gold.aims] == ([(aim, 9.0)] if aim else [])
    assert gold.group_sizes == group_sizes
    assert gold.tree.sql("sqlite").count("9") == 1  # the query itself is as it was


def test_columns_computed_of_each_other_take_bounded_work(schema: Schema) -> None:
    levels = "".join(f", t{n} AS (SELECT d + d + d AS d FROM t{n - 1})" for n in range(1, 40))
    gold = read(f"WITH t0 AS (SELECT paid AS d FROM visit){levels} SELECT d FROM t39 WHERE d > 9", schema)
    assert gold.tables == {"visit"}
    stars = "".join(f", t{n} AS (SELECT * FROM t{n - 1} AS a, t{n - 1} AS b)" for n in range(1, 40))
    gold = read(f"WITH t0 AS (SELECT * FROM visit){stars} SELECT 1 FROM t39 WHERE nothing > 9", schema)
    assert gold.tables == {"visit"}


def test_the_rest_of_a_count_may_be_a_limit(schema: Schema) -> None:
    count = "(SELECT count(*) FROM visit)"
    middle = f"SELECT paid FROM visit ORDER BY paid LIMIT 2 - {count} % 2 OFFSET {count} / 2"
    median = f"SELECT avg(paid) FROM ({middle})"
    assert read(median, schema).tables == {"visit"}
    percent = read_query("SELECT paid FROM visit LIMIT 40%", "duckdb").tree
    assert percent is not None and percent.sql("duckdb") == "SELECT paid FROM visit LIMIT 40 PERCENT"


def test_text_in_double_quotes_is_a_string_where_no_column_has_its_name(schema: Schema) -> None:
    gold = read('SELECT "name" FROM city WHERE country = "Italy"', schema)
    assert gold.literals == {("city", "country"): ("Italy",)}
    assert gold.columns == {("city", "name"), ("city", "country")}


def test_literals_go_to_their_columns_and_counts_to_group_sizes(schema: Schema) -> None:
    gold = read(
        "SELECT kind, count(*) FROM visit WHERE paid BETWEEN -3 AND 2.5 AND kind LIKE '%ay' "
        "GROUP BY kind HAVING count(*) > 7 AND avg(paid) < 40 ORDER BY 2 LIMIT 2",
        schema,
    )
    assert {column: set(values) for column, values in gold.literals.items()} == {
        ("visit", "paid"): {-3, 2.5, 40},
        ("visit", "kind"): {"%ay"},
    }
    assert gold.patterns == {"%ay"}
    assert gold.group_sizes == (7, 2)
    assert gold.grouped == {("visit", "kind")}


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT substr(kind, 1, 2), count(*) FROM visit GROUP BY 1",
        "SELECT substr(kind, 1, 2) AS start, count(*) FROM visit GROUP BY start",
        "WITH s AS (SELECT substr(kind, 1, 2) AS start FROM visit) SELECT start FROM s GROUP BY start",
        "SELECT count(*) OVER (PARTITION BY start) FROM (SELECT substr(kind, 1, 2) AS start FROM visit)",
        "SELECT count(DISTINCT kind) FROM visit",
    ],
)
def test_groups_are_read_by_place_by_name_and_from_subqueries(sql: str, schema: Schema) -> None:
    assert read(sql, schema).grouped == {("visit", "kind")}


@pytest.mark.parametrize(
    "source",
    [
        "generate_series(DATE '2024-01-01', DATE '2024-10-01', INTERVAL '3 months') AS q",
        "generate_series(DATE '2024-01-01', DATE '2024-10-01', INTERVAL '3 months') AS quarters (q)",
        "(SELECT unnest(generate_series(DATE '2024-01-01', DATE '2024-10-01', INTERVAL '3 months')) AS q)",
    ],
)
def test_a_column_compared_with_a_series_gets_its_ends_and_steps(source: str, schema: Schema) -> None:
    sql = (
        f"SELECT q, count(code) FROM {source} JOIN person ON joined >= q AND joined < q + INTERVAL '3 months'"
    )
    gold = read_gold(f"{sql} GROUP BY q", schema, dialect="duckdb")
    assert gold is not None
    days = {str(value)[:10] for value in gold.literals["person", "joined"]}
    assert days >= {"2024-01-01", "2024-04-01", "2024-07-01", "2024-10-01", "2025-01-01"}


def test_moments_of_a_column_are_moved_to_the_one_that_it_is_compared_with(schema: Schema) -> None:
    years = "EXTRACT(YEAR FROM age(v.kind, p.joined)) > 9"
    sql = f"SELECT 1 FROM person p JOIN visit v ON v.person = p.code AND v.kind >= '2025-01-01' AND {years}"
    gold = read_gold(sql, schema, dialect="postgres")
    assert gold is not None
    assert {"2016-01-01 00:00:00"} <= {*gold.literals["person", "joined"]}


def test_arguments_of_functions_are_no_values_of_a_column_and_constants_are_computed(schema: Schema) -> None:
    gold = read(
        "SELECT code FROM person WHERE strftime('%Y', joined) = '1997' AND substr(joined, 1, 4) <> '1998' "
        "AND joined > date('2020-01-31', '+1 day') AND julianday('now', '-30 days') > 3 "
        "AND coalesce(note, 'none') <> 'x' AND age > -5",
        schema,
    )
    assert {column: set(values) for column, values in gold.literals.items()} == {
        ("person", "joined"): {"1997", "1998", "2020-02-01", "2020-02-01 00:00:00", "2020-01-30 00:00:00"},
        ("person", "note"): {"none", "x"},
        ("person", "age"): {-5},
    }


@pytest.mark.parametrize(
    ("condition", "literal", "step"),
    [
        ("joined >= DATE '2020-03-31' - INTERVAL '1 month'", "2020-02-29 00:00:00", Step(months=1)),
        ("age(DATE '2023-06-30', joined) > INTERVAL '10 years'", "2013-06-30 00:00:00", Step(months=120)),
        ("DATE '2020-01-31' - joined > 30", "2020-01-01 00:00:00", Step(seconds=30 * 86_400.0)),
        ("joined < timestamp '2020-01-31' - INTERVAL '90000000000 years'", None, None),
        ("joined > DATE '2020-01-31' - INTERVAL '999999999 years'", None, Step(months=12 * 999_999_999)),
    ],
)
def test_moments_an_interval_away_are_literals(
    condition: str, literal: str | None, step: Step | None, schema: Schema
) -> None:
    gold = read_gold(f"SELECT code FROM person WHERE {condition}", schema, dialect="postgres")
    assert gold is not None
    found = gold.literals.get(("person", "joined"), ())
    assert literal is None or literal in found
    assert step is None or step in gold.steps["person", "joined"]


@pytest.mark.parametrize(
    ("distance", "step"),
    [
        ("julianday(joined) - julianday(n)", Step(seconds=30 * 86_400.0)),
        ("(julianday(joined) - julianday(n)) * 24", Step(seconds=30 * 3_600.0)),
        ("strftime('%Y', joined) - strftime('%Y', n)", Step(months=360)),
        ("julianday(joined) - julianday(lag(joined) OVER (ORDER BY joined))", Step(seconds=30 * 86_400.0)),
    ],
)
def test_distances_are_measured_in_the_unit_of_their_functions(
    distance: str, step: Step, schema: Schema
) -> None:
    gold = read(f"SELECT code FROM person, visit WHERE {distance} > 30", schema)
    assert step in gold.steps["person", "joined"]
    assert gold.group_sizes == ()  # 30 is no number of rows


def test_columns_of_which_one_is_asked_to_be_larger_are_told_from_those_of_a_distance(schema: Schema) -> None:
    gold = read("SELECT code FROM person WHERE joined < note AND julianday(joined) - age > 30", schema)
    assert gold.opposed == {(("person", "joined"), ("person", "note"))}
    other_rows = read("SELECT a.code FROM person a JOIN person b ON a.joined < b.note", schema)
    assert not other_rows.opposed


def test_an_escaped_wildcard_of_a_pattern_is_itself(schema: Schema) -> None:
    gold = read("SELECT name FROM person WHERE note LIKE '50!%%' ESCAPE '!'", schema)
    (pattern,) = gold.patterns
    assert matching_texts(pattern)[:3] == ["50%", "x50%", "50%x"]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT a FROM (SELECT a FROM friend UNION SELECT b FROM friend) WHERE a = 'x'",
        "WITH a AS (SELECT a FROM friend UNION SELECT b FROM friend) SELECT a FROM a WHERE a = 'x'",
        "WITH RECURSIVE r(a) AS (SELECT a FROM friend UNION SELECT b FROM friend JOIN r USING (a)) "
        "SELECT a FROM r WHERE a = 'x'",
        "SELECT q FROM (SELECT a AS q FROM (SELECT q AS a FROM (SELECT a AS q FROM friend))) WHERE q = 'x'",
        "WITH f(q) AS (SELECT a FROM friend) SELECT q FROM f WHERE q = 'x'",
    ],
)
def test_columns_are_found_behind_set_operations_recursion_and_alias_chains(sql: str, schema: Schema) -> None:
    assert read(sql, schema).literals[("friend", "a")] == ("x",)


def test_set_operations_and_in_link_columns(schema: Schema) -> None:
    gold = read("SELECT code FROM person EXCEPT SELECT person FROM visit", schema)
    assert gold.links == ((("person", "code"), ("visit", "person")),)
    gold = read("SELECT name FROM person WHERE code NOT IN (SELECT a FROM friend)", schema)
    assert gold.links == ((("person", "code"), ("friend", "a")),)


@pytest.mark.parametrize(
    ("sql", "identifying"),
    [
        ("SELECT name FROM person EXCEPT SELECT note FROM person", {("person", "name")}),
        ("SELECT note FROM person WHERE name NOT IN (SELECT name FROM person)", {("person", "name")}),
        ("SELECT name FROM person WHERE code NOT IN (SELECT person FROM visit)", set()),
        ("SELECT name FROM person WHERE NOT EXISTS (SELECT 1 FROM visit WHERE person = code)", set()),
        ("SELECT name FROM person LEFT JOIN visit ON person = code WHERE person IS NULL", set()),
    ],
)
def test_rows_that_another_table_lacks_are_identified_by_the_columns_compared(
    sql: str, identifying: set[tuple[str, str]], schema: Schema
) -> None:
    gold = read(sql, schema)
    assert gold.identifying == identifying
    assert gold.lacking >= {("person", "name"), ("person", "code")}


@pytest.mark.parametrize(
    "sql", ["SELECT 3", "SELECT FROM WHERE", "SELECT a FROM elsewhere", "DELETE FROM city"]
)
def test_what_reads_no_known_table_is_no_gold(sql: str, schema: Schema) -> None:
    assert read_gold(sql, schema) is None


def test_a_very_long_query_is_no_gold(schema: Schema) -> None:
    assert read_gold("SELECT name FROM city WHERE id IN (" + ", ".join("1" * 2_000) + ")", schema) is None


@pytest.mark.parametrize(
    ("literal", "alike", "expected"),
    [
        (0, [1, 2], [-1, 1]),
        (3, [0.5, 2.0], [2.0, 2.5, 3.5, 4.0, 2.7, 3.3000000000000003, 2.75, 3.25]),
        ("007", ["003"], ["006", "008"]),
        ("2020-02-29", ["2020-01-01"], ["2020-02-28", "2020-03-01", "2019-02-28", "2021-03-01"]),
        ("2020-02-29 10:00", ["2020-01-01 09:00"], ["2020-02-28 10:00"]),
        ("2020-99-99", ["2020-01-01"], []),
        ("ab", ["x"], ["AB", "abs", "a", "xab"]),
        (2014, ["2013"], ["2013", "2015"]),
        ("17", [3, 4], [16, 18]),
        ("Rome", [3, 4], []),
        (3, [b"x"], []),
    ],
)
def test_values_beside_a_literal_have_the_columns_type_and_format(
    literal: Cell, alike: list[Cell], expected: list[Cell]
) -> None:
    found = near_values(literal, alike)
    assert found[: len(expected)] == expected
    assert expected or not found
    assert literal not in found
    assert {type(value) for value in found} <= {type(value) for value in alike}


def test_a_literal_for_an_empty_column_stays_as_it_is() -> None:
    assert as_column_value("x", []) == "x"
    assert as_column_value(3, [None]) == 3


def test_texts_around_a_pattern_match_it_or_miss_it() -> None:
    texts = matching_texts("Jo%")
    assert "Jo" in texts and "Jox" in texts and "xJo" in texts
    assert matching_texts("%") == ["x", "xy"]


COLUMNS: list[tuple[list[Cell], Cell, Cell]] = [
    (["1997-01-05", "1998-12-31"], "1997-05-01", "1998-01-01"),
    (["2020-01-31 10:00:00", "2021-12-01 09:30:00"], "1997-05-31 23:59:59", "1998-01-01 00:00:00"),
    (["2020-01-31T10:00:00.000Z"], "1997-05-01T00:00:00.000Z", "1998-01-01T00:00:00.000Z"),
    (["3/14/2019", "12/1/2020"], "5/1/1997", "1/1/1998"),
    (["23-OCT-10", "02-MAY-11"], "01-MAY-97", "01-JAN-98"),
    (["March 5, 2019"], "May 1, 1997", "January 1, 1998"),
    ([20190101, 20200229], 19970501, 19980101),
]


@pytest.mark.parametrize(("values", "inside", "beside"), COLUMNS)
def test_dates_are_planted_in_the_columns_own_format(values: list[Cell], inside: Cell, beside: Cell) -> None:
    dates = date_format(values)
    assert dates is not None
    for literal in ("1997", 1997, "1997%", "1997-"):
        exact, near = dates.around(literal, values)
        assert beside in near and date_format([*exact, *near]) == dates
    assert inside in dates.around("1997-05", values)[0]
    for own in values:
        exact, near = dates.around(own, values)
        assert exact == [own] and own not in near and len(near) >= 4
    for text in (
        "%Y-%m",
        "%y",
        "now",
        "-30 days",
        "start of month",
        "9999-99-99",
        "9999-12-31",
        10**30,
        -7.5,
    ):
        assert dates.around(text, values) == ([], [])


@pytest.mark.parametrize(
    ("literal", "met", "missed"),
    [
        (
            "15",
            ["2020-01-31 15:00:00", "2020-01-31 15:59:59"],
            ["2020-01-31 14:59:59", "2020-01-31 16:00:00"],
        ),
        (45, ["2020-01-31 10:45:00"], ["2020-01-31 10:44:59"]),
        ("15:30", ["2020-01-31 15:30:00"], ["2020-01-31 15:30:01"]),
        ("99", [], []),
    ],
)
def test_times_of_day_are_planted_where_the_column_has_times(
    literal: Cell, met: list[Cell], missed: list[Cell]
) -> None:
    values: list[Cell] = ["2020-01-31 10:20:30", "2021-12-01 09:30:00"]
    with_time, without = date_format(values), date_format(["2020-01-31"])
    assert with_time is not None and without is not None
    exact, near = with_time.around(literal, values)
    assert set(met) <= set(exact) and set(missed) <= set(near)
    assert not any("15:" in str(value) for each in without.around(literal, ["2020-01-31"]) for value in each)


def test_literals_that_are_left_out_and_texts_in_one_case_are_read(schema: Schema) -> None:
    gold = read(
        "SELECT lower(name) FROM person WHERE code <> 'p01' AND note NOT IN ('a') AND age > 3", schema
    )
    assert gold.denied == {("person", "code"), ("person", "note")}
    assert gold.cased == {("person", "name")}


def test_months_and_days_of_any_year_are_planted() -> None:
    dates = date_format(["2020-01-31"])
    assert dates is not None
    assert dates.around("05", ["2020-01-31"])[0] == ["2020-05-01", "2020-01-05"]
    assert dates.around("%-31", ["2020-01-31"])[0] == ["2020-01-31"]


def test_a_month_in_the_columns_own_format_is_planted() -> None:
    dates = date_format(["23-OCT-10"])
    assert dates is not None
    exact, near = dates.around("%-MAY-97", ["23-OCT-10"])
    assert (exact, near) == (["01-MAY-97", "31-MAY-97"], ["30-APR-97", "01-JUN-97", "01-MAY-98"])


def test_a_day_in_the_columns_own_format_is_planted_with_hours_of_one_digit() -> None:
    dates = date_format(["8/21/2015 17:03", "8/1/2015 9:05"])
    assert dates is not None
    assert dates.around("8/2/2015%", [])[0] == ["8/2/2015 0:00", "8/2/2015 23:59"]


def test_a_day_is_planted_at_both_ends_of_it_where_the_column_has_times() -> None:
    dates = date_format(["2020-01-31 10:00:00"])
    assert dates is not None
    exact, near = dates.around("2021-03-04", [])
    assert exact == ["2021-03-04 00:00:00", "2021-03-04 23:59:59"]
    assert {"2021-03-03 00:00:00", "2021-03-05 00:00:00"} <= set(near)


@pytest.mark.parametrize(
    "values",
    [[], [5, 6], ["1997", "1998"], [1577836800], ["2020-01-01", "x"], ["2020-13-01"], [20201301], [1.5]],
)
def test_other_columns_hold_no_dates(values: list[Cell]) -> None:
    assert date_format(values) is None
