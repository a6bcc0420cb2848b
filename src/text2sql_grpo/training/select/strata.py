"""Fixed shares of families in each step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from text2sql_grpo.errors import DataError
from text2sql_grpo.training.parts import Select

_ROUNDING = 1e-9


class Strata(Select):
    """Selection with a fixed share of each stratum, as exact as whole groups allow, over all batches.

    Args:
        shares: Questions of each stratum and its share of all draws, in (0, 1]; they add up to 1.
        over: Makes the selection within a stratum.
    """

    keeps_order = True

    def __init__(
        self, shares: Sequence[tuple[Sequence[int], float]], over: Callable[[Sequence[int]], Select]
    ) -> None:
        self._shares = [share for _, share in shares]
        self._strata = [over(questions) for questions, _ in shares]
        self._debts = [0.0] * len(shares)  # draws by which a stratum lags behind its share

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


def by_family(families: Sequence[str], shares: Mapping[str, float]) -> list[tuple[list[int], float]]:
    """Make one stratum of each named family, and one with the rest of the share of all other questions.

    Args:
        families: Family of each question.
        shares: Share of each named family, in (0, 1]; their sum is at most 1.

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
    found = [(numbers[name], shares[name]) for name in sorted(shares)]
    if rest > _ROUNDING:
        if None not in numbers:
            raise DataError(
                f"selection.strata adds up to {1 - rest:g}, but no training question is of another family: "
                "let the shares add up to 1"
            )
        found.append((numbers[None], rest))
    return found
