import os
import re
import threading
import time
from collections.abc import Iterator
from urllib.parse import quote

import psutil
import psycopg
import pytest

from tests.postgres_server import HOST, WITHOUT_DBLINK, PostgresServer, running_postgres
from text2sql_grpo.commands.role import role
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.environment.observation import ObservationLimits, observation_text
from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Limits
from text2sql_grpo.sql.postgres_database import HardenedPostgres, fingerprint_of
from text2sql_grpo.sql.postgres_role import restricted_role_sql
from text2sql_grpo.sql.schema import read_schema

LIMITS = Limits(timeout_s=5.0)
PASSWORD = "s3cret @/'\\ é"
QUOTED_PASSWORD = quote(PASSWORD, safe="")
TABLES = """
    CREATE TABLE ward (id int PRIMARY KEY, name text);
    INSERT INTO ward VALUES (1, 'A'), (2, 'B');
    CREATE SEQUENCE numbers;
    CREATE TYPE mood AS ENUM ('sad', 'ok');
    CREATE TABLE hidden (secret text);
"""


RIGHTS_OF_PUBLIC = """
    SELECT objects.name, privilege_type FROM (
        SELECT datname::text, coalesce(datacl, acldefault('d', datdba)) FROM pg_database
        UNION ALL SELECT nspname, coalesce(nspacl, acldefault('n', nspowner)) FROM pg_namespace
        UNION ALL SELECT oid::regclass::text, coalesce(relacl, acldefault('r', relowner)) FROM pg_class
        UNION ALL SELECT oid::regprocedure::text, coalesce(proacl, acldefault('f', proowner)) FROM pg_proc
    ) AS objects (name, rights), aclexplode(rights) WHERE grantee = 0 ORDER BY 1, 2
"""


