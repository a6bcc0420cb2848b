"""`VerifiersGRPOTrainer` on tasksets of verifiers: rollouts by a script, and whole runs."""

# mypy: disallow-untyped-decorators=False

import importlib
import importlib.util
import runpy
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.number_game import find_packages, game_model, game_tokenizer, game_trainer
from tests.tiny_model import write_model, write_tokenizer
from tests.tiny_run import json_lines
from tests.verifiers_commands import run_command
from text2sql_grpo.commands import main
from text2sql_grpo.config import RolloutConfig
from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.demonstrations import chat_demonstration
from text2sql_grpo.rollout.engine import Continuations

vf = pytest.importorskip("verifiers.v1", reason="needs verifiers (pip install text2sql-grpo[verifiers])")

GROUP: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "rollout": RolloutConfig(engine="generation"),
    "scale_rewards": "none",
}


class Script:
    """A policy that writes given turns, one after the other."""

    def __init__(self, chat: ChatFormat, turns: Sequence[str]) -> None:
        self.chat, self.left = chat, list(turns)

    def generate(self, prompts: list[list[int]], *, max_new_tokens: int) -> Continuations:
        rows = [self.chat.turn_ids(self.left.pop(0))[:max_new_tokens] for _ in prompts]
        return Continuations(rows, [[-0.5] * len(row) for row in rows])


def scripted(trainer: Any, turns: Sequence[str], *, task: int = 5) -> dict[str, Any]:
    """One generation batch of a task, in which a script writes the turns of all rollouts in rotation."""
    policy = Script(trainer.rollouts.chat, turns)
    trainer.rollouts.policy = lambda model: policy
    trainer.select.draw = lambda count: [task] * count
    output: dict[str, Any] = trainer.generation_batch()
    assert not policy.left
    return output | {"sampled": (output["tool_mask"] * output["completion_mask"]).bool()}


def traces(folder: Path) -> list[Any]:
    """Traces that a run wrote."""
    rows = json_lines(folder / "run" / "traces.jsonl")
    return [vf.WireTrace.model_validate(trace) for row in rows for trace in row["traces"]]


def rolled_out(folder: Path, *turns: str, task: int = 0, **arguments: Any) -> Any:
    """Trace of a group of two equal rollouts."""
    trainer = game_trainer(
        folder, **GROUP | {"per_device_train_batch_size": 2, "num_generations": 2} | arguments
    )
    scripted(trainer, [turn for turn in turns for _ in range(2)], task=task)
    return traces(folder)[0]


def messages(trace: Any) -> list[tuple[str, str]]:
    return [(node.message.role, node.message.content) for node in trace.nodes]


def test_an_environment_of_a_plug_in_directs_its_rollouts(tmp_path: Path) -> None:
    trace = rolled_out(tmp_path, "3", "higher", "4", task=4)
    assert messages(trace) == [
        *[("user", "guess"), ("assistant", "3"), ("user", "higher"), ("assistant", "higher")],
        *[("user", "?"), ("assistant", "4")],
    ]
    assert (trace.ok, trace.stop_condition, trace.num_turns) == (True, "user_closed", 3)
    assert trace.reward == pytest.approx(1.2) and trace.metrics == {"found": 1.0}
    (branch,) = trace.branches
    assert branch.logprobs[-2:] == [-0.5, -0.5] and branch.num_output_tokens == 6
    assert trace.task.key == "number-4"


def test_an_environment_may_close_its_interaction_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_packages()
    game = importlib.import_module("higher_lower")

    async def run(self: Any, task: Any, agents: Any) -> None:
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()
            assert (await interaction.close()).reward == pytest.approx(1.2)
            with pytest.raises(RuntimeError, match="closed"):
                await interaction.turn("higher")

    monkeypatch.setattr(game.HigherLowerEnv, "run", run)
    trace = rolled_out(tmp_path, "4", task=4)
    assert (trace.ok, trace.stop_condition, trace.num_turns) == (True, "user_closed", 1)


