"""What the kernel refuses to a worker: Python code runs in real workers in place of SQL."""

import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import duckdb
import pytest

from text2sql_grpo.doctor.checks import sandbox as finding
from text2sql_grpo.errors import RunError
from text2sql_grpo.sql import Limits, SQLExecutor, sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Landlock and seccomp")

# Runs the text of a query as Python; the row is what it returned, or its error.
PYTHON_FOR_SQL = """
from text2sql_grpo.sql import sqlite
def run(self, code, limits, started):
    try:
        text = repr(eval(code, {name: __import__(name) for name in ("os", "ctypes", "socket", "threading")}))
    except (OSError, RuntimeError) as error:
        text = f"{type(error).__name__}"
    return sqlite.marshalled(("ok", ("a",), ((text,),), False, "", 0.0, False))
sqlite.HardenedDatabase.run_marshalled = run
main()
"""
# DuckDB without the check of its parse tree.
NO_PARSE_TREE = """
from text2sql_grpo.sql import worker
engine = worker.engine
def unchecked(kind):
    module, connection = engine(kind)
    module.refused_part = lambda *_: ""
    return module, connection
worker.engine = unchecked
main()
"""
LARGE_SORT = """WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 60000)
SELECT count(*) FROM (SELECT DISTINCT i || hex(zeroblob(400)) FROM n)"""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "shop.sqlite"
    path.parent.mkdir()
    build(path)
    return path


@pytest.fixture
def evaluate(database: Path, start_up: Callable[[str], None]) -> Iterator[Callable[[str], str]]:
    """Runs a Python expression in a worker."""
    start_up(PYTHON_FOR_SQL)
    with SQLExecutor(workers=1, cache_entries=0) as executor:
        yield lambda code: str(executor.execute(database, code).rows[0][0])


def build(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE t (n); INSERT INTO t VALUES (1), (2), (3)")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_worker_has_no_right_that_it_does_not_need(
    evaluate: Callable[[str], str], database: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret")
    beside, here = str(database.with_name("new")), os.getpid()
    before = contents(tmp_path)
    for code in (
        "open('/etc/passwd')",
        f"open({str(tmp_path / 'secret')!r})",
        f"open('/proc/{here}/environ')",
        "os.listdir(os.path.expanduser('~'))",
        f"open({beside!r}, 'w')",
        f"open({str(database)!r}, 'r+')",
        f"os.truncate({str(database)!r}, 0)",
        f"os.remove({str(database)!r})",
        f"os.rename({str(database)!r}, {beside!r})",
        f"os.link({str(database)!r}, os.environ['SQLITE_TMPDIR'] + '/link')",
        f"os.symlink({str(database)!r}, {beside!r})",
        f"os.chmod({str(database)!r}, 0o777)",
        f"os.utime({str(database)!r})",
        "socket.socket()",
        "socket.socketpair()",
        "os.fork()",
        "os.execv('/bin/true', ['true'])",
        "os.posix_spawn('/bin/true', ['true'], {})",
        f"os.kill({here}, 0)",
        "os.kill(0, 0)",
        "os.kill(-1, 0)",
        "os.unshare(0)" if sys.version_info >= (3, 12) else "os.fork()",
    ):
        assert evaluate(code) in ("PermissionError", "OSError"), code
    assert evaluate("ctypes.CDLL(None).ptrace(0, 0, 0, 0)") == "-1"
    assert contents(tmp_path) == before


def test_worker_keeps_what_it_needs(evaluate: Callable[[str], str], database: Path) -> None:
    assert evaluate(f"len(open({str(database)!r}, 'rb').read()) > 0") == "True"
    assert evaluate("open(os.environ['SQLITE_TMPDIR'] + '/x', 'w').write('x')") == "1"
    assert evaluate("os.remove(os.environ['SQLITE_TMPDIR'] + '/x')") == "None"
    assert evaluate("__import__('uuid').__name__") == "'uuid'"


def test_every_worker_is_bounded(database: Path) -> None:
    with SQLExecutor(workers=1) as executor:
        executor.execute(database, "SELECT 1")
        (pid,) = executor.workers()
        folder = Path("/proc", str(pid))
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        limits = (folder / "limits").read_text()

    assert (status["NoNewPrivs"].strip(), status["Seccomp"].strip()) == ("1", "2")
    for name, value in (("processes", "0"), ("open files", "1024"), ("core file size", "0")):
        assert f"Max {name} ".ljust(26) + value in limits
    assert "Max cpu time              unlimited" not in limits


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ("_RESTRICT_SELF = 9999", "landlock"),
        ("_MACHINES = {}", "seccomp"),
        ("_PR_SET_PDEATHSIG = 9999", "parent"),
    ],
)
def test_part_that_the_kernel_refuses_is_reported_and_the_rest_holds(
    database: Path, start_up: Callable[[str], None], change: str, missing: str
) -> None:
    start_up(f"from text2sql_grpo.sql import sandbox\nsandbox.{change}\nmain()")

    with SQLExecutor(workers=1) as executor:
        assert executor.execute(database, "SELECT count(*) FROM t").rows == ((3,),)
        parts = executor.describe()["sandbox"]
        assert [part for part, is_active in parts.items() if not is_active] == [
            part for part in sandbox.PARTS if part.startswith(missing)
        ]
        assert finding(executor).status == "note"
        assert missing in finding(executor).text
    with pytest.raises(RunError, match=f"sandbox of a SQL worker lacks {missing}.*require_sandbox=False"):
        SQLExecutor(workers=1, require_sandbox=True)


