"""Curriculum from the questions with the highest measured share of right rollouts to all."""

import math

import torch

from text2sql_grpo.training.select.rates import Rates

_EASY_SHARE = 0.25  # of the questions, in the first batch


class EasyToHard:
    """Equal weight of the easiest questions: a quarter of them at first, all after `all_after` of the run.

    Args:
        count: Number of questions.
        all_after: Share of the run, in (0, 1].
        seed: Seed of the order among equally easy questions.
    """

    def __init__(self, count: int, *, all_after: float, seed: int) -> None:
        self._all_after = all_after
        self._ties = torch.randperm(count, generator=torch.Generator().manual_seed(seed))

    def __call__(self, rates: Rates, progress: float) -> torch.Tensor:
        share = _EASY_SHARE + (1 - _EASY_SHARE) * min(1.0, progress / self._all_after)
        p = rates.rates()
        easiest = self._ties[p[self._ties].argsort(descending=True, stable=True)]
        return torch.zeros_like(p).index_fill(0, easiest[: max(1, math.ceil(share * len(p)))], 1.0)
