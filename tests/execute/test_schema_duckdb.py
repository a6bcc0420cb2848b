import logging
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.outcome import Limits
from text2sql_grpo.sql.schema import MAX_COUNTED_ROWS, Column, ForeignKey, Schema, read_schema
from text2sql_grpo.sql.schema_text import compact_text

duckdb = pytest.importorskip("duckdb", reason="needs the package duckdb")

from text2sql_grpo.sql.duckdb_database import HardenedDuckDB, fingerprint_of  # noqa: E402


def make(path: Path, script: str) -> Path:
    with closing(duckdb.connect(str(path))) as connection:
        connection.execute(script)
    return path


def read(path: Path, *, timeout_s: float = 30) -> Schema:
    return read_schema(f"duckdb:///{path}", timeout_s=timeout_s)


def test_columns_keys_comments_and_examples(tmp_path: Path) -> None:
    path = make(
        tmp_path / "clinic.duckdb",
        """
        CREATE TABLE ward (hospital VARCHAR, code VARCHAR, PRIMARY KEY (hospital, code));
        CREATE TABLE staff (id INTEGER PRIMARY KEY, name VARCHAR NOT NULL, hospital VARCHAR, code VARCHAR,
            FOREIGN KEY (hospital, code) REFERENCES ward (hospital, code));
        COMMENT ON TABLE staff IS 'people'; COMMENT ON COLUMN staff.name IS 'in full';
        CREATE TEMP TABLE hidden (x INTEGER);
        INSERT INTO staff VALUES (1, 'Ada', NULL, NULL), (2, 'Bo', NULL, NULL);
        """,
    )
    schema = read(path)
    staff = {table.name: table for table in schema.tables}["staff"]

    assert (schema.name, schema.dialect, schema.views) == ("clinic", "duckdb", ())
    assert sorted(table.name for table in schema.tables) == ["staff", "ward"]
    assert (staff.comment, staff.n_rows, staff.has_more_rows) == ("people", 2, False)
    assert staff.columns[:3] == (
        Column("id", "INTEGER", is_nullable=False, is_primary_key=True, examples=(1, 2)),
        Column("name", "VARCHAR", False, False, comment="in full", examples=("Ada", "Bo")),
        Column("hospital", "VARCHAR", is_nullable=True, is_primary_key=False),
    )
    assert staff.foreign_keys == (ForeignKey(("hospital", "code"), "ward", ("hospital", "code")),)


def test_examples_of_each_type(tmp_path: Path) -> None:
    path = make(
        tmp_path / "types.duckdb",
        """
        CREATE TABLE t (a HUGEINT, b DOUBLE, c DATE, d TIMESTAMPTZ, e BLOB, f INTEGER[], g STRUCT(x INTEGER),
            h VARCHAR, i TIME, j UTINYINT, k INTERVAL, l MAP(VARCHAR, INTEGER));
        INSERT INTO t VALUES (170141183460469231731687303715884105727, 'inf', '2024-01-05', now(), 'x', [1],
            {'x': 1}, repeat('long', 1000), '10:00', 255, INTERVAL 1 DAY, MAP {'a': 1});
        INSERT INTO t (b, c) VALUES (0.1, '2024-01-06');
        """,
    )
    columns = read(path).tables[0].columns

    assert {column.name: column.examples for column in columns if column.examples} == {
        "a": (170141183460469231731687303715884105727,),
        "b": (0.1,),
        "c": ("2024-01-05",),
        "i": ("10:00:00",),
        "j": (255,),
    }


def test_view_that_no_query_can_read_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "secret.csv").write_text("a\n1\n")
    path = make(
        tmp_path / "old.duckdb",
        "CREATE TABLE a (x INTEGER); CREATE TABLE b (x INTEGER); CREATE VIEW broken AS SELECT x FROM b;"
        "CREATE VIEW sound AS SELECT x FROM a; DROP TABLE b;"
        f"CREATE VIEW file AS SELECT * FROM read_csv('{tmp_path / 'secret.csv'}')",
    )
    with caplog.at_level(logging.WARNING):
        schema = read(path)

    assert [view.name for view in schema.views] == ["sound"]
    assert "broken is left out" in caplog.text and "file is left out" in caplog.text


