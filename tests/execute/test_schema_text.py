"""Texts of a schema: golden ones, short ones, and the example values in them."""

import sqlite3
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.postgres_server import PostgresServer
from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.schema import Column, ForeignKey, Schema, Table, View, read_schema
from text2sql_grpo.sql.schema_catalogue import EXAMPLE_ROWS, column_examples, one_line
from text2sql_grpo.sql.schema_text import SchemaText, estimated_tokens, schema_text

KINDS: tuple[SchemaText, ...] = ("compact", "ddl", "commented_ddl", "m_schema")

SQLITE_SCRIPT = """
CREATE TABLE staff ( -- people who work here
  id INTEGER PRIMARY KEY, -- badge number
  name VARCHAR(20) NOT NULL,
  boss INTEGER REFERENCES staff,
  born DATE,
  motto TEXT -- on the door
);
CREATE TABLE ward (hospital TEXT, code TEXT, "unit price" DECIMAL(8, 2), PRIMARY KEY (hospital, code));
CREATE TABLE "order" (
  STAFF_ID INTEGER REFERENCES Staff (ID), hospital TEXT, code TEXT, letter TEXT, untyped,
  FOREIGN KEY (hospital, code) REFERENCES ward
);
CREATE VIEW chiefs AS SELECT id, name FROM staff WHERE boss IS NULL;
INSERT INTO staff VALUES (1, 'Ada O''Hara', NULL, '1980-02-03', 'measure twice, then cut once, then measure'),
  (2, 'Bo', 1, '1991-12-01', NULL), (3, 'Cy', 1, NULL, ''), (4, 'Di', 2, NULL, NULL);
INSERT INTO ward VALUES ('North', 'N-1', 12.5), ('North', 'N-2', 8);
INSERT INTO "order" VALUES (1, 'North', 'N-1',
  'A letter that is far too long to be shown as an example here', x'00');
"""

DUCKDB_SCRIPT = """
CREATE TABLE staff (id INTEGER PRIMARY KEY, name VARCHAR NOT NULL, boss INTEGER REFERENCES staff (id),
  mood ENUM ('calm', 'busy'), tags VARCHAR[], salary DECIMAL(8, 2), seen TIMESTAMP, is_chief BOOLEAN);
COMMENT ON TABLE staff IS 'people who
work here';
COMMENT ON COLUMN staff.name IS 'as on the badge';
CREATE SCHEMA billing;
CREATE TABLE billing."Order" ("unit price" DOUBLE, id UUID PRIMARY KEY);
CREATE VIEW chiefs AS SELECT id, name FROM staff;
COMMENT ON VIEW chiefs IS 'without a boss';
COMMENT ON COLUMN chiefs.id IS 'badge number';
INSERT INTO staff VALUES (1, 'Ada', NULL, 'calm', ['a'], 12.50, '2024-01-05 10:00:00', true);
INSERT INTO staff VALUES (2, 'Bo', 1, 'busy', NULL, 8, '2024-01-06 10:00:00', false);
INSERT INTO billing."Order" VALUES (1.5, '00000000-0000-0000-0000-000000000001');
"""

POSTGRES_SCRIPT = """
CREATE TYPE mood AS ENUM ('calm', 'busy');
CREATE TABLE staff (id serial PRIMARY KEY, name varchar(20) NOT NULL, "Boss" integer REFERENCES staff,
  mood mood, tags text[], salary numeric(8, 2), seen timestamptz, is_chief boolean);
COMMENT ON TABLE staff IS 'people who
work here';
COMMENT ON COLUMN staff.name IS 'as on the badge';
CREATE SCHEMA billing;
CREATE TABLE billing."Order" ("unit price" float, id uuid PRIMARY KEY, staff integer REFERENCES staff);
CREATE VIEW chiefs AS SELECT id, name FROM staff;
COMMENT ON VIEW chiefs IS 'without a boss';
COMMENT ON COLUMN chiefs.id IS 'badge number';
INSERT INTO staff (name, "Boss", mood, salary, seen, is_chief) VALUES
  ('Ada', NULL, 'calm', 12.50, '2024-01-05 10:00+02', true), ('Bo', 1, 'busy', 8, '2024-01-06', false);
INSERT INTO billing."Order" VALUES (1.5, '00000000-0000-0000-0000-000000000001', 2);
"""


