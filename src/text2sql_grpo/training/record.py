"""Records of a batch: episodes, rewards, lengths, families; and the times of a step."""

import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from text2sql_grpo.environment.episode import CURES, CUT
from text2sql_grpo.reliability.ranks import gather, is_main
from text2sql_grpo.rollout.stages import Stages
from text2sql_grpo.training.parts import Batch, Record

logger = logging.getLogger(__name__)

STAGES = ("select", "prefill", "decode", "tools", "grade", "update")


class Episodes(Record):
    """Writer of a line for every rollout that was played, in order of ranks, on rank 0.

    Field `step`: number of optimiser steps done before, from 0.
    """

    def __init__(self, write: Callable[[Iterable[Mapping[str, Any]]], None]) -> None:
        self._write = write

    def record(self, batch: Batch, inputs: Mapping[str, torch.Tensor], step: int) -> None:
        rows = [row.record for row in batch.rows if row.record is not None]
        gathered = gather([{**record, "step": step} for record in rows])
        if is_main():
            self._write(record for records in gathered for record in records)


class Rewards(Record):
    """Means over the batch of all ranks, under TRL's names: rewards, groups without variance, lengths.

    Warns of the first batch without a gradient. The figures of `Judged.metrics` are averaged, too.
    """

    _has_warned = False

    def record(self, batch: Batch, inputs: Mapping[str, torch.Tensor], step: int) -> None:
        groups = [[one.reward for one in group] for group in batch.groups().values()]
        rewards = [one.reward for one in batch.judged if one.reward is not None]
        columns = {("reward", "reward_std"): rewards}
        for scores in (one.scores for one in batch.judged if one.scores is not None):
            for name, score in scores.items():
                columns.setdefault((f"rewards/{name}/mean", f"rewards/{name}/std"), []).append(score)
        metrics: dict[str, float] = {}
        for (mean, deviation), values in columns.items():
            metrics[mean] = statistics.fmean(values) if values else math.nan
            metrics[deviation] = statistics.stdev(values) if len(values) > 1 else math.nan
        metrics["frac_reward_zero_std"] = statistics.fmean(map(has_zero_variance, groups))
        for name in batch.judged[0].metrics:
            metrics[name] = statistics.fmean(one.metrics[name] for one in batch.judged)
        lengths = [one.num_sampled for one in batch.judged]
        is_cut = [one.stop_reason in CUT for one in batch.judged]
        ended = [length for length, cut in zip(lengths, is_cut, strict=True) if not cut] or [0]
        for name, of in (("mean", statistics.fmean), ("min", min), ("max", max)):
            metrics[f"completions/{name}_length"] = float(of(lengths))
            metrics[f"completions/{name}_terminated_length"] = float(of(ended))
        metrics["completions/clipped_ratio"] = statistics.fmean(is_cut)
        self.figures = metrics
        if not (self._has_warned or inputs["advantages"].any()) and is_main():
            reason = no_signal(groups, [(one.stop_reason, one.reason) for one in batch.judged])
            if reason:
                self._has_warned = True
                logger.warning(f"step {step + 1} has no gradient: {reason}")


