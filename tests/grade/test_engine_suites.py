"""Test suites of DuckDB files and of a real PostgreSQL server, with the types that SQLite does not have."""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import duckdb
import psycopg
import pytest

from tests.postgres_server import PostgresServer
from tests.tiers import but_first_thorough
from text2sql_grpo.audit.gold_stability import open_results
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.grading import postgres_server as private
from text2sql_grpo.grading.suite import MAX_SUITES, TestSuite
from text2sql_grpo.grading.verdict import CHANGING, Grader, Submission
from text2sql_grpo.sql.address import parse_address
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.postgres_role import restricted_role_sql

SHOP = """
CREATE SCHEMA sales;
CREATE TYPE mood AS ENUM ('calm', 'it''s');
CREATE TABLE person (id INTEGER PRIMARY KEY, "Name" VARCHAR(20) NOT NULL, mood mood, owes DECIMAL(10, 2),
    active BOOLEAN, seen TIMESTAMP WITH TIME ZONE, woke TIMESTAMP, born DATE, tags INTEGER[], extra JSON,
    gap INTERVAL, code UUID, age INTEGER CHECK (age BETWEEN 0 AND 120), UNIQUE ("Name", born));
CREATE TABLE friend (person INTEGER REFERENCES person (id), since DATE);
CREATE TABLE sales.orders (nr INTEGER NOT NULL, paid DOUBLE PRECISION);
CREATE UNIQUE INDEX orders_nr ON sales.orders (nr);
CREATE TABLE huge (n DECIMAL(30, 0));
CREATE VIEW rich AS SELECT * FROM person WHERE owes > 12;
CREATE VIEW vast AS SELECT * FROM huge WHERE n > 5;
CREATE VIEW fans AS
    SELECT array_agg("Name") AS names, concat_ws('-', mood, active) AS state FROM person GROUP BY 2;
INSERT INTO huge VALUES (100000000000000000000), (3);
INSERT INTO person SELECT n, 'Name ' || n % 9,
    CASE WHEN n % 2 = 0 THEN 'calm' ELSE 'it''s' END::mood, n + 0.25, n % 3 = 0,
    TIMESTAMPTZ '2020-01-01 10:00:00+02' + n * INTERVAL '1 day',
    TIMESTAMP '2020-01-01 10:00:00.5' + n * INTERVAL '1 hour', DATE '2010-03-01' + 40 * n::INTEGER,
    ARRAY[n, n + 1], '{"a": 1}', n * INTERVAL '1 day',
    ('00000000-0000-0000-0000-0000000000' || (10 + n))::UUID, 20 + n
    FROM generate_series(0, 29) AS s (n);
INSERT INTO friend SELECT n % 7, DATE '2020-01-01' FROM generate_series(0, 39) AS s (n);
INSERT INTO sales.orders SELECT n, n / 4.0 FROM generate_series(0, 39) AS s (n);
"""
FUNCTION = """
CREATE FUNCTION twice(n integer) RETURNS integer LANGUAGE plpgsql AS
    'BEGIN IF current_setting(''is_superuser'') = ''on'' THEN DROP TABLE friend; END IF; RETURN 2 * n; END';
ALTER TABLE friend ADD CHECK (twice(person) >= 0) NOT VALID;
"""
ENGINES = ("duckdb", "postgresql")