def golden_text(schema: Schema) -> str:
    """All texts under headings, the last two also as they are when space is short."""
    parts = [f"==== {kind}\n{schema_text(schema, kind)}\n" for kind in KINDS]
    for kind in KINDS[2:]:
        parts.append(f"==== {kind}, 160 tokens\n{schema_text(schema, kind, max_tokens=160)}\n")
    return "\n".join(parts)


def sqlite_clinic(folder: Path) -> Schema:
    path = folder / "clinic.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SQLITE_SCRIPT)
    return read_schema(path)


def test_texts_of_a_sqlite_file(tmp_path: Path, repo_root: Path) -> None:
    golden = repo_root / "tests" / "golden" / "schema_sqlite.txt"

    assert golden_text(sqlite_clinic(tmp_path)) == golden.read_text(encoding="utf-8")


def test_texts_of_a_duckdb_file(tmp_path: Path, repo_root: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="needs the package duckdb")
    with closing(duckdb.connect(str(tmp_path / "clinic.duckdb"))) as connection:
        connection.execute(DUCKDB_SCRIPT)
    golden = repo_root / "tests" / "golden" / "schema_duckdb.txt"

    schema = read_schema(f"duckdb:///{tmp_path / 'clinic.duckdb'}")
    assert golden_text(schema) == golden.read_text(encoding="utf-8")


def test_texts_of_a_postgresql_database(postgres_server: PostgresServer, repo_root: Path) -> None:
    psycopg = pytest.importorskip("psycopg", reason="needs the package psycopg")
    with closing(psycopg.connect(postgres_server.admin_url(), autocommit=True)) as connection:
        connection.execute("DROP DATABASE IF EXISTS clinic WITH (FORCE)")  # of a test that ended
        connection.execute("CREATE DATABASE clinic")
    url = postgres_server.admin_url("clinic")
    with closing(psycopg.connect(url, autocommit=True)) as connection:
        connection.execute(POSTGRES_SCRIPT)
    golden = repo_root / "tests" / "golden" / "schema_postgresql.txt"

    assert golden_text(read_schema(url)) == golden.read_text(encoding="utf-8")
    with closing(psycopg.connect(postgres_server.admin_url(), autocommit=True)) as connection:
        connection.execute("DROP DATABASE clinic")


@pytest.mark.parametrize("kind", ["ddl", "commented_ddl"])
def test_both_kinds_of_ddl_run(tmp_path: Path, kind: SchemaText) -> None:
    schema = sqlite_clinic(tmp_path)
    path = tmp_path / "copy.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(schema_text(schema, kind))
    copy = read_schema(path)

    bare = Schema(schema.tables, name="copy")
    assert schema_text(copy, "compact") == schema_text(bare, "compact")
    assert [(c.name, c.type) for t in copy.tables for c in t.columns] == [
        (c.name, c.type) for t in bare.tables for c in t.columns
    ]


@pytest.mark.parametrize("kind", ["compact", "ddl"])
def test_texts_for_a_model_that_must_look_hold_no_values(tmp_path: Path, kind: SchemaText) -> None:
    text = schema_text(sqlite_clinic(tmp_path), kind)

    assert not [value for value in ("Ada", "1980", "N-1", "North", "badge") if value in text]


def test_names_that_break_lines_stay_inside_comments(tmp_path: Path) -> None:
    path = tmp_path / "odd.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            'CREATE TABLE t ("a\nb" TEXT); CREATE VIEW "v\n; DROP TABLE t; --" AS SELECT * FROM t'
        )
    schema = read_schema(path)
    for kind in KINDS[1:3]:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.executescript(schema_text(schema, kind))
            assert connection.execute("SELECT name FROM pragma_table_info('t')").fetchall() == [("a\nb",)]


