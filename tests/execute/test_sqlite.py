import marshal
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql import ExecutionOutcome, Limits, SQLExecutor, sqlite_file
from text2sql_grpo.sql.frames import marshalled, marshalled_list
from text2sql_grpo.sql.schema import read_schema
from text2sql_grpo.sql.sqlite import DatabaseLocked, HardenedDatabase
from text2sql_grpo.sql.sqlite_file import fingerprint_of, open_database


def run(opened: HardenedDatabase, sql: str, timeout_s: float = 5.0) -> ExecutionOutcome:
    answer = opened.run_marshalled(sql, Limits(timeout_s), time.perf_counter())
    return ExecutionOutcome(*marshal.loads(answer)[:-1])


def test_path_with_characters_of_a_uri_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "50% of a?b#c é.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (a)")

    with closing(open_database(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("t",)]


def test_connection_does_not_write(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (a)")

    with (
        closing(open_database(path)) as connection,
        pytest.raises(sqlite3.DatabaseError, match="not authorized"),
    ):
        connection.execute("INSERT INTO t VALUES (1)")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "No such file"),
        (b"", "it is empty"),
        (b"CREATE TABLE t (a);", "it is not a database"),
        (b"SQLite format 3\0" + b"\xff" * 5000, "not a database"),
    ],
)
def test_file_that_is_no_database(tmp_path: Path, content: bytes | None, found: str) -> None:
    path = tmp_path / "bad.sqlite"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(DataError, match=rf"cannot read the SQLite database file.*{found}.*bad\.sqlite"):
        open_database(path)


def test_folder_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read the SQLite database file"):
        open_database(tmp_path)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "shop.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE t (a); INSERT INTO t VALUES (1), (2)")
    return path


def insert(path: Path, value: int) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO t VALUES (?)", (value,))
        connection.commit()


def test_fingerprint_is_settled_once_the_file_rests(database: Path) -> None:
    assert not fingerprint_of(str(database))[-1]

    os.utime(database, (1, 1))

    assert fingerprint_of(str(database))[-1]