def test_the_limits_of_the_agent_hold(tmp_path: Path) -> None:
    trace = rolled_out(tmp_path, "0", "1", "2", task=5)
    assert trace.stop_condition == "max_turns" and trace.metrics == {"found": 0.0}
    assert trace.is_truncated and trace.ok


def test_a_turn_out_of_tokens_ends_the_rollout_and_is_scored(tmp_path: Path) -> None:
    budget = {"max_episode_tokens": 8, "max_turn_tokens": 4}
    trace = rolled_out(tmp_path, "1", "3 3 3 3 3", task=4, **budget)
    assert messages(trace)[-1][1].startswith("3 3") and trace.is_truncated
    assert trace.ok and trace.calls[-1].finish_reason == "length"
    assert trace.rewards["begins"].score == 1.0 and trace.rewards["close"].score == 0.0
    assert trace.stop_condition == "max_total_tokens"
    (tmp_path / "short").mkdir()  # a reply that leaves no room for a turn
    trace = rolled_out(tmp_path / "short", "3", task=4, max_episode_tokens=4)
    assert messages(trace) == [("user", "guess"), ("assistant", "3")]
    assert trace.stop_condition == "max_total_tokens"


class LetterTools(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "letters"

    @vf.tool
    async def after(self, letter: str) -> str:
        """The letter after a letter."""
        if letter == "z":
            raise ValueError("there is none after z")
        return chr(ord(letter) + 1)


class Letters(vf.Task[vf.TaskData]):
    @vf.stop
    def enough(self, trace: vf.Trace) -> bool:
        return len(trace.tool_messages) >= 3

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "raise":
            raise ValueError("no reward")
        if trace.last_reply == "forge":
            trace.nodes[-1].token_ids = [*trace.nodes[-1].token_ids, 0]
        if trace.last_reply == "branch":
            trace.nodes[-1].parent = 0  # as if the last turn had answered another prompt
        return float(trace.last_reply == "b")


class LetterTaskset(vf.Taskset[Letters, vf.TasksetConfig]):
    kind: Any = Letters

    def load(self) -> Iterator[Any]:
        data = vf.TaskData(system_prompt="Use tools.", prompt=[vf.UserMessage(content="After a?")])
        yield self.kind(data, self.config.task)

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return [LetterTools(vf.SharedToolsetConfig())]


@pytest.fixture
def letters(tmp_path: Path) -> dict[str, Any]:
    """Arguments of a trainer on the letters, whose tool a turn may call."""
    return {
        "taskset": LetterTaskset(vf.TasksetConfig()),
        "tokenizer": write_tokenizer(tmp_path / "tokenizer"),
        "max_turn_tokens": 200,
        "max_episode_tokens": 2_000,
    }


def call(letter: str) -> str:
    return f'Look.<tool_call>{{"name": "letters_after", "arguments": {{"letter": "{letter}"}}}}</tool_call>'


def test_tools_answer_until_a_turn_calls_none(letters: dict[str, Any], tmp_path: Path) -> None:
    trace = rolled_out(tmp_path, call("a"), "<tool_call>oops", "b", **letters)
    assert trace.stop_condition == "agent_completed" and trace.reward == 1.0
    roles = [node.message.role for node in trace.nodes]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert trace.nodes[2].message.content == "Look."
    assert trace.nodes[2].message.tool_calls[0].arguments == '{"letter": "a"}'
    answers = [message.content for message in trace.tool_messages]
    assert answers[0] == "b" and answers[1].startswith("Error: expected one tool call")


def test_tool_errors_are_shown_and_stop_conditions_are_checked_before_a_turn(
    letters: dict[str, Any], tmp_path: Path
) -> None:
    trace = rolled_out(tmp_path, call("z"), call("a"), call("b"), call("c"), **letters)
    assert trace.tool_messages[0].content.startswith("Error: ")
    assert "after z" in trace.tool_messages[0].content
    assert trace.stop_condition == "enough" and trace.num_turns == 4 and trace.ok


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ("raise", "all 2 traces failed; the first: .*no reward"),
        ("forge", "are not the tokens of the engine"),
        ("branch", "a rollout must have one branch, got 2"),
    ],
)
def test_a_taskset_that_is_wrong_stops_the_run(
    letters: dict[str, Any], tmp_path: Path, last: str, message: str
) -> None:
    with pytest.raises(RunError, match=message):
        rolled_out(tmp_path, last, **letters)


