"""Rewards that a user hands in: functions and names, in Python, YAML and on the command line."""

import functools
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scripted_policy import ask, shop_environment
from tests.tiny_run import json_lines, write_config
from text2sql_grpo.commands import main
from text2sql_grpo.config import load_config
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.environment.session import EnvironmentSettings
from text2sql_grpo.errors import ConfigError, RewardError, ServerGoneError
from text2sql_grpo.grading import Grader, Verdict
from text2sql_grpo.rewards import (
    Answer,
    Judge,
    Results,
    RewardFunction,
    RewardMix,
    reward,
    reward_mix,
)
from text2sql_grpo.rewards.functions import REWARD_FUNCTIONS

RIGHT = "SELECT staff FROM branch WHERE code = 'LIS-02'"
WRONG = "SELECT staff FROM branch"

Judged = Callable[..., Answer]


def short(episode: Episode) -> float:
    return float(len(episode.final_sql or "") < 30)


def rows_read(results: Results, verdict: Verdict) -> bool:
    return verdict.executes and results.predicted is not None and len(results.predicted.rows) > 1


@reward(range=(-1, 0))
def brevity(episode: Episode, per_character: float = 0.01) -> float:
    return -min(len(episode.final_sql or "") * per_character, 1.0)


def trl_short(completions: Any, **columns: Any) -> list[float]:
    return [float(len(turns[-1]["content"]) < 30) for turns in completions]


@pytest.fixture
def judged(tmp_path: Path) -> Judged:
    """Plays turns about a question and judges the episode with some rewards."""
    environment = shop_environment(tmp_path, EnvironmentSettings(instructions=False, max_turns=4))

    def play(rewards: Any, *turns: str) -> Answer:
        session = environment.session(ask("Lisbon?", RIGHT, family="lookup"))
        session.start()
        for turn in turns or [f"<answer>{WRONG}</answer>"]:
            session.step(turn)
        session.episode.completion_ids = [3, 4, 5]
        judge = Judge(Grader(environment.executor), environment.executor, reward_mix(rewards))
        return judge.judge(session.episode, environment.databases.address("shop"))

    return play


@pytest.mark.parametrize(
    ("given", "weights"),
    [
        (None, {"execution": 1.0}),
        (short, {"execution": 1.0, "short": 0.1}),
        ([short, brevity], {"execution": 1.0, "short": 0.1, "brevity": 0.1}),
        ([(short, 0.5), "turn_cost"], {"execution": 1.0, "short": 0.5, "turn_cost": 0.1}),
        ((short, 0.2), {"execution": 1.0, "short": 0.2}),
        (["execution", short], {"execution": 1.0, "short": 0.1}),
        ([("execution", 3), (trl_short, 2)], {"execution": 3, "trl_short": 2}),
        ({short: 0.3, "executes": 0.1}, {"execution": 1.0, "short": 0.3, "executes": 0.1}),
        ({"preset": "strict", short: 0.3}, {"execution": 1.0, "short": 0.3}),
        ([functools.partial(brevity.function, per_character=0.001)], None),
        ([RewardFunction("terse", short)], {"execution": 1.0, "terse": 0.1}),
        (RewardMix({short: 0.9}), {"execution": 1.0, "short": 0.9}),
    ],
)
def test_what_a_trainer_takes_as_rewards(given: Any, weights: dict[str, float] | None) -> None:
    assert reward_mix(given).weights == (weights or {"execution": 1.0, "brevity": 0.1})


def test_functions_are_scored_and_logged_by_name(judged: Judged) -> None:
    answer = judged([(short, 0.5), rows_read, brevity])
    assert answer.scores == {"execution": 0.0, "short": 1.0, "rows_read": 1.0, "brevity": -0.24}
    assert answer.reward == pytest.approx(0.5 + 0.1 - 0.024)
    assert answer.record()["scores"] == answer.scores
    assert brevity(answer.episode) == -0.24, "a function with a range can be called as before"


def test_a_right_answer_is_paid_more_than_any_wrong_one(judged: Judged) -> None:
    wrong = judged(short).reward
    assert wrong is not None and wrong < (judged(short, f"<answer>{RIGHT}</answer>").reward or 0)


