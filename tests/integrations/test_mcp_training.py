"""Episodes and whole runs whose tools are those of an MCP server."""

import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs the extra: pip install 'text2sql-grpo[mcp]'")

from tests.scripted_policy import SHOP, ask
from tests.tiny_run import json_lines, write_config
from text2sql_grpo.commands import main
from text2sql_grpo.config import MCPConfig
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.environment.observation import ObservationLimits
from text2sql_grpo.environment.session import EnvironmentSettings, SQLSession
from text2sql_grpo.errors import ConfigError, DataError, RunError
from text2sql_grpo.integrations.mcp import server_pool
from text2sql_grpo.integrations.mcp.environment import MCPEnvironment
from text2sql_grpo.sql import SQLExecutor

NAMES = ["run_sql", "sleep", "fail", "refuse", "crash", "die", "pid", "submit_sql"]
DROP = "DROP TABLE branch"
Open = Callable[..., MCPEnvironment]


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    path = tmp_path / "databases" / "shop.sqlite"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SHOP)
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def events(log: Path) -> Counter[str]:
    return Counter(line.split()[0] for line in log.read_text().splitlines()) if log.exists() else Counter()


@pytest.fixture
def other_server(repo_root: Path, log: Path) -> str:
    """Command of a server of another make, which logs its starts and calls."""
    return shlex.join(
        [sys.executable, str(repo_root / "tests" / "mcp_server.py"), str(log), "{name}", "{database}"]
    )


@pytest.fixture
def opened(shop: Path, other_server: str) -> Iterator[Open]:
    """Makes environments that are closed after the test."""
    with ExitStack() as stack:

        def opened(protocol: Any = "native", **server: Any) -> MCPEnvironment:
            if "url" not in server:
                server.setdefault("command", other_server)
            settings = EnvironmentSettings(
                protocol=protocol, max_turns=4, observation=ObservationLimits(max_chars=100)
            )
            config = MCPConfig(**{"connections": 1} | server)
            made = MCPEnvironment(Databases(shop.parent), SQLExecutor(), settings, server=config)
            stack.callback(made.close)
            return made

        yield opened


def call(name: str, arguments: Any) -> str:
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<think>\nlook\n</think>\n\n<tool_call>\n{text}\n</tool_call>"


def begin(environment: MCPEnvironment) -> SQLSession:
    session = environment.session(ask("How many people work in Lisbon?"))
    session.start()
    return session


def reply(environment: MCPEnvironment, turn: str) -> str | None:
    """Reply to the first turn of an episode; None if its server died."""
    message = begin(environment).step(turn)
    return None if message is None else message["content"].partition("\n(")[0]  # without what is left to do


def sleep(seconds: float, *, blocking: bool = False) -> str:
    return call("sleep", {"seconds": seconds, "blocking": blocking})