def test_empty_schema() -> None:
    assert [schema_text(Schema(()), kind) for kind in KINDS] == ["", "", "", "【DB_ID】 \n【Schema】"]


def test_view_alone() -> None:
    assert schema_text(Schema((), (View("v", ()),)), "compact") == "view v"


KINDS: tuple[SchemaText, ...] = ("compact", "ddl", "commented_ddl", "m_schema")


def column(name: str, *, key: bool = False, comment: str = "", examples: tuple[str, ...] = ()) -> Column:
    return Column(name, "TEXT", not key, key, comment, examples)


WARD = Table(
    "ward",
    (
        column("ward_id", key=True),
        column("title", comment="what people call it", examples=("North", "South")),
        column("floor", examples=("1", "2")),
        column("beds"),
        column("phone"),
    ),
    (),
    2,
    comment="a part of the hospital",
)
VISIT = Table(
    "visit",
    (
        column("visit_id", key=True),
        column("ward_code"),
        column("fee", comment="in EUR", examples=("a", "b")),
        column("paid"),
    ),
    (ForeignKey(("ward_code",), "ward", ("phone",)),),
    9,
)
LOG = Table("log", (column("line"), column("written")), (), 3)
BILLS = View("bills", (column("ward", comment="its title"), column("total"), column("year")))
SCHEMA = Schema((WARD, VISIT, LOG), (BILLS,), name="clinic")


def last_line(kind: SchemaText, max_tokens: int) -> str:
    return schema_text(SCHEMA, kind, max_tokens=max_tokens).split("\n")[-1]


def test_text_that_fits_is_the_full_text() -> None:
    for kind in KINDS:
        full = schema_text(SCHEMA, kind)
        assert schema_text(SCHEMA, kind, max_tokens=estimated_tokens(full)) == full
        assert "Left out" not in full


def body_chars(text: str) -> int:
    """Tokens by which the last line costs nothing, so that each limit shows one more thing left out."""
    lines = text.split("\n")
    is_short = "Left out" in lines[-1]
    return len("\n".join(lines[:-1])) if is_short else len(text)


def test_order_of_what_is_left_out() -> None:
    told: list[str] = []
    for max_tokens in range(body_chars(schema_text(SCHEMA, "commented_ddl")) - 1, -1, -1):
        text = schema_text(SCHEMA, "commented_ddl", max_tokens=max_tokens, count_tokens=body_chars)
        line = text.split("\n")[-1].removeprefix("-- Left out to save space: ")
        if line not in told:
            told.append(line)
    before, columns = "all examples; all comments; ", " columns that are no keys"
    assert told == [
        "examples of visit",
        "all examples",
        "all examples; comments of bills",
        "all examples; comments of visit, bills",
        "all examples; all comments",
        # The longest first, and its last column; `phone` stays, for a foreign key names it.
        f"{before}1 column that is no key (of ward)",
        f"{before}2{columns} (of ward, bills)",
        f"{before}3{columns} (of ward, visit, bills)",
        f"{before}4{columns} (of ward, visit, bills)",
        f"{before}5{columns} (of ward, visit, bills)",
        f"{before}6{columns} (of ward, visit, log, bills)",
        f"{before}7{columns} (of ward, visit, log, bills)",
        f"{before}all 8{columns}",
        f"{before}all 8{columns}; 1 of 4 tables and views: bills",
        f"{before}all 8{columns}; 2 of 4 tables and views: log, bills",
        f"{before}all 8{columns}; 3 of 4 tables and views: visit, log, bills",
        f"{before}all 8{columns}; 4 of 4 tables and views: ward, visit, log, bills",
    ]


def test_keys_stay_longest() -> None:
    text = schema_text(SCHEMA, "compact", max_tokens=115, count_tokens=body_chars)

    assert text == (
        "table ward.ward_id, ward.phone\ntable visit.visit_id, visit.ward_code = ward.phone\ntable log.line\n"
        "view bills.ward\nLeft out to save space: all 8 columns that are no keys"
    )