def test_fingerprint_sees_a_log(database: Path) -> None:
    os.utime(database, (1, 1))
    settled = fingerprint_of(str(database))
    with closing(sqlite3.connect(database)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("INSERT INTO t VALUES (3)")
        writer.commit()
        os.utime(database, (1, 1))
        logged = fingerprint_of(str(database))
        writer.execute("INSERT INTO t VALUES (4)")
        writer.commit()

        assert not logged[-1] and len({settled, logged, fingerprint_of(str(database))}) == 3


def test_log_of_a_file_behind_a_link_is_seen(database: Path, tmp_path: Path) -> None:
    link = tmp_path / "links" / "link.sqlite"
    link.parent.mkdir()
    link.symlink_to(database)
    with closing(sqlite3.connect(database)) as writer, SQLExecutor(workers=1) as executor:
        writer.execute("PRAGMA journal_mode = WAL")
        for value in (3, 4):
            writer.execute(f"INSERT INTO t VALUES ({value})")
            writer.commit()
            os.utime(database, (1, 1))
            assert not fingerprint_of(str(link))[-1]
            assert ((value,),) == executor.execute(link, "SELECT max(a) FROM t").rows
            assert read_schema(link).tables[0].n_rows == read_schema(database).tables[0].n_rows


def test_connection_knows_that_the_file_changed(database: Path, tmp_path: Path) -> None:
    os.utime(database, (1, 1))
    opened = HardenedDatabase(str(database), fingerprint_of(str(database)))
    assert opened.is_current() and opened.is_unchanged()

    insert(database, 3)
    assert not opened.is_current() and not opened.is_unchanged()
    opened.close()

    os.utime(database, (1, 1))
    opened = HardenedDatabase(str(database), fingerprint_of(str(database)))
    other = tmp_path / "other.sqlite"
    other.write_bytes(database.read_bytes())
    os.utime(other, (1, 1))
    os.replace(other, database)
    assert not opened.is_current()
    assert opened.is_unchanged()  # what was read is the old file, whole
    os.unlink(database)
    assert not opened.is_current()
    opened.close()


def test_write_ahead_log_that_appears_is_seen(database: Path) -> None:
    with closing(sqlite3.connect(database)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
    os.utime(database, (1, 1))
    opened = HardenedDatabase(str(database), fingerprint_of(str(database)))
    assert opened.is_current()
    with closing(sqlite3.connect(database)) as writer:
        writer.execute("INSERT INTO t VALUES (3)")
        writer.commit()
        os.utime(database, (1, 1))

        assert not opened.is_current()
    opened.close()


def test_outcome_in_this_process(database: Path) -> None:
    opened = HardenedDatabase(str(database), fingerprint_of(str(database)))

    outcome = run(opened, "SELECT a FROM t")
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
    late = run(opened, endless, timeout_s=0.1)
    opened.close()

    assert (outcome.status, outcome.columns, outcome.rows) == ("ok", ("a",), ((1,), (2,)))
    assert 0 < outcome.elapsed_s < 10 and not outcome.from_cache
    assert late.status == "timeout"


def test_locked_file_is_told_apart(database: Path) -> None:
    opened = HardenedDatabase(str(database), fingerprint_of(str(database)))
    with closing(sqlite3.connect(database)) as writer:
        writer.execute("BEGIN EXCLUSIVE")

        with pytest.raises(DatabaseLocked, match=r"database is locked.*shop\.sqlite"):
            run(opened, "SELECT a FROM t")
    assert run(opened, "SELECT a FROM t").is_ok
    opened.close()


@pytest.mark.parametrize("items", [[], [(1, "a\udcff", None), ("b", 2.5, b"c")]])
def test_values_marshalled_one_by_one_are_read_as_one(items: list[object]) -> None:
    parts = [marshalled(item) for item in items]

    assert marshal.loads(marshalled_list(parts)) == items


def test_name_that_no_guard_can_read_is_the_query_s_error(database: Path) -> None:
    opened = HardenedDatabase(str(database), fingerprint_of(str(database)))

    outcome = run(opened, "SELECT * FROM pragma_table_info(x'ff')")

    assert (outcome.status, "not valid UTF-8" in outcome.error) == ("error", True)
    opened.close()


def test_virtual_tables_are_read_through_the_guard(tmp_path: Path) -> None:
    path = tmp_path / "texts.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "CREATE VIRTUAL TABLE doc USING fts5(body); INSERT INTO doc VALUES ('hello world');"
            "CREATE VIRTUAL TABLE box USING rtree(id, a, b); INSERT INTO box VALUES (1, 0, 1)"
        )
    opened = HardenedDatabase(str(path), fingerprint_of(str(path)))

    assert run(opened, "DELETE FROM doc").status == "denied"
    assert run(opened, "SELECT body FROM doc('hello') WHERE rank < 0").rows == (("hello world",),)
    assert run(opened, "SELECT id FROM box WHERE a < 2").rows == ((1,),)
    assert run(opened, "INSERT INTO doc(doc) VALUES ('rebuild')").status == "denied"
    opened.close()


def test_tables_named_like_those_of_sqlite_and_many_columns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "odd.sqlite"
    columns = ", ".join(f"c{i}" for i in range(1200))
    with closing(sqlite3.connect(path)) as connection, connection:
        for name in ("bytecode", "dbstat", "tables_used"):
            connection.execute(f"CREATE TABLE {name} (n)")
            connection.execute(f"INSERT INTO {name} VALUES (7)")
        connection.execute(f"CREATE TABLE wide ({columns})")
        connection.execute(f"INSERT INTO wide VALUES ({', '.join('1' * 1200)})")
    plain = tmp_path / "plain.sqlite"
    with closing(sqlite3.connect(plain)) as connection, connection:
        connection.execute("CREATE TABLE t (n)")
    with SQLExecutor(workers=1, cache_entries=0) as executor:
        for name in ("bytecode", "dbstat", "tables_used"):
            assert executor.execute(path, f"SELECT n FROM {name}").rows == ((7,),)
            assert executor.execute(plain, f"SELECT * FROM {name}").status in ("denied", "error")
        assert executor.execute(path, "SELECT * FROM wide").rows == ((1,) * 1200,)


def test_own_queries_on_a_hostile_file_do_no_more_than_a_query_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hostile.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE t (n, loaded AS (hex(zeroblob(n))), huge AS (zeroblob(n)))")
        connection.execute("INSERT INTO t (n) VALUES (9000000)")
        connection.execute(
            "CREATE TABLE many AS WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c"
            " WHERE i < 3000) SELECT i FROM c"
        )
    monkeypatch.setattr(sqlite_file, "MAX_STEPS", 20_000_000)
    with closing(open_database(path)) as connection:
        for sql in (
            "SELECT loaded FROM t",
            "SELECT huge FROM t",
            "ATTACH ':memory:' AS x",
            "PRAGMA query_only = 0",
        ):
            with pytest.raises(sqlite3.Error):
                connection.execute(sql).fetchall()
        with pytest.raises(sqlite3.OperationalError, match="interrupt"):
            connection.execute("SELECT count(*) FROM many a, many b, many c").fetchall()
