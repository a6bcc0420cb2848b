"""`text2sql-grpo mcp`, through the SDK's own client and raw requests."""

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs the extra: pip install 'text2sql-grpo[mcp]'")

import httpx2
import psycopg
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from tests.databases import sqlite_file
from tests.postgres_server import PostgresServer
from tests.scripted_policy import SHOP
from tests.tiny_run import json_lines
from text2sql_grpo.commands import main
from text2sql_grpo.environment.observation import ObservationLimits
from text2sql_grpo.errors import DataError
from text2sql_grpo.integrations.mcp.server import AuditLog, make_server, open_http
from text2sql_grpo.sql import Limits, SQLExecutor
from text2sql_grpo.sql.postgres_role import restricted_role_sql

Call = tuple[str, dict[str, object]]
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
TOKEN = "open sesame"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shop") / "shop.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SHOP + 'CREATE VIEW "big cities" AS SELECT city FROM branch;')
    return path


@pytest.fixture(scope="module")
def executor() -> Iterator[SQLExecutor]:
    with SQLExecutor(Limits(timeout_s=1), workers=1) as executor:
        yield executor


@pytest.fixture
def audit_log(tmp_path: Path) -> Iterator[AuditLog]:
    log = AuditLog(tmp_path / "audit" / "log.jsonl")
    yield log
    log.close()


def results(
    database: Path | str, executor: SQLExecutor, log: AuditLog, *calls: Call, hide: Sequence[str] = ()
) -> list[Any]:
    """Results of calls of the SDK's client, without a transport."""
    server = make_server(database, executor, log, observation=ObservationLimits(max_rows=2), hide=hide)

    async def talk() -> list[Any]:
        async with Client(server) as client:
            return [await client.call_tool(name, arguments) for name, arguments in calls]

    return asyncio.run(talk())


def texts(*arguments: Any, **options: Any) -> list[tuple[bool, str]]:
    return [(result.is_error, result.content[0].text) for result in results(*arguments, **options)]


def query(sql: str, **arguments: object) -> Call:
    return "run_sql", {"sql": sql, **arguments}


def test_tables_are_listed_and_described(database: Path, executor: SQLExecutor, audit_log: AuditLog) -> None:
    names = ("BRANCH", '"big cities"', "nope")
    calls = [("describe_table", {"table": name}) for name in names]
    listed, upper, view, unknown = texts(database, executor, audit_log, ("list_tables", {}), *calls)
    assert listed == (False, 'branch\n"big cities"')
    assert upper[1].startswith("CREATE TABLE branch (\n  code TEXT PRIMARY KEY,")
    assert view[1].startswith('-- VIEW "big cities" (')
    assert unknown[0] and "unknown table 'nope'" in unknown[1]
    assert audit_log.path.read_text() == ""


def test_queries_run_under_the_limits_and_each_leaves_a_line(
    database: Path, executor: SQLExecutor, audit_log: AuditLog
) -> None:
    queries = ["SELECT code FROM branch", "DELETE FROM branch", "SELECT nope", ENDLESS, "x" * 300_000]
    rows, denied, wrong, endless, _ = texts(database, executor, audit_log, *map(query, queries))
    assert rows == (False, "code\nFAO-09\nLIS-02\n(2 of 3 rows shown)")
    assert denied[0] and "not allowed: DELETE" in denied[1]
    assert wrong == (True, "Error: no such column: nope")
    assert endless[0] and "longer than 1 s" in endless[1]
    lines = json_lines(audit_log.path)
    assert [(line["sql"], line["status"], line["rows"]) for line in lines[:4]] == [
        (queries[0], "ok", 3),
        (queries[1], "denied", 0),
        (queries[2], "error", 0),
        (queries[3], "timeout", 0),
    ]
    assert lines[3]["elapsed_s"] > 0.9 and len(lines[4]["sql"]) == 100_000
    assert all(line["time"].endswith("+00:00") for line in lines)
    assert lines[0]["session"] == f"stdio:{os.getpid()}"
    assert (audit_log.path.stat().st_mode & 0o777) == 0o600


