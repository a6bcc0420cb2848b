"""Learnability: the variance of a question's verdicts."""

import torch

from text2sql_grpo.training.select.rates import Rates


def learnability(rates: Rates) -> torch.Tensor:
    """Weight p(1 - p) of each question with a share p of right rollouts.

    LILO (arXiv:2502.12272).
    """
    p = rates.rates()
    return p * (1 - p)