@pytest.fixture(scope="module")
def admin(postgres_server: PostgresServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgres_server.admin_url(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE hospital")
    with psycopg.connect(postgres_server.admin_url("hospital"), autocommit=True) as connection:
        connection.execute(TABLES)
        connection.execute("CREATE EXTENSION dblink")
        connection.execute(WITHOUT_DBLINK)
        connection.execute(restricted_role_sql("reader of 'wards'", PASSWORD, "hospital"))
        connection.execute("REVOKE SELECT ON hidden FROM \"reader of 'wards'\"")
        yield connection


@pytest.fixture(scope="module")
def url(postgres_server: PostgresServer, admin: psycopg.Connection) -> str:
    return postgres_server.url(quote("reader of 'wards'"), QUOTED_PASSWORD, "hospital")


@pytest.fixture(scope="module")
def database(url: str) -> Iterator[HardenedPostgres]:
    """One for all tests: what a query leaves behind would show in the next."""
    opened = HardenedPostgres(url, fingerprint_of(url))
    yield opened
    opened.close()


def test_stopped_query_ends_on_the_server_too(database: HardenedPostgres) -> None:
    pid = database.run("SELECT pg_backend_pid()", LIMITS).rows[0][0]
    busy = "SELECT count(*) FROM generate_series(1, 100000000000)"
    assert database.run(busy, Limits(timeout_s=0.2)).status == "timeout"
    time.sleep(0.3)
    before_s = cpu_seconds(pid)
    time.sleep(0.5)
    assert cpu_seconds(pid) - before_s < 0.2


def cpu_seconds(pid: int) -> float:
    """CPU time of a process; 0 if it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def test_endless_long_rows_are_not_gathered(database: HardenedPostgres) -> None:
    sql = """WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r)
        SELECT repeat('x', 1000000) FROM r"""
    outcome = database.run(sql, LIMITS)
    assert (outcome.status, outcome.is_truncated, len(outcome.rows)) == ("ok", True, 4)


def test_refused_query_is_not_volatile_for_the_one_before(database: HardenedPostgres) -> None:
    assert database.run("SELECT random()", LIMITS).is_ok and database.is_volatile
    for sql in ("DROP TABLE ward", "--"):
        assert not database.run(sql, LIMITS).is_ok and not database.is_volatile, sql


def test_endless_digits_are_not_gathered(database: HardenedPostgres) -> None:
    sql = "SELECT repeat('9', 10000)::numeric - g FROM generate_series(1, 100000) g"
    outcome = database.run(sql, Limits(max_bytes=100_000))
    assert (outcome.status, outcome.is_truncated) == ("ok", True)
    assert 5 < len(outcome.rows) <= 10  # texts of 10,000 characters


def test_settings_of_the_session_hold_after_discarding(database: HardenedPostgres) -> None:
    database.run("SELECT 1", LIMITS)
    outcome = database.run(
        "SELECT current_setting('default_transaction_read_only'), current_setting('TimeZone'),"
        " current_setting('jit'), current_setting('transaction_read_only')",
        LIMITS,
    )
    assert outcome.rows == (("on", "UTC", "off", "on"),)


def test_options_of_the_url_hold_and_never_loosen(url: str) -> None:
    options = "-csearch_path=pg_catalog -cdefault_transaction_read_only=off -cstatement_timeout=0"
    opened = HardenedPostgres(f"{url}?options={quote(options)}", None)
    names = ("search_path", "default_transaction_read_only", "transaction_read_only")
    for _ in range(2):  # the second after a reset of the session
        outcome = opened.run("SELECT " + ", ".join(f"current_setting('{name}')" for name in names), LIMITS)
        assert outcome.rows == (("pg_catalog", "on", "on"),)
    opened.close()


def test_the_next_host_is_asked(url: str) -> None:
    opened = HardenedPostgres(url.replace("@127.0.0.1:", "@127.0.0.1:1,127.0.0.1:"), None)
    assert opened.run("SELECT 1", LIMITS).rows == ((1,),)
    opened.close()


def test_connection_that_the_server_closed_is_opened_again(url: str, admin: psycopg.Connection) -> None:
    database = HardenedPostgres(url)
    admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename LIKE 'reader%'")
    time.sleep(0.1)
    assert database.run("SELECT 1", LIMITS).rows == ((1,),)
    database.close()
    database.close()
    assert database.run("SELECT 2", LIMITS).rows == ((2,),)
    database.close()


def test_query_ended_by_an_administrator_is_no_error_of_the_query(
    url: str, admin: psycopg.Connection
) -> None:
    database = HardenedPostgres(url)
    for function, found in (
        ("pg_terminate_backend", "due to administrator command"),
        ("pg_cancel_backend", "due to user request"),
    ):
        timer = threading.Timer(
            0.2,
            admin.execute,
            [f"SELECT {function}(pid) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"],
        )
        timer.start()
        with pytest.raises(DataError, match=f"PostgreSQL failed: .*{found}"):
            database.run("SELECT pg_sleep(10)", Limits(timeout_s=20))
        timer.join()
        assert database.run("SELECT 1", LIMITS).rows == ((1,),)
    database.close()


def test_locked_table_is_no_error_of_the_query(
    database: HardenedPostgres, postgres_server: PostgresServer, admin: psycopg.Connection
) -> None:
    with psycopg.connect(postgres_server.admin_url("hospital")) as other:
        other.execute("LOCK TABLE ward")
        with pytest.raises(DataError, match="canceling statement due to lock timeout"):
            database.run("SELECT * FROM ward", LIMITS)
    assert len(database.run("SELECT * FROM ward", LIMITS).rows) == 2


@pytest.mark.thorough
def test_crash_of_the_server_costs_one_query_and_a_stop_the_run() -> None:
    with running_postgres() as server:
        with psycopg.connect(server.admin_url(), autocommit=True) as admin:
            admin.execute(restricted_role_sql("reader", "x", "postgres"))
        database = HardenedPostgres(server.url("reader", "x"))
        pid = database.run("SELECT pg_backend_pid()", LIMITS).rows[0][0]
        assert isinstance(pid, int)
        timer = threading.Timer(0.2, os.kill, (pid, 9))
        timer.start()
        outcome = database.run("SELECT pg_sleep(10)", Limits(timeout_s=20))
        timer.join()
        assert outcome.status == "error"
        assert outcome.error == "the database server closed the connection while the query ran"
        assert database.run("SELECT 1", LIMITS).rows == ((1,),)  # waits until the server has recovered
    with pytest.raises(DataError, match=r"PostgreSQL failed: .*refused"):
        database.run("SELECT 1", LIMITS)


def bad_urls(server: PostgresServer) -> list[tuple[str, str]]:
    reader = quote("reader of 'wards'")
    return [
        (server.url(reader, "wrong-secret", "hospital"), "password authentication failed"),
        (server.url("nobody", "wrong-secret", "hospital"), "password authentication failed"),
        (server.url(reader, QUOTED_PASSWORD, "nope"), 'database "nope" does not exist'),
        (f"postgresql://{reader}:{QUOTED_PASSWORD}@127.0.0.1:1/hospital", "refused"),
        (f"postgresql://{reader}:wrong-secret@127.0.0.1:port/hospital", "set PGPASSWORD"),
        (f"postgresql://{reader}:wrong-@secret@127.0.0.1/hospital", "malformed"),
        (f"postgresql://{reader}:wrong-/secret@127.0.0.1/hospital", "malformed"),
        (f"postgresql://{reader}:wrong-secret?@127.0.0.1:1/hospital", "refused"),
        (f"postgresql://{reader}:wrong-secret%@127.0.0.1/hospital", "malformed"),
        (server.admin_url("hospital"), "is a superuser"),
    ]


@pytest.mark.parametrize("index", range(10))
def test_refused_connection_says_why_and_never_the_password(
    postgres_server: PostgresServer, url: str, index: int
) -> None:
    location, found = bad_urls(postgres_server)[index]
    with pytest.raises(DataError) as caught:
        HardenedPostgres(location)
    text = str(caught.value)
    assert found in text
    assert "\n" not in text
    for secret in ("secret", "s3cret", QUOTED_PASSWORD, PASSWORD, "of-the-admin"):
        assert secret not in text
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    ("grant", "revoke", "found"),
    [
        (
            "GRANT CREATE ON DATABASE hospital TO {}",
            "REVOKE CREATE ON DATABASE hospital FROM {}",
            "create schemas",
        ),
        (
            "GRANT CREATE ON SCHEMA public TO {}",
            "REVOKE CREATE ON SCHEMA public FROM {}",
            "create tables in public",
        ),
        ("GRANT INSERT ON ward TO {}", "REVOKE INSERT ON ward FROM {}", "may change ward"),
        ("ALTER ROLE {} CREATEROLE", "ALTER ROLE {} NOCREATEROLE", "may create roles"),
        (
            "GRANT pg_read_server_files TO {}",
            "REVOKE pg_read_server_files FROM {}",
            "member of pg_read_server_files",
        ),
        ("GRANT UPDATE (name) ON ward TO {}", "REVOKE UPDATE (name) ON ward FROM {}", "may change ward"),
        ("GRANT INSERT (id) ON ward TO {}", "REVOKE INSERT (id) ON ward FROM {}", "may change ward"),
        (
            "GRANT EXECUTE ON FUNCTION pg_read_file(text) TO {}",
            "REVOKE EXECUTE ON FUNCTION pg_read_file(text) FROM {}",
            "may call pg_read_file",
        ),
        (
            "GRANT EXECUTE ON FUNCTION lo_import(text) TO {}",
            "REVOKE EXECUTE ON FUNCTION lo_import(text) FROM {}",
            "may call lo_import",
        ),
        (
            "GRANT EXECUTE ON FUNCTION dblink(text, text) TO {}",
            "REVOKE EXECUTE ON FUNCTION dblink(text, text) FROM {}",
            "may call dblink",
        ),
        (
            "GRANT USAGE ON SEQUENCE numbers TO {}",
            "REVOKE USAGE ON SEQUENCE numbers FROM {}",
            "sequence numbers",
        ),
        ("GRANT pg_write_all_data TO {}", "REVOKE pg_write_all_data FROM {}", "member of pg_write_all_data"),
        ("GRANT pg_signal_backend TO {}", "REVOKE pg_signal_backend FROM {}", "member of pg_signal_backend"),
    ],
)
def test_role_that_may_do_more_than_read_is_refused(
    url: str, admin: psycopg.Connection, grant: str, revoke: str, found: str
) -> None:
    role = "\"reader of 'wards'\""
    admin.execute(grant.format(role))
    try:
        with pytest.raises(DataError, match=rf"the PostgreSQL role .*{found}.*use one that can only read"):
            HardenedPostgres(url)
    finally:
        admin.execute(revoke.format(role))
    HardenedPostgres(url).close()


def test_function_with_the_rights_of_its_owner_is_not_called(
    url: str, postgres_server: PostgresServer, admin: psycopg.Connection
) -> None:
    admin.execute(
        "CREATE FUNCTION as_owner(int) RETURNS int LANGUAGE sql SECURITY DEFINER AS 'SELECT $1 + 1';"
        "CREATE VIEW calling AS SELECT as_owner(id) AS n FROM ward WHERE id = 1;"
        "GRANT SELECT ON calling TO \"reader of 'wards'\""
    )
    try:
        database = HardenedPostgres(url)
        for call in ("as_owner(1)", 'public."as_owner" (1)', "AS_OWNER/* */(1)"):
            outcome = database.run(f"SELECT {call}", LIMITS)
            assert (outcome.status, "not allowed: as_owner" in outcome.error) == ("denied", True)
        assert database.run("SELECT n FROM calling", LIMITS).rows == ((2,),)
        database.close()
    finally:
        admin.execute("DROP VIEW calling; DROP FUNCTION as_owner")


def test_ordinary_role_is_warned_of_once_and_its_queries_leave_nothing(
    postgres_server: PostgresServer, admin: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    admin.execute("CREATE ROLE plain LOGIN PASSWORD 'x'; GRANT SELECT ON ward TO plain")
    admin.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")  # as before PostgreSQL 15
    url = postgres_server.url("plain", "x", "hospital")
    try:
        for _ in range(2):
            with SQLExecutor(workers=2, cache_entries=0) as executor:
                assert executor.execute(url, "SELECT name FROM ward WHERE id = 1").rows == (("A",),)
                assert executor.execute(url, "SELECT name INTO mine FROM ward").status != "ok"
    finally:
        admin.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    assert admin.execute("SELECT to_regclass('mine')").fetchone() == (None,)
    warnings = [record.getMessage() for record in caplog.records if "beyond reading" in record.getMessage()]
    assert len(warnings) == 1
    for right in ("temporary tables", "creating tables in public", "advisory"):
        assert right in warnings[0]
    assert "plain@" in warnings[0]
    assert "read-only" in warnings[0] and "x@" not in warnings[0]


@pytest.mark.parametrize(
    "sql",
    [
        'SELECT U&"pg\\005fterminate\\005fbackend"(1)',
        'SELECT pg_catalog . "pg_terminate_backend"(1)',
        "SELECT 1AS a, 2pg_cancel_backend",
        "SELECT query_to_xml('select pg_' || 'notify(1, 2)', true, true, '')",
        "SELECT PG_TRY_ADVISORY_LOCK(1)",
        "SELECT (1).lo_unlink",
    ],
)
def test_guarded_name_is_found_however_it_is_written(database: HardenedPostgres, sql: str) -> None:
    assert database.run(sql, LIMITS).status == "denied"


def test_names_that_only_resemble_guarded_ones_are_read(database: HardenedPostgres) -> None:
    names = "lo_orderdate, dataset_config, http"
    sql = f"SELECT {names} FROM (VALUES (1, 2, 3)) AS t ({names})"
    assert database.run(sql, LIMITS).rows == ((1, 2, 3),)


def test_printed_role_is_made_by_the_owner_and_accepted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_postgres() as server:
        with server.admin() as admin:
            admin.execute("CREATE ROLE boss LOGIN CREATEROLE PASSWORD 'y'")
            admin.execute("CREATE DATABASE sales OWNER boss")
        with psycopg.connect(server.url("boss", "y", "sales"), autocommit=True) as owner:
            owner.execute("CREATE TABLE item (id int); INSERT INTO item VALUES (7)")
            before = owner.execute(RIGHTS_OF_PUBLIC).fetchall()
            assert role(print=True, database="sales") == 0
            printed = capsys.readouterr()
            assert "PUBLIC" not in printed.out
            owner.execute(printed.out)
            assert owner.execute(RIGHTS_OF_PUBLIC).fetchall() == before
        (url,) = re.findall(r"postgresql://\S+", printed.err)
        (password,) = re.findall(r"PGPASSWORD=([\w-]+)", printed.err)
        monkeypatch.setenv("PGPASSWORD", password)
        with SQLExecutor(workers=1) as executor:
            address = url.replace("HOST", f"{HOST}:{server.port}")
            assert executor.execute(address, "SELECT id FROM item").rows == ((7,),)
            assert [table.name for table in read_schema(address).tables] == ["item"]
            assert Databases({"sales": address}).address("sales") == address


def test_numbers_of_any_length_reach_the_model(database: HardenedPostgres) -> None:
    outcome = database.run("SELECT 10::numeric ^ 100000, repeat('x', 3000000)", LIMITS)
    assert (outcome.status, outcome.is_truncated) == ("ok", True)
    assert outcome.rows == ((f"1{'0' * 100_000}", "x" * 1_000_000),)
    assert observation_text(outcome, ObservationLimits()).splitlines()[1].startswith("1000")


def test_nothing_is_cached(url: str) -> None:
    assert fingerprint_of(url) is None


def test_transactions_block_nobody_and_name_the_application(
    database: HardenedPostgres, admin: psycopg.Connection
) -> None:
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "application_name")
    shown = ", ".join(f"current_setting('{name}')" for name in names)
    assert database.run(f"SELECT {shown}", LIMITS).rows == (("5s", "1s", "1min", "text2sql-grpo"),)
    for _ in range(50):  # the end of the transaction is asked for, and not waited for
        found = admin.execute("SELECT state FROM pg_stat_activity WHERE application_name = 'text2sql-grpo'")
        states = {state for (state,) in found.fetchall()}
        if states <= {"idle", "disabled"}:
            break
        time.sleep(0.1)
    assert states <= {"idle", "disabled"}  # disabled: the role hides what it runs
    found = admin.execute(
        "SELECT count(*) FROM pg_locks JOIN pg_class c ON c.oid = relation WHERE relname = 'ward'"
    )
    assert found.fetchone() == (0,)


def test_version_of_a_server_changes_with_its_tables(url: str, admin: psycopg.Connection) -> None:
    with SQLExecutor(workers=1) as executor:
        admin.execute("INSERT INTO ward VALUES (3, 'C')")
        before = executor.version(url)
        executor.execute(url, "SELECT count(*) FROM ward")
        assert executor.version(url) == before is not None
        admin.execute("DELETE FROM ward WHERE id = 3")
        assert executor.version(url) != before