def test_a_function_with_the_signature_of_trl_gets_the_episode_in_lists_of_one(judged: Judged) -> None:
    got: dict[str, Any] = {}

    def spy(prompts: Any, completions: Any, gold_sql: Any, **columns: Any) -> list[float]:
        got.update(columns, prompts=prompts, completions=completions, gold=gold_sql)
        return [0.5]

    answer = judged(spy, f"<sql>{WRONG}</sql>", f"<answer>{RIGHT}</answer>")
    messages = answer.episode.messages
    assert answer.scores == {"execution": 1.0, "spy": 0.5}
    assert got["prompts"] == [messages[:1]] and messages[0]["role"] == "user"
    assert got["completions"] == [messages[1:]] and messages[1]["role"] == "assistant"
    assert (got["gold"], got["question"], got["family"]) == ([RIGHT], ["Lisbon?"], ["lookup"])
    assert got["completion_ids"] == [[3, 4, 5]]


def test_a_function_of_columns_alone_has_the_signature_of_trl(judged: Judged) -> None:
    def columns(gold_sql: Any, **others: Any) -> list[float]:
        return [float(gold_sql == [RIGHT] and others["completion_ids"] == [[3, 4, 5]])]

    def optional(episode: Episode, **unused: Any) -> float:
        return float(not unused)

    scores = judged([columns, optional]).scores
    assert scores == {"execution": 0.0, "columns": 1.0, "optional": 1.0}


def test_a_published_function_of_trl_is_a_reward(judged: Judged) -> None:
    from trl.rewards import think_format_reward

    scores = judged([think_format_reward], f"<think>easy</think><answer>{RIGHT}</answer>").scores
    assert scores == {"execution": 1.0, "think_format_reward": 1.0}


def test_none_in_the_signature_of_trl_leaves_the_score_out(judged: Judged) -> None:
    def sometimes(completions: Any) -> list[float | None]:
        return [None]

    assert judged([short, sometimes]).scores == {"execution": 0.0, "short": 1.0}
    with pytest.raises(RewardError, match="sometimes must return a number, got None"):
        judged([RewardFunction("sometimes", sometimes, (-1, -0.5), (-1, -0.5))])


@pytest.mark.parametrize(
    ("value", "score"),
    [(True, 1.0), (1, 1.0), (torch.tensor(0.25), 0.25), (torch.ones(1).numpy()[0], 1.0)],
)
def test_scores_of_other_types_of_numbers(value: Any, score: float, judged: Judged) -> None:
    def own(episode: Any) -> Any:
        return value

    def trl(prompts: Any) -> Any:
        return torch.tensor([float(value)])

    assert judged([own, trl]).scores == {"execution": 0.0, "own": score, "trl": score}


async def asynchronous(episode: Episode) -> float:
    return 0.0


def no_parameter() -> float:
    return 0.0


def wrong_parameter(question: str) -> float:
    return 0.0


def mixed(completions: Any, episode: Episode) -> float:
    return 0.0


def wrapper(*args: Any, **kwargs: Any) -> float:
    return 0.0


def execution(episode: Episode) -> float:
    return 0.0


def absent_column(completions: Any, solution: Any) -> list[float]:
    return [0.0]


def adjustment(episode: Episode) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([3], "a function with a name, got 3"),
        ([lambda episode: 0.0], r"with a name, got <.*<lambda>.* RewardFunction\(NAME, function\)"),
        ([(short, 0.1, 0.2)], r"a function with a name, got \(<function .* a pair \(function, weight\)"),
        ([(short, "much")], "the weight of short must be a finite number, got 'much'"),
        ([(short, math.nan)], "the weight of short must be a finite number, got nan"),
        (["shrot"], "unknown name 'shrot': known: execution,"),
        (["executed"], "did you mean executes?"),
        ([short, short], "the name short is taken"),
        ([short, replace(brevity, name="short")], "the name short is taken"),
        ([adjustment], "the name adjustment is taken"),
        ([execution], "the name execution is taken"),
        ([RewardFunction("execution", short)], "the name execution is taken"),
        ([wrapper], "wrapper must take .*: it takes none of these"),
        ([no_parameter], "no_parameter must take parameters of episode, verdict, results, or of TRL's"),
        ([wrong_parameter], "missing a required argument: 'question'"),
        ([mixed], "it takes episode next to TRL's: one kind or the other"),
        ([absent_column], "absent_column must take .* columns id, database, .*: missing .*'solution'"),
        ([asynchronous], "asynchronous must not be asynchronous: write def"),
        ([(short, 1.0)], "a wrong one can earn 1 and a right one as little as 1; lower short: 1.0"),
        ([(brevity, -1.0)], "a wrong one can earn 1 and a right one as little as 1; lower brevity: -1.0"),
        ({short: 2.0, "clip": [0, 1]}, "lower short: 2.0"),
        ({"preset": "arctic", short: 0.1}, "a wrong one can earn"),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_runs(given: Any, words: str) -> None:
    pattern = words if ".*" in words else re.escape(words)
    with pytest.raises(ConfigError, match=pattern):
        reward_mix(given)


