"""Accuracy with its uncertainty."""

from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist


@dataclass(frozen=True)
class Accuracy:
    """How many answers were right.

    Attributes:
        correct: Right answers, 0..total.
        total: Questions; 0 gives the accuracy 0 and the interval (0, 1).
    """

    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        """In [0, 1], not percent."""
        return self.correct / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval, in [0, 1]; Wilson 1927 (J. Am. Stat. Assoc. 22, 209-212).

        >>> [round(bound, 3) for bound in Accuracy(10, 40).interval]
        [0.142, 0.402]
        """
        if self.total == 0:
            return 0.0, 1.0
        z = NormalDist().inv_cdf(0.975)
        share, n = self.accuracy, self.total
        centre = (share + z * z / (2 * n)) / (1 + z * z / n)
        half = z * sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, centre - half), min(1.0, centre + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.correct}/{self.total} = {self.accuracy:.1%} ({low:.0%}-{high:.0%})"

    def record(self) -> dict[str, object]:
        """As in `evaluation.json`."""
        low, high = self.interval
        return {
            "correct": self.correct,
            "total": self.total,
            "accuracy": round(self.accuracy, 6),
            "interval": [round(low, 6), round(high, 6)],
        }
