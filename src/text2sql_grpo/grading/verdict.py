"""From a gold and a predicted query to a verdict."""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Literal

from text2sql_grpo.grading.official import bird_execution_accuracy
from text2sql_grpo.grading.strict import Difference, compare_strict, has_top_level_order
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits

Reason = Difference | Literal["not_submitted", "query_failed", "gold_failed"]


@dataclass(frozen=True)
class Verdict:
    """Is the submitted query's result right, and if not, why.

    Attributes:
        official: BIRD's execution accuracy.
        strict: The strict comparison, which training pays for.
        reason: `equal` where `strict`; else what was wrong. With `gold_failed` nothing is known about
            the prediction: mask the sample, neither pay nor punish it.
        executes: True if the submitted query ran to its end (its rows may have been cut).
    """

    official: bool
    strict: bool
    reason: Reason
    executes: bool


class Grader:
    """Grades predictions by execution, and remembers the results of golds, at most `max_cached_golds`.

    Databases must not change while it lives.
    """

    def __init__(
        self, executor: SQLExecutor, *, limits: Limits | None = None, max_cached_golds: int = 1024
    ) -> None:
        self._executor = executor
        self._limits = limits
        self._max_cached_golds = max_cached_golds
        self._golds: OrderedDict[tuple[Path, str], ExecutionOutcome] = OrderedDict()
        self._lock = Lock()

    def grade(self, database: Path, gold_sql: str, predicted_sql: str | None) -> Verdict:
        """The verdict on one submitted query; None means that nothing was submitted.

        A gold that fails, or whose rows are cut, gives `gold_failed`.
        """
        gold = self._gold_outcome(database, gold_sql)
        if not gold.is_ok or gold.is_truncated:
            return Verdict(official=False, strict=False, reason="gold_failed", executes=False)
        if predicted_sql is None:
            return Verdict(official=False, strict=False, reason="not_submitted", executes=False)
        predicted = self._executor.execute(database, predicted_sql, limits=self._limits)
        if not predicted.is_ok:
            return Verdict(official=False, strict=False, reason="query_failed", executes=False)
        reason = compare_strict(gold, predicted, ordered=has_top_level_order(gold_sql))
        official = bird_execution_accuracy(gold, predicted)
        return Verdict(official=official, strict=reason == "equal", reason=reason, executes=True)

    def _gold_outcome(self, database: Path, gold_sql: str) -> ExecutionOutcome:
        key = (database, gold_sql)
        with self._lock:
            if key in self._golds:
                self._golds.move_to_end(key)
                return self._golds[key]
        outcome = self._executor.execute(database, gold_sql, limits=self._limits)
        if outcome.is_ok:  # a failure is not remembered: a time-out under load may not happen again
            with self._lock:
                self._golds[key] = outcome
                while len(self._golds) > self._max_cached_golds:
                    self._golds.popitem(last=False)
        return outcome
