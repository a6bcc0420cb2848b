"""Result of a gold on one database, and comparison of predictions with it."""

from functools import cached_property

from text2sql_grpo.grading.large import compare_large
from text2sql_grpo.grading.rows import TieGroup
from text2sql_grpo.grading.strict import Difference, compare_strict, has_top_level_order
from text2sql_grpo.grading.ties import tie_groups, widened_query
from text2sql_grpo.sql.address import Database, parse_address
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits


class GoldResult:
    """Outcome of a gold on one database, and the other results it allows.

    Attributes:
        sql: The gold.
        outcome: Outcome of the gold as written.
        is_usable: False if it failed, or if its rows were cut and the database cannot compare them, even
            with themselves, so that nothing can be compared to it.
    """

    def __init__(
        self, executor: SQLExecutor, database: Database, sql: str, *, limits: Limits | None = None
    ) -> None:
        self.outcome = executor.execute(database, sql, limits=limits)
        self._executor = executor
        self._database = database
        self.sql = sql
        self._limits = limits
        self._dialect = parse_address(database).dialect
        self._is_ordered = has_top_level_order(sql, self._dialect)
        self.is_usable = self.outcome.is_ok
        if self.outcome.is_truncated:
            self.is_usable = self.difference(self.outcome, sql) == "equal"

    def difference(self, predicted: ExecutionOutcome, predicted_sql: str) -> Difference:
        """Compare a prediction that ran by `compare_strict`, or by `compare_large` if both were cut."""
        if self.outcome.is_truncated and predicted.is_truncated:
            return compare_large(
                self._executor,
                self._database,
                (self.sql, self.outcome),
                (predicted_sql, predicted),
                ordered=self._is_ordered,
                limits=self._limits,
            )
        return compare_strict(self.outcome, predicted, ordered=self._is_ordered, ties=lambda: self._ties)

    @cached_property
    def _ties(self) -> tuple[TieGroup, ...] | None:
        widened = widened_query(self.sql, self.outcome.columns, self._dialect)
        if widened is None:
            return None
        outcome = self._executor.execute(self._database, widened.sql, limits=self._limits)
        return tie_groups(widened, self.outcome, outcome)