@pytest.fixture(scope="module", params=but_first_thorough(ENGINES))
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "duckdb":
        path = tmp_path_factory.mktemp("shop") / "shop.duckdb"
        with duckdb.connect(str(path)) as connection:
            connection.execute(SHOP)
        return f"duckdb:///{path}"
    server: PostgresServer = request.getfixturevalue("postgres_server")
    with psycopg.connect(server.admin_url(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE typed")
    with psycopg.connect(server.admin_url("typed"), autocommit=True) as admin:
        admin.execute(SHOP + FUNCTION)
        admin.execute(restricted_role_sql("typed_reader", "secret", "typed", schemas=("public", "sales")))
    return server.url("typed_reader", "secret", "typed")


@pytest.fixture(scope="module")
def grader(executor: SQLExecutor, shop: str, tmp_path_factory: pytest.TempPathFactory) -> Grader:
    return Grader(executor, suite=TestSuite(executor, tmp_path_factory.mktemp("suites")))


@pytest.mark.thorough
def test_nothing_is_said_of_views_that_only_the_mirror_cannot_read(
    executor: SQLExecutor, shop: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    suite = TestSuite(executor, tmp_path)
    assert suite.databases(shop, 'SELECT "Name" FROM person WHERE age > 30').databases
    assert "left out of the schema" not in caplog.text


BORN = "SELECT \"Name\" FROM person WHERE born >= DATE '2012-01-01'"
CALM = "SELECT count(*) FROM person WHERE mood = 'calm'"
TAGS = "SELECT count(*) FROM person WHERE 3 = ANY(tags)"  # SQLite has no arrays
GAP = "SELECT count(*) FROM person WHERE gap > INTERVAL '252 hours'"  # of no row
OLDER = "SELECT id FROM person WHERE age > ALL (SELECT age FROM person WHERE mood = 'calm')"
LIKE = "SELECT count(*) FROM person WHERE \"Name\" LIKE '%me 1'"
WRONG = [  # right on the database itself
    (OLDER, "SELECT id FROM person WHERE age > (SELECT max(age) FROM person WHERE mood = 'calm')"),
    (GAP, GAP.replace(">", ">=")),
    (GAP, GAP.replace("252", "251")),
    (BORN, "SELECT \"Name\" FROM person WHERE born >= '2012-01-05'"),
    (CALM, f"{CALM} AND age < 60"),
    (TAGS, "SELECT 2"),
    (LIKE, LIKE.replace("LIKE", "ILIKE")),
    ('SELECT "Name" FROM person ORDER BY id', 'SELECT "Name" FROM person'),
]
RIGHT = [
    (GAP, "SELECT count(*) FROM person WHERE NOT gap <= '252 hours'"),
    (BORN, 'SELECT "Name" FROM person WHERE EXTRACT(YEAR FROM born) >= 2012'),
    (CALM, "SELECT sum(CASE WHEN mood <> 'calm' THEN 0 ELSE 1 END) FROM person"),
    (CALM, f"{CALM} AND age < 121"),  # a CHECK forbids it
    (LIKE, LIKE.replace("LIKE '%me 1'", "~ 'me 1$'")),
    (TAGS, "SELECT max(n) FROM (SELECT count(*) AS n FROM person WHERE 3 = ANY(tags) GROUP BY 0 * id) AS t"),
]


@pytest.mark.parametrize(("gold", "wrong"), WRONG)
def test_what_is_right_on_one_database_only_is_refused(
    shop: str, executor: SQLExecutor, grader: Grader, gold: str, wrong: str
) -> None:
    assert Grader(executor).grade(shop, gold, wrong).strict
    assert grader.grade(shop, gold, wrong).reason == "test_database"


@pytest.mark.thorough
def test_days_of_postgresql_are_right_today_only(shop: str, grader: Grader) -> None:
    if shop.startswith("duckdb"):
        pytest.skip("DuckDB has no such texts")
    today = grader.gold_result(shop, "SELECT current_date").outcome.rows[0][0]
    query = "SELECT id FROM person WHERE born < {}"
    for day in ("'today'", "'tomorrow'::date - 1", "DATE 'now'", "CAST('Today' AS TIMESTAMP)"):
        assert grader.grade(shop, query.format(f"'{today}'"), query.format(day)).reason == "test_database"
    verdict = grader.grade(shop, query.format(f"'{today}'"), query.format("timeofday()::date"))
    assert (verdict.strict, verdict.gap) == (True, CHANGING)


@pytest.mark.parametrize(("gold", "right"), RIGHT)
def test_right_rewrites_are_accepted(shop: str, grader: Grader, gold: str, right: str) -> None:
    verdict = grader.grade(shop, gold, right)
    assert (verdict.reason, verdict.gap) == ("equal", "")


@pytest.mark.parametrize(
    ("gold", "answer", "reason"),
    [
        ("born", "CAST(born AS TIMESTAMP)", "equal"),
        ("seen", "seen AT TIME ZONE 'UTC'", "equal"),
        ("woke", "CAST(woke AS VARCHAR(40))", "equal"),
        ("woke", "replace(CAST(woke AS VARCHAR(40)), ' ', 'T')", "equal"),
        ("owes", "CAST(owes AS DOUBLE PRECISION)", "equal"),
        ("id", "CAST(id AS DECIMAL(9, 3))", "equal"),
        ("active", "CASE WHEN active THEN 1 ELSE 0 END", "equal"),
        ("born", "CAST(born AS TIMESTAMP) + INTERVAL '1 second'", "values"),
        ("seen", "seen AT TIME ZONE 'UTC' + INTERVAL '1 hour'", "values"),
        ("owes", "owes + 0.01", "values"),
    ],
)
def test_numbers_and_dates_are_compared_by_value(
    shop: str, executor: SQLExecutor, gold: str, answer: str, reason: str
) -> None:
    grader = Grader(executor)
    for order in ("", " ORDER BY id"):
        queries = (f"SELECT {column} AS x FROM person{order}" for column in (gold, answer))
        assert grader.grade(shop, *queries).reason == reason


def test_copies_have_the_types_and_keys_of_their_database(
    shop: str, executor: SQLExecutor, grader: Grader
) -> None:
    assert grader.suite is not None
    copies = grader.suite.databases(shop, BORN).databases
    assert len(copies) == 4
    typeof = "typeof" if shop.startswith("duckdb") else "pg_typeof"
    names = ("mood", "owes", "active", "seen", "woke", "born", "tags", "extra", "gap", "code")
    kinds = f"SELECT {', '.join(f'CAST({typeof}({n}) AS VARCHAR(80))' for n in names)} FROM person LIMIT 1"
    assert executor.execute(copies[0], kinds).rows == executor.execute(shop, kinds).rows
    lost = "SELECT count(*) FROM friend WHERE person NOT IN (SELECT id FROM person)"
    shown = "SELECT count(*) - count(DISTINCT nr) FROM sales.orders"
    for copy in copies:
        assert executor.execute(copy, lost).rows == executor.execute(copy, shown).rows == ((0,),)
        assert executor.execute(copy, "DELETE FROM person").status == "denied"
        if shop.startswith("postgresql"):
            assert executor.execute(copy, "SELECT twice(2)").rows == ((4,),)


BY_CLOCK = ["now()", "current_date", "current_timestamp", "age(seen)", "localtimestamp"]
BY_CHANCE = ["random()", "gen_random_uuid()"]
OF_ONE_ENGINE = {
    "duckdb": (["today()"], ["uuid()"], " USING SAMPLE 3"),
    "postgresql": (
        ["transaction_timestamp()", "clock_timestamp()", "'today'::date"],
        [],
        " TABLESAMPLE BERNOULLI (50)",
    ),
}


def test_what_the_clock_and_chance_decide_is_reported_by_the_engine(shop: str, executor: SQLExecutor) -> None:
    clock, chance, sample = OF_ONE_ENGINE[shop.partition(":")[0]]
    by_clock = [
        f"SELECT count(*) FROM person WHERE CAST({call} AS VARCHAR(90)) > '0'" for call in BY_CLOCK + clock
    ]
    by_chance = [f"SELECT id, {call} FROM person" for call in BY_CHANCE + chance] + [
        f"SELECT id FROM person{sample}"
    ]
    fixed = [
        "SELECT date_part('year', born) FROM person",
        "SELECT count(*) FROM person WHERE \"Name\" = 'random (x)' OR \"Name\" = 'now()x'",
        "SELECT seen AT TIME ZONE 'UTC' FROM person ORDER BY id",
    ]
    golds = [(shop, sql) for sql in (*by_clock, *by_chance, *fixed)]
    outcomes = executor.execute_many(golds)
    assert all(outcome.is_ok for outcome in outcomes), [outcome.error for outcome in outcomes]
    kinds = [found and found[0] for found in open_results(golds, outcomes, executor)]
    assert kinds == (
        ["time_dependent"] * len(by_clock) + ["non_deterministic"] * len(by_chance) + [None] * len(fixed)
    )


def test_a_table_that_no_copy_has_is_reported_and_nothing_is_refused_by_it(shop: str, grader: Grader) -> None:
    for gold, answer in (
        ("SELECT count(*) FROM huge", "SELECT 2"),
        (CALM, f"{CALM} AND (SELECT count(*) FROM vast) > 0"),
    ):
        verdict = grader.grade(shop, gold, answer)
        assert verdict.strict
        assert "more than 64 bits" in verdict.gap
        assert grader.accepted[verdict.gap] > 0


def test_the_folder_may_have_signs_that_mean_something_in_a_uri(
    shop: str, executor: SQLExecutor, tmp_path: Path
) -> None:
    found = TestSuite(executor, tmp_path / "50%25 #").databases(shop, BORN)
    assert len(found.databases) == 4 and os.listdir(tmp_path) == ["50%25 #"]  # none is read elsewhere


def test_test_databases_of_a_duckdb_file_are_found_again(
    tmp_path: Path,
    executor: SQLExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with duckdb.connect(str(tmp_path / "a.duckdb")) as connection:
        connection.execute("CREATE TABLE t AS SELECT n AS a FROM range(9) AS s (n)")
        connection.execute("CREATE TABLE huge AS SELECT 100000000000000000000::HUGEINT AS n")
        connection.execute("CREATE VIEW vast AS SELECT n FROM huge")
    url, gold = f"duckdb:///{tmp_path}/a.duckdb", "SELECT a FROM t WHERE a > 3"
    first, again = (TestSuite(executor, tmp_path / "cache") for _ in range(2))
    copies = first.databases(url, gold).databases
    monkeypatch.setattr("text2sql_grpo.grading.duckdb_copies._build", None)

    def refuse(*_: object) -> None:
        raise PermissionError("the file is another user's")

    monkeypatch.setattr(os, "utime", refuse)
    assert len(copies) == 4 and again.databases(url, gold).databases == copies
    assert not caplog.messages  # of the view of a table that has no copy
    monkeypatch.setattr("text2sql_grpo.grading.mirror.as_sqlite", None)
    assert "internal error: TypeError" in again.databases(url, "SELECT a FROM t WHERE a > 4").gap


@pytest.mark.parametrize(("least", "n_databases"), [(-(2**63), 1), (-(2**63) - 1, 0)])
def test_integers_of_64_bits_are_copied(
    tmp_path: Path, executor: SQLExecutor, least: int, n_databases: int
) -> None:
    with duckdb.connect(str(tmp_path / "big.duckdb")) as connection:
        connection.execute("CREATE TABLE t (a HUGEINT); INSERT INTO t SELECT range FROM range(9)")
        connection.execute("INSERT INTO t VALUES (?)", [least])
    suite = TestSuite(executor, tmp_path, size=1)
    found = suite.databases(f"duckdb:///{tmp_path}/big.duckdb", "SELECT a FROM t WHERE a > 3")
    assert len(found.databases) == n_databases
    assert ("more than 64 bits" in found.gap) == (not n_databases)


@pytest.mark.thorough
def test_copies_on_a_server_of_the_user_are_dropped_at_the_end(
    postgres_server: PostgresServer, tmp_path: Path, executor: SQLExecutor
) -> None:
    with psycopg.connect(postgres_server.admin_url(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE small")
    with psycopg.connect(postgres_server.admin_url("small"), autocommit=True) as admin:
        admin.execute("CREATE TABLE t AS SELECT n AS a FROM generate_series(1, 9) AS n")
        admin.execute(restricted_role_sql("small_reader", "secret", "small"))
    url, gold = postgres_server.url("small_reader", "secret", "small"), "SELECT a FROM t WHERE a > 3"
    refused = TestSuite(executor, tmp_path, url=url)
    with pytest.raises(ConfigError, match="needs a superuser"):
        refused.check(url)
    assert "superuser" in refused.databases(url, gold).gap
    own = TestSuite(executor, tmp_path, url=postgres_server.admin_url())
    assert len(own.databases(url, gold).databases) == 4
    assert _n_left(postgres_server) > 4
    del own
    assert _n_left(postgres_server) == 0


@pytest.mark.thorough
def test_a_batch_may_have_more_gold_queries_than_copies_are_kept(
    postgres_server: PostgresServer, tmp_path: Path, executor: SQLExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_SUITES, "postgresql", 1)
    monkeypatch.setattr("text2sql_grpo.grading.verdict.MAX_SUITES_AT_ONCE", 1)
    url = postgres_server.create("many", "CREATE TABLE t AS SELECT n AS a FROM generate_series(1, 9) AS n")
    grader = Grader(executor, suite=TestSuite(executor, tmp_path))
    golds = [f"SELECT a FROM t WHERE a > {number}" for number in (3, 4)]
    assert all(one.strict for one in grader.grade_many([Submission(url, gold, gold) for gold in golds]))
    assert grader.accepted == {"": 2}


def test_gold_queries_of_one_translation_have_test_databases_of_their_own(
    tmp_path: Path, executor: SQLExecutor
) -> None:
    path = tmp_path / "numbers.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE t AS SELECT n AS a, 'Xy' || n AS b FROM range(9) AS s (n)")
    suite = TestSuite(executor, tmp_path / "cache")
    for condition in ("b ILIKE 'x%'", "lower(b) LIKE lower('x%')"):
        assert suite.databases(f"duckdb:///{path}", f"SELECT a FROM t WHERE {condition}").databases
    assert suite.n_searched == 2


def _n_left(server: PostgresServer) -> int:
    with psycopg.connect(server.admin_url()) as admin:
        query = """
            SELECT count(*) FROM (SELECT datname FROM pg_database UNION ALL SELECT rolname FROM pg_roles)
            AS own (name) WHERE name LIKE 'text2sql%'
        """
        return int(admin.execute(query).fetchall()[0][0])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("create", "gold"),
    [
        (
            "(price DECIMAL(12, 2), qty INTEGER, total DECIMAL(12, 2) GENERATED ALWAYS AS (price * qty) {})",
            "total",
        ),
        (
            '("a, b" INTEGER, "GENERATED ALWAYS AS" INTEGER, c INTEGER GENERATED ALWAYS AS ("a, b" + 1) {})',
            "c",
        ),
    ],
)
def test_generated_columns_of_any_type_are_computed_on_copies(
    tmp_path: Path,
    postgres_server: PostgresServer,
    executor: SQLExecutor,
    create: str,
    gold: str,
) -> None:
    rows = "INSERT INTO t SELECT n, n + 2 FROM generate_series(1, 30) AS s (n)"
    with duckdb.connect(str(tmp_path / "a.duckdb")) as connection:
        connection.execute(f"CREATE TABLE t {create.format('')}")
        connection.execute(rows)
    name = f"generated_{gold}"
    with psycopg.connect(postgres_server.admin_url(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
    with psycopg.connect(postgres_server.admin_url(name), autocommit=True) as admin:
        admin.execute(f"CREATE TABLE t {create.format('STORED')}")
        admin.execute(rows)
        admin.execute(restricted_role_sql(f"{name}_reader", "secret", name))
    suite = TestSuite(executor, tmp_path / "cache")
    urls = (f"duckdb:///{tmp_path}/a.duckdb", postgres_server.url(f"{name}_reader", "secret", name))
    for url in urls:
        found = suite.databases(url, f"SELECT {gold} FROM t WHERE {gold} > 20")
        assert (len(found.databases), found.gap) == (4, "")
        for copy in found.databases:
            assert executor.execute(copy, f"SELECT count({gold}) > 0 FROM t").rows == ((1,),)
        grader, above = Grader(executor, suite=suite), f"SELECT * FROM t WHERE {gold} > 100"
        verdicts = [grader.grade(url, above, above.replace("> 100", near)) for near in (">= 100", "> 99.5")]
        assert [(one.official, one.strict) for one in verdicts] == [(True, False)] * 2


@pytest.mark.thorough
def test_types_of_types_are_made_on_copies(
    tmp_path: Path, postgres_server: PostgresServer, executor: SQLExecutor
) -> None:
    with psycopg.connect(postgres_server.admin_url(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE nested_types")
    with psycopg.connect(postgres_server.admin_url("nested_types"), autocommit=True) as admin:
        admin.execute(
            """
            CREATE TYPE a_place AS (street text, zip varchar(5));
            CREATE TYPE z_kind AS ENUM ('home', 'work');
            CREATE TYPE a_home AS (kind z_kind, place a_place);
            CREATE DOMAIN a_homes AS a_home[];
            CREATE TYPE spans AS RANGE (subtype = time);
            CREATE TABLE person (
                id integer PRIMARY KEY, home a_home, others a_homes, open spans, age integer
            );
            INSERT INTO person SELECT n, ROW('work', ROW('Street ' || n, n)::a_place)::a_home, NULL,
                spans('08:00', '17:00'), 20 + n FROM generate_series(1, 30) AS s (n);
            """
        )
        admin.execute(restricted_role_sql("nested_reader", "secret", "nested_types"))
    url = postgres_server.url("nested_reader", "secret", "nested_types")
    found = TestSuite(executor, tmp_path).databases(url, "SELECT id FROM person WHERE age > 30")
    assert (len(found.databases), found.gap) == (4, "")


def test_without_a_server_the_reason_is_given(
    tmp_path: Path, executor: SQLExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "server_binaries", lambda: None)
    suite = TestSuite(executor, tmp_path)
    with pytest.raises(ConfigError, match="initdb is not installed here"):
        suite.check("postgresql://reader@127.0.0.1:1/nowhere")
    assert "initdb" in suite.databases("postgresql://reader@127.0.0.1:1/nowhere", "SELECT 1").gap


@pytest.mark.slow
def test_a_private_server_ends_with_its_process(tmp_path: Path) -> None:
    if private.server_binaries() is None or shutil.which("sh") is None:
        pytest.skip("needs PostgreSQL's initdb")
    code = (
        "import os, signal, sys; from pathlib import Path;"
        "from text2sql_grpo.grading.postgres_server import PostgresServer;"
        f"server = PostgresServer(Path({str(tmp_path)!r})); print(server.url, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    url = done.stdout.strip()
    assert url.startswith("postgresql://admin:"), done.stderr
    for _ in range(100):
        if _is_gone(url):
            break
        time.sleep(0.1)
    assert _is_gone(url)


@pytest.mark.thorough
def test_server_leaves_no_folder_where_its_user_may_not_write() -> None:
    # Not pytest's folder, whose parents another user may not enter; as root that user runs the server.
    parent = Path(tempfile.mkdtemp(dir="/var/tmp"))
    parent.chmod(0o755)
    code = (
        "from pathlib import Path;"
        "from text2sql_grpo.grading.postgres_server import PostgresServer;"
        f"PostgresServer(Path({str(parent)!r})).close()"
    )
    environment = {**os.environ, "TMPDIR": str(parent), "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)
        assert os.listdir(parent) == []
    finally:
        shutil.rmtree(parent)


def _is_gone(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return True
    return False


RIDES = """
CREATE TABLE ride (id INTEGER PRIMARY KEY, link VARCHAR, start_at TIMESTAMP, end_at TIMESTAMP,
    specs MAP(VARCHAR, VARCHAR), prefs JSON,
    place STRUCT(city VARCHAR, zip VARCHAR, code VARCHAR));
INSERT INTO ride SELECT n, 'https://a.io/' || n || '?src=' || ['news', 'mail', 'shop'][1 + n % 3] || '&m=2',
    TIMESTAMP '2024-01-01 08:00:00' + to_hours(n),
    TIMESTAMP '2024-01-01 08:00:00' + to_hours(n) + to_minutes(n),
    MAP {'colour': ['red', 'blue'][1 + n % 2], 'size': 'L'},
    '{"sms": ' || ['true', 'false'][1 + n % 2] || ', "km": ' || n || '}',
    {'city': ['Berlin', 'Bonn'][1 + n % 2], 'zip': (50000 + n * 700)::VARCHAR,
    'code': '0' || (103 + n * 17)} FROM range(40) AS s (n)
"""


QUARTERS = ", ".join(  # which are too long in SQLite's SQL
    f"count(*) FILTER (WHERE date_trunc('quarter', start_at) = TIMESTAMP '20{n}-01-01') AS q{n}"
    for n in range(10, 40)
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("gold", "wrong", "right"),
    [
        (
            f"SELECT {QUARTERS} FROM ride",
            f"SELECT {', '.join('40' if n == 24 else '0' for n in range(10, 40))}",
            f"SELECT {QUARTERS} FROM ride WHERE id IS NOT NULL",
        ),
        (
            "SELECT regexp_extract(link, 'src=([^&]+)', 1) AS s FROM ride",
            "SELECT regexp_extract(link, 'src=([a-z]+)', 1) AS s FROM ride",
            "SELECT split_part(split_part(link, 'src=', 2), '&', 1) AS s FROM ride",
        ),
        (
            "SELECT id FROM ride WHERE date_diff('minute', start_at, end_at) > 20",
            "SELECT id FROM ride WHERE end_at - start_at > INTERVAL 20 MINUTE",
            "SELECT id FROM ride WHERE date_diff('minute', start_at, end_at) >= 21",
        ),
        (
            "SELECT id FROM ride WHERE prefs->>'sms' = 'true' AND (prefs->>'km')::INTEGER >= 20",
            "SELECT id FROM ride WHERE prefs->>'sms' = 'true' AND (prefs->>'km')::INTEGER > 18",
            "SELECT id FROM ride WHERE prefs->>'sms' = 'true' AND 20 <= CAST(prefs->>'km' AS INTEGER)",
        ),
        (
            "SELECT id FROM ride WHERE specs['colour'] = 'red'",
            "SELECT id FROM ride WHERE list_contains(map_values(specs), 'red')",
            "SELECT id FROM ride WHERE map_extract_value(specs, 'colour') = 'red'",
        ),
        (
            "SELECT count(place.zip) AS n FROM ride WHERE place.city = 'Bonn'",
            "SELECT count(DISTINCT place.zip) AS n FROM ride WHERE place.city = 'Bonn'",
            "SELECT count(*) AS n FROM ride WHERE place.city = 'Bonn' AND place.zip IS NOT NULL",
        ),
        (  # the translation lacks the origin
            "SELECT count(DISTINCT time_bucket(INTERVAL '3 days', start_at)) AS n FROM ride WHERE id >= 0",
            "SELECT count(DISTINCT time_bucket(INTERVAL '3 days', start_at, DATE '2000-01-01')) AS n"
            " FROM ride WHERE id >= 0",
            "SELECT count(*) AS n FROM (SELECT DISTINCT time_bucket(INTERVAL '3 days', start_at) FROM ride)",
        ),
        (
            "SELECT id FROM ride WHERE place.code < '0400' ORDER BY ALL",
            "SELECT id FROM ride WHERE place.code <= '0400' ORDER BY ALL",
            "SELECT id FROM ride WHERE NOT struct_extract(place, 'code') >= '0400' ORDER BY id",
        ),
    ],
)
def test_what_sqlite_cannot_run_or_reads_otherwise_is_tried_on_duckdb(
    gold: str, wrong: str, right: str, tmp_path: Path, executor: SQLExecutor
) -> None:
    with duckdb.connect(str(tmp_path / "a.duckdb")) as connection:
        connection.execute(RIDES)
    url = f"duckdb:///{tmp_path}/a.duckdb"
    grader = Grader(executor, suite=TestSuite(executor, tmp_path / "cache"))
    verdicts = [grader.grade(url, gold, answer) for answer in (wrong, right)]
    assert [(one.official, one.strict, one.gap) for one in verdicts] == [(True, False, ""), (True, True, "")]


EVENTS = """
    CREATE TABLE ev (id integer PRIMARY KEY, at timestamptz NOT NULL, meta jsonb,
        email text CHECK (email ~ '^[^@ ]+@[^@ ]+[.][a-z]+$'),
        day date GENERATED ALWAYS AS ((at AT TIME ZONE 'UTC')::date) STORED);
    INSERT INTO ev (id, at, email, meta)
    SELECT i, timestamptz '2023-11-02 07:00+00' + i * interval '2981 minutes',
        'u' || i || '@' || (ARRAY['alpha', 'beta'])[i % 2 + 1] || '.com',
        CASE WHEN i % 4 = 0 THEN '{}' ELSE '{"seats": ' || i % 4 || ', "by": "web"}' END::jsonb
    FROM generate_series(1, 100) AS i
"""


@pytest.mark.thorough
def test_zones_json_and_cases_are_tried_on_postgresql(
    tmp_path: Path, executor: SQLExecutor, postgres_server: PostgresServer
) -> None:
    with psycopg.connect(postgres_server.admin_url(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE events")
    with psycopg.connect(postgres_server.admin_url("events"), autocommit=True) as admin:
        admin.execute(EVENTS)
        admin.execute(restricted_role_sql("events_reader", "secret", "events"))
    url = postgres_server.url("events_reader", "secret", "events")
    grader = Grader(executor, suite=TestSuite(executor, tmp_path))
    for gold, right, wrong in [
        ("EXTRACT(YEAR FROM day) = 2023", "day BETWEEN '2023-01-01' AND '2023-12-31'", "day < '2023-12-31'"),
        ("true", "meta ? 'by' OR NOT meta ? 'by'", "NOT meta ? 'spam'"),
        ("true", "id > 0", "meta ->> 'spam' IS NULL"),
        ("true", "id > 0", "email <> ALL (ARRAY['spam@alpha.com'])"),
        (
            "lower(split_part(email, '@', 2)) = 'beta.com'",
            "email ILIKE '%@beta.com'",
            "email LIKE '%@beta.com'",
        ),
        ("(meta ->> 'seats')::int > 2", "(meta -> 'seats')::int >= 3", "meta ->> 'seats' > '2'"),
    ]:
        answers = (f"SELECT count(*) FROM ev WHERE {condition}" for condition in (right, wrong))
        reasons = [grader.grade(url, f"SELECT count(*) FROM ev WHERE {gold}", sql).reason for sql in answers]
        assert reasons == ["equal", "test_database"], wrong


@pytest.mark.thorough
def test_checks_hold_on_the_mirror_where_sqlite_can_compute_them(
    tmp_path: Path, executor: SQLExecutor, postgres_server: PostgresServer
) -> None:
    columns = "id INTEGER PRIMARY KEY, first DATE, last DATE, n INTEGER CHECK (n > 0), CHECK (last > first)"
    create, moments = f"CREATE TABLE stay ({columns})", "DATE '2024-01-01', DATE '2024-01-03'"
    rows = f"INSERT INTO stay SELECT n, {moments}, n FROM generate_series(1, 30) AS s (n)"
    with duckdb.connect(str(tmp_path / "a.duckdb")) as connection:
        connection.execute(create)
        connection.execute(rows)
    with psycopg.connect(postgres_server.admin_url(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE checked")
    with psycopg.connect(postgres_server.admin_url("checked"), autocommit=True) as admin:
        admin.execute(create)
        admin.execute(rows)
        admin.execute(restricted_role_sql("checked_reader", "secret", "checked"))
    gold = "SELECT id FROM stay WHERE last - first > 1"
    for url in (f"duckdb:///{tmp_path}/a.duckdb", postgres_server.url("checked_reader", "secret", "checked")):
        folder = tmp_path / parse_address(url).kind
        assert len(TestSuite(executor, folder).databases(url, gold).databases) == 4
        (mirror,) = (folder / "mirrors").glob("*.sqlite")
        with closing(sqlite3.connect(mirror)) as connection:
            ((sql,),) = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'stay'").fetchall()
            assert sql.count("CHECK") == 2
            assert connection.execute("SELECT count(*) FROM stay").fetchall() == [(30,)]
