"""What the executor returns for good and bad input; attacks on it stand in `tests/hostile`."""

import asyncio
import os
import signal
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql import ExecutionOutcome, Limits, SQLExecutor, worker

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT "

SCRIPT = """
CREATE TABLE ward (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE visit (id INTEGER PRIMARY KEY, ward_id INTEGER REFERENCES ward (id), fee REAL, notes TEXT);
CREATE INDEX visit_fee ON visit (fee);
CREATE VIEW dear AS SELECT * FROM visit WHERE fee > 10;
INSERT INTO ward VALUES (1, 'North'), (2, 'South');
INSERT INTO visit VALUES (1, 1, 5.5, '{"a": [1, 2]}'), (2, 1, 20, NULL), (3, 2, 30, '{"a": []}');
"""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "clinic.sqlite"
    build(path, SCRIPT)
    return path


@pytest.fixture
def executor() -> Iterator[SQLExecutor]:
    with SQLExecutor(Limits(timeout_s=5.0)) as executor:
        yield executor


def build(path: Path, script: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.executescript(f"BEGIN; {script}; COMMIT")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_still_reads(executor: SQLExecutor, database: Path) -> None:
    assert executor.execute(database, "SELECT name FROM ward ORDER BY id").rows == (("North",), ("South",))


def test_denial_says_what_was_refused(executor: SQLExecutor, database: Path) -> None:
    error = executor.execute(database, "PRAGMA journal_mode = WAL").error

    assert error == "not allowed: PRAGMA journal_mode; only queries that read the tables run"


@pytest.mark.parametrize("table", ["sqlite_stmt", "dbstat", "sqlite_temp_master", "sqlite_dbpage"])
def test_tables_about_sqlite_itself_are_not_read(executor: SQLExecutor, database: Path, table: str) -> None:
    executor.execute(database, "SELECT name AS the_gold_query FROM ward")

    for columns in ("*", "count(*)"):
        outcome = executor.execute(database, f"SELECT {columns} FROM {table}")
        assert outcome.status in ("denied", "error")  # an error where SQLite was built without the table
        assert outcome.rows == ()


@pytest.mark.parametrize("rest", ["count(*) FROM n", "i FROM n WHERE i < 0", "group_concat(i) FROM n"])
def test_endless_query_stops_at_the_limit(executor: SQLExecutor, database: Path, rest: str) -> None:
    outcome = executor.execute(database, ENDLESS + rest, limits=Limits(timeout_s=0.3))

    assert (outcome.status, outcome.error) == ("timeout", "stopped: the query ran longer than 0.3 s")
    assert 0.3 <= outcome.elapsed_s < 10.0
    assert_still_reads(executor, database)


def test_ctrl_c_inside_a_query_is_no_timeout(executor: SQLExecutor, database: Path) -> None:
    timer = threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()

    with pytest.raises(KeyboardInterrupt):
        executor.execute(database, f"{ENDLESS}count(*) FROM n", limits=Limits(timeout_s=5.0))

    timer.join()
    assert executor.seconds_in_sql == 0.0
    assert_still_reads(executor, database)


def test_query_that_grows_while_compiled_is_stopped(executor: SQLExecutor, database: Path) -> None:
    steps = ", ".join(f"c{i} AS (SELECT x.a FROM c{i - 1} x, c{i - 1} y)" for i in range(1, 23))

    sql = f"WITH c0 AS (SELECT 1 a), {steps} SELECT * FROM c22"
    outcome = executor.execute(
        database, sql, limits=Limits(timeout_s=60.0)
    )  # a second where nothing else runs

    assert outcome.status == "memory"
    assert_still_reads(executor, database)


def test_rows_are_cut_at_the_byte_cap(executor: SQLExecutor, database: Path) -> None:
    sql = f"{ENDLESS}zeroblob(1000) FROM n"

    outcome = executor.execute(database, sql, limits=Limits(max_bytes=10_500))

    assert outcome.is_ok and outcome.is_truncated
    assert len(outcome.rows) == 10


@pytest.mark.parametrize(
    ("sql", "part"),
    [
        ("", "got nothing"),
        (" \n", "got nothing"),
        (";", "got nothing"),
        ("-- SELECT 1", "got nothing"),
        ("/* SELECT 1 */", "got nothing"),
        ("SELECT 1; SELECT 2", "several statements"),
        ("SELECT 1; DROP TABLE ward", "several statements"),
        ("SELECT 1\0", "NUL"),
        ("SELECT '\ud800'", "surrogate"),
        ("SELECT '" + "a" * 100_000 + "'", "too long: expected at most 100000 bytes, got 100009"),
        ("SELEC 1", "syntax error"),
        ("SELECT nope FROM ward", "no such column: nope"),
        ("SELECT * FROM nope", "no such table: nope"),
        ("SELECT ?", "bindings"),
    ],
)
def test_text_that_is_no_query_is_an_error(
    executor: SQLExecutor, database: Path, sql: str, part: str
) -> None:
    outcome = executor.execute(database, sql)

    assert outcome.status == "error"
    assert part in outcome.error
    assert outcome.columns == outcome.rows == ()


def test_error_is_one_short_line_without_the_path(executor: SQLExecutor, database: Path) -> None:
    error = executor.execute(database, 'SELECT * FROM "no\nsuch' + "x" * 1000 + '"').error

    assert error.startswith("no such table: no such")
    assert "\n" not in error
    assert len(error) == 300
    assert str(database.parent) not in error


def test_columns_are_named_as_the_database_names_them(executor: SQLExecutor, database: Path) -> None:
    assert executor.execute(database, "SELECT id AS Nr, count(*) FROM ward").columns == ("Nr", "count(*)")


@pytest.mark.parametrize(
    ("create", "query"),
    [
        ("CREATE VIRTUAL TABLE v USING fts5(body); INSERT INTO v VALUES ('a cat')",
         "SELECT body FROM v WHERE v MATCH 'cat'"),
        ("CREATE VIRTUAL TABLE v USING fts4(body); INSERT INTO v VALUES ('a cat')",
         "SELECT body FROM v WHERE v MATCH 'cat'"),
        ("CREATE VIRTUAL TABLE v USING rtree(id, low, high); INSERT INTO v VALUES (1, 2, 3)",
         "SELECT CASE id WHEN 1 THEN 'a cat' END FROM v WHERE low > 1"),
    ],
)  # fmt: skip
def test_virtual_tables_are_read(executor: SQLExecutor, tmp_path: Path, create: str, query: str) -> None:
    path = tmp_path / "virtual.sqlite"
    try:
        build(path, create)
    except sqlite3.OperationalError as error:
        pytest.skip(f"this SQLite has no such module: {error}")
    before = files(tmp_path)

    assert executor.execute(path, query).rows == (("a cat",),)
    assert executor.execute(path, "DELETE FROM v").status == "denied"
    assert files(tmp_path) == before


def test_table_with_more_columns_than_a_result_may_have(executor: SQLExecutor, tmp_path: Path) -> None:
    path = tmp_path / "wide.sqlite"
    build(
        path,
        f"CREATE TABLE wide ({', '.join(f'c{i}' for i in range(700))}); INSERT INTO wide (c699) VALUES (7)",
    )

    assert executor.execute(path, "SELECT c699 FROM wide").rows == ((7,),)


def test_bytes_that_are_no_utf8_stay_different(executor: SQLExecutor, database: Path) -> None:
    sql = "SELECT CAST(x'61ff' AS TEXT), CAST(x'61fe' AS TEXT), name FROM ward WHERE id = 1"

    assert executor.execute(database, sql).rows == (("a\udcff", "a\udcfe", "North"),)
    assert_still_reads(executor, database)


def test_many_keeps_the_order_over_databases(executor: SQLExecutor, database: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    build(other, "CREATE TABLE ward (name); INSERT INTO ward VALUES ('Other')")
    sql = "SELECT name FROM ward"

    outcomes = executor.execute_many(
        [(database, sql), (str(other), sql), (database, "nonsense"), (other, sql)]
    )

    assert [outcome.status for outcome in outcomes] == ["ok", "ok", "error", "ok"]
    assert outcomes[1].rows == outcomes[3].rows == (("Other",),)
    assert executor.queries == 4
    assert [outcome.from_cache for outcome in outcomes] == [False, False, False, True]
    assert executor.seconds_in_sql == pytest.approx(sum(outcome.elapsed_s for outcome in outcomes[:3]))


def test_several_threads_share_an_executor(executor: SQLExecutor, database: Path) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        for _ in range(200):
            outcome = executor.execute(database, f"SELECT {number}, count(*) FROM visit, ward")
            if outcome.rows != ((number, 6),):
                wrong.append(outcome)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert executor.queries == 800


def test_replaced_file_is_read_anew(executor: SQLExecutor, database: Path, tmp_path: Path) -> None:
    assert_still_reads(executor, database)
    new = tmp_path / "new"
    build(new, "CREATE TABLE ward (id, name); INSERT INTO ward VALUES (1, 'New')")

    os.replace(new, database)

    assert executor.execute(database, "SELECT name FROM ward").rows == (("New",),)


def test_changes_not_yet_merged_from_a_log_are_seen(executor: SQLExecutor, database: Path) -> None:
    assert_still_reads(executor, database)
    with closing(sqlite3.connect(database)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("PRAGMA wal_autocheckpoint = 0")
        writer.execute("INSERT INTO ward VALUES (3, 'East')")
        writer.commit()

        assert executor.execute(database, "SELECT count(*) FROM ward").rows == ((3,),)


@pytest.mark.parametrize(("max_open", "max_bytes"), [(3, 1 << 30), (400, 400_000)])
def test_open_databases_are_bounded_by_files_and_by_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_open: int, max_bytes: int
) -> None:
    monkeypatch.setattr(worker, "OPEN_BYTES", max_bytes)
    paths = [str(tmp_path / f"{number}.sqlite") for number in range(5)]
    for path in paths:
        build(Path(path), "CREATE TABLE t (n)")
    found = worker.Worker.__new__(worker.Worker)
    found._kind, found._databases, found._n_bytes, found._max_open = "sqlite", OrderedDict(), 0, max_open

    for path in (*paths, paths[3], paths[0]):
        found._opened(path)

    assert list(found._databases) == [paths[4], paths[3], paths[0]]
    found._close(*paths)
    assert found._n_bytes == 0


def test_closing_ends_the_connections_and_a_new_query_opens_one(
    executor: SQLExecutor, database: Path
) -> None:
    assert_still_reads(executor, database)

    executor.close()

    assert_still_reads(executor, database)


def test_missing_database_is_our_fault(executor: SQLExecutor, tmp_path: Path) -> None:
    path = tmp_path / "missing.sqlite"

    with pytest.raises(DataError, match=r"cannot read the SQLite database file: .*missing\.sqlite"):
        executor.execute(path, "SELECT 1")

    assert not path.exists()


def test_database_corrupted_inside_is_our_fault(executor: SQLExecutor, database: Path) -> None:
    content = bytearray(database.read_bytes())
    content[4096:] = b"\xab" * (len(content) - 4096)
    database.write_bytes(content)

    with pytest.raises(DataError, match=r"malformed.*clinic\.sqlite"):
        executor.execute(database, "SELECT * FROM ward")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "it is empty"),
        (b"id,name", "not a database"),
        (os.urandom(8192), "not a database"),  # as an encrypted one looks
        (b"SQLite format 3\0" + bytes(100), "not a database"),
    ],
)
def test_file_that_is_no_database_is_our_fault(
    executor: SQLExecutor, tmp_path: Path, content: bytes, found: str
) -> None:
    path = tmp_path / "bad.sqlite"
    path.write_bytes(content)

    with pytest.raises(DataError, match=rf"{found}.*bad\.sqlite"):
        executor.execute(path, "SELECT 1")


