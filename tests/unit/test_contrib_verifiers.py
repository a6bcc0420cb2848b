"""The verifiers taskset, task and harness over a real database; a script answers over HTTP."""

import asyncio
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.chat_endpoint import Answer, served
from tests.scripted_policy import SHOP
from tests.tiny_run import QUESTIONS, write_questions
from text2sql_grpo.environment.prompts import system_text
from text2sql_grpo.errors import DataError

vf = pytest.importorskip("verifiers.v1", reason="needs verifiers (pip install text2sql-grpo[verifiers])")

GOLD = "SELECT staff FROM branch WHERE code = 'LIS-02'"
LOOK = "<sql>SELECT code FROM branch WHERE city = 'Lisbon'</sql>"
RIGHT = f"<answer>{GOLD}</answer>"
NATIVE = {"protocol": "native"}


def taskset(folder: Path, rows: list[dict[str, Any]] = QUESTIONS, **task: Any) -> Any:
    """The questions about the shop as a taskset."""
    (folder / "databases").mkdir()
    (folder / "databases" / "shop.sql").write_text(SHOP, encoding="utf-8")
    config = vf.taskset_config_type("text2sql-grpo").model_validate(
        {
            "id": "text2sql-grpo",
            "questions": write_questions(folder / "questions.jsonl", rows),
            "task": {
                "databases": folder / "databases",
                "environment": {"max_turns": 3},
                "reward_mix": {"execution": 1.0, "turn_cost": 0.1, "format": 0.05},
                "grading": {"neighbours": 0},
            }
            | task,
        }
    )
    return vf.load_taskset(config)


def play(task: Any, answers: Sequence[Answer], requests: list[dict[str, Any]] | None = None) -> Any:
    """The trace of a rollout in which a script gives these answers."""
    left = list(answers)

    def answer(request: dict[str, Any]) -> Answer:
        if requests is not None:
            requests.append(request)
        return left.pop(0)

    with served(answer) as url:
        config = vf.AgentConfig(
            harness=vf.harness_config_type("text2sql-grpo")(id="text2sql-grpo"),
            runtime=vf.SubprocessConfig(),
            model="script",
            client=vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY"),
        )
        trace = asyncio.run(vf.make_agent(config).run(task))
    assert not left
    return trace


def says(text: str, prompt_tokens: int = 100, tokens: int = 10, **fields: Any) -> Answer:
    return Answer({"role": "assistant", "content": text}, prompt_tokens, tokens, **fields)


def calls(*named: tuple[str, str]) -> Answer:
    """An answer of tool calls that the server parsed: names, and arguments as JSON text."""
    parsed = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(named)
    ]
    return Answer({"role": "assistant", "content": None, "tool_calls": parsed}, 100, 10)


def scores(trace: Any) -> dict[str, float]:
    return {name: reward.score for name, reward in trace.rewards.items()}


def test_tasks_carry_the_prompt_of_training_and_no_path(tmp_path: Path) -> None:
    tasks = list(taskset(tmp_path))
    assert [task.key for task in tasks] == [
        "shop/look-Lisbon",
        "shop/look-Porto",
        "shop/count",
        "shop/cities",
    ]
    data = tasks[0].data
    assert data.system_prompt == system_text("tags", 3)
    assert data.prompt.startswith("CREATE TABLE branch") and data.prompt.endswith(
        "Staff of the Lisbon branch?"
    )
    assert str(tmp_path) not in data.model_dump_json()


def test_a_rollout_is_an_episode_of_training(tmp_path: Path) -> None:
    (task,) = taskset(tmp_path).take(1)
    requests: list[dict[str, Any]] = []
    trace = play(task, [says("no action"), says(LOOK), says(RIGHT)], requests)
    assert trace.ok and trace.stop_condition == "submitted" and len(trace.branches) == 1
    expected = task.config.bench().environment.session(task.data.example)
    expected.start()
    for turn in ("no action", LOOK, RIGHT):
        expected.step(turn)
    assert requests[2]["messages"] == expected.episode.messages[:-1]
    assert [request["max_tokens"] for request in requests] == [512] * 3
    assert scores(trace) == pytest.approx({"execution": 1.0, "turn_cost": -0.1, "format": 0.05 / 2})
    assert {"strict": 1.0, "official": 1.0, "looks": 1.0}.items() <= trace.metrics.items()


def test_a_saved_trace_scores_alike_without_its_rollout(tmp_path: Path) -> None:
    (task,) = taskset(tmp_path).take(1)
    trace = play(task, [says(LOOK), says(RIGHT)])
    saved = vf.Trace[vf.WireTaskData, vf.State, vf.AgentConfig].model_validate(
        json.loads(trace.model_dump_json()) | {"rewards": {}, "metrics": {}}
    )
    again = type(task)(type(task).data_type().model_validate(saved.task.data.model_dump()), task.config)
    asyncio.run(again.score(saved))
    assert (scores(saved), saved.metrics) == (scores(trace), trace.metrics)
    assert scores(saved)["execution"] == 1.0


@pytest.mark.parametrize(
    ("answers", "stop"),
    [
        ([says(LOOK), says(LOOK), says(LOOK)], "max_turns"),
        ([says(LOOK), says(RIGHT, has_ended=False)], "max_total_tokens"),
        # of 2,048 tokens, the first turn and its observation take 1,990
        ([says(LOOK), says(RIGHT, prompt_tokens=2_090, tokens=60)], "max_total_tokens"),
    ],
)
def test_an_answer_that_comes_too_late_is_none(tmp_path: Path, answers: list[Answer], stop: str) -> None:
    (task,) = taskset(tmp_path).take(1)
    trace = play(task, answers)
    assert trace.ok and trace.is_truncated and trace.stop_condition == stop
    assert scores(trace)["execution"] == trace.metrics["strict"] == trace.metrics["bird_f1"] == 0.0


