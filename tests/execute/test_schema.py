import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.schema import Schema, read_schema
from text2sql_grpo.sql.schema_text import SchemaText, schema_text


def test_broken_database(tmp_path: Path) -> None:
    path = tmp_path / "bad.sqlite"
    path.write_text("no database")

    with pytest.raises(DataError, match=r"bad\.sqlite"):
        read_schema(path)


def test_missing_database(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.sqlite"):
        read_schema(tmp_path / "gone.sqlite")


def check_texts(schema: Schema) -> None:
    """Both kinds of SQL run, and say the same tables, columns and keys as the schema."""
    kinds: tuple[SchemaText, ...] = ("ddl", "commented_ddl")
    for kind in kinds:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.executescript(schema_text(schema, kind))
            for table in schema.tables:
                query = "SELECT name, pk FROM pragma_table_info(?)"
                found = connection.execute(query, (table.name,)).fetchall()
                assert found and [name for name, _ in found] == [column.name for column in table.columns]
                assert [pk > 0 for _, pk in found] == [column.is_primary_key for column in table.columns]
                keys = "SELECT count(*) FROM pragma_foreign_key_list(?)"
                (n_parts,) = connection.execute(keys, (table.name,)).fetchone()
                assert n_parts == sum(len(key.columns) for key in table.foreign_keys)
    full = schema_text(schema, "m_schema")
    short = schema_text(schema, "m_schema", max_tokens=150)
    assert len(short) <= 600 and (short == full or "Left out to save space" in short)


def test_texts_of_the_bundled_databases(repo_root: Path) -> None:
    databases = Databases(repo_root / "data" / "databases")
    assert len(databases.names()) == 18
    for name in databases.names():
        check_texts(read_schema(databases.address(name)))


def test_texts_of_the_spider_databases(shared_data: Path) -> None:
    databases = Databases(shared_data / "spider" / "database")
    assert len(databases.names()) == 157
    for name in databases.names():
        check_texts(read_schema(databases.address(name)))
