"""Collecting episodes: by our engine and over HTTP, through failures, kills and restarts."""

import json
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

from tests.chat_endpoint import Answer, served
from tests.tiny_model import write_model
from tests.tiny_run import QUESTIONS, json_lines, write_config
from text2sql_grpo.commands import main

pytest.importorskip("openai", reason="needs openai (pip install openai)")

GOLDS = {row["question"]: row["gold_sql"] for row in QUESTIONS}
NATIVE = (
    *("--environment.protocol", "native", "--environment.max_turns", "3"),
    *("--environment.instructions", "true", "--environment.max_episode_tokens", "2048"),
)


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


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_config(tmp_path, grading={"test_databases": 0})


def collect(url: str, *options: str) -> int:
    """Exit code of the verb, for the config and the file of episodes of each test."""
    words = ["--config", "tiny.yaml", "--base_url", url, "--model", "script", "--out", "e.jsonl"]
    return main(["collect", *words, "--retries", "0", *options])


def gather(answer: Callable[[dict[str, Any]], Answer | str], *options: str, **serving: Any) -> int:
    """Collect from an endpoint with these answers."""
    with served(answer, **serving) as url:
        return collect(url, *options)


def episodes() -> list[dict[str, Any]]:
    return json_lines(Path("e.jsonl"))


def test_episodes_over_http_are_those_of_sessions() -> None:
    requests: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> Answer:
        requests.append(request)
        return right(request)

    options = ("--samples", "2", "--temperature", "0.5", "--seed", "7", "--keep", "correct")
    assert gather(answer, *options) == 0
    rows = episodes()
    assert Counter((row["example"], row["sample"]) for row in rows) == {
        (question["id"], sample): 1 for question in QUESTIONS for sample in (0, 1)
    }
    assert all(row["strict"] and row["stop_reason"] == "submitted" for row in rows)
    assert all([action["kind"] for action in row["actions"]] == ["run_sql", "submit_sql"] for row in rows)
    assert "LIS-02" in rows[0]["messages"][2]["content"]
    assert rows[0]["reward"] > 0 and rows[0]["model"] == "script"
    assert {request["seed"] for request in requests} == {7, 8} and requests[0]["temperature"] == 0.5
    assert requests[0]["max_tokens"] == 24 and "tools" not in requests[0]
    chats = json_lines(Path("e.correct.jsonl"))  # both samples of a question have one text
    assert [chat["example"] for chat in chats] == sorted(question["id"] for question in QUESTIONS)
    assert chats[0]["messages"] in [row["messages"] for row in rows]


