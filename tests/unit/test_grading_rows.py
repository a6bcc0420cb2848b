from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text2sql_grpo.grading.rows import TieGroup, rows_agree
from text2sql_grpo.sql.outcome import Cell, Row

# Steps of a third of the tolerance: chains of numbers in which neighbours are close and the ends not.
steps = st.integers(0, 9).map(lambda step: 1000.0 + step * 0.00035)
pairs_of_steps = st.lists(st.tuples(steps, steps), max_size=4)


def close(left: Row, right: Row) -> bool:
    return all(abs(a - b) <= 1e-6 * max(a, b) for a, b in zip(left, right, strict=True))  # type: ignore[operator, type-var]


@given(pairs_of_steps, pairs_of_steps, pairs_of_steps)
def test_agrees_with_trying_every_choice_and_order(
    first: list[Row], second: list[Row], shown: list[Row]
) -> None:
    n_first = min(len(first), len(shown))
    rows = tuple(shown[: n_first + len(second)])
    groups = [TieGroup(tuple(first), n_first), TieGroup(tuple(second), len(rows) - n_first)]
    parts = rows[:n_first], rows[n_first:]
    expected = all(
        any(all(map(close, part, choice)) for choice in permutations(group.rows, len(part)))
        for group, part in zip(groups, parts, strict=True)
    )
    assert rows_agree(groups, rows) is expected


@given(st.permutations(range(6)))
def test_rows_keep_to_their_group(order: list[int]) -> None:
    groups = [TieGroup(tuple((i,) for i in range(3)), 3), TieGroup(tuple((i,) for i in range(3, 6)), 3)]
    rows = tuple((number,) for number in order)
    assert rows_agree(groups, rows) is (set(order[:3]) == {0, 1, 2})


@pytest.mark.parametrize(
    ("known", "shown", "expected"),
    [
        ([(1,), (2,), (3,)], [(3,), (1,)], True),
        ([(1,), (2,), (3,)], [(3,), (3,)], False),
        ([(1,), (2,), (3,)], [], True),
        ([(1.0,), (1.0,), (5.0,)], [(1.0000001,), (0.9999999,)], True),
        ([(1.0,), (5.0,), (5.0,)], [(1.0000001,), (0.9999999,)], False),
        ([("a",), (None,)], [(None,)], True),
        ([("a",), ("b",)], [("c",)], False),
        ([(0.5, "a"), (0.5, "b")], [(0.50000001, "b")], True),
        ([(0.5, "a"), (0.5, "b")], [(0.50000001, "c")], False),
    ],
)
def test_a_choice_of_tied_rows(known: list[Row], shown: list[Row], expected: bool) -> None:
    assert rows_agree([TieGroup(tuple(known), len(shown))], tuple(shown)) is expected


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (True, 1, True),
        (False, 0.0, True),
        (True, "1", False),
        (float("nan"), float("nan"), True),
        (float("nan"), 0.0, False),
        (float("nan"), None, False),
        (float("nan"), 1, False),
        (0.0, -0.0, True),
        (20200101.0, 20200102.0, False),
        (20200101, 20200102.0, False),
        (1_000_000, 1_000_000.9, False),
        (1e15, 1e15 + 1, False),
        (2458849.5, 2458850.5, False),  # julianday() of two days
        (3, 0.1 * 3 * 10, True),
        (1 / 3, 0.3333333, True),
        (float("inf"), float("inf"), True),
        (float("inf"), 1.5, False),
    ],
)
def test_cells_of_other_databases(left: Cell, right: Cell, expected: bool) -> None:
    assert rows_agree([TieGroup(((left,),), 1)], ((right,),)) is expected
    assert rows_agree([TieGroup(((left, 1.5),), 1)], ((right, 1.5),)) is expected


@pytest.mark.parametrize(("n_rows", "expected"), [(600, True), (6000, False)])
def test_thousands_of_rows_that_are_all_close_do_not_hold_up_grading(n_rows: int, expected: bool) -> None:
    """Right, but sorted by their first numbers the rows do not match: too many to try all pairs."""
    chain = (7.0, 7.000005, 7.00001)  # the ends are not close
    known = tuple((5.0 + i * 1e-10, chain[i % 3]) for i in range(n_rows))
    shown = tuple((5.0 + (n_rows - i) * 1e-10, number) for i, (_, number) in enumerate(known))
    assert rows_agree([TieGroup(known, n_rows)], shown) is expected
