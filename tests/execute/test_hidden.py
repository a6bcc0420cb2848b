"""Hidden tables and columns: not in schemas, and no query reads their values."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.databases import duckdb_file, sqlite_file
from tests.postgres_server import PostgresServer
from text2sql_grpo.environment.observation import ObservationLimits
from text2sql_grpo.environment.tools import ExecutorBackend
from text2sql_grpo.sql import Limits, SQLExecutor
from text2sql_grpo.sql.address import Database, parse_address
from text2sql_grpo.sql.failure_text import MAX_ERROR_CHARS
from text2sql_grpo.sql.hidden import Hidden, hide
from text2sql_grpo.sql.personal import is_personal
from text2sql_grpo.sql.schema import Column, View, read_schema
from text2sql_grpo.sql.schema_text import schema_text

SCRIPT = """
CREATE TABLE film (id INTEGER PRIMARY KEY, title VARCHAR(20), city VARCHAR(20), password VARCHAR(20));
CREATE TABLE staff (id INTEGER PRIMARY KEY, name VARCHAR(20), password VARCHAR(20), e_mail VARCHAR(20),
    film INTEGER REFERENCES film (id));
CREATE TABLE city (name VARCHAR(20), mayor VARCHAR(20));
CREATE TABLE audit_log (entry VARCHAR(20));
CREATE TABLE note (staff INTEGER REFERENCES staff (id), body VARCHAR(20));
INSERT INTO film VALUES (1, 'Alien', 'Rome', 'open');
INSERT INTO staff VALUES (1, 'Ann', 'hush 1', 'hush@a.org', 1), (2, 'Bob', 'hush 2', 'hush@b.org', 1);
INSERT INTO city VALUES ('Rome', 'hush');
INSERT INTO audit_log VALUES ('hush log');
INSERT INTO note VALUES (1, 'late');
CREATE VIEW roster AS SELECT id, name FROM staff WHERE password <> '';
CREATE VIEW letters AS SELECT id, name, e_mail AS letter FROM staff;
CREATE VIEW contact AS SELECT s.id, upper(s.e_mail) AS address, f.title
    FROM staff s JOIN film f ON s.film = f.id;
CREATE VIEW logins AS SELECT c.address, s.name FROM contact c JOIN staff s ON s.id = c.id;
CREATE VIEW both_names AS SELECT name FROM staff UNION SELECT password FROM staff;
"""
LOGIN = """
CREATE TABLE login (id INTEGER PRIMARY KEY, pass_word VARCHAR(20), shown VARCHAR(20),
    masked VARCHAR(20) GENERATED ALWAYS AS (upper(pass_word)) {0},
    loud VARCHAR(20) GENERATED ALWAYS AS (upper(shown)) {0});
