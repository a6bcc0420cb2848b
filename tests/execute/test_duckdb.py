import contextlib
import json
import marshal
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.duckdb_database import HardenedDuckDB, fingerprint_of
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Limits

LIMITS = Limits(timeout_s=2.0)

table_of_python = [1, 2, 3]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "hospital.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute(
            "CREATE TABLE ward (id INT, name VARCHAR); INSERT INTO ward VALUES (1, 'A'), (2, 'B');"
            "CREATE SEQUENCE numbers; CREATE VIEW named AS SELECT name FROM ward;"
        )
    (path.parent / "secret.csv").write_text("a\n1\n")
    shutil.copy(path, path.parent / "other.duckdb")
    return path


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    """A database that the test may change."""
    return Path(shutil.copy(original, tmp_path))


@pytest.fixture(scope="module")
def database(original: Path) -> Iterator[HardenedDuckDB]:
    """One for all tests: what a query leaves behind would show in the next."""
    with contextlib.chdir(original.parent):
        opened = HardenedDuckDB(str(original), fingerprint_of(str(original)))
        yield opened
        opened.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in sorted(folder.iterdir())}


def test_variables_of_python_are_no_tables(database: HardenedDuckDB) -> None:
    assert "table_of_python" in globals()
    assert "table_of_python does not exist" in database.run("SELECT * FROM table_of_python", LIMITS).error


@pytest.mark.parametrize(
    ("sql", "status"),
    [
        ("SELECT count(*) FROM range(10_000_000_000_000)", "timeout"),
        ("SELECT list(range) FROM range(1_000_000_000)", "memory"),
    ],
)
def test_stopped_query_leaves_no_thread(database: HardenedDuckDB, sql: str, status: str) -> None:
    n_threads = threading.active_count()
    timeout_s = 0.3 if status == "timeout" else 20.0
    timer = threading.Timer(timeout_s, lambda: database.session.interrupt())  # as a worker does
    timer.start()

    outcome = database.run(sql, Limits(timeout_s=timeout_s + 1.0))  # the worker's clock may be ahead

    timer.cancel()
    assert outcome.status == status
    deadline = time.monotonic() + 5.0
    while threading.active_count() > n_threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= n_threads
    assert database.run("SELECT count(*) FROM ward", LIMITS).rows == ((2,),)


def test_every_type_of_the_engine_can_be_sent_to_another_process(database: HardenedDuckDB) -> None:
    outcome = database.run("SELECT * FROM test_all_types()", LIMITS)
    assert (outcome.status, outcome.error) == ("ok", "")
    assert len(outcome.rows) == 3
    assert marshal.loads(marshal.dumps(outcome.rows)) == outcome.rows


def test_order_of_rows_stays_where_columns_are_read_as_text(database: HardenedDuckDB) -> None:
    outcome = database.run("SELECT [range] FROM range(5000) ORDER BY range DESC;", LIMITS)
    assert [json.loads(str(row[0]))[0] for row in outcome.rows] == list(range(4999, -1, -1))


def test_very_short_limit_is_honoured(original: Path) -> None:
    with SQLExecutor(Limits(timeout_s=1e-6), workers=1) as executor:
        outcome = executor.execute(original, "SELECT count(*) FROM range(10_000_000_000_000)")
    assert outcome.error == "stopped: the query ran longer than 1e-06 s"


def test_closed_database_opens_again(database: HardenedDuckDB) -> None:
    database.close()
    database.close()
    assert database.run("SELECT 1", LIMITS).rows == ((1,),)


def test_two_share_one_file(original: Path, database: HardenedDuckDB) -> None:
    second = HardenedDuckDB(str(original), fingerprint_of(str(original)))
    assert second.run("SELECT count(*) FROM ward", LIMITS).rows == ((2,),)
    second.close()
    assert database.run("SELECT count(*) FROM ward", LIMITS).rows == ((2,),)


