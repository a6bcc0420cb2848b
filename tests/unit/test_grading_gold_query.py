import pytest

from tests.shop_database import make_shop
from text2sql_grpo.grading.gold_query import GoldQuery, read_gold
from text2sql_grpo.grading.near_values import matching_texts
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


def test_arguments_of_functions_are_no_values_of_a_column_and_constants_are_computed(schema: Schema) -> None:
    gold = read(
        "SELECT code FROM person WHERE strftime('%Y', joined) = '1997' AND substr(joined, 1, 4) <> '1998' "
        "AND joined > date('2020-01-31', '+1 day') AND julianday('now', '-30 days') > 3 "
        "AND coalesce(note, 'none') <> 'x' AND age > -5",
        schema,
    )
    assert {column: set(values) for column, values in gold.literals.items()} == {
        ("person", "joined"): {"1997", "1998", "2020-02-01"},
        ("person", "note"): {"none", "x"},
        ("person", "age"): {-5},
    }


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
    "sql", ["SELECT 3", "SELECT FROM WHERE", "SELECT a FROM elsewhere", "DELETE FROM city"]
)
def test_what_reads_no_known_table_is_no_gold(sql: str, schema: Schema) -> None:
    assert read_gold(sql, schema) is None


def test_a_very_long_query_is_no_gold(schema: Schema) -> None:
    assert read_gold("SELECT name FROM city WHERE id IN (" + ", ".join("1" * 2_000) + ")", schema) is None
