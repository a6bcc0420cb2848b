"""Spider's test-suite comparison, with its quirks."""

import re
from collections import Counter
from collections.abc import Sequence

from sqlparse.engine import FilterStack

from text2sql_grpo.sql.outcome import ExecutionOutcome, Row

_CURRENT_YEAR = re.compile(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", re.IGNORECASE)


def spider_text(sql: str, *, keep_distinct: bool) -> str:
    """Text that the official evaluator runs in place of `sql`.

    Source: `postprocess`, `remove_distinct` and `replace_cur_year` of the test-suite evaluation
    (arXiv:2010.02840, github.com/taoyds/test-suite-sql-eval).

    Quirks, kept on purpose: `> =`, `< =` and `! =` are joined, inside quoted text too;
    `YEAR(CURDATE())` becomes 2020. Without `keep_distinct`, the leaderboard's default, every DISTINCT
    outside quotes and comments is removed, as in COUNT(DISTINCT x); and as only the first statement is
    read for this, text after its `;` is dropped, so `SELECT 1; SELECT 2` runs as `SELECT 1;`.

    >>> spider_text("SELECT count(DISTINCT a) FROM t WHERE a > = 1", keep_distinct=False)
    'SELECT count( a) FROM t WHERE a >= 1'
    """
    sql = sql.replace("> =", ">=").replace("< =", "<=").replace("! =", "!=")
    if not keep_distinct:
        sql = _without_distinct(sql)
    return _CURRENT_YEAR.sub("2020", sql)


def _without_distinct(sql: str) -> str:
    """First statement without its DISTINCT tokens; the official code reads SQL by sqlparse too."""
    first = next(FilterStack().run(sql.lstrip()), ())  # type: ignore[no-untyped-call]
    return "".join(token.value for token in first if token.value.lower() != "distinct")


def spider_order_matters(gold_sql: str) -> bool:
    """True if `order by` stands anywhere in the gold, also in a subquery or in quoted text (a quirk)."""
    return "order by" in gold_sql.lower()


def spider_execution_accuracy(
    gold: ExecutionOutcome, predicted: ExecutionOutcome, *, order_matters: bool
) -> bool:
    """True if the results are equal as lists or bags of rows under some order of the predicted columns.

    Source: `result_eq` of the test-suite evaluation (see `spider_text`), for one database.

    Quirks, kept on purpose: two empty results are equal whatever their columns; columns may stand in
    any order, even against their names; Python equality, so 1 equals 1.0 and '1' does not,
    NULL equals NULL, and 0.1 + 0.2 differs from 0.3. Before all that each row's cells are sorted by
    their text and type and compared, which separates (1, 1.5) from (1.0, 1.5), but not (1,) from (1.0,).

    Args:
        gold: Outcome of the gold's `spider_text`.
        predicted: Outcome of the prediction's `spider_text`.
        order_matters: `spider_order_matters` of the gold.

    Returns:
        False if either query failed, or if rows were cut (the official code has no row limit, stops
        on a gold that fails, and gives a query 60 s).
    """
    if not (gold.is_ok and predicted.is_ok) or gold.is_truncated or predicted.is_truncated:
        return False
    if not gold.rows and not predicted.rows:
        return True
    if len(gold.rows) != len(predicted.rows) or len(gold.rows[0]) != len(predicted.rows[0]):
        return False
    unordered_gold = [_unordered(row) for row in gold.rows]
    unordered_predicted = [_unordered(row) for row in predicted.rows]
    if order_matters:
        if unordered_gold != unordered_predicted:
            return False
    elif set(unordered_gold) != set(unordered_predicted):
        return False
    return _equal_under_some_column_order(gold.rows, predicted.rows, order_matters=order_matters)


def _unordered(row: Row) -> Row:
    return tuple(sorted(row, key=lambda cell: str(cell) + str(type(cell))))


def _equal_under_some_column_order(
    gold: Sequence[Row], predicted: Sequence[Row], *, order_matters: bool
) -> bool:
    """Choose a predicted column for each gold column in turn; the rows so far must agree.

    Like the official code it tries every order, except choices that cannot lead to equal rows and
    permutations of identical columns.
    """
    gold_columns = list(zip(*gold, strict=True))
    predicted_columns = list(zip(*predicted, strict=True))
    collect = list if order_matters else Counter

    def extends(chosen: tuple[int, ...]) -> bool:
        known = zip(*gold_columns[: len(chosen)], strict=True)
        if collect(known) != collect(zip(*(predicted_columns[i] for i in chosen), strict=True)):
            return False
        left = {column: i for i, column in enumerate(predicted_columns) if i not in chosen}
        return not left or any(extends((*chosen, i)) for i in left.values())

    return extends(())
