"""What the kernel refuses to a worker: Python code runs in real workers in place of SQL."""

import ast
import os
import resource
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import duckdb
import pytest

from text2sql_grpo.doctor.checks import sandbox as finding
from text2sql_grpo.errors import DataError, RunError
from text2sql_grpo.sql import Limits, SQLExecutor, sandbox
from text2sql_grpo.sql.schema import read_schema

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Landlock and seccomp")

# Runs the text of a query as Python; the row is what it returned, or its error.
PYTHON_FOR_SQL = """
from text2sql_grpo.sql import sqlite
def run(self, code, limits, started):
    try:
        text = repr(eval(code, {name: __import__(name) for name in ("os", "ctypes", "socket", "threading")}))
    except (OSError, RuntimeError) as error:
        text = f"{type(error).__name__}"
    return sqlite.marshalled(("ok", ("a",), ((text,),), False, "", 0.0, False, False))
sqlite.HardenedDatabase.run_marshalled = run
main()
"""
# Calls each system call by its number with arguments that are all -1: what is done with them is harmless.
PROBE = PYTHON_FOR_SQL.replace(
    "def run(",
    """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    values = [ctypes.c_long(value) for value in arguments]
    result = libc.syscall(ctypes.c_long(number), *values)
    return "open" if result >= 0 else errno.errorcode.get(ctypes.get_errno(), "?")
def probed(left_out):
    return {number: call(number, *[-1] * 6) for number in range(600) if number not in left_out}
import os
os.call, os.probed = call, probed
def run(""",
)
# On x86_64 and aarch64.
ENDS_OR_BLOCKS = {"x86_64": {15, 34, 60, 231, 335, 336}, "aarch64": {93, 94, 139}}
REFUSED_CALLS = {
    "other processes: priority, processors, limits, signals, memory": {
        "x86_64": "141 142 144 203 251 314 101 310 311 312 200 129 297 424 434 438 440 448 238 256 279",
        "aarch64": "140 118 119 122 30 274 117 270 271 272 130 138 240 424 434 438 440 448 237 238 239",
    },
    "memory shared by name, or without one": {
        "x86_64": "29 30 31 67 64 65 66 220 68 69 70 71 240 241 319 447 323 425 426 427",
        "aarch64": "194 195 196 197 190 191 192 193 186 187 188 189 180 181 279 447 282 425 426 427",
    },
    "the machine: clock, name, log, swap, accounting, modules, ports": {
        "x86_64": "227 164 159 305 170 171 103 167 168 163 175 176 313 246 320 169 172 173 153 179",
        "aarch64": "112 170 171 266 161 162 116 224 225 89 105 106 273 104 294 142 58 60",
    },
    "mounts, namespaces, personality": {
        "x86_64": "165 166 155 161 272 308 135 428 429 430 431 432 433 442 457 458 467",
        "aarch64": "40 39 41 51 97 268 92 428 429 430 431 432 433 442 457 458 467",
    },
    "programs, processes, identity": {
        "x86_64": "57 58 59 322 435 105 106 113 114 117 119 116 122 123 126 112 109 121 37 38 222",
        "aarch64": "221 281 435 146 144 145 143 147 149 159 151 152 91 157 154 103 107",
    },
    "files that are changed, and keys": {
        "x86_64": "82 264 316 83 258 84 86 265 88 266 133 259 90 91 268 452 92 93 94 260 76 280 188 303 304"
        " 248 249 250 40 275 276 326 321 298 253 254 294 300 86 85",
        "aarch64": "38 276 34 37 36 33 52 53 452 55 54 45 88 5 264 265 217 218 219 71 76 77 285 280 241 26 27"
        " 262",
    },
}
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


