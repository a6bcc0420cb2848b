"""Comparison of results that are over the limits, inside the database."""

from collections.abc import Sequence

from text2sql_grpo.grading.strict import Difference, column_order
from text2sql_grpo.sql.address import Database
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits

# Names that no table has: a prediction that ran by itself cannot read them.
_GOLD, _PREDICTED = "gold_5d0c71e8a6", "predicted_5d0c71e8a6"
_END = "; \t\r\n"


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