def test_a_trace_that_is_not_ok_is_left_out_of_loss_and_baseline(
    letters: dict[str, Any], tmp_path: Path
) -> None:
    output = scripted(game_trainer(tmp_path, **GROUP | letters), ["b", "b", "raise", "b"], task=0)
    assert [trace.ok for trace in traces(tmp_path)] == [True, True, False, True]
    assert output["advantages"].tolist() == [0.0] * 4
    assert output["sampled"].any(1).tolist() == [True, True, False, True]


def test_rollouts_out_of_tokens_count_unless_they_are_to_be_left_out(tmp_path: Path) -> None:
    turns = ["5", "5", "3 3", "3 3"]
    counted = scripted(game_trainer(tmp_path, **GROUP), turns)
    assert counted["sampled"].sum(1).tolist() == [2] * 4 and counted["advantages"][2] < -0.1
    left_out = scripted(game_trainer(tmp_path, mask_truncated_completions=True, **GROUP), turns)
    assert left_out["sampled"].sum(1).tolist() == [2, 2, 0, 0]
    assert left_out["advantages"].tolist() == [0.0] * 4


class InAContainer(Letters):
    NEEDS_CONTAINER = True


class WithRuntime(Letters):
    @vf.reward
    async def built(self, runtime: vf.Runtime) -> float:
        return 1.0


class WithIntercept(Letters):
    @vf.intercept
    async def watch(self, request: vf.Request) -> None:
        return None


class WithResponseStop(Letters):
    @vf.stop
    async def late(self, response: vf.Response) -> bool:
        return False


class Empty(LetterTaskset):
    def load(self) -> Iterator[Any]:
        yield from ()


class Endless(LetterTaskset):
    INFINITE = True


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (InAContainer, "need a container: InAContainer"),
        (WithRuntime, "WithRuntime.built needs one, and would be left out"),
        (WithIntercept, "@intercept: WithIntercept"),
        (WithResponseStop, "@stop must take a Trace: WithResponseStop.late"),
    ],
)
def test_tasks_that_training_cannot_roll_out_are_refused(
    letters: dict[str, Any], tmp_path: Path, kind: Any, message: str
) -> None:
    letters["taskset"].kind = kind
    with pytest.raises(ConfigError, match=message):
        game_trainer(tmp_path, **letters)


@pytest.mark.parametrize(
    ("taskset", "config", "message"),
    [
        (Empty(vf.TasksetConfig()), {}, "has no tasks"),
        (Endless(vf.TasksetConfig()), {}, "needs num_tasks"),
        (LetterTaskset(vf.TasksetConfig()), {"numbers": 3}, "with a taskset object"),
        ("text2sql-grpo-env", {"questions": "data/questions/dev.jsonl"}, "harness of its own"),
        ("no-such-package", {}, "not found"),
        ("higher-lower", {"numbers": "many"}, "numbers"),
    ],
)
def test_wrong_tasksets_are_refused(tmp_path: Path, taskset: Any, config: Any, message: str) -> None:
    num_tasks = 1 if taskset == "text2sql-grpo-env" else None
    with pytest.raises(ConfigError, match=message):
        game_trainer(tmp_path, taskset=taskset, taskset_config=config, num_tasks=num_tasks)