@pytest.mark.parametrize("bounds", [(1, 0), (0, math.inf), (0, math.nan), 1, (0, 1, 2), ("0", "1")])
def test_a_range_must_be_two_finite_numbers(bounds: Any) -> None:
    with pytest.raises(ConfigError, match="the range of short must be two finite numbers"):
        reward(range=bounds)(short)


def test_a_declared_range_decides_which_weights_are_refused(judged: Judged) -> None:
    @reward(when_wrong=(0, 0))
    def bonus(verdict: Verdict) -> float:
        return 0.5 * verdict.strict

    assert judged([(bonus, 100.0)], f"<answer>{RIGHT}</answer>").reward == 51.0


def failing(episode: Episode) -> float:
    return 1 / 0


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, "own must be from 0 to 1, got 3.0 .*: correct the score, or declare its range"),
        (math.nan, "own must be from 0 to 1, got nan"),
        (math.inf, "own must be from 0 to 1, got inf"),
        ("0.5", "own must return a number, got '0.5'"),
        (None, "own must return a number, got None"),
        ([0.5], r"own must return a number, got \[0.5\]"),
        (torch.zeros(2), "own must return a number, got tensor"),
    ],
)
def test_a_score_that_is_no_number_in_its_range_is_named_with_the_episode(
    value: Any, words: str, judged: Judged
) -> None:
    def own(episode: Any) -> Any:
        return value

    with pytest.raises(RewardError, match=rf"{words}.*") as raised:
        judged(own)
    assert "question Lisbon?, reason row_count" in str(raised.value)


@pytest.mark.parametrize("value", [0.5, None, [], [0.5, 0.5], "0.5", {"a": 1, "b": 2}])
def test_a_list_of_the_wrong_length_is_named_with_the_episode(value: Any, judged: Judged) -> None:
    def own(completions: Any) -> Any:
        return value

    with pytest.raises(RewardError, match=r"own must return a list of 1 score .* \(question Lisbon\?"):
        judged(own)


def test_what_a_function_raises_is_named_with_its_line_and_chained(judged: Judged) -> None:
    words = r"failing raised ZeroDivisionError: .*rewards.py:\d+, question Lisbon"
    with pytest.raises(RewardError, match=words) as raised:
        judged(failing)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_a_server_that_is_gone_is_not_the_fault_of_the_function(judged: Judged) -> None:
    def reads(results: Results) -> float:
        raise ServerGoneError("it does not answer")

    with pytest.raises(ServerGoneError):
        judged(reads)


OWN = """
from text2sql_grpo.rewards import reward
from pathlib import Path

def short(episode):
    return float(len(episode.final_sql or "") < 30)

@reward(range=(-1, 0))
def brevity(episode):
    return -min(len(episode.final_sql or "") / 100, 1)

def after_a_step(episode):
    return 1 / (not Path("run/rollouts.jsonl").exists())

def wrong(query):
    return 0.0

number = 3
"""


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the module `own_rewards` and the package `own_package` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "own_rewards.py").write_text(OWN)
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "rewards.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("raise OSError('no such drive')")
    return tmp_path


SMALLEST = "model: {path: m}\ndata: {databases: d, train: t.jsonl}\n"


def test_a_config_names_functions_by_module(own_modules: Path) -> None:
    path = own_modules / "run.yaml"
    own = "own_rewards:short: 0.1, own_package.rewards:brevity: 0.2"
    path.write_text(f"{SMALLEST}rewards: {{execution: 1.0, {own}}}")
    rewards = load_config(path).reward_mix()
    assert rewards.weights == {"execution": 1.0, "short": 0.1, "brevity": 0.2}
    assert rewards.bounds() == (0.1, 0.8)