def test_fingerprint_follows_the_file(path: Path) -> None:
    before = fingerprint_of(str(path))
    assert fingerprint_of(str(path)) == before
    with duckdb.connect(str(path)) as connection:
        connection.execute("INSERT INTO ward SELECT range, 'x' FROM range(100000)")
    assert fingerprint_of(str(path)) != before


def test_changed_file_is_read_anew_after_closing(path: Path) -> None:
    database = HardenedDuckDB(str(path), fingerprint_of(str(path)))
    assert database.run("SELECT count(*) FROM ward", LIMITS).rows == ((2,),)
    database.close()
    with duckdb.connect(str(path)) as connection:
        connection.execute("DELETE FROM ward")
    assert database.run("SELECT count(*) FROM ward", LIMITS).rows == ((0,),)
    database.close()


def test_changes_in_the_log_are_seen_and_not_merged(path: Path) -> None:
    without_log = fingerprint_of(str(path))
    run_python(
        "import duckdb, os, sys\nc = duckdb.connect(sys.argv[1])\nc.execute('DELETE FROM ward')\nos._exit(0)",
        path,
    )
    before = contents(path.parent)
    assert f"{path.name}.wal" in before
    assert fingerprint_of(str(path)) != without_log

    database = HardenedDuckDB(str(path), fingerprint_of(str(path)))
    assert database.run("SELECT count(*) FROM ward", LIMITS).rows == ((0,),)
    database.close()
    assert contents(path.parent) == before


def run_python(code: str, path: Path) -> None:
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "not a valid DuckDB database file"),
        (b"SQLite format 3\0" + b"\0" * 9000, "another system, such as SQLite"),
        (b"a,b\n" * 9000, "not a valid DuckDB database file"),
    ],
)
def test_file_that_is_no_database(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "bad.duckdb"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"cannot read the DuckDB database file: .*{found}.*bad\.duckdb"):
        HardenedDuckDB(str(path), fingerprint_of(str(path)))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.duckdb")
    with pytest.raises(
        DataError, match=r"cannot read the DuckDB database file: .*No such file.*missing\.duckdb"
    ):
        fingerprint_of(missing)
    with pytest.raises(DataError, match="database does not exist"):
        HardenedDuckDB(missing, (0, 0, 0, False))
    with pytest.raises(DataError, match="Is a directory"):
        HardenedDuckDB(str(tmp_path), (0, 0, 0, False))
    assert os.listdir(tmp_path) == []


def test_text_that_cannot_be_read_is_the_query_s_error(database: HardenedDuckDB) -> None:
    tree = "replace(json_serialize_sql('SELECT 1'), 'SELECT_NODE', 'CTE_NODE')"

    outcome = database.run(f"SELECT json_deserialize_sql({tree})", LIMITS)

    assert outcome.status == "error"
    assert "Serialization Error" in outcome.error


def test_cut_and_damaged_files(path: Path) -> None:
    whole = path.read_bytes()
    for damaged in (whole[:9000], whole[:8192] + b"\xff" * (len(whole) - 8192)):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="cannot read the DuckDB database file"):
            HardenedDuckDB(str(path), fingerprint_of(str(path)))


def test_damage_met_while_reading_is_no_error_of_the_query(tmp_path: Path) -> None:
    path = tmp_path / "large.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE t AS SELECT range AS a, hash(range) AS b FROM range(500000)")
    blocks = bytearray(path.read_bytes())
    first_block = 3 * 4096
    for start in range(first_block + 100_000, first_block + 600_000, 1000):
        blocks[start] ^= 0xFF
    path.write_bytes(bytes(blocks))

    with pytest.raises(DataError, match=r"cannot read the DuckDB database file.*large\.duckdb"):
        HardenedDuckDB(str(path), fingerprint_of(str(path))).run("SELECT sum(a), sum(b) FROM t", LIMITS)


