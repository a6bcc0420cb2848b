import logging
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.schema import MAX_COUNTED_ROWS, Column, ForeignKey, read_schema
from text2sql_grpo.sql.schema_text import compact_text, ddl_text

SCRIPT = '''
CREATE TABLE staff (id INTEGER PRIMARY KEY, name TEXT NOT NULL, boss INTEGER REFERENCES staff);
CREATE TABLE ward (hospital TEXT, code TEXT, PRIMARY KEY (hospital, code));
CREATE TABLE "order" (
  "unit price" DECIMAL(8, 2), STAFF_ID INTEGER, hospital TEXT, code TEXT, untyped, "say ""hi""" TEXT,
  FOREIGN KEY (staff_id) REFERENCES Staff (ID),
  FOREIGN KEY (hospital, code) REFERENCES ward
);
CREATE TABLE lost (gone_id INTEGER REFERENCES gone, twice INTEGER GENERATED ALWAYS AS (gone_id * 2));
CREATE VIEW seen AS SELECT id, name AS person, 'hidden value' AS note FROM staff;
INSERT INTO staff VALUES (1, 'secret value', NULL), (2, 'other', 1);
'''


def make(path: Path, script: str) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)
    return path


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return make(tmp_path / "clinic.sqlite", SCRIPT)


def test_tables_and_views_are_read_in_order_of_creation(database: Path) -> None:
    schema = read_schema(database)

    assert (schema.name, schema.dialect) == ("clinic", "sqlite")
    assert [(table.name, table.n_rows) for table in schema.tables] == [
        ("staff", 2),
        ("ward", 0),
        ("order", 0),
        ("lost", 0),
    ]
    (seen,) = schema.views
    assert seen.name == "seen"
    assert [(column.name, column.type) for column in seen.columns] == [
        ("id", "INTEGER"),
        ("person", "TEXT"),
        ("note", ""),
    ]
    assert all(column.examples == () for column in seen.columns)


def test_columns_and_keys(database: Path) -> None:
    staff, ward, order, lost = read_schema(database).tables

    assert staff.columns == (
        Column("id", "INTEGER", is_nullable=False, is_primary_key=True, examples=(1, 2)),
        Column("name", "TEXT", False, False, examples=("secret value", "other")),
        Column("boss", "INTEGER", is_nullable=True, is_primary_key=False, examples=(1,)),
    )
    assert staff.foreign_keys == (ForeignKey(("boss",), "staff", ("id",)),)
    assert [column.is_primary_key for column in ward.columns] == [True, True]
    assert order.foreign_keys == (
        ForeignKey(("STAFF_ID",), "staff", ("id",)),
        ForeignKey(("hospital", "code"), "ward", ("hospital", "code")),
    )
    assert lost.foreign_keys == (ForeignKey(("gone_id",), "gone", ()),)
    assert [column.name for column in lost.columns] == ["gone_id", "twice"]


def test_ddl_text_makes_the_same_schema(database: Path, tmp_path: Path) -> None:
    schema = read_schema(database)
    copy = read_schema(make(tmp_path / "copy.sqlite", ddl_text(schema)))

    assert compact_text(copy) + "\nview seen.id, seen.person, seen.note" == compact_text(schema)
    assert ddl_text(schema).startswith(ddl_text(copy))


def test_comments_in_the_stored_statement(tmp_path: Path) -> None:
    path = make(
        tmp_path / "notes.sqlite",
        """CREATE TABLE "visit" ( -- who came,  and when
  id INTEGER PRIMARY KEY, -- number of the visit
  "unit price" DECIMAL(8, 2), --in EUR
  [Day] TEXT DEFAULT '--', -- not read, for the line holds a string
  a INTEGER, b INTEGER, -- not read, for the line holds two columns
  `last` TEXT CHECK (length(last) < 9) -- as the patient says it\tto us
);
CREATE TABLE one (x INTEGER -- just x
);
CREATE TABLE none (y INTEGER)""",
    )
    visit, one, none = read_schema(path).tables

    assert visit.comment == "who came, and when"
    assert {column.name: column.comment for column in visit.columns} == {
        "id": "number of the visit",
        "unit price": "in EUR",
        "Day": "",
        "a": "",
        "b": "",
        "last": "as the patient says it to us",
    }
    assert (one.comment, one.columns[0].comment) == ("", "just x")
    assert (none.comment, none.columns[0].comment) == ("", "")


def test_birds_descriptions_are_comments_of_columns_without_one(tmp_path: Path) -> None:
    file, folder = tmp_path / "shop.sqlite", tmp_path / "database_description"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript("CREATE TABLE Goods (id INTEGER, -- own comment\n Kind TEXT, w REAL, z)")
    plain = read_schema(file)
    folder.mkdir()
    header = "original_column_name,column_name,column_description,data_format,value_description"
    lines = [
        header, "id,,number of goods,integer,", 'KIND ,,"kind\nof goods",text,A: caf\xe9',
        "w,weight in kg,,real,", "old,,gone,text,",
    ]  # fmt: skip
    (folder / "goods.csv").write_bytes("\r\n".join(lines).encode("latin-1"))

    columns = read_schema(file).tables[0].columns

    assert [column.comment for column in columns] == [
        "own comment", "kind of goods; A: caf\ufffd", "weight in kg", "",
    ]  # fmt: skip
    assert compact_text(plain) == compact_text(read_schema(file))
    (folder / "goods.csv").write_text('"' + "a" * 200_000)
    with pytest.raises(DataError, match=r"cannot read the descriptions: field larger .*goods\.csv"):
        read_schema(file)


