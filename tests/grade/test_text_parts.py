"""Texts of which a query reads a part, and lists and JSON: the values that are drawn for them."""

import re
from pathlib import Path
from random import Random

import pytest

from tests.databases import make_shop
from text2sql_grpo.grading.gold_query import GoldQuery, read_gold
from text2sql_grpo.grading.near_values import (
    MAX_READ,
    common_parts,
    fitted,
    like_of,
    matching_texts,
    reshaped,
)
from text2sql_grpo.grading.nested import draw_nested, read_nested
from text2sql_grpo.grading.translation import as_sqlite
from text2sql_grpo.sql.schema import read_schema


def read(condition: str, folder: Path, *, dialect: str = "sqlite") -> GoldQuery:
    schema = read_schema(make_shop(folder / "shop.sqlite"))
    gold = read_gold(f"SELECT code FROM person WHERE {condition}", schema, dialect=dialect)
    assert gold is not None
    return gold


@pytest.mark.parametrize(
    ("condition", "dialect", "pattern"),
    [
        ("instr(name, 'an') > 0", "sqlite", "%an%"),
        ("name GLOB '*[0-9]'", "sqlite", "%4"),
        ("starts_with(name, 'An')", "duckdb", "%An%"),
        ("name ILIKE 'an%'", "duckdb", "an%"),
    ],
)
def test_what_a_query_searches_for_is_a_pattern(
    condition: str, dialect: str, pattern: str, tmp_path: Path
) -> None:
    gold = read(condition, tmp_path, dialect=dialect)
    assert pattern in gold.literals["person", "name"]
    assert gold.patterns == {pattern}


def test_a_sign_at_which_a_text_is_cut_is_not_searched_for(tmp_path: Path) -> None:
    gold = read("substr(name, instr(name, ' ') + 1) = 'Lee' AND trim(name) <> ''", tmp_path)
    assert gold.literals == {("person", "name"): ("Lee", "")}
    assert gold.cut == gold.trimmed | {("person", "name")}
    assert not gold.patterns


def test_a_percent_sign_that_is_searched_for_is_no_wildcard(tmp_path: Path) -> None:
    (pattern,) = read("instr(name, '5%') > 0", tmp_path).patterns
    assert matching_texts(pattern)[:2] == ["5%", "x5%"]
    assert matching_texts(like_of("5%?*"))[:2] == ["5%q", "x5%q"]


def test_an_address_keeps_its_sign() -> None:
    known = [f"{name}@{host}" for name in ("ann", "bo") for host in ("mail.com", "uni.ac.uk")]
    common = common_parts(known)
    assert common == {"@": 1}
    drawn = fitted(
        ["uni.ac.uk", "@mail.com", "a@b@c", "xann@mail.com", 5, None], known, common, (), Random(1)
    )
    assert drawn[1:] == ["@mail.com", "xann@mail.com", 5, None]
    assert str(drawn[0]).count("@") == 1 and "uni.ac.uk" in str(drawn[0])


def test_words_get_other_lengths_only_where_known_ones_differ() -> None:
    rng = Random(0)
    codes = {text for _ in range(50) for text in reshaped(["AB-07", "CD-11", "XY-93"], rng)}
    assert all(re.fullmatch(r"(AB|CD|XY)-\d\d", str(code)) for code in codes)
    labels = {text for _ in range(50) for text in reshaped(["Zinc 5 mg", "Iron 400 mg"], rng)}
    assert labels >= {"Zinc 55 mg", "Iron 40 mg"}
    assert all(re.fullmatch(r"(Zinc|Iron) \d+ mg", str(label)) for label in labels)
    names = {text for _ in range(50) for text in reshaped(["Ann Lee", "Bob Ray"], rng)}
    assert any(str(name).count(" ") == 2 for name in names)


def test_long_texts_are_not_taken_apart() -> None:
    long = [f"{'a b ' * MAX_READ}{number}" for number in range(5)]
    assert common_parts(long) == {}
    assert reshaped(long, Random(0)) == []


def test_an_underscore_inside_of_a_word_stands_for_itself() -> None:
    assert matching_texts("%utm_source=%")[0] == "utm_source="
    assert matching_texts("_-_%")[0] == "q-q"


def test_functions_on_texts_are_run_by_the_mirror() -> None:
    query = "SELECT left(a, 2), right(a, 3) FROM t WHERE starts_with(a, 'x') AND contains(a, 'y')"
    assert as_sqlite(query, "duckdb") == (
        "SELECT SUBSTRING(a, 1, 2), SUBSTRING(a, -3) FROM t WHERE (INSTR(a, 'x') = 1) AND (INSTR(a, 'y') > 0)"
    )


def test_lists_and_json_get_values_beside_those_that_are_compared() -> None:
    rng = Random(0)
    json = read_nested(['{"weight": 9.5, "colour": "red", "is_new": true}'])
    drawn = [draw_nested(json, [10], rng).written() for _ in range(200)]
    assert any('"weight": 10.25' in text for text in drawn)
    assert any('"colour": "RED"' in text for text in drawn)
    assert all('"is_new": true' in text or '"is_new": false' in text for text in drawn)
    lists = read_nested(["[eco, new]", "[new, old]"])
    sizes = [len(draw_nested(lists, [7], rng).items) for _ in range(200)]
    assert {6, 7, 8} <= set(sizes)
    maps = read_nested(["{size=L, colour=red}"])
    drawn = [draw_nested(maps, [], rng).written() for _ in range(200)]
    assert any("colour=L" in text for text in drawn)
    streets = read_nested(["{'street': 5 Main St}", "{'street': 12 Oak Ave}"])
    drawn = [draw_nested(streets, ["%Main St"], rng).written() for _ in range(200)]
    assert "{'street': xMain Stx}" in drawn
    assert any(re.search("55 Main|5 Mai S|2 Oak", text) for text in drawn)
    codes = read_nested(["{'code': 0150}", "{'code': 0730}"])  # texts, though they look like numbers
    drawn = [draw_nested(codes, ["0400"], rng).written() for _ in range(200)]
    assert {"{'code': 0400}"} <= set(drawn) and all(len(text) == len("{'code': 0400}") for text in drawn)
    last = [draw_nested(lists, ["eco"], rng).written() for _ in range(200)]
    assert any(re.fullmatch(r"\[(new|old), (new|old), eco\]", text) for text in last)