def test_texts_without_values_have_none_to_leave_out() -> None:
    for kind in KINDS[:2]:
        for max_tokens in range(40, 80):
            assert "examples" not in last_line(kind, max_tokens)


@given(st.sampled_from(KINDS), st.integers(min_value=45, max_value=400))
def test_text_keeps_to_its_limit(kind: SchemaText, max_tokens: int) -> None:
    assert estimated_tokens(schema_text(SCHEMA, kind, max_tokens=max_tokens)) <= max_tokens


def test_tokens_are_counted_as_the_caller_does() -> None:
    text = schema_text(SCHEMA, "compact", max_tokens=300, count_tokens=len)

    assert len(text) <= 300 < len(schema_text(SCHEMA, "compact")) + 300
    assert schema_text(SCHEMA, "compact", max_tokens=30, count_tokens=lambda _: 30) == schema_text(
        SCHEMA, "compact"
    )


def test_many_left_out_tables_are_named_up_to_ten() -> None:
    tables = tuple(Table(f"t{number}", (column("x", key=True),), (), 0) for number in range(50))
    text = schema_text(Schema(tables), "compact", max_tokens=45)

    assert "of 50 tables: t" in text and text.endswith(" more")
    assert text.split("\n")[0] == "table t0.x"


def test_limit_without_room_for_the_last_line() -> None:
    with pytest.raises(DataError, match=r"max_tokens must be >= \d+, .*got 5 \(schema of clinic\)"):
        schema_text(SCHEMA, "ddl", max_tokens=5)


def test_the_shortened_ddl_still_runs() -> None:
    for kind in KINDS[1:3]:
        for max_tokens in range(45, 300, 5):
            with closing(sqlite3.connect(":memory:")) as connection:
                connection.executescript(schema_text(SCHEMA, kind, max_tokens=max_tokens))


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2)])
def test_estimated_tokens(text: str, tokens: int) -> None:
    assert estimated_tokens(text) == tokens


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (["a", "b", "a", "c", "d"], ("a", "b", "c")),
        ([None, "", "  ", "a", None], ("a",)),
        ([1, 2.5, Decimal("3.50"), 4], (1, 2.5, Decimal("3.50"))),
        ([True, False, True], (True, False)),
        ([float("inf"), float("nan"), Decimal("NaN"), 1.5], (1.5,)),
        (["line\nbreak", "tab\t", "\udcff", "fine"], ("fine",)),
        ([b"bytes", ["list"], {"a": 1}], ()),
        (["x" * 20, "y"], ("x" * 20, "y")),
        (["y", "x" * 21], ("y",)),
        (["x" * 50, "y"], ("x" * 50,)),
        (["y", "x" * 51], ()),
        (["2024-01-05", "2024-01-06"], ("2024-01-05",)),
    ],
)
def test_examples(values: list[Any], shown: tuple[Any, ...]) -> None:
    assert column_examples([(value,) for value in values], [""]) == [shown]


@pytest.mark.parametrize("kind", ["DATE", "datetime", "TIMESTAMP(6)", "time without time zone"])
def test_one_example_of_a_date_by_its_type(kind: str) -> None:
    assert column_examples([(1,), (2,)], [kind]) == [(1,)]


def test_rows_are_read_only_as_far_as_needed() -> None:
    rows = iter((number, number % 2) for number in range(EXAMPLE_ROWS))

    assert column_examples(rows, ["INTEGER", "INTEGER"]) == [(0, 1, 2), (0, 1)]
    rows = iter((number,) for number in range(EXAMPLE_ROWS))
    column_examples(rows, ["INTEGER"])
    assert next(rows) == (3,)


def test_comment_becomes_one_line() -> None:
    assert one_line(" people\n who\u2028work\0 ") == "people who work"
    assert one_line(None) == ""
