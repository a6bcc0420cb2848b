"""Findings on a run by its logs: faults and gaps, for `doctor --run` and the run's page."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from text2sql_grpo.environment.episode import CURES, CUT
from text2sql_grpo.phrases import many
from text2sql_grpo.run_folder import read_episodes, read_metrics, read_schedule, read_settings

Record = dict[str, Any]
Column = list[float]

MIN_STEPS = 3  # for a trend
HOT = 1.2  # temperature of sampling, above which unlikely tokens spoil most answers of a small model
FLAT_STEPS = 6  # without a rise
CLEAR = 2.0  # standard errors


@dataclass(frozen=True)
class Finding:
    """One thing that went wrong, or that the logs cannot show.

    Attributes:
        what: The fault, with its figures.
        change: Config field to change, and how.
        weight: Share of the run that it cost, in [0, 1], by which findings are sorted.
    """

    what: str
    change: str
    weight: float

    def __str__(self) -> str:
        return f"{self.what}: {self.change}"


@dataclass(frozen=True)
class RunLogs:
    """Logs of a run.

    Attributes:
        steps: Lines of `metrics.jsonl` of optimiser steps.
        episodes: Lines of `rollouts.jsonl`, see `read_episodes`.
        schedule: Lines of `evaluation_schedule.jsonl`.
        settings: The config.
    """

    steps: Sequence[Record]
    episodes: Sequence[Record]
    schedule: Sequence[Record]
    settings: Record

    def column(self, name: str) -> Column:
        """Values of a metric by step, without the steps that lack it."""
        return [float(row[name]) for row in self.steps if row.get(name) is not None]

    def value(self, field: str) -> Any:
        """Value of `section.name` in the config; None if absent."""
        section, name = field.split(".")
        return (self.settings.get(section) or {}).get(name)

    def to_set(self, field: str, wanted: Any = None) -> str:
        """Advice to set a field, of a number to at least `wanted`; empty if the config does so already."""
        value = self.value(field)
        are_numbers = isinstance(value, int | float) and isinstance(wanted, int | float)
        if value and (wanted is None or (value >= wanted if are_numbers else value == wanted)):
            return ""
        return f"set {field}" if wanted is None else f"set {field} to {str(wanted).lower()}"


def _either(*advice: str) -> str:
    """Join advice that is not empty by "or"."""
    left = list(filter(None, advice))
    return ", ".join([*left[:-1], f"or {left[-1]}"]) if len(left) > 1 else "".join(left)


def read_logs(run: Path) -> RunLogs:
    """Read the logs of a run folder; those that are absent are empty.

    Raises:
        DataError: A file cannot be read.
    """
    return RunLogs(
        steps=[row for row in read_metrics(run) if "loss" in row],
        episodes=read_episodes(run),
        schedule=read_schedule(run),
        settings=read_settings(run),
    )


def findings(logs: RunLogs) -> list[Finding]:
    """List the faults of a run that leave something to change, the most costly first."""
    checks = (_without_signal, _policy, _reward, _habits, _noise, _held_out)
    found = [finding for check in checks for finding in check(logs) if finding.change]
    return sorted(found, key=lambda finding: -finding.weight)  # of equal weights, causes come first


def grouped(episodes: Iterable[Record]) -> list[list[Record]]:
    """Episodes of one question in one step."""
    groups: dict[tuple[int, str], list[Record]] = {}
    for row in episodes:
        groups.setdefault((row["step"], row["example"]), []).append(row)
    return list(groups.values())


def _without_signal(logs: RunLogs) -> Iterator[Finding]:
    """Rollouts in zero-variance groups; or their cause: a high temperature, or else a limit."""
    temperature = float(logs.value("grpo.temperature") or 1.0)
    right = sum(bool(row["strict"]) for row in logs.episodes)
    if temperature > HOT and right < 0.1 * len(logs.episodes):
        what = f"{right} of {len(logs.episodes)} episodes are right at a temperature of {temperature:g}"
        yield Finding(what, "lower grpo.temperature to 1 or below", 1.0)
        return
    limits = list(_limits(logs))
    yield from limits
    share = _zero_variance(logs)
    alike = [group for group in grouped(logs.episodes) if len({row["reward"] for row in group} - {None}) < 2]
    at_limit = [row["stop_reason"] in CURES for group in alike for row in group]
    if share <= 0.4 or (limits and 2 * sum(at_limit) > len(at_limit)):
        return
    all_right = sum(all(row["strict"] for row in group) for group in alike)
    tokens = sum(len(row.get("completion_ids") or ()) for group in alike for row in group)
    total = sum(len(row.get("completion_ids") or ()) for row in logs.episodes)
    spent = f" and {tokens / total:.0%} of the sampled tokens" if total else ""
    sft = "" if logs.settings.get("sft") else "run sft first"
    change = _either(sft, logs.to_set("losses.gold", 0.2), "raise grpo.num_generations or temperature")
    change += "; questions that are answered sometimes teach most"
    if 2 * all_right > len(alike):
        change = "take harder questions, or raise grpo.temperature"
    yield Finding(
        f"{share:.0%} of the groups{spent} gave no gradient, {all_right} of {len(alike)} of them all right",
        change,
        0.8 * share,  # mostly an effect: causes come first
    )


def _zero_variance(logs: RunLogs) -> float:
    shares = logs.column("frac_reward_zero_std")
    return statistics.fmean(shares) if shares else 0.0


def _limits(logs: RunLogs) -> Iterator[Finding]:
    """Episodes at a limit of tokens or turns."""
    texts = {reason: f"were cut by a limit of tokens ({reason}) and are masked" for reason in CUT}
    texts["max_turns"] = "used all turns without an answer"
    stops = Counter(row["stop_reason"] for row in logs.episodes)
    total = stops.total()
    for reason, text in texts.items():
        if stops[reason] > 0.1 * total:
            what = f"{stops[reason]} of {total} episodes {text}"
            yield Finding(what, CURES[reason], stops[reason] / total)


def _reward(logs: RunLogs) -> Iterator[Finding]:
    """Rewards that fall, or stop to rise."""
    rewards, rates = logs.column("reward"), logs.column("learning_rate")
    steps = [row["step"] for row in logs.steps if row.get("reward") is not None]
    starts = range(len(rewards) - FLAT_STEPS + 1)
    flat = next((at for at in starts if trend(rewards[at:]) < 1.0), len(rewards))
    if trend(rewards) < -CLEAR:
        what = f"the reward falls: {_ends(rewards)}"
        yield Finding(what, _either("lower grpo.learning_rate", logs.to_set("grpo.beta", 0.1)), 0.9)
    elif starts and flat <= len(rewards) // 2 and _zero_variance(logs) < 0.9:  # else without a gradient
        what = f"the reward is flat since step {steps[flat]} of {steps[-1]} ({_ends(rewards[flat:])})"
        change = _either("raise grpo.learning_rate", logs.to_set("losses.gold", 0.2), "stop earlier")
        yield Finding(what, change, 0.8 * (1 - flat / len(rewards)))
    if skipped := sum(logs.column("step/skipped")):
        what = f"skipped {many(int(skipped), 'step')} without a finite gradient"
        yield Finding(what, "lower grpo.learning_rate", skipped / len(logs.steps))
    if rates and max(rates) > 1e-3:
        what = f"the learning rate reached {max(rates):g}"
        yield Finding(what, "lower grpo.learning_rate to 2e-4 for LoRA, 1e-5 for all weights", 0.95)


def _habits(logs: RunLogs) -> Iterator[Finding]:
    """Malformed turns, exploratory queries and flags over the run."""
    malformed, looks = logs.column("episode/malformed"), logs.column("episode/looks")
    flagged = logs.column("hack/rate")
    if malformed and _late(malformed) > max(0.1, _early(malformed) + 0.05):
        what = f"malformed turns: {_ends(malformed)} an episode"
        instructions = "" if logs.settings.get("sft") else logs.to_set("environment.instructions", True)
        change = _either("lower grpo.learning_rate", instructions)
        yield Finding(what, change, min(1.0, _late(malformed)))
    if looks and _early(looks) > 0.1 and _late(looks) < 0.3 * _early(looks):
        what = f"exploratory queries die out: {_ends(looks)} an episode"
        cost = "lower rewards.turn_cost" if logs.value("rewards.turn_cost") else ""
        yield Finding(what, _either(cost, "raise grpo.temperature"), 0.5)
    if flagged and _late(flagged) > 0.1:
        what = f"{_late(flagged):.0%} of the last episodes carry a reward-hacking flag"
        change = _either("raise grading.test_databases", logs.to_set("rewards.preset", "strict"))
        yield Finding(what, change, 0.7)


def _policy(logs: RunLogs) -> Iterator[Finding]:
    """Entropy and distance from the reference."""
    entropy, kl = logs.column("entropy"), logs.column("kl")
    if entropy and _late(entropy) < 0.02 and _late(entropy) < 0.3 * _early(entropy):
        what = f"the entropy collapsed: {_ends(entropy)} nats a token"
        change = _either("raise grpo.temperature", logs.to_set("grpo.epsilon_high", 0.28))
        yield Finding(what, change, 0.7)
    if kl and _late(kl) > 0.5:
        what = f"the policy left its start: KL {_ends(kl)} nats a token"
        change = "lower grpo.learning_rate, or raise grpo.beta"
        if len(logs.steps) > 200 and (advice := logs.to_set("grpo.sync_ref_model", True)):
            what += ", and the reference is still the start"
            change += f"; with a reference this old, {advice}"
        yield Finding(what, change, min(1.0, _late(kl)))


def _noise(logs: RunLogs) -> Iterator[Finding]:
    """Gain of the run within the noise of a step, by the spread between questions."""
    rewards = logs.column("reward")
    rewarded = [row for row in logs.episodes if row.get("reward") is not None]
    means = [statistics.fmean(row["reward"] for row in group) for group in grouped(rewarded)]
    if len(rewards) < 2 or len(means) < 2 * len(rewards):
        return
    questions = len(means) / len(rewards)
    error = statistics.stdev(means) / math.sqrt(questions)
    gain = abs(_late(rewards) - _early(rewards))
    thirds = max(1, len(rewards) // 3)
    if error >= 0.1 and gain <= CLEAR * error * math.sqrt(2 / thirds):
        yield Finding(
            f"{questions:.0f} questions a step: its mean reward has a standard error of {error:.2f}, the run "
            f"moved by {gain:.2f}",
            "raise grpo.gradient_accumulation_steps or per_device_train_batch_size",
            0.4,
        )


def _held_out(logs: RunLogs) -> Iterator[Finding]:
    """Held-out accuracy during training against its start."""
    points = [(row["step"], row["accuracy"]["accuracy"]) for row in logs.schedule]
    if not points:
        what = "no held-out question was asked during training"
        change = " and ".join(filter(None, (logs.to_set("evaluation.every"), logs.to_set("data.dev"))))
        yield Finding(what, change or "lower evaluation.every", 0.05)
        return
    (_, start), (last, end) = points[0], points[-1]
    best_step, best = max(points, key=lambda point: point[1])
    if end < start:
        what = f"held-out accuracy fell from {start:.0%} to {end:.0%}"
        change = _either(
            logs.to_set("evaluation.keep", "best"),
            "lower grpo.learning_rate",
            logs.to_set("losses.kept", 0.2),
        )
        yield Finding(what, change, 0.85)
    elif best > end:
        what = f"held-out accuracy was best at step {best_step} ({best:.0%}; {end:.0%} at {last})"
        yield Finding(what, logs.to_set("evaluation.keep", "best"), 0.3)


def trend(values: Sequence[float]) -> float:
    """Slope of a line through the values, in its standard errors; 0 of fewer than `MIN_STEPS` values.

    >>> trend([0.0, 1.0, 2.0, 3.1]) > 2, trend([1.0, 1.0, 1.0, 1.0])
    (True, 0.0)
    """
    if len(values) < MIN_STEPS or len(set(values)) == 1:
        return 0.0
    (slope, _), covariance = np.polyfit(range(len(values)), values, 1, cov=True)
    error = math.sqrt(covariance[0, 0])
    return float(slope / error) if error > 1e-12 else math.copysign(math.inf, slope)


def _early(values: Column) -> float:
    return statistics.fmean(values[: max(1, len(values) // 3)])


def _late(values: Column) -> float:
    return statistics.fmean(values[-max(1, len(values) // 3) :])


def _ends(values: Column) -> str:
    return f"{_early(values):z.2f} in the first third, {_late(values):z.2f} in the last"
