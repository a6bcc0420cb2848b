"""What becomes of queries when processes are killed, stopped, forked or left alone."""

import asyncio
import multiprocessing
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import TypeVar

import duckdb
import psutil
import psycopg
import pytest

from text2sql_grpo.errors import DataError, RunError
from text2sql_grpo.sql import Limits, SQLExecutor, pool, worker_process
from text2sql_grpo.sql.postgres_role import restricted_role_sql
from text2sql_grpo.sql.worker_process import PATIENCE_S, Worker

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
SLOW = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200000) SELECT max(i) FROM n"
# Three seconds inside one instruction of SQLite, in which nothing of it looks at the clock.
ONE_INSTRUCTION = "SELECT printf('%.*c', 999999999, 'x')"

T = TypeVar("T")
posix_only = pytest.mark.skipif(os.name == "nt", reason="needs the signals of POSIX")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "shop.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE t (n); INSERT INTO t VALUES (1), (2), (3)")
    return path


@pytest.fixture
def executor() -> Iterator[SQLExecutor]:
    with SQLExecutor(Limits(timeout_s=5.0), workers=2, cache_entries=0) as executor:
        yield executor


def pids(executor: SQLExecutor) -> set[int]:
    return set(executor.workers())


def busy_pid(executor: SQLExecutor, *, but: int = 0) -> int:
    """The process of a worker that runs a query; not the process `but`."""
    return wait_for(lambda: [pid for pid, is_busy in executor.workers().items() if is_busy and pid != but])[0]


def wait_for(found: Callable[[], T], timeout_s: float = 10.0) -> T:
    deadline = time.monotonic() + timeout_s
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_workers_start_late_and_are_kept(executor: SQLExecutor, database: Path) -> None:
    assert executor.workers() == {}

    executor.execute(database, "SELECT 1")
    first = pids(executor)
    for _ in range(20):
        executor.execute(database, "SELECT 1")

    assert len(first) == 1
    assert pids(executor) == first


@pytest.mark.parametrize("sql", [ONE_INSTRUCTION, ENDLESS])
def test_limit_is_honoured_wherever_the_time_goes(executor: SQLExecutor, database: Path, sql: str) -> None:
    executor.execute(database, "SELECT 1")
    started = time.monotonic()

    outcome = executor.execute(database, sql, limits=Limits(timeout_s=0.5))

    assert 0.5 <= time.monotonic() - started < 10.0
    assert (outcome.status, outcome.error) == ("timeout", "stopped: the query ran longer than 0.5 s")
    assert 0.5 <= outcome.elapsed_s < 10.0
    assert executor.execute(database, "SELECT count(*) FROM t").rows == ((3,),)


def test_late_query_of_a_batch_costs_no_other(executor: SQLExecutor, database: Path) -> None:
    late = {5, 37, 90}
    pairs = [(database, ONE_INSTRUCTION if i in late else f"SELECT {i}, count(*) FROM t") for i in range(100)]

    outcomes = executor.execute_many(pairs, limits=Limits(timeout_s=0.3))

    for i, outcome in enumerate(outcomes):
        if i in late:
            assert outcome.status == "timeout"
        else:
            assert outcome.rows == ((i, 3),)
    assert executor.queries == 100


@posix_only
def test_query_of_a_cancelled_call_is_stopped(executor: SQLExecutor, database: Path) -> None:
    executor.execute(database, "SELECT 1")

    async def ask() -> int:
        call = asyncio.create_task(executor.aexecute(database, ENDLESS))
        pid = await asyncio.to_thread(busy_pid, executor)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        return pid

    pid = asyncio.run(ask())
    wait_for(lambda: not is_alive(pid))
    assert executor.execute(database, "SELECT 1").rows == ((1,),)


@posix_only
def test_killed_worker_costs_its_query_nothing(executor: SQLExecutor, database: Path) -> None:
    executor.execute(database, "SELECT 1")
    killer = threading.Thread(target=lambda: os.kill(busy_pid(executor), signal.SIGKILL))
    killer.start()

    outcome = executor.execute(database, SLOW)

    killer.join()
    assert outcome.rows == ((200_000,),)


