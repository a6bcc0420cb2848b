"""Verdict on a predicted query, by the gold query's result."""

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from marshal import dumps
from threading import Lock
from typing import Literal

from text2sql_grpo.grading.gold_result import GoldResult
from text2sql_grpo.grading.strict import Difference, bird_execution_accuracy
from text2sql_grpo.grading.suite import TestSuite, Trial
from text2sql_grpo.sql.address import Database
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.lru import Lru
from text2sql_grpo.sql.outcome import ExecutionOutcome

MAX_READINGS = 3  # of gold queries and answers, where the database changes between the two
MAX_SUITES_AT_ONCE = 32  # whose databases are read together; PostgreSQL's are dropped when others come
MAX_GOLD_BYTES = 200_000_000  # of the gold queries' rows in memory
CHANGING = "the answer reads the clock in a form that was not judged as of a later day, or random values"
_CHANGES = re.compile(
    r"\b(now|today|rand|localtime|timeofday)|clock_|current_|_timestamp|uuid", re.IGNORECASE
)

Reason = Difference | Literal["test_database", "not_submitted", "query_failed", "gold_failed"]
REASONS: dict[Reason, str] = {
    "equal": "the rows of the gold query",
    "row_count": "more or fewer rows than the gold query",
    "columns": "more or fewer columns than the gold query",
    "order": "the rows of the gold query, in a different order",
    "values": "as many rows and columns as the gold query, with different values",
    "truncated": "rows were cut at a limit, so the results could not be compared",
    "test_database": "right on the database, wrong on a test database",
    "not_submitted": "the episode ended without a final query",
    "query_failed": "the final query failed or took too long",
    "gold_failed": "the gold query failed, so the answer was not judged",
}

_Read = tuple[list[GoldResult], ExecutionOutcome | None]  # of the gold queries, and of the submitted one
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Submission:
    """Answer to a question.

    Attributes:
        database: The question's database.
        gold_sql: Its gold query.
        sql: The submitted query; None if nothing was submitted.
        other_golds: Other accepted queries.
    """

    database: Database
    gold_sql: str
    sql: str | None
    other_golds: tuple[str, ...] = ()

    @property
    def golds(self) -> tuple[str, ...]:
        """All accepted queries."""
        return (self.gold_sql, *self.other_golds)


@dataclass(frozen=True)
class Verdict:
    """Verdict on a submitted query's result, with its reason.

    Attributes:
        official: BIRD's execution accuracy.
        strict: Strict comparison, which training rewards; if the grader has a test suite, on the gold query's
            test databases, and on candidates drawn for the answer, too.
        reason: `equal` if `strict`; else the fault. With `test_database` the result is right on the database
            itself and wrong on a test database or a candidate. With `gold_failed` the prediction is unknown:
            mask the sample, neither pay nor punish it.
        executes: True if the submitted query ran to its end (its rows may have been cut).
        gap: Why an accepted answer was checked less than configured; empty if it was not, or not accepted.
    """

    official: bool
    strict: bool
    reason: Reason
    executes: bool
    gap: str = ""