INSERT INTO login (id, pass_word, shown) VALUES (1, 'hush 1', 'a');
"""
PATTERNS = ["*.pass_word", "*.e_MAIL", "STAFF.Password", "city.mayor", "audit_l?g"]
ROW = {"sqlite": "", "duckdb": "duckdb postgresql", "postgresql": "duckdb postgresql"}

EVERYWHERE = """
SELECT password FROM staff
SELECT "password" FROM "staff"
SELECT PASSWORD FROM STAFF
SELECT staff.password FROM staff
SELECT s.PassWord FROM staff AS s
SELECT main.password FROM staff main
SELECT name || password FROM staff
SELECT * FROM ROWS FROM (unnest(ARRAY(SELECT password FROM staff))) AS t
SELECT p FROM (SELECT password AS p FROM staff) AS t
WITH t AS (SELECT password AS p FROM staff) SELECT p FROM t
WITH t(a) AS (SELECT password FROM staff) SELECT a FROM t
WITH RECURSIVE t(a) AS (SELECT password FROM staff UNION SELECT a FROM t) SELECT a FROM t
WITH film AS (SELECT 1 AS x) SELECT (SELECT password FROM film) FROM staff
SELECT (SELECT password FROM (SELECT 1 AS x) AS o) FROM staff
SELECT (SELECT password FROM film AS f (a, b, c, d)) FROM staff
SELECT title FROM film UNION SELECT password FROM staff
SELECT title FROM film UNION ALL SELECT p FROM (SELECT max(password) AS p FROM staff) AS t
SELECT max(password) FROM staff
SELECT name, row_number() OVER (ORDER BY id), first_value(password) OVER (ORDER BY id) FROM staff
SELECT CASE WHEN id = 1 THEN password ELSE '' END FROM staff
SELECT coalesce(NULL, password) FROM staff
SELECT a.password FROM staff AS a JOIN film AS b ON a.film = b.id
SELECT f.title, s.password FROM film AS f, staff AS s
SELECT (SELECT s.password FROM staff AS s WHERE s.film = f.id LIMIT 1) FROM film AS f
SELECT (SELECT s.password) FROM staff AS s
SELECT x.p FROM staff AS s JOIN (SELECT id AS i, password AS p FROM staff) AS x ON x.i = s.id
SELECT * FROM staff
SELECT s.* FROM staff AS s
SELECT staff.* FROM staff
SELECT film.title, staff.* FROM film JOIN staff ON staff.film = film.id
SELECT * FROM film JOIN staff ON staff.film = film.id
SELECT * FROM (SELECT * FROM staff) AS t
SELECT * FROM (staff JOIN film ON staff.film = film.id)
WITH t AS (SELECT * FROM staff) SELECT name FROM t, (SELECT 1) AS x UNION SELECT password FROM t
SELECT c FROM (SELECT * FROM staff) AS t (a, b, c, d, e)
SELECT * FROM film WHERE id = 5 UNION SELECT id, name, password, e_mail FROM staff
SELECT e_mail FROM staff
SELECT mayor FROM city
SELECT masked FROM login
SELECT * FROM login
SELECT entry FROM audit_log
SELECT * FROM AUDIT_LOG
SELECT "audit_log".* FROM "audit_log"
SELECT address FROM contact
SELECT * FROM contact
SELECT address FROM logins
SELECT name FROM both_names
SELECT password /* staff */ FROM staff -- nothing
SELECT/**/password/**/FROM/**/staff
SELECT DISTINCT password FROM staff ORDER BY 1
SELECT min(name) FROM staff GROUP BY password HAVING max(password) > ''
SELECT ALL password FROM staff
VALUES ((SELECT max(password) FROM staff))
"""
ORACLES = """
SELECT name FROM staff WHERE password LIKE 'h%'
SELECT name FROM staff ORDER BY password
SELECT count(*) FROM staff WHERE e_mail > 'h'
SELECT count(DISTINCT password) FROM staff
SELECT 1 FROM film WHERE EXISTS (SELECT 1 FROM staff WHERE password = 'hush 1')
SELECT s.name FROM staff AS s JOIN film AS f USING (password)
SELECT f.title FROM staff AS s JOIN film AS f USING ("PASSWORD")
SELECT name FROM staff NATURAL JOIN film
SELECT title FROM film WHERE title IN (SELECT password FROM staff)
SELECT title FROM film WHERE 'x' IN (SELECT entry FROM audit_log)
SELECT count(*) FROM audit_log
SELECT s.name FROM staff AS s JOIN film AS f ON f.password = s.password
SELECT name FROM staff GROUP BY name, password
EXPLAIN SELECT password FROM staff
SELECT name password FROM staff
"""
ATTACKS = {
    "sqlite": """
