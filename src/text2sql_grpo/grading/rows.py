"""Comparison of rows as bags under a numeric tolerance, in ordered groups."""

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from text2sql_grpo.sql.outcome import Cell, Row

Number = int | float
Numbers = tuple[Number, ...]
SplitRow = tuple[Row, Numbers]

RELATIVE_TOLERANCE = 1e-6
LARGEST_TOLERANCE = 1e-3  # absolute: two days of julianday(), or cents of a large sum, are not close
ROUNDING = 1e-12  # relative: what another order of the terms changes in a sum
ABSOLUTE_TOLERANCE = 1e-9  # what 0.1 + 0.2 - 0.3 leaves over equals 0
MAX_PAIRS_TRIED = 4_000_000  # about two seconds


@dataclass(frozen=True)
class TieGroup:
    """Rows in any order among themselves.

    Attributes:
        rows: All rows of the group.
        n_taken: Number of them in the result, any choice, in 0..len(rows).
    """

    rows: tuple[Row, ...]
    n_taken: int


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

    Thousands of rows that are all close to each other in every column, and not equal in sorted order, count
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
    if len(few) * len(many) > MAX_PAIRS_TRIED:
        return False
    first = [numbers[0] for numbers in many]
    candidates = []
    for numbers in few:
        radius = 2 * max(RELATIVE_TOLERANCE * abs(numbers[0]), ABSOLUTE_TOLERANCE)
        window = range(bisect_left(first, numbers[0] - radius), bisect_right(first, numbers[0] + radius))
        candidates.append([index for index in window if _all_close(numbers, many[index])])
    return _perfect_matching_exists(candidates)


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
