"""The strict comparison of two results."""

import random
from functools import partial
from itertools import permutations
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text2sql_grpo.grading import compare_strict, has_top_level_order
from text2sql_grpo.grading.strict import TieGroup, column_order, rows_agree
from text2sql_grpo.sql.outcome import Cell, ExecutionOutcome, Row


def ok(rows: list[Row], *, width: int | None = None) -> ExecutionOutcome:
    width = len(rows[0]) if width is None else width
    return ExecutionOutcome("ok", tuple(f"c{i}" for i in range(width)), tuple(rows))


def unordered(gold: list[Row], predicted: list[Row]) -> str:
    return compare_strict(ok(gold, width=len(gold[0])), ok(predicted, width=len(gold[0])), ordered=False)


# Steps of a third of the tolerance: chains of numbers in which neighbours are close and the ends not.
steps = st.integers(0, 9).map(lambda step: 1000.0 + step * 0.00035)
cells: st.SearchStrategy[Cell] = st.one_of(
    st.none(),
    st.integers(-3, 3),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    steps,
    st.sampled_from(["", "a", "1", "None"]),
    st.binary(max_size=1),
)
tables = st.integers(1, 3).flatmap(
    lambda width: st.lists(st.tuples(*[cells] * width), min_size=1, max_size=6)
)


@given(tables, st.booleans())
def test_reflexive(rows: list[Row], ordered: bool) -> None:
    assert compare_strict(ok(rows), ok(rows), ordered=ordered) == "equal"


@given(tables, st.randoms(use_true_random=False))
def test_order_of_rows_is_ignored_unless_asked_for(rows: list[Row], rng: random.Random) -> None:
    shuffled = rng.sample(rows, len(rows))
    assert unordered(rows, shuffled) == "equal"
    assert compare_strict(ok(rows), ok(shuffled), ordered=True) in ("equal", "order")


@given(tables, tables, st.booleans())
def test_symmetric(left: list[Row], right: list[Row], ordered: bool) -> None:
    there = compare_strict(ok(left), ok(right), ordered=ordered)
    assert there == compare_strict(ok(right), ok(left), ordered=ordered)


close_tables = st.integers(1, 5).flatmap(
    lambda height: st.tuples(*[st.lists(st.tuples(steps, steps), min_size=height, max_size=height)] * 2)
)


@given(close_tables)
def test_pairing_under_tolerance_agrees_with_trying_every_permutation(
    pair: tuple[list[tuple[float, float]], list[tuple[float, float]]],
) -> None:
    gold, predicted = pair
    expected = any(
        all(
            abs(a - b) <= 1e-6 * max(a, b)
            for g, p in zip(gold, order, strict=True)
            for a, b in zip(g, p, strict=True)
        )
        for order in permutations(predicted)
    )
    assert (unordered(list(gold), list(predicted)) == "equal") is expected


@pytest.mark.parametrize(
    ("left", "right", "is_equal"),
    [
        (1, 1.0, True),
        (1, "1", False),
        (1.0, "1.0", False),
        (None, None, True),
        (None, 0, False),
        (None, "", False),
        (None, "None", False),
        (b"a", b"a", True),
        (b"a", "a", False),
        (0.1 + 0.2, 0.3, True),
        (0.1 + 0.2 - 0.3, 0, True),
        (1000.0, 1000.0009, True),
        (1000.0, 1000.0011, False),
        (-1000.0, -1000.0009, True),
        (10_000_000, 10_000_001, False),
        (2**62, 2**62 + 1, False),
        (float("inf"), float("inf"), True),
        (float("inf"), 1e308, False),
        (float("inf"), float("-inf"), False),
        (1e-12, 2e-12, True),
        (1e-8, 2e-8, False),
    ],
)
@pytest.mark.parametrize("ordered", [False, True])
def test_cells(left: Cell, right: Cell, is_equal: bool, ordered: bool) -> None:
    assert (compare_strict(ok([(left,)]), ok([(right,)]), ordered=ordered) == "equal") is is_equal


