"""Accuracy with its uncertainty: by database, since questions about one database are not independent.

Errors of intervals are clustered by database, tests flip the signs of the databases' differences (Miller
2024, arXiv:2411.00640, sec. 2.2; Good 2005, "Permutation, Parametric and Bootstrap Tests", ch. 3). The naive
figures, which assume independent questions, are given next to them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log, sqrt, tanh
from statistics import NormalDist, fmean, pvariance
from typing import Any, Self

import numpy as np

FLIPS = 20_000
EXACT_DATABASES = 20
FEW_DATABASES = 6
"""Below it, a sign flip by database has no p-value under 0.05."""

# 97.5% quantiles of Student's t for 1 to 20 degrees of freedom
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)

Interval = tuple[float, float]


@dataclass(frozen=True)
class Accuracy:
    """Number of right answers.

    Attributes:
        correct: Right answers, 0..total.
        total: Questions; 0 gives the accuracy 0 and the interval (0, 1).
        by_database: Right answers and questions of each database; empty if unknown.
    """

    correct: int
    total: int
    by_database: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, answers: Iterable[tuple[str, bool]]) -> Self:
        """Count answers, each given by the database of its question and True if right."""
        return cls.joined(cls(is_right, 1, {database: (is_right, 1)}) for database, is_right in answers)

    @classmethod
    def joined(cls, parts: Iterable["Accuracy"]) -> Self:
        """Accuracy on the questions of all parts."""
        known, counts = list(parts), dict[str, tuple[int, int]]()
        for part in known:
            for name, (right, asked) in part.by_database.items():
                correct, total = counts.get(name, (0, 0))
                counts[name] = correct + right, total + asked
        return cls(sum(part.correct for part in known), sum(part.total for part in known), counts)

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Self:
        """Read the fields of `record`; those of earlier versions have no databases."""
        counts = {name: (right, asked) for name, (right, asked) in record.get("by_database", {}).items()}
        return cls(record["correct"], record["total"], counts)

    @property
    def accuracy(self) -> float:
        """Share of right answers in [0, 1], not percent."""
        return self.correct / self.total if self.total else 0.0

    @property
    def interval(self) -> Interval:
        """95% interval by database, in [0, 1]; the naive one with fewer than two databases.

        >>> uneven = Accuracy(20, 40, {"a": (10, 10), "b": (10, 15), "c": (0, 15)})
        >>> uneven.intervals
        '1-99; 35-65'
        """
        return interval_by_database(self.by_database.values(), self.naive_interval)

    @property
    def naive_interval(self) -> Interval:
        """95% interval by question, in [0, 1]; Wilson 1927 (J. Am. Stat. Assoc. 22, 209-212).

        >>> [round(bound, 3) for bound in Accuracy(10, 40).naive_interval]
        [0.142, 0.402]
        """
        if self.total == 0:
            return 0.0, 1.0
        z = NormalDist().inv_cdf(0.975)
        share, n = self.accuracy, self.total
        centre = (share + z * z / (2 * n)) / (1 + z * z / n)
        half = z * sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, centre - half), min(1.0, centre + half)

    @property
    def intervals(self) -> str:
        """Both intervals in percent, by database first; one with fewer than two databases."""
        both = [self.interval, self.naive_interval] if len(self.by_database) > 1 else [self.interval]
        return "; ".join(map(percents, both))

    def __str__(self) -> str:
        return f"{self.correct}/{self.total} = {self.accuracy:.1%} ({self.intervals})"

    def record(self) -> dict[str, object]:
        """Fields in `evaluation.json`."""
        return {
            "correct": self.correct,
            "total": self.total,
            "accuracy": round(self.accuracy, 6),
            "interval": [round(bound, 6) for bound in self.interval],
            "naive_interval": [round(bound, 6) for bound in self.naive_interval],
            "by_database": {name: list(counts) for name, counts in self.by_database.items()},
        }


def interval_by_database(sums: Collection[tuple[int, int]], naive: Interval, *, lowest: int = 0) -> Interval:
    """95% interval of a mean over databases; the naive one for less than two.

    Student's t on the logit scale, so that it stays within bounds, with an error clustered by database: CR2
    (Bell and McCaffrey 2002, Survey Methodology 28, 169-181) and as many degrees of freedom as Kish's
    effective number of databases (1965), less one. Never narrower than the naive interval, since databases
    may be alike by chance. Coverage: `benchmarks/intervals.py`.

    Args:
        sums: Sum and number of the values of each database, which are between `lowest` and 1.
        naive: 95% interval by question.
    """
    if len(sums) < 2:
        return naive
    totals, counts = np.array(list(sums)).T
    parts = totals - lowest * counts
    span, total = 1 - lowest, counts.sum()
    residuals = parts - parts.sum() / total * counts
    error = sqrt((residuals**2 / (1 - counts / total)).sum()) / total / span
    share = (parts.sum() / span + 0.5) / (total + 1)
    t = t_quantile(round(total**2 / (counts**2).sum()) - 1)
    reach, logit = t * error / (share * (1 - share)), log(share / (1 - share))
    low, high = (lowest + span * (1 + tanh(bound / 2)) / 2 for bound in (logit - reach, logit + reach))
    return min(naive[0], low), max(naive[1], high)


def percents(interval: Sequence[float]) -> str:
    """Interval of shares in percent.

    >>> percents((0.4, 0.616))
    '40-62'
    """
    return "-".join(f"{100 * bound:.0f}" for bound in interval)


def t_quantile(freedom: int) -> float:
    """97.5% quantile of Student's t, within 0.001 of it; for no degree of freedom, that of one."""
    if freedom <= len(_T):
        return _T[max(freedom, 1) - 1]
    z = NormalDist().inv_cdf(0.975)
    more = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96  # Abramowitz and Stegun 1964, 26.7.5
    return z + more[0] / freedom + more[1] / freedom**2