def test_whole_sandbox_is_reported(database: Path) -> None:
    with SQLExecutor(workers=1, require_sandbox=True) as executor:
        assert executor.describe()["sandbox"] == dict.fromkeys(sandbox.PARTS, True)
        assert finding(executor).status == "ok"
        assert executor.execute(database, "SELECT count(*) FROM t").rows == ((3,),)


def test_kernel_stops_what_the_parse_tree_lets_through(
    tmp_path: Path, start_up: Callable[[str], None]
) -> None:
    start_up(NO_PARSE_TREE)
    path = tmp_path / "shop.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE t AS SELECT 1 AS n")
    before = contents(tmp_path)
    copies = [
        f"WITH x AS (COPY (SELECT 1) TO '{path}{suffix}' ({options})) SELECT * FROM x"
        for suffix in ("", ".wal", ".new")
        for options in ("FORMAT csv", "FORMAT csv, USE_TMP_FILE false", "FORMAT parquet")
    ]

    with SQLExecutor(workers=1, cache_entries=0) as executor:
        for sql in (*copies, f"SELECT content FROM read_blob('{path}')", f"FROM read_text('{path}')"):
            assert executor.execute(f"duckdb:///{path}", sql).status in ("denied", "error"), sql
            assert contents(tmp_path) == before
        assert executor.execute(f"duckdb:///{path}", "FROM t").rows == ((1,),)


def test_databases_in_many_folders_and_behind_links_are_read(tmp_path: Path) -> None:
    paths = [tmp_path / f"folder{i}" / "shop.sqlite" for i in range(6)]
    for path in paths:
        path.parent.mkdir()
        build(path)
    link = tmp_path / "links" / "shop.sqlite"
    link.parent.mkdir()
    (tmp_path / "elsewhere").mkdir()
    build(tmp_path / "elsewhere" / "other.sqlite")
    sql = "SELECT count(*) FROM t"
    with SQLExecutor(workers=2, cache_entries=0) as executor:
        for path in paths[:4]:
            assert executor.execute(path, sql).rows == ((3,),)
        link.symlink_to(paths[5])
        assert executor.execute(link, sql).rows == ((3,),)
        link.unlink()
        link.symlink_to(tmp_path / "elsewhere" / "other.sqlite")  # since the workers started
        assert executor.execute(link, sql).rows == ((3,),)
        assert [outcome.rows for outcome in executor.execute_many([(p, sql) for p in paths])] == [((3,),)] * 6


def test_no_temporary_folder_costs_one_large_query_at_most(
    database: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SQLITE_TMPDIR", str(tmp_path / "missing"))
    with SQLExecutor(Limits(timeout_s=20.0), workers=1, cache_entries=0) as executor:
        assert executor.execute(database, LARGE_SORT).status in ("ok", "memory")
        assert executor.execute(database, "SELECT count(*) FROM t").rows == ((3,),)


def test_temporary_folder_that_vanishes_costs_one_large_query(database: Path, tmp_path: Path) -> None:
    with SQLExecutor(Limits(timeout_s=20.0), workers=1, cache_entries=0) as executor:
        os.utime(database, (1, 1))
        executor.execute(database, "SELECT 1")
        (pid,) = executor.workers()
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
        (folder,) = [each.partition("=")[2] for each in variables if each.startswith("SQLITE_TMPDIR=")]
        os.rmdir(folder)

        outcome = executor.execute(database, LARGE_SORT)

        assert (outcome.status, outcome.error) == (
            "memory",
            "stopped: the query needs a temporary file, and none can be written",
        )
        assert executor.execute(database, "SELECT count(*) FROM t").rows == ((3,),)


def test_temporary_folders_are_removed(
    database: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "data"))
    with SQLExecutor(workers=2, cache_entries=0) as executor:
        executor.execute_many([(database, f"SELECT {i} FROM t") for i in range(50)])
        executor.execute(
            database,
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT count(*) FROM n",
            limits=Limits(timeout_s=0.1),
        )
    assert os.listdir(tmp_path / "data") == ["shop.sqlite"]


def test_reading_a_left_log_makes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "shop.sqlite"
    script = (
        "import os, sqlite3, sys\n"
        "c = sqlite3.connect(sys.argv[1])\n"
        "c.executescript('PRAGMA journal_mode = WAL; CREATE TABLE t (n); INSERT INTO t VALUES (1)')\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", script, path], check=True, timeout=60)
    sql = "SELECT n FROM t"
    with SQLExecutor(workers=1, cache_entries=0) as executor:
        for name in ("shop.sqlite-shm", None):  # with the index that the writer left, and without
            before = contents(tmp_path)
            assert {"shop.sqlite", "shop.sqlite-wal"} <= set(map(os.path.basename, before))
            assert executor.execute(path, sql).rows == ((1,),)
            assert contents(tmp_path) == before
            if name is not None:
                (tmp_path / name).unlink()
        with closing(sqlite3.connect(path)) as writer:  # that goes on
            writer.execute("INSERT INTO t VALUES (2)")
            writer.commit()
            assert executor.execute(path, sql).rows == ((1,), (2,))
        assert executor.execute(path, sql).rows == ((1,), (2,))
