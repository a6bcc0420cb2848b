import sqlite3
from contextlib import closing

import pytest

from text2sql_grpo.sql.names import quote_name


@pytest.mark.parametrize(
    "name", ["ward", "Ward_2", "_x", "name", "date", "year", "key", "desc", "value", "count", "total", "text"]
)
def test_name_that_needs_no_quotes(name: str) -> None:
    assert quote_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["order", "Group", "select", "table", "null", "case", "2nd", "", "unit price", 'a"b', "a-b", "straße",
     "a;b", "current_date", "default", "index", "values", "x\n", "sqlite_x", "raise", "a(b"],
)  # fmt: skip
def test_name_that_needs_quotes(name: str) -> None:
    assert quote_name(name) == '"' + name.replace('"', '""') + '"'


def test_duckdb_is_asked_for_its_keywords() -> None:
    duckdb = pytest.importorskip("duckdb", reason="needs the package duckdb")
    with closing(duckdb.connect()) as connection:
        query = "SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category <> 'unreserved'"
        words = {word for (word,) in connection.execute(query).fetchall()}

        assert len(words) > 100
        assert all(quote_name(word, "duckdb") == f'"{word}"' for word in words)
        for name in ("ward", "Ward", "_x", "date", "year", "key", "value", "count", "index", "text", "a b"):
            sql = quote_name(name, "duckdb")
            connection.execute(f"CREATE TABLE {sql} ({sql} INTEGER)")
            assert connection.execute(f"SELECT {sql} FROM {sql}").description[0][0] == name
            connection.execute(f"DROP TABLE {sql}")


def test_postgresql_folds_bare_names() -> None:
    assert quote_name("Ward", "postgresql") == '"Ward"'
    assert quote_name("ward", "postgresql") == "ward"
    assert quote_name("user", "postgresql") == '"user"'
    assert quote_name("Ward", "duckdb") == "Ward"


def test_a_bare_name_is_read_by_sqlite_as_itself() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        for name in ("ward", "key", "order", "a b", 'a"b'):
            connection.execute(f"CREATE TABLE {quote_name(name)} (x)")
            query = "SELECT count(*) FROM sqlite_master WHERE name = ?"
            assert connection.execute(query, (name,)).fetchone() == (1,)