@posix_only
def test_query_whose_worker_dies_twice_is_an_error(executor: SQLExecutor, database: Path) -> None:
    executor.execute(database, "SELECT 1")

    def kill_twice() -> None:
        first = busy_pid(executor)
        os.kill(first, signal.SIGKILL)
        os.kill(busy_pid(executor, but=first), signal.SIGKILL)

    killer = threading.Thread(target=kill_twice)
    killer.start()

    outcome = executor.execute(database, ENDLESS)

    killer.join()
    assert (outcome.status, outcome.error) == ("error", "the database engine crashed on this query")
    assert executor.execute(database, "SELECT count(*) FROM t").rows == ((3,),)


@posix_only
def test_killed_worker_costs_a_batch_nothing_but_what_ran(database: Path) -> None:
    slow = SLOW.removesuffix(" FROM n")
    with SQLExecutor(workers=1, cache_entries=0) as executor:
        executor.execute(database, "SELECT 1")
        killer = threading.Thread(target=lambda: os.kill(busy_pid(executor), signal.SIGKILL))
        killer.start()

        outcomes = executor.execute_many([(database, f"{slow}, {i} FROM n") for i in range(12)])

        killer.join()
    assert [outcome.rows for outcome in outcomes] == [((200000, i),) for i in range(12)]


@posix_only
def test_workers_killed_while_they_start_cost_nothing(executor: SQLExecutor, database: Path) -> None:
    before = pids(executor)
    executor.execute(database, ENDLESS, limits=Limits(timeout_s=0.1))  # its worker is replaced by new ones
    starting = pids(executor) - before
    assert starting
    for pid in starting:
        os.kill(pid, signal.SIGKILL)

    assert executor.execute(database, "SELECT count(*) FROM t").rows == ((3,),)
    assert not starting & pids(executor)


@posix_only
def test_workers_that_are_always_killed_stop_the_run(
    executor: SQLExecutor, database: Path, start_up: Callable[[str], None]
) -> None:
    start_up("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(RunError, match="code -9"):
        executor.execute(database, "SELECT 1")


def test_worker_killed_while_idle_costs_nothing(executor: SQLExecutor, database: Path) -> None:
    executor.execute(database, "SELECT 1")
    (pid,) = pids(executor)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(pid))

    assert executor.execute(database, "SELECT count(*) FROM t").rows == ((3,),)
    assert pid not in pids(executor)


@pytest.mark.thorough
@posix_only
def test_worker_that_says_nothing_is_ended_by_the_backstop(executor: SQLExecutor, database: Path) -> None:
    executor.execute(database, "SELECT 1")
    (pid,) = pids(executor)
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()

    outcome = executor.execute(database, "SELECT 1", limits=Limits(timeout_s=0.2))

    assert outcome.status == "timeout"
    assert time.monotonic() - started < 0.2 + PATIENCE_S + 2.0
    assert executor.execute(database, "SELECT count(*) FROM t").rows == ((3,),)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_inherit_no_variable_but_the_allowed(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = (
        "HF_TOKEN",
        "pgpassword",
        "PGPASSWORD",
        "DATABASE_URL",
        "HTTP_PROXY",
        "SSH_AUTH_SOCK",
        "HARMLESS",
    )
    for name in (*refused, "LC_TIME", "TZ"):
        monkeypatch.setenv(name, f"value of {name}")

    with SQLExecutor(workers=1) as executor:
        executor.execute(database, "SELECT 1")
        environments = [Path(f"/proc/{pid}/environ").read_text() for pid in pids(executor)]

    assert environments
    for environment in environments:
        assert "value of LC_TIME" in environment and "value of TZ" in environment
        assert environment.count("value of") == 2
    assert worker_process._environment("postgresql", "")["PGPASSWORD"] == "value of PGPASSWORD"


def test_closing_ends_every_process(database: Path) -> None:
    with SQLExecutor(workers=3, cache_entries=0) as executor:
        executor.execute_many([(database, f"SELECT {i}, n FROM t") for i in range(600)])
        started = pids(executor)
        assert 1 <= len(started) <= 3

    assert not any(map(is_alive, started))


def test_forgotten_executor_ends_its_processes(database: Path) -> None:
    executor = SQLExecutor(workers=1)
    executor.execute(database, "SELECT 1")
    (pid,) = pids(executor)

    del executor

    assert not is_alive(pid)


@posix_only
@pytest.mark.parametrize("sql", ["SELECT 1", ENDLESS])
def test_workers_end_with_a_killed_parent(database: Path, sql: str) -> None:
    script = (
        "import sys, threading, time\n"
        "from text2sql_grpo.sql import Limits, SQLExecutor\n"
        "executor = SQLExecutor(Limits(timeout_s=60), workers=1)\n"
        "executor.execute(sys.argv[1], 'SELECT 1')\n"
        "print(*executor.workers(), flush=True)\n"
        "executor.execute(*sys.argv[1:])\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", script, str(database), sql], stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.2)
        assert is_alive(pid)

        parent.kill()

        wait_for(lambda: not is_alive(pid))