def test_folder_is_our_fault(executor: SQLExecutor, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read the SQLite database file"):
        executor.execute(tmp_path, "SELECT 1")


def test_file_cut_short_is_our_fault(executor: SQLExecutor, database: Path) -> None:
    database.write_bytes(database.read_bytes()[:5000])

    with pytest.raises(DataError, match=r"clinic\.sqlite"):
        executor.execute(database, "SELECT * FROM visit, ward")


def test_query_waits_for_a_writer(executor: SQLExecutor, database: Path) -> None:
    with closing(sqlite3.connect(database, check_same_thread=False)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        writer.execute("INSERT INTO ward VALUES (3, 'East')")
        timer = threading.Timer(1.0, writer.commit)
        timer.start()

        # Longer than the limit of the query, which is not at fault.
        outcome = executor.execute(database, "SELECT count(*) FROM ward", limits=Limits(timeout_s=0.4))
        timer.join()

    assert outcome.rows == ((3,),)


def test_growing_file_is_read_whole(executor: SQLExecutor, database: Path) -> None:
    is_over = threading.Event()

    def grow() -> None:
        with closing(sqlite3.connect(database)) as writer:
            writer.execute("PRAGMA synchronous = OFF")
            number = 3
            while not is_over.wait(0.001):
                number += 1
                writer.execute("INSERT INTO visit VALUES (?, 1, 1.5, ?)", (number, "x" * 500))
                writer.commit()

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        sql = "SELECT (SELECT count(*) FROM visit), (SELECT max(id) FROM visit), count(*) FROM visit"
        outcomes = [executor.execute(database, sql) for _ in range(100)]
        outcomes += executor.execute_many([(database, sql)] * 100)
    finally:
        is_over.set()
        thread.join()

    assert [outcome.error for outcome in outcomes if not outcome.is_ok] == []
    assert all(len(set(outcome.rows[0])) == 1 for outcome in outcomes)
    assert outcomes[-1].rows[0][0] > outcomes[0].rows[0][0]


@pytest.mark.thorough
def test_database_that_changes_while_it_is_read_is_read_again(executor: SQLExecutor, database: Path) -> None:
    os.utime(database, (0, 0))
    slow = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000000)"
    sql = f"{slow} SELECT name, (SELECT count(*) FROM n), (SELECT group_concat(name) FROM ward) FROM ward"
    content = database.read_bytes()
    timer = threading.Timer(0.15, database.write_bytes, [content.replace(b"North", b"Upper")])
    executor.execute(database, "SELECT 1")
    timer.start()

    outcome = executor.execute(database, sql)

    timer.join()
    assert outcome.rows == (("Upper", 2000000, "Upper,South"), ("South", 2000000, "Upper,South"))


def test_one_megabyte_of_sql(executor: SQLExecutor, database: Path) -> None:
    sql = "SELECT " + " + ".join(["1"] * 240_000)
    literal = "SELECT length('" + "é" * 480_000 + "')"

    long = executor.execute(database, sql)
    deep = executor.execute(database, sql, limits=Limits(max_sql_bytes=2_000_000))
    flat = executor.execute(database, literal, limits=Limits(max_sql_bytes=2_000_000))

    assert long.error == "the query is too long: expected at most 100000 bytes, got 960004"
    assert (deep.status, deep.error) == ("error", "Expression tree is too large (maximum depth 1000)")
    assert (flat.status, flat.rows) == ("ok", ((480_000,),))


def test_row_that_fills_the_memory(executor: SQLExecutor, database: Path) -> None:
    cells = ", ".join(["hex(zeroblob(490000))"] * 450)

    assert executor.execute(database, f"SELECT {cells}").status == "memory"
    assert_still_reads(executor, database)


def test_caps_hold_for_wide_rows_and_over_many_fetches(executor: SQLExecutor, database: Path) -> None:
    wide = ", ".join(["i"] * 300)
    sql = f"{ENDLESS}{wide} FROM n LIMIT 1000"

    cut = executor.execute(database, sql, limits=Limits(max_rows=777, max_bytes=10**8))
    whole = executor.execute(database, sql, limits=Limits(max_rows=1000, max_bytes=10**8))
    small = executor.execute(database, sql, limits=Limits(max_bytes=100_000))

    assert [row[299] for row in cut.rows] == list(range(1, 778)) and cut.is_truncated
    assert len(whole.rows) == 1000 and not whole.is_truncated
    assert len(small.rows) == 100_000 // (300 * 5 + 5) and small.is_truncated


def test_stored_values_over_the_limit_are_cut(executor: SQLExecutor, database: Path) -> None:
    build(
        database,
        "INSERT INTO visit VALUES (9, 1, 1, replace(hex(zeroblob(1500000)), '0', 'y')), (10, 1, 1, 'x')",
    )

    outcome = executor.execute(database, "SELECT notes FROM visit WHERE id >= 9 ORDER BY id")
    computed = executor.execute(database, "SELECT hex(zeroblob(400000000))")

    assert (outcome.status, outcome.is_truncated) == ("ok", True)
    assert outcome.rows == (("y" * 1_000_000,), ("x",))
    assert computed.status == "memory"
    assert_still_reads(executor, database)


def test_text_of_a_subclass_is_run(executor: SQLExecutor, database: Path) -> None:
    class Query(str):
        pass

    assert executor.execute(database, Query("SELECT 1")).rows == ((1,),)
    with pytest.raises(TypeError, match="sql must be text, got NoneType"):
        executor.execute(database, None)  # type: ignore[arg-type]


def test_urls_name_sqlite_files(executor: SQLExecutor, database: Path) -> None:
    assert executor.execute(f"sqlite:///{database}", "SELECT count(*) FROM ward").rows == ((2,),)


def test_coroutines_share_the_workers(executor: SQLExecutor, database: Path) -> None:
    async def ask() -> list[ExecutionOutcome]:
        asked = [executor.aexecute(database, f"SELECT {number}") for number in range(100)]
        return await asyncio.gather(*asked)

    assert [outcome.rows for outcome in asyncio.run(ask())] == [((number,),) for number in range(100)]


def test_endless_rows_end_at_the_default_caps(executor: SQLExecutor, database: Path) -> None:
    outcome = executor.execute(database, f"{ENDLESS}i FROM n")

    assert outcome.is_truncated
    assert len(outcome.rows) == Limits().max_rows


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limit")
def test_open_databases_leave_files_for_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    for n_files, n_databases in ((1024, 341), (256, 85), (resource.RLIM_INFINITY, 400)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, n_files=n_files: (n_files, n_files))
        assert worker._max_open_databases() == n_databases


def test_answers_of_many_databases_are_their_own(executor: SQLExecutor, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.sqlite" for number in range(100)]
    for number, path in enumerate(paths):
        build(path, f"CREATE TABLE t (n); INSERT INTO t VALUES ({number})")

    for _ in range(2):
        outcomes = executor.execute_many([(path, "SELECT n FROM t") for path in paths])
        assert [outcome.rows[0][0] for outcome in outcomes] == list(range(len(paths)))


def test_workers_must_be_positive() -> None:
    with pytest.raises(ValueError, match="workers"):
        SQLExecutor(workers=0)