def test_no_view_is_run(tmp_path: Path) -> None:
    path = make(
        tmp_path / "slow.duckdb",
        "CREATE VIEW slow AS SELECT count(*) AS n FROM range(1000000000) a, range(1000000000) b",
    )
    start = time.monotonic()

    assert compact_text(read(path)) == "view slow.n"
    assert time.monotonic() - start < 10


def test_reading_stops_at_the_time_limit(tmp_path: Path) -> None:
    path = make(tmp_path / "late.duckdb", "CREATE TABLE t (x INTEGER)")

    with pytest.raises(DataError, match=r"schema of .*late\.duckdb took longer than 0 s"):
        read(path, timeout_s=0)


def test_rows_are_counted_up_to_a_limit(tmp_path: Path) -> None:
    path = make(
        tmp_path / "many.duckdb", f"CREATE TABLE many AS SELECT * FROM range({MAX_COUNTED_ROWS + 5}) r (i)"
    )
    (many,) = read(path).tables

    assert (many.n_rows, many.has_more_rows) == (MAX_COUNTED_ROWS, True)


def test_long_type_is_cut(tmp_path: Path) -> None:
    values = ", ".join(f"'value {number}'" for number in range(1000))
    path = make(tmp_path / "wide.duckdb", f"CREATE TABLE t (x ENUM ({values}))")
    (column,) = read(path).tables[0].columns

    assert (
        len(column.type) == 100 and column.type.startswith("ENUM('value 0'") and column.type.endswith("...")
    )


@pytest.mark.parametrize("content", [None, b"", b"no database at all"])
def test_broken_database(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "bad.duckdb"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(DataError, match=r"bad\.duckdb"):
        read(path)
    assert path.exists() == (content is not None)


def test_the_file_and_its_folder_stay_as_they_were(tmp_path: Path) -> None:
    path = make(tmp_path / "clinic.duckdb", "CREATE TABLE t (x INTEGER); INSERT INTO t VALUES (1)")
    before = path.read_bytes()
    read(path)

    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["clinic.duckdb"]


def test_a_file_is_read_while_queries_run_on_it(tmp_path: Path) -> None:
    path = make(tmp_path / "clinic.duckdb", "CREATE TABLE t AS SELECT 7 AS x")
    database = HardenedDuckDB(str(path), fingerprint_of(str(path)))

    assert compact_text(read(path)) == "table t.x"
    assert database.run("SELECT x FROM t", Limits()).rows == ((7,),)
    database.close()


def test_the_package_is_imported_only_when_needed(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules['duckdb'] = None\n"
        "from text2sql_grpo.sql.schema import read_schema\n"
        f"try: read_schema('duckdb:///{tmp_path / 'x.duckdb'}')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert done.stdout.startswith("ConfigError the DuckDB database"), done.stderr


def test_generated_columns_labels_and_unique_keys(tmp_path: Path) -> None:
    labels = ("a", "it's", "x, y", "b)", "q]", *(f"label {number}" for number in range(20)))
    listed = ", ".join("'" + label.replace("'", "''") + "'" for label in labels)
    path = make(
        tmp_path / "shop.duckdb",
        f"""
        CREATE TYPE mood AS ENUM ({listed});
        CREATE TABLE line (number INTEGER, "a ""b" INTEGER, mood mood, moods mood[], price DECIMAL(12, 2),
            total DECIMAL(12, 2) GENERATED ALWAYS AS (price * 2), label VARCHAR UNIQUE,
            UNIQUE (price, number), PRIMARY KEY ("a ""b", number));
        CREATE UNIQUE INDEX one ON line (mood, "a ""b");
        CREATE UNIQUE INDEX folded ON line (lower(label));
        CREATE SCHEMA other; CREATE TABLE other.line (label VARCHAR);
        """,
    )
    schema = read(path)
    line, other = sorted(schema.tables, key=lambda table: table.namespace)
    columns = {column.name: column for column in line.columns}

    assert [column.name for column in line.columns if column.is_generated] == ["total"]
    assert line.keys == (('a "b', "number"), ("label",), ("price", "number"), ("mood", 'a "b'))
    assert other.keys == () and [name for name, column in columns.items() if column.is_primary_key] == [
        "number",
        'a "b',
    ]
    assert columns["mood"].labels == labels and columns["moods"].labels == columns["price"].labels == ()
    assert columns["mood"].type.endswith("...") and columns["mood"].cast_type == f"ENUM({listed})"
    assert columns["price"].cast_type == columns["price"].type == "DECIMAL(12,2)"