@pytest.mark.skipif(os.uname().machine not in ENDS_OR_BLOCKS, reason="numbers of two machines")
def test_calls_of_each_class_are_refused(database: Path, start_up: Callable[[str], None]) -> None:
    machine = os.uname().machine
    start_up(PROBE)
    with SQLExecutor(Limits(timeout_s=20.0), workers=1, cache_entries=0) as executor:
        found = executor.execute(database, f"os.probed({ENDS_OR_BLOCKS[machine]})").rows[0][0]
        answers = ast.literal_eval(str(found))
        for label, numbers in REFUSED_CALLS.items():
            for number in map(int, numbers[machine].split()):
                assert answers[number] in ("EPERM", "ENOSYS"), (label, number)
        # What is newer than this list is refused as well.
        assert {answers[number] for number in range(467, 600)} == {"ENOSYS"}
        is_open = [number for number, answer in answers.items() if answer not in ("EPERM", "ENOSYS")]
        assert len(is_open) < 110

        # By their arguments: a new namespace, the parent's end and limits, a terminal's input, signals.
        thread, in_namespace = 0x10F00, 0x20000
        parent, clone, prctl, ioctl, fcntl, limits = (
            (os.getpid(), 56, 157, 16, 72, 302)
            if machine == "x86_64"
            else (os.getpid(), 220, 167, 29, 25, 261)
        )
        for call in (
            (clone, thread | in_namespace, 0, 0, 0, 0),
            (clone, 17, 0, 0, 0, 0),
            (prctl, 1, 0, 0, 0, 0),  # PR_SET_PDEATHSIG
            (prctl, 4, 1, 0, 0, 0),  # PR_SET_DUMPABLE
            (ioctl, 0, 0x5412, 0),  # TIOCSTI
            (ioctl, 0, 0x541C, 0),  # TIOCLINUX
            (fcntl, 0, 8, parent),  # F_SETOWN
            (limits, parent, 7, 0, 0),
        ):
            assert executor.execute(database, f"os.call(*{call})").rows == (("'EPERM'",),), call


def test_worker_holds_no_terminal_and_no_file_of_its_parent(
    evaluate: Callable[[str], str], tmp_path: Path
) -> None:
    held = (tmp_path / "held").open("w")
    os.set_inheritable(held.fileno(), True)
    with closing(held):
        files = ast.literal_eval(evaluate("[os.fstat(i).st_mode >> 12 for i in (0, 1, 2)]"))
        assert files == [1, 1, 1]  # pipes
        assert evaluate("os.fstat(2).st_ino") != str(os.fstat(2).st_ino)
        assert evaluate("[os.isatty(i) for i in (0, 1, 2)]") == str([False] * 3)
        assert evaluate("open('/dev/tty')") in ("OSError", "PermissionError")
        kinds = ast.literal_eval(evaluate("[i for i in range(3, 99) if ctypes.CDLL(None).fcntl(i, 1) >= 0]"))
        assert held.fileno() not in kinds


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
    assert int(status["CapPrm"], 16) & ~0b110 == 0  # of root's rights those to read and write files
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


def test_worker_reads_the_database_and_nothing_beside_it(
    evaluate: Callable[[str], str], database: Path
) -> None:
    secret, other = database.with_name("notes.txt"), database.with_name("other.sqlite")
    secret.write_text("secret")
    build(other)
    assert evaluate(f"open({str(secret)!r})") == "PermissionError"
    assert evaluate(f"open({str(other)!r}, 'rb')") == "PermissionError"
    assert evaluate(f"os.listdir({str(database.parent)!r})") == "PermissionError"


def test_file_that_takes_the_place_of_a_database_is_read(database: Path) -> None:
    with SQLExecutor(workers=1, cache_entries=0) as executor:
        assert executor.execute(database, "SELECT count(*) FROM t").rows == ((3,),)
        new = database.with_name("new")
        build(new)
        with closing(sqlite3.connect(new)) as connection, connection:
            connection.execute("DELETE FROM t")
        new.replace(database)
        assert executor.execute(database, "SELECT count(*) FROM t").rows == ((0,),)


