import os
import shutil
import sqlite3
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from marshal import dumps, loads
from pathlib import Path

import duckdb
import pytest

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql import ExecutionOutcome, Limits, SQLExecutor
from text2sql_grpo.sql.cache import ENTRY_BYTES, Key, ResultCache, normalised
from text2sql_grpo.sql.outcome import Row

LONG_AGO = time.time() - 3600


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "shop.sqlite"
    write(path, "CREATE TABLE t (n); INSERT INTO t VALUES (1); CREATE VIEW dice AS SELECT random() AS n")
    write(path, "CREATE TABLE words (word, born); INSERT INTO words VALUES ('now', '2020-01-01')")
    write(path, "CREATE VIEW today AS SELECT date('now')")
    os.utime(path, (LONG_AGO, LONG_AGO))
    return path


@pytest.fixture(scope="module")
def executor() -> Iterator[SQLExecutor]:
    with SQLExecutor(workers=1) as executor:
        yield executor


@pytest.fixture(scope="module")
def duckdb_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("duckdb") / "shop.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE t AS SELECT 1 AS n, TIMESTAMP '2020-01-01' AS born")
        connection.execute(
            "CREATE VIEW dice AS SELECT random(); CREATE MACRO throw() AS random();"
            " CREATE VIEW throws AS FROM range(CAST(99 * random() AS INT))"
        )
    os.utime(path, (LONG_AGO, LONG_AGO))
    return f"duckdb:///{path}"


def write(path: Path, script: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)


def outcome(size: int = 1) -> ExecutionOutcome:
    return ExecutionOutcome("ok", ("a",), (("x" * size,),))


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT random()",
        "SELECT RandomBlob(4)",
        'SELECT "random"()',
        "SELECT n FROM dice",
        "SELECT date('now')",
        "SELECT strftime('%s', 'NOW')",
        "SELECT strftime('%Y-%m-%d')",
        "SELECT date()",
        "SELECT datetime ( /* now */ )",
        "SELECT datetime(CAST(x'6e6f77' AS TEXT))",
        "SELECT date('n' || 'ow')",
        "SELECT time(char(110, 111, 119))",
        "SELECT julianday(printf('no%s', 'w'))",
        "SELECT date(word) FROM words",
        "SELECT strftime('%Y', born), count(*) FROM words GROUP BY 1",  # as any function of dates
        "SELECT * FROM today",
        "SELECT CURRENT_TIMESTAMP",
        "SELECT current_date",
        "SELECT changes()",
        "SELECT total_changes()",
        "SELECT last_insert_rowid()",
    ],
)
def test_sqlite_result_that_may_change_runs_each_time(
    database: Path, executor: SQLExecutor, sql: str
) -> None:
    outcomes = [executor.execute(database, sql), *executor.execute_many([(database, sql)] * 2)]

    assert all(outcome.is_ok and not outcome.from_cache for outcome in outcomes)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM t WHERE n = 'x' || 'y'",
        "SELECT max(n), count(*), group_concat(n) FROM t",
        "SELECT 'random()', replace('no!', '!', 'w') AS current_date",
    ],
)
def test_sqlite_result_that_never_changes_runs_once(database: Path, executor: SQLExecutor, sql: str) -> None:
    outcomes = [executor.execute(database, sql) for _ in range(2)]

    assert [outcome.from_cache for outcome in outcomes] == [False, True]
    assert outcomes[1] == outcomes[0]._replace(from_cache=True)


@pytest.mark.parametrize(
    ("sql", "is_kept"),
    [
        ("SELECT n, strftime(born, '%Y') FROM t", True),
        ("SELECT sum(n) FROM t GROUP BY n ORDER BY 1", True),
        ("SELECT list_transform([1], lambda x: x + 1)", True),
        ("WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r WHERE i < 3) FROM r", True),
        ("SELECT 'random()' AS current_date", True),
        ("SELECT nope FROM t", True),
        ("SELECT age(born) FROM t", False),
        ("SELECT current_localtime()", False),
        ("SELECT localtimestamp", False),
        ("SELECT now()", False),
        ("SELECT uuid()", False),
        ("SELECT list_transform([1], lambda x: x + random())", False),
        (
            "SELECT " + "[" * 200 + "1" + "]" * 200 + " LIMIT 0",
            False,
        ),  # its slow plan is not asked for
        ("FROM dice", False),
        ("SELECT throw()", False),
        ("FROM generate_series(1, 1 + CAST(99 * random() AS INT))", False),
        ("FROM range(DATE '2020-01-01', current_date, INTERVAL 1 YEAR)", False),
        ("FROM range(CAST(throw() AS INT))", False),
        ("FROM throws", False),
        ("FROM t USING SAMPLE 1", False),
        ("FROM duckdb_memory()", False),
        ("PIVOT t ON n USING max(random())", False),
    ],
)
def test_duckdb_result_is_kept_if_its_plan_is_deterministic(
    duckdb_file: str, executor: SQLExecutor, sql: str, is_kept: bool
) -> None:
    outcomes = [executor.execute(duckdb_file, sql) for _ in range(2)]

    assert [outcome.from_cache for outcome in outcomes] == [False, is_kept], outcomes
    assert outcomes[0].is_ok or "nope" in sql, outcomes