def test_the_command_line_names_functions_by_module(own_modules: Path) -> None:
    path = own_modules / "run.yaml"
    path.write_text(f"{SMALLEST}rewards: {{execution: 2.0}}")
    options = ["--rewards.own_package.rewards:short", "0.5", "--rewards.turn_cost=0.1"]
    weights = load_config(path, options).reward_mix().weights
    assert weights == {"execution": 2.0, "short": 0.5, "turn_cost": 0.1}


def test_modules_beside_the_config_are_found(own_modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = own_modules / "run.yaml"
    path.write_text(f"{SMALLEST}rewards: {{own_rewards:short: 0.1}}")
    (own_modules / "elsewhere").mkdir()
    monkeypatch.chdir(own_modules / "elsewhere")
    assert load_config(path).reward_mix().weights == {"execution": 1.0, "short": 0.1}


def test_a_config_is_read_without_the_modules_of_its_rewards(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{SMALLEST}rewards: {{absent_module:short: 0.1}}")
    assert load_config(path).rewards == {"absent_module:short": 0.1}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent_module:short", "cannot import absent_module:short: ModuleNotFoundError"),
        ("own_rewards:shrot", "cannot import own_rewards:shrot: AttributeError"),
        ("own_rewards:", "cannot import own_rewards:: AttributeError"),
        ("own_broken:short", "cannot import own_broken:short: OSError: no such drive"),
        ("own_rewards:number", "a function with a name, got 3"),
        ("own_rewards:wrong", "missing a required argument: 'query'"),
    ],
)
def test_a_run_with_a_wrong_function_is_refused_at_once(
    name: str, words: str, own_modules: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_modules / "run.yaml").write_text(SMALLEST)
    assert main(["train", "--config", "run.yaml", f"--rewards.{name}", "0.1"]) == 1
    assert words in capsys.readouterr().err


def test_two_functions_of_one_name_are_refused(own_modules: Path) -> None:
    with pytest.raises(ConfigError, match="the name short is taken"):
        RewardMix({"own_rewards:short": 0.1, "own_package.rewards:short": 0.1})


@pytest.mark.thorough
def test_a_run_whose_function_raises_keeps_its_steps_and_resumes_when_it_is_corrected(
    own_modules: Path, started_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, rewards = {"path": started_model, "dtype": "float32"}, {"own_rewards:after_a_step": 0.1}
    config = write_config(own_modules, sft=None, model=model, rewards=rewards)
    assert main(["train", "--config", str(config)]) == 1
    error = capsys.readouterr().err
    assert "after_a_step raised ZeroDivisionError" in error and "own_rewards.py:" in error
    assert "checkpoint-1 holds the steps before" in error
    assert len(json_lines(own_modules / "run" / "rollouts.jsonl")) == 16

    (own_modules / "own_rewards.py").write_text("def after_a_step(episode):\n    return 1.0\n")
    del sys.modules["own_rewards"]
    assert main(["train", "--config", str(config), "--resume", "auto"]) == 0
    rows = json_lines(own_modules / "run" / "metrics.jsonl")
    assert [row["rewards/after_a_step/mean"] for row in rows if "reward" in row] == [1.0, 1.0]


def test_the_page_on_rewards_lists_the_built_in_ones(repo_root: Path) -> None:
    page = (repo_root / "docs" / "rewards.md").read_text("utf-8")
    rows = [
        f"| `{name}` | {(one.function.__doc__ or '').splitlines()[0].rstrip('.')} | "
        f"{bounds(one.range_when_wrong)} | {bounds(one.range_when_right)} |"
        for name, one in REWARD_FUNCTIONS.items()
    ]
    assert page.partition("| --- | --- | --- | --- |\n")[2].splitlines() == rows


def bounds(limits: tuple[float, float]) -> str:
    return " to ".join(f"{bound:g}" for bound in sorted({*limits}))


def test_the_functions_of_the_page_on_rewards_are_scored(repo_root: Path, judged: Judged) -> None:
    page = (repo_root / "docs" / "rewards.md").read_text("utf-8")
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    look = "<sql>SELECT 1 FROM branch WHERE city = 'Rome'</sql>"
    answer = judged([names["short"], names["empty_results"]], look, f"<answer>{RIGHT}</answer>")
    assert answer.scores == {"execution": 1.0, "short": 1.0, "empty_results": -1.0}
