"""Selection of the questions of a step (docs/selection.md): one file a method."""

from collections.abc import Sequence

import torch

from text2sql_grpo.config import SelectionConfig
from text2sql_grpo.data.example import Example
from text2sql_grpo.training.parts import Gate, Select
from text2sql_grpo.training.select.learnability import learnability
from text2sql_grpo.training.select.rates import Rates
from text2sql_grpo.training.select.resample import Resample
from text2sql_grpo.training.select.shuffled import Shuffled
from text2sql_grpo.training.select.strata import Strata, by_family
from text2sql_grpo.training.select.weighted import Weighted


def open_select(
    examples: Sequence[Example],
    settings: SelectionConfig,
    *,
    seed: int,
    shuffle: bool = True,
) -> Select:
    """Make the selection of a config; questions of shards are read once, and only if it needs their fields.

    Args:
        examples: Training questions, by whose index they are drawn.
        seed: Random seed; equal on all ranks.
        shuffle: True for random epochs; False for the order of the questions.

    Raises:
        DataError: See `select.strata.by_family`.
    """
    generator = torch.Generator().manual_seed(seed)
    is_weighted = settings.by != "uniform"
    rows = list(examples) if settings.strata or is_weighted else []

    def over(questions: Sequence[int]) -> Select:
        shuffled = Shuffled(questions, generator=generator, shuffle=shuffle)
        if not is_weighted:
            return shuffled
        fields = [[str(getattr(rows[one], name)) for one in questions] for name in settings.level]
        rates = Rates(questions, fields, prior=settings.prior, half_life=settings.half_life)
        return Weighted(shuffled, rates, learnability, explore=settings.explore, generator=generator)

    if not settings.strata:
        return over(range(len(examples)))
    return Strata(by_family([example.family for example in rows], settings.strata), over)


def open_gate(settings: SelectionConfig) -> Gate | None:
    """Make the gate of a config; None without one."""
    return Resample(settings.resample_flat) if settings.resample_flat else None
