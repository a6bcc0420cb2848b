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
        scale: TRL's `scale_rewards`: divide by the deviation of the `group`, of the `batch`, or not (`none`).
    """

    def __init__(self, group_size: int, scale: str) -> None:
        self._group_size, self._scale = group_size, scale

    def advantages(
        self, batch: Batch, inputs: Mapping[str, torch.Tensor], trainer: "RolloutGRPOTrainer"
    ) -> torch.Tensor:
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
