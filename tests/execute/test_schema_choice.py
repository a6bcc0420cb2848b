"""Prompts over schemas that are too long: the tables for the question, and the names of others."""

import time
from pathlib import Path

import pytest

from tests.databases import sqlite_file
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.evaluation.bench import Asked, Environment
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.sql.schema import Schema, read_schema
from text2sql_grpo.sql.schema_choice import table_choice
from text2sql_grpo.sql.schema_text import estimated_tokens, schema_text

KINDS = ("compact", "ddl", "commented_ddl", "m_schema")
FILLER = [
    f"CREATE TABLE stg_{n:03}_ledger (id INTEGER, amount_{n} REAL, note TEXT, day DATE);" for n in range(200)
]
SCRIPT = "\n".join(
    [
        *FILLER[:100],
        "CREATE TABLE OrderItems (order_id INTEGER REFERENCES purchase, n INTEGER,"
        " product_id INTEGER REFERENCES product);",
        "CREATE TABLE product (id INTEGER PRIMARY KEY, label TEXT, colour TEXT);",
        "CREATE TABLE purchase (id INTEGER PRIMARY KEY, customer TEXT, day DATE);",
        "INSERT INTO product VALUES (1, 'Zanzibar', 'red');",
        "CREATE VIEW colours AS SELECT colour, count(*) AS n FROM product GROUP BY colour;",
        *FILLER[100:],
    ]
)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sqlite_file(tmp_path_factory.mktemp("large") / "large.sqlite", SCRIPT)


@pytest.fixture(scope="module")
def schema(path: Path) -> Schema:
    return read_schema(path)


def test_tables_that_share_words_with_the_question_come_first_with_their_neighbours(schema: Schema) -> None:
    choice = table_choice(schema, "ddl", max_tokens=400, count_tokens=estimated_tokens)
    assert choice is not None
    names = [relation.name for relation in schema.relations]

    def best(question: str, n: int) -> set[str]:
        return {names[place] for place in choice.ranked(question)[:n]}

    assert best("How many products are there?", 2) == {"product", "OrderItems"}
    assert best("Which customers bought the most order items?", 2) == {"OrderItems", "purchase"}
    assert "product" in best("Who bought a Zanzibar?", 1)  # a stored value
    assert best("Which colors are there? List the colours.", 1) == {"colours"}
    assert best("What is amount 42?", 1) == {"stg_042_ledger"}
    assert sorted(choice.ranked("?")) == list(range(len(names)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_tokens", [120, 400, 2_000])
def test_text_keeps_its_budget_and_says_how_to_see_more(schema: Schema, kind: str, max_tokens: int) -> None:
    choice = table_choice(schema, kind, max_tokens=max_tokens, count_tokens=estimated_tokens)  # type: ignore[arg-type]
    assert choice is not None
    text = choice.text("Which customers bought red products?")
    assert text == choice.text("Which customers bought red products?")
    assert text and "colour" in text and estimated_tokens(text) <= max_tokens
    assert "other tables, whose columns PRAGMA table_info(name) lists" in text.split("\n")[-1]
    assert len(text) > 2.5 * max_tokens, "the budget is used"


def test_schema_that_fits_is_shown_as_before(schema: Schema) -> None:
    n = estimated_tokens(schema_text(schema, "ddl"))
    assert table_choice(schema, "ddl", max_tokens=n, count_tokens=estimated_tokens) is None
    assert table_choice(schema, "ddl", max_tokens=None, count_tokens=estimated_tokens) is None
    one = Schema(schema.tables[:1])
    assert table_choice(one, "ddl", max_tokens=5, count_tokens=estimated_tokens) is None


def test_choice_takes_milliseconds(schema: Schema) -> None:
    choice = table_choice(schema, "ddl", max_tokens=1_000, count_tokens=estimated_tokens)
    assert choice is not None
    started = time.process_time()
    for n in range(20):
        choice.text(f"Which customers bought {n} red products with order items and a note of a day?")
    assert (time.process_time() - started) / 20 < 0.02


def test_prompts_of_a_run_show_the_tables_for_their_question(path: Path) -> None:
    with Environment(path, max_schema_tokens=300) as environment:
        prompts = [
            environment.sessions.session(Example("q", "large", question, "")).start()[-1]["content"]
            for question in ("Which products are red?", "What is amount 42?")
        ]
        assert "CREATE TABLE product" in prompts[0] and "amount_42" not in prompts[0]
        assert "amount_42" in prompts[1]
        with SQLExecutor(workers=1) as executor:
            assert len(executor.execute(path, "PRAGMA table_info(stg_042_ledger)").rows) == 4
    with Environment(path) as environment:
        assert len(environment.sessions.schema_text("large", "What?")) > 10_000


def test_message_names_the_field_that_shortens_a_prompt() -> None:
    episode = Episode(Example("q", "large", "What?", ""))
    for reason, field in (("context", "environment.max_schema_tokens"), ("budget", "max_episode_tokens")):
        episode.stop_reason = reason  # type: ignore[assignment]
        assert field in Asked(episode, None).failure
