"""Credit by groups: the advantage of each rollout over the others of its question (GRPO)."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from trl.trainer.utils import nanstd

from text2sql_grpo.training.parts import Batch, Credit

if TYPE_CHECKING:
    from text2sql_grpo.training.trainer import RolloutGRPOTrainer

EPSILON = 1e-4  # TRL's


class GroupCredit(Credit):
    """Advantage of each rollout within its group (GRPO).

    Args:
        weights: Weight of each named reward.
        group_size: Rollouts of one question.
        scale: TRL's `scale_rewards`: divide by the deviation of the `group`, of the `batch`, or not (`none`).
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

    DeepSeekMath (arXiv:2402.03300); without the deviation, Dr. GRPO (arXiv:2503.20783).

    Args:
        rewards: NaN for a masked rollout, whose advantage is 0; shape (N,), groups are contiguous.
        scale: See `GroupCredit`.

    >>> group_advantages(torch.tensor([1.0, 0.0, float("nan"), 1.0]), 2, "none").tolist()
    [0.5, -0.5, 0.0, 0.0]
    """
    groups = rewards.view(-1, group_size)
    centred = groups - groups.nanmean(1, keepdim=True)
    if scale != "none":
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
