"""Comparisons of two results: BIRD's, and the strict one, with a reason when they are unequal."""

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import Literal

from sqlglot import exp

from text2sql_grpo.sql.outcome import Cell, ExecutionOutcome, Row
from text2sql_grpo.sql.query import read_query, without_comments

Number = int | float
Numbers = tuple[Number, ...]
SplitRow = tuple[Row, Numbers]

RELATIVE_TOLERANCE = 1e-6
LARGEST_TOLERANCE = 1e-3  # absolute: two days of julianday(), or cents of a large sum, are not close
ROUNDING = 1e-12  # relative: what another order of the terms changes in a sum
ABSOLUTE_TOLERANCE = 1e-9  # what 0.1 + 0.2 - 0.3 leaves over equals 0
MAX_PAIRS_TRIED = 100_000  # of rows, about 0.1 s

_QUALIFIER = re.compile(r"""["`\[]?\b[a-z_]\w*["`\]]?\.(?=[a-z_"`\[*])""", re.I)
Difference = Literal["equal", "row_count", "columns", "order", "values", "truncated"]


@dataclass(frozen=True)
class TieGroup:
    """Rows in any order among themselves.

    Attributes:
        rows: All rows of the group.
        n_taken: Number of them in the result, any choice, in 0..len(rows).
    """

    rows: tuple[Row, ...]
    n_taken: int


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
        whole = [TieGroup(group.rows, len(group.rows)) for group in groups or ()]
        has_all = 0 < sum(group.n_taken for group in whole) == len(predicted.rows)
        is_whole = has_all and any(rows_agree(whole, rows) for rows in candidates)
        return "equal" if is_whole else "row_count"
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


def rows_agree(groups: Sequence[TieGroup], rows: tuple[Row, ...]) -> bool:
    """True if `rows` are, group after group, `n_taken` rows of each group, paired one to one.

    None equals only None, text only text, bytes only bytes, a number only a number; a Boolean is the
    integer 0 or 1, and NaN equals NaN. Numbers are equal by `is_close`.

    Args:
        groups: Rows of one width.
        rows: Rows of the same width, as many as the groups take.
    """
    known = list(chain.from_iterable(group.rows for group in groups))
    labels = [_cluster_labels(column) for column in zip(*known, *rows, strict=True)]
    is_exact = not any(labels)
    start = 0
    for group in groups:
        part = rows[start : start + group.n_taken]
        start += group.n_taken
        if part == group.rows or Counter(part) <= Counter(group.rows):
            continue
        if is_exact or not _is_sub_bag(
            [_split(row, labels) for row in part], [_split(row, labels) for row in group.rows]
        ):
            return False
    return True


def is_close(left: Number, right: Number) -> bool:
    """True if two numbers count as equal.

    Whole numbers, integers or floats, must be the same: ids of eight digits are not close to each other. If
    one is a fraction, they are equal within a relative 1e-6, but at most 1e-3, or else up to rounding.

    >>> is_close(20200101.0, 20200102), is_close(1000000, 1000000.9), is_close(3, 0.1 * 3 * 10)
    (False, False, True)
    """
    if left % 1 == right % 1 == 0:
        return left == right
    size = max(abs(left), abs(right))
    tolerance = max(ABSOLUTE_TOLERANCE, ROUNDING * size, min(RELATIVE_TOLERANCE * size, LARGEST_TOLERANCE))
    return math.isclose(left, right, rel_tol=0, abs_tol=tolerance)


def _cluster_labels(cells: Iterable[Cell]) -> dict[Cell, int]:
    """Label of each number of one column (of both sides) such that close numbers share it.

    Numbers that share a label are linked by steps that are each close, so two of them need not be
    close. Empty for a column without floats, whose numbers are compared exactly.
    """
    numbers = [cell for cell in cells if isinstance(cell, int | float)]
    if not any(isinstance(number, float) for number in numbers):
        return {}
    numbers = sorted({number for number in numbers if not math.isnan(number)}) or [0]
    labels: dict[Cell, int] = {numbers[0]: 0}
    for previous, number in pairwise(numbers):
        labels[number] = labels[previous] + (not is_close(previous, number))
    return labels


def _split(row: Row, labels: Sequence[dict[Cell, int]]) -> SplitRow:
    """Split a row into the part that must be the same (labels for labelled numbers), and those numbers."""
    key: list[Cell] = []
    numbers: list[Number] = []
    for label, cell in zip(labels, row, strict=True):
        if not label or not isinstance(cell, int | float):
            key.append(cell)
        elif math.isnan(cell):
            key.append(-1)
        else:
            key.append(label[cell])
            numbers.append(cell)
    return tuple(key), tuple(numbers)


def _is_sub_bag(part: Iterable[SplitRow], whole: Iterable[SplitRow]) -> bool:
    """True if each row of `part` can be paired with an equal row of `whole`, one to one."""
    buckets: defaultdict[Row, tuple[list[Numbers], list[Numbers]]] = defaultdict(lambda: ([], []))
    for side, rows in enumerate((part, whole)):
        for key, numbers in rows:
            buckets[key][side].append(numbers)
    return all(_pairing_exists(sorted(few), sorted(many)) for few, many in buckets.values())


def _pairing_exists(few: list[Numbers], many: list[Numbers]) -> bool:
    """True if each of some sorted number tuples can be paired with a close one of `many`, one to one.

    Hundreds of rows that are all close to each other in every column, and not equal in sorted order, count
    as different without trying all pairs.
    """
    if len(few) > len(many):
        return False
    if len(few) == len(many):
        if all(map(_all_close, few, many)):
            return True
        if len(few[0]) == 1:  # in one dimension, if any pairing is close, the sorted one is
            return False
    if not few or not few[0]:
        return True
    tried = (_by_column(few, many, column) for column in range(len(few[0])))
    order, windows = min(tried, key=lambda found: sum(map(len, found[1])))
    if sum(map(len, windows)) > MAX_PAIRS_TRIED:
        return False
    candidates = [
        [order[place] for place in window if _all_close(numbers, many[order[place]])]
        for numbers, window in zip(few, windows, strict=True)
    ]
    return _perfect_matching_exists(candidates)


def _by_column(few: list[Numbers], many: list[Numbers], column: int) -> tuple[list[int], list[range]]:
    """Order of `many` by a column, and the places in it that may be close to each of `few`."""
    order = sorted(range(len(many)), key=lambda index: many[index][column])
    keys = [many[index][column] for index in order]
    centres = [numbers[column] for numbers in few]
    radii = [2 * max(RELATIVE_TOLERANCE * abs(centre), ABSOLUTE_TOLERANCE) for centre in centres]
    return order, [
        range(bisect_left(keys, centre - radius), bisect_right(keys, centre + radius))
        for centre, radius in zip(centres, radii, strict=True)
    ]


def _perfect_matching_exists(candidates: Sequence[Sequence[int]]) -> bool:
    """True if each row can be paired with a candidate, one to one (augmenting paths, breadth first)."""
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
    return all(map(is_close, left, right))