def test_rows_must_pair_one_to_one_though_each_has_a_close_one() -> None:
    low, middle, high = 1000.0, 1000.0008, 1000.0016
    assert unordered([(low,), (middle,)], [(middle,), (high,)]) == "equal"
    assert unordered([(low,), (low,)], [(middle,), (high,)]) == "values"


def test_pairing_that_neither_sorting_nor_a_greedy_choice_finds() -> None:
    gold: list[Row] = [(1000.0, 5.0), (1000.0005, 7.0)]
    predicted: list[Row] = [(1000.0001, 7.0), (1000.0002, 5.0)]
    assert unordered(gold, predicted) == "equal"
    gold = [(1000.0004, 1000.0004), (1000.0005, 1000.0)]
    predicted = [(1000.0003, 1000.0), (1000.0006, 1000.0013)]
    assert unordered(gold, predicted) == "equal"


def test_a_fraction_anywhere_in_a_column_makes_no_whole_number_tolerant() -> None:
    assert unordered([(10_000_000,), (0.5,)], [(0.50000001,), (10_000_000.0,)]) == "equal"
    assert unordered([(10_000_000,), (0.5,)], [(0.5,), (10_000_001,)]) == "values"
    assert unordered([(10_000_000, 0.5)], [(10_000_001, 0.5)]) == "values"


def test_reasons() -> None:
    one, two = ok([(1,)]), ok([(1,), (2,)])
    cut = ExecutionOutcome("ok", ("a",), ((1,),), is_truncated=True)
    assert compare_strict(one, ok([(1, 2)]), ordered=False) == "columns"
    assert compare_strict(one, two, ordered=False) == "row_count"
    assert compare_strict(two, ok([(2,), (1,)]), ordered=True) == "order"
    assert compare_strict(two, ok([(2,), (3,)]), ordered=True) == "values"
    assert compare_strict(cut, one, ordered=False) == "truncated"
    assert compare_strict(one, cut, ordered=False) == "truncated"
    assert compare_strict(cut, cut, ordered=True) == "truncated"
    assert compare_strict(ok([], width=1), ok([], width=1), ordered=True) == "equal"
    assert compare_strict(ok([], width=1), ok([], width=2), ordered=True) == "columns"


def named(columns: str, *rows: Row) -> ExecutionOutcome:
    return ExecutionOutcome("ok", tuple(columns.split(",")), rows)


@given(tables, st.randoms(use_true_random=False), st.booleans())
def test_order_of_columns_is_free_where_names_tell(
    rows: list[Row], rng: random.Random, ordered: bool
) -> None:
    width = len(rows[0])
    order = rng.sample(range(width), width)
    moved = ExecutionOutcome(
        "ok", tuple(f"C{i}" for i in order), tuple(tuple(row[i] for i in order) for row in rows)
    )
    assert compare_strict(ok(rows), moved, ordered=ordered) == "equal"
    assert compare_strict(moved, ok(rows), ordered=ordered) == "equal"