def test_only_what_stands_outside_is_taken_off() -> None:
    assert normalised(" \nSELECT 'A ; b' ; \t") == "SELECT 'A ; b'"
    assert normalised(";SELECT 1;;") == ";SELECT 1;"


def key(text: str) -> Key:
    return ("shop.sqlite", text, (0, 0, 0, 0, (), True), Limits())


def test_least_recently_used_goes_first() -> None:
    cache = ResultCache(max_entries=2, max_bytes=10_000)
    cache.put(key("a"), outcome())
    cache.put(key("b"), outcome())
    assert cache.get(key("a")) == outcome()._replace(from_cache=True)

    cache.put(key("c"), outcome())

    assert cache.get(key("b")) is None
    assert cache.get(key("a")) is not None and cache.get(key("c")) is not None
    assert (cache.hits, len(cache)) == (3, 2)


def test_bytes_are_bounded() -> None:
    cache = ResultCache(max_entries=100, max_bytes=2 * (ENTRY_BYTES + 10_000))
    for number in range(10):
        cache.put(key(str(number)), outcome(9_000))
    cache.put(key("large"), outcome(30_000))
    cache.put(key("9"), outcome(10))

    assert [number for number in range(10) if cache.get(key(str(number))) is not None] == [8, 9]
    assert cache.get(key("large")) is None


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("", ((1,),)),
        ("long " * 4_000, ()),
        ("", tuple((number, number / 7, f"name {number}", None) for number in range(1_000))),
    ],
)
def test_memory_is_bounded_within_a_quarter(text: str, rows: tuple[Row, ...]) -> None:
    max_bytes = 3_000_000
    tracemalloc.start()
    try:
        cache = ResultCache(max_entries=100_000, max_bytes=max_bytes)
        for number in range(9_000 if len(rows) == 1 else 300):
            fingerprint = (10**18 + number, 10**6, 10**6 + number, 10**18 - number, (), True)
            found = loads(dumps(("ok", ("a", "b", "c", "d"), rows, False, "", 0.1 * number, "", False)))
            cache.put(
                (f"/data/{number}.sqlite", f"{text}{number}", fingerprint, Limits()), ExecutionOutcome(*found)
            )
        n_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert 0.75 * max_bytes < n_bytes < 1.25 * max_bytes


def test_executor_remembers(database: Path) -> None:
    with SQLExecutor(workers=1) as executor:
        first = executor.execute(database, "SELECT n FROM t")
        second = executor.execute(str(database), "  SELECT n FROM t ;\n")
        error = [executor.execute(database, "SELECT nope FROM t") for _ in range(2)]

        assert (first.from_cache, second.from_cache, error[1].from_cache) == (False, True, True)
        assert second == first._replace(from_cache=True)
        assert error[1].error == "no such column: nope"
        assert (executor.queries, executor.cache_hits) == (4, 2)
        assert executor.seconds_in_sql == first.elapsed_s + error[0].elapsed_s


