"""Selection of the questions of a step (docs/selection.md): one file a method."""

from collections.abc import Sequence

import torch

from text2sql_grpo.config import SelectionConfig
from text2sql_grpo.data.example import Example
from text2sql_grpo.training.parts import Select
from text2sql_grpo.training.select.shuffled import Shuffled
from text2sql_grpo.training.select.strata import Strata, by_family


def open_select(
    examples: Sequence[Example],
    settings: SelectionConfig,
    *,
    seed: int,
    shuffle: bool = True,
) -> Select:
    """Make the selection of a config; questions of shards are read once, and only for `strata`.

    Args:
        examples: Training questions, by whose index they are drawn.
        seed: Random seed; equal on all ranks.
        shuffle: True for random epochs; False for the order of the questions.

    Raises:
        DataError: See `select.strata.by_family`.
    """
    generator = torch.Generator().manual_seed(seed)

    def over(questions: Sequence[int]) -> Select:
        return Shuffled(questions, generator=generator, shuffle=shuffle)

    if not settings.strata:
        return over(range(len(examples)))
    return Strata(by_family([example.family for example in examples], settings.strata), over)