@pytest.mark.parametrize("layout", ["{i}/{i}.sqlite", "{i}.sqlite"])
def test_many_databases_cost_few_restarts_and_no_secret(
    tmp_path: Path, start_up: Callable[[str], None], layout: str
) -> None:
    paths = [tmp_path / "spider" / layout.format(i=i) for i in range(40)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        build(path)
    secrets = [path.parent / "secret.sqlite" for path in paths]
    for path in secrets:
        path.write_text("no database")
    pids = set()
    with SQLExecutor(workers=1, cache_entries=0) as executor:
        for path in paths:
            assert executor.execute(path, "SELECT count(*) FROM t").rows == ((3,),)
            pids |= executor.workers().keys()
    assert len(pids) <= 4
    start_up(PYTHON_FOR_SQL)
    with SQLExecutor(workers=1, cache_entries=0) as executor:
        for path in paths[:5]:
            executor.execute(path, "1")
        for path, text in (
            (secrets[0], "PermissionError"),
            (secrets[30], "PermissionError"),
            (paths[30], ""),
        ):
            assert text in str(executor.execute(paths[4], f"open({str(path)!r}, 'rb') and ''").rows[0][0])


def test_granted_folder_takes_new_databases_without_a_restart(tmp_path: Path) -> None:
    with SQLExecutor(workers=1, cache_entries=0) as executor:
        executor.grant_folder(tmp_path / "own")
        pids = set()
        for i in range(8):
            path = tmp_path / "own" / str(i) / "0.sqlite"
            path.parent.mkdir(parents=True)
            build(path)
            assert executor.execute(path, "SELECT count(*) FROM t").rows == ((3,),)
            pids |= executor.workers().keys()
        assert len(pids) == 1


def test_folders_may_be_granted_while_queries_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = os.path.realpath
    with SQLExecutor(workers=1, cache_entries=0) as executor:

        def resolved_late(path: str) -> str:
            executor.grant_folder(tmp_path / f"of another thread {time.monotonic_ns()}")
            return resolved(path)

        for folder in ("one", "two"):
            executor.grant_folder(tmp_path / folder)
        build(tmp_path / "0.sqlite")
        monkeypatch.setattr(os.path, "realpath", resolved_late)
        assert executor.execute(tmp_path / "0.sqlite", "SELECT count(*) FROM t").rows == ((3,),)


@pytest.mark.parametrize("scheme", ["", "duckdb:///"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, database: Path, scheme: str) -> None:
    fifo, listening = tmp_path / "fifo.sqlite", tmp_path / "socket.sqlite"
    os.mkfifo(fifo)
    with closing(socket.socket(socket.AF_UNIX)) as server, SQLExecutor(workers=1) as executor:
        server.bind(str(listening))
        for path in (fifo, listening, Path("/dev/zero")):
            started = time.monotonic()
            with pytest.raises(DataError, match="regular file"):
                executor.execute(f"{scheme}{path}", "SELECT 1")
            with pytest.raises(DataError, match="regular file"):
                read_schema(f"{scheme}{path}")
            assert time.monotonic() - started < 10.0
        executor.execute(database, "SELECT 1")
        database.unlink()
        os.mkfifo(database)  # in the place of one that was read
        with pytest.raises(DataError):
            executor.execute(database, "SELECT 2")


def test_what_a_worker_wrote_to_stderr_is_shown_when_it_dies(
    database: Path, start_up: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    start_up("import os\nos.write(2, b'x' * 100_000 + b'last\\x1b words')\nos._exit(3)")
    with (
        SQLExecutor(workers=1) as executor,
        pytest.raises(RunError, match=r"code 3 during start-up[^x]*: x"),
    ):
        executor.execute(database, "SELECT 1")
    start_up(PYTHON_FOR_SQL)
    with SQLExecutor(workers=1) as executor:
        code = "os.write(2, b'last\\x1b words') and os.abort()"
        assert executor.execute(database, code).error == "the database engine crashed on this query"
    assert "last\N{REPLACEMENT CHARACTER} words" in caplog.text


@pytest.mark.parametrize(
    "frame",
    [
        "b'[\\x01\\0\\0\\0(\\xff\\xff\\xff\\x7f'",  # two thousand million items
        "b'[\\x01\\0\\0\\0' * 5000",
        "b'[\\xff\\xff\\0\\0' * 1500",
        "b'c' + bytes(60)",
        "b'[\\x02\\0\\0\\0NN'",  # more answers than queries
        "sqlite.marshalled([('ok', ('a',), ((1, 2),), False, '', 0.0, False)])",
        "sqlite.marshalled([('ok', ('a',), (([],),), False, '', 0.0, False)])",
        "sqlite.marshalled([('ok', ('a',), (1,), False, '', 0.0, False)])",
        "sqlite.marshalled([('Path', '/')])[:-1]",
        "sqlite.marshalled({'a': 1})",
        "None",  # a header that announces 4 GB
    ],
)
def test_nothing_that_a_worker_sends_harms_its_parent(
    database: Path, start_up: Callable[[str], None], frame: str
) -> None:
    start_up(
        rf"""
from text2sql_grpo.sql import sqlite
def run(self, code, limits, started):
    body = {frame}
    os.write(3, b"\xff" * 5 if body is None else len(body).to_bytes(4, "little") + b"\0" + body)
    time.sleep(30)
import os, time
sqlite.HardenedDatabase.run_marshalled = run
main()
"""
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with SQLExecutor(Limits(timeout_s=5.0), workers=1, cache_entries=0) as executor:
        outcome = executor.execute(database, "SELECT 1")
        assert outcome.status == "error"
        assert executor.execute_many([(database, "SELECT 1")])[0].status == "error"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


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