# Queries of every length on two workers, for ever.
BUSY = """
import sys, threading
from text2sql_grpo.sql import Limits, SQLExecutor
location, endless = sys.argv[1:]
executor = SQLExecutor(Limits(timeout_s=0.3), workers=2, cache_entries=0)
executor.execute(location, "SELECT 1")
print("started", flush=True)
def run(sql):
    while True:
        executor.execute(location, sql)
threading.Thread(target=run, args=(endless,)).start()
run("SELECT 1")
"""


def assert_killed_parents_leave_no_worker(location: str, endless: str, rounds: int, folder: Path) -> None:
    random = Random(rounds)
    for number in range(rounds):
        mark = f"LC_MARK={os.getpid()}-{location}-{number}"
        name, _, value = mark.partition("=")
        environment = {**os.environ, name: value, "PYTHONPATH": os.pathsep.join(sys.path)}
        environment["TMPDIR"] = str(folder)  # where the workers' empty folders stay
        with subprocess.Popen(
            [sys.executable, "-c", BUSY, location, endless], stdout=subprocess.PIPE, env=environment
        ) as parent:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"started\n"
            assert len(marked(mark)) >= 2
            time.sleep(random.uniform(0.0, 1.0))
            parent.kill()
        time.sleep(1.0)
        assert marked(mark) == []


