"""Comparisons of two results: BIRD's, and the strict one, with a reason when they are unequal."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Literal

from sqlglot import exp

from text2sql_grpo.grading.rows import TieGroup, rows_agree
from text2sql_grpo.sql.outcome import Cell, ExecutionOutcome, Row
from text2sql_grpo.sql.query import read_query, without_comments

_QUALIFIER = re.compile(r"""["`\[]?\b[a-z_]\w*["`\]]?\.(?=[a-z_"`\[*])""", re.I)
Difference = Literal["equal", "row_count", "columns", "order", "values", "truncated"]


@lru_cache(maxsize=8192)
def has_top_level_order(sql: str, dialect: str = "sqlite") -> bool:
    """True if the outermost query, or the set operation it is, has an ORDER BY.

    An ORDER BY in a subquery, a CTE or a window does not count: it promises nothing about the result.
    For text that sqlglot cannot parse as one query, True if `order by` stands anywhere outside comments:
    refusing a right answer is cheaper than rewarding a wrong one.

    >>> has_top_level_order("SELECT a FROM t UNION SELECT b FROM t ORDER BY 1")
    True
    >>> has_top_level_order("SELECT * FROM (SELECT a FROM t ORDER BY a)")
    False
    """
    expression = read_query(sql, dialect).tree
    if isinstance(expression, exp.Query | exp.Values):
        return expression.args.get("order") is not None
    return "order by" in " ".join(without_comments(sql, dialect).lower().split())


def compare_strict(
    gold: ExecutionOutcome,
    predicted: ExecutionOutcome,
    *,
    ordered: bool,
    ties: Callable[[], Sequence[TieGroup] | None] | None = None,
    accepts_whole_ties: bool = True,
) -> Difference:
    """`equal`, or the first difference between the results of two successful executions.

    Results are equal if they have as many columns and rows, and a one-to-one pairing of the rows (with
    `ordered`: first with first, and so on) in which all cells are equal by `rows_agree`. The
    columns must stand in the gold's order, or in the one other order that `column_order` finds.

    A result need not hold its sort key, so its rows do not show which of them tie: `ties` returns them.

    Args:
        gold: The accepted result.
        predicted: The result in question.
        ordered: True if the gold's order counts.
        ties: Returns the rows that the gold may return, in groups that tie, or None if unknown. Called
            only if the rows differ from the gold's. Without it the order must be exactly the gold's.
        accepts_whole_ties: True to accept all rows of a tie through which the gold's LIMIT cuts, too, as
            `WHERE age = (SELECT max(age) ..)` returns them for `ORDER BY age DESC LIMIT 1`.

    Returns:
        `truncated` if rows of either were cut; `columns` if there are more or fewer; `row_count`;
        `values`; `order` if nothing but the order differs; or `equal`.

    Raises:
        ValueError: If either execution failed.
    """
    if not (gold.is_ok and predicted.is_ok):
        raise ValueError(f"both outcomes must be `ok`, got `{gold.status}` and `{predicted.status}`")
    if gold.is_truncated or predicted.is_truncated:
        return "truncated"
    if len(gold.columns) != len(predicted.columns):
        return "columns"
    if gold.rows == predicted.rows:
        return "equal"
    candidates = [predicted.rows]
    order = column_order(gold, predicted)
    if order is not None:
        candidates.append(tuple(tuple(row[index] for index in order) for row in predicted.rows))
    if len(gold.rows) != len(predicted.rows):
        may_be_whole = accepts_whole_ties and ordered and len(gold.rows) < len(predicted.rows)
        groups = ties() if may_be_whole and ties is not None else None
        return "equal" if any(_are_whole(groups or (), rows) for rows in candidates) else "row_count"
    same_bags = [rows for rows in candidates if rows_agree([TieGroup(gold.rows, len(gold.rows))], rows)]
    if same_bags and not ordered:
        return "equal"
    exact = [TieGroup((row,), 1) for row in gold.rows]
    if any(rows_agree(exact, rows) for rows in same_bags):
        return "equal"
    groups = ties() if ties is not None else None
    if groups is not None and any(rows_agree(groups, rows) for rows in candidates):
        return "equal"
    return "order" if same_bags else "values"


def bird_execution_accuracy(gold: ExecutionOutcome, predicted: ExecutionOutcome) -> bool:
    """BIRD's execution accuracy (EX): the two results are equal as sets of rows.

    Source: `evaluation.py` of the BIRD benchmark (arXiv:2305.03111),
    `set(predicted_rows) == set(ground_truth_rows)`.

    Quirks, kept on purpose: row order and duplicates are ignored (so is DISTINCT), column names
    too; two empty results are equal whatever their columns; Python equality, so 1 equals 1.0 and
    '1' does not, NULL equals NULL, and 0.1 + 0.2 differs from 0.3.

    Returns:
        False if either query failed, or if rows were cut (the official code has no row limit).
    """
    are_whole = not gold.is_truncated and not predicted.is_truncated
    return gold.is_ok and predicted.is_ok and are_whole and set(gold.rows) == set(predicted.rows)


def find_nothing(gold: ExecutionOutcome, predicted: ExecutionOutcome) -> bool:
    """True if the prediction holds at most a row of NULLs, and the gold at most a row of NULLs and zeros.

    So differ right answers where no row matches: `max(x)` from `ORDER BY x DESC LIMIT 1`, `count(*)` from
    `sum(condition)`. A zero for the gold's NULL stays wrong.
    """
    if len(gold.rows) > 1 or len(predicted.rows) > 1:
        return False
    is_void = all(cell is None for row in predicted.rows for cell in row)
    return is_void and all(cell is None or cell == 0 for row in gold.rows for cell in row)


def _are_whole(groups: Sequence[TieGroup], rows: tuple[Row, ...]) -> bool:
    """True if the rows are all those of each group."""
    whole = [TieGroup(group.rows, len(group.rows)) for group in groups]
    n_rows = sum(group.n_taken for group in whole)
    return 0 < n_rows == len(rows) and rows_agree(whole, rows)


def column_order(gold: ExecutionOutcome, predicted: ExecutionOutcome) -> tuple[int, ...] | None:
    """Index of the predicted column for each gold column, paired by names or values.

    A name found once on either side (case, blanks, quotes and qualifiers such as `T1.` aside) pairs two
    columns. The others are paired by the kinds of their values (text, whole numbers, fractions, blobs, NULL;
    then any number with any), and in their order if several have the same kind: a minimum and a maximum
    under other names are indistinguishable.

    Returns:
        None if the columns stand in order already, or if they cannot be paired.

    >>> gold = ExecutionOutcome("ok", ("name", "count(*)"), (("Ann", 3),))
    >>> column_order(gold, ExecutionOutcome("ok", ("n", "name"), ((3, "Ann"),)))
    (1, 0)
    """
    left, right = _names(gold), _names(predicted)
    left_count, right_count = Counter(left), Counter(right)
    pairs = {
        i: right.index(name)
        for i, name in enumerate(left)
        if left_count[name] == 1 and right_count[name] == 1
    }
    known, shown = list(zip(*gold.rows, strict=True)), list(zip(*predicted.rows, strict=True))
    for knows_fractions in (True, False):
        by_kind: dict[frozenset[str], list[int]] = {}
        for j, column in enumerate(shown):
            if j not in pairs.values():
                by_kind.setdefault(_kinds(column, knows_fractions), []).append(j)
        for i, column in enumerate(known):
            same_kind = by_kind.get(_kinds(column, knows_fractions))
            if i not in pairs and same_kind:
                pairs[i] = same_kind.pop(0)
    if len(pairs) < len(left):
        return None
    order = tuple(pairs[i] for i in range(len(left)))
    return None if order == tuple(range(len(left))) else order


def _names(outcome: ExecutionOutcome) -> list[str]:
    return [re.sub(r"""[\s"`\[\]]""", "", _QUALIFIER.sub("", name)).casefold() for name in outcome.columns]


def _kinds(column: Iterable[Cell], knows_fractions: bool) -> frozenset[str]:
    """Kinds of the values, and `fraction` if one is."""
    cells = [cell for cell in column if cell is not None]
    kinds = {"number" if isinstance(cell, int | float) else type(cell).__name__ for cell in cells}
    is_fractional = knows_fractions and any(isinstance(cell, float) and cell % 1 != 0 for cell in cells)
    return frozenset(kinds | ({"fraction"} if is_fractional else set()))