LETTERS = """
CREATE TABLE customer (id INTEGER PRIMARY KEY, name TEXT, email TEXT);
CREATE VIEW letter AS SELECT id, email AS address FROM customer;
INSERT INTO customer VALUES (1, 'Ann', 'ann@a.org');
"""


@pytest.mark.parametrize("hide", [["personal"], ["customer.email"], ["*.nope"]])
def test_no_tool_shows_what_is_hidden(
    hide: list[str],
    tmp_path: Path,
    executor: SQLExecutor,
    audit_log: AuditLog,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = sqlite_file(tmp_path / "shop.sqlite", LETTERS)
    queries = [
        "SELECT email FROM customer",
        "SELECT * FROM customer",
        "SELECT address FROM letter",
        "SELECT sql FROM sqlite_master",
        "SELECT e_mail FROM customer",
        "PRAGMA table_info(customer)",
    ]
    names = [("describe_table", {"table": name}) for name in ("customer", "letter")]
    calls = [("list_tables", {}), *names, *map(query, queries), query("SELECT name FROM customer")]
    answers = results(path, executor, audit_log, *calls, hide=hide)
    shown = " ".join(f"{one.content[0].text} {one.structured_content}" for one in answers)
    assert "Ann" in shown and "name TEXT" in shown
    for word in ("ann@a.org", "email TEXT", "address TEXT"):
        assert (word in shown) == (hide == ["*.nope"])
    statuses = [line["status"] for line in json_lines(audit_log.path)]
    is_hidden = hide != ["*.nope"]
    assert statuses[:3] == (["denied"] * 3 if is_hidden else ["ok"] * 3)
    logged = "customer.email, letter.address" if is_hidden else "no table or column is named *.nope"
    assert caplog.text.count(logged) == 1


def test_a_table_that_comes_later_is_hidden_and_shown_as_the_others(
    tmp_path: Path, executor: SQLExecutor, audit_log: AuditLog, caplog: pytest.LogCaptureFixture
) -> None:
    path = sqlite_file(tmp_path / "shop.sqlite", LETTERS)
    server = make_server(path, executor, audit_log, observation=ObservationLimits())  # hides personal data

    async def talk() -> list[Any]:
        async with Client(server) as client:
            with closing(sqlite3.connect(path)) as connection:
                connection.executescript("CREATE TABLE staff (id INTEGER, email TEXT)")
            calls = [("list_tables", {}), query("SELECT id FROM staff"), query("SELECT email FROM staff")]
            return [await client.call_tool(*call) for call in calls]

    listed, rows, hidden = [result.content[0].text for result in asyncio.run(talk())]
    assert "staff" in listed and rows == "id\n(no rows)" and "hidden" in hidden
    assert "staff.email" in caplog.text


def test_a_wrong_argument_is_named_in_a_line(
    database: Path, executor: SQLExecutor, audit_log: AuditLog
) -> None:
    calls = [
        ("run_sql", {"query": "SELECT 1"}),
        ("run_sql", {"sql": "SELECT 1", "x" * 999: 1}),
        ("run_sql", {}),
        ("run_sql", {"sql": "SELECT 1", "offset": -1}),
        ("list_tables", {"database": "x"}),
        ("nope", {"sql": 1}),
    ]
    wrong = texts(database, executor, audit_log, *calls)
    assert all(is_error and "\n" not in text and len(text) < 200 for is_error, text in wrong)
    assert wrong[0][1] == "Error: unknown argument 'query' (run_sql takes sql, offset, limit)"
    assert "sql: " in wrong[2][1] and "offset: " in wrong[3][1] and "'database'" in wrong[4][1]
    assert audit_log.path.read_text() == ""


def test_results_are_structured_and_paged(database: Path, executor: SQLExecutor, audit_log: AuditLog) -> None:
    sql = "SELECT code, x'ff' AS raw FROM branch"
    calls = [query(sql), query(sql, offset=2), query("SELECT nope"), query(sql, offset=3)]
    answers = results(database, executor, audit_log, *calls)
    first, second, wrong, _ = [result.structured_content for result in answers]
    assert answers[1].content[0].text.endswith("\n(1 of 3 rows shown)")
    assert answers[3].content[0].text.endswith("\n(0 of 3 rows shown)")
    assert first == {
        "columns": ["code", "raw"],
        "rows": [["FAO-09", "ff"], ["LIS-02", "ff"]],
        "next_offset": 2,
        "is_truncated": False,
        "error": None,
    }
    assert [row[1] for row in second["rows"]] == ["ff"] and second["next_offset"] is None
    assert wrong["error"] == "no such column: nope" and wrong["rows"] == []


def test_a_cancelled_call_stops_its_query(database: Path, audit_log: AuditLog) -> None:
    async def talk(executor: SQLExecutor) -> None:
        server = make_server(database, executor, audit_log, observation=ObservationLimits())
        async with Client(server) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.call_tool(*query(ENDLESS)), 0.5)
            assert (await client.call_tool(*query("SELECT 1"))).content[0].text == "1\n1"  # type: ignore[union-attr]

    with SQLExecutor(Limits(timeout_s=60), workers=1) as executor:
        asyncio.run(talk(executor))
    assert [line["status"] for line in json_lines(audit_log.path)] == ["cancelled", "ok"]


