"""Selection of the questions of a step: shuffled epochs, and fixed shares of families (docs/selection.md)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from text2sql_grpo.config import SelectionConfig
from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import DataError
from text2sql_grpo.training.parts import Select

_ROUNDING = 1e-9


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
        DataError: No question is of a named family, or the shares leave a rest but no question does.
    """
    generator = torch.Generator().manual_seed(seed)
    if not settings.strata:
        return Shuffled(range(len(examples)), generator=generator, shuffle=shuffle)
    strata = _by_family([example.family for example in examples], settings.strata)
    return Strata(
        [(Shuffled(numbers, generator=generator, shuffle=shuffle), share) for numbers, share in strata]
    )


class Shuffled(Select):
    """Shuffled epochs, the default: each question once before one repeats, none twice in a batch.

    Args:
        shuffle: False for the order of `questions`.
    """

    def __init__(self, questions: Sequence[int], *, generator: torch.Generator, shuffle: bool = True) -> None:
        self._questions, self._generator, self._is_random = questions, generator, shuffle
        self._left: list[int] = []  # the next one last

    def draw(self, count: int) -> list[int]:
        drawn: list[int] = []
        taken: set[int] = set()
        while len(drawn) < count:
            if all(one in taken for one in self._questions):  # a batch of more questions than there are
                taken = set()
            place = next((i for i in reversed(range(len(self._left))) if self._left[i] not in taken), None)
            if place is None:
                order = list(self._questions)
                if self._is_random:
                    order = [order[i] for i in torch.randperm(len(order), generator=self._generator).tolist()]
                self._left = order[::-1] + self._left
                continue
            drawn.append(self._left.pop(place))
            taken.add(drawn[-1])
        return drawn

    def state_dict(self) -> dict[str, Any]:
        return {
            "questions": len(self._questions),
            "left": list(self._left),
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["questions"] != len(self._questions):
            raise ValueError(f"{state['questions']} questions, not {len(self._questions)}")
        self._left = list(state["left"])
        self._generator.set_state(state["generator"].cpu())


class Strata(Select):
    """Selection with a fixed share of each stratum, as exact as whole groups allow, over all batches.

    Args:
        strata: Selection within each stratum, and its share of all draws, in (0, 1]; they add up to 1.
    """

    keeps_order = True

    def __init__(self, strata: Sequence[tuple[Select, float]]) -> None:
        self._strata = [select for select, _ in strata]
        self._shares = [share for _, share in strata]
        self._debts = [0.0] * len(strata)  # draws by which a stratum lags behind its share

    def draw(self, count: int) -> list[int]:
        places = [self._next_stratum() for _ in range(count)]
        drawn = [iter(stratum.draw(places.count(number))) for number, stratum in enumerate(self._strata)]
        return [next(drawn[number]) for number in places]

    def _next_stratum(self) -> int:
        self._debts = [debt + share for debt, share in zip(self._debts, self._shares, strict=True)]
        # Rounded, so that sums of shares such as 0.1 do not decide between equals.
        most = max(range(len(self._debts)), key=lambda number: round(self._debts[number], 6))
        self._debts[most] -= 1
        return most

    def state_dict(self) -> dict[str, Any]:
        return {"debts": list(self._debts), "strata": [one.state_dict() for one in self._strata]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for stratum, saved in zip(self._strata, state["strata"], strict=True):
            stratum.load_state_dict(saved)
        self._debts = list(state["debts"])


def _by_family(families: Sequence[str], shares: Mapping[str, float]) -> list[tuple[list[int], float]]:
    """Make one stratum of each named family, and one with the rest of the share of all other questions."""
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
    found = [(numbers[name], shares[name]) for name in sorted(shares)]
    if rest > _ROUNDING:
        if None not in numbers:
            raise DataError(
                f"selection.strata adds up to {1 - rest:g}, but no training question is of another family: "
                "let the shares add up to 1"
            )
        found.append((numbers[None], rest))
    return found
