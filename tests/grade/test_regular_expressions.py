"""Texts that are drawn for the regular expressions of a query."""

import re
from pathlib import Path
from random import Random

import pytest

from tests.databases import make_shop
from text2sql_grpo.grading.gold_query import read_gold
from text2sql_grpo.grading.query_values import MAX_EXPRESSION
from text2sql_grpo.grading.regular_expressions import MAX_STEPS, texts_around
from text2sql_grpo.sql.schema import read_schema


@pytest.mark.parametrize(
    ("query", "dialect", "expression"),
    [
        ("SELECT code FROM person WHERE regexp_matches(name, '^[A-C]n{2}')", "duckdb", "^[A-C]n{2}"),
        ("SELECT regexp_extract(name, '[[:digit:]]+') FROM person", "duckdb", r"[\d]+"),
        ("SELECT regexp_replace(name, 'x', '') FROM person", "postgres", "x"),
        ("SELECT code FROM person WHERE name ~ '(ab|cd)x'", "postgres", "(ab|cd)x"),
        ("SELECT code FROM person WHERE name SIMILAR TO 'a_%'", "postgres", "^(?:a..*)$"),
        ("SELECT code FROM person WHERE name REGEXP 'x$'", "sqlite", "x$"),
    ],
)
def test_the_expressions_of_a_query(query: str, dialect: str, expression: str, tmp_path: Path) -> None:
    gold = read_gold(query, read_schema(make_shop(tmp_path / "shop.sqlite")), dialect=dialect)
    assert gold is not None
    assert gold.expressions == {("person", "name"): (expression,)}


@pytest.mark.parametrize(
    ("expression", "known"),
    [
        (r"^\d{3}-\d+$", ["123-4", "x"]),
        (r"utm=([^&]+)", ["https://a.io/?utm=news&x=1", "https://b.io"]),
        (r"\.(pdf|docx?)$", ["a.pdf", "b.txt"]),
        ("^(?:ab)?c", []),
        (r"(?i)^[a-d]\w*@x", ["ann@x.de", "zo@x.de"]),
        (r"^[^\W\d_]+[\s.-][\dx]$", ["ab 1", "9-7"]),
    ],
)
def test_drawn_texts_match_and_others_are_next_to_them(expression: str, known: list[str]) -> None:
    rng = Random(0)
    drawn = [texts_around(expression, known, rng) for _ in range(40)]
    matching = {str(text) for exact, _ in drawn for text in exact}
    assert len(matching) > 1
    assert all(re.search(expression, text) for text in matching)
    near = {str(text) for _, beside in drawn for text in beside}
    assert any(not re.search(expression, text) for text in near)


def test_what_surrounds_a_part_stays_and_a_form_of_all_texts_is_kept() -> None:
    rng = Random(0)
    drawn = [texts_around(r"-(\d+)-", ["MOV-2012-1", "SER-7-1"], rng) for _ in range(40)]
    texts = {str(text) for exact, near in drawn for text in (*exact, *near)}
    assert all(re.fullmatch(r"(MOV|SER).?-\d+-.?1", text) for text in texts)
    assert len(texts) > 20


@pytest.mark.parametrize(
    "expression",
    [
        *("[", "\\", "(a{1000}){1000}", "((){1000}){1000}", "(" * 80 + ")" * 80, "(?P<a>x)(?P=b)", "a{9,2}"),
        *("a|(((){1000}){1000}){1000}", "(?=(((a?){1000}){1000}){1000})a"),
        "(a)(?(1)(((){1000}){1000}){1000}|b)",
    ],
)
def test_an_expression_that_is_not_read_or_too_long_draws_nothing(expression: str) -> None:
    exact, near = texts_around(expression, ["a"], Random(0))
    assert all(len(str(text)) <= MAX_STEPS for text in (*exact, *near))


def test_an_expression_that_backtracks_without_end_is_left() -> None:
    expression = "(a|a|aa)+(b|b)+(a|aa)+$"
    assert len(expression) < MAX_EXPRESSION
    assert texts_around(expression, ["a" * 290 + "c"] * 40, Random(0)) == ([], [])