def test_tool_calls_that_the_server_parsed(tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> Answer:
        requests.append(request)
        is_last = len(request["messages"]) >= 4
        sql = GOLDS[question_of(request)] if is_last else "SELECT 1 AS one"
        call = {"name": "submit_sql" if is_last else "run_sql", "arguments": json.dumps({"sql": sql})}
        parsed = [{"id": "call_0", "type": "function", "function": call}]
        message = {"role": "assistant", "content": None, "tool_calls": parsed, "reasoning_content": "hm"}
        return Answer(message, 20, 10)

    options = ("--samples", "1", "--num_questions", "1", "--keep", "best_of_n", *NATIVE)
    assert gather(answer, *options) == 0
    (row,) = episodes()
    assert row["strict"] and row["messages"][2]["content"].startswith("<think>hm</think><tool_call>")
    assert requests[1]["messages"][-1] == {
        "role": "tool",
        "tool_call_id": "call_0",
        "content": row["messages"][3]["content"],
    }
    (chat,) = json_lines(Path("e.best_of_n.jsonl"))
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["run_sql", "submit_sql"]


def test_an_mcp_server_that_dies_makes_no_episode(
    tmp_path: Path, repo_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = [sys.executable, str(repo_root / "tests" / "mcp_server.py"), str(tmp_path / "log")]
    mcp = json.dumps({"command": shlex.join(server), "connections": 1})
    dies = [True]

    def answer(request: dict[str, Any]) -> Answer:
        name, arguments = ("die", {}) if dies[0] else ("submit_sql", {"sql": GOLDS[question_of(request)]})
        call = {"name": name, "arguments": json.dumps(arguments)}
        parsed = [{"id": "call_0", "type": "function", "function": call}]
        return Answer({"role": "assistant", "content": None, "tool_calls": parsed}, 20, 10)

    options = ("--parallel", "2", "--num_questions", "2", *NATIVE, "--environment.mcp", mcp)
    with served(answer) as url:
        assert collect(url, "--samples", "2", *options) == 1
        assert "the MCP server died" in capsys.readouterr().err
        assert episodes() == []
        dies[0] = False
        assert collect(url, "--samples", "1", *options) == 0
    assert [row["strict"] for row in episodes()] == [True, True]


@pytest.mark.parametrize(
    ("cut", "reason"),
    [
        (says("<sql>", has_ended=False), "turn_length"),
        (Answer({"role": "assistant", "content": "<sql>"}, 5, 900), "budget"),
    ],
)
def test_an_episode_out_of_tokens_is_masked(cut: Answer, reason: str) -> None:
    assert gather(lambda request: cut, "--samples", "1", "--num_questions", "1") == 0
    (row,) = episodes()
    found = (row["stop_reason"], row["is_masked"], row["strict"], row["reward"])
    assert found == (reason, True, False, None)
    assert row["messages"][-1] == {"role": "assistant", "content": "<sql>"}


def test_a_turn_cut_behind_a_whole_action_counts() -> None:
    cut = says("<answer>SELECT 1</answer> Here is why", has_ended=False)
    assert gather(lambda request: cut, "--samples", "1", "--num_questions", "1") == 0
    (row,) = episodes()
    assert (row["stop_reason"], row["final_sql"], row["is_masked"]) == ("submitted", "SELECT 1", False)


def test_a_question_that_failed_is_asked_by_the_next_call(capsys: pytest.CaptureFixture[str]) -> None:
    is_broken = [True]

    def fails(request: dict[str, Any]) -> bool:
        return is_broken[0] and question_of(request) == "Branches?"

    largest_seed = ("--seed", str(2**32 - 1))
    with served(right, fails=fails) as url:
        assert collect(url, "--parallel", "2", "--samples", "1", *largest_seed) == 1
        assert "1 of 4 questions were not answered" in capsys.readouterr().out
        assert sorted(row["example"] for row in episodes()) == ["cities", "look-Lisbon", "look-Porto"]
        is_broken[0] = False
        assert collect(url, "--parallel", "2", "--samples", "1", *largest_seed) == 0
    assert Counter(row["example"] for row in episodes()) == {row["id"]: 1 for row in QUESTIONS}


def test_two_calls_at_once_do_not_write_to_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    codes: list[int] = []

    def while_another_starts(request: dict[str, Any]) -> Answer:
        if not codes:
            codes.append(collect(url, "--samples", "1"))
        return right(request)

    with served(while_another_starts) as url:
        assert collect(url, "--parallel", "1", "--samples", "1") == 0
    assert codes == [1] and "another collect is writing to this file (e.jsonl)" in capsys.readouterr().err
    assert len(episodes()) == len(QUESTIONS) and not [*Path().glob(".*")]


def test_some_refused_requests_do_not_end_a_run_and_the_first_ones_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def too_long(request: dict[str, Any]) -> bool:
        return question_of(request) != "Branches?"  # asked after two others

    assert gather(right, "--parallel", "1", fails=too_long, status=400) == 1
    assert [row["example"] for row in episodes()] == ["count"] * 4
    Path("e.jsonl").unlink()
    asked: list[str] = []

    def refuses(request: dict[str, Any]) -> bool:
        asked.append(question_of(request))
        return True

    assert gather(right, "--parallel", "1", "--samples", "9", fails=refuses, status=400) == 1
    assert "failed 4 times in a row" in capsys.readouterr().err
    assert len(asked) < 8  # of 36


@pytest.mark.parametrize(
    ("error", "absent", "present"),
    [
        ("Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.",
         "max_tokens", "max_completion_tokens"),
        ("Unsupported value: 'temperature' does not support 0.5", "temperature", "max_tokens"),
        ("body.seed: Extra inputs are not permitted", "seed", "temperature"),
    ],
)  # fmt: skip
def test_an_option_that_the_server_does_not_support_is_renamed_or_left_out(
    error: str, absent: str, present: str
) -> None:
    requests: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> Answer:
        requests.append(request)
        return right(request)

    refused = {"fails": lambda request: error if absent in request else False, "status": 400}
    assert gather(answer, "--samples", "1", "--temperature", "0.5", **refused) == 0
    assert len(episodes()) == 4
    assert all(present in request and absent not in request for request in requests)


def test_an_endpoint_that_dies_on_the_way_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def fails(request: dict[str, Any]) -> bool:
        seen.append(question_of(request))
        return len(seen) > 4  # after two episodes of two turns

    assert gather(right, "--parallel", "1", fails=fails) == 1
    assert "4 times in a row: InternalServerError" in capsys.readouterr().err
    assert len(episodes()) == 2


def test_neither_a_page_nor_silence_is_an_episode(capsys: pytest.CaptureFixture[str]) -> None:
    assert gather(lambda request: "<html>Log in</html>", "--parallel", "1") == 1
    assert "<html>Log in" in capsys.readouterr().err
    assert collect("http://127.0.0.1:9/v1", "--parallel", "2") == 1
    assert "APIConnectionError" in capsys.readouterr().err
    assert episodes() == []


def test_a_request_that_fails_once_is_sent_again() -> None:
    seen: list[str] = []

    def fails(request: dict[str, Any]) -> bool:
        seen.append(question_of(request))
        return len(seen) == 1

    options = ("--parallel", "1", "--samples", "1", "--num_questions", "1", "--retries", "2")
    assert gather(right, *options, fails=fails) == 0
    assert len(seen) == 3  # one in vain, two turns


def test_without_the_package_openai(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    assert gather(right, "--samples", "1") == 1
    assert "[endpoints]" in capsys.readouterr().err


def test_episodes_are_rolled_out_side_by_side() -> None:
    together = threading.Barrier(4, timeout=20)

    def fails(request: dict[str, Any]) -> bool:  # outside the lock that answers one at a time
        if len(request["messages"]) < 3:
            together.wait()
        return False

    assert gather(right, "--parallel", "4", "--samples", "1", fails=fails) == 0


@pytest.mark.slow  # a process of its own imports for seconds
def test_a_killed_collection_resumes(repo_root: Path) -> None:
    def slow(request: dict[str, Any]) -> Answer:
        time.sleep(0.02)
        return right(request)

    out = Path("e.jsonl")
    with served(slow) as url:
        command = [sys.executable, "-m", "text2sql_grpo", "collect", "--config", "tiny.yaml"]
        command += ["--base_url", url, "--model", "script", "--out", "e.jsonl", "--samples", "8"]
        killed = subprocess.Popen(
            [*command, "--parallel", "2"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 120
        while not (out.exists() and out.read_bytes().count(b"\n") >= 5) and time.monotonic() < deadline:
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        before = episodes() if out.read_bytes().endswith(b"\n") else None
        assert before is None or 5 <= len(before) < 32
        assert collect(url, "--parallel", "2", "--samples", "8") == 0
    rows = episodes()
    assert Counter((row["example"], row["sample"]) for row in rows) == {
        (question["id"], sample): 1 for question in QUESTIONS for sample in range(8)
    }
    assert before is None or rows[: len(before)] == before


def test_a_local_model_is_sampled_by_the_engine_of_training(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model", max_positions=512))

    def sample(samples: int, questions: int) -> list[dict[str, Any]]:
        words = ["--config", "tiny.yaml", "--model_path", model, "--out", "e.jsonl"]
        words += ["--samples", str(samples), "--num_questions", str(questions)]
        assert main(["collect", *words]) == 0
        return episodes()

    first = sample(2, 2)
    rows = sample(3, 3)
    assert rows[:4] == first and len({(row["example"], row["sample"]) for row in rows}) == len(rows) == 9
    assert all(row["completion_ids"] and row["log_probs"] for row in rows)
    assert rows[0]["model"] == model


def test_a_served_model_is_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(request: dict[str, Any]) -> Answer:
        is_wrong = question_of(request) == "Branches?"
        return says("<answer>SELECT 0</answer>") if is_wrong else right(request)

    def evaluate(url: str, *options: str) -> int:
        return main(["evaluate", "--base_url", url, "--config", "tiny.yaml", "--out", "e.json", *options])

    with served(answer) as url:
        assert evaluate(url) == 1 and "give both" in capsys.readouterr().err
        assert evaluate(url, "--model", "script") == 0
    record = json.loads(Path("e.json").read_text())
    assert record["model"] == "script" and record["temperature"] == 0
    assert record["sets"]["test_values"]["overall"]["strict"]["correct"] == 3
    answers = episodes()
    assert [row["example"] for row in answers] == [question["id"] for question in QUESTIONS]
    assert [row["strict"] for row in answers] == [True, True, False, True]
    with served(right, fails=lambda request: "All cities?" in str(request), status=400) as url:
        assert evaluate(url, "--model", "script") == 1
    assert "1 of 4 questions were not answered, the first: BadRequestError" in capsys.readouterr().err