def test_file_that_another_process_writes(path: Path) -> None:
    code = "import duckdb, sys\nc = duckdb.connect(sys.argv[1])\nprint('open', flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdin is not None
        assert writer.stdout.readline() == b"open\n"
        with pytest.raises(DataError, match="Could not set lock on file"):
            HardenedDuckDB(str(path), fingerprint_of(str(path)))
        writer.stdin.close()
        writer.wait(timeout=30)
    HardenedDuckDB(str(path), fingerprint_of(str(path))).close()


def test_names_of_columns_are_kept(database: HardenedDuckDB) -> None:
    outcome = database.run('SELECT 1 AS a, [2] AS a, 3 AS "x y", [4] AS "c0"', LIMITS)
    assert outcome.columns == ("a", "a", "x y", "c0")
    assert outcome.rows == ((1, "[2]", 3, "[4]"),)


COPY = "COPY (SELECT 1) TO '{path}{suffix}' (FORMAT {format}, USE_TMP_FILE false)"


@pytest.mark.parametrize(
    "nest",
    [
        "WITH x AS ({}) SELECT * FROM x",
        "SELECT * FROM (WITH x AS ({}) SELECT * FROM x)",
        "SELECT (WITH x AS ({}) SELECT 1 FROM x)",
        "WITH a AS (WITH x AS MATERIALIZED ({}) SELECT * FROM x) SELECT * FROM a",
        "SELECT 1 UNION ALL (WITH x AS ({}) SELECT 1 FROM x)",
        "SELECT 1 WHERE EXISTS (WITH x AS ({}) SELECT 1 FROM x)",
        "WITH RECURSIVE x AS ({}) SELECT * FROM x",
        "PIVOT (WITH x AS ({}) SELECT 1 AS a, 2 AS b FROM x) ON a USING sum(b)",
        "SELECT * FROM (PIVOT (WITH x AS ({}) SELECT 1 AS a, 2 AS b FROM x) ON a USING sum(b))",
        "EXPLAIN ANALYZE WITH x AS ({}) SELECT * FROM x",
        "EXPLAIN (ANALYZE, FORMAT json) WITH x AS ({}) SELECT * FROM x",
        "SUMMARIZE WITH x AS ({}) SELECT * FROM x",
        "DESCRIBE (WITH x AS ({}) SELECT * FROM x)",
        "WITH/**/x\u00a0AS(/* ) */{}--\n)FROM x",
    ],
)
def test_writing_inside_a_query_is_refused(path: Path, nest: str) -> None:
    database = HardenedDuckDB(str(path), fingerprint_of(str(path)))
    before = contents(path.parent)
    bodies = [
        COPY.format(path=path, suffix=s, format=f) for s in ("", ".wal", ".new") for f in ("csv", "blob")
    ]
    for body in (*bodies, "INSERT INTO ward VALUES (3, 'C') RETURNING *", "DELETE FROM ward RETURNING *"):
        outcome = database.run(nest.format(body), LIMITS)
        assert outcome.status in ("denied", "error"), nest.format(body)
        assert contents(path.parent) == before
    assert database.run("SELECT count(*) FROM ward", LIMITS).rows == ((2,),)
    database.close()


@pytest.mark.parametrize("space", ["", " ", "--x\r", "/**/", "\u200b", "\ufeff", "\u2060", "\u00a0", "\v"])
@pytest.mark.parametrize(
    "name", ["query", '"query"', "QUERY", "main.query", "system.main.query", '"main"."Query"']
)
def test_functions_that_run_text_are_refused(database: HardenedDuckDB, name: str, space: str) -> None:
    for sql in (f"SELECT * FROM {name}{space}('SELECT 42')", f"PIVOT {name}{space}('SELECT 42 AS a') ON a"):
        outcome = database.run(sql, LIMITS)
        assert outcome.status in ("denied", "error"), outcome
        assert (42,) not in outcome.rows


