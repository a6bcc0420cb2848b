"""`data.hide` in a run: prompts, observations, golds, and the line in the log."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.databases import duckdb_file, sqlite_file
from text2sql_grpo.config import MCPConfig, load_config
from text2sql_grpo.errors import ArgumentError, ConfigError, DataError
from text2sql_grpo.evaluation.bench import Environment
from text2sql_grpo.sql import Limits

SCRIPT = """
CREATE TABLE customer (id INTEGER PRIMARY KEY, name TEXT, email TEXT);
CREATE TABLE audit_log (entry TEXT);
INSERT INTO customer VALUES (1, 'Ann', 'ann@a.org');
INSERT INTO audit_log VALUES ('late');
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return sqlite_file(tmp_path / "shop.sqlite", SCRIPT)


def questions(path: Path, *golds: str, **fields: str) -> Path:
    rows = [{"id": f"q{i}", "question": "Which?", "gold_sql": gold, **fields} for i, gold in enumerate(golds)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_personal_data_is_hidden_by_default_and_logged_once(
    shop: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Environment(shop) as environment:
        (example,) = environment.examples(questions(tmp_path / "q.jsonl", "SELECT name FROM customer"))
        session = environment.sessions.session(example)
        prompt = session.start()[-1]["content"]
        assert "name" in prompt and "audit_log" in prompt and "email" not in prompt
        replies = [
            session.step(f"<sql>{sql}</sql>") for sql in ("SELECT * FROM customer", "SELECT id FROM customer")
        ]
    assert [reply and reply["content"].split("\n")[0] for reply in replies] == [
        "Error: customer has hidden columns: name the columns that you need, not *",
        "id",
    ]
    assert (
        caplog.text.count("hidden from the model in shop: customer.email (data.hide; [] hides nothing)") == 1
    )


@pytest.mark.parametrize("field", ["gold_sql", "look_sql"])
def test_golds_that_read_hidden_columns_are_refused_with_their_line(
    shop: Path, tmp_path: Path, field: str
) -> None:
    path = questions(tmp_path / "q.jsonl", "SELECT name FROM customer")
    row = {
        "id": "r",
        "question": "Which?",
        "gold_sql": "SELECT id FROM customer",
        field: "SELECT email FROM customer",
    }
    path.write_text(path.read_text() + "\n" + json.dumps(row))
    with Environment(shop) as environment, pytest.raises(DataError) as caught:
        environment.examples(path)
    assert "data.hide" in str(caught.value) and f"(at {path}:2)" in str(caught.value)
    with Environment(shop, hide=[]) as environment:
        assert len(environment.examples(path)) == 2
        assert "email" in environment.sessions.schema_text("shop")


def test_functions_of_the_database_are_refused_whatever_the_limits(tmp_path: Path) -> None:
    pytest.importorskip("duckdb", reason="needs the package duckdb")
    macros = [f"CREATE MACRO m{n}() AS (SELECT max(email) FROM customer);" for n in range(3)]
    url = duckdb_file(tmp_path / "shop.duckdb", SCRIPT + "".join(macros))
    with Environment(url, limits=Limits(max_rows=1)) as environment:
        (name,) = environment.databases.names()
        for n in range(3):
            assert environment.sessions.hidden(name).refusal(f"SELECT m{n}()")
        assert not environment.sessions.hidden(name).refusal("SELECT max(name) FROM customer")


def test_pattern_that_hides_nothing_is_logged(shop: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Environment(shop, hide=["audit_log", "custmer.*"]) as environment:
        assert "audit_log" not in environment.sessions.schema_text("shop")
    assert "data.hide: no table or column is named custmer.*" in caplog.text


def test_tools_of_a_server_are_refused_where_something_is_hidden(shop: Path, repo_root: Path) -> None:
    pytest.importorskip("mcp", reason="needs the package mcp")
    server = MCPConfig(command="python tests/mcp_server.py {database}")
    with Environment(shop, mcp=server) as environment, pytest.raises(ConfigError, match=r"customer\.email"):
        environment.sessions.backend("shop")


@pytest.mark.parametrize("hide", ["customer.name", None, [1]])
def test_patterns_must_be_a_list(hide: Any, shop: Path) -> None:
    with pytest.raises(ArgumentError, match="hide"):
        Environment(shop, hide=hide)


def test_config_holds_patterns(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: m}\ndata: {databases: d, train: t, hide: [personal, 'staff.*']}\n")
    assert load_config(path).data.hide == ["personal", "staff.*"]
    assert load_config(path, ["--data.hide", "[]"]).data.hide == []


def test_a_gold_that_fails_is_no_matter_of_hidden_columns(shop: Path, tmp_path: Path) -> None:
    path = questions(tmp_path / "q.jsonl", "SELECT name FROM customers")
    with (
        Environment(shop) as environment,
        pytest.raises(DataError, match="no such table: customers") as caught,
    ):
        environment.examples(path)
    assert "data.hide" not in str(caught.value)
