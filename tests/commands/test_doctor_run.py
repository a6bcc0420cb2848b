"""What went wrong in a run, found by its logs: each fault alone, and none in a run that learns."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from text2sql_grpo.commands import main
from text2sql_grpo.reporting.run_findings import RunLogs, findings

STEPS = 9


def logs(
    *, episodes: list[dict[str, Any]] | None = None, settings: dict[str, Any] | None = None, **columns: Any
) -> RunLogs:
    """Logs of a run that learns, but for these columns: a list, or a function of the step."""
    usual: dict[str, Any] = {
        "loss": lambda step: 0.0,
        "reward": lambda step: 0.1 + 0.08 * step,
        "frac_reward_zero_std": lambda step: 0.2,
        "episode/malformed": lambda step: 0.01,
        "episode/looks": lambda step: 0.5,
        "hack/rate": lambda step: 0.0,
        "entropy": lambda step: 0.3,
        "kl": lambda step: 0.01,
        "learning_rate": lambda step: 1e-4,
        "step/skipped": lambda step: 0.0,
    }
    usual |= columns
    steps = [{name: of(step) for name, of in usual.items()} | {"step": step + 1} for step in range(STEPS)]
    schedule = [{"step": step, "accuracy": {"accuracy": 0.3 + step / 100}} for step in (0, 4, 8)]
    return RunLogs(steps, episodes or [], schedule, settings or {})


def episode(step: int, example: int, reward: float, stop: str = "submitted") -> dict[str, Any]:
    return {
        "step": step,
        "example": f"q{example}",
        "reward": reward,
        "strict": reward > 0.5,
        "stop_reason": stop,
        "completion_ids": [1] * 10,
    }


def only(found: RunLogs) -> str:
    (finding,) = findings(found)
    return str(finding)


def test_a_run_that_learns_has_no_finding() -> None:
    assert findings(logs()) == []


@pytest.mark.parametrize(
    ("name", "of", "words"),
    [
        (
            "reward",
            lambda step: 0.9 - 0.08 * step,
            "the reward falls: 0.82 in the first third, 0.34 in the last",
        ),
        ("reward", lambda step: 0.5 + 0.01 * (-1) ** step, "flat since step 1 of 9"),
        ("reward", lambda step: 0.1 * min(step, 3) + 0.01 * (-1) ** step, "flat since step 4 of 9"),
        ("episode/malformed", lambda step: 0.05 * step, "malformed turns: 0.05 in the first third, 0.35"),
        ("episode/looks", lambda step: max(0.0, 0.5 - 0.1 * step), "exploratory queries die out"),
        ("hack/rate", lambda step: 0.04 * step, "carry a reward-hacking flag"),
        ("entropy", lambda step: 0.3 * 0.5**step, "the entropy collapsed"),
        ("kl", lambda step: 0.2 * step, "the policy left its start: KL"),
        ("learning_rate", lambda step: 5e-3, "lower grpo.learning_rate to 2e-4 for LoRA"),
        ("step/skipped", lambda step: float(step == 4), "skipped 1 step without"),
    ],
)
def test_each_fault_is_named_with_the_field_to_change(name: str, of: Any, words: str) -> None:
    text = only(logs(**{name: of}))
    assert words in text
    assert any(field in text for field in ("grpo.", "rewards.", "losses.", "grading.", "environment."))


def test_a_run_whose_episodes_were_all_masked_has_findings() -> None:
    masked = logs(reward=lambda step: None, **{"step/skipped": lambda step: 1.0})
    assert "skipped 9 steps without" in only(masked)


def test_groups_without_signal_are_counted_by_their_tokens() -> None:
    wrong = [episode(0, group, 0.0) for group in range(3) for _ in range(4)]
    right = [episode(0, 3, float(number % 2)) for number in range(4)]
    text = only(logs(episodes=wrong + right, frac_reward_zero_std=lambda step: 0.75))
    assert text.startswith("75% of the groups and 75% of the sampled tokens gave no gradient, 0 of 3 of them")
    assert "run sft first, set losses.gold to 0.2, or raise grpo.num_generations" in text
    trained = logs(
        episodes=wrong + right,
        settings={"sft": {"max_steps": 3}, "losses": {"gold": 0.3}},
        frac_reward_zero_std=lambda step: 0.75,
    )
    assert only(trained).partition("all right: ")[2].startswith("raise grpo.num_generations")
    easy = [episode(0, group, 1.0) for group in range(3) for _ in range(4)]
    text = only(logs(episodes=easy + right, frac_reward_zero_std=lambda step: 0.75))
    assert "take harder questions" in text


@pytest.mark.parametrize(
    ("stop", "field"),
    [
        ("turn_length", "environment.max_turn_tokens"),
        ("budget", "environment.max_episode_tokens"),
        ("max_turns", "environment.max_turns"),
    ],
)
def test_a_limit_is_named(stop: str, field: str) -> None:
    cut = [episode(0, 0, float(number % 2), stop if number < 2 else "submitted") for number in range(8)]
    assert field in only(logs(episodes=cut))


def test_a_gain_within_the_noise_of_a_step() -> None:
    episodes = [episode(step, 10 * step + one, float(one % 2)) for step in range(STEPS) for one in range(2)]
    text = only(logs(episodes=episodes, reward=lambda step: 0.45 + 0.02 * step))
    assert "2 questions a step: its mean reward has a standard error of 0.36" in text


def test_held_out_accuracy_that_falls() -> None:
    good = logs()
    points = [{"step": step, "accuracy": {"accuracy": each}} for step, each in ((0, 0.4), (4, 0.5), (8, 0.3))]
    assert "held-out accuracy fell from 40% to 30%" in only(RunLogs(good.steps, [], points, {}))
    points[-1]["accuracy"]["accuracy"] = 0.45
    assert "best at step 4 (50%; 45% at 8)" in only(RunLogs(good.steps, [], points, {}))
    assert "set evaluation.every and set data.dev" in only(RunLogs(good.steps, [], [], {}))
    settings: dict[str, Any] = {"evaluation": {"every": 4, "keep": "best"}, "data": {"dev": "dev.jsonl"}}
    assert findings(RunLogs(good.steps, [], points, settings)) == []  # step 4 was kept
    points[-1]["accuracy"]["accuracy"] = 0.3
    settings["losses"] = {"kept": 0.5}
    text = only(RunLogs(good.steps, [], points, settings))
    assert text == "held-out accuracy fell from 40% to 30%: lower grpo.learning_rate"
    assert "lower evaluation.every" in only(RunLogs(good.steps, [], [], settings))


@pytest.mark.parametrize(
    ("columns", "settings", "change"),
    [
        (
            {"reward": lambda step: 0.9 - 0.08 * step},
            {"grpo": {"beta": 0.2}},
            "lower grpo.learning_rate",
        ),
        (
            {"entropy": lambda step: 0.3 * 0.5**step},
            {"grpo": {"epsilon_high": 0.28}},
            "raise grpo.temperature",
        ),
        ({"episode/looks": lambda step: max(0.0, 0.5 - 0.1 * step)}, {}, "raise grpo.temperature"),
        (
            {"episode/looks": lambda step: max(0.0, 0.5 - 0.1 * step)},
            {"rewards": {"turn_cost": 0.02}},
            "lower rewards.turn_cost, or raise grpo.temperature",
        ),
        (
            {"hack/rate": lambda step: 0.04 * step},
            {"rewards": {"preset": "strict"}},
            "raise grading.test_databases",
        ),
        (
            {"episode/malformed": lambda step: 0.05 * step},
            {"environment": {"instructions": True}},
            "lower grpo.learning_rate",
        ),
    ],
)
def test_advice_does_not_name_what_the_run_does(
    columns: dict[str, Any], settings: dict[str, Any], change: str
) -> None:
    (finding,) = findings(logs(settings=settings, **columns))
    assert finding.change == change


@pytest.mark.parametrize("reward", [None, 0.0])
def test_a_limit_that_explains_the_zero_variance_is_the_only_finding(reward: float | None) -> None:
    cut = [episode(step, 0, 0.0, "turn_length") | {"reward": reward} for step in range(8) for _ in range(4)]
    found = logs(episodes=cut, frac_reward_zero_std=lambda step: 1.0, reward=lambda step: reward)
    assert only(found).endswith("raise environment.max_turn_tokens")


def test_the_verb_prints_what_to_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = logs(kl=lambda step: 0.2 * step)
    lines = "".join(json.dumps(row) + "\n" for row in good.steps)
    (tmp_path / "metrics.jsonl").write_text(lines, "utf-8")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"grpo": {"beta": 0.1}}), "utf-8")
    assert main(["doctor", "--run", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "9 steps, 0 episodes\n1. the policy left its start" in out and "raise grpo.beta" in out
    assert main(["doctor", "--run", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["change"].startswith("lower grpo.learning_rate")
    assert main(["doctor", "--run", str(tmp_path / "nothing")]) == 1
    assert "no training steps" in capsys.readouterr().err


def test_a_temperature_that_spoils_the_answers_is_named_as_the_cause() -> None:
    rows = [episode(step, 0, 0.0, "turn_length") for step in range(STEPS)]
    hot = RunLogs(logs().steps, rows, logs().schedule, {"grpo": {"temperature": 2.0}})
    assert "lower grpo.temperature to 1 or below" in only(hot)
    warm = RunLogs(logs().steps, rows, logs().schedule, {"grpo": {"temperature": 1.0}})
    assert "temperature to 1" not in str(findings(warm)[0])