def test_content_of_the_file_itself_is_not_read(original: Path) -> None:
    names = ("read_blob", "read_text", "read_csv", "sniff_csv", "read_duckdb", "glob", "parquet_metadata")
    sources = [f"{name}('{original}')" for name in names] + [f"'{original}'", "'hospital.duckdb'"]
    with SQLExecutor(LIMITS, workers=1) as executor:
        for source in sources:
            assert not executor.execute(original, f"SELECT * FROM {source}").is_ok, source


def test_statement_without_a_name_in_python_is_refused(database: HardenedDuckDB) -> None:
    outcome = database.run("UPDATE EXTENSIONS", LIMITS)
    assert (outcome.status, outcome.error) == (
        "denied",
        "not allowed: UPDATE; only queries that read the tables run",
    )


def test_query_with_types_that_python_lacks_runs_once(database: HardenedDuckDB) -> None:
    sql = "SELECT DATE 'infinity', TIMESTAMP '-infinity', INTERVAL 1 DAY, [random() < 2]"
    assert database.run(sql, LIMITS).rows == (("infinity", "-infinity", "1 day", "[true]"),)
    slow = "SELECT [sum(a.range)] FROM range(30_000_000) a"
    started = time.process_time()
    database.run(slow.replace("[", "(").replace("]", ")"), Limits(timeout_s=60))
    once_s = time.process_time() - started
    started = time.process_time()
    database.run(slow, Limits(timeout_s=60))
    assert time.process_time() - started < 1.7 * once_s + 0.2


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT random()",
        "SELECT name FROM ward, (SELECT now() AS t)",
        "SELECT * FROM ward USING SAMPLE 1",
        "SELECT * FROM ward TABLESAMPLE 1 ROWS",
        "SELECT current_timestamp, LocalTime",
        "SELECT * FROM dice",
        'SELECT "roll it"(6)',
        "SELECT roll /* it */ (6)",
        "SELECT face FROM computed",
        "SELECT nextval('numbers')",
    ],
)
def test_results_that_change_are_volatile(path: Path, sql: str) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE VIEW dice AS SELECT random() AS face")
        connection.execute('CREATE MACRO "roll it"(n) AS random() * n')
        connection.execute("CREATE MACRO roll(n) AS random() * n")
        connection.execute("CREATE TABLE computed (id INTEGER, face DOUBLE GENERATED ALWAYS AS (random()))")
    database = HardenedDuckDB(str(path), fingerprint_of(str(path)))
    assert database.run("SELECT max(name) FROM ward WHERE id IN (1, 2)", LIMITS).is_ok
    assert not database.is_volatile
    database.run(sql, LIMITS)
    assert database.is_volatile
    database.close()


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT count(*) FROM ward WHERE id > (SELECT id FROM ward WHERE name = 'Surgery')",
        "SELECT pi(), range FROM range(3)",
        "SELECT key FROM json_each('{\"a\": 1}')",
        "SELECT name FROM ward, unnest(string_split(name, ' '))",
        "FROM generate_series(DATE '2020-01-01', DATE '2020-02-01', INTERVAL 1 DAY)",
    ],
)
def test_results_that_stay_are_not_volatile(database: HardenedDuckDB, sql: str) -> None:
    assert database.run(sql, LIMITS).is_ok
    assert not database.is_volatile


@pytest.mark.slow
def test_one_worker_reads_more_files_than_its_addresses_hold(tmp_path: Path) -> None:
    with duckdb.connect(str(tmp_path / "0.duckdb")) as connection:
        connection.execute("CREATE TABLE t AS SELECT n FROM range(9) AS s (n)")
    with SQLExecutor(workers=1) as executor:
        for number in range(60):
            path = tmp_path / f"{number}.duckdb"
            if number:
                path.write_bytes((tmp_path / "0.duckdb").read_bytes())
            assert executor.execute(f"duckdb:///{path}", "SELECT sum(n) FROM t").rows == ((36,),)
