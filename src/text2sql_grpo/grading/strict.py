"""The strict comparison of two results: bags of rows, order where asked for, a reason when unequal."""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from text2sql_grpo.sql.outcome import Cell, ExecutionOutcome, Row

Difference = Literal["equal", "row_count", "column_count", "order", "values", "truncated"]
Number = int | float
Numbers = tuple[Number, ...]
SplitRow = tuple[Row, Numbers]

RELATIVE_TOLERANCE = 1e-6
ABSOLUTE_TOLERANCE = 1e-9  # what 0.1 + 0.2 - 0.3 leaves over equals 0


def parse_query(sql: str, dialect: str = "sqlite") -> exp.Expr | None:
    """The tree of one statement; None if sqlglot cannot read it, or only beyond Python's recursion limit.

    >>> parse_query("SELECT " + "(" * 1000) is None
    True
    """
    try:
        return sqlglot.parse_one(sql, dialect=dialect)
    except (SqlglotError, RecursionError):
        return None


@lru_cache(maxsize=8192)
def has_top_level_order(sql: str, dialect: str = "sqlite") -> bool:
    """True if the outermost query, or the set operation it is, has an ORDER BY.

    An ORDER BY in a subquery, a CTE or a window does not count: it promises nothing about the result.
    For text that sqlglot cannot read as one query, True if `order by` stands anywhere in it: asking
    for an order too often refuses a right answer, which is cheaper than paying for a wrong one.

    >>> has_top_level_order("SELECT a FROM t UNION SELECT b FROM t ORDER BY 1")
    True
    >>> has_top_level_order("SELECT * FROM (SELECT a FROM t ORDER BY a)")
    False
    """
    expression = parse_query(sql, dialect)
    if isinstance(expression, exp.Query | exp.Values):
        return expression.args.get("order") is not None
    return "order by" in " ".join(sql.lower().split())


def compare_strict(gold: ExecutionOutcome, predicted: ExecutionOutcome, *, ordered: bool) -> Difference:
    """`equal`, or the first difference between the results of two successful executions.

    Results are equal if they have as many columns and rows, and a one-to-one pairing of the rows (with
    `ordered`: first with first, and so on) in which all cells are equal, column by column. Column
    names are ignored. None equals only None, text only text, bytes only bytes, a number only a number.
    Where all numbers of a column are integers, in both results, they must be the same (ids of eight
    digits are not close to each other); where a float occurs among them, they are equal within a
    relative 1e-6 or an absolute 1e-9.

    With `ordered` the order must be exactly the gold's, among ties as well: a result need not hold its
    sort key, so which rows tie cannot be seen in it.

    Returns:
        `truncated` if rows of either were cut; `column_count`; `row_count`; `values`; `order` if
        nothing but the order differs; or `equal`.

    Raises:
        ValueError: If either execution failed.
    """
    if not (gold.is_ok and predicted.is_ok):
        raise ValueError(f"expected two outcomes `ok`, got `{gold.status}` and `{predicted.status}`")
    if gold.is_truncated or predicted.is_truncated:
        return "truncated"
    if len(gold.columns) != len(predicted.columns):
        return "column_count"
    if len(gold.rows) != len(predicted.rows):
        return "row_count"
    labels = [_cluster_labels(column) for column in zip(*gold.rows, *predicted.rows, strict=True)]
    gold_rows = [_split(row, labels) for row in gold.rows]
    predicted_rows = [_split(row, labels) for row in predicted.rows]
    in_order = all(
        g[0] == p[0] and _all_close(g[1], p[1]) for g, p in zip(gold_rows, predicted_rows, strict=True)
    )
    if in_order:
        return "equal"
    if not _bags_equal(gold_rows, predicted_rows):
        return "values"
    return "order" if ordered else "equal"


def _cluster_labels(cells: Iterable[Cell]) -> dict[Cell, int]:
    """A label per number of one column (of both results) such that close numbers share it.

    Numbers that share a label are linked by steps that are each close, so two of them need not be
    close. Empty for a column without floats, where numbers are compared as they are.
    """
    numbers = [cell for cell in cells if isinstance(cell, int | float)]
    if not any(isinstance(number, float) for number in numbers):
        return {}
    numbers = sorted(set(numbers))
    labels: dict[Cell, int] = {numbers[0]: 0}
    for previous, number in pairwise(numbers):
        labels[number] = labels[previous] + (not _is_close(previous, number))
    return labels


def _split(row: Row, labels: Sequence[dict[Cell, int]]) -> SplitRow:
    """The part of a row that must be the same (labels instead of labelled numbers), and those numbers."""
    key = tuple(label.get(cell, cell) for label, cell in zip(labels, row, strict=True))
    numbers = tuple(
        cell for label, cell in zip(labels, row, strict=True) if label and isinstance(cell, int | float)
    )
    return key, numbers


def _bags_equal(gold: Iterable[SplitRow], predicted: Iterable[SplitRow]) -> bool:
    buckets: defaultdict[Row, tuple[list[Numbers], list[Numbers]]] = defaultdict(lambda: ([], []))
    for side, rows in enumerate((gold, predicted)):
        for key, numbers in rows:
            buckets[key][side].append(numbers)
    return all(_pairing_exists(sorted(left), sorted(right)) for left, right in buckets.values())


def _pairing_exists(gold: list[Numbers], predicted: list[Numbers]) -> bool:
    """True if sorted lists of equally long number tuples can be paired so that all pairs are close."""
    if len(gold) != len(predicted):
        return False
    if all(map(_all_close, gold, predicted)):
        return True
    if len(gold[0]) == 1:  # in one dimension, if any pairing is close, the sorted one is
        return False
    first = [numbers[0] for numbers in predicted]
    candidates = []
    for numbers in gold:
        radius = 2 * max(RELATIVE_TOLERANCE * abs(numbers[0]), ABSOLUTE_TOLERANCE)
        window = range(bisect_left(first, numbers[0] - radius), bisect_right(first, numbers[0] + radius))
        candidates.append([index for index in window if _all_close(numbers, predicted[index])])
    return _perfect_matching_exists(candidates)


def _perfect_matching_exists(candidates: Sequence[Sequence[int]]) -> bool:
    """True if each row can have one of its candidates to itself (augmenting paths, breadth first)."""
    if not all(candidates):
        return False
    owner: dict[int, int] = {}
    choice: dict[int, int] = {}
    for start in range(len(candidates)):
        reached_from: dict[int, int] = {}
        queue = deque([start])
        free: int | None = None
        while queue and free is None:
            row = queue.popleft()
            for candidate in candidates[row]:
                if candidate in reached_from:
                    continue
                reached_from[candidate] = row
                if candidate not in owner:
                    free = candidate
                    break
                queue.append(owner[candidate])
        if free is None:
            return False
        while free is not None:
            row = reached_from[free]
            owner[free] = row
            choice[row], free = free, choice.get(row)
    return True


def _all_close(left: Numbers, right: Numbers) -> bool:
    return all(map(_is_close, left, right))


def _is_close(left: Number, right: Number) -> bool:
    return math.isclose(left, right, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
