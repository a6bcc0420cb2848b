import asyncio
import gc
import json
import shutil
import socket
import sqlite3
import subprocess
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs the extra: pip install 'text2sql-grpo[mcp]'")

import duckdb
import httpx2
import psycopg
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.mcpserver import MCPServer

from tests.postgres_server import PostgresServer
from tests.scripted_policy import SHOP
from tests.tiny_run import json_lines
from text2sql_grpo import __version__
from text2sql_grpo.commands import main
from text2sql_grpo.environment.observation import ObservationLimits
from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.integrations.mcp import connections
from text2sql_grpo.integrations.mcp.audit_log import AuditLog
from text2sql_grpo.integrations.mcp.fair_queue import FairQueue, TooManyQueries
from text2sql_grpo.integrations.mcp.server import http_server, listen, make_server, url_of
from text2sql_grpo.sql import Limits, SQLExecutor
from text2sql_grpo.sql.postgres_role import restricted_role_sql

Answers = list[tuple[bool, str]]


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


async def ask(client: Client, *calls: tuple[str, dict[str, object]]) -> Answers:
    results = [await client.call_tool(name, arguments) for name, arguments in calls]
    return [(result.is_error, result.content[0].text) for result in results]  # type: ignore[union-attr]


def answers(
    database: Path | str, executor: SQLExecutor, audit_log: AuditLog, *calls: tuple[str, dict[str, object]]
) -> Answers:
    """What the server answers the SDK's client, without a transport between them."""
    server = make_server(database, executor, audit_log, observation=ObservationLimits(max_rows=2))

    async def talk() -> Answers:
        async with Client(server) as client:
            return await ask(client, *calls)

    return asyncio.run(talk())


def test_tables_are_listed_and_described(database: Path, executor: SQLExecutor, audit_log: AuditLog) -> None:
    listed, upper, view, unknown = answers(
        database,
        executor,
        audit_log,
        ("list_tables", {}),
        ("describe_table", {"table": "BRANCH"}),
        ("describe_table", {"table": '"big cities"'}),
        ("describe_table", {"table": "nope"}),
    )
    assert listed == (False, 'branch\n"big cities"')
    assert upper[1].startswith("CREATE TABLE branch (\n  code TEXT PRIMARY KEY,")
    assert view[1].startswith('-- VIEW "big cities" (')
    assert unknown == (True, "Error: unknown table 'nope': list_tables shows the names")
    assert audit_log.path.read_text() == ""


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


def test_queries_run_under_the_limits_and_each_leaves_a_line(
    database: Path, executor: SQLExecutor, audit_log: AuditLog
) -> None:
    queries = ["SELECT code FROM branch", "DELETE FROM branch", "SELECT nope", ENDLESS]
    told = answers(database, executor, audit_log, *(("run_sql", {"sql": sql}) for sql in queries))
    rows, denied, wrong, endless = told
    assert rows == (False, "code\nFAO-09\nLIS-02\n(2 of 3 rows shown)")
    assert denied[0] and denied[1].startswith("Error: not allowed: DELETE")
    assert wrong == (True, "Error: no such column: nope")
    assert endless == (True, "Error: stopped: the query ran longer than 1 s")
    lines = json_lines(audit_log.path)
    assert [(line["sql"], line["status"], line["rows"]) for line in lines] == [
        (queries[0], "ok", 3),
        (queries[1], "denied", 0),
        (queries[2], "error", 0),
        (queries[3], "timeout", 0),
    ]
    assert lines[3]["elapsed_s"] > 0.9
    assert all(line["time"].endswith("+00:00") and line["session"] for line in lines)
    assert (audit_log.path.stat().st_mode & 0o777) == 0o600


def test_duckdb(tmp_path: Path, executor: SQLExecutor, audit_log: AuditLog) -> None:
    path = tmp_path / "shop.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE branch AS SELECT 'LIS-02' AS code")
    told = answers(
        f"duckdb:///{path}",
        executor,
        audit_log,
        ("list_tables", {}),
        ("run_sql", {"sql": "SELECT code FROM branch"}),
    )
    assert told == [(False, "branch"), (False, "code\nLIS-02")]


