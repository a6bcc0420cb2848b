"""Result of a gold on one database, and comparison of predictions with it."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cached_property, partial

from text2sql_grpo.grading.rows import TieGroup
from text2sql_grpo.grading.strict import Difference, column_order, compare_strict, has_top_level_order
from text2sql_grpo.grading.ties import tie_groups, widened_query
from text2sql_grpo.sql.address import Database, parse_address
from text2sql_grpo.sql.engines import DIALECTS
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Cell, ExecutionOutcome, Limits, Row

_MOMENT = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d(:?\d\d)?)?)?")

# Names that no table has: a prediction that ran by itself cannot read them.
_GOLD, _PREDICTED = "gold_5d0c71e8a6", "predicted_5d0c71e8a6"
_END = "; \t\r\n"


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

    def difference(
        self, predicted: ExecutionOutcome, predicted_sql: str, *, accepts_whole_ties: bool = False
    ) -> Difference:
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
        compare = partial(compare_strict, ordered=self._is_ordered, accepts_whole_ties=accepts_whole_ties)
        found = compare(self.outcome, predicted, ties=lambda: self._ties)
        if found not in ("values", "order") or not DIALECTS[self._dialect].has_dates:
            return found
        # Dates and moments are values there, not texts: other types and forms of one moment are equal.
        known, shown = (o._replace(rows=_with_moments(o.rows)) for o in (self.outcome, predicted))
        if (known.rows, shown.rows) == (self.outcome.rows, predicted.rows):
            return found
        return compare(known, shown, ties=lambda: self._tied_moments)

    @cached_property
    def _ties(self) -> tuple[TieGroup, ...] | None:
        widened = widened_query(self.sql, self.outcome.columns, self._dialect)
        if widened is None:
            return None
        outcome = self._executor.execute(self._database, widened.sql, limits=self._limits)
        return tie_groups(widened, self.outcome, outcome)

    @cached_property
    def _tied_moments(self) -> tuple[TieGroup, ...] | None:
        return self._ties and tuple(TieGroup(_with_moments(g.rows), g.n_taken) for g in self._ties)


def have_one_result(first: GoldResult, second: GoldResult) -> bool:
    """True if two queries are usable and agree, whichever of them decides on order and ties."""
    if not (first.is_usable and second.is_usable):
        return False
    found = first.difference(second.outcome, second.sql), second.difference(first.outcome, first.sql)
    return "equal" in found


def _with_moments(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Rows whose dates and moments are in one form."""
    return tuple(tuple(map(_moment, row)) for row in rows)


def _moment(cell: Cell) -> Cell:
    """Date, or moment in UTC, in ISO's form; midnight is the date. Other cells stay.

    >>> _moment("2020-01-31 02:00:00+02"), _moment("2020-01-31T10:00:00.500"), _moment("2020-01"), _moment(5)
    ('2020-01-31', '2020-01-31 10:00:00.500000', '2020-01', 5)
    """
    if not isinstance(cell, str) or not _MOMENT.fullmatch(cell):
        return cell
    try:
        moment = datetime.fromisoformat(cell)
        moment = moment if moment.tzinfo is None else moment.astimezone(UTC).replace(tzinfo=None)
    except (ValueError, OverflowError):
        return cell
    return moment.isoformat(sep=" ").removesuffix(" 00:00:00")


def compare_large(
    executor: SQLExecutor,
    database: Database,
    gold: tuple[str, ExecutionOutcome],
    predicted: tuple[str, ExecutionOutcome],
    *,
    ordered: bool,
    limits: Limits | None,
) -> Difference:
    """`equal`, or the first difference between two queries whose outcomes were both cut.

    The database compares the rows as bags, cells by its own rules. Of an order only the rows before the cut
    are compared, without ties. The result is `truncated` if the comparison fails or takes too long.
    """
    n_columns = len(gold[1].columns)
    if n_columns != len(predicted[1].columns):
        return "columns"
    found: Difference = "truncated"
    for order in (tuple(range(n_columns)), column_order(gold[1], predicted[1])):
        if order is None:
            continue
        outcome = executor.execute(database, _differing(gold[0], predicted[0], order), limits=limits)
        if outcome.is_ok and not outcome.rows:
            shown = tuple(tuple(row[index] for index in order) for row in predicted[1].rows)
            return "order" if ordered and shown != gold[1].rows else "equal"
        found = "values" if outcome.is_ok else found
    return found


def _differing(gold_sql: str, predicted_sql: str, order: Sequence[int]) -> str:
    """Query for a row that one result has more often than the other; `order`: see `column_order`."""
    gold_names = [f"c{index}" for index in range(len(order))]
    names = [f"c{order.index(index)}" for index in range(len(order))]
    columns = ", ".join(gold_names)

    def counted(name: str) -> str:
        return f"SELECT {columns}, count(*) FROM {name} GROUP BY {columns}"

    return (
        f"WITH {_GOLD} ({columns}) AS (\n{gold_sql.rstrip(_END)}\n), "
        f"{_PREDICTED} ({', '.join(names)}) AS (\n{predicted_sql.rstrip(_END)}\n) "
        f"SELECT * FROM ({counted(_GOLD)} EXCEPT {counted(_PREDICTED)}) AS missing "
        f"UNION ALL SELECT * FROM ({counted(_PREDICTED)} EXCEPT {counted(_GOLD)}) AS added LIMIT 1"
    )
