"""Every attack, run by worker processes on a real database: its outcome, and that it leaves nothing."""

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import duckdb
import psycopg
import pytest

from tests.hostile.attacks import Attack, load_attacks
from tests.hostile.surroundings import (
    MB,
    PeakMemory,
    Surroundings,
    child_pids,
    files_below,
    living_children,
    resident_bytes,
    wait_for,
)
from tests.postgres_server import WITHOUT_DBLINK, PostgresServer, running_postgres
from text2sql_grpo.sql import ExecutionOutcome, Limits, SQLExecutor
from text2sql_grpo.sql.postgres_role import restricted_role_sql

ENGINES = ("sqlite", "duckdb", "postgresql")
# The last one has the rights of any role that may read the tables.
TARGETS = {**dict(zip(ENGINES, ENGINES, strict=True)), "ordinary-role": "postgresql"}
WORKERS = 2
# Of one worker process, its 13 MB (SQLite), 50 MB (DuckDB) or 25 MB (PostgreSQL) of code included.
MAX_WORKER_BYTES = {"sqlite": 450 * MB, "duckdb": 4500 * MB, "postgresql": 300 * MB}
MAX_OWN_GROWTH = 60 * MB  # of this process, in one attack; the largest result is 5 MB
LONGER_LIMIT_S = 3.0
MAX_LATE_S = 1.5  # where other programs use the processors; `benchmarks/executor.py` measures it

CATEGORIES = ["writes", "memory", "time", "one instruction", "result size", "parser", "encodings"]
MORE_CATEGORIES = {
    "sqlite": ["files", "pragmas", "extensions"],
    "duckdb": ["shadowing", "files", "extensions and settings", "sql given as text", "several statements"],
    "postgresql": [
        *("shadowing", "files and programs", "other sessions", "rights and settings"),
        *("sql given as text", "several statements"),
    ],
}
STILL_READS = {
    "sqlite": "SELECT id, name, abs(-1), 'A' LIKE 'a' FROM ward ORDER BY id",
    "duckdb": "SELECT id, name, abs(-1), 'A' ILIKE 'a' FROM ward ORDER BY id",
    "postgresql": "SELECT id, name, abs(-1), 'A' ILIKE 'a' FROM ward ORDER BY id",
}
WARDS = ((1, "North", 1, 1), (2, "South", 1, 1))
SQLITE_TABLES = """
CREATE TABLE ward (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE visit (id INTEGER PRIMARY KEY, ward_id INTEGER REFERENCES ward (id), fee REAL, notes TEXT);
CREATE INDEX visit_fee ON visit (fee);
CREATE VIEW dear AS SELECT * FROM visit WHERE fee > 10;
INSERT INTO ward VALUES (1, 'North'), (2, 'South');
INSERT INTO visit VALUES (1, 1, 5.5, '{"a": [1, 2]}'), (2, 1, 20, NULL), (3, 2, 30, '{"a": []}');
"""
DUCKDB_TABLES = """
CREATE TABLE ward (id INT, name VARCHAR);
INSERT INTO ward VALUES (1, 'North'), (2, 'South');
CREATE SEQUENCE numbers;
CREATE VIEW named AS SELECT name FROM ward;
"""
POSTGRES_TABLES = """
CREATE TABLE ward (id int PRIMARY KEY, name text);
INSERT INTO ward VALUES (1, 'North'), (2, 'South');
CREATE SEQUENCE numbers;
CREATE TABLE hidden (secret text);
CREATE EXTENSION IF NOT EXISTS dblink;
CREATE FUNCTION as_admin() RETURNS int LANGUAGE sql SECURITY DEFINER AS 'SELECT 1';
"""
POSTGRES_ROLE = "reader_of_wards"
# What no query may change on a server: rows, tables, functions, large objects, locks, settings, sequences.
POSTGRES_STATE = """
SELECT 'row', id::text || name FROM ward
UNION ALL SELECT 'objects', count(*)::text FROM pg_largeobject_metadata
UNION ALL SELECT 'tables', count(*)::text FROM pg_class
UNION ALL SELECT 'functions', count(*)::text FROM pg_proc
UNION ALL SELECT 'schemas', count(*)::text FROM pg_namespace
UNION ALL SELECT 'roles', string_agg(r::text, ',') FROM pg_roles r
UNION ALL SELECT 'locks', count(*)::text FROM pg_locks WHERE locktype = 'advisory'
UNION ALL SELECT 'prepared', count(*)::text FROM pg_prepared_xacts
UNION ALL SELECT 'sequence', last_value::text || is_called FROM numbers
UNION ALL SELECT 'settings', string_agg(s::text, ',') FROM pg_db_role_setting s
ORDER BY 1, 2
"""