def test_tool_calls_parsed_by_the_server_are_answered_one_by_one(tmp_path: Path) -> None:
    (task,) = taskset(tmp_path, environment=NATIVE).take(1)
    requests: list[dict[str, Any]] = []
    look, submit = ("run_sql", '{"sql": "SELECT 1 AS one"}'), ("submit_sql", json.dumps({"sql": GOLD}))
    trace = play(task, [calls(look), calls(look, look), calls(("run_sql", "{oops")), calls(submit)], requests)
    assert [tool["function"]["name"] for tool in requests[0]["tools"]] == ["run_sql", "submit_sql"]
    replies = [message for message in requests[3]["messages"] if message["role"] == "tool"]
    assert [reply["tool_call_id"] for reply in replies] == ["call_0", "call_0", "call_1", "call_0"]
    assert replies[0]["content"] == "one\n1"
    assert replies[1]["content"] == replies[2]["content"]
    assert "got 2 calls" in replies[1]["content"] and "got the arguments" in replies[3]["content"]
    assert trace.stop_condition == "submitted" and scores(trace)["execution"] == 1.0
    assert scores(trace)["format"] == pytest.approx(0.05 / 2)


def test_a_shared_mcp_server_answers_where_it_is_wanted(tmp_path: Path, repo_root: Path) -> None:
    server = [sys.executable, str(repo_root / "tests" / "mcp_server.py"), str(tmp_path / "log")]
    mcp = {"command": shlex.join(server), "connections": 1}
    tasks = taskset(tmp_path, environment=NATIVE | {"mcp": mcp})
    first, second = tasks.take(2)
    environment = first.config.bench().environment
    requests: list[dict[str, Any]] = []
    submit = calls(("submit_sql", json.dumps({"sql": GOLD})))
    trace = play(first, [calls(("pid", "{}")), calls(("run_sql", '{"sql": "SELECT 1"}')), submit], requests)
    assert trace.ok and scores(trace)["execution"] == 1.0 and scores(trace)["format"] == 0.05
    assert requests[2]["messages"][-1]["content"] == "ran SELECT 1"
    died = play(second, [calls(("die", "{}"))])
    assert not died.ok and "the MCP server died" in died.last_error.message
    environment.close()


def test_text_in_the_native_protocol_is_answered_by_the_user(tmp_path: Path) -> None:
    (task,) = taskset(tmp_path, environment=NATIVE).take(1)
    requests: list[dict[str, Any]] = []
    thinking = Answer({"role": "assistant", "content": "hm", "reasoning_content": "{"}, 100, 10)
    play(task, [thinking, calls(("submit_sql", json.dumps({"sql": GOLD})))], requests)
    assert requests[1]["messages"][-1]["role"] == "user"
    assert "expected one tool call" in requests[1]["messages"][-1]["content"]


def broken(gold: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"id": "broken", "database": "shop", "question": "?", "gold_sql": gold} | fields]


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        (broken("SELECT absent FROM branch"), "no such column"),
        (broken("SELECT 1 FROM branch WHERE 0"), "not marked gold_is_empty"),
        (broken("SELECT 1", other_golds=["SELECT absent"]), "no such column"),
    ],
)
def test_validation_names_what_is_wrong_with_a_gold(
    tmp_path: Path, rows: list[dict[str, Any]], fault: str
) -> None:
    (task,) = taskset(tmp_path, rows)
    with pytest.raises(DataError, match=fault):
        asyncio.run(task.validate(None))


def test_validation_lets_golds_pass_that_run(tmp_path: Path) -> None:
    rows = QUESTIONS + broken("SELECT 1 FROM branch WHERE 0", gold_is_empty=True)
    assert all(asyncio.run(task.validate(None)) for task in taskset(tmp_path, rows))


def test_a_failing_gold_neither_pays_nor_punishes(tmp_path: Path) -> None:
    (task,) = taskset(tmp_path, broken("SELECT absent FROM branch"))
    trace = play(task, [says(RIGHT)])
    assert not trace.ok and trace.last_error.type == "TaskError"
    assert "the gold fails" in trace.last_error.message


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"environment": {"max_turn": 3}}, "max_turn"),
        ({"environment": {"max_turns": 0}}, "greater than or equal to 1"),
        ({"reward_mix": {"executes": 1.0}}, "every right answer must earn more"),
        ({"reward_mix": {"execution": 1.0, "turn_cst": 0.1}}, "did you mean turn_cost"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_runs(
    tmp_path: Path, task: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        taskset(tmp_path, **task)


def test_verifiers_finds_each_part_by_the_name_of_the_package() -> None:
    find: list[Callable[[str], Any]] = [vf.taskset_config_type, vf.harness_config_type]
    assert [config("text2sql-grpo").__name__ for config in find] == ["SQLTasksetConfig", "SQLHarnessConfig"]
    assert vf.default_harness_id("text2sql-grpo") == "text2sql-grpo"
    assert issubclass(vf.environment_class("text2sql-grpo"), vf.SingleAgentEnv)
    config = vf.env_config_type("text2sql-grpo", "")()
    assert isinstance(config.agent.runtime, vf.SubprocessConfig)