class Grader:
    """Grader by execution, with a cache of gold queries' results, of at most `MAX_GOLD_BYTES`.

    With a test suite, a prediction that is right on the database must also have the gold query's result on
    each of its test databases, and on candidates drawn for the prediction; a wrong one costs nothing more.

    A gold query and an answer are compared as of one version of the database: if it changed between them,
    both are read again, `MAX_READINGS` times at most. A gold query whose result changes is logged and
    counted.

    Attributes:
        suite: Test suite; None to judge on the database alone.
        accepted: Number of accepted answers by their `Verdict.gap`: the one place that counts gaps.
        changed_golds: Databases and gold queries that returned another result, or failed, at a later time.
    """

    def __init__(self, executor: SQLExecutor, *, suite: TestSuite | None = None) -> None:
        self.suite = suite
        self.accepted: Counter[str] = Counter()
        self.changed_golds: set[tuple[Database, str]] = set()
        self._executor = executor
        self._golds: Lru[tuple[Database, str], tuple[GoldResult, object]] = Lru(MAX_GOLD_BYTES)
        self._lock = Lock()

    def grade(
        self,
        database: Database,
        gold_sql: str,
        predicted_sql: str | None,
        *,
        other_golds: Sequence[str] = (),
    ) -> Verdict:
        """Grade one submitted query, None if nothing was submitted; see `grade_many`."""
        return self.grade_many([Submission(database, gold_sql, predicted_sql, tuple(other_golds))])[0]

    def grade_many(self, submissions: Sequence[Submission]) -> list[Verdict]:
        """Grade submitted queries, which run in one batch, and those right on their database in another.

        A gold query that is not usable gives `gold_failed`. With several accepted gold queries a prediction
        is right if it agrees with one of them, on its test databases too; else the reason is the first one's,
        or `gold_failed` if one of them is not usable. The official verdict uses the first one alone.
        """
        read = self._read(submissions)
        reasons = [
            _reasons(golds, predicted, one.sql or "")
            for one, (golds, predicted) in zip(submissions, read, strict=True)
        ]
        accepted: dict[int, str] = {}
        for place in range(max(map(len, reasons), default=0)):
            right = [i for i, by_gold in enumerate(reasons) if by_gold[place : place + 1] == ["equal"]]
            asked = [index for index in right if index not in accepted]
            for start in range(0, len(asked), MAX_SUITES_AT_ONCE):
                part = asked[start : start + MAX_SUITES_AT_ONCE]
                gaps = self._gaps([submissions[index] for index in part], place)
                accepted |= {i: gap for i, gap in zip(part, gaps, strict=True) if gap is not None}
        self.accepted.update(accepted.values())
        return [
            _verdict(golds[0], predicted, by_gold, accepted.get(index))
            for index, ((golds, predicted), by_gold) in enumerate(zip(read, reasons, strict=True))
        ]

    def _read(self, submissions: Sequence[Submission]) -> list[_Read]:
        """Results of gold and submitted queries on one version of each database."""
        found: dict[int, _Read] = {}
        left = list(range(len(submissions)))
        for _ in range(MAX_READINGS):
            databases = {submissions[index].database for index in left}
            versions = {database: self._executor.version(database) for database in databases}
            asked = []
            for index in left:
                one = submissions[index]
                version = versions[one.database]
                golds = [self.gold_result(one.database, sql, version=version) for sql in one.golds]
                found[index] = (golds, None)
                if one.sql is not None and golds[0].is_usable:
                    asked.append((index, (one.database, one.sql)))
            outcomes = self._executor.execute_many([query for _, query in asked])
            for (index, _), outcome in zip(asked, outcomes, strict=True):
                found[index] = (found[index][0], outcome)
            changed = {
                database for database in databases if self._executor.version(database) != versions[database]
            }
            left = [index for index in left if submissions[index].database in changed]
            if not left:
                break
        return [found[index] for index in range(len(submissions))]

    def _gaps(self, submissions: Sequence[Submission], place: int) -> list[str | None]:
        """Gap of each prediction that the test databases of a gold query accept; None for the others.

        Args:
            submissions: Predictions that are right on their databases.
            place: Place of the gold query among the accepted ones.
        """
        if self.suite is None:
            return ["" for _ in submissions]
        asked = [(one.database, one.golds[place], one.sql or "") for one in submissions]
        suites = [self.suite.databases(*one) for one in asked]
        judged = [self.gold_result(database, gold).on_later_day(sql) for database, gold, sql in asked]
        queries = [
            (test_database, sql)
            for sql, suite in zip(judged, suites, strict=True)
            if sql is not None
            for test_database in suite.databases
        ]
        outcomes = iter(self._executor.execute_many(queries))
        gaps: list[str | None] = []
        for (database, gold_sql, _), sql, suite in zip(asked, judged, suites, strict=True):
            if sql is None:
                gaps.append(None)
                continue
            golds = [self.gold_result(test_database, gold_sql) for test_database in suite.databases]
            both = list(zip(golds, islice(outcomes, len(golds)), strict=True))
            usable = [one for one in both if one[0].is_usable]  # as it was when the database was made
            agrees = all(gold.accepts(outcome, sql, may_find_nothing=True) for gold, outcome in usable)
            trial = Trial(is_refuted=not agrees)
            if agrees and suite.databases:
                trial = self.suite.counterexample(database, gold_sql, sql)
            changes = any(outcome.is_volatile and not gold.outcome.is_volatile for gold, outcome in both)
            changing = CHANGING if changes and _CHANGES.search(sql) else ""
            gaps.append(None if trial.is_refuted else suite.gap or trial.gap or changing)
        return gaps

    def gold_result(self, database: Database, gold_sql: str, *, version: object = None) -> GoldResult:
        """Result of a gold query on one database, run at the first call.

        Args:
            version: The database's version: the gold query runs again if it is another; None for any.
        """
        key = (database, gold_sql)
        with self._lock:
            known, known_version = self._golds.get(key) or (None, None)
            if known is not None and version in (None, known_version):
                return known
        gold = GoldResult.of(self._executor, database, gold_sql)
        differs = known is not None and not known.accepts(gold.outcome, gold_sql)
        if gold.outcome.status in ("ok", "error") and differs and key not in self.changed_golds:
            _logger.warning("The database changed: this gold query has another result now: %s", gold_sql)
            self.changed_golds.add(key)
        if gold.outcome.is_ok:  # failures are not cached: a time-out under load may not happen again
            with self._lock:
                self._golds.put(key, (gold, version), size=len(dumps(gold.outcome.rows)))
        return gold


def _reasons(
    golds: Sequence[GoldResult], predicted: ExecutionOutcome | None, predicted_sql: str
) -> list[Reason]:
    """Reason by each gold query; none of a prediction that did not run."""
    if predicted is None or not predicted.is_ok:
        return []
    return [gold.difference(predicted, predicted_sql) if gold.is_usable else "gold_failed" for gold in golds]


def _verdict(
    gold: GoldResult, predicted: ExecutionOutcome | None, reasons: Sequence[Reason], gap: str | None
) -> Verdict:
    """Verdict on one submission, by its first gold query's result, and its reason by each gold query.

    Args:
        predicted: Outcome of the submitted query; None if it did not run.
        gap: `Verdict.gap` of an accepted answer; None for a refused one.
    """
    if not gold.is_usable:
        return Verdict(official=False, strict=False, reason="gold_failed", executes=False)
    if predicted is None or not predicted.is_ok:
        reason: Reason = "not_submitted" if predicted is None else "query_failed"
        return Verdict(official=False, strict=False, reason=reason, executes=False)
    official = bird_execution_accuracy(gold.outcome, predicted)
    if gold.outcome.is_truncated:
        official = reasons[0] in ("equal", "order")
    if gap is not None:
        return Verdict(official, strict=True, reason="equal", executes=True, gap=gap)
    refused: Reason = "gold_failed" if "gold_failed" in reasons else reasons[0]
    return Verdict(official, False, "test_database" if refused == "equal" else refused, executes=True)
