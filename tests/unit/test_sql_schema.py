import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.schema import Column, ForeignKey, compact_text, ddl_text, quote_name, read_schema

SCRIPT = '''
CREATE TABLE staff (id INTEGER PRIMARY KEY, name TEXT NOT NULL, boss INTEGER REFERENCES staff);
CREATE TABLE ward (hospital TEXT, code TEXT, PRIMARY KEY (hospital, code));
CREATE TABLE "order" (
  "unit price" DECIMAL(8, 2), STAFF_ID INTEGER, hospital TEXT, code TEXT, untyped, "say ""hi""" TEXT,
  FOREIGN KEY (staff_id) REFERENCES Staff (ID),
  FOREIGN KEY (hospital, code) REFERENCES ward
);
CREATE TABLE lost (gone_id INTEGER REFERENCES gone, twice INTEGER GENERATED ALWAYS AS (gone_id * 2));
CREATE VIEW seen AS SELECT * FROM staff;
INSERT INTO staff VALUES (1, 'secret value', NULL), (2, 'other', 1);
'''


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "clinic.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCRIPT)
    return path


def test_tables_are_read_in_order_of_creation(database: Path) -> None:
    schema = read_schema(database)

    assert [(table.name, table.n_rows) for table in schema.tables] == [
        ("staff", 2),
        ("ward", 0),
        ("order", 0),
        ("lost", 0),
    ]


def test_columns_and_keys(database: Path) -> None:
    staff, ward, order, lost = read_schema(database).tables

    assert staff.columns == (
        Column("id", "INTEGER", is_nullable=False, is_primary_key=True),
        Column("name", "TEXT", is_nullable=False, is_primary_key=False),
        Column("boss", "INTEGER", is_nullable=True, is_primary_key=False),
    )
    assert staff.foreign_keys == (ForeignKey(("boss",), "staff", ("id",)),)
    assert [column.is_primary_key for column in ward.columns] == [True, True]
    assert order.foreign_keys == (
        ForeignKey(("STAFF_ID",), "staff", ("id",)),
        ForeignKey(("hospital", "code"), "ward", ("hospital", "code")),
    )
    assert lost.foreign_keys == (ForeignKey(("gone_id",), "gone", ()),)
    assert [column.name for column in lost.columns] == ["gone_id", "twice"]


def test_compact_text(database: Path) -> None:
    assert compact_text(read_schema(database)) == (
        "table staff: id, name, boss = staff.id\n"
        "table ward: hospital, code\n"
        'table "order": "unit price", STAFF_ID = staff.id, hospital = ward, code = ward, '
        'untyped, "say ""hi"""\n'
        "table lost: gone_id = gone, twice"
    )


def test_ddl_text(database: Path) -> None:
    text = ddl_text(read_schema(database))

    assert text.split("\n\n")[2] == (
        'CREATE TABLE "order" (\n'
        '  "unit price" DECIMAL(8, 2),\n'
        "  STAFF_ID INTEGER,\n"
        "  hospital TEXT,\n"
        "  code TEXT,\n"
        "  untyped,\n"
        '  "say ""hi""" TEXT,\n'
        "  FOREIGN KEY (STAFF_ID) REFERENCES staff (id),\n"
        "  FOREIGN KEY (hospital, code) REFERENCES ward (hospital, code)\n"
        ");"
    )


def test_ddl_text_makes_the_same_schema(database: Path, tmp_path: Path) -> None:
    schema = read_schema(database)
    copy = tmp_path / "copy.sqlite"
    with closing(sqlite3.connect(copy)) as connection:
        connection.executescript(ddl_text(schema))

    assert compact_text(read_schema(copy)) == compact_text(schema)
    assert ddl_text(read_schema(copy)) == ddl_text(schema)


def test_texts_hold_no_row_values(database: Path) -> None:
    schema = read_schema(database)

    assert "secret" not in ddl_text(schema) + compact_text(schema)


def test_tables_behind_a_full_text_table_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "text.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        try:
            connection.executescript(
                "CREATE VIRTUAL TABLE page USING fts5(body); CREATE TABLE page_reader (name TEXT);"
                "INSERT INTO page VALUES ('a')"
            )
        except sqlite3.OperationalError as error:
            pytest.skip(f"this SQLite has no fts5: {error}")
    if sqlite3.sqlite_version_info < (3, 37):
        pytest.skip("this SQLite does not tell which tables are behind others")

    assert compact_text(read_schema(path)) == "table page: body\ntable page_reader: name"


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


def test_broken_database(tmp_path: Path) -> None:
    path = tmp_path / "bad.sqlite"
    path.write_text("no database")

    with pytest.raises(DataError, match=r"bad\.sqlite"):
        read_schema(path)
