import contextlib
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs the extra: pip install 'text2sql-grpo[mcp]'")

from mcp import MCPError

from text2sql_grpo.errors import RunError
from text2sql_grpo.integrations.mcp import server_pool as pool_module
from text2sql_grpo.integrations.mcp import transport
from text2sql_grpo.integrations.mcp.server_pool import CallTimedOut, ConnectionPool, ServerDied
from text2sql_grpo.integrations.mcp.transport import Server

Start = Callable[..., ConnectionPool]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def server(repo_root: Path, log: Path) -> Server:
    return Server(command=(sys.executable, str(repo_root / "tests" / "mcp_server.py"), str(log)))


@pytest.fixture
def start() -> Iterator[Start]:
    """Makes pools that are closed after the test."""
    with contextlib.ExitStack() as stack:

        def start(*, connections: int = 1, timeout_s: float = 30) -> ConnectionPool:
            pool = ConnectionPool(connections=connections, timeout_s=timeout_s)
            stack.callback(pool.close)
            return pool

        yield start


def said(pool: ConnectionPool, server: Server, name: str, **arguments: Any) -> str:
    result = pool.call(server, name, arguments)
    return result.content[0].text  # type: ignore[union-attr]


def events(log: Path) -> Counter[str]:
    return Counter(line.split()[0] for line in log.read_text().splitlines()) if log.exists() else Counter()


def test_sixty_four_calls_at_once_share_one_connection(start: Start, server: Server, log: Path) -> None:
    pool = start()
    started = time.perf_counter()
    with ThreadPoolExecutor(64) as threads:
        answers = list(threads.map(lambda i: said(pool, server, "run_sql", sql=str(i)), range(64)))
        slept = list(threads.map(lambda _: said(pool, server, "sleep", seconds=0.5), range(64)))
    assert answers == [f"ran {i}" for i in range(64)]
    assert slept == ["slept"] * 64
    assert time.perf_counter() - started < 16  # 32 s one after the other
    assert events(log) == {"start": 1, "initialize": 1, "call": 128}


def test_many_calls_at_once_stay_within_the_queue_of_this_package_s_server(
    start: Start, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(tmp_path / "shop.sqlite")) as connection:
        connection.execute("CREATE TABLE branch (code TEXT)")
    command = (sys.executable, "-m", "text2sql_grpo", "mcp", "--db", str(tmp_path / "shop.sqlite"))
    server, pool = Server(command=(*command, "--audit_log", str(tmp_path / "log"))), start()
    counted = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 30000) "

    with ThreadPoolExecutor(96) as threads:
        queries = [f"{counted}SELECT count(*) + {i} FROM n" for i in range(96)]
        answers = list(threads.map(lambda sql: said(pool, server, "run_sql", sql=sql), queries))

    assert [str(30_000 + i) in answer for i, answer in enumerate(answers)] == [True] * 96


def test_no_more_connections_than_allowed_and_the_idle_one_makes_room(
    start: Start, server: Server, log: Path
) -> None:
    pool = start(connections=2)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: said(pool, server, "sleep", seconds=0.2), range(8)))
    assert events(log)["start"] == 2
    other = Server(command=(*server.command, "another"))
    assert said(pool, other, "run_sql", sql="1") == "ran 1"
    first = said(pool, server, "pid")
    assert said(pool, server, "pid") == first
    assert events(log)["start"] == 3


def test_a_tool_s_error_and_a_refused_call_are_answers(start: Start, server: Server, log: Path) -> None:
    pool = start()
    failed = pool.call(server, "fail", {})
    assert failed.is_error and failed.content[0].text == "no such city"  # type: ignore[union-attr]
    with pytest.raises(MCPError, match="not like this"):
        pool.call(server, "refuse", {})
    assert events(log)["start"] == 1


@pytest.mark.parametrize("how", ["die", "crash"])
def test_a_server_that_died_with_a_call_is_not_asked_again_and_is_replaced(
    start: Start, server: Server, log: Path, how: str
) -> None:
    pool = start()
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(said, pool, server, "sleep", seconds=20) for _ in range(3)]
        while events(log)["call"] < 3:
            time.sleep(0.01)
        with pytest.raises(ServerDied):
            pool.call(server, how, {})
        for call in waiting:
            with pytest.raises(ServerDied):
                call.result()
    assert said(pool, server, "run_sql", sql="1") == "ran 1"
    assert events(log)["start"] == 2


def test_a_slow_call_is_given_up_and_the_server_kept(start: Start, server: Server, log: Path) -> None:
    pool = start(timeout_s=0.2)
    with pytest.raises(CallTimedOut):
        said(pool, server, "sleep", seconds=10)
    assert events(log)["start"] == 1


def test_a_server_that_answers_nobody_is_lost(
    start: Start, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_ALIVE_TIMEOUT_S", 0.2)
    pool = start(timeout_s=0.2)
    with pytest.raises(ServerDied):
        said(pool, server, "sleep", seconds=1.5, blocking=True)


def test_a_server_that_starts_at_last_is_waited_for(
    start: Start, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "BACK_OFF_S", (0.01, 0.01, 0.01))
    script, tries = tmp_path / "late.sh", tmp_path / "tries"
    script.write_text(f'echo x >> {tries}; [ $(wc -l < {tries}) -lt 3 ] && exit 1; exec "$@"')
    late = Server(command=("sh", str(script), *server.command))
    assert said(start(), late, "run_sql", sql="1") == "ran 1"
    assert tries.read_text() == "x\n" * 3


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ("no-such-program",),
            r"cannot connect to the MCP server: FileNotFoundError: .* \(no-such-program\)",
        ),
        (
            ("sh", "-c", "echo no licence >&2; exit 1"),
            r"cannot connect to the MCP server: MCPError: Connection closed; its stderr: no licence \(sh -c",
        ),
    ],
)
def test_a_server_that_cannot_be_started(
    start: Start, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(transport, "BACK_OFF_S", (0.01,))
    pool = start()
    for _ in range(2):
        with pytest.raises(RunError, match=message):
            pool.list_tools(Server(command=command))


def test_no_room_for_a_private_copy(start: Start, server: Server, log: Path, tmp_path: Path) -> None:
    (tmp_path / "shop.sqlite").mkdir()  # cannot be copied
    with pytest.raises(RunError, match=r"cannot connect to the MCP server: IsADirectoryError: .*shop"):
        start().list_tools(Server(command=server.command, database=tmp_path / "shop.sqlite"))
    assert not events(log)


@contextlib.contextmanager
def http_answers(*statuses: int) -> Iterator[tuple[str, list[int]]]:
    """A web server that turns requests away, one status after the other, the last for ever."""
    left, given = list(statuses), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            given.append(left.pop(0) if len(left) > 1 else left[0])
            self.send_response(given[-1])
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=web.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{web.server_port}/mcp", given
    finally:
        web.shutdown()
        thread.join()
        web.server_close()


def test_what_a_busy_web_server_turned_away_is_sent_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "BACK_OFF_S", (0.01, 0.01))
    with http_answers(503, 429, 401) as (url, given), pytest.raises(RunError, match="401 Unauthorized"):
        start().list_tools(Server(url=url, token="secret"))
    assert given == [503, 429, 401]


def test_a_web_server_that_is_not_there(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "BACK_OFF_S", (0.01,))
    with http_answers(200) as (url, _):
        pass
    with pytest.raises(RunError, match=r"ConnectError: .* \(http://127"):
        start().list_tools(Server(url=url))


def test_a_token_is_not_shown() -> None:
    server = Server(url="http://x", token="secret", environment=(("KEY", "secret"),))
    assert "secret" not in f"{server} {server!r}"