def test_limits_and_databases_are_kept_apart(database: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    write(other, "CREATE TABLE t (n); INSERT INTO t VALUES (5), (6)")
    os.utime(other, (LONG_AGO, LONG_AGO))
    with SQLExecutor(workers=1) as executor:
        executor.execute(database, "SELECT n FROM t")

        assert executor.execute(other, "SELECT n FROM t").rows == ((5,), (6,))
        assert executor.execute(other, "SELECT n FROM t", limits=Limits(max_rows=1)).rows == ((5,),)
        assert executor.cache_hits == 0


def test_changed_file_is_read_again(database: Path) -> None:
    with SQLExecutor(workers=1) as executor:
        executor.execute(database, "SELECT count(*) FROM t")
        write(database, "INSERT INTO t VALUES (2)")

        assert executor.execute(database, "SELECT count(*) FROM t").rows == ((2,),)
        # So soon after a change another one could leave no trace: nothing is remembered.
        write(database, "INSERT INTO t VALUES (3)")
        assert executor.execute(database, "SELECT count(*) FROM t").rows == ((3,),)

        with closing(sqlite3.connect(database)) as writer:
            writer.execute("PRAGMA journal_mode = WAL")
            writer.execute("PRAGMA wal_autocheckpoint = 0")
            for number in range(4, 7):
                writer.execute("INSERT INTO t VALUES (?)", (number,))
                writer.commit()
                assert executor.execute(database, "SELECT count(*) FROM t").rows == ((number,),)
        assert executor.cache_hits == 0


@pytest.mark.skipif(os.name == "nt", reason="an open file cannot be replaced on Windows")
@pytest.mark.parametrize("is_in_place", [True, False])
def test_copy_with_the_old_time_and_size_is_read_again(
    database: Path, tmp_path: Path, is_in_place: bool
) -> None:
    other = tmp_path / "other.sqlite"
    other.write_bytes(database.read_bytes())
    write(other, "UPDATE t SET n = 7")
    for path in (database, other):
        os.utime(path, (LONG_AGO, LONG_AGO))
    assert database.stat().st_size == other.stat().st_size
    with SQLExecutor(workers=1) as executor, SQLExecutor(workers=1, cache_entries=0) as uncached:
        for opened in (executor, uncached):
            assert opened.execute(database, "SELECT n FROM t").rows == ((1,),)
        if not is_in_place:
            database.unlink()  # its inode may be used again
        shutil.copy2(other, database)
        for opened in (executor, uncached):
            assert opened.execute(database, "SELECT n FROM t").rows == ((7,),)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT random()",
        "SELECT hex(zeroblob(900000))",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
    ],
)
def test_what_is_never_remembered(database: Path, sql: str) -> None:
    with SQLExecutor(Limits(timeout_s=0.2), workers=1) as executor:
        outcomes = [executor.execute(database, sql) for _ in range(2)]

        assert [outcome.from_cache for outcome in outcomes] == [False, False]
        if outcomes[0].is_ok:
            assert outcomes[0].rows != outcomes[1].rows


@pytest.mark.parametrize(
    "other",
    ["SELECT n FROM t;;", "SELECT n FROM t" + " " * 100, "SELECT n FROM t; SELECT 1"],
)
def test_remembered_result_never_answers_a_text_that_fails(database: Path, other: str) -> None:
    with SQLExecutor(Limits(max_sql_bytes=80), workers=1) as executor:
        assert executor.execute(database, "SELECT n FROM t").is_ok

        assert executor.execute(database, other).status == "error"
        both = executor.execute_many([(database, "SELECT n FROM t"), (database, other)])
        assert [outcome.status for outcome in both] == ["ok", "error"]


def test_a_text_that_is_too_long_for_its_blanks_is_refused_alone(database: Path) -> None:
    with SQLExecutor(Limits(max_sql_bytes=80), workers=1) as executor:
        sql = f"SELECT '{'é' * 20}'"
        padded = sql + " " * (80 - len(sql))  # 80 characters, 100 bytes
        assert executor.execute(database, padded).status == "error"
        assert executor.execute(database, sql).rows == (("é" * 20,),)


def test_a_file_keeps_no_result_for_another_engine(database: Path) -> None:
    with SQLExecutor(workers=1) as executor:
        assert executor.execute(database, "SELECT n FROM t").is_ok
        with pytest.raises(DataError, match="of another system"):
            executor.execute(f"duckdb:///{database}", "SELECT n FROM t")


def test_cache_can_be_off(database: Path) -> None:
    with SQLExecutor(workers=1, cache_entries=0) as executor:
        outcomes = executor.execute_many([(database, "SELECT n FROM t")] * 3)
        outcomes.append(executor.execute(database, "SELECT n FROM t"))

        assert not any(outcome.from_cache for outcome in outcomes)
        assert executor.cache_hits == 0


def test_equal_queries_of_a_batch_run_once(database: Path) -> None:
    with SQLExecutor(workers=2) as executor:
        outcomes = executor.execute_many(
            [(database, f"SELECT {i % 3}, n FROM t{';' * (i % 2)}") for i in range(9)]
        )

        assert [outcome.rows for outcome in outcomes] == [((i % 3, 1),) for i in range(9)]
        assert [outcome.from_cache for outcome in outcomes] == [False] * 3 + [True] * 6
        again = executor.execute_many([(database, "SELECT 0, n FROM t")])
        assert again[0].from_cache


def test_equal_queries_that_differ_each_time_run_each_time(database: Path) -> None:
    with SQLExecutor(workers=1) as executor:
        for sql in ("SELECT random()", "SELECT n FROM dice"):
            outcomes = executor.execute_many([(database, sql)] * 5)

            assert len({outcome.rows for outcome in outcomes}) == 5
            assert not any(outcome.from_cache for outcome in outcomes)
