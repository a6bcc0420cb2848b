"""Shuffled epochs, the default: each question once before one repeats."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from text2sql_grpo.training.parts import Select


class Shuffled(Select):
    """Questions in shuffled order, without one twice in a batch.

    Args:
        questions: Indices of the questions.
        generator: Source of the orders.
        shuffle: False for the order of `questions`.
    """

    def __init__(self, questions: Sequence[int], *, generator: torch.Generator, shuffle: bool = True) -> None:
        self._questions, self._generator, self._is_random = questions, generator, shuffle
        self._left: list[int] = []  # the next one last

    def draw(self, count: int) -> list[int]:
        drawn: list[int] = []
        taken: set[int] = set()
        while len(drawn) < count:
            question = self._next(taken)
            if question is None:  # a batch of more questions than there are
                taken = set()
                continue
            taken.add(question)
            drawn.append(question)
        return drawn

    def _next(self, taken: Collection[int]) -> int | None:
        """Draw the next question that is not taken; None if all are."""
        while True:
            for place in reversed(range(len(self._left))):
                if self._left[place] not in taken:
                    return self._left.pop(place)
            if set(self._questions) <= set(self._left):
                return None
            order = list(self._questions)
            if self._is_random:
                order = [order[i] for i in torch.randperm(len(order), generator=self._generator).tolist()]
            self._left = order[::-1] + self._left

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
