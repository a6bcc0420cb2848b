"""Our own MCP server, started as a user would start it, and training through it."""

import asyncio
import dataclasses
import json
import logging
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs the extra: pip install 'text2sql-grpo[mcp]'")

from mcp import Client, StdioServerParameters, stdio_client
from rich.console import Console
from text2sql_grpo.run.collect_job import collect
from text2sql_grpo.run.evaluate_job import evaluate

from tests.scripted_policy import SHOP, ScriptedPolicy
from tests.tiny_model import write_adapter, write_tokenizer
from tests.tiny_run import QUESTIONS, json_lines, write_config, write_questions
from text2sql_grpo.commands.compare import compare
from text2sql_grpo.config import Config, MCPConfig, SFTSettings, load_config
from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.bench import Workbench, open_workbench
from text2sql_grpo.integrations.mcp.environment import MCPEnvironment
from text2sql_grpo.models.loaded_policy import load_policy
from text2sql_grpo.rewards import Judge, RewardMix
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.engine import Budgets, Policy, run
from text2sql_grpo.run import pipeline as training
from text2sql_grpo.run.merge_check import check_merge
from text2sql_grpo.run.sft_stage import sft, started_policy
from text2sql_grpo.run_folder import RunLog
from text2sql_grpo.training.arguments import training_arguments
from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer

LOOK, ANSWER = "<sql>SELECT code FROM branch</sql>", "<answer>SELECT staff FROM branch</answer>"


