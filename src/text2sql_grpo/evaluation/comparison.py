"""Comparison of two models on the same questions: gained and lost ones, tests and intervals."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import sqrt
from typing import Any, Literal, Self

from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.answers import Judged
from text2sql_grpo.evaluation.statistics import (
    FEW_DATABASES,
    Accuracy,
    Interval,
    interval_by_database,
    remark,
    sign_flip_p,
)
from text2sql_grpo.phrases import many

Grading = Literal["strict", "official"]
GRADINGS: tuple[Grading, ...] = ("strict", "official")
LEVEL = 0.05


@dataclass(frozen=True)
class Paired:
    """Right and wrong answers of two models to the same questions.

    Attributes:
        both: Number of questions right in both.
        gained: Number right in the trained model alone.
        lost: Number right in the base alone.
        neither: Number wrong in both.
        by_database: The same counts of each database; empty if unknown.
    """

    both: int
    gained: int
    lost: int
    neither: int
    by_database: Mapping[str, "Paired"] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of questions."""
        return self.both + self.gained + self.lost + self.neither

    @property
    def base(self) -> Accuracy:
        """Accuracy of the base."""
        counts = {name: (one.both + one.lost, one.total) for name, one in self.by_database.items()}
        return Accuracy(self.both + self.lost, self.total, counts)

    @property
    def trained(self) -> Accuracy:
        """Accuracy of the trained model."""
        counts = {name: (one.both + one.gained, one.total) for name, one in self.by_database.items()}
        return Accuracy(self.both + self.gained, self.total, counts)

    @property
    def difference(self) -> float:
        """Accuracy of the trained model minus that of the base, in [-1, 1]."""
        return (self.gained - self.lost) / self.total if self.total else 0.0

    @property
    def p_value(self) -> float | None:
        """Two-sided p-value of the difference, by database; the naive one with fewer than two databases.

        None from two to five databases, for which it would be at least 0.06.
        """
        if len(self.by_database) < 2:
            return self.naive_p_value
        if len(self.by_database) < FEW_DATABASES:
            return None
        return sign_flip_p(one.gained - one.lost for one in self.by_database.values())

    @property
    def naive_p_value(self) -> float:
        """Two-sided p-value by question; 1 if no answer changed.

        Exact McNemar test: each changed question is a coin toss (McNemar 1947, Psychometrika 12, 153-157).

        >>> Paired(both=50, gained=9, lost=1, neither=20).naive_p_value
        0.021484375
        """
        changed = self.gained + self.lost
        ks = range(1, min(self.gained, self.lost) + 1)
        tail = sum(accumulate(ks, lambda binomial, k: binomial * (changed - k + 1) // k, initial=1))
        return min(1.0, 2 * tail / (1 << changed))

    @property
    def interval(self) -> Interval:
        """95% interval of the difference by database, in [-1, 1]; see `interval_by_database`."""
        sums = [(one.gained - one.lost, one.total) for one in self.by_database.values()]
        return interval_by_database(sums, self.naive_interval, lowest=-1)

    @property
    def naive_interval(self) -> Interval:
        """95% interval by question; Newcombe 1998 (Stat. Med. 17, 2635-2650), method 10."""
        if self.total == 0:
            return -1.0, 1.0
        after, before = self.trained, self.base
        correlation = self._correlation()

        def reach(one: float, other: float) -> float:
            return sqrt(max(0.0, one * one - 2 * correlation * one * other + other * other))

        (after_low, after_high), (low, high) = after.naive_interval, before.naive_interval
        below = reach(after.accuracy - after_low, high - before.accuracy)
        above = reach(after_high - after.accuracy, before.accuracy - low)
        return max(-1.0, self.difference - below), min(1.0, self.difference + above)

    def _correlation(self) -> float:
        """Correlation of the two models' answers, shrunk towards 0."""
        product = self.base.correct * self.trained.correct
        product *= (self.total - self.base.correct) * (self.total - self.trained.correct)
        if product == 0:
            return 0.0
        excess = float(self.both * self.neither - self.gained * self.lost)
        if excess > 0:
            excess = max(0.0, excess - self.total / 2)
        return excess / sqrt(product)

    def record(self) -> dict[str, Any]:
        """Fields in `comparison.json`."""
        return {
            "base": self.base.record(),
            "trained": self.trained.record(),
            "both": self.both,
            "gained": self.gained,
            "lost": self.lost,
            "neither": self.neither,
            "difference": round(self.difference, 6),
            "interval": [round(bound, 6) for bound in self.interval],
            "naive_interval": [round(bound, 6) for bound in self.naive_interval],
            "p_value": None if self.p_value is None else float(f"{self.p_value:.4g}"),
            "naive_p_value": float(f"{self.naive_p_value:.4g}"),
            "databases": len(self.by_database),
        }


def paired(answers: Iterable[tuple[str, bool, bool]]) -> Paired:
    """Count answers, each given by the database of its question, and whether base and other are right."""
    found: dict[str, Counter[tuple[bool, bool]]] = defaultdict(Counter)
    for database, base, other in answers:
        found[database][base, other] += 1
    by_database = {name: _paired(counts) for name, counts in found.items()}
    return replace(_paired(sum(found.values(), Counter())), by_database=by_database)


@dataclass(frozen=True)
class Comparison:
    """Answers of two models to the same questions.

    Attributes:
        pairs: Answers of base and trained model to each question.
        only_base: Number of questions answered by the base alone, left out.
        only_trained: Number of questions answered by the trained model alone, left out.
    """

    pairs: list[tuple[Judged, Judged]]
    only_base: int
    only_trained: int

    def sets(self) -> list[str]:
        """Names of the held-out sets, in order."""
        return list(dict.fromkeys(base.set for base, _ in self.pairs))

    def paired(self, grading: Grading = "strict", **where: str) -> Paired:
        """Counts over the questions with these fields, such as `set="dev", family="lookup"`."""
        return paired(
            (base.database, getattr(base, grading), getattr(trained, grading))
            for base, trained in self.pairs
            if all(getattr(base, name) == value for name, value in where.items())
        )

    def changed(self) -> list[tuple[Judged, Judged]]:
        """Gained questions, then lost ones, by the strict verdict."""
        gained = [pair for pair in self.pairs if pair[1].strict and not pair[0].strict]
        return gained + [pair for pair in self.pairs if pair[0].strict and not pair[1].strict]

    def record(self) -> dict[str, Any]:
        """Fields in `comparison.json`."""
        return {
            "verdict": self.verdict(),
            "overall": self._both(),
            "sets": {name: self._set_record(name) for name in self.sets()},
            "only_base": self.only_base,
            "only_trained": self.only_trained,
            "changed": [_change(base, trained) for base, trained in self.changed()],
        }

    def values(self, name: str, kind: str) -> list[str]:
        """Values of `family` or `difficulty` in a set."""
        return sorted({getattr(base, kind) for base, _ in self.pairs if base.set == name})

    def only(self, keys: Collection[tuple[str, str]]) -> Self:
        """Comparison on these questions alone."""
        return replace(self, pairs=[pair for pair in self.pairs if pair[0].key in keys])

    def _set_record(self, name: str) -> dict[str, Any]:
        record: dict[str, Any] = {"overall": self._both(set=name)}
        for kind in ("family", "difficulty"):
            record[f"by_{kind}"] = {
                value: self._both(set=name, **{kind: value}) for value in self.values(name, kind)
            }
        return record

    def _both(self, **where: str) -> dict[str, Any]:
        return {grading: self.paired(grading, **where).record() for grading in GRADINGS}

    def verdict(self) -> str:
        """Summary in plain words: the difference of the models, and whether it could be chance."""
        paired = self.paired()
        if paired.gained + paired.lost == 0:
            return f"The two differ on none of {many(paired.total, 'question')}."
        is_clustered = len(paired.by_database) > 1
        side = "better" if paired.difference > 0 else "worse" if paired.difference < 0 else "as good"
        points = f"{paired.difference * 100:+.1f} points ({_range(paired.interval)}"
        if is_clustered:
            points += f" by database; {_range(paired.naive_interval)} by question"
        text = (
            f"Of {many(paired.total, 'question')} the trained model gains {paired.gained} and loses "
            f"{paired.lost}: {side}, {points})."
        )
        if paired.p_value is not None:
            chance = "is hardly chance" if paired.p_value < LEVEL else "could be chance"
            odds = _odds(paired.p_value)
            odds += f" ({_odds(paired.naive_p_value)} by question)" if is_clustered else ""
            text += f" This {chance}: two equally good models would differ as much or more with "
            text += f"probability {odds}."
        return f"{text} {remark(len(paired.by_database))}".strip()


def _range(interval: Interval) -> str:
    return " to ".join(f"{bound * 100:+.1f}" for bound in interval)


def _odds(p_value: float) -> str:
    return "less than 0.0001" if p_value < 1e-4 else f"{p_value:.2g}"


def _paired(counts: Counter[tuple[bool, bool]]) -> Paired:
    return Paired(counts[True, True], counts[False, True], counts[True, False], counts[False, False])


def _change(base: Judged, trained: Judged) -> dict[str, Any]:
    return {
        "change": "gained" if trained.strict else "lost",
        "set": base.set,
        "example": base.example,
        "database": base.database,
        "family": base.family,
        "question": base.question,
        "gold_sql": base.gold_sql,
        "base_sql": base.final_sql,
        "base_reason": base.reason,
        "trained_sql": trained.final_sql,
        "trained_reason": trained.reason,
    }


def compare(base: Sequence[Judged], trained: Sequence[Judged]) -> Comparison:
    """Match the questions that both answered, in the base's order.

    Raises:
        DataError: A question twice, with different golds, or no question in common.
    """
    first, second = _by_question(base), _by_question(trained)
    pairs = [(one, second[key]) for key, one in first.items() if key in second]
    if not pairs:
        raise DataError(
            "cannot compare: no question in common "
            f"({len(first)} of the base, {len(second)} of the trained model)"
        )
    for one, other in pairs:
        if (one.gold_sql, one.question) != (other.gold_sql, other.question):
            raise DataError(
                "cannot compare: the sides have another text or gold of one question "
                f"({one.example} in {one.set})"
            )
    return Comparison(pairs, len(first) - len(pairs), len(second) - len(pairs))


def _by_question(answers: Sequence[Judged]) -> dict[tuple[str, str], Judged]:
    found = {one.key: one for one in answers}
    if len(found) != len(answers):
        raise DataError(f"each question must occur once, got {len(answers) - len(found)} of them again")
    return found
