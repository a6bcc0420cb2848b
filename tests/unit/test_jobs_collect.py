"""Collecting episodes: by our engine and over HTTP, through failures, kills and restarts."""

import json
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.chat_endpoint import Answer, served
from tests.tiny_model import write_model
from tests.tiny_run import QUESTIONS, json_lines, write_config
from text2sql_grpo.commands import main
from text2sql_grpo.config import Config, load_config
from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.jobs.collect import collect
from text2sql_grpo.jobs.evaluate import evaluate
from text2sql_grpo.jobs.served import Endpoint

pytest.importorskip("openai", reason="needs openai (pip install openai)")

GOLDS = {row["question"]: row["gold_sql"] for row in QUESTIONS}
NATIVE = {"protocol": "native", "schema_text": "compact", "max_turns": 3}


def silent() -> Console:
    return Console(quiet=True)


def question_of(request: dict[str, Any]) -> str:
    prompt = next(message["content"] for message in request["messages"] if message["role"] == "user")
    return next(question for question in GOLDS if question in prompt)


def says(text: str, **fields: Any) -> Answer:
    return Answer({"role": "assistant", "content": text}, 20, 10, **fields)


def right(request: dict[str, Any]) -> Answer:
    """Looks once, then knows."""
    if len(request["messages"]) < 3:
        return says("<sql>SELECT code FROM branch</sql>")
    return says(f"<answer>{GOLDS[question_of(request)]}</answer>")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(write_config(tmp_path, grading={"neighbours": 0}))


def gather(config: Config, out: Path, answer: Callable[[dict[str, Any]], Answer], **options: Any) -> int:
    """Collects from an endpoint with these answers."""
    with served(answer) as url:
        return collect(config, out, Endpoint(url, "script", retries=0), console=silent(), **options)


def test_episodes_over_http_are_those_of_sessions(config: Config, tmp_path: Path) -> None:
    out = tmp_path / "episodes.jsonl"
    requests: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> Answer:
        requests.append(request)
        return right(request)

    assert gather(config, out, answer, samples=2, temperature=0.5, seed=7, keep=["correct"]) == 0
    rows = json_lines(out)
    assert Counter((row["example"], row["sample"]) for row in rows) == {
        (question["id"], sample): 1 for question in QUESTIONS for sample in (0, 1)
    }
    assert all(row["strict"] and row["stop_reason"] == "submitted" for row in rows)
    assert all([action["kind"] for action in row["actions"]] == ["run_sql", "submit_sql"] for row in rows)
    assert (
        "LIS-02" in rows[0]["messages"][2]["content"]
        and rows[0]["reward"] > 0
        and rows[0]["model"] == "script"
    )
    assert {request["seed"] for request in requests} == {7, 8} and requests[0]["temperature"] == 0.5
    assert requests[0]["max_tokens"] == 24 and "tools" not in requests[0]
    chats = json_lines(tmp_path / "episodes.correct.jsonl")  # both samples of a question say the same
    assert [chat["example"] for chat in chats] == sorted(question["id"] for question in QUESTIONS)
    assert chats[0]["messages"] in [row["messages"] for row in rows]


def test_tool_calls_that_the_server_parsed(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, environment=NATIVE, grading={"neighbours": 0}))
    requests: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> Answer:
        requests.append(request)
        name, sql = "submit_sql", GOLDS[question_of(request)]
        if len(request["messages"]) < 4:
            name, sql = "run_sql", "SELECT 1 AS one"
        call = {"name": name, "arguments": json.dumps({"sql": sql})}
        parsed = [{"id": "call_0", "type": "function", "function": call}]
        message = {"role": "assistant", "content": None, "tool_calls": parsed, "reasoning_content": "hm"}
        return Answer(message, 20, 10)

    assert gather(config, tmp_path / "e.jsonl", answer, samples=1, num_questions=1, keep=["best_of_n"]) == 0
    (row,) = json_lines(tmp_path / "e.jsonl")
    assert row["strict"] and row["messages"][2]["content"].startswith("<think>hm</think><tool_call>")
    assert requests[1]["messages"][-1] == {
        "role": "tool",
        "tool_call_id": "call_0",
        "content": row["messages"][3]["content"],
    }
    (chat,) = json_lines(tmp_path / "e.best_of_n.jsonl")
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["run_sql", "submit_sql"]


