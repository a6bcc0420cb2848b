"""Draws by weight."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from text2sql_grpo.training.parts import Judged, Select
from text2sql_grpo.training.select.rates import Rates
from text2sql_grpo.training.select.shuffled import Shuffled, distinct

Weigh = Callable[[Rates], torch.Tensor]  # double, shape (Q,)
_LEAST = 1e-9


class Weighted(Select):
    """Selection by weight, a share of it in shuffled order so that every question is met.

    Args:
        shuffled: Source of the share in shuffled order.
        rates: Statistics of the same questions.
        weigh: Weight of each question.
        explore: Share of the draws in shuffled order, in [0, 1].
        generator: Source of the draws.
    """

    def __init__(
        self,
        shuffled: Shuffled,
        rates: Rates,
        weigh: Weigh,
        *,
        explore: float,
        generator: torch.Generator,
    ) -> None:
        self._shuffled, self._rates, self._weigh = shuffled, rates, weigh
        self._explore, self._generator = explore, generator
        self._debt = 0.0
        self._order: list[int] = []  # as drawn by weight, the first one first; empty until it is drawn

    def draw(self, count: int, *, progress: float = 0.0) -> list[int]:
        self._rates.begin_batch()
        self._order = []
        return distinct(count, self._next)

    def another(self, question: int, taken: Collection[int]) -> int | None:
        return self._next(taken)

    def _next(self, taken: Collection[int]) -> int | None:
        self._debt += self._explore
        explores = round(self._debt, 6) >= 1
        self._debt -= explores
        if explores:
            return self._shuffled.next(taken)
        self._order = self._order or self._by_weight()
        return next((question for question in self._order if question not in taken), None)

    def _by_weight(self) -> list[int]:
        """Order all questions as a draw by weight without replacement would (Gumbel keys)."""
        weights = self._weigh(self._rates).clamp(min=_LEAST)
        uniforms = torch.rand(len(weights), generator=self._generator, dtype=torch.double)
        keys = weights.log() - (-uniforms.clamp(min=1e-300).log()).log()
        return [self._rates.questions[row] for row in keys.argsort(descending=True).tolist()]

    def observe(self, groups: Mapping[int, Sequence[Judged]]) -> None:
        self._rates.observe(groups)
        self._order = []

    def state_dict(self) -> dict[str, Any]:
        return {
            "shuffled": self._shuffled.state_dict(),  # with the state of the generator, which it shares
            "rates": self._rates.state_dict(),
            "debt": self._debt,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._shuffled.load_state_dict(state["shuffled"])
        self._rates.load_state_dict(state["rates"])
        self._debt = state["debt"]