def test_postgresql(postgres_server: PostgresServer, executor: SQLExecutor, audit_log: AuditLog) -> None:
    with psycopg.connect(postgres_server.admin_url(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE mcp_shop")
    with psycopg.connect(postgres_server.admin_url("mcp_shop"), autocommit=True) as connection:
        connection.execute("CREATE TABLE branch (city text)")
        connection.execute(restricted_role_sql("mcp_reader", "secret", "mcp_shop"))
    url = postgres_server.url("mcp_reader", "secret", "mcp_shop")
    told = answers(url, executor, audit_log, ("run_sql", {"sql": "SELECT 1 AS n"}))
    assert told == [(False, "n\n1")]


def test_a_database_that_vanished_is_told_and_logged(
    tmp_path: Path, database: Path, executor: SQLExecutor, audit_log: AuditLog
) -> None:
    path = tmp_path / "gone.sqlite"
    path.write_bytes(database.read_bytes())
    server = make_server(path, executor, audit_log, observation=ObservationLimits())
    path.unlink()

    async def talk() -> Answers:
        async with Client(server) as client:
            return await ask(client, ("run_sql", {"sql": "SELECT 1"}))

    ((is_error, text),) = asyncio.run(talk())
    assert is_error and "gone.sqlite" in text
    assert json_lines(audit_log.path)[0]["status"] == "failed"


def test_a_query_that_cannot_be_logged_gets_no_answer(database: Path, executor: SQLExecutor) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    ((is_error, text),) = answers(
        database, executor, AuditLog(full), ("run_sql", {"sql": "SELECT city FROM branch"})
    )
    assert is_error and "Lisbon" not in text and "No space left" in text


def test_a_database_that_is_missing(tmp_path: Path, executor: SQLExecutor, audit_log: AuditLog) -> None:
    with pytest.raises(DataError, match=r"none\.sqlite"):
        make_server(tmp_path / "none.sqlite", executor, audit_log, observation=ObservationLimits())


INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}
HEADERS = {"Accept": "application/json, text/event-stream", "Authorization": "Bearer open sesame"}


def serving(
    database: Path,
    executor: SQLExecutor,
    audit_log: AuditLog,
    talk: Callable[[str], Awaitable[None]],
    *,
    workers: int = 1,
) -> None:
    """Runs `talk` with the URL of a server that wants the token `open sesame`."""
    token = "open sesame"
    made = make_server(
        database, executor, audit_log, observation=ObservationLimits(), token=token, workers=workers
    )
    with running(made, listen("127.0.0.1", 0, token=token)) as url:
        asyncio.run(talk(url))  # type: ignore[arg-type]


@contextmanager
def running(made: MCPServer, listener: socket.socket) -> Iterator[str]:
    """URL of a server in a thread."""
    server = http_server(made, "127.0.0.1", allowed_hosts=["sql.example"])
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield url_of(listener)
    finally:
        server.should_exit = True
        thread.join()
        with warnings.catch_warnings():  # the SDK leaves streams of sessions open that end with the server
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


def test_http_serves_the_sdk_s_client_that_has_the_token_and_nobody_else(
    database: Path, executor: SQLExecutor, audit_log: AuditLog
) -> None:
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
    call |= {"params": {"name": "run_sql", "arguments": {"sql": "SELECT 2"}}}
    accept = {"Accept": "application/json, text/event-stream"}

    async def talk(url: str) -> None:
        headers = {"Authorization": "Bearer open sesame"}
        async with (
            httpx2.AsyncClient(headers=headers) as web,
            Client(streamable_http_client(url, http_client=web)) as client,
        ):
            assert len((await client.list_tools()).tools) == 3
            assert await ask(client, ("run_sql", {"sql": "SELECT 1 AS n"})) == [(False, "n\n1")]
        async with httpx2.AsyncClient() as web:
            for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "open sesame"}):
                response = await web.post(url, json=call, headers=accept | wrong)
                assert response.status_code == 401
            foreign = headers | {"Host": "evil.example"}
            assert (await web.post(url, json=call, headers=accept | foreign)).status_code == 421
            for host in ("sql.example", "sql.example:443"):
                response = await web.post(url, json=INITIALIZE, headers=accept | headers | {"Host": host})
                assert response.status_code == 200

    serving(database, executor, audit_log, talk)
    (line,) = json_lines(audit_log.path)
    assert line["sql"] == "SELECT 1 AS n" and line["session"].startswith("http:127.0.0.1:")


@pytest.mark.parametrize("host", ["0.0.0.0", "", "192.0.2.1", "example.org", "::"])
def test_other_machines_are_served_with_a_token_only(host: str) -> None:
    with pytest.raises(ConfigError, match="a server that other machines can reach needs a token"):
        listen(host, 0, token=None)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.9.9.9"])
def test_this_machine_is_served_without(host: str) -> None:
    with closing(listen(host, 0, token=None)) as listener:
        assert url_of(listener).startswith("http://127.")
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen: .*:{port}"):
            listen(host, port, token=None)