@pytest.mark.parametrize(
    ("gold", "predicted", "order"),
    [
        (named("a,b", (1, 2)), named("b,a", (2, 1)), (1, 0)),
        (named("a,b,c", (1, 2, 3)), named("c,a,b", (3, 1, 2)), (1, 2, 0)),
        (named("a,b", (1, 2)), named("a,b", (2, 1)), None),  # in order already
        (named("max(a),b", (1, 2)), named("b,MAX( a )", (2, 1)), (1, 0)),
        (named("a,b", (1, 2)), named("x,y", (2, 1)), None),  # of one kind: they keep their order
        (named("a,b", (1, 2)), named("x,a", (2, 1)), (1, 0)),
        (named("a,b", (1, "x")), named("x,y", ("x", 1)), (1, 0)),
        (named("a,b", (1, b"x")), named("x,y", (b"x", 1.5)), (1, 0)),
        (named("a,b,c", (1, "x", 2)), named("x,y,z", ("x", 1, 2)), (1, 0, 2)),
        (named("a,b", (1, None), (2, "x")), named("x,y", (None, 2), ("x", 1)), (1, 0)),
        (named("a,b", (1, None)), named("x,y", (None, 1)), (1, 0)),
        (named("a,b", (1, "x")), named("x,y", ("x", "y")), None),  # no second text in the gold
        (named("a,a", (1, "x")), named("a,a", ("x", 1)), (1, 0)),  # a name found twice tells nothing
        (named("a,b", (1, "x")), named("b,a", (1, "x")), (1, 0)),
    ],
)
def test_column_order(
    gold: ExecutionOutcome, predicted: ExecutionOutcome, order: tuple[int, ...] | None
) -> None:
    assert column_order(gold, predicted) == order


@pytest.mark.parametrize(
    ("columns", "predicted_columns", "verdict"),
    [
        (
            ("Continent", "AVG(country.Life)", "avg(c.Age)"),
            ("avg(T1.Age)", "avg(Life)", "Continent"),
            "equal",
        ),
        (('"T1"."n"', "AVG(x * 1.5)", "b"), ("b", "avg(T.x*1.5)", "T2.n"), "equal"),
        (("a", "b", "c"), ("x", "y", "z"), "values"),  # two columns of fractions under other names
    ],
)
def test_qualified_headers_in_another_order(
    columns: tuple[str, ...], predicted_columns: tuple[str, ...], verdict: str
) -> None:
    gold = ExecutionOutcome("ok", columns, (("A", 50.5, 3.5), ("B", 60.5, 4.5)))
    predicted = ExecutionOutcome("ok", predicted_columns, ((3.5, 50.5, "A"), (4.5, 60.5, "B")))
    assert compare_strict(gold, predicted, ordered=False) == verdict


def test_aliased_columns_in_another_order_are_paired_by_kinds() -> None:
    gold = ExecutionOutcome("ok", ("n", "count(*)", "avg(p)"), (("A", 2, 1.5), ("B", 3, 2.0)))
    predicted = ExecutionOutcome("ok", ("mean", "k", "who"), ((1.5, 2, "A"), (2, 3, "B")))
    assert compare_strict(gold, predicted, ordered=False) == "equal"


def test_ties_are_asked_for_only_where_the_rows_are_not_the_golds() -> None:
    gold, turned = ok([(1,), (2,)]), ok([(2,), (1,)])
    groups = [TieGroup(((1,), (2,), (3,)), 2)]
    asked = []

    def ties() -> list[TieGroup]:
        asked.append(1)
        return groups

    assert compare_strict(gold, gold, ordered=True, ties=ties) == "equal"
    assert compare_strict(gold, turned, ordered=False, ties=ties) == "equal"
    assert asked == []
    assert compare_strict(gold, turned, ordered=True, ties=ties) == "equal"
    assert compare_strict(gold, ok([(3,), (1,)]), ordered=True, ties=ties) == "equal"
    assert compare_strict(gold, ok([(3,), (3,)]), ordered=False, ties=ties) == "values"
    assert compare_strict(gold, turned, ordered=True, ties=lambda: None) == "order"
    assert asked == [1, 1, 1]


def test_failed_executions_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"`ok`.*`timeout`"):
        compare_strict(ok([(1,)]), ExecutionOutcome("timeout"), ordered=False)


def days_with(values: list[float]) -> list[Row]:
    """One row per value, with a first column of distinct numbers that are all close."""
    days = random.Random(len(values)).sample(range(len(values)), len(values))
    return [(2.46e6 + day * 0.001, value) for day, value in zip(days, values, strict=True)]