@dataclass(frozen=True)
class Target:
    """A database under attack.

    Attributes:
        engine: Of `ENGINES`.
        location: Its path or URL.
        folder: Holds the database, other files, and the working directory of the processes.
        executor: Runs the attacks.
        server_state: What else must stay as it is.
        others: Processes that tests before these started and left, such as the workers of their executors.
    """

    engine: str
    location: str
    folder: Path
    executor: SQLExecutor
    server_state: Callable[[], object]
    others: frozenset[int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where workers work, with files that no query may read."""
    folder = tmp_path_factory.mktemp("hostile")
    work = folder / "work"
    work.mkdir()
    (work / "notes.txt").write_text("a\n1\n")
    (work / "secret.csv").write_text("a\n1\n")
    with contextlib.closing(sqlite3.connect(work / "secret.sqlite")) as connection:
        connection.executescript("CREATE TABLE t (a); INSERT INTO t VALUES (1)")
    with duckdb.connect(str(work / "other.duckdb")) as database:
        database.execute("CREATE TABLE t AS SELECT 1 AS a")
    with contextlib.chdir(work):
        yield folder


@pytest.fixture(scope="module")
def sqlite_file(folder: Path) -> str:
    path = folder / "clinic.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(SQLITE_TABLES)
        with contextlib.suppress(sqlite3.OperationalError):  # built without full-text search
            connection.executescript(
                "CREATE VIRTUAL TABLE words USING fts5(body); INSERT INTO words VALUES ('a cat'), ('a dog')"
            )
    os.utime(path, (1, 1))
    return str(path)


@pytest.fixture(scope="module")
def duckdb_file(folder: Path) -> str:
    path = folder / "clinic.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute(DUCKDB_TABLES)
    return f"duckdb:///{path}"


@pytest.fixture(scope="module")
def postgres_server() -> Iterator[PostgresServer]:
    """A server of its own: calls that nothing interrupts go on there for hours, and end with it."""
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def admin(postgres_server: PostgresServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgres_server.admin_url(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE besieged")
    with psycopg.connect(postgres_server.admin_url("besieged"), autocommit=True) as connection:
        connection.execute(POSTGRES_TABLES)
        connection.execute(restricted_role_sql(POSTGRES_ROLE, "secret", "besieged"))
        connection.execute(WITHOUT_DBLINK)
        connection.execute(f"REVOKE SELECT ON hidden FROM {POSTGRES_ROLE}")
        connection.execute("CREATE ROLE ordinary LOGIN PASSWORD 'secret'; GRANT SELECT ON ward TO ordinary")
        connection.execute("ALTER ROLE ordinary SET default_transaction_read_only = on")
        connection.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")  # as before PostgreSQL 15
        yield connection


@pytest.fixture(scope="module")
def postgres_url(postgres_server: PostgresServer, admin: psycopg.Connection) -> str:
    return postgres_server.url(POSTGRES_ROLE, "secret", "besieged")


@pytest.fixture(scope="module")
def ordinary_url(postgres_server: PostgresServer, admin: psycopg.Connection) -> str:
    return postgres_server.url("ordinary", "secret", "besieged")


@pytest.fixture(scope="module")
def postgres_state(
    postgres_server: PostgresServer, postgres_url: str, ordinary_url: str, admin: psycopg.Connection
) -> Iterator[Callable[[], object]]:
    """The server's tables, its folders, and that another session of the same role lives."""
    with (
        psycopg.connect(postgres_url, autocommit=True) as sibling,
        psycopg.connect(ordinary_url, autocommit=True) as other,
    ):

        def state() -> object:
            names = sorted(path.name for path in (postgres_server.folder / "data").iterdir())
            alive = [session.execute("SELECT 1").fetchone() for session in (sibling, other)]
            return admin.execute(POSTGRES_STATE).fetchall(), names, alive

        yield state


@pytest.fixture(scope="module")
def target_of(request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[[str], Target]]:
    """One target for all attacks on an engine: what one leaves in a worker would show in the next."""
    fixtures = {"sqlite": "sqlite_file", "duckdb": "duckdb_file", "postgresql": "postgres_url"}
    fixtures["ordinary-role"] = "ordinary_url"
    targets: dict[str, Target] = {}

    def made(name: str) -> Target:
        engine = TARGETS[name]
        if name not in targets:
            close_all()  # so that their workers are not measured
            location = request.getfixturevalue(fixtures[name])
            state = request.getfixturevalue("postgres_state") if engine == "postgresql" else lambda: None
            others = frozenset(child_pids())
            executor = SQLExecutor(workers=WORKERS, cache_entries=0)
            executor.execute_many([(location, STILL_READS[engine])] * WORKERS)
            targets[name] = Target(engine, location, folder, executor, state, others)
        return targets[name]

    def close_all() -> None:
        for target in targets.values():
            target.executor.close()
        targets.clear()

    yield made
    close_all()


def parameters(*, are_late: bool = False) -> list[object]:
    """Each engine and attack; or those alone that end by a limit of time or memory, whichever is first.

    All but the first of each category are thorough.
    """
    chosen = [
        (name, attack)
        for name, engine in TARGETS.items()
        for attack in load_attacks(engine)
        if not are_late or "timeout" in attack.status
    ]
    first = {(name, attack.category): attack for name, attack in reversed(chosen)}
    return [
        pytest.param(
            *(name, attack),
            marks=[] if attack is first[name, attack.category] else pytest.mark.thorough,
            id=f"{name}-{attack.category}-{attack.name}",
        )
        for name, attack in chosen
    ]


def run_harmlessly(target: Target, attack: Attack, timeout_s: float) -> ExecutionOutcome:
    before = Surroundings.of(target.folder)
    server_before = target.server_state()

    with PeakMemory(target.others) as peak:
        started = time.monotonic()
        outcome = target.executor.execute(target.location, attack.sql, limits=Limits(timeout_s=timeout_s))
        elapsed_s = time.monotonic() - started

    if outcome.is_ok:
        assert outcome.columns
    else:
        assert outcome.rows == ()
        assert 0 < len(outcome.error) <= 300 and "\n" not in outcome.error
    assert elapsed_s < timeout_s + MAX_LATE_S
    assert peak.child_bytes < MAX_WORKER_BYTES[target.engine]
    assert peak.own_bytes < before.own_bytes + MAX_OWN_GROWTH
    assert target.server_state() == server_before
    assert wait_for(lambda: len(living_children() - target.others) <= WORKERS)
    after = target.executor.execute(target.location, STILL_READS[target.engine])
    assert after.rows == WARDS, after
    assert files_below(target.folder) == before.files
    assert wait_for(lambda: threading.active_count() <= before.n_threads)
    return outcome


@pytest.mark.parametrize(("name", "attack"), parameters())
def test_attack_has_its_outcome_and_leaves_nothing(
    target_of: Callable[[str], Target], name: str, attack: Attack
) -> None:
    outcome = run_harmlessly(target_of(name), attack, attack.timeout_s)

    assert outcome.status in attack.status, outcome.error
    assert outcome.is_truncated == (attack.is_truncated and outcome.is_ok)
    if attack.rows is not None:
        assert outcome.rows == attack.rows


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attack"), parameters(are_late=True))
def test_attack_that_has_more_time_takes_no_more_memory(
    target_of: Callable[[str], Target], name: str, attack: Attack
) -> None:
    """Some of them end within that time on a fast machine."""
    outcome = run_harmlessly(target_of(name), attack, LONGER_LIMIT_S)

    assert outcome.status in {*attack.status, "ok", "error", "memory"}, outcome.error


@pytest.mark.thorough
@pytest.mark.parametrize("one_in", [12, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TARGETS)
def test_attacks_of_a_batch_cost_no_other_query_its_answer(
    target_of: Callable[[str], Target], name: str, one_in: int
) -> None:
    target = target_of(name)
    attacks = load_attacks(target.engine)[::one_in]
    before = Surroundings.of(target.folder)
    server_before = target.server_state()
    children = child_pids()
    pairs = []
    for number, attack in enumerate(attacks):
        pairs += [(target.location, attack.sql), (target.location, f"SELECT {number}, name FROM ward")]

    with SQLExecutor(Limits(timeout_s=1), workers=4, cache_entries=0) as executor:
        outcomes = executor.execute_many(pairs)

    # One limit for all: here an attack may reach it that ends by itself.
    wrong = [
        (attack.name, outcome)
        for attack, outcome in zip(attacks, outcomes[::2], strict=True)
        if outcome.status not in (*attack.status, "timeout")
    ]
    assert wrong == []
    for number, outcome in enumerate(outcomes[1::2]):
        assert outcome.status == "timeout" or sorted(outcome.rows) == [(number, "North"), (number, "South")]
    assert sum(outcome.is_ok for outcome in outcomes[1::2]) > 0.9 * len(attacks)
    assert wait_for(lambda: child_pids() <= children)
    assert files_below(target.folder) == before.files
    assert target.server_state() == server_before
    assert wait_for(lambda: threading.active_count() <= before.n_threads)
    assert resident_bytes() < before.own_bytes + MAX_OWN_GROWTH


def test_attacks_are_many_and_of_every_kind() -> None:
    attacks = {engine: load_attacks(engine) for engine in ENGINES}

    assert sum(map(len, attacks.values())) >= 500
    for engine, more in MORE_CATEGORIES.items():
        assert {attack.category for attack in attacks[engine]} == {*CATEGORIES, *more}
        assert len({(attack.category, attack.sql) for attack in attacks[engine]}) == len(attacks[engine])