def test_an_mcp_server_that_dies_makes_no_episode(tmp_path: Path, repo_root: Path) -> None:
    server = [sys.executable, str(repo_root / "tests" / "mcp_server.py"), str(tmp_path / "log")]
    mcp = {"command": shlex.join(server), "connections": 1}
    config = load_config(write_config(tmp_path, environment=NATIVE | {"mcp": mcp}, grading={"neighbours": 0}))
    dies = [True]

    def answer(request: dict[str, Any]) -> Answer:
        name, arguments = ("die", {}) if dies[0] else ("submit_sql", {"sql": GOLDS[question_of(request)]})
        call = {"name": name, "arguments": json.dumps(arguments)}
        parsed = [{"id": "call_0", "type": "function", "function": call}]
        return Answer({"role": "assistant", "content": None, "tool_calls": parsed}, 20, 10)

    out = tmp_path / "e.jsonl"
    with served(answer) as url:
        source = Endpoint(url, "script", parallel=2)
        with pytest.raises(RunError, match="the MCP server died"):
            collect(config, out, source, console=silent(), samples=2, num_questions=2)
        assert json_lines(out) == []
        dies[0] = False
        assert collect(config, out, source, console=silent(), samples=1, num_questions=2) == 0
    assert [row["strict"] for row in json_lines(out)] == [True, True]


@pytest.mark.parametrize(
    "cut", [says("<sql>", has_ended=False), Answer({"role": "assistant", "content": "<sql>"}, 5, 900)]
)
def test_an_episode_out_of_tokens_is_masked(config: Config, tmp_path: Path, cut: Answer) -> None:
    gather(config, tmp_path / "e.jsonl", lambda request: cut, samples=1, num_questions=1)
    (row,) = json_lines(tmp_path / "e.jsonl")
    assert (row["stop_reason"], row["is_masked"], row["strict"], row["reward"]) == (
        "budget",
        True,
        False,
        None,
    )


def test_failures_of_the_endpoint_are_nobodys_episodes(config: Config, tmp_path: Path) -> None:
    out, is_broken = tmp_path / "e.jsonl", [True]

    def fails(request: dict[str, Any]) -> bool:
        return is_broken[0] and question_of(request) == "Branches?"

    with served(right, fails=fails) as url:
        source = Endpoint(url, "script", parallel=2, retries=0)
        assert collect(config, out, source, console=silent(), samples=1) == 1
        assert sorted(row["example"] for row in json_lines(out)) == ["cities", "look-Lisbon", "look-Porto"]
        is_broken[0] = False
        assert collect(config, out, source, console=silent(), samples=1) == 0
    assert Counter(row["example"] for row in json_lines(out)) == {row["id"]: 1 for row in QUESTIONS}


def test_requests_that_are_refused_do_not_end_the_run(config: Config, tmp_path: Path) -> None:
    def fails(request: dict[str, Any]) -> bool:
        return question_of(request) != "Branches?"  # asked after two others, each four times

    with served(right, fails=fails, status=400) as url:
        source = Endpoint(url, "script", parallel=1)
        assert collect(config, tmp_path / "e.jsonl", source, console=silent()) == 1
    assert [row["example"] for row in json_lines(tmp_path / "e.jsonl")] == ["count"] * 4


def test_an_endpoint_that_dies_on_the_way_ends_the_run(config: Config, tmp_path: Path) -> None:
    seen: list[str] = []

    def fails(request: dict[str, Any]) -> bool:
        seen.append(question_of(request))
        return len(seen) > 4  # after two episodes of two turns

    with served(right, fails=fails) as url:
        source = Endpoint(url, "script", parallel=1, retries=0)
        with pytest.raises(RunError, match="the endpoint failed 4 times in a row: InternalServerError"):
            collect(config, tmp_path / "e.jsonl", source, console=silent())
    assert len(json_lines(tmp_path / "e.jsonl")) == 2


def test_a_page_instead_of_an_answer_is_nobodys_episode(config: Config, tmp_path: Path) -> None:
    with served(lambda request: "<html>Log in</html>") as url:
        source = Endpoint(url, "script", parallel=1, retries=0)
        with pytest.raises(RunError, match="in a row: an answer without choices: <html>Log in"):
            collect(config, tmp_path / "e.jsonl", source, console=silent())


def test_a_failure_in_passing_is_asked_again(config: Config, tmp_path: Path) -> None:
    seen: list[str] = []

    def fails(request: dict[str, Any]) -> bool:
        seen.append(question_of(request))
        return len(seen) == 1

    with served(right, fails=fails) as url:
        source = Endpoint(url, "script", parallel=1, retries=2)
        assert (
            collect(config, tmp_path / "e.jsonl", source, console=silent(), samples=1, num_questions=1) == 0
        )
    assert len(seen) == 3  # one in vain, two turns