def test_tables_behind_a_full_text_table_are_left_out(tmp_path: Path) -> None:
    try:
        path = make(
            tmp_path / "text.sqlite",
            "CREATE VIRTUAL TABLE page USING fts5(body); CREATE TABLE page_reader (name TEXT);"
            "INSERT INTO page VALUES ('a')",
        )
    except sqlite3.OperationalError as error:
        pytest.skip(f"this SQLite has no fts5: {error}")
    if sqlite3.sqlite_version_info < (3, 37):
        pytest.skip("this SQLite does not tell which tables are behind others")

    assert compact_text(read_schema(path)) == "table page.body\ntable page_reader.name"


def test_view_that_no_query_can_read_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make(
        tmp_path / "old.sqlite",
        "CREATE TABLE a (x); CREATE TABLE b (x); CREATE VIEW broken AS SELECT x FROM b;"
        "CREATE VIEW sound AS SELECT x FROM a; DROP TABLE b",
    )
    with caplog.at_level(logging.WARNING):
        schema = read_schema(path)

    assert [view.name for view in schema.views] == ["sound"]
    assert "broken" in caplog.text


def test_virtual_table_without_its_module_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make(tmp_path / "vectors.sqlite", "CREATE TABLE a (x); CREATE TABLE v (x);")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA writable_schema = ON")
        virtual = "CREATE VIRTUAL TABLE v USING vec0(x)"
        connection.execute("UPDATE sqlite_master SET rootpage = 0, sql = ? WHERE name = 'v'", [virtual])
    with caplog.at_level(logging.WARNING):
        assert compact_text(read_schema(path)) == "table a.x"
    assert "v is left out of the schema" in caplog.text and "no such module: vec0" in caplog.text


def test_rows_are_counted_up_to_a_limit(tmp_path: Path) -> None:
    numbers = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {}) SELECT i FROM n"
    path = make(
        tmp_path / "many.sqlite",
        f"CREATE TABLE many (x); INSERT INTO many {numbers.format(MAX_COUNTED_ROWS + 5)};"
        f"CREATE TABLE full (x); INSERT INTO full {numbers.format(MAX_COUNTED_ROWS)};",
    )
    many, full = read_schema(path).tables

    assert (many.n_rows, many.has_more_rows) == (MAX_COUNTED_ROWS, True)
    assert (full.n_rows, full.has_more_rows) == (MAX_COUNTED_ROWS, False)


def test_examples_come_from_the_first_rows_only(tmp_path: Path) -> None:
    path = make(
        tmp_path / "late.sqlite",
        "CREATE TABLE t (early, late);"
        "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1100)"
        "INSERT INTO t SELECT 1, iif(i > 1000, i, NULL) FROM n",
    )
    early, late = read_schema(path).tables[0].columns

    assert (early.examples, late.examples) == ((1,), ())


def test_odd_values_are_no_examples(tmp_path: Path) -> None:
    path = make(
        tmp_path / "odd.sqlite",
        "CREATE TABLE t (bytes, huge, text);"
        "INSERT INTO t VALUES (zeroblob(9000000), 9e999, CAST(x'ff' AS TEXT)), (x'00', -9e999, ' '), "
        "(NULL, 1.5, char(10) || 'two lines'), (NULL, NULL, 'O''Hara')",
    )
    columns = read_schema(path).tables[0].columns

    assert [column.examples for column in columns] == [(), (1.5,), ("O'Hara",)]


@pytest.mark.thorough
def test_reading_stops_at_the_time_limit(tmp_path: Path) -> None:
    path = make(
        tmp_path / "many.sqlite", ";".join(f"CREATE TABLE t{number} (x INTEGER)" for number in range(400))
    )
    with pytest.raises(DataError, match=r"schema of .*many\.sqlite took longer than 0\.001 s"):
        read_schema(path, timeout_s=0.001)


def test_the_file_and_its_folder_stay_as_they_were(database: Path) -> None:
    before = database.read_bytes()
    read_schema(database)

    assert database.read_bytes() == before
    assert [path.name for path in database.parent.iterdir()] == ["clinic.sqlite"]


def test_generated_columns_and_unique_keys(tmp_path: Path) -> None:
    path = make(
        tmp_path / "shop.sqlite",
        """
        CREATE TABLE line (number INTEGER, bill INTEGER, code TEXT UNIQUE, price DECIMAL(12, 2), n INTEGER,
            total DECIMAL(12, 2) GENERATED ALWAYS AS (price * n), twice AS (n * 2) STORED,
            PRIMARY KEY (bill, number), UNIQUE (price, n));
        CREATE UNIQUE INDEX paid ON line (total);
        CREATE UNIQUE INDEX partly ON line (n) WHERE price > 0;
        CREATE UNIQUE INDEX folded ON line (lower(code), n);
        CREATE TABLE loose (x TEXT);
        """,
    )
    line, loose = read_schema(path).tables

    assert [column.name for column in line.columns if column.is_generated] == ["total", "twice"]
    assert line.keys == (("bill", "number"), ("code",), ("price", "n"), ("total",))
    assert loose.keys == () and all(column.cast_type == column.type for column in line.columns)
