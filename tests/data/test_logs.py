"""Questions of the queries that people ran: what each kind of log gives, what is kept, how it is asked."""

import csv
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.postgres_server import PASSWORD
from text2sql_grpo.commands import main
from text2sql_grpo.data.question_files import read_questions
from text2sql_grpo.errors import DataError
from text2sql_grpo.synthesis.log_files import Statement, read_log
from text2sql_grpo.synthesis.log_questions import MadeOfLogs, questions_of_logs

if TYPE_CHECKING:
    from tests.postgres_server import PostgresServer

TABLES = """
CREATE TABLE customers (
  id INTEGER PRIMARY KEY, name VARCHAR(40) NOT NULL, city VARCHAR(40) NOT NULL, age INTEGER
);
CREATE TABLE orders (
  id INTEGER PRIMARY KEY, customer_id INTEGER NOT NULL REFERENCES customers (id), status VARCHAR(10) NOT NULL,
  price NUMERIC(8, 2) NOT NULL, order_date DATE NOT NULL
);
"""
CITIES, STATES = ("Lisbon", "Porto", "Faro"), ("open", "paid", "sent", "lost")


def script() -> str:
    """The shop as SQL that every engine takes."""
    customers = [
        f"({n}, 'Person {chr(65 + n)}', '{CITIES[n % 3]}', {20 + n if n % 7 else 'NULL'})" for n in range(20)
    ]
    orders = [
        f"({n}, {n * 7 % 20}, '{STATES[n % 4]}', {n * 37 % 90}.5, '202{n % 3 + 2}-{n % 12 + 1:02}-10')"
        for n in range(60)
    ]
    rows = {"customers": customers, "orders": orders}
    return TABLES + "".join(f"INSERT INTO {name} VALUES {', '.join(some)};" for name, some in rows.items())


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / "shop.sqlite")) as connection:
        connection.executescript(script())
    return tmp_path / "shop.sqlite"