@pytest.mark.parametrize(("n_low", "expected"), [(500, "equal"), (501, "equal"), (502, "values")])
def test_a_large_ambiguous_result_is_paired_exactly(n_low: int, expected: str) -> None:
    """The middle value is close to both ends, which are not close to each other: it absorbs one row."""
    low, middle, high = 7.0, 7.000005, 7.00001
    gold = days_with([low] * 500 + [middle] + [high] * 499)
    predicted = days_with([low] * n_low + [high] * (1000 - n_low))
    assert unordered(gold, predicted) == expected


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [
        ([(9,), (7,), (8,)], "equal"),  # the whole tie, in any order
        ([(9,), (7,)], "equal"),  # as many as the gold took
        ([(7,), (9,), (8,)], "row_count"),  # not in the order of the groups
        ([(9,), (7,), (6,)], "row_count"),
        ([(9,)], "row_count"),
        ([], "row_count"),
    ],
)
def test_all_rows_of_a_tie_at_the_limit(predicted: list[tuple[int]], expected: str) -> None:
    groups = [TieGroup(((9,),), 1), TieGroup(((7,), (8,)), 1)]
    compare = partial(compare_strict, ok([(9,), (7,)], width=1), ok(predicted, width=1))
    assert compare(ordered=True, ties=lambda: groups) == expected
    exactly = expected if len(predicted) == 2 else "row_count"
    assert compare(ordered=True, ties=lambda: groups, accepts_whole_ties=False) == exactly
    assert compare(ordered=True) == exactly
    assert compare(ordered=False, ties=lambda: groups) == exactly


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT a FROM t", False),
        ("SELECT a FROM t ORDER BY a", True),
        ("SELECT a FROM t ORDER BY a DESC LIMIT 3;", True),
        ("select a from t\norder\n  by a", True),
        ("SELECT a FROM t UNION SELECT b FROM t ORDER BY 1", True),
        ("WITH x AS (SELECT a FROM t) SELECT a FROM x ORDER BY a", True),
        ("WITH x AS (SELECT a FROM t ORDER BY a) SELECT a FROM x", False),
        ("SELECT * FROM (SELECT a FROM t ORDER BY a LIMIT 3)", False),
        ("SELECT a, (SELECT b FROM u ORDER BY b LIMIT 1) FROM t", False),
        ("SELECT rank() OVER (ORDER BY a) FROM t", False),
        ("SELECT group_concat(a ORDER BY a) FROM t", False),
        ("SELECT 'order by' FROM t -- order by", False),
        ("VALUES (1), (2)", False),
        ("SELECT (a FROM t Order  By a", True),  # cannot be parsed: the words decide
        ("SELECT (a FROM t", False),
        ("SELECT 'open ORDER BY", True),
        ("", False),
    ],
)
def test_has_top_level_order(sql: str, expected: bool) -> None:
    assert has_top_level_order(sql) is expected


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


@pytest.mark.parametrize(("n_rows", "expected"), [(300, True), (1800, False), (6000, False)])
def test_thousands_of_rows_that_are_all_close_do_not_hold_up_grading(n_rows: int, expected: bool) -> None:
    """Right, but sorted by their first numbers the rows do not match: too many to try all pairs."""
    chain = (7.0, 7.000005, 7.00001)  # the ends are not close
    known = tuple((5.0 + i * 1e-10, chain[i % 3]) for i in range(n_rows))
    shown = tuple((5.0 + (n_rows - i) * 1e-10, number) for i, (_, number) in enumerate(known))
    started = process_time()
    assert rows_agree([TieGroup(known, n_rows)], shown) is expected
    assert process_time() - started < 0.5  # 1,800 rows took 5 s


def test_rows_are_paired_by_the_column_that_separates_them() -> None:
    known = tuple((5.0 + i * 1e-10, float(i * 7919 % 2000) + 0.5) for i in range(2000))
    shown = tuple((5.0 + (2000 - i) * 1e-10, number) for i, (_, number) in enumerate(known))
    assert rows_agree([TieGroup(known, 2000)], shown)
