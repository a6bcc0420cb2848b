"""Credit by groups: advantages of whole rollouts (GRPO), or of turns where turns have rewards."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from trl.trainer.utils import nanstd

from text2sql_grpo.training.parts import Batch, Credit, turn_spans

if TYPE_CHECKING:
    from text2sql_grpo.training.trainer import RolloutGRPOTrainer

EPSILON = 1e-4  # TRL's

TurnRow = tuple[float | None, Sequence[float]]  # reward of a rollout (None if masked), rewards of its turns


class GroupCredit(Credit):
    """Advantage of each rollout within its group (GRPO), or of each turn if any turn has a reward.

    Args:
        weights: Weight of each named reward.
        group_size: Rollouts of one question.
        scale: Divide by the deviation of the `group`, of the `batch`, by the group's `mean`, or not (`none`).
        normalizes_each: TRL's `normalize_then_sum`: normalise each named reward within its group, then their
            weighted sum within the batch.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        *,
        group_size: int,
        scale: str = "group",
        normalizes_each: bool = False,
    ) -> None:
        self._weights, self._group_size = weights, group_size
        self._scale, self._normalizes_each = scale, normalizes_each

    def advantages(
        self, batch: Batch, inputs: Mapping[str, torch.Tensor], trainer: "RolloutGRPOTrainer"
    ) -> torch.Tensor:
        if any(map(any, (one.turn_rewards for one in batch.judged))):
            rows = [(one.reward, one.turn_rewards) for one in batch.judged]
            by_turn = turn_advantages(rows, group_size=self._group_size, scale=self._scale)
            return token_advantages(by_turn[batch.own], batch, inputs["completion_ids"])
        if self._normalizes_each:
            scores = [
                [(one.scores or {}).get(name, math.nan) for name in self._weights] for one in batch.judged
            ]
            weights = torch.tensor(list(self._weights.values()))
            found = normalized_each(torch.tensor(scores), weights, self._group_size)
        else:
            rewards = [math.nan if one.reward is None else one.reward for one in batch.judged]
            found = group_advantages(torch.tensor(rewards), self._group_size, self._scale)
        return found[batch.own].to(inputs["completion_ids"].device)


def group_advantages(rewards: torch.Tensor, group_size: int, scale: str) -> torch.Tensor:
    """Reward of each rollout less its group's mean; shape (N,).

    DeepSeekMath (arXiv:2402.03300); without the deviation, Dr. GRPO (arXiv:2503.20783); divided by the mean,
    MaxRL (arXiv:2602.02710), where groups without a positive mean have no advantage, and the smallest divisor
    is one success in the group.

    Args:
        rewards: NaN for a masked rollout, whose advantage is 0; shape (N,), groups are contiguous.
        scale: See `GroupCredit`.

    >>> group_advantages(torch.tensor([1.0, 0.0, float("nan"), 1.0]), 2, "none").tolist()
    [0.5, -0.5, 0.0, 0.0]
    """
    groups = rewards.view(-1, group_size)
    mean = groups.nanmean(1, keepdim=True)
    centred = groups - mean
    if scale == "mean":
        centred = torch.where(mean > 0, centred / mean.clamp(min=1 / group_size), 0.0)
    elif scale != "none":
        deviation = nanstd(rewards) if scale == "batch" else nanstd(groups, dim=1, keepdim=True)
        centred = centred / (deviation + EPSILON)
    return centred.flatten().nan_to_num(0.0)


def normalized_each(scores: torch.Tensor, weights: torch.Tensor, group_size: int) -> torch.Tensor:
    """Advantages of scores that are normalised one by one before they are summed; shape (N,).

    GDPO (arXiv:2601.05242), TRL's `normalize_then_sum`.

    Args:
        scores: Each named score, NaN where a rollout has none, which leaves that score out; all NaN for a
            masked rollout. Shape (N, F), groups are contiguous.
        weights: Shape (F,).
    """
    groups = scores.view(-1, group_size, scores.shape[1])
    deviation = nanstd(groups, dim=1, keepdim=True)
    each = (groups - groups.nanmean(1, keepdim=True)) / (deviation + EPSILON)
    sums = (each.view(scores.shape) * weights).nansum(1)
    sums[scores.isnan().all(1)] = math.nan
    advantages: torch.Tensor = (sums - sums.nanmean()) / (nanstd(sums) + EPSILON)
    return advantages.nan_to_num(0.0)


def turn_advantages(rows: Sequence[TurnRow], *, group_size: int, scale: str) -> list[list[float]]:
    """Advantage of each turn of each rollout.

    A turn is credited with the reward of its rollout and with its reward-to-go (turn rewards from this turn
    on), each less its mean over the group; the mean of a reward-to-go is over rollouts that have this turn.
    Without turn rewards these are the advantages of GRPO.

    Args:
        rows: Reward (None if masked) and turn rewards of each rollout; groups are contiguous.
        group_size: Rollouts of one prompt.
        scale: TRL's `scale_rewards`: divide by the deviation of total rewards in the `group`, in the `batch`,
            or not at all (`none`).

    >>> turn_advantages([(0.0, [1.0, 0.0]), (0.0, [0.0, 1.0])], group_size=2, scale="none")
    [[0.0, -0.5], [0.0, 0.5]]
    """
    deviation = _deviation(rows) if scale == "batch" else 0.0
    advantages: list[list[float]] = []
    for start in range(0, len(rows), group_size):
        group = rows[start : start + group_size]
        counted = [(reward, _rewards_to_go(turns)) for reward, turns in group if reward is not None]
        if scale == "group":
            deviation = _deviation(group)
        divisor = 1.0 if scale == "none" else deviation + EPSILON
        mean = statistics.fmean(reward for reward, _ in counted) if counted else 0.0
        for reward, turns in group:
            if reward is None:
                advantages.append([0.0] * len(turns))
                continue
            means = [
                statistics.fmean(to_go[turn] for _, to_go in counted if turn < len(to_go))
                for turn in range(len(turns))
            ]
            own = zip(_rewards_to_go(turns), means, strict=True)
            advantages.append([(reward - mean + to_go - usual) / divisor for to_go, usual in own])
    return advantages


def _rewards_to_go(turns: Sequence[float]) -> list[float]:
    """Sums of the rewards of each turn and all later ones."""
    sums: list[float] = []
    for earned in reversed(turns):
        sums.append(earned + (sums[-1] if sums else 0.0))
    return sums[::-1]


def _deviation(rows: Sequence[TurnRow]) -> float:
    totals = [reward + sum(turns) for reward, turns in rows if reward is not None]
    return statistics.stdev(totals) if len(totals) > 1 else 0.0


def token_advantages(
    advantages: Sequence[Sequence[float]], batch: Batch, completion_ids: torch.Tensor
) -> torch.Tensor:
    """Spread the advantages of turns over their sampled tokens; shape (B, K), 0 for other tokens.

    Args:
        advantages: Advantages of the turns of each rollout of this rank; empty for 0 everywhere.
        completion_ids: Shape (B, K).
    """
    by_token = torch.zeros(completion_ids.shape)
    for row, turns, values in zip(batch.rows, advantages, by_token, strict=True):
        for turn, (start, end) in enumerate(turn_spans(row.rollout.completion_mask) if turns else []):
            values[start:end] = turns[turn]
    return by_token.to(completion_ids.device)
