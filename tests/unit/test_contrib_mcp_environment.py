import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs the extra: pip install 'text2sql-grpo[mcp]'")

from tests.scripted_policy import SHOP, ask
from text2sql_grpo.config import MCPConfig
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.environment.episode import Message
from text2sql_grpo.environment.observation import ObservationLimits
from text2sql_grpo.environment.session import EnvironmentSettings, SQLSession
from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.integrations.mcp.environment import MCPEnvironment
from text2sql_grpo.sql import SQLExecutor

NAMES = ["run_sql", "sleep", "fail", "refuse", "crash", "die", "pid", "submit_sql"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("databases")
    (folder / "shop.sql").write_text(SHOP, "utf-8")
    return folder


def config(repo_root: Path, log: Path, **fields: Any) -> MCPConfig:
    words = [sys.executable, str(repo_root / "tests" / "mcp_server.py"), str(log), "{name}", "{database}"]
    return MCPConfig(command=shlex.join(words), connections=1, **fields)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "log"


@pytest.fixture(scope="module")
def environment(folder: Path, repo_root: Path, log: Path) -> Iterator[MCPEnvironment]:
    settings = EnvironmentSettings(
        protocol="native", max_turns=4, observation=ObservationLimits(max_chars=100)
    )
    made = MCPEnvironment(Databases(folder), SQLExecutor(), settings, server=config(repo_root, log))
    yield made
    made.close()


def call(name: str, arguments: Any) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<think>\nlook\n</think>\n\n<tool_call>\n{said}\n</tool_call>"


def begin(environment: MCPEnvironment) -> SQLSession:
    session = environment.session(ask("How many people work in Lisbon?"))
    session.start()
    return session


def test_the_server_s_tools_and_submit_sql_are_the_actions(environment: MCPEnvironment) -> None:
    assert [tool["function"]["name"] for tool in environment.tools] == NAMES
    (system, _) = environment.session(ask("How many?")).start()
    assert f"one tool call: {', '.join(NAMES[:-1])}, or submit_sql" in system["content"]


def test_calls_are_answered_by_the_server_and_the_submission_by_us(environment: MCPEnvironment) -> None:
    session = begin(environment)
    replies = [
        session.step(call("run_sql", {"sql": "SELECT 1"})),
        session.step(call("fail", {})),
        session.step(call("submit_sql", {"sql": "SELECT 2"})),
    ]
    assert replies == [
        {"role": "tool", "content": "ran SELECT 1"},
        {"role": "tool", "content": "Error: no such city"},
        None,
    ]
    episode = session.episode
    assert [(action.kind, action.sql) for action in episode.actions] == [
        ("run_sql", "SELECT 1"),
        ("call_tool", ""),
        ("submit_sql", "SELECT 2"),
    ]
    assert (episode.final_sql, episode.stop_reason, episode.is_masked) == ("SELECT 2", "submitted", False)


@pytest.mark.parametrize(
    ("turn", "shown"),
    [
        (call("refuse", {}), "Error: not like this"),
        (call("run_sql", {"sql": "x" * 2_000}), "ran " + "x" * 96 + "…\n(100 of 2004 characters shown)"),
        (call("run_sql", {"sql": "\ud800"}), "Error: the call cannot be sent: "),
        (call("sleep", {"seconds": float("inf"), "blocking": False}), "Error: the call cannot be sent: "),
        (call("drop", {}), 'Error: expected one tool call {"name": "run_sql" or "sleep" or '),
        (
            call("pid", {"of": 3}),
            'Error: expected pid with its arguments (none), got the arguments {"of": 3}',
        ),
        (call("sleep", {"seconds": 3}), "Error: expected sleep with its arguments (seconds, blocking), got "),
        (call("run_sql", {"sql": 3}), "Error: expected one tool call "),
        (call("run_sql", "SELECT 1"), "Error: expected one tool call "),
        (call("pid", {})[:-1], "Error: expected one tool call "),
    ],
)
def test_what_goes_wrong_is_told_to_the_model(environment: MCPEnvironment, turn: str, shown: str) -> None:
    session = begin(environment)
    reply = session.step(turn)
    assert reply is not None and reply["content"].startswith(shown)
    assert not session.episode.is_masked


def test_a_slow_call_is_told_to_the_model(folder: Path, repo_root: Path, tmp_path: Path) -> None:
    settings = EnvironmentSettings(protocol="native")
    server = config(repo_root, tmp_path / "log", timeout_s=0.5)
    made = MCPEnvironment(Databases(folder), SQLExecutor(), settings, server=server)
    session = begin(made)
    reply = session.step(call("sleep", {"seconds": 60, "blocking": False}))
    made.close()
    assert reply is not None and reply["content"] == "Error: stopped: no answer within 0.5 s"
    assert not session.episode.is_masked


def test_a_server_killed_among_sixty_four_sessions_masks_those_it_was_answering(
    environment: MCPEnvironment, log: Path
) -> None:
    sessions = [begin(environment) for _ in range(64)]
    before = len(log.read_text().splitlines())

    def step(session: SQLSession, *, turn: str) -> Message | None:
        return session.step(turn)

    with ThreadPoolExecutor(64) as threads:
        sleeping = partial(step, turn=call("sleep", {"seconds": 60, "blocking": False}))
        replies = threads.map(sleeping, sessions)
        while len(lines := log.read_text().splitlines()) < before + 64:
            time.sleep(0.01)
        os.kill(int(lines[-1].split()[1]), signal.SIGKILL)
        assert list(replies) == [None] * 64
        others = [begin(environment) for _ in range(64)]
        answers = list(threads.map(partial(step, turn=call("run_sql", {"sql": "1"})), others))

    for session in sessions:
        episode = session.episode
        assert (episode.stop_reason, episode.is_masked, episode.final_sql) == ("error", True, None)
    assert answers == [{"role": "tool", "content": "ran 1"}] * 64
    assert [line.split()[0] for line in log.read_text().splitlines()].count("start") == 2


def test_tags_need_run_sql_and_offer_nothing_else(folder: Path, repo_root: Path, tmp_path: Path) -> None:
    databases = Databases(folder)
    made = MCPEnvironment(
        databases, SQLExecutor(), EnvironmentSettings(), server=config(repo_root, tmp_path / "log")
    )
    session = begin(made)
    reply = session.step("<sql>SELECT 1</sql>")
    made.close()
    assert reply == {"role": "user", "content": "ran SELECT 1"}


def test_placeholders_and_tokens_reach_the_server(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    server = MCPConfig(
        command=f"sh -c 'echo $KEY $0 $1 > {seen}; exit 1' {{name}} {{database}}", token_variable="KEY"
    )
    monkeypatch.setattr("text2sql_grpo.integrations.mcp.transport.BACK_OFF_S", ())
    monkeypatch.setenv("KEY", "secret")
    databases = Databases(folder)
    with pytest.raises(Exception, match="cannot connect to the MCP server"):
        MCPEnvironment(databases, SQLExecutor(), EnvironmentSettings(), server=server)
    key, name, copy = seen.read_text().split()
    assert (key, name, Path(copy).name) == ("secret", "shop", databases.address("shop").name)
    assert not Path(copy).exists() and Path(copy) != databases.address("shop")
    monkeypatch.delenv("KEY")
    with pytest.raises(ConfigError, match="no token in the environment variable KEY"):
        MCPEnvironment(databases, SQLExecutor(), EnvironmentSettings(), server=server)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    path = tmp_path / "databases" / "shop.sqlite"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SHOP)
    return path


DROP = "DROP TABLE branch"


def test_a_tool_that_writes_changes_a_private_copy_that_is_replaced(
    shop: Path, repo_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = shop.read_bytes()
    server = config(repo_root, tmp_path / "log", tools=["write", "run_sql"])
    made = MCPEnvironment(
        Databases(shop.parent), SQLExecutor(), EnvironmentSettings(protocol="native"), server=server
    )
    replies = [
        begin(made).step(call("write", {"statement": statement})) for statement in (DROP, "SELECT 1", DROP)
    ]
    made.close()
    assert [reply["content"] for reply in replies if reply] == [
        *("tables: []", "tables: [('branch',), ('sqlite_autoindex_branch_1',)]", "tables: []"),
    ]
    assert shop.read_bytes() == before
    assert "The tool write of an MCP server wrote to its private copy" in caplog.text


def test_a_tool_that_reaches_the_original_stops_the_run(shop: Path, repo_root: Path, tmp_path: Path) -> None:
    server = config(repo_root, tmp_path / "log", tools=["write"])
    settings = EnvironmentSettings(protocol="native")
    made = MCPEnvironment(Databases(shop.parent), SQLExecutor(), settings, server=server)
    os.utime(shop)  # other times alone are no change
    session = begin(made)
    with pytest.raises(DataError, match=r"shop\.sqlite changed while an MCP server's tools were in use"):
        session.step(call("write", {"statement": DROP, "path": str(shop)}))
    with pytest.raises(DataError, match="changed while"):
        made.close()


def test_a_change_whose_time_was_set_back_is_found_at_the_end(
    shop: Path, repo_root: Path, tmp_path: Path
) -> None:
    settings = EnvironmentSettings(protocol="native")
    made = MCPEnvironment(
        Databases(shop.parent), SQLExecutor(), settings, server=config(repo_root, tmp_path / "log")
    )
    stat, content = shop.stat(), shop.read_bytes()
    shop.write_bytes(content.replace(b"Lisbon", b"London"))
    os.utime(shop, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(DataError, match="changed while"):
        made.close()


def test_tools_that_are_not_marked_as_reading_must_be_named(
    shop: Path, repo_root: Path, tmp_path: Path
) -> None:
    def offered(*entries: str | dict[str, str], protocol: Any = "native") -> list[dict[str, Any]]:
        server = config(repo_root, tmp_path / "log", tools=list(entries) if entries else None)
        settings = EnvironmentSettings(protocol=protocol)
        made = MCPEnvironment(Databases(shop.parent), SQLExecutor(), settings, server=server)
        made.close()
        return [tool["function"] for tool in made.tools]

    assert "write" not in [tool["name"] for tool in offered()]
    (mapped, _) = offered({"run_sql": "write(statement)"}, protocol="tags")
    assert (mapped["name"], mapped["parameters"]["required"]) == ("run_sql", ["sql"])
    (mapped, other, _) = offered("look: write(file=path, statement)", "pid")
    assert list(mapped["parameters"]["properties"]) == ["file", "statement"] and other["name"] == "pid"
    for entries, message in (
        (("read",), "has no tool 'read'; its tools: run_sql, sleep"),
        (("write(path)",), "write takes the arguments statement, path, of which statement must be named"),
        (("a b",), "must hold entries such as read_query"),
        (("pid", "pid"), "must name each tool once"),
        (("submit_sql: run_sql",), "has a tool submit_sql"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            offered(*entries)


def test_mcp_server_sqlite_of_pypi_as_it_is(shop: Path) -> None:
    program = os.environ.get("TEXT2SQL_GRPO_MCP_SERVER_SQLITE") or shutil.which("mcp-server-sqlite")
    if program is None:
        pytest.skip("needs mcp-server-sqlite and mcp<2 of PyPI (PATH or TEXT2SQL_GRPO_MCP_SERVER_SQLITE)")
    before = shop.read_bytes()

    def environment(protocol: Any, *tools: str) -> MCPEnvironment:
        server = MCPConfig(command=f"{program} --db-path {{database}}", tools=list(tools) or None)
        return MCPEnvironment(
            Databases(shop.parent), SQLExecutor(), EnvironmentSettings(protocol=protocol), server=server
        )

    with pytest.raises(
        ConfigError, match=r"marks no tool as read-only .* it has the tools read_query, write_query"
    ):
        environment("native")
    tags = environment("tags", "run_sql: read_query(query)")
    reply = begin(tags).step("<sql>SELECT city FROM branch WHERE code = 'LIS-02'</sql>")
    assert reply is not None and "Lisbon" in reply["content"]
    assert tags.tools_that_write() == []
    tags.close()
    native = environment("native", "read_query", "write_query", "create_table")
    # Its copy is read-only, which binds every user but root.
    assert native.tools_that_write() == (["write_query", "create_table"] if os.geteuid() == 0 else [])
    begin(native).step(call("write_query", {"query": DROP}))
    reply = begin(native).step(call("read_query", {"query": "SELECT count(*) FROM branch"}))
    assert reply is not None and "3" in reply["content"]
    native.close()
    assert shop.read_bytes() == before
