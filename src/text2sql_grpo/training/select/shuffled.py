"""Shuffled epochs, the default: each question once before one repeats."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from text2sql_grpo.training.parts import Select


class Shuffled(Select):
    """Questions in shuffled order; a question that is passed over keeps its turn.

    Args:
        questions: Indices of the questions.
        generator: Source of the orders.
        shuffle: False for the order of `questions`.
    """

    def __init__(self, questions: Sequence[int], *, generator: torch.Generator, shuffle: bool = True) -> None:
        self._questions, self._generator, self._is_random = questions, generator, shuffle
        self._left: list[int] = []  # the next one last

    def draw(self, count: int, *, progress: float = 0.0) -> list[int]:
        return distinct(count, self.next)

    def another(self, question: int, taken: Collection[int]) -> int | None:
        return self.next(taken)

    def next(self, taken: Collection[int]) -> int | None:
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


def distinct(count: int, take: Callable[[Collection[int]], int | None]) -> list[int]:
    """Take `count` questions by a function of those taken before; one repeats only if there are fewer.

    >>> distinct(3, lambda taken: min({1, 2} - set(taken), default=None))
    [1, 2, 1]
    """
    found: list[int] = []
    taken: set[int] = set()
    while len(found) < count:
        question = take(taken)
        if question is None:
            taken = set()
            continue
        taken.add(question)
        found.append(question)
    return found
