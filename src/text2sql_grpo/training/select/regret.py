"""Regret: how far the best of a group lies above its mean."""

from dataclasses import dataclass

import torch

from text2sql_grpo.training.select.rates import Rates

_STALENESS = 0.1  # share of the draw that goes by staleness, as in PLR


@dataclass(frozen=True)
class Regret:
    """Weight by the expected best less the mean of a group, and a tenth by the time since a question was met.

    Prioritized Level Replay (arXiv:2010.03934).

    Attributes:
        group_size: Rollouts of a group.
    """

    group_size: int

    def __call__(self, rates: Rates, progress: float) -> torch.Tensor:
        p = rates.rates()
        regret = 1 - (1 - p) ** self.group_size - p
        stale = (rates.batches - rates.met).double()
        regret, stale = (part / part.sum().clamp(min=1e-9) for part in (regret, stale))
        return (1 - _STALENESS) * regret + _STALENESS * stale