def interval_of_shares(shares: Sequence[float], samples: int) -> tuple[float, float]:
    """95% interval of a mean of shares by question: Wilson's, for the number of independent episodes.

    Kish 1965, design effect.
    """
    share, count = fmean(shares), len(shares) * samples
    by_chance = share * (1 - share) / samples
    # If all answers are alike, nothing shows that samples of a question differ.
    effect = min(max(pvariance(shares) / by_chance, 1.0), samples) if by_chance else samples
    independent = round(count / effect)
    return Accuracy(round(share * independent), independent).interval


@dataclass(frozen=True)
class Joined:
    """Mean by prediction-powered inference.

    Attributes:
        mean: In [0, 1].
        interval: 95% interval, in [0, 1].
        rectifier: Mean of label minus automatic verdict, in [-1, 1].
    """

    mean: float
    interval: Interval
    rectifier: float


def prediction_powered(
    labels: Sequence[float], automatic: Sequence[float], others: Sequence[float]
) -> Joined:
    """Mean of `others`, corrected by how far automatic verdicts are from labels, with its interval.

    Angelopoulos et al. 2023 (arXiv:2301.09633, sec. 2.1). Of n labels that all agree with their automatic
    verdicts the variance would be 0: it is at least that of 2 that differ of n + 4 (Agresti and Coull 1998).
    Where the corrected mean is outside [0, 1], mean and Wilson's interval are those of the labels.

    Args:
        labels: Labels of a few questions by people, at least 2, in [0, 1].
        automatic: Automatic verdicts on the same questions.
        others: Automatic verdicts on other questions of the same kind, at least 2.

    >>> joined = prediction_powered([1, 1, 0, 1], [1, 1, 1, 1], [1, 0] * 50)
    >>> joined.mean, joined.rectifier
    (0.25, -0.25)
    """
    gaps = [label - verdict for label, verdict in zip(labels, automatic, strict=True)]
    floor = 2 / (len(gaps) + 4)
    variance = max(pvariance(gaps), floor * (1 - floor)) / len(gaps) + pvariance(others) / len(others)
    mean, half = fmean(others) + fmean(gaps), NormalDist().inv_cdf(0.975) * sqrt(variance)
    if not 0 <= mean <= 1:
        interval = Accuracy(round(sum(labels)), len(labels)).naive_interval
        return Joined(fmean(labels), interval, fmean(gaps))
    return Joined(mean, (max(mean - half, 0.0), min(mean + half, 1.0)), fmean(gaps))


def sign_flip_p(differences: Iterable[int]) -> float:
    """Two-sided p-value of a sum of differences, one of each database, by flipping their signs.

    Exact up to 20 databases that differ, else by 20,000 random flips with a fixed seed.

    >>> sign_flip_p([3, 2, 1]), sign_flip_p([3, -2, -1]), sign_flip_p([])
    (0.25, 1.0, 1.0)
    """
    moved = [difference for difference in differences if difference]
    observed = abs(sum(moved))
    if len(moved) > EXACT_DATABASES:
        signs = np.random.default_rng(0).choice([-1, 1], size=(FLIPS, len(moved)))
        reached = np.abs(signs @ np.array(moved)) >= observed
        return float((1 + reached.sum()) / (1 + FLIPS))
    sums = np.zeros(1, dtype=np.int64)
    for difference in moved:
        sums = np.concatenate([sums + difference, sums - difference])
    return float(np.mean(np.abs(sums) >= observed))


def remark(databases: int) -> str:
    """Warning next to figures of few databases; empty from 6 on, and if databases are unknown."""
    if not 0 < databases < FEW_DATABASES:
        return ""
    if databases == 1:
        return "1 database: figures are by question and hold only for this database."
    few = f"{databases} databases are few: a test by database shows nothing below {FEW_DATABASES}"
    return f"{few}, so there is no p."


def interval_unit(databases: Iterable[int]) -> str:
    """Unit of the 95% intervals of figures, each given by its number of databases.

    >>> interval_unit([1, 3]), interval_unit([1])
    ('by database', 'by question')
    """
    return "by database" if any(count > 1 for count in databases) else "by question"


def database_counts(sets: Mapping[str, Any]) -> dict[str, int]:
    """Number of databases of each of the `sets` of an `evaluation.json`; 0 if unknown."""
    return {name: len(scores["overall"]["strict"].get("by_database", {})) for name, scores in sets.items()}


def remarks(sets: Mapping[str, Any]) -> dict[str, str]:
    """Warnings about the `sets` of an `evaluation.json` that have few databases, by name."""
    counts = database_counts(sets)
    return {name: text for name, count in counts.items() if (text := remark(count))}
