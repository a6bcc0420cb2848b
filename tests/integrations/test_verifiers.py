"""The environment as a plug-in of verifiers: its commands, and rollouts of a script behind an endpoint."""

import asyncio
import json
import logging
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chat_endpoint import Answer, greedy, served
from tests.scripted_policy import SHOP
from tests.tiny_run import QUESTIONS, json_lines, write_config, write_questions
from tests.verifiers_commands import run_command
from text2sql_grpo.commands import main
from text2sql_grpo.config import load_config
from text2sql_grpo.environment.prompts import system_text
from text2sql_grpo.errors import DataError, RunError
from text2sql_grpo.models.loaded_policy import load_policy
from text2sql_grpo.rollout.chat_format import ChatFormat

vf = pytest.importorskip("verifiers.v1", reason="needs verifiers (pip install text2sql-grpo[verifiers])")

ID = "text2sql-grpo-env"
GOLD = "SELECT staff FROM branch WHERE code = 'LIS-02'"
LOOK = "<sql>SELECT code FROM branch WHERE city = 'Lisbon'</sql>"
RIGHT = f"<answer>{GOLD}</answer>"
NATIVE = {"protocol": "native"}


@pytest.mark.thorough
def test_verifiers_finds_each_part_by_the_id_and_loads_no_torch() -> None:
    script = f"""
import sys, verifiers.v1 as vf
assert vf.taskset_config_type("{ID}").__name__ == "SQLTasksetConfig"
assert vf.default_harness_id("{ID}") == "{ID}"
assert vf.env_config_type("{ID}", "")().agent.runtime == vf.SubprocessConfig()
assert not {{"torch", "transformers", "trl"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_what_is_hidden_reaches_the_log_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop.sql").write_text(SHOP + "CREATE TABLE staff (email TEXT);", "utf-8")
    library, records = logging.getLogger("verifiers.v1"), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    monkeypatch.setattr(library, "handlers", [handler])  # as verifiers' commands do
    monkeypatch.setattr(library, "propagate", False)
    own = logging.getLogger("text2sql_grpo")
    monkeypatch.setattr(own, "parent", own.parent)
    questions = write_questions(tmp_path / "questions.jsonl", QUESTIONS)
    task = {"databases": tmp_path / "shop.sql"}
    config = vf.taskset_config_type(ID).model_validate({"id": ID, "questions": questions, "task": task})
    assert list(vf.load_taskset(config).load())
    assert "hidden from the model in shop: staff" in records[0].getMessage()


@pytest.mark.thorough
def test_all_commands_agree_with_evaluate_on_every_question(
    tmp_path: Path,
    started_model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_config(tmp_path, model={"path": started_model, "dtype": "float32"})
    scores = tmp_path / "scores.json"
    assert main(["evaluate", "--model_path", started_model, "--config", str(path), "--out", str(scores)]) == 0
    expected = {answer["example"]: answer for answer in json_lines(tmp_path / "scores.jsonl")}
    strict = [answer["strict"] for answer in expected.values()]
    assert any(strict) and not all(strict), "a policy that is always right or wrong shows little"
    assert any(len(answer["actions"]) > 1 for answer in expected.values())

    config = load_config(path)
    names = ("schema_text", "instructions", "max_turns", "max_turn_tokens", "max_episode_tokens")
    settings = {
        "questions": config.data.train,
        "task.databases": config.data.databases,
        **{f"task.environment.{name}": getattr(config.environment, name) for name in names},
        **{f"task.reward_mix.{name}": weight for name, weight in config.rewards.items()},
    }

    def flags(prefix: str) -> list[str]:
        return [text for name, value in settings.items() for text in (f"--{prefix}.{name}", str(value))]

    policy = load_policy(started_model, dtype="float32")
    out = ["--no-rich", "--output-dir", "outputs", "--run.dir"]
    here = ["--runtime.type", "subprocess"]
    with served(greedy(policy.model.eval(), ChatFormat(policy.tokenizer))) as url:
        client = ["--model", "tiny", "--client.base-url", url, "--client.api-key-var", "NO_KEY", "--no-push"]
        run_command(tmp_path, "vf-validate", ID, *flags("taskset"), *here, *out, "validate")
        run_command(tmp_path, "vf-eval", ID, *flags("env.taskset"), *client, *out, "eval")
    run_command(tmp_path, "vf-replay", "outputs/eval", "--no-rich", "--output-dir", "outputs/replay")

    outcomes = json.loads((tmp_path / "outputs" / "validate" / "summary.json").read_text("utf-8"))["outcomes"]
    assert outcomes["valid"] == len(QUESTIONS)
    traces, replayed = (
        {
            trace["task"]["data"]["id"]: trace
            for episode in json_lines(tmp_path / "outputs" / name / "traces.jsonl")
            for trace in episode["traces"]
        }
        for name in ("eval", "replay")
    )
    assert traces.keys() == replayed.keys() == expected.keys()
    for name, trace in traces.items():
        answer, again = expected[name], replayed[name]
        assert trace["ok"], trace["errors"]
        texts = [node["message"]["content"] for node in trace["nodes"]]
        is_cut = answer["stop_reason"] == "budget"  # then its last turn is not a message of the episode
        assert (texts[:-1] if is_cut else texts) == [message["content"] for message in answer["messages"]]
        assert trace["stop_condition"] == ("max_total_tokens" if is_cut else answer["stop_reason"])
        looks = sum(action["kind"] == "run_sql" for action in answer["actions"])
        verdicts = {"strict": answer["strict"], "official": answer["official"], "looks": looks}
        assert verdicts.items() <= trace["metrics"].items()
        assert (again["rewards"], again["metrics"]) == (trace["rewards"], trace["metrics"])
    monkeypatch.chdir(tmp_path)
    argv = ["replay", "outputs/eval", "--config", str(path)]
    assert main(argv) == 1  # they hold no gold queries
    assert main([*argv, "--golds", str(config.data.train), "--out", "again.jsonl"]) == 0
    assert {row["example"]: row["strict"] for row in json_lines(tmp_path / "again.jsonl")} == {
        name: answer["strict"] for name, answer in expected.items()
    }
    assert "0 become right, 0 become wrong" in capsys.readouterr().out


def taskset(folder: Path, rows: list[dict[str, Any]] = QUESTIONS, **task: Any) -> Any:
    """The questions about the shop as a taskset."""
    (folder / "databases").mkdir()
    (folder / "databases" / "shop.sql").write_text(SHOP, encoding="utf-8")
    settings = {
        "databases": folder / "databases",
        "environment": {"max_turns": 3},
        "reward_mix": {"execution": 1.0, "turn_cost": 0.1, "format": 0.05},
        "grading": {"test_databases": 0},
    }
    questions = write_questions(folder / "questions.jsonl", rows)
    fields = {"id": ID, "questions": questions, "task": settings | task}
    return vf.load_taskset(vf.taskset_config_type(ID).model_validate(fields))


def roll_out(task: Any, *answers: Answer) -> tuple[Any, list[dict[str, Any]]]:
    """Trace of a rollout in which a script gives these answers, and the requests for them."""
    left, requests = list(answers), []

    def answer(request: dict[str, Any]) -> Answer:
        requests.append(request)
        return left.pop(0)

    with served(answer) as url:
        config = vf.AgentConfig(
            harness=vf.harness_config_type(ID)(id=ID),
            runtime=vf.SubprocessConfig(),
            model="script",
            client=vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY"),
        )
        trace = asyncio.run(vf.make_agent(config).run(task))
    assert not left
    return trace, requests


def text(content: str, prompt_tokens: int = 100, tokens: int = 10, **fields: Any) -> Answer:
    return Answer({"role": "assistant", "content": content}, prompt_tokens, tokens, **fields)


def calls(*named: tuple[str, str]) -> Answer:
    """An answer of tool calls that the server parsed: names, and arguments as JSON text."""
    parsed = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(named)
    ]
    return Answer({"role": "assistant", "content": None, "tool_calls": parsed}, 100, 10)


SUBMIT = ("submit_sql", json.dumps({"sql": GOLD}))


def scores(trace: Any) -> dict[str, float]:
    return {name: reward.score for name, reward in trace.rewards.items()}


def test_tasks_hold_the_prompt_of_training_and_pay_as_in_training(tmp_path: Path) -> None:
    tasks = list(taskset(tmp_path))
    assert [task.key for task in tasks] == [f"shop/{row['id']}" for row in QUESTIONS]
    data = tasks[0].data
    assert data.system_prompt == system_text("tags", 3)
    assert data.prompt.startswith("CREATE TABLE branch") and data.prompt.endswith(QUESTIONS[0]["question"])
    assert str(tmp_path) not in data.model_dump_json()
    trace, requests = roll_out(tasks[0], text("no action"), text(LOOK), text(RIGHT))
    assert trace.ok and trace.stop_condition == "submitted" and len(trace.branches) == 1
    assert [message["role"] for message in requests[2]["messages"]] == [
        *("system", "user", "assistant", "user", "assistant", "user"),
    ]
    assert [request["max_tokens"] for request in requests] == [512] * 3
    assert scores(trace) == pytest.approx({"execution": 1.0, "turn_cost": -0.1, "format": 0.05 / 2})
    assert {"strict": 1.0, "official": 1.0, "looks": 1.0}.items() <= trace.metrics.items()


@pytest.mark.parametrize(
    ("answers", "stop"),
    [
        ([text(LOOK), text(LOOK), text(LOOK)], "max_turns"),
        ([text(LOOK), text(RIGHT.removesuffix("</answer>"), has_ended=False)], "max_total_tokens"),
        # of 2,048 tokens, the first turn and its observation take 1,990
        ([text(LOOK), text(RIGHT, prompt_tokens=2_090, tokens=60)], "max_total_tokens"),
    ],
)
def test_an_answer_beyond_a_limit_does_not_count(
    tmp_path: Path, answers: Sequence[Answer], stop: str
) -> None:
    trace, _ = roll_out(next(iter(taskset(tmp_path))), *answers)
    assert trace.ok and trace.is_truncated and trace.stop_condition == stop
    assert scores(trace)["execution"] == trace.metrics["strict"] == trace.metrics["bird_f1"] == 0.0


def test_a_turn_cut_behind_a_whole_action_counts(tmp_path: Path) -> None:
    talk = [text(f"{action} and so on", has_ended=False) for action in (LOOK, RIGHT)]
    trace, _ = roll_out(next(iter(taskset(tmp_path))), *talk)
    assert trace.ok and trace.stop_condition == "submitted"
    assert scores(trace)["execution"] == trace.metrics["strict"] == trace.metrics["looks"] == 1.0


def test_traces_are_replayed_with_the_reasons_why_they_stopped(tmp_path: Path) -> None:
    from text2sql_grpo.integrations.verifiers.traces import episode_records

    tasks = list(taskset(tmp_path).load())
    environment, _ = tasks[0].config.opened
    lines = []
    for task, answers in ((tasks[0], [text("?")] * 3), (tasks[1], [text("<sql>", tokens=9_999)])):
        trace, _ = roll_out(task, *answers)
        episode = vf.Episode(env=vf.EnvInfo(id=ID), task=trace.task, traces=[trace], ok=trace.ok)
        lines.append(json.dumps(episode.to_record()) + "\n")
    (tmp_path / "traces.jsonl").write_text("".join(lines))

    examples = {task.data.example.id: task.data.example for task in tasks}
    records = episode_records(tmp_path, examples, environment.sessions)
    ends = [(record["stop_reason"], record["is_masked"]) for record in records]
    assert ends == [("max_turns", False), ("budget", True)]


def test_a_message_with_an_image_is_refused_by_what_it_holds() -> None:
    from text2sql_grpo.integrations.verifiers.traces import plain

    parts = [SimpleNamespace(type="text", text="See:"), SimpleNamespace(type="image_url")]
    with pytest.raises(RunError, match=r"text only, got image_url \(user\)"):
        plain(SimpleNamespace(role="user", content=parts))


def test_tool_calls_parsed_by_the_server_are_answered_one_by_one(tmp_path: Path) -> None:
    (task,) = taskset(tmp_path, environment=NATIVE).take(1)
    look = ("run_sql", '{"sql": "SELECT 1 AS one"}')
    thinking = Answer({"role": "assistant", "content": "hm", "reasoning_content": "{"}, 100, 10)
    trace, requests = roll_out(
        task, calls(look), calls(look, look), thinking, calls(("run_sql", "{oops")), calls(SUBMIT)
    )
    assert [tool["function"]["name"] for tool in requests[0]["tools"]] == ["run_sql", "submit_sql"]
    messages = requests[4]["messages"]
    replies = [message for message in messages if message["role"] == "tool"]
    assert [message["tool_call_id"] for message in replies] == ["call_0", "call_0", "call_1", "call_0"]
    assert replies[0]["content"].startswith("one\n1\n(") and "got 2 calls" in replies[2]["content"]
    assert "got 2 calls" in replies[1]["content"] and "got the arguments" in replies[3]["content"]
    assert (
        "expected one tool call"
        in [message["content"] for message in messages if message["role"] == "user"][-1]
    )
    assert trace.stop_condition == "submitted" and scores(trace)["execution"] == 1.0


def test_a_shared_mcp_server_answers_where_the_config_names_one(tmp_path: Path, repo_root: Path) -> None:
    server = [sys.executable, str(repo_root / "tests" / "mcp_server.py"), str(tmp_path / "log")]
    mcp = {"command": shlex.join(server), "connections": 1}
    first, second = taskset(tmp_path, environment=NATIVE | {"mcp": mcp}).take(2)
    trace, requests = roll_out(
        first, calls(("pid", "{}")), calls(("run_sql", '{"sql": "SELECT 1"}')), calls(SUBMIT)
    )
    assert trace.ok and scores(trace)["execution"] == 1.0
    assert requests[2]["messages"][-1]["content"].startswith("ran SELECT 1\n(")
    died, _ = roll_out(second, calls(("die", "{}")))
    assert not died.ok and "the MCP server died" in died.last_error.message


def broken(gold: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"id": "broken", "database": "shop", "question": "?", "gold_sql": gold} | fields]


def test_validation_names_what_is_wrong_with_a_gold_which_neither_pays_nor_punishes(tmp_path: Path) -> None:
    empty = "SELECT 1 FROM branch WHERE 0"
    rows = [*QUESTIONS, *broken(empty, id="empty", gold_is_empty=True)]
    for number, (gold, fault) in enumerate(
        (
            (broken("SELECT absent FROM branch"), "no such column"),
            (broken(empty), "not marked gold_is_empty"),
            (broken("SELECT 1", other_golds=["SELECT absent"]), "no such column"),
        )
    ):
        (tmp_path / str(number)).mkdir()
        *fine, wrong = taskset(tmp_path / str(number), [*rows, *gold])
        assert all(asyncio.run(task.validate(None)) for task in fine)
        with pytest.raises(DataError, match=fault):
            asyncio.run(wrong.validate(None))
        if number == 0:
            trace, _ = roll_out(wrong, text(RIGHT))
            assert not trace.ok and "the gold fails" in trace.last_error.message


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"environment": {"max_turn": 3}}, "max_turn"),
        ({"environment": {"max_turns": 0}}, "max_turns"),
        ({"reward_mix": {"execution": 0.0, "executes": 1.0}}, "every right answer must earn more"),
        ({"reward_mix": {"execution": 1.0, "turn_cst": 0.1}}, "did you mean turn_cost"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_runs(
    tmp_path: Path, task: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        taskset(tmp_path, **task)