def test_calls_go_to_the_server_and_the_submission_stays_here(opened: Open) -> None:
    environment = opened()
    assert [tool["function"]["name"] for tool in environment.tools] == NAMES
    session = environment.session(ask("How many people work in Lisbon?"))
    assert f"without other text: {', '.join(NAMES[:-1])}, or submit_sql" in session.start()[0]["content"]
    turns = [call("run_sql", {"sql": "SELECT 1"}), call("fail", {}), call("submit_sql", {"sql": "SELECT 2"})]
    hint = "(3 turns left: if these rows answer the question, call submit_sql with SELECT 1)"
    assert [session.step(turn) for turn in turns] == [
        {"role": "tool", "content": f"ran SELECT 1\n{hint}"},
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


def test_failures_of_a_call_are_shown_to_the_model(opened: Open, log: Path) -> None:
    environment = opened(timeout_s=2)
    for turn, shown in (
        (call("refuse", {}), "Error: not like this"),
        (sleep(60), "Error: stopped: no answer within 2 s"),
        (call("run_sql", {"sql": "x" * 2_000}), "ran " + "x" * 96 + "…\n(100 of 2004 characters shown)"),
        (call("run_sql", {"sql": "\ud800"}), "Error: the call cannot be sent: "),
        (sleep(float("inf")), "Error: the call cannot be sent: "),
        (call("drop", {}), "Error: expected one tool call"),
        (call("pid", {"of": 3}), "Error: expected pid with its arguments (none)"),
        (call("sleep", {"seconds": 3}), "Error: expected sleep with its arguments"),
        (call("run_sql", {"sql": 3}), "Error: expected one tool call"),
        (call("pid", {})[:-1], "Error: expected one tool call"),
    ):
        session = begin(environment)
        message = session.step(turn)
        assert message is not None and message["content"].startswith(shown)
        assert not session.episode.is_masked
    assert events(log)["start"] == 1


def test_sixty_four_sessions_share_a_server_and_those_that_it_dies_with_are_masked(
    opened: Open, log: Path
) -> None:
    environment = opened()
    started = time.perf_counter()
    with ThreadPoolExecutor(64) as threads:
        assert list(threads.map(lambda _: reply(environment, sleep(0.5)), range(64))) == ["slept"] * 64
        assert time.perf_counter() - started < 16  # 32 s one after the other
        assert events(log) == {"start": 1, "initialize": 1, "call": 64}
        sessions = [begin(environment) for _ in range(64)]
        replies = threads.map(lambda session: session.step(sleep(60)), sessions)
        while events(log)["call"] < 128:
            time.sleep(0.01)
        os.kill(int(log.read_text().split()[1]), signal.SIGKILL)
        assert list(replies) == [None] * 64
        turn = call("run_sql", {"sql": "1"})
        assert list(threads.map(lambda _: reply(environment, turn), range(64))) == ["ran 1"] * 64
    for session in sessions:
        episode = session.episode
        assert (episode.stop_reason, episode.is_masked, episode.final_sql) == ("error", True, None)
    assert events(log)["start"] == 2


@pytest.mark.parametrize("how", ["die", "crash"])
def test_a_server_that_a_tool_ended_is_replaced(opened: Open, log: Path, how: str) -> None:
    environment = opened()
    assert reply(environment, call(how, {})) is None
    assert reply(environment, call("run_sql", {"sql": "1"})) == "ran 1"
    assert events(log)["start"] == 2


@pytest.mark.thorough
def test_a_server_that_answers_nothing_after_a_slow_call_is_lost(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_pool, "ALIVE_TIMEOUT_S", 0.2)
    assert reply(opened(timeout_s=0.2), sleep(1.5, blocking=True)) is None


def test_no_more_connections_than_allowed_and_an_idle_one_makes_room(
    opened: Open, shop: Path, log: Path
) -> None:
    environment = opened(connections=2)
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: reply(environment, sleep(0.2)), range(8))) == {"slept"}
    assert events(log)["start"] == 2
    shutil.copyfile(shop, shop.with_name("kiosk.sqlite"))
    shutil.copyfile(shop, shop.with_name("depot.sqlite"))
    environment = opened(connections=2)  # one of them is open, for the list of tools

    def pid(database: str) -> str:
        session = environment.session(replace(ask("Staff?"), database=database))
        session.start()
        message = session.step(call("pid", {}))
        assert message is not None
        return str(message["content"].partition("\n(")[0])

    pids = [pid(name) for name in ("depot", "kiosk", "shop")]
    assert len(set(pids)) == 3 and events(log)["start"] == 5
    assert [pid(name) for name in ("kiosk", "shop")] == pids[1:]
    assert pid("depot") != pids[0] and events(log)["start"] == 6