def server_words(repo_root: Path, audit_log: Path, database: str) -> list[str]:
    """A server's command; it sees no variable of ours but this one."""
    python = ["env", f"PYTHONPATH={repo_root / 'src'}", sys.executable, "-m", "text2sql_grpo"]
    return [*python, "mcp", "--db", database, "--audit_log", str(audit_log)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    small = ["--grading.neighbours", "0", "--grpo.temperature", "1.0"]
    more = ["--environment.max_turns", "3", "--data.test", "{}"]
    return load_config(write_config(tmp_path_factory.mktemp("shop")), [*small, *more])


@pytest.fixture(scope="module")
def audit_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.jsonl"


@pytest.fixture(scope="module")
def bench(config: Config, audit_log: Path, repo_root: Path) -> Iterator[Workbench]:
    """The config's workbench, with the server in the place of the executor."""
    command = shlex.join(server_words(repo_root, audit_log, "{database}"))
    mcp = MCPConfig(command=command, timeout_s=60, connections=1)
    opened = open_workbench(
        dataclasses.replace(config, environment=dataclasses.replace(config.environment, mcp=mcp))
    )
    assert isinstance(opened.environment, MCPEnvironment)
    yield opened
    opened.environment.close()


def train(bench: Workbench, model: str, folder: Path) -> list[dict[str, Any]]:
    """The logged episodes of two steps, without what took how long."""
    config, environment = bench.config, bench.config.environment
    questions = bench.load(config.data.train)
    arguments = training_arguments(
        config.grpo,
        output_dir=str(folder),
        seed=config.run.seed,
        max_turn_tokens=environment.max_turn_tokens,
        max_completion_length=environment.max_episode_tokens,
        disable_tqdm=True,
        save_strategy="no",
    )
    policy = load_policy(model, dtype="float32")
    trainer = SQLGRPOTrainer(
        policy.model,
        arguments,
        examples=questions,
        environment=bench.environment,
        rewards=RewardMix(config.rewards),
        grader=bench.grader,
        processing_class=policy.tokenizer,
        run_log=RunLog(folder),
    )
    trainer.train()
    episodes = json_lines(folder / "rollouts.jsonl")
    for episode in episodes:
        episode["actions"] = [(action["kind"], action["sql"]) for action in episode["actions"]]
        del episode["flags"]  # one of them needs the rows that were seen, which only the server knows
    return episodes


def test_training_through_the_server_gives_the_episodes_of_training_in_process(
    config: Config, bench: Workbench, started_model: str, audit_log: Path, tmp_path: Path
) -> None:
    here = train(open_workbench(config), started_model, tmp_path / "here")
    there = train(bench, started_model, tmp_path / "there")

    assert there == here
    assert len(here) == 32
    assert len({episode["reward"] for episode in here}) > 2
    looks = [sql for episode in here for kind, sql in episode["actions"] if kind == "run_sql"]
    logged = json_lines(audit_log)
    assert sorted(line["sql"] for line in logged) == sorted(looks) != []
    assert [line["session"].partition(":")[0] for line in logged] == ["stdio"] * len(looks)


class Killing:
    """A policy that kills a process before its second turn."""

    def __init__(self, policy: Policy, pid: int) -> None:
        self._policy, self._pid, self._turns = policy, pid, 0

    def generate(self, prompts: list[list[int]], *, max_new_tokens: int) -> Any:
        self._turns += 1
        if self._turns == 2:
            os.kill(self._pid, signal.SIGKILL)
        return self._policy.generate(prompts, max_new_tokens=max_new_tokens)


def test_a_server_killed_in_a_batch_masks_the_episode_that_noticed_and_is_started_anew(
    bench: Workbench, audit_log: Path, tmp_path: Path
) -> None:
    chat = ChatFormat(write_tokenizer(tmp_path / "tokenizer"))
    examples = bench.load(bench.config.data.train)[:3]
    looking, also_looking, answering = (example.question for example in examples)
    turns = {question: [LOOK, LOOK, ANSWER] for question in (looking, also_looking)}
    sessions = [bench.environment.session(example) for example in examples]

    def pid() -> int:
        bench.environment.session(examples[0]).step(LOOK)
        return int(json_lines(audit_log)[-1]["session"].removeprefix("stdio:"))

    killed = pid()
    policy = Killing(ScriptedPolicy(chat, {**turns, answering: [LOOK, ANSWER]}), killed)
    dead, restarted, submitted = run(sessions, policy, chat, Budgets(200, 2_000, 4_000))

    assert (dead.stop_reason, dead.is_masked, dead.final_sql) == ("error", True, None)
    for episode in (restarted, submitted):
        assert (episode.stop_reason, episode.is_masked) == ("submitted", False)
    assert "LIS-02" in restarted.messages[-2]["content"]
    database = bench.databases.address("shop")
    judge = Judge(bench.grader, bench.executor, RewardMix(bench.config.rewards))
    assert judge.judge(dead, database).scores is None
    assert pid() != killed


def test_the_command_line_serves_the_sdk_s_client(config: Config, tmp_path: Path, repo_root: Path) -> None:
    database = tmp_path / "shop.sqlite"
    database.write_bytes(open_workbench(config).databases.address("shop").read_bytes())
    program, *words = server_words(repo_root, tmp_path / "audit.jsonl", str(database))

    async def talk() -> list[tuple[bool, str]]:
        async with Client(stdio_client(StdioServerParameters(command=program, args=words))) as client:
            assert {tool.name for tool in (await client.list_tools()).tools} == {
                *("list_tables", "describe_table", "run_sql"),
            }
            results = [
                await client.call_tool("list_tables"),
                await client.call_tool("describe_table", {"table": "branch"}),
                await client.call_tool("run_sql", {"sql": "SELECT city FROM branch ORDER BY code"}),
                await client.call_tool("run_sql", {"sql": "DROP TABLE branch"}),
            ]
        return [(result.is_error, result.content[0].text) for result in results]  # type: ignore[union-attr]

    tables, description, rows, drop = asyncio.run(talk())
    assert tables == (False, "branch")
    assert description == (
        False,
        "CREATE TABLE branch (\n  code TEXT PRIMARY KEY,\n  city TEXT,\n  staff INTEGER\n);",
    )
    assert rows == (False, "city\nNULL\nLisbon\nPorto")
    assert drop[0] and drop[1].startswith("Error: not allowed: a change of the schema")
    lines = json_lines(tmp_path / "audit.jsonl")
    assert [(line["status"], line["rows"]) for line in lines] == [("ok", 3), ("denied", 0)]
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o777 == 0o600


def test_garbage_on_standard_input_leaves_the_next_call_its_answer(
    config: Config, tmp_path: Path, repo_root: Path
) -> None:
    database = open_workbench(config).databases.address("shop")
    client = {"clientInfo": {"name": "test", "version": "1"}, "capabilities": {}}
    opening = {"protocolVersion": "2025-06-18", **client}
    asked = {"name": "run_sql", "arguments": {"sql": "SELECT count(*) FROM branch"}}
    lines = [
        json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": opening}),
        '{"jsonrpc": "2.0", "method": "notifications/initialized"}',
        *("nonsense", "{", "[]", "[" * 100_000, '{"jsonrpc": "2.0", "id": 2}', "\0\x1b[31m", "\udcff\udcfe"),
        json.dumps({"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": asked}),
    ]
    server = subprocess.Popen(
        server_words(repo_root, tmp_path / "audit.jsonl", str(database)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))
    server.stdin.flush()
    replies = map(json.loads, iter(server.stdout.readline, b""))
    answer = next((reply for reply in replies if reply.get("id") == 3), None)
    server.communicate(timeout=60)
    assert answer is not None and answer["result"]["content"][0]["text"] == "count(*)\n3"


def shop_config(folder: Path, server: MCPConfig, *options: str) -> tuple[Config, Path]:
    """A tiny run whose tools are a server's, and its database as a file."""
    config = load_config(write_config(folder), ["--data.test", "{}", *options])
    (folder / "databases" / "shop.sql").unlink()
    database = folder / "databases" / "shop.sqlite"
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(SHOP)
    return dataclasses.replace(
        config, environment=dataclasses.replace(config.environment, mcp=server)
    ), database


JOBS: dict[str, Callable[[Config, Console], object]] = {
    "train": lambda config, console: training.train(config, console=console),
    "evaluate": lambda config, console: evaluate(config.model.path, config, console=console),
    "collect": lambda config, console: collect(
        config, config.run.output_dir.with_suffix(".jsonl"), config.model.path, console=console
    ),
    "compare": lambda config, _: compare(
        *(config.model.path, config.model.path),
        config=Path(config.model.path).with_name("tiny.yaml"),
        settings=[f"--environment.mcp.command={config.environment.mcp.command}"],
    ),
    "merge": lambda config, console: check_merge(
        write_adapter(config.run.output_dir, Path(config.model.path)),
        Path(config.model.path),
        open_workbench(config),
        console,
        num_samples=1,
        base=config.model.path,
        dtype="auto",
        quantization="none",
    ),
    "sft": lambda config, console: sft(
        dataclasses.replace(config, sft=SFTSettings(max_steps=1)),
        config.run.output_dir,
        training.run_arguments(config),
        console=console,
    ),
}


@pytest.mark.parametrize("job", JOBS)
def test_a_database_changed_as_its_servers_end_fails_the_job(
    job: str, tmp_path: Path, repo_root: Path
) -> None:
    own = shlex.join([sys.executable, str(repo_root / "tests" / "mcp_server.py"), str(tmp_path / "log")])
    original = tmp_path / "databases" / "shop.sqlite"
    server = MCPConfig(command=shlex.join(["sh", "-c", f"{own}; echo changed >> {original}"]))
    options = ["--sft", "null", "--grpo.max_steps", "1", "--data.test", f"{{a: {tmp_path}/questions.jsonl}}"]
    config, database = shop_config(tmp_path, server, *options)
    with pytest.raises(DataError, match="changed while an MCP server's tools were in use: restore it"):
        JOBS[job](config, Console(quiet=True))
    assert database.read_bytes().endswith(b"changed\n")


@pytest.mark.slow
def test_a_policy_that_drops_tables_through_mcp_server_sqlite_changes_nothing_kept(
    tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = os.environ.get("TEXT2SQL_GRPO_MCP_SERVER_SQLITE") or shutil.which("mcp-server-sqlite")
    if program is None:
        pytest.skip("needs mcp-server-sqlite and mcp<2 of PyPI (PATH or TEXT2SQL_GRPO_MCP_SERVER_SQLITE)")
    server = MCPConfig(command=f"{program} --db-path {{database}}", tools=["run_sql: write_query(query)"])
    small = ["--grpo.max_steps", "1", "--grpo.per_device_train_batch_size", "8"]
    config, database = shop_config(tmp_path, server, "--sft.look_share", "0.9", *small)
    before = database.read_bytes()
    write_questions(  # SFT teaches to drop the table before the answer
        tmp_path / "questions.jsonl",
        [row | ({"look_sql": "DROP TABLE branch"} if "look_sql" in row else {}) for row in QUESTIONS],
    )
    # SFT without the server, which each DROP starts anew.
    local = dataclasses.replace(config, environment=dataclasses.replace(config.environment, mcp=None))
    start = started_policy(open_workbench(local), training.run_arguments(config), Console(quiet=True))
    bench = open_workbench(config)
    with caplog.at_level(logging.WARNING), closing(bench.environment):
        episodes = train(bench, start.folder, tmp_path / "run")

    assert ("run_sql", "DROP TABLE branch") in [call for episode in episodes for call in episode["actions"]]
    warning = "The tool write_query of an MCP server wrote to its private copy"
    assert (warning in caplog.text) == (os.geteuid() == 0)  # the copy is read-only, which binds the others
    assert database.read_bytes() == before
    assert sorted(path.name for path in database.parent.iterdir()) == ["shop.sqlite"]
    # Graded on the original, which has its table.
    assert len(episodes) == 8 and all(episode["reason"] != "gold_failed" for episode in episodes)