def scores(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Rewards and metrics of traces by their id."""
    found = [row["traces"][0] for row in rows]
    return {trace["id"]: str((trace["rewards"], trace["metrics"])) for trace in found}


@pytest.mark.thorough
def test_reward_rises_and_saved_traces_score_alike(tmp_path: Path) -> None:
    trainer = game_trainer(tmp_path, max_steps=15)
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert fmean(rewards[:3]) < 0.2 and fmean(rewards[-3:]) > 0.5

    path = tmp_path / "run" / "traces.jsonl"
    rows = json_lines(path)
    assert Counter(row["step"] for row in rows) == {step: 96 for step in range(15)}
    late = rows[-100:]  # the policy does all sorts of things by then
    path.write_text("".join(path.read_text("utf-8").splitlines(keepends=True)[-100:]), "utf-8")
    run_command(tmp_path, "vf-replay", str(tmp_path / "run"), "--no-rich", "--output-dir", "replay")
    assert scores(json_lines(tmp_path / "replay" / "traces.jsonl")) == scores(late)
    assert len(set(scores(late).values())) > 3

    options = ["--traces", str(tmp_path / "run"), "--out", str(tmp_path / "chats.jsonl")]
    assert main(["collect", *options, "--keep", "correct", "shortest_correct"]) == 0
    chat, chats = ChatFormat(game_tokenizer()), json_lines(tmp_path / "chats.correct.jsonl")
    learned = {tuple(chat_demonstration(row, chat).ids) for row in chats}
    found = [row["traces"][0]["nodes"] for row in late if row["traces"][0]["metrics"]["found"] == 1]
    assert learned == {tuple(token for node in nodes for token in node["token_ids"]) for nodes in found}
    assert len(found) > len(learned) == len(chats)


def test_a_resumed_run_leaves_each_rollout_once(tmp_path: Path) -> None:
    small = GROUP | {"save_strategy": "steps", "save_steps": 1}
    game_trainer(tmp_path, max_steps=2, **small).train()
    with pytest.raises(RunError, match="has earlier traces"):
        game_trainer(tmp_path, max_steps=2, **small).train()
    resumed = game_trainer(tmp_path, max_steps=3, **small)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    again = game_trainer(tmp_path, max_steps=3, **small)
    assert again.train(resume_from_checkpoint=True).global_step == 3  # no step was left
    (tmp_path / "run" / "checkpoint-3" / "optimizer.pt").write_bytes(b"torn")
    again = game_trainer(tmp_path, max_steps=3, **small)
    assert again.train(resume_from_checkpoint=True).global_step == 3  # from step 2
    rows = json_lines(tmp_path / "run" / "traces.jsonl")
    assert [row["step"] for row in rows] == [0] * 4 + [1] * 4 + [2] * 4
    assert len({row["traces"][0]["id"] for row in rows}) == len(rows)


def test_a_file_without_traces_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["collect", "--traces", str(tmp_path), "--out", str(tmp_path / "chats.jsonl")]
    assert main(options) == 1
    assert "--keep" in capsys.readouterr().err
    for content in (None, '{"example": 1}\n', "{\n", '{"traces": [{"nodes": 1}]}\n'):
        if content is not None:
            (tmp_path / "traces.jsonl").write_text(content, "utf-8")
        assert main([*options, "--keep", "correct"]) == 1
        error = capsys.readouterr().err
        assert "cannot read traces of verifiers" in error and str(tmp_path / "traces.jsonl") in error


def test_the_example_names_a_mistake(
    tmp_path: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model")
    example = repo_root / "examples" / "verifiers_taskset.py"
    words = ["--taskset", "nonesuch", "--model", str(tmp_path / "model"), "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(example), *words])
    with pytest.raises(SystemExit, match=r"^error: .*nonesuch"):
        runpy.run_path(str(example), run_name="__main__")


def test_the_example_runs(tmp_path: Path, repo_root: Path) -> None:
    find_packages()
    tokenizer = game_tokenizer()
    game_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    found = importlib.util.spec_from_file_location("example", repo_root / "examples" / "verifiers_taskset.py")
    assert found is not None and found.loader is not None
    example = importlib.util.module_from_spec(found)
    found.loader.exec_module(example)
    options = ["--taskset", "higher-lower", "--config", '{"numbers": 4}', "--model", str(tmp_path / "model")]
    options += ["--output-dir", str(tmp_path / "run"), "--max-steps", "1", "--lora"]
    options += ["--max-turn-tokens", "2", "--max-episode-tokens", "24", "--grpo", '{"num_generations": 4}']
    trainer = example.main(options)
    assert trainer.state.global_step == 1 and trainer.model.peft_config
    assert len(json_lines(tmp_path / "run" / "traces.jsonl")) == 8