def marked(text: str) -> list[str]:
    """Processes that live, with this text in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if text in path.read_text(errors="replace"):
                found.append(path.parent.name)
    return found


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_parents_killed_at_any_moment_leave_no_worker(database: Path) -> None:
    assert_killed_parents_leave_no_worker(str(database), ENDLESS, 4, database.parent)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["sqlite", "duckdb", "postgresql"])
def test_fifty_parents_killed_at_any_moment_leave_no_worker(
    database: Path, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    location, endless = str(database), ENDLESS
    if kind == "duckdb":
        location, endless = f"duckdb:///{tmp_path}/a.duckdb", "SELECT count(*) FROM range(10_000_000_000_000)"
        duckdb.connect(f"{tmp_path}/a.duckdb").close()
    if kind == "postgresql":
        server = request.getfixturevalue("postgres_server")
        with psycopg.connect(server.admin_url(), autocommit=True) as admin:
            admin.execute("CREATE DATABASE parents")
        with psycopg.connect(server.admin_url("parents"), autocommit=True) as admin:
            admin.execute(restricted_role_sql("orphan", "secret", "parents"))
        location, endless = server.url("orphan", "secret", "parents"), "SELECT pg_sleep(60)"
    assert_killed_parents_leave_no_worker(location, endless, 50, tmp_path)


def test_threads_do_not_wait_for_a_worker_that_cannot_start(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Worker:
        raise RunError("cannot start a SQL worker: too many open files")

    found: list[object] = []

    def run(executor: SQLExecutor) -> None:
        try:
            found.append(executor.execute(database, ENDLESS, limits=Limits(timeout_s=0.3)).status)
        except RunError as error:
            found.append(str(error))

    with SQLExecutor(workers=1, cache_entries=0) as executor:
        executor.execute(database, "SELECT 1")
        monkeypatch.setattr(pool, "Worker", fail)
        threads = [threading.Thread(target=run, args=(executor,), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        os.kill(busy_pid(executor), signal.SIGKILL)
        wait_for(lambda: len(found) == 4)
        assert found == ["cannot start a SQL worker: too many open files"] * 4
        monkeypatch.undo()
        assert executor.execute(database, "SELECT count(*) FROM t").rows == ((3,),)


def test_fault_of_the_adapter_is_an_error_of_its_query(
    database: Path, start_up: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    faulty = (
        "from text2sql_grpo.sql import sqlite\n"
        "run = sqlite.HardenedDatabase.run_marshalled\n"
        "def fail(self, sql, limits, started):\n"
        "    return {}[sql] if 'absent' in sql else run(self, sql, limits, started)\n"
        "sqlite.HardenedDatabase.run_marshalled = fail\n"
        "main()"
    )
    start_up(faulty)
    good = "SELECT count(*) FROM t"
    with SQLExecutor(workers=1, cache_entries=0) as executor:
        outcomes = [executor.execute(database, sql) for sql in ("absent 0x7", good, "absent 0x7fa1c")]
        outcomes += executor.execute_many([(database, sql) for sql in ("absent 140", good, "absent 7fb")])

    for outcome in (*outcomes[::2][:2], outcomes[3], outcomes[5]):
        assert (outcome.status, outcome.error) == ("error", "the database engine failed on this query")
    assert outcomes[1].rows == outcomes[4].rows == ((3,),)
    assert caplog.text.count("KeyError: 'absent") == 1
    assert "Traceback" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_starts_its_own_workers(executor: SQLExecutor, database: Path) -> None:
    executor.execute(database, "SELECT 1")
    before = pids(executor)
    reader, writer = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        outcomes = executor.execute_many([(database, "SELECT n FROM t")] * 3)
        writer.send((pids(executor), [outcome.rows for outcome in outcomes]))
        executor.close()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    # At the same time, so that mixed answers would show.
    ours = [executor.execute(database, f"SELECT {i}").rows for i in range(200)]
    theirs, rows = reader.recv()
    process.join()

    assert process.exitcode == 0
    assert ours == [((i,),) for i in range(200)]
    assert rows == [((1,), (2,), (3,))] * 3
    assert not theirs & before
    assert pids(executor) == before


def test_unpickled_executor_has_the_settings_and_its_own_workers(
    executor: SQLExecutor, database: Path
) -> None:
    executor.execute(database, "SELECT 1")

    with pickle.loads(pickle.dumps(executor)) as copy:
        assert (copy.limits, copy.queries, copy.cache_hits) == (executor.limits, 0, 0)
        assert copy.execute(database, "SELECT count(*) FROM t").rows == ((3,),)
        assert not pids(copy) & pids(executor)


def test_spawned_process_uses_an_executor(database: Path, tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "from text2sql_grpo.sql import SQLExecutor\n"
        "def child(executor, database, results):\n"
        "    with executor:\n"
        "        results.put(executor.execute(database, 'SELECT n FROM t').rows)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    results = context.SimpleQueue()\n"
        "    with SQLExecutor(workers=1) as executor:\n"
        "        executor.execute(sys.argv[1], 'SELECT 1')\n"
        "        process = context.Process(target=child, args=(executor, sys.argv[1], results))\n"
        "        process.start()\n"
        "        print(results.get())\n"
        "        process.join()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    done = subprocess.run(
        [sys.executable, script, database], capture_output=True, text=True, timeout=60, env=environment
    )

    assert (done.stdout, done.stderr) == ("((1,), (2,), (3,))\n", "")


@pytest.mark.parametrize("executable", ["", "/nowhere/python", sys.executable])
def test_worker_that_cannot_start_is_our_fault(
    database: Path, monkeypatch: pytest.MonkeyPatch, start_up: Callable[[str], None], executable: str
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    start_up("raise SystemExit(3)")

    with SQLExecutor() as executor, pytest.raises(RunError, match=r"sys\.executable|SQL worker"):
        executor.execute(database, "SELECT 1")


def test_fault_of_a_database_is_raised_from_a_batch(executor: SQLExecutor, database: Path) -> None:
    pairs = [(database, "SELECT 1")] * 50 + [(database.parent / "missing.sqlite", "SELECT 1")]

    with pytest.raises(DataError, match=r"No such file.*missing\.sqlite"):
        executor.execute_many(pairs)

    assert executor.execute(database, "SELECT 1").is_ok


def test_large_results_arrive_whole(executor: SQLExecutor, database: Path) -> None:
    rows = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 9000)"
    pairs = [(database, f"{rows} SELECT i, hex(zeroblob(100)), {k} FROM n") for k in range(12)]

    outcomes = executor.execute_many(pairs)

    for k, outcome in enumerate(outcomes):
        assert len(outcome.rows) == 9000
        assert outcome.rows[-1] == (9000, "0" * 200, k)


def test_workers_import_nothing_slow() -> None:
    boot = worker_process.BOOT.replace("main()", "print(sorted(sys.modules))")

    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", boot, str(worker_process.PACKAGE)],
        capture_output=True,
        text=True,
    )

    assert "'text2sql_grpo.sql.worker'" in done.stdout
    for name in ("typing", "dataclasses", "re", "pathlib", "text2sql_grpo.sql.executor"):
        assert f"'{name}'" not in done.stdout
