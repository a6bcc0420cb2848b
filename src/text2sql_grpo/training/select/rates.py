"""Estimated share of right rollouts of each question, for selections by it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from text2sql_grpo.training.parts import Judged


class Rates:
    """Statistics of the verdicts on Q questions.

    A question borrows from its cell of the finest level, that cell from its cell of the next coarser level,
    and so on to all questions, and these from one half: each with the weight of `prior` rollouts.

    Args:
        questions: Indices of the questions.
        levels: Value of each question on each level, the coarsest level first; cells lie within one another.
        prior: Weight of borrowed statistics, in rollouts.
        half_life: Batches after which a rollout counts half; None for ever.
    """

    def __init__(
        self,
        questions: Sequence[int],
        levels: Sequence[Sequence[str]],
        *,
        prior: float,
        half_life: float | None,
    ) -> None:
        self.questions, self._prior, self._half_life = list(questions), prior, half_life
        self._row = {question: row for row, question in enumerate(questions)}
        paths: list[tuple[str, ...]] = [() for _ in questions]
        self._cells = [_numbered(paths)]
        for level in levels:
            paths = [(*path, value) for path, value in zip(paths, level, strict=True)]
            self._cells.append(_numbered(paths))
        self._cells.append(torch.arange(len(questions)))
        self._counts = [torch.zeros(int(cell.max()) + 1, 2, dtype=torch.double) for cell in self._cells]

    def begin_batch(self) -> None:
        """Let earlier rollouts count less."""
        if self._half_life is not None:
            for counts in self._counts:
                counts *= 0.5 ** (1 / self._half_life)

    def observe(self, groups: Mapping[int, Sequence[Judged]]) -> None:
        """Count the verdicts on groups; rollouts without one do not count."""
        for group in groups.values():
            row = self._row[group[0].question]
            verdicts = [float(one.verdict) for one in group if one.verdict is not None]
            seen = torch.tensor([float(len(verdicts)), sum(verdicts)], dtype=torch.double)
            for cells, counts in zip(self._cells, self._counts, strict=True):
                counts[cells[row]] += seen

    def rates(self) -> torch.Tensor:
        """Estimated share of right rollouts of each question; double, shape (Q,)."""
        rates = torch.full((len(self.questions),), 0.5, dtype=torch.double)
        for cells, counts in zip(self._cells, self._counts, strict=True):
            rollouts, right = counts[cells].T
            rates = (right + self._prior * rates) / (rollouts + self._prior)
        return rates

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"counts": [counts.clone() for counts in self._counts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        if [len(counts) for counts in state["counts"]] != [len(counts) for counts in self._counts]:
            raise ValueError("other questions or levels")
        self._counts = [counts.cpu() for counts in state["counts"]]


def _numbered(paths: Sequence[tuple[str, ...]]) -> torch.Tensor:
    """Number each distinct path."""
    numbers: dict[tuple[str, ...], int] = {}
    return torch.tensor([numbers.setdefault(path, len(numbers)) for path in paths])
