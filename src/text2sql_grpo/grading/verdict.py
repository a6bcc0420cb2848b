"""Verdict on a predicted query, by the gold's result."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Literal

from text2sql_grpo.grading.bird import bird_execution_accuracy
from text2sql_grpo.grading.engine_neighbours import EngineNeighbours
from text2sql_grpo.grading.gold_result import GoldResult
from text2sql_grpo.grading.neighbours import Neighbours
from text2sql_grpo.grading.refute import Refuter
from text2sql_grpo.grading.strict import Difference, find_nothing
from text2sql_grpo.sql.address import Database
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits

MAX_READINGS = 3  # of a gold and an answer, where the database changes between the two

Reason = Difference | Literal["neighbour", "not_submitted", "query_failed", "gold_failed"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """Verdict on a submitted query's result, with its reason.

    Attributes:
        official: BIRD's execution accuracy.
        strict: Strict comparison, which training rewards; on neighbour databases, and on variants made for
            the answer, too if the grader has them.
        reason: `equal` if `strict`; else the fault. With `neighbour` the result is right on the database
            itself and wrong on a neighbour or variant. With `gold_failed` the prediction is unknown: mask
            the sample, neither pay nor punish it.
        executes: True if the submitted query ran to its end (its rows may have been cut).
        uncovered: Reason why an accepted answer was tried on fewer neighbours than asked for, or on such as
            prove little; empty if it was tried on all, or was not accepted.
    """

    official: bool
    strict: bool
    reason: Reason
    executes: bool
    uncovered: str = ""


class Grader:
    """Grader by execution, with a cache of at most `max_cached_golds` results of golds.

    With `neighbours`, a prediction that is right on the database must also have the gold's result on each
    of the gold's neighbours, and on variants made for the prediction; a wrong one costs nothing more.

    A gold and an answer are compared as of one version of the database: if it changed between them, both are
    read again, `MAX_READINGS` times at most. A gold whose result changes is logged and counted.

    Attributes:
        changed_golds: Databases and golds that returned another result, or failed, at a later time.
        gaps: Reason of each database and gold with fewer neighbours than asked for; without neighbours, of
            each whose answers were accepted.
    """

    def __init__(
        self,
        executor: SQLExecutor,
        *,
        limits: Limits | None = None,
        max_cached_golds: int = 4096,
        neighbours: Neighbours | None = None,
        neighbour_url: str = "",
    ) -> None:
        self.neighbours: EngineNeighbours | None = None
        if neighbours is not None:
            self.neighbours = EngineNeighbours(executor, neighbours, limits=limits, url=neighbour_url)
        self.refuter = Refuter(executor, limits=limits) if neighbours is not None else None
        self.gaps = self.neighbours.gaps if self.neighbours is not None else {}
        self._executor = executor
        self._limits = limits
        self._max_cached_golds = max_cached_golds
        self.changed_golds: set[tuple[Database, str]] = set()
        self._golds: OrderedDict[tuple[Database, str], tuple[GoldResult, object]] = OrderedDict()
        self._lock = Lock()

    def grade(
        self,
        database: Database,
        gold_sql: str,
        predicted_sql: str | None,
        *,
        other_golds: Sequence[str] = (),
    ) -> Verdict:
        """Grade one submitted query; None if nothing was submitted.

        A gold that is not usable gives `gold_failed`. With several accepted golds a
        prediction is right if it agrees with one of them, on that gold's neighbours too; else the reason
        is the first gold's, or `gold_failed` if one of them is not usable. The official verdict uses the
        first gold alone.
        """
        gold, predicted = self._read(database, gold_sql, predicted_sql)
        if not gold.is_usable:
            return Verdict(official=False, strict=False, reason="gold_failed", executes=False)
        if predicted_sql is None or predicted is None:
            return Verdict(official=False, strict=False, reason="not_submitted", executes=False)
        if not predicted.is_ok:
            return Verdict(official=False, strict=False, reason="query_failed", executes=False)
        official = bird_execution_accuracy(gold.outcome, predicted)
        if gold.outcome.is_truncated:
            official = gold.difference(predicted, predicted_sql) in ("equal", "order")
        accepting = gold_sql
        reason = self._reason(database, gold_sql, predicted_sql, predicted)
        for other_sql in other_golds if reason != "equal" else ():
            found = self._reason(database, other_sql, predicted_sql, predicted)
            if found in ("equal", "gold_failed"):
                reason, accepting = found, other_sql
            if found == "equal":
                break
        is_right = reason == "equal"
        uncovered = ""
        if is_right and self.neighbours is None:
            self.gaps[str(database), accepting] = "none asked for, as grading.neighbours is 0"
        elif is_right and self.neighbours is not None:
            uncovered = self.neighbours.cover(database, accepting, predicted_sql).gap
        return Verdict(official, is_right, reason, executes=True, uncovered=uncovered)

    def _read(
        self, database: Database, gold_sql: str, predicted_sql: str | None
    ) -> tuple[GoldResult, ExecutionOutcome | None]:
        """Results of a gold and of a submitted query on one version of the database."""
        for _ in range(MAX_READINGS):
            version = self._executor.version(database)
            gold = self.gold_result(database, gold_sql, version=version)
            if predicted_sql is None or not gold.is_usable:
                return gold, None
            predicted = self._executor.execute(database, predicted_sql, limits=self._limits)
            if self._executor.version(database) == version:
                break
        return gold, predicted

    def _reason(
        self, database: Database, gold_sql: str, predicted_sql: str, predicted: ExecutionOutcome
    ) -> Reason:
        """Reason of the verdict by one gold, on a prediction that ran on the database."""
        gold = self.gold_result(database, gold_sql)
        if not gold.is_usable:
            return "gold_failed"
        difference = gold.difference(predicted, predicted_sql)
        if difference != "equal" or self.neighbours is None or self.refuter is None:
            return difference
        neighbours = self.neighbours.of(database, gold_sql, predicted_sql)
        asked = [(neighbour, predicted_sql) for neighbour in neighbours]
        outcomes = self._executor.execute_many(asked, limits=self._limits)
        for neighbour, outcome in zip(neighbours, outcomes, strict=True):
            gold = self.gold_result(neighbour, gold_sql)
            if not gold.is_usable:  # it was when the neighbour was made: skip
                continue
            if not outcome.is_ok:
                return "neighbour"
            if find_nothing(gold.outcome, outcome):
                continue
            # Rows that tie at the gold's LIMIT are a chance of the neighbour: all of them are right too.
            if gold.difference(outcome, predicted_sql, accepts_whole_ties=True) != "equal":
                return "neighbour"
        if neighbours and self.neighbours.refutes(self.refuter, database, gold_sql, predicted_sql):
            return "neighbour"
        return "equal"

    def gold_result(self, database: Database, gold_sql: str, *, version: object = None) -> GoldResult:
        """Result of a gold on one database, run at the first call.

        Args:
            version: The database's version: the gold runs again if it is another; None for any.
        """
        key = (database, gold_sql)
        with self._lock:
            known, known_version = self._golds.get(key, (None, None))
            if known is not None and version in (None, known_version):
                self._golds.move_to_end(key)
                return known
        gold = GoldResult(self._executor, database, gold_sql, limits=self._limits)
        differs = known is not None and known.difference(gold.outcome, gold_sql) != "equal"
        if gold.outcome.status in ("ok", "error") and differs and key not in self.changed_golds:
            _logger.warning("The database changed: this gold has another result now: %s", gold_sql)
            self.changed_golds.add(key)
        if gold.outcome.is_ok:  # failures are not cached: a time-out under load may not happen again
            with self._lock:
                self._golds[key] = (gold, version)
                while len(self._golds) > self._max_cached_golds:
                    self._golds.popitem(last=False)
        return gold