def test_a_server_that_starts_at_last_is_waited_for(
    opened: Open, other_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_pool, "BACK_OFF_S", (0.01, 0.01, 0.01))
    script, tries = tmp_path / "late.sh", tmp_path / "tries"
    script.write_text(f'echo x >> {tries}; [ $(wc -l < {tries}) -lt 3 ] && exit 1; exec "$@"')
    environment = opened(command=f"sh {script} {other_server}")
    assert reply(environment, call("run_sql", {"sql": "1"})) == "ran 1"
    assert tries.read_text() == "x\n" * 3


@contextmanager
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


def test_a_server_that_cannot_be_reached_stops_the_run(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "BACK_OFF_S", (0.01, 0.01))
    monkeypatch.setenv("KEY", "secret")
    with pytest.raises(RunError, match=r"FileNotFoundError: .* \(no-such-program\)"):
        opened(command="no-such-program")
    with pytest.raises(RunError, match="its stderr: no licence"):
        opened(command="sh -c 'echo no licence >&2; exit 1'")
    with http_answers(503, 429, 401) as (url, given):
        with pytest.raises(RunError, match="401 Unauthorized") as caught:
            opened(url=url, token_variable="KEY")
        assert given == [503, 429, 401] and "secret" not in str(caught.value)
    with pytest.raises(RunError, match=r"ConnectError: .* \(http://127"):
        opened(url=url)