def write(path: Path, text: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def without_password(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    return url.replace(f":{PASSWORD}@", "@")


def made_of(database: Path | str, folder: Path, *logs: str) -> tuple[MadeOfLogs, dict[str, str]]:
    """What is made of logs; the questions, empty ones too, by SQL."""
    sources = [log if "\n" not in log else write(folder / f"log{n}.sql", log) for n, log in enumerate(logs)]
    made = questions_of_logs(database, sources, folder / "made" / "log.jsonl")
    files = (folder / "made" / "log.jsonl", made.to_word)
    rows = [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]
    return made, {row["gold_sql"]: row["question"] for row in rows}


def statements(source: str, database: Path | str = "shop.sqlite") -> list[Statement]:
    return [each for each in read_log(source, database) if each.sql.strip() or each.reason]


HIDDEN = "hidden from this role (GRANT pg_read_all_stats)"
QUESTIONS = {
    "SELECT COUNT(*) FROM orders WHERE status = 'paid'": 'How many orders are there whose status is "paid"?',
    "SELECT name, age FROM customers WHERE city = 'Faro' AND age >= 30 ORDER BY age DESC": (
        'Show the name and the age of each customer whose city is "Faro" and whose age is at least 30, '
        "sorted by the age in descending order."
    ),
    "SELECT AVG(price), MAX(order_date) FROM orders WHERE order_date BETWEEN '2022-02-01' AND '2022-09-30'": (
        "What are the average price and the latest date of all orders whose date is from 1 February 2022 to "
        "30 September 2022?"
    ),
    "SELECT c.city, COUNT(*) AS n FROM orders AS o JOIN customers AS c ON c.id = o.customer_id "
    "WHERE o.status IN ('open', 'lost') GROUP BY c.city HAVING COUNT(*) > 5 ORDER BY n DESC": (
        'Show each city of a customer with the number of orders whose status is "open" or "lost", only where '
        "the number of orders is above 5, sorted by the number of orders in descending order."
    ),
    "SELECT c.name, SUM(o.price) FROM orders AS o JOIN customers AS c ON o.customer_id = c.id "
    "WHERE o.status = 'sent' GROUP BY c.id, c.name": (
        'For each customer with orders whose status is "sent", show the customer\'s name and the total price '
        "of these orders."
    ),
    "SELECT name FROM customers WHERE NOT age IS NULL ORDER BY name LIMIT 3": (
        "Show the name of each customer whose age is not missing, sorted by the name, and only the first 3."
    ),
    "SELECT o.id, c.name FROM orders AS o JOIN customers AS c ON o.customer_id = c.id WHERE o.id = 7": (
        "Show the ID and the customer's name of each order whose ID is 7."
    ),
    "SELECT DISTINCT status FROM orders WHERE customer_id = 14": (
        "List each different status of the orders whose customer ID is 14."
    ),
    "SELECT name FROM customers WHERE name NOT LIKE '%Person%' OR city = 'Faro'": "",
    "SELECT name FROM customers WHERE age <> 25": "",  # whether a missing age counts
    "SELECT price FROM orders WHERE customer_id = 7 AND order_date > '20220801'": "",  # not as days
    "SELECT * FROM customers UNION ALL SELECT * FROM customers WHERE id < 3 ORDER BY name LIMIT 4": "",
    "SELECT DISTINCT age FROM customers": "",  # whether a missing age is one
    "SELECT age, COUNT(*) FROM customers GROUP BY age": "",
    "SELECT name FROM customers WHERE age > (SELECT AVG(age) FROM customers)": "",
    "SELECT a.name FROM customers AS a JOIN customers AS b ON a.city = b.city WHERE b.name = 'Person B'": "",
    "SELECT c.name, COUNT(o.id) FROM customers AS c LEFT JOIN orders AS o ON o.customer_id = c.id "
    "GROUP BY c.id": "",
    "SELECT COUNT(*) FILTER(WHERE price > 50) FROM orders": "",
    "SELECT SUM(price) FROM orders HAVING COUNT(*) > 5": "",
    "SELECT AVG(c.age) FROM orders AS o JOIN customers AS c ON o.customer_id = c.id": "",  # once an order
}


def test_queries_are_asked_in_words_or_left_to_people(shop: Path, tmp_path: Path) -> None:
    made, found = made_of(shop, tmp_path, ";\n".join(QUESTIONS))
    assert found == QUESTIONS and not made.reasons
    questions = read_questions(tmp_path / "made" / "log.jsonl")
    assert len(questions) == made.n_worded == sum(map(bool, QUESTIONS.values()))
    with pytest.raises(DataError, match="question"):
        read_questions(made.to_word)


REASONS = {
    "INSERT INTO orders SELECT * FROM orders": "writes",
    "WITH gone AS (DELETE FROM orders RETURNING id) SELECT * FROM gone": "writes",
    "SELECT * FROM orders FOR UPDATE": "writes",
    "PRAGMA user_version": "command",
    "SELECT SELECT FROM orders": "parsed",
    "SELECT name FROM customers WHERE": "parsed",
    f"SELECT {'(' * 400}1{')' * 400} FROM orders": "parsed",
    f"SELECT {'1 + ' * 900}1 FROM orders": "written again",
    "SELECT 1": "no table",
    "SELECT x FROM elsewhere": "lacks",
    "SELECT nothing FROM orders": "fails",
    "SELECT * FROM orders": "more than 50",
    "SELECT name FROM customers WHERE age > 500": "no rows",
    "SELECT SUM(age) FROM customers WHERE name = 'x'": "no rows",
    "SELECT COUNT(*) FROM orders WHERE order_date < date('now')": "changes",
    "SELECT name FROM customers LIMIT 3": "without ORDER BY",
    "SELECT name FROM customers ORDER BY city LIMIT 3": "equal rank",
    "SELECT * FROM customers ORDER BY city LIMIT 3": "equal rank",
    "SELECT * FROM customers UNION SELECT * FROM customers ORDER BY city LIMIT 3": "equal rank",
    "SELECT name FROM customers WHERE substr(name, ?) = 'x'": "parameters",
    "SELECT name, ? FROM customers": "parameters",
}
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT MAX(i) FROM n, orders"


@pytest.mark.parametrize(
    ("sql", "reason"), [*REASONS.items(), pytest.param(ENDLESS, "takes", marks=pytest.mark.thorough)]
)
def test_what_is_no_gold_is_counted_with_its_reason(
    shop: Path, tmp_path: Path, sql: str, reason: str
) -> None:
    made, found = made_of(shop, tmp_path, f"{sql};\n")
    assert not found and sum(made.reasons.values()) == made.n_read == 1
    assert reason in next(iter(made.reasons))


@pytest.mark.parametrize("engine", ["sqlite", "duckdb", "postgresql"])
def test_statements_that_read_what_is_hidden_are_in_no_file(
    make_database: Callable[[str, str], Path | str],
    tmp_path: Path,
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contacts = """ALTER TABLE customers ADD COLUMN email VARCHAR(40);
        UPDATE customers SET email = name || '@ex.org';
        CREATE VIEW contact AS SELECT email FROM customers WHERE id = 4;"""
    address = without_password(str(make_database(engine, script() + contacts)), monkeypatch)
    hidden = [
        "SELECT name FROM customers WHERE email = 'Person B@ex.org'",
        "SELECT c.name FROM customers c WHERE c.email = $1",
        "SELECT COUNT(*) FROM customers WHERE email LIKE 'Person%'",
        "SELECT * FROM customers WHERE id = 3",
        "SELECT email FROM contact",
    ]
    kept = "SELECT COUNT(*) FROM customers WHERE age > 30"
    made, found = made_of(address, tmp_path, ";\n".join([*hidden, kept]))
    assert list(found) == [kept] and made.reasons == {"reads what is hidden": len(hidden)}
    log, out = write(tmp_path / "kept.sql", f"{kept};"), str(tmp_path / "hidden" / "log.jsonl")
    command = ["data", "log", "--databases", str(address), "--log", log, "--out", out]
    assert main([*command, "--hide", "customers.age"]) == 1 and not Path(out).exists()
    assert main([*command, "--hide", "customers"]) == 1 and not Path(out).exists()
    assert main([*command, "--hide", "orders"]) == 0


def test_a_limit_that_cuts_nothing_is_removed(shop: Path, tmp_path: Path) -> None:
    _, found = made_of(shop, tmp_path, "SELECT name FROM customers WHERE id = 5 LIMIT 1;\n")
    assert found == {
        "SELECT name FROM customers WHERE id = 5": "Show the name of each customer whose ID is 5."
    }


def test_a_limit_beyond_the_rows_is_removed(shop: Path, tmp_path: Path) -> None:
    _, found = made_of(shop, tmp_path, "SELECT id FROM orders WHERE customer_id = 7 ORDER BY id LIMIT 21;\n")
    assert set(found.values()) == {"Show the ID of each order whose customer ID is 7, sorted by the ID."}


def test_statements_that_differ_in_literals_are_one_with_their_calls(shop: Path, tmp_path: Path) -> None:
    log = "SELECT name FROM customers WHERE city = 'Porto' AND age IN (21, 22);\n"
    log += "select NAME from Customers  -- again\nwhere CITY='Faro' and age in (23);\n"
    log += "SELECT COUNT(*) FROM customers;\nSELECT count(*) FROM customers;\n"
    made, found = made_of(shop, tmp_path, log, "SELECT COUNT(*) FROM customers\n")
    assert next(iter(found)) == "SELECT COUNT(*) FROM customers" and len(found) == 2
    assert made.n_read == 5 and made.reasons == {"a duplicate but for literals": 3}
    record = json.loads((tmp_path / "made" / "log_made.json").read_text())
    assert record["calls"] == {"log-00000": 3, "log-00001": 2}


@pytest.mark.parametrize("mark", ["?", "?1", ":city", "$1", "@city", "%s", "%(city)s", "$city"])
def test_parameters_take_stored_values(shop: Path, tmp_path: Path, mark: str) -> None:
    sql = f"SELECT COUNT(*) FROM customers WHERE city = {mark};\n"
    _, found = made_of(shop, tmp_path, sql)
    assert next(iter(found)).removeprefix("SELECT COUNT(*) FROM customers WHERE city = '")[:-1] in CITIES
    assert made_of(shop, tmp_path / "again", sql)[1] == found


def test_parameters_of_bounds_lists_and_limits_have_rows(shop: Path, tmp_path: Path) -> None:
    sql = "SELECT id FROM orders WHERE price BETWEEN ? AND ? AND status IN (?, ?) ORDER BY id LIMIT ?;\n"
    _, found = made_of(
        shop, tmp_path, sql, "SELECT name FROM customers WHERE name LIKE ? AND age > ?::int;\n"
    )
    assert len(found) == 2 and all("?" not in sql for sql in found)


def test_shells_leave_commands_prompts_and_odd_bytes_in_histories(tmp_path: Path) -> None:
    psql = "\\timing on\n\\d orders\nSELECT 1 \\gx\nSELECT '\\d;'\x01FROM t;\n\\q\n"
    assert [each.sql.strip() for each in statements(write(tmp_path / ".psql_history", psql))] == [
        "SELECT 1",
        "SELECT '\\d;'\nFROM t",
    ]
    lite = "_HiStOrY_V2_\n.mode\\040box\nSELECT\\040a\\040FROM\\040t;\n"
    assert [each.sql for each in statements(write(tmp_path / ".sqlite_history", lite))] == ["SELECT a FROM t"]
    text = "\ufeffSELECT 'é' FROM t;\r\nGO\r\nSELECT 2 FROM t\r\n/\r\n".encode()
    assert [each.sql.strip() for each in statements(write(tmp_path / "a.sql", text))] == [
        "SELECT 'é' FROM t",
        "",
        "SELECT 2 FROM t",
    ][::2]
    assert (
        statements(write(tmp_path / "b.sql", "SELECT 'é' FROM t;".encode("latin-1")))[0].sql
        == "SELECT 'é' FROM t"
    )


def test_a_quote_that_is_not_closed_costs_little(shop: Path, tmp_path: Path) -> None:
    later = "".join(f"SELECT name FROM customers WHERE id = {n};\n" for n in range(2000))
    log = f"SELECT 'oops FROM orders;\n{later}SELECT COUNT(*) FROM orders;\n"
    made, found = made_of(shop, tmp_path, log)
    assert "SELECT COUNT(*) FROM orders" in found
    assert [count for reason, count in made.reasons.items() if "without an end" in reason] == [1]


def test_dumps_are_skipped_fast(shop: Path, tmp_path: Path) -> None:
    rows = "".join(f"({n}, 'it''s; {n}'),\n" for n in range(100_000))
    log = f"INSERT INTO t VALUES\n{rows}(0, 'x');\nINSERT INTO t VALUES {rows.replace(chr(10), ' ')};\n"
    made, found = made_of(shop, tmp_path, f"{log}SELECT COUNT(*) FROM orders;\n")
    assert list(found) == ["SELECT COUNT(*) FROM orders"] and made.n_read == 3


def test_postgresqls_log_gives_statements_with_their_values(shop: Path, tmp_path: Path) -> None:
    log = (
        "2026-01-02 10:00:00.000 UTC [7] LOG:  database system is ready to accept connections\n"
        "2026-01-02 10:00:01.000 UTC [9] me@shop LOG:  statement: SELECT a\n\tFROM t; SELECT 2;\n"
        "2026-01-02 10:00:01.000 UTC [9] me@shop LOG:  duration: 0.113 ms\n"
        "2026-01-02 10:00:02.000 UTC [9] me@shop LOG:  duration: 0.2 ms  parse <unnamed>: SELECT b FROM t\n"
        "2026-01-02 10:00:02 [9] LOG:  duration: 0.2 ms  execute <unnamed>: SELECT b FROM t WHERE c = $1\n"
        "2026-01-02 10:00:02.000 UTC [9] me@shop DETAIL:  parameters: $1 = 'O''Hara', $2 = NULL\n"
        '2026-01-02 10:00:03.000 UTC [9] me@shop ERROR:  relation "x" does not exist at character 15\n'
        "2026-01-02 10:00:03.000 UTC [9] me@shop STATEMENT:  SELECT * FROM x\n"
    )
    found = statements(write(tmp_path / "postgresql.log", log), "postgresql://me@host/shop")
    assert [(each.sql.strip(), each.values) for each in found] == [
        ("SELECT a\n\tFROM t", ()),
        ("SELECT 2", ()),
        ("SELECT b FROM t WHERE c = $1", ("O'Hara", None)),
    ]
    log = "[9] LOG:  execute S_1: SELECT COUNT(*) FROM orders WHERE status = $2 AND customer_id < $1\n"
    log += "[9] DETAIL:  Parameters: $1 = '9', $2 = 'sent'\n"
    _, golds = made_of(shop, tmp_path, log)
    assert list(golds) == ["SELECT COUNT(*) FROM orders WHERE status = 'sent' AND customer_id < 9"]


@pytest.mark.parametrize("form", ["csv", "json", "jsonl"])
def test_exports_of_pg_stat_statements_give_calls(shop: Path, tmp_path: Path, form: str) -> None:
    rows = [
        {"query": "SELECT COUNT(*) FROM orders WHERE status = $1", "calls": 7},
        {"query": "SELECT name FROM customers\nWHERE city = $1", "calls": 90},
        {"query": "<insufficient privilege>", "calls": 5},
    ]
    path = tmp_path / f"export.{form}"
    if form == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["query", "calls"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text(json.dumps(rows) if form == "json" else "\n".join(map(json.dumps, rows)))
    made, found = made_of(shop, tmp_path, str(path))
    assert next(iter(found)).startswith("SELECT name") and made.reasons == {HIDDEN: 1}
    assert list(json.loads((tmp_path / "made" / "log_made.json").read_text())["calls"].values()) == [90, 7]


def test_long_lines_keep_their_letters(tmp_path: Path) -> None:
    rows = [{"query": f"SELECT 'a{'é' * 600_000}' FROM t"}]
    (statement,) = statements(write(tmp_path / "export.json", json.dumps(rows, ensure_ascii=False)))
    assert statement.sql == rows[0]["query"]


def test_models_of_dbt_are_read_compiled_or_with_plain_jinja(shop: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    write(project / "dbt_project.yml", "name: shop\n")
    write(
        project / "models" / "cities.sql",
        "{{ config(materialized='table') }}\n{# all #}{% set least = 2 %}SELECT city, COUNT(*) AS n\n"
        "FROM {{ source('raw', 'customers') }} JOIN {{ ref('orders') }} ON customers.id = customer_id\n"
        "GROUP BY city HAVING COUNT(*) > {{ least }};",
    )
    write(project / "models" / "sub" / "open.sql", "SELECT {{ dbt_utils.star() }} FROM {{ ref('orders') }}")
    write(project / "models" / "paid.sql", "SELECT {{ broken")
    write(
        project / "target" / "compiled" / "shop" / "models" / "paid.sql",
        'SELECT COUNT(*) FROM "db"."main"."orders" WHERE status = \'paid\'',
    )
    write(
        project / "models" / "schema.yml",
        "models: [{name: cities, columns: [{name: city, tests: [unique, not_null]}], data_tests: [x]}]",
    )
    made, found = made_of(shop, tmp_path, str(project))
    assert set(found.values()) == {
        'How many orders are there whose status is "paid"?',
        "Show each city of a customer with the number of orders, only where the number of orders is above 2.",
    }
    assert made.reasons == {"a test of dbt": 3, "Jinja that dbt must compile (dbt compile)": 1}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.sql", None, "cannot read the log"),
        ("binary.sql", b"SQLite format 3\0\1\2", "binary"),
        ("folder/x.txt", b"", "dbt_project.yml"),
        ("columns.csv", b"sql,n\nSELECT 1,2\n", "`query`"),
        ("bad.json", b"{", "JSON"),
        ("bad.jsonl", b'{"query": "SELECT 1"}\n{\n', "bad.jsonl:2"),
        ("numbers.json", b"[1, 2]", "`query`"),
        ("pg_stat_statements", None, "pg_stat_statements"),
    ],
)
def test_bad_logs_are_named(
    shop: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: bytes | None,
    message: str,
) -> None:
    if content is not None:
        write(tmp_path / name, content)
    log = name if name == "pg_stat_statements" else str(tmp_path / name.split("/")[0])
    out = tmp_path / "log.jsonl"
    assert main(["data", "log", "--databases", str(shop), "--log", log, "--out", str(out)]) == 1
    assert message in capsys.readouterr().err and not out.exists()


def test_the_verb_reports_and_keeps_edited_files(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write(
        tmp_path / "a.sql",
        "SELECT COUNT(*) FROM orders;\nDROP TABLE orders;\nSELECT name, 1 + 1 FROM customers;",
    )
    command = [
        "data",
        "log",
        "--databases",
        str(shop),
        "--log",
        log,
        "--out",
        str(tmp_path / "shop" / "log.jsonl"),
    ]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "read 3 statements, kept 2" in printed and "writes" in printed
    assert "1 query without a question" in printed
    assert main(command) == 0
    to_word = tmp_path / "shop" / "log_to_word.jsonl"
    to_word.write_text(to_word.read_text().replace('"question": ""', '"question": "Who is there?"'))
    assert main(command) == 1
    assert "edited" in capsys.readouterr().err and "Who is there?" in to_word.read_text()
    assert len(read_questions(to_word)) == 1
    nothing = write(tmp_path / "b.sql", "DROP TABLE orders;")
    assert main([*command[:5], nothing, "--out", str(tmp_path / "none.jsonl")]) == 1
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize("engine", ["duckdb", "postgresql"])
def test_logs_of_other_engines(
    make_database: Callable[[str, str], Path | str],
    tmp_path: Path,
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = without_password(str(make_database(engine, script())), monkeypatch)
    log = (
        "SELECT count(*) FROM orders WHERE order_date >= $1 AND status ILIKE 'Pa%';\n"
        "SELECT extract(year FROM order_date) AS y, sum(price) FROM orders GROUP BY y ORDER BY y;\n"
        "SELECT name FROM customers WHERE city = $1::varchar AND age < $2;\n"
        "SELECT count(*) FROM orders WHERE order_date < now();\nSELECT * FROM pg_catalog.pg_class;\n"
    )
    made, found = made_of(address, tmp_path, log)
    questions = list(found.values())
    assert len(found) == 3 and sum(made.reasons.values()) == 2
    assert any("whose status starts with" in one for one in questions)
    assert (
        "Show each year of the order's date with the total price of its orders, sorted by the year"
        in " ".join(questions)
    )


def test_statistics_of_a_server_are_read(
    postgres_server: "PostgresServer", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statistics = """CREATE VIEW pg_stat_statements AS SELECT * FROM (VALUES
        ('SELECT name FROM customers WHERE id = $1', 12), ('SELECT COUNT(*) FROM orders', 40)
        ) AS v (query, calls),
        (SELECT oid AS dbid FROM pg_database WHERE datname = current_database()) AS d"""
    url = without_password(postgres_server.create("counted", f"{script()} {statistics}"), monkeypatch)
    made, found = made_of(url, tmp_path, "pg_stat_statements")
    assert made.n_worded == 2 and next(iter(found)) == "SELECT COUNT(*) FROM orders"
