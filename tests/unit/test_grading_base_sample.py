import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.shop_database import make_shop
from text2sql_grpo.errors import DataError
from text2sql_grpo.grading.base_sample import Reference, read_sample, with_links


def test_keys_references_and_columns_are_read(tmp_path: Path) -> None:
    base = read_sample(make_shop(tmp_path / "shop.sqlite"))
    assert set(base.tables["city"].keys) == {(0,), (1,)}
    assert base.tables["friend"].keys == ((0, 1),)
    assert base.tables["person"].references == (Reference((3,), "city", ("id",)),)
    assert base.tables["visit"].columns == (
        "n",
        "person",
        "paid",
        "kind",
    )  # the generated one cannot be written
    assert len(base.tables["visit"].rows) == 30
    names = list(base.tables)
    assert names.index("city") < names.index("person") < names.index("friend")
    assert any(statement.startswith("CREATE VIEW") for statement in base.statements)


def test_text_that_is_not_utf8_is_read(tmp_path: Path) -> None:
    path = make_shop(tmp_path / "shop.sqlite")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE city SET name = CAST(x'436166e9' AS TEXT) WHERE id = 1")
    assert read_sample(path).tables["city"].values(1)[0] == "Caf\ufffd"


def test_null_is_allowed_only_where_it_occurs(tmp_path: Path) -> None:
    base = read_sample(make_shop(tmp_path / "shop.sqlite"))
    person = base.tables["person"]
    assert {person.columns[position] for position in person.nullable} == {"note"}


def test_a_foreign_key_that_rows_break_is_none(tmp_path: Path) -> None:
    path = make_shop(tmp_path / "shop.sqlite")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE person SET city = 99 WHERE code = 'p03'")
    assert read_sample(path).tables["person"].references == ()


def test_a_link_that_holds_like_a_foreign_key_becomes_a_reference(tmp_path: Path) -> None:
    path = make_shop(tmp_path / "shop.sqlite")
    base = read_sample(path)
    link = (("person", "code"), ("visit", "person"))
    linked = with_links(base, path, [link, (("person", "note"), ("city", "name"))])
    assert linked.tables["visit"].references == (Reference((1,), "person", ("code",)),)
    assert linked.tables["person"].references == base.tables["person"].references
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE visit SET person = 'stranger' WHERE n = 3")
    assert with_links(read_sample(path), path, [link]).tables["visit"].references == ()


def test_references_in_a_circle_are_read(tmp_path: Path) -> None:
    path = tmp_path / "circle.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(
            "CREATE TABLE a (id INTEGER PRIMARY KEY, b INT REFERENCES b (id));"
            "CREATE TABLE b (id INTEGER PRIMARY KEY, a INT REFERENCES a);"
            "INSERT INTO a VALUES (1, 2); INSERT INTO b VALUES (2, 1);"
        )
    base = read_sample(path)
    assert set(base.tables) == {"a", "b"}
    assert base.tables["b"].references == (Reference((1,), "a", ("id",)),)


def test_a_missing_file_is_our_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent"):
        read_sample(tmp_path / "absent.sqlite")