def test_placeholders_and_tokens_reach_the_server(
    opened: Open, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    command = f"sh -c 'echo $KEY $0 $1 > {seen}; exit 1' {{name}} {{database}}"
    monkeypatch.setattr(server_pool, "BACK_OFF_S", ())
    monkeypatch.setenv("KEY", "secret")
    with pytest.raises(RunError, match="cannot connect"):
        opened(command=command, token_variable="KEY")
    key, name, copy = seen.read_text().split()
    assert (key, name, Path(copy).name) == ("secret", "shop", shop.name)
    assert not Path(copy).exists() and Path(copy) != shop
    monkeypatch.delenv("KEY")
    with pytest.raises(ConfigError, match="KEY"):
        opened(command=command, token_variable="KEY")


def test_a_tool_that_writes_changes_a_private_copy_that_is_replaced(
    opened: Open, shop: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = shop.read_bytes()
    environment = opened(tools=["write", "run_sql"])
    replies = [
        reply(environment, call("write", {"statement": statement})) for statement in (DROP, "SELECT 1", DROP)
    ]
    assert replies == [
        *("tables: []", "tables: [('branch',), ('sqlite_autoindex_branch_1',)]", "tables: []"),
    ]
    assert shop.read_bytes() == before
    assert "The tool write of an MCP server wrote to its private copy" in caplog.text


def test_a_changed_original_stops_the_run_at_once_or_at_its_end(opened: Open, shop: Path) -> None:
    environment = opened(tools=["write"])
    os.utime(shop)  # different times alone are not a change
    assert reply(environment, call("write", {"statement": "SELECT 1"})) is not None
    stat, content = shop.stat(), shop.read_bytes()
    shop.write_bytes(content.replace(b"Lisbon", b"London"))
    os.utime(shop, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # set back: found by the hash at the end
    with pytest.raises(DataError, match="changed while"):
        environment.close()
    shop.write_bytes(content)
    environment = opened(tools=["write"])
    with pytest.raises(DataError, match=r"shop\.sqlite changed while"):
        reply(environment, call("write", {"statement": DROP, "path": str(shop)}))
    shop.write_bytes(content)


def test_tools_that_are_not_marked_as_reading_must_be_named(opened: Open) -> None:
    def offered(*entries: str | dict[str, str], protocol: Any = "native") -> list[dict[str, Any]]:
        environment = opened(protocol, tools=list(entries) if entries else None)
        return [tool["function"] for tool in environment.tools]

    assert "write" not in [tool["name"] for tool in offered()]
    (mapped, _) = offered({"run_sql": "write(statement)"}, protocol="tags")
    assert (mapped["name"], mapped["parameters"]["required"]) == ("run_sql", ["sql"])
    (mapped, other, _) = offered("look: write(file=path, statement)", "pid")
    assert list(mapped["parameters"]["properties"]) == ["file", "statement"] and other["name"] == "pid"
    assert reply(opened("tags"), "<sql>SELECT 1</sql>") == "ran SELECT 1"
    for entries, message in (
        (("read",), "has no tool 'read'; its tools: run_sql, sleep"),
        (("write(path)",), "write takes the arguments statement, path"),
        (("a b",), "must hold entries such as read_query"),
        (("pid", "pid"), "must name each tool once"),
        (("submit_sql: run_sql",), "has a tool submit_sql"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            offered(*entries)


def shop_run(folder: Path, model: str, **environment: Any) -> Path:
    """Config of two steps without SFT or merge, whose database is a file."""
    folder.mkdir(exist_ok=True)
    settings = {"schema_text": "compact", "instructions": False, "max_turns": 3, "max_turn_tokens": 24}
    path = write_config(
        folder,
        model={"path": model, "dtype": "float32"},
        environment={**settings, "max_episode_tokens": 120, **environment},
        grading={"test_databases": 0},
        sft=None,
    )
    (folder / "databases" / "shop.sql").unlink()
    with closing(sqlite3.connect(folder / "databases" / "shop.sqlite")) as connection:
        connection.executescript(SHOP)
    return path


@pytest.mark.thorough
def test_training_through_this_package_s_server_gives_the_episodes_of_training_in_process(
    started_model: str, tmp_path: Path, repo_root: Path
) -> None:
    audit = tmp_path / "audit.jsonl"
    python = ["env", f"PYTHONPATH={repo_root / 'src'}", sys.executable, "-m", "text2sql_grpo"]
    command = shlex.join([*python, "mcp", "--db", "{database}", "--audit_log", str(audit)])
    mcp = {"command": command, "timeout_s": 60, "connections": 1}
    runs = []
    for name, environment in (("here", {}), ("there", {"mcp": mcp})):
        config = shop_run(tmp_path / name, started_model, **environment)
        assert main(["train", "--config", str(config), "--data.test", "{}", "--grpo.temperature", "1.0"]) == 0
        runs.append(json_lines(tmp_path / name / "run" / "rollouts.jsonl"))
        for episode in runs[-1]:
            episode["actions"] = [(action["kind"], action["sql"]) for action in episode["actions"]]
            del episode["flags"]  # one of them needs the rows that were seen, which only the server knows
    here, there = runs
    assert there == here and len(here) == 32
    assert len({episode["reward"] for episode in here}) > 2
    looks = [sql for episode in here for kind, sql in episode["actions"] if kind == "run_sql"]
    logged = json_lines(audit)
    assert sorted(line["sql"] for line in logged) == sorted(looks) != []


VERBS = {
    "train": ["--grpo.max_steps", "1", "--data.test", "{}"],
    "evaluate": ["--model_path", "{model}"],
    "collect": ["--model_path", "{model}", "--out", "{folder}/collected.jsonl"],
    "compare": ["{model}", "{model}"],
    "sft": ["--sft.max_steps", "1"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("verb", VERBS)
def test_a_database_changed_as_its_servers_end_fails_the_verb(
    verb: str,
    started_model: str,
    other_server: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    original = tmp_path / "run" / "databases" / "shop.sqlite"
    script = f"{other_server.replace('{database}', '$0')}; echo changed >> {original}"
    config = shop_run(tmp_path / "run", started_model, mcp={"command": shlex.join(["sh", "-c", script, "x"])})
    options = [
        option.format(model=started_model, folder=tmp_path) if option != "{}" else option
        for option in VERBS[verb]
    ]
    assert main([verb, *options, "--config", str(config)]) == 1
    assert "changed while an MCP server's tools were in use" in capsys.readouterr().err
    assert original.read_bytes().endswith(b"changed\n")
