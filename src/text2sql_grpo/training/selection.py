"""Selection of the questions of a GRPO step: the order in which their indices are drawn."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from trl.trainer.utils import RepeatSampler

from text2sql_grpo.errors import DataError


@dataclass
class _Stratum:
    """Questions of one or more families, drawn without repetition until all were drawn.

    Attributes:
        share: Share of all draws, in (0, 1].
        debt: Draws by which the stratum lags behind its share; negative if it is ahead.
        left: Questions still to be drawn before any repeats, the next one last.
    """

    questions: list[int]
    share: float
    debt: float = 0.0
    left: list[int] = field(default_factory=list)


def strata(families: Sequence[str], shares: Mapping[str, float]) -> list[_Stratum]:
    """Make one stratum for each named family, and one with the rest for the questions of all others.

    Args:
        families: Family of each question.
        shares: Share of each named family in a step, in (0, 1]; their sum is at most 1.

    Raises:
        DataError: No question is of a named family, or the shares leave a rest but no question does.
    """
    numbers: dict[str | None, list[int]] = {name: [] for name in sorted(shares)}
    for number, family in enumerate(families):
        numbers.setdefault(family if family in shares else None, []).append(number)
    for name in shares:
        if not numbers[name]:
            known = ", ".join(sorted(set(families)))
            raise DataError(
                f"selection.strata names the family {name}, but no training question is of it: "
                f"the families are {known}"
            )
    rest = 1.0 - sum(shares.values())
    found = [_Stratum(numbers[name], shares[name]) for name in sorted(shares)]
    if rest > _ROUNDING:
        if None not in numbers:
            raise DataError(
                f"selection.strata adds up to {1 - rest:g}, but no training question is of another family: "
                "let the shares add up to 1"
            )
        found.append(_Stratum(numbers[None], rest))
    return found


_ROUNDING = 1e-9


class StratifiedSampler(RepeatSampler):  # type: ignore[misc, unused-ignore]
    """TRL's sampler with another order: any run of draws holds each family by its share, rounded.

    Each draw goes to the stratum that lags behind its share most, so that a generation batch holds the mix,
    and each of its optimiser steps and ranks does too, to within one question. Within a stratum every
    question is drawn before one repeats, across epochs. An epoch has as many batches as without strata.

    Args:
        families: Family of each question.
        shares: See `strata`.
        seed: Random seed; equal on all ranks.
        shuffle: Draw the questions of a stratum in random order.
        repeats: Arguments of `RepeatSampler`: `mini_repeat_count`, `batch_size`, `repeat_count`.
    """

    def __init__(
        self,
        families: Sequence[str],
        shares: Mapping[str, float],
        *,
        seed: int,
        shuffle: bool = True,
        **repeats: Any,
    ) -> None:
        super().__init__(families, shuffle=False, **repeats)
        self._strata = strata(families, shares)
        self._is_random = shuffle
        self._random = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[int]:
        batches = [self._draw() for _ in range(self.num_samples // self.batch_size)]
        order = [number for batch in batches for number in batch]
        for place in super().__iter__():
            yield order[place]

    def _draw(self) -> list[int]:
        batch: list[int] = []
        for _ in range(self.batch_size):
            for stratum in self._strata:
                stratum.debt += stratum.share
            # Rounded, so that sums of shares such as 0.1 do not decide between equals.
            most = max(self._strata, key=lambda each: round(each.debt, 6))
            most.debt -= 1
            if not most.left:
                most.left = self._order(most.questions, drawn=set(batch))
            batch.append(most.left.pop())
        return batch

    def _order(self, questions: Sequence[int], *, drawn: set[int]) -> list[int]:
        """Order the questions of a stratum, the next one last; those already in the batch come first."""
        count = len(questions)
        places = torch.randperm(count, generator=self._random).tolist() if self._is_random else range(count)
        order = [questions[place] for place in places][::-1]
        return sorted(order, key=lambda number: number not in drawn)


def stratified(
    plain: RepeatSampler, *, families: Sequence[str], shares: Mapping[str, float]
) -> StratifiedSampler:
    """Make a sampler with the repeats of TRL's and a stratified order; see `strata`."""
    return StratifiedSampler(
        families,
        shares,
        seed=plain.seed or 0,
        shuffle=plain.shuffle,
        mini_repeat_count=plain.mini_repeat_count,
        batch_size=plain.batch_size,
        repeat_count=plain.repeat_count,
    )