def test_an_endpoint_that_never_answers_ends_the_run(config: Config, tmp_path: Path) -> None:
    source = Endpoint("http://127.0.0.1:9/v1", "script", parallel=2, retries=0)
    with pytest.raises(RunError, match="the endpoint failed 4 times in a row: APIConnectionError"):
        collect(config, tmp_path / "e.jsonl", source, console=silent())
    assert json_lines(tmp_path / "e.jsonl") == []


def test_without_the_package_openai(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigError, match=r"--base_url needs the package openai.*\[endpoints\]"):
        gather(config, tmp_path / "e.jsonl", right, samples=1)


def test_episodes_are_played_side_by_side(config: Config, tmp_path: Path) -> None:
    together = threading.Barrier(4, timeout=20)

    def fails(request: dict[str, Any]) -> bool:  # outside the lock that answers one at a time
        if len(request["messages"]) < 3:
            together.wait()
        return False

    with served(right, fails=fails) as url:
        source = Endpoint(url, "script", parallel=4, retries=0)
        assert collect(config, tmp_path / "e.jsonl", source, console=silent(), samples=1) == 0


@pytest.mark.slow  # a process of its own imports for seconds
def test_a_killed_collection_goes_on(tmp_path: Path, repo_root: Path) -> None:
    config = write_config(tmp_path, grading={"neighbours": 0})
    out = tmp_path / "e.jsonl"

    def slow(request: dict[str, Any]) -> Answer:
        time.sleep(0.02)
        return right(request)

    with served(slow) as url:
        command = [sys.executable, "-m", "text2sql_grpo", "collect", "--config", str(config)]
        command += [
            "--base_url",
            url,
            "--model",
            "script",
            "--out",
            str(out),
            "--samples",
            "8",
            "--parallel",
            "2",
        ]
        killed = subprocess.Popen(
            command, cwd=repo_root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 120
        while not (out.exists() and out.read_bytes().count(b"\n") >= 5) and time.monotonic() < deadline:
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        before = json_lines(out) if out.read_bytes().endswith(b"\n") else None
        assert before is None or 5 <= len(before) < 32
        source = Endpoint(url, "script", parallel=2)
        assert collect(load_config(config), out, source, console=silent(), samples=8) == 0
    rows = json_lines(out)
    assert Counter((row["example"], row["sample"]) for row in rows) == {
        (question["id"], sample): 1 for question in QUESTIONS for sample in range(8)
    }
    assert before is None or rows[: len(before)] == before


def test_a_local_model_is_played_by_our_engine(config: Config, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", max_positions=512)
    out = tmp_path / "e.jsonl"
    assert collect(config, out, str(model), console=silent(), samples=2, num_questions=2) == 0
    first = json_lines(out)
    assert collect(config, out, str(model), console=silent(), samples=3, num_questions=3) == 0
    rows = json_lines(out)
    assert rows[:4] == first and len({(row["example"], row["sample"]) for row in rows}) == len(rows) == 9
    assert all(row["completion_ids"] and row["log_probs"] for row in rows)
    assert re.search(r"model$", rows[0]["model"])


def test_a_served_model_is_evaluated(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "evaluation.json"

    def answer(request: dict[str, Any]) -> Answer:
        is_wrong = question_of(request) == "Branches?"
        return says("<answer>SELECT 0</answer>") if is_wrong else right(request)

    with served(answer) as url:
        command = ["evaluate", "--base_url", url, "--config", str(tmp_path / "tiny.yaml"), "--out", str(out)]
        assert main(command) == 1 and "give both" in capsys.readouterr().err
        assert main([*command, "--model", "script"]) == 0
    record = json.loads(out.read_text())
    assert record["model"] == "script" and record["temperature"] == 0
    assert record["sets"]["test_values"]["overall"]["strict"]["correct"] == 3
    answers = json_lines(out.with_suffix(".jsonl"))
    assert [row["example"] for row in answers] == [question["id"] for question in QUESTIONS]
    assert [row["strict"] for row in answers] == [True, True, False, True]
    with (
        served(right, fails=lambda request: "All cities?" in str(request), status=400) as url,
        pytest.raises(RunError, match="1 of 4 questions were not answered, the first: BadRequestError"),
    ):
        evaluate(Endpoint(url, "script", retries=0), config, console=silent())
