"""Files, disks and texts that are not as they should be; more of them stand in `tests/execute/`."""

import contextlib
import ctypes
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql import Limits, SQLExecutor

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs the limits or mounts of Linux")

TABLES = """
CREATE TABLE ward (id INTEGER PRIMARY KEY, name TEXT, note BLOB);
INSERT INTO ward VALUES (1, 'North', x''), (2, CAST(x'61ff62' AS TEXT), x'00ff00'), (3, '', zeroblob(3));
"""
NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {}) "
# Some 60 MB, which a sort writes to temporary files.
LARGE_SORT = NUMBERS.format(60_000) + "SELECT i, hex(zeroblob(500)) AS x FROM n ORDER BY x, -i"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "clinic.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(TABLES)
    return path


@pytest.fixture
def executor() -> Iterator[SQLExecutor]:
    with SQLExecutor(Limits(timeout_s=20.0), workers=1, cache_entries=0) as executor:
        yield executor


def assert_still_reads(executor: SQLExecutor, database: Path) -> None:
    assert executor.execute(database, "SELECT count(*) FROM ward").rows == ((3,),)


def test_stored_texts_and_blobs_keep_their_bytes(executor: SQLExecutor, database: Path) -> None:
    outcome = executor.execute(database, "SELECT name, note FROM ward ORDER BY id")

    assert outcome.rows == (("North", b""), ("a\udcffb", b"\0\xff\0"), ("", b"\0\0\0"))


def test_names_that_are_no_utf8_cost_one_query(executor: SQLExecutor, database: Path) -> None:
    database.write_bytes(database.read_bytes().replace(b"name", b"nam\xff"))

    every = executor.execute(database, "SELECT * FROM ward")
    names = executor.execute(database, "SELECT sql FROM sqlite_master")

    assert every.error == "the query reads a table or column whose name is not valid UTF-8"
    assert "nam\udcff" in str(names.rows[0][0])
    assert executor.execute(database, "SELECT id FROM ward WHERE id = 1").rows == ((1,),)


@pytest.mark.parametrize(
    "sql", ["BEGIN; SELECT 1", "BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT s", "RELEASE s"]
)
def test_transactions_are_refused_and_none_stays_open(
    executor: SQLExecutor, database: Path, sql: str
) -> None:
    assert executor.execute(database, sql).status in ("denied", "error")

    with contextlib.closing(sqlite3.connect(database, timeout=0)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        writer.execute("UPDATE ward SET name = 'x' WHERE id = 3")
        writer.execute("COMMIT")
    assert_still_reads(executor, database)


@pytest.mark.thorough
def test_file_that_stays_locked_is_our_fault(executor: SQLExecutor, database: Path) -> None:
    with contextlib.closing(sqlite3.connect(database)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        writer.execute(
            "UPDATE ward SET name = 'x'"
        )  # the lock of a file that does not change is not waited for

        with pytest.raises(DataError, match=r"database is locked.*clinic\.sqlite"):
            executor.execute(database, "SELECT count(*) FROM ward")
    assert_still_reads(executor, database)


def test_encrypted_file_is_our_fault(executor: SQLExecutor, database: Path) -> None:
    key = os.urandom(4096)
    content = database.read_bytes()
    database.write_bytes(bytes(byte ^ key[i % len(key)] for i, byte in enumerate(content)))

    with pytest.raises(DataError, match=r"it is not a database.*clinic\.sqlite"):
        executor.execute(database, "SELECT count(*) FROM ward")


def test_file_that_vanishes_while_it_is_read_is_read_to_the_end(
    executor: SQLExecutor, database: Path
) -> None:
    if os.name == "nt":
        pytest.skip("an open file cannot be removed on Windows")
    os.utime(database, (1, 1))
    assert_still_reads(executor, database)
    timer = threading.Timer(0.1, database.unlink)
    timer.start()

    outcome = executor.execute(database, NUMBERS.format(1_000_000) + "SELECT count(*), max(i) FROM n, ward")

    timer.join()
    assert outcome.rows == ((3_000_000, 1_000_000),)
    with pytest.raises(DataError, match="No such file"):
        executor.execute(database, "SELECT count(*) FROM ward")


@pytest.mark.thorough
@pytest.mark.skipif(os.name == "nt", reason="needs the signals of POSIX")
def test_workers_killed_again_and_again_cost_no_query(database: Path) -> None:
    slow = NUMBERS.format(1_000_000) + "SELECT max(i) FROM n"
    with SQLExecutor(Limits(timeout_s=20.0), workers=2, cache_entries=0) as executor:
        for _ in range(3):
            assert_still_reads(executor, database)
            busy = threading.Timer(0.1, kill_busy_worker, [executor])
            busy.start()
            outcome = executor.execute(database, slow)
            busy.join()
            assert outcome.rows == ((1_000_000,),)
        assert_still_reads(executor, database)


def kill_busy_worker(executor: SQLExecutor) -> None:
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        for pid, is_busy in executor.workers().items():
            if is_busy:
                os.kill(pid, signal.SIGKILL)
                return
        time.sleep(0.01)


@contextlib.contextmanager
def mounted(folder: Path, flags: int, options: bytes) -> Iterator[None]:
    """A disk in memory at this new folder; the test is skipped without the right to mount it."""
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(folder), b"tmpfs", flags, options) != 0:
        pytest.skip(f"needs the right to mount a disk: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        libc.umount2(bytes(folder), 2)  # MNT_DETACH


@linux_only
@pytest.mark.parametrize(
    ("flags", "options", "status"),
    [(0, b"size=1m", "memory"), (1, b"", "ok")],  # a read-only one is seen at the start: sorts stay in memory
    ids=["full", "read-only"],
)
def test_full_or_read_only_disk_costs_one_large_query_at_most(
    flags: int, options: bytes, status: str, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "small"
    monkeypatch.setenv("SQLITE_TMPDIR", str(small))  # where SQLite puts the temporary files of a sort
    limits = Limits(timeout_s=20.0)
    with mounted(small, flags, options), SQLExecutor(limits, workers=1, cache_entries=0) as executor:
        outcome = executor.execute(database, LARGE_SORT)

        assert outcome.status == status, outcome.error
        assert_still_reads(executor, database)
        assert list(small.iterdir()) == []


@linux_only
def test_limits_that_are_lower_already_are_kept(database: Path) -> None:
    code = (
        "import resource, sys\n"
        "from text2sql_grpo.sql import Limits, SQLExecutor\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (800_000_000, 800_000_000))\n"
        "with SQLExecutor(Limits(timeout_s=20.0), workers=1) as executor:\n"
        "    for sql in sys.argv[2:]:\n"
        "        print(executor.execute(sys.argv[1], sql)[:3])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    done = subprocess.run(
        [sys.executable, "-c", code, database, LARGE_SORT, "SELECT count(*) FROM ward"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )

    assert done.stdout == "('memory', (), ())\n('ok', ('count(*)',), ((3,),))\n", done.stderr