class Families(Record):
    """Means over the rollouts of each family of questions, as `family/NAME/..`.

    `share` of the rollouts, `looks` (tool calls), `look_share` (rollouts with a tool call), `strict`,
    `reward` without masked rollouts, `abs_advantage` (0: no gradient), and `look_advantage`, the mean
    advantage of rollouts with a tool call: above 0, the step raises their probability. (The mean advantage of
    a group is 0 by construction.) Absent where there is no such rollout. The advantage of a rollout is the
    mean over the tokens that the loss reads. Rollouts without a family do not count.
    """

    def record(self, batch: Batch, inputs: Mapping[str, torch.Tensor], step: int) -> None:
        advantages, mask = inputs["advantages"], inputs["tool_mask"] * inputs["completion_mask"]
        if advantages.dim() > 1:
            advantages = (advantages * mask).sum(1) / mask.sum(1).clamp(min=1)
        everywhere = [value for values in gather(advantages.tolist()) for value in values]
        rows = [pair for pair in zip(batch.judged, everywhere, strict=True) if pair[0].family is not None]
        metrics: dict[str, float] = {}
        for family in sorted({str(one.family) for one, _ in rows}):
            own = [(one, advantage) for one, advantage in rows if one.family == family]
            looks = [one.metrics["episode/looks"] for one, _ in own]
            values = {
                "share": [float(one.family == family) for one, _ in rows],
                "looks": looks,
                "look_share": [float(number > 0) for number in looks],
                "strict": [one.metrics["accuracy/strict"] for one, _ in own],
                "reward": [one.reward for one, _ in own if one.reward is not None],
                "abs_advantage": [abs(advantage) for _, advantage in own],
                "look_advantage": [advantage for (_, advantage), n in zip(own, looks, strict=True) if n > 0],
            }
            metrics |= {f"family/{family}/{name}": statistics.fmean(of) for name, of in values.items() if of}
        self.figures = metrics


def has_zero_variance(rewards: Iterable[float | None]) -> bool:
    """True if the rewards of a group are equal, so that it has no gradient; masked ones do not count."""
    return len({round(reward, 6) for reward in rewards if reward is not None}) < 2


def no_signal(
    groups: Sequence[Sequence[float | None]], ends: Sequence[tuple[str, str]], *, has_sft: bool = True
) -> str | None:
    """Reason why no rollout of a batch or run has an advantage, with a remedy; None if one has.

    Args:
        groups: Rewards of each group, None if masked.
        ends: Stop reason of each rollout, and the reason of its verdict.
        has_sft: Do not advise SFT.

    >>> no_signal([[None, None]], [("budget", "not_submitted")] * 2)
    'all 2 episodes are masked (budget 2): raise environment.max_episode_tokens'
    >>> no_signal([[0.0, 0.0], [1.0, 1.0]], [("submitted", "")] * 4).partition(":")[0]
    'each of 2 groups has one reward (0 in 1, 1 in 1; submitted 4)'
    >>> no_signal([[0.0, 0.0], [1.0, 0.0]], [("submitted", "")] * 4)
    """
    if not all(map(has_zero_variance, groups)):
        return None
    counts = Counter(verdict if verdict == "gold_failed" else stop for stop, verdict in ends).most_common()
    rewards = [next((round(one, 6) for one in group if one is not None), None) for group in groups]
    values = Counter(reward for reward in rewards if reward is not None)
    stops = ", ".join(f"{reason} {n}" for reason, n in counts)
    if not values:
        remedy = CURES.get(counts[0][0], "see the error of each episode in rollouts.jsonl")
        return f"all {len(ends)} episodes are masked ({stops}): {remedy}"
    if 2 * sum(n for reason, n in counts if reason in CURES) > len(ends):
        remedy = next(CURES[reason] for reason, _ in counts if reason in CURES)
    else:
        remedy = "raise grpo.temperature or num_generations, or take questions that are answered sometimes"
        remedy = remedy if has_sft else f"train SFT first, {remedy}"
    shown = ", ".join(f"{value:g} in {n}" for value, n in values.most_common(3))
    return f"each of {len(groups)} groups has one reward ({shown}; {stops}): {remedy}"


class StepTimes(TrainerCallback):
    """Callback that logs `time/STAGE` in seconds, which add up to `time/step`.

    `select`, `prefill` of prompts and of replies, `decode`, `tools` (waits for replies while no row decodes),
    `grade`, and `update`, which is all the rest up to the optimiser's step. Checkpoints and evaluations
    between two steps are in none.
    """

    def __init__(self, log: Callable[[dict[str, float]], None]) -> None:
        self._log = log
        self.stages = Stages()

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        """Begin to measure."""
        self.stages.restart()

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        """Log the times of the step."""
        seconds = self.stages.seconds()
        times = {f"time/{name}": seconds.get(name, 0.0) for name in STAGES}
        self._log(times | {"time/step": sum(seconds.values())})