def test_postgresql(postgres_server: PostgresServer, executor: SQLExecutor, audit_log: AuditLog) -> None:
    with psycopg.connect(postgres_server.admin_url(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE mcp_shop")
    with psycopg.connect(postgres_server.admin_url("mcp_shop"), autocommit=True) as connection:
        connection.execute("CREATE TABLE branch (city text)")
        connection.execute(restricted_role_sql("mcp_reader", "secret", "mcp_shop"))
    url = postgres_server.url("mcp_reader", "secret", "mcp_shop")
    assert texts(url, executor, audit_log, query("SELECT 1 AS n")) == [(False, "n\n1")]
    hidden, tables = texts(
        url, executor, audit_log, query("SELECT city FROM branch"), ("list_tables", {}), hide=["*.city"]
    )
    assert "hidden" in hidden[1] and tables == (False, "(no tables)")
    with pytest.raises(DataError, match="superuser"):
        texts(postgres_server.admin_url("mcp_shop"), executor, audit_log)


def test_a_missing_database_is_named_at_the_start_and_later(
    tmp_path: Path,
    database: Path,
    executor: SQLExecutor,
    audit_log: AuditLog,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "gone.sqlite"
    with pytest.raises(DataError, match=r"gone\.sqlite"):
        make_server(path, executor, audit_log, observation=ObservationLimits())
    path.write_bytes(database.read_bytes())
    server = make_server(path, executor, audit_log, observation=ObservationLimits())
    path.unlink()

    async def talk() -> Any:
        async with Client(server) as client:
            calls = (query("SELECT 1"), ("list_tables", {}), ("describe_table", {"table": "branch"}))
            return [await client.call_tool(*call) for call in calls]

    for result in asyncio.run(talk()):  # the client is a model, which learns no path
        assert result.is_error and "cannot be read" in result.content[0].text
        assert str(tmp_path) not in result.model_dump_json()
    assert caplog.text.count(f"(at {path})") == 3
    assert json_lines(audit_log.path)[0]["status"] == "failed"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_query_that_cannot_be_logged_gets_no_answer(database: Path, executor: SQLExecutor) -> None:
    log = AuditLog(Path("/dev/full"))
    ((is_error, text),) = texts(database, executor, log, query("SELECT city FROM branch"))
    assert is_error and "Lisbon" not in text and "No space left" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--db", "none.sqlite"], "none.sqlite"),
        (["--db", "mysql://x"], "unknown URL scheme 'mysql'"),
        *(
            (["--db", "{db}", "--transport", "http", "--host", host], "needs a token")
            for host in ("0.0.0.0", "", "192.0.2.1", "example.org", "::")
        ),
        (["--db", "{db}", "--transport", "http", "--token", ""], "the token is empty"),
        (["--db", "{db}", "--transport", "http", "--host", "192.0.2.1", "--token", "x"], "cannot listen"),
        (["--db", "{db}", "--audit_log", "{db}/log"], "cannot write the audit log"),
        (["--db", "{db}", "--data.hid", "[]"], "unknown key data.hid"),
        (["--db", "{db}", "--config", "none.yaml"], "none.yaml"),
    ],
)
def test_the_command_names_a_mistake(
    database: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["mcp", *(option.replace("{db}", str(database)) for option in options)]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and message in printed.err
    assert printed.out == ""


def command(database: Path, log: Path, *options: str) -> list[str]:
    words = [sys.executable, "-m", "text2sql_grpo", "mcp", "--db", str(database)]
    return [*words, "--audit_log", str(log), *options]


@pytest.mark.thorough
def test_garbage_on_standard_input_leaves_the_next_client_its_answers(database: Path, tmp_path: Path) -> None:
    program, *words = command(database, tmp_path / "log")
    garbage = (
        "nonsense",
        "{",
        "[]",
        "[" * 100_000,
        '{"jsonrpc": "2.0", "id": 2}',
        "\0\x1b[31m",
        "\udcff\udcfe",
    )
    (tmp_path / "garbage").write_text("\n".join((*garbage, "")), "utf-8", errors="surrogateescape")
    script = f'cat {tmp_path}/garbage - | exec "$0" "$@"'
    server = StdioServerParameters(command="sh", args=["-c", script, program, *words], env=dict(os.environ))

    async def talk() -> list[Any]:
        async with Client(stdio_client(server)) as client:
            assert {tool.name for tool in (await client.list_tools()).tools} == {
                *("list_tables", "describe_table", "run_sql"),
            }
            return [await client.call_tool(*query(sql)) for sql in ("SELECT 7 AS n", "DROP TABLE branch")]

    rows, drop = asyncio.run(talk())
    assert rows.content[0].text == "n\n7" and drop.is_error
    assert [line["status"] for line in json_lines(tmp_path / "log")] == ["ok", "denied"]


@pytest.fixture(scope="module")
def http_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("http") / "log.jsonl"


@pytest.fixture(scope="module")
def url(database: Path, http_log: Path) -> Iterator[str]:
    """URL of a server over HTTP that wants the token."""
    words = command(database, http_log, "--transport", "http", "--port", "0", "--allowed_host", "sql.example")
    words += ["--data.hide", "[branch.city]"]
    environment = os.environ | {"TEXT2SQL_GRPO_MCP_TOKEN": TOKEN}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        assert "hidden from the model in shop: big cities, branch.city" in server.stderr.readline()
        yield server.stderr.readline().split()[-1]
        server.terminate()


HEADERS = {"Accept": "application/json, text/event-stream", "Authorization": f"Bearer {TOKEN}"}


def request(sql: str) -> dict[str, Any]:
    params = {"name": "run_sql", "arguments": {"sql": sql}}
    return {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}


def test_http_serves_many_calls_of_the_sdk_s_client_at_once(url: str, http_log: Path) -> None:
    async def talk() -> list[Any]:
        async with (
            httpx2.AsyncClient(headers=HEADERS) as web,
            Client(streamable_http_client(url, http_client=web)) as client,
        ):
            assert len((await client.list_tools()).tools) == 3
            assert (await client.call_tool(*query("SELECT city FROM branch"))).is_error
            calls = (client.call_tool(*query(f"SELECT {number} AS n")) for number in range(64))
            return await asyncio.gather(*calls)

    answers = [result.content[0].text for result in asyncio.run(talk())]
    assert answers == [f"n\n{number}" for number in range(64)]
    assert json_lines(http_log)[-1]["session"].startswith("http:127.0.0.1:")


def test_http_wants_the_token_and_a_known_name(url: str, http_log: Path) -> None:
    before = len(json_lines(http_log))
    with httpx2.Client(headers=HEADERS) as web:
        for wrong in ("", "Bearer wrong", TOKEN):
            response = web.post(url, json=request("SELECT 2"), headers={"Authorization": wrong})
            assert response.status_code == 401
        response = web.post(url, json=request("SELECT 2"), headers={"Host": "evil.example"})
        assert response.status_code == 421
        assert len(json_lines(http_log)) == before
        for host in ("sql.example", "sql.example:443"):
            proxied = {"Host": host, "X-Forwarded-For": "192.0.2.7"}
            assert web.post(url, json=request("SELECT 2"), headers=proxied).status_code == 200
    assert json_lines(http_log)[-1]["session"] == "http:192.0.2.7:0"  # the client of a proxy on this machine


def test_a_client_names_no_other_address_where_no_proxy_is_expected(
    database: Path, executor: SQLExecutor, audit_log: AuditLog
) -> None:
    server = make_server(database, executor, audit_log, observation=ObservationLimits())
    web, listener, url = open_http(server, "127.0.0.1", 0, token=None)
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with httpx2.Client(headers={"Accept": HEADERS["Accept"], "X-Forwarded-For": "192.0.2.7"}) as client:
            assert client.post(url, json=request("SELECT 2")).status_code == 200
    finally:
        web.should_exit = True
        thread.join()
    assert json_lines(audit_log.path)[0]["session"].startswith("http:127.0.0.1:")


def bodies_of_garbage() -> Iterator[bytes]:
    good = json.dumps(request("SELECT 1"))
    yield from (b"", b"\xff\xfe\0", b"{", b"[]", b"null", b"x" * 5_000_000)
    yield good[:-1].encode() + b', "more": ' + b"[" * 100_000
    for old, new in (
        ('"SELECT 1"', "5"),
        ('"SELECT 1"', r'"\ud800"'),
        ('"SELECT 1"', f'"SELECT 1", "offset": {"9" * 5_000}'),
        ('"SELECT 1"', '"SELECT 1", "limit": -1'),
        ("run_sql", r"\u0000"),
        ('"2.0"', '"1.0"'),
        ("2,", "{},"),
    ):
        yield good.replace(old, new, 1).encode()


def test_garbage_over_http_is_refused_and_the_next_request_answered(url: str, http_log: Path) -> None:
    async def talk() -> None:
        async with httpx2.AsyncClient(timeout=60, headers=HEADERS) as web:
            for body in bodies_of_garbage():
                response = await web.post(url, content=body, headers={"Content-Type": "application/json"})
                assert response.status_code in (200, 202, 400, 413)  # 202: a notification, without an id
                assert response.status_code != 200 or "rror" in response.text
            port = int(url.split(":")[2].partition("/")[0])
            for raw in (b"\x16\x03\x01\x02\0\x01", b"\0" * 999, b"POST /mcp HTTP/1.1\r\nContent-Length: -5"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(raw + b"\r\n\r\n")
                assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 400")
                writer.close()
            response = await web.post(url, json=request("SELECT 1"))
            assert response.json()["result"]["content"][0]["text"] == "1\n1"

    before = len(json_lines(http_log))
    asyncio.run(talk())
    assert [line["sql"] for line in json_lines(http_log)[before:]] == ["SELECT 1"]


@pytest.mark.slow
@pytest.mark.network
def test_official_conformance_suite(database: Path, tmp_path: Path) -> None:
    npx = shutil.which("npx")
    if npx is None:
        pytest.skip("needs npx (npm of Node.js, which fetches Node 22 for the suite)")
    suite = [npx, "-y", "-p", "node@22", "-p", "@modelcontextprotocol/conformance@0.1.16", "conformance"]
    words = command(database, tmp_path / "log", "--transport", "http", "--port", "0")
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = server.stderr.readline().split()[-1]
        # Other scenarios need tools, prompts and resources of their own.
        for scenario in ("server-initialize", "ping", "tools-list", "dns-rebinding-protection"):
            words = [*suite, "server", "--url", url, "--scenario", scenario]
            done = subprocess.run(words, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0 and "0 failed" in done.stdout, done.stdout + done.stderr
        server.terminate()