def test_all_addresses_with_a_token() -> None:
    with closing(listen("0.0.0.0", 0, token="x")) as listener:
        assert url_of(listener).startswith("http://0.0.0.0:")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--db", "none.sqlite"], "none.sqlite"),
        (["--db", "mysql://x"], "unknown URL scheme 'mysql'"),
        (
            ["--db", "{db}", "--transport", "http", "--host", "0.0.0.0"],
            "a server that other machines can reach needs a token",
        ),
        (["--db", "{db}", "--transport", "http", "--token", ""], "the token is empty"),
        (["--db", "{db}", "--audit_log", "{db}/log"], "cannot write the audit log"),
        (
            ["--db", "{db}", "--environment.max_turns", "3"],
            "settings such as --environment.max_turns need --config FILE",
        ),
        (["--db", "{db}", "--config", "none.yaml"], "cannot read the config"),
    ],
)
def test_the_command_says_what_is_wrong(
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


def test_audit_lines_hold_any_text_and_are_bounded(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "log.jsonl")
    for sql in ("SELECT '\ud800\n\"'", "x" * 300_000):
        log.write(session="s", sql=sql, status="error", rows=0, elapsed_s=0.5)
    log.close()
    first, second = (json.loads(line) for line in log.path.read_text().splitlines())
    assert first["sql"] == "SELECT '\ud800\n\"'" and first["elapsed_s"] == 0.5
    assert len(second["sql"]) == 100_000


def test_results_are_structured_and_paged(database: Path, executor: SQLExecutor, audit_log: AuditLog) -> None:
    server = make_server(database, executor, audit_log, observation=ObservationLimits(max_rows=2))

    async def talk() -> list[Any]:
        async with Client(server) as client:
            assert all(tool.output_schema for tool in (await client.list_tools()).tools)
            sql = "SELECT code, x'ff' AS raw FROM branch"
            calls = [{"sql": sql}, {"sql": sql, "offset": 2}, {"sql": "SELECT nope"}]
            return [(await client.call_tool("run_sql", call)).structured_content for call in calls]

    first, second, wrong = asyncio.run(talk())
    assert first == {
        "columns": ["code", "raw"],
        "rows": [["FAO-09", "ff"], ["LIS-02", "ff"]],
        "next_offset": 2,
        "is_truncated": False,
        "error": None,
    }
    assert [row[1] for row in second["rows"]] == ["ff"] and second["next_offset"] is None
    assert wrong["error"] == "no such column: nope" and wrong["rows"] == []


def call(sql: str) -> dict[str, Any]:
    params = {"name": "run_sql", "arguments": {"sql": sql}}
    return {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}


@pytest.mark.filterwarnings("ignore:Unclosed <MemoryObject:ResourceWarning")
def test_endless_queries_of_one_client_delay_no_other_and_are_dropped_when_it_hangs_up(
    database: Path, audit_log: AuditLog
) -> None:
    async def talk(url: str) -> None:
        async with httpx2.AsyncClient(timeout=60, headers=HEADERS) as web:
            sessions = []
            for _ in range(2):
                response = await web.post(url, json=INITIALIZE)
                sessions.append({"mcp-session-id": response.headers["mcp-session-id"]})
                result = response.json()["result"]
                assert result["serverInfo"]["version"] == __version__
                assert "prompts" not in result["capabilities"] and "resources" not in result["capabilities"]
            async with httpx2.AsyncClient(
                timeout=60, headers=HEADERS, limits=httpx2.Limits(max_connections=80)
            ) as greedy:
                posts = [
                    asyncio.create_task(greedy.post(url, json=call(ENDLESS), headers=sessions[0]))
                    for _ in range(80)
                ]
                while not any(post.done() for post in posts):  # the refusal of those over the limit
                    await asyncio.sleep(0.05)
                started = asyncio.get_running_loop().time()
                response = await web.post(url, json=call("SELECT 1"), headers=sessions[1])
                assert asyncio.get_running_loop().time() - started < 5  # 80 x 40 s one after the other
                assert response.json()["result"]["content"][0]["text"] == "1\n1"
                refused = next(post for post in posts if post.done()).result().json()["result"]
                assert refused["isError"] and "queries of this session wait already" in str(refused)
                for post in posts:
                    post.cancel()
                await asyncio.gather(*posts, return_exceptions=True)
            started = asyncio.get_running_loop().time()
            await web.post(url, json=call("SELECT 1"), headers=sessions[0])  # its running queries are killed
            assert asyncio.get_running_loop().time() - started < 15
            while [line["status"] for line in json_lines(audit_log.path)].count("cancelled") < 30:
                await asyncio.sleep(0.05)

    with SQLExecutor(Limits(timeout_s=40), workers=4) as executor:
        serving(database, executor, audit_log, talk, workers=4)


@pytest.mark.filterwarnings("ignore:Unclosed <MemoryObject:ResourceWarning")
def test_sessions_are_bounded_and_half_sent_requests_are_closed(
    database: Path, executor: SQLExecutor, audit_log: AuditLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_SESSIONS", 3)
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT_S", 0.5)

    async def talk(url: str) -> None:
        async with httpx2.AsyncClient(timeout=60, headers=HEADERS) as web:
            names = []
            for _ in range(10):
                names.append((await web.post(url, json=INITIALIZE)).headers["mcp-session-id"])
            for name, status in ((names[0], 404), (names[-1], 200)):
                response = await web.post(url, json=call("SELECT 1"), headers={"mcp-session-id": name})
                assert response.status_code == status
        address = ("127.0.0.1", int(url.split(":")[2].partition("/")[0]))
        head = b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n"
        for sent in (b"", head[:20], head, head + b"\r\nabc"):
            reader, writer = await asyncio.open_connection(*address, family=socket.AF_INET)
            writer.write(sent)
            with suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 30)
            writer.close()

    serving(database, executor, audit_log, talk)


def bodies_of_garbage() -> Iterator[bytes]:
    good = json.dumps(call("SELECT 1"))
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


def test_garbage_is_refused_and_the_next_request_answered(
    database: Path, executor: SQLExecutor, audit_log: AuditLog
) -> None:
    async def talk(url: str) -> None:
        async with httpx2.AsyncClient(timeout=60, headers=HEADERS) as web:
            response = await web.post(url, json=INITIALIZE)
            session = {"mcp-session-id": response.headers["mcp-session-id"]}
            kind = {"Content-Type": "application/json"}
            for body in bodies_of_garbage():
                response = await web.post(url, content=body, headers=session | kind)
                assert response.status_code in (200, 202, 400, 413)  # 202: a notification, its id is none
                assert response.status_code != 200 or "rror" in response.text
            address = ("127.0.0.1", int(url.split(":")[2].partition("/")[0]))
            for raw in (b"\x16\x03\x01\x02\0\x01", b"\0" * 999, b"POST /mcp HTTP/1.1\r\nContent-Length: -5"):
                reader, writer = await asyncio.open_connection(*address, family=socket.AF_INET)
                writer.write(raw + b"\r\n\r\n")
                assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 400")
                writer.close()
            response = await web.post(url, json=call("SELECT 1"), headers=session)
            assert response.json()["result"]["content"][0]["text"] == "1\n1"

    serving(database, executor, audit_log, talk)
    assert [line["sql"] for line in json_lines(audit_log.path)] == ["SELECT 1"]


def test_sessions_take_turns() -> None:
    order: list[str] = []

    async def main() -> None:
        queue = FairQueue(2, waiting_each=3)
        gate = asyncio.Event()

        async def query(name: str) -> None:
            order.append(name)
            await gate.wait()

        def ask(session: str, number: int) -> asyncio.Task[None]:
            return asyncio.create_task(queue.run(session, lambda: query(f"{session}{number}")))

        greedy = [ask("a", number) for number in range(5)]
        other = ask("b", 0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == ["a0", "b0"]  # one session gets half of the places
        with pytest.raises(TooManyQueries, match="3 queries of this session wait already"):
            await greedy[4]
        greedy[1].cancel()
        gate.set()
        await asyncio.gather(other, *greedy[:4], return_exceptions=True)

    asyncio.run(main())
    assert order == ["a0", "b0", "a2", "a3"]


@pytest.mark.slow
@pytest.mark.network
def test_official_conformance_suite(database: Path, executor: SQLExecutor, audit_log: AuditLog) -> None:
    npx = shutil.which("npx")
    if npx is None:
        pytest.skip("needs npx (npm of Node.js, which fetches Node 22 for the suite)")
    suite = [npx, "-y", "-p", "node@22", "-p", "@modelcontextprotocol/conformance@0.1.16", "conformance"]
    server = make_server(database, executor, audit_log, observation=ObservationLimits())
    with running(server, listen("127.0.0.1", 0, token=None)) as url:
        # Other scenarios need tools, prompts and resources of their own.
        for scenario in ("server-initialize", "ping", "tools-list", "dns-rebinding-protection"):
            words = [*suite, "server", "--url", url, "--scenario", scenario]
            done = subprocess.run(words, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0 and "0 failed" in done.stdout, done.stdout + done.stderr