SELECT [password] FROM [staff]
SELECT `password` FROM `staff`
SELECT staff.'password' FROM staff
SELECT main.staff.password FROM main.staff
SELECT main.staff.'password' FROM staff
SELECT password FROM 'staff'
SELECT max(s.'password') FROM staff s
SELECT password FROM staff INDEXED BY sqlite_autoindex_staff_1
SELECT group_concat(password) FROM staff
SELECT json_group_array(password) FROM staff
SELECT json_object('p', password) FROM staff
SELECT value FROM staff, json_each(json_array(password))
SELECT sql FROM sqlite_master
SELECT name FROM pragma_table_info('staff')
SELECT * FROM pragma_table_info('staff')
PRAGMA table_xinfo(audit_log)
SELECT 1 WHERE 'hush log' IN audit_log
SELECT 1 WHERE 'hush log' IN 'audit_log'
SELECT 1 WHERE 'hush log' IN main.audit_log
SELECT p FROM (SELECT password p FROM staff)
SELECT "a" FROM (SELECT password AS "a" FROM staff)
SELECT iif(1, password, '') FROM staff
SELECT password COLLATE NOCASE FROM staff
SELECT password FROM staff s
SELECT -- x
 password FROM staff /* not closed
SELECT quote(password), hex(password) FROM staff
WITH staff_x AS (SELECT * FROM staff) SELECT password FROM staff_x
""",
    "duckdb": """
FROM staff
FROM staff SELECT password
TABLE staff
SELECT staff FROM staff
SELECT s FROM staff s
SELECT s.password.upper() FROM staff s
SELECT password.upper() FROM staff
SELECT s['password'] FROM staff s
SELECT struct_extract(s, 'password') FROM staff s
SELECT s.struct_extract('password') FROM staff s
SELECT unnest(s) FROM staff s
SELECT to_json(s) FROM staff s
SELECT row_to_json(s) FROM staff s
SELECT CAST(s AS VARCHAR) FROM staff s
SELECT list(s) FROM staff s
SELECT {'a': s} FROM staff s
SELECT max(s) FROM staff s
SELECT * EXCLUDE (id) FROM staff
SELECT * REPLACE ('x' AS name) FROM staff
SELECT * RENAME (password AS p) FROM staff
SELECT * LIKE 'pass%' FROM staff
SELECT COLUMNS('pass.*') FROM staff
SELECT COLUMNS(*) FROM staff
SELECT COLUMNS(c -> c LIKE 'p%') FROM staff
SELECT min(COLUMNS(*)) FROM staff
SELECT s.COLUMNS('pass.*') FROM staff s
SELECT *COLUMNS('pass.*') FROM staff
SELECT #3 FROM staff
SELECT c FROM staff AS s (a, b, c)
SELECT j.password FROM (staff JOIN note ON note.staff = staff.id) AS j
SUMMARIZE staff
FROM (SUMMARIZE staff)
PIVOT staff ON name USING max(password)
PIVOT staff ON name USING count(*)
FROM (PIVOT staff ON film USING count(*) GROUP BY password)
UNPIVOT staff ON password INTO NAME n VALUE v
FROM staff UNPIVOT (v FOR n IN (password, e_mail))
SELECT x: password FROM staff
FROM s: staff SELECT s.password
SELECT list_transform([1], x -> password) FROM staff
SELECT [password for x in [1]] FROM staff
SELECT password FROM 'staff'
SELECT main.staff.password FROM main.staff
SELECT t.main.staff.password FROM t.main.staff
FROM query('SELECT password FROM staff')
FROM query_table('staff')
FROM pragma_storage_info('staff')
FROM duckdb_columns()
FROM secrets_of()
SELECT secret_of(1)
SELECT staff.name FROM staff POSITIONAL JOIN (FROM staff SELECT password AS p)
SELECT string_agg(password, ',') FROM staff
SELECT $$a$$, password FROM staff
SELECT name a$$, password b$$ FROM staff
SELECT city FROM city
SELECT s.city FROM (SELECT city FROM city) s
WITH staff2 AS MATERIALIZED (FROM staff) FROM staff2
SELECT arg_max(password, id) FROM staff
SELECT main.staff FROM main.staff
SELECT t.main.staff FROM t.main.staff
SELECT t.staff FROM staff, staff AS t
SELECT main.staff FROM staff, (SELECT 1 AS x) AS main
SELECT main.staff FROM staff, film AS main
WITH main AS (SELECT 1 AS x) SELECT main.staff FROM staff, main
SELECT password\u00a0FROM staff
SELECT\u3000password\u2003FROM staff
SELECT s\u00a0FROM staff s
SELECT *\u00a0FROM staff
SELECT id, staff FROM staff JOIN film ON staff.film = film.id
SELECT (*) FROM staff
SELECT count(* EXCLUDE (id)), max(password) FROM staff
SELECT film.password FROM staff AS film
DESCRIBE audit_log
SELECT column_name FROM information_schema.columns WHERE table_name = 'film' AND secret_of(1) LIKE 'h%'
SHOW TABLES
FROM information_schema.columns
""",
    "postgresql": """
TABLE staff
SELECT * FROM (TABLE staff) AS x
WITH x AS (TABLE staff) SELECT * FROM x
SELECT staff FROM staff
SELECT s FROM staff s
SELECT s::text FROM staff s
SELECT (s).password FROM staff s
SELECT (s).* FROM staff s
SELECT (staff).password FROM staff
SELECT password(s) FROM staff s
SELECT password(staff) FROM staff
SELECT ROW(s.*)::text FROM staff s
SELECT row_to_json(s) FROM staff s
SELECT to_json(s)::text FROM staff s
SELECT to_jsonb(s) ->> 'password' FROM staff s
SELECT json_agg(s)::text FROM staff s
SELECT array_agg(s)::text FROM staff s
SELECT max(s::text) FROM staff s
SELECT concat(s) FROM staff s
SELECT format('%s', s) FROM staff s
SELECT row_to_json((SELECT s FROM staff s LIMIT 1))::text
SELECT v FROM staff s, LATERAL jsonb_each_text(to_jsonb(s)) AS e(k, v)
SELECT x.* FROM staff s, LATERAL (SELECT s.*) x
SELECT x.a FROM staff s CROSS JOIN LATERAL (VALUES (s.password)) AS x(a)
SELECT c FROM staff AS s(a, b, c)
SELECT j.password FROM (staff JOIN note ON note.staff = staff.id) AS j
SELECT j::text FROM (staff JOIN note ON note.staff = staff.id) AS j
SELECT password FROM ONLY staff
SELECT password FROM staff *
SELECT public.staff.password FROM public.staff
SELECT DISTINCT ON (password) name, password FROM staff
SELECT name a$$, password b$$ FROM staff
SELECT E'a\\'b', password FROM staff
SELECT string_agg(password, ',') FROM staff
SELECT x FROM staff, unnest(ARRAY[password]) AS x
SELECT (array_agg(password))[1] FROM staff
SELECT * FROM secrets_of()
SELECT secret_of(1)
SELECT staff.name_and_secret FROM staff
SELECT most_common_vals::text FROM pg_stats WHERE tablename = 'staff'
SELECT histogram_bounds::text FROM pg_catalog.pg_stats
SELECT attname FROM pg_attribute
SELECT * FROM information_schema.columns
SELECT column_default, data_type FROM information_schema.columns WHERE table_name = 'staff'
SELECT city::text FROM city
SELECT s.to_json::text FROM staff s
SELECT column_name FROM information_schema.columns WHERE table_name = 'film' AND secret_of(1) LIKE 'h%'
SELECT staff.row_to_json::text FROM staff
SELECT s.to_jsonb::text FROM staff s, (SELECT 1 AS to_jsonb) AS x
SELECT pg_get_viewdef('contact'::regclass)
SELECT col_description('staff'::regclass, 3)
SELECT xmlforest(s.password AS p)::text FROM staff s
SELECT x FROM staff s, LATERAL (SELECT password) AS t(x)
SELECT (SELECT password) FROM staff
SELECT count(s) FROM staff s WHERE s::text LIKE '%hush%'
""",
}
ALLOWED = {
    "every": """
SELECT name FROM staff
SELECT s.name, f.title FROM staff AS s JOIN film AS f ON s.film = f.id
SELECT count(*) FROM staff
SELECT count(*), min(name) FROM staff WHERE name <> 'password' GROUP BY film
SELECT * FROM film
SELECT f.* FROM film AS f JOIN staff AS s ON s.film = f.id
SELECT password FROM film
SELECT f.password FROM film AS f JOIN staff AS s ON s.film = f.id
SELECT password FROM film WHERE id IN (SELECT film FROM staff)
SELECT title FROM film AS f WHERE EXISTS (SELECT * FROM staff WHERE film = f.id)
SELECT t.* FROM (SELECT id, name FROM staff) AS t
WITH t AS (SELECT id, name FROM staff) SELECT * FROM t
SELECT city FROM film JOIN city ON city.name = film.city
SELECT * FROM roster
SELECT id, title FROM contact
SELECT name FROM logins
SELECT id, shown, loud FROM login
SELECT body, name FROM note JOIN staff ON staff.id = note.staff
SELECT name FROM city
SELECT 'password', name FROM staff ORDER BY name
WITH t AS (SELECT name AS staff FROM staff) SELECT t.staff FROM t
SELECT x.staff FROM (SELECT n.staff FROM note AS n) AS x JOIN staff ON staff.id = x.staff
SELECT note.staff, name FROM note JOIN staff ON note.staff = staff.id
SELECT name FROM staff WHERE name NOT LIKE '%e_mail%' -- password
""",
    "sqlite": "SELECT rowid, s.rowid, name FROM staff s",
    "duckdb": "SELECT name FROM staff QUALIFY row_number() OVER (ORDER BY id) = 1\nFROM film\n"
    "SELECT a FROM (SELECT name FROM staff) AS t (a)",
    "postgresql": "SELECT a FROM (SELECT name FROM staff) AS t (a)\n"
    "SELECT title FROM film WHERE title ~ E'A.*'\nSELECT name::text FROM staff",
}


def of(text: str) -> list[str]:
    return [line for line in text.replace("\n password FROM", "\r password FROM").strip().split("\n") if line]


@pytest.fixture(scope="module")
def executor() -> Iterator[SQLExecutor]:
    with SQLExecutor(workers=1) as executor:
        yield executor


@pytest.fixture(scope="module", params=["sqlite", "duckdb", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Database:
    folder = tmp_path_factory.mktemp("hidden")
    if request.param == "sqlite":
        return sqlite_file(folder / "t.sqlite", SCRIPT + LOGIN.format("STORED"))
    if request.param == "duckdb":
        macros = """
            CREATE MACRO secret_of(i) AS (SELECT password FROM staff WHERE id = i);
            CREATE MACRO secrets_of() AS TABLE SELECT password FROM staff;
        """
        return duckdb_file(folder / "t.duckdb", SCRIPT + LOGIN.format("") + macros)
    server: PostgresServer = request.getfixturevalue("postgres_server")
    functions = """
        CREATE FUNCTION secret_of(i int) RETURNS text LANGUAGE sql AS 'SELECT max(password) FROM staff';
        CREATE FUNCTION secrets_of() RETURNS SETOF text LANGUAGE sql AS 'SELECT password FROM staff';
        CREATE FUNCTION name_and_secret(s staff) RETURNS text LANGUAGE sql AS 'SELECT s.name || s.password';
        ANALYZE;
    """
    return server.create("hidden", SCRIPT + LOGIN.format("STORED") + functions)


@pytest.fixture(scope="module")
def hidden(database: Database, executor: SQLExecutor) -> Hidden:
    functions_sql = parse_address(database).engine.functions_sql
    functions = [name for (name,) in executor.execute(database, functions_sql).rows] if functions_sql else []
    return hide(read_schema(database), PATTERNS, functions=list(map(str, functions)))


def shown_rows(executor: SQLExecutor, database: Database, sql: str) -> str:
    return str(executor.execute(database, sql).rows).lower()


def test_the_same_is_hidden_each_time(database: Database, hidden: Hidden) -> None:
    for _ in range(2):  # trees of views are read once for all
        assert hide(read_schema(database), PATTERNS).names() == hidden.names()


def test_no_schema_text_shows_what_is_hidden(hidden: Hidden) -> None:
    assert hidden.names() == [
        *("audit_log", "both_names", "city.mayor", "contact.address", "letters.letter", "login.masked"),
        *("login.pass_word", "logins.address", "staff.e_mail", "staff.password"),
    ]
    for kind in ("compact", "ddl", "commented_ddl", "m_schema"):
        text = schema_text(hidden.schema, kind)
        for part in ("hush", "e_mail", "staff.password", "mayor", "audit_log", "address", "both_names"):
            assert part not in text
        assert "roster" in text and "password" in text  # the film's


def test_queries_that_read_what_is_hidden_are_refused(
    hidden: Hidden, database: Database, executor: SQLExecutor
) -> None:
    engine = parse_address(database).kind
    attacks = [sql.replace("\r", "\n") for sql in of(EVERYWHERE + ATTACKS[engine])]
    assert len(attacks) > 70
    passed = [sql for sql in attacks if not hidden.refusal(sql)]
    passed += [sql for sql in of(ORACLES) if not hidden.refusal(sql)]
    leaking = [sql for sql in attacks if "hush" in shown_rows(executor, database, sql)]
    assert passed == []
    assert len(leaking) > 60, "most of the attacks would succeed"


def test_other_queries_run_and_show_nothing_hidden(
    hidden: Hidden, database: Database, executor: SQLExecutor
) -> None:
    engine = parse_address(database).kind
    for sql in of(ALLOWED["every"] + ALLOWED[engine]):
        assert (sql, hidden.refusal(sql)) == (sql, "")
        outcome = executor.execute(database, sql)
        assert outcome.rows and "hush" not in str(outcome.rows), sql


def test_columns_are_listed_without_hidden_ones(
    hidden: Hidden, database: Database, executor: SQLExecutor
) -> None:
    backend = ExecutorBackend(executor, database, Limits(), ObservationLimits(), hidden)
    query = parse_address(database).engine.columns_sql
    text = backend.call("run_sql", {"sql": query.replace("name)", "staff)").replace(" name", " staff")
                                    .replace("'name'", "'staff'")}).text  # fmt: skip
    assert text and "film" in text and "password" not in text and "e_mail" not in text
    misspelt = backend.call("run_sql", {"sql": "SELECT passwort FROM staff"}).text
    assert misspelt and misspelt.startswith("Error") and "password" not in misspelt
    refused = backend.call("run_sql", {"sql": "SELECT * FROM staff"}).text
    assert refused == "Error: staff has hidden columns: name the columns that you need, not *"


def test_sqlite_itself_sees_no_hidden_column_read(tmp_path: Path) -> None:
    """The authorizer of SQLite reports each column that a query reads, through views as well."""
    path = sqlite_file(tmp_path / "t.sqlite", SCRIPT)
    hidden = hide(read_schema(path), PATTERNS)
    read: set[tuple[str, str]] = set()

    def authorize(action: int, table: str | None, column: str | None, *_: object) -> int:
        if action == sqlite3.SQLITE_READ and table:
            read.add((table.lower(), (column or "").lower()))
        return sqlite3.SQLITE_OK

    with closing(sqlite3.connect(path)) as connection:
        connection.set_authorizer(authorize)
        for sql in of(ALLOWED["every"]) + of(EVERYWHERE):
            if (
                "roster" in sql
                or hidden.refusal(sql)
                or "contact" in sql
                or "logins" in sql
                or "EXISTS" in sql
            ):
                continue  # the owner's views compare hidden values
            read.clear()
            connection.execute(sql).fetchall()
            assert not {column for table, column in read if column in hidden.columns.get(table, ())}, sql


def test_names_that_are_keywords_refuse_no_other_query(tmp_path: Path) -> None:
    script = 'CREATE TABLE "order" (id INTEGER, "group" TEXT, email TEXT); CREATE TABLE film (title TEXT);'
    hidden = hide(read_schema(sqlite_file(tmp_path / "t.sqlite", script)), ["personal", "order.group"])
    assert hidden.names() == ["order.email", "order.group"]
    assert hidden.refusal("SELECT title FROM film GROUP BY title ORDER BY 1") == ""
    assert hidden.refusal('SELECT count(*) FROM "order" GROUP BY id ORDER BY id') == ""
    assert hidden.refusal('SELECT "group" FROM "order"')


def test_nothing_is_checked_where_nothing_is_hidden(tmp_path: Path) -> None:
    hidden = hide(read_schema(sqlite_file(tmp_path / "t.sqlite", SCRIPT)), [])
    assert hidden.names() == [] and hidden.refusal("PRAGMA table_list; not SQL") == ""


@pytest.mark.parametrize("engine", ["duckdb", "postgresql"])
def test_names_may_begin_with_their_schema(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    tables = (
        "CREATE TABLE staff (id int, salary int); CREATE SCHEMA hr; CREATE TABLE hr.pay (id int, net int);"
    )
    if engine == "duckdb":
        pytest.importorskip("duckdb", reason="needs the package duckdb")
        default, database = "main", duckdb_file(tmp_path / "t.duckdb", tables)
    else:
        server: PostgresServer = request.getfixturevalue("postgres_server")
        rights = "GRANT USAGE ON SCHEMA hr TO PUBLIC; GRANT SELECT ON hr.pay TO PUBLIC"
        default, database = "public", server.create("places", tables + rights)
    schema = read_schema(database)
    for pattern in (f"{default}.staff", f"{default}.staff.Salary", "staff.salary", "HR.pay.net", "hr.*"):
        found = hide(schema, [pattern])
        assert found.names() and not found.unmatched, pattern


def test_a_part_of_a_primary_key_is_no_key(tmp_path: Path) -> None:
    table = "CREATE TABLE contact (user_id INT, email TEXT, kind TEXT, PRIMARY KEY (user_id, email))"
    found = hide(read_schema(sqlite_file(tmp_path / "t.sqlite", table)), ["personal"])
    assert "PRIMARY KEY" not in schema_text(found.schema, "ddl")
    assert [column.name for column in found.schema.tables[0].columns] == ["user_id", "kind"]


def test_a_foreign_table_is_shown(tmp_path: Path) -> None:
    schema = read_schema(sqlite_file(tmp_path / "t.sqlite", "CREATE TABLE staff (id INT, email TEXT)"))
    remote = View("orders", (Column("total", "INT", True, False), Column("phone", "TEXT", True, False)))
    assert hide(replace(schema, views=(remote,)), ["personal"]).names() == ["orders.phone", "staff.email"]


@pytest.mark.parametrize("hidden", ["text", "date"])
def test_columns_of_a_type_named_like_a_hidden_column_are_listed(hidden: str, tmp_path: Path) -> None:
    path = sqlite_file(
        tmp_path / "t.sqlite", "CREATE TABLE message (id INT, sender TEXT, text TEXT, date DATE)"
    )
    with SQLExecutor(workers=1) as executor:
        found, sql = hide(read_schema(path), [f"message.{hidden}"]), "PRAGMA table_info(message)"
        names = [row[1] for row in found.shown(sql, executor.execute(path, sql)).rows]
    assert names == [name for name in ("id", "sender", "text", "date") if name != hidden]


def test_a_refusal_is_one_short_line(tmp_path: Path) -> None:
    found = hide(read_schema(sqlite_file(tmp_path / "t.sqlite", SCRIPT)), PATTERNS)
    for name in ("order_details_" * 400, '"a\nb"'):
        assert len(found.refusal(f"SELECT id FROM {name}")) <= MAX_ERROR_CHARS
        assert "\n" not in found.refusal(f"SELECT id FROM {name}")


PERSONAL_NAMES = """
userPassword pwd_hash api_key Passwort motDePasse contraseña E-Mail emailAddress Telefonnummer téléphone
customer_phone SSN passport_no credit_card_number iban codice_fiscale 手机号码 national_id
workNr mobile_no tel_number homephone e_post drivers_license
tax_id VAT_no vat_id vatNumber パスワード
"""
OTHER_NAMES = """
name last_name birth_date street city zip_code country email_sent token_count phone_type has_password
mailing_list postcode account_number card_type compass cellar pinboard
hotelNo hotel_number artwork_no network_number acc_no create_post smartphone headphone grid_card
international_id syntax_number
phone_id token_id vat_rate vat private_no
"""


def test_personal_data_by_names() -> None:
    found = {
        name for name in (PERSONAL_NAMES + OTHER_NAMES).split() if is_personal(Column(name, "", True, False))
    }
    assert found == set(PERSONAL_NAMES.split())


@pytest.mark.parametrize(
    ("examples", "found"),
    [
        (("ann@a.org", "b.c@d.de"), True),
        (("+49 30 123456", "(030) 123 456"), True),
        (("4111 1111 1111 1111", "5500000000000004"), True),
        (("4111111111111112", "5500000000000004"), False),
        (("2024-01-05",), False),
        (("978-3-16-148410-0", "978-0-306-40615-7"), False),
        (("ann@a.org", "call me"), False),
    ],
)
def test_personal_data_by_values(examples: tuple[str, ...], found: bool) -> None:
    assert is_personal(Column("note", "TEXT", True, False, examples=examples)) == found
