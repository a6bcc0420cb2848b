"""Votes of several answers to one question, by their results, and what the shares of votes are worth."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from statistics import fmean
from typing import Any

import numpy as np

from text2sql_grpo.grading import Grader
from text2sql_grpo.grading.gold_result import have_one_result
from text2sql_grpo.sql.address import Database

MAX_SUITES = 3  # most frequent queries whose test databases vote
MAX_TEST_DATABASES = 6
COVERAGES = (50, 70, 90)  # percent of the questions
BINS = 5
SURE = 0.8  # accuracy of the answers that count as sure


@dataclass(frozen=True)
class Vote:
    """Answer that a vote chooses.

    Attributes:
        place: Its index among the answers; None if no query runs.
        share: Mean share of all answers, in [0, 1], that have its result, over the databases of the vote. An
            empty result is one like any other; a query that fails, or is missing, agrees with none.
    """

    place: int | None
    share: float


@dataclass(frozen=True)
class Votes:
    """Votes on one question: on its database alone, and on test databases too, which no gold query made."""

    plain: Vote
    soft: Vote


def vote(queries: Sequence[str | None], databases: Sequence[Database], grader: Grader) -> Vote:
    """Choose the answer whose result the most answers have on these databases; the first of equal ones."""
    counts = Counter(sql for sql in queries if sql is not None)
    agreeing = dict.fromkeys(counts, 0)  # summed as integers, so that equal shares are equal floats
    for database in databases:
        results = {sql: grader.gold_result(database, sql) for sql in counts}
        for sql, result in results.items():
            agreeing[sql] += sum(counts[one] for one in counts if have_one_result(result, results[one]))
    best = max(agreeing, key=lambda sql: agreeing[sql], default=None)
    if best is None or not agreeing[best]:
        return Vote(None, 0.0)
    return Vote(queries.index(best), agreeing[best] / (len(queries) * len(databases)))


def votes(queries: Sequence[str | None], database: Database, grader: Grader) -> Votes:
    """Vote on the answers to one question.

    Args:
        queries: Submitted queries, None where nothing was submitted.
        database: The question's database.
        grader: Its test suite makes the test databases, of the most frequent queries in turn.
    """
    counts = Counter(sql for sql in queries if sql is not None)
    suites: list[Sequence[Database]] = []
    if grader.suite is not None and len(counts) > 1:
        common = [sql for sql, _ in counts.most_common(MAX_SUITES)]
        suites = [grader.suite.databases(database, sql).databases for sql in common]
    in_turn = (place for place in chain.from_iterable(zip_longest(*suites)) if place is not None)
    test_databases = islice(in_turn, MAX_TEST_DATABASES)
    return Votes(vote(queries, [database], grader), vote(queries, [database, *test_databases], grader))


def risk_coverage(confidences: Sequence[float], is_right: Sequence[bool]) -> dict[str, Any]:
    """How far confidence tells right answers from wrong ones.

    Returns:
        `accuracy_at`: accuracy of the most confident 50, 70 and 90% of the questions, ties shared evenly;
        `sure_from`: lowest confidence from which at least 80% are right, None if there is none;
        `aurc`: area under the risk-coverage curve, 0 is best (Geifman and El-Yaniv 2017, arXiv:1705.08500);
        `calibration`: questions, mean confidence and accuracy in each fifth of [0, 1] that holds any; `ece`:
        expected calibration error (Guo et al. 2017, arXiv:1706.04599).

    >>> found = risk_coverage([0.9, 0.9, 0.2, 0.2], [True, True, False, True])
    >>> found["accuracy_at"], found["ece"]
    ({'50': 1.0, '70': 0.857143, '90': 0.777778}, 0.2)
    """
    known, truth = np.array(confidences, dtype=float), np.array(is_right, dtype=float)
    total = len(known)
    if not total:
        return {}
    levels = np.unique(known)[::-1]
    asked = np.array([0, *(int((known >= level).sum()) for level in levels)])
    correct = np.array([0, *(truth[known >= level].sum() for level in levels)])
    covered = np.interp(np.arange(1, total + 1), asked, correct)
    places = np.minimum((known * BINS).astype(int), BINS - 1)
    bins = [(known[places == i], truth[places == i]) for i in range(BINS) if (places == i).any()]
    sure = [
        float(level)
        for level, count, right in zip(levels, asked[1:], correct[1:], strict=True)
        if right >= SURE * count
    ]
    error = sum(len(own) * abs(own.mean() - was.mean()) for own, was in bins) / total
    counts = {percent: percent / 100 * total for percent in COVERAGES}
    return {
        "accuracy_at": {
            str(percent): round(float(np.interp(count, asked, correct)) / count, 6)
            for percent, count in counts.items()
        },
        "sure_from": round(sure[-1], 6) if sure else None,
        "aurc": round(fmean(1 - covered / np.arange(1, total + 1)), 6),
        "calibration": [
            [len(own), round(float(own.mean()), 6), round(float(was.mean()), 6)] for own, was in bins
        ],
        "ece": round(float(error), 6),
    }
