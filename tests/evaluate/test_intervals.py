"""Intervals and tests against published figures, enumerations, and simulated databases."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from text2sql_grpo.evaluation import statistics
from text2sql_grpo.evaluation.statistics import Accuracy, interval_of_shares, remark, sign_flip_p


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [
        # Newcombe 1998 (Stat. Med. 17, 857-872), table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval(correct: int, total: int, low: float, high: float) -> None:
    assert Accuracy(correct, total).interval == pytest.approx((low, high), abs=5e-5)


@given(st.integers(0, 500).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_interval_holds_the_accuracy(counts: tuple[int, int]) -> None:
    correct, total = counts
    low, high = Accuracy(correct, total).interval

    assert 0 <= low <= high <= 1
    if total:
        assert low <= correct / total + 1e-12 and correct / total - 1e-12 <= high
        mirrored = Accuracy(total - correct, total).interval
        assert mirrored == pytest.approx((1 - high, 1 - low))


def test_samples_of_one_question_are_not_taken_for_independent() -> None:
    alike = interval_of_shares([1.0] * 5 + [0.0] * 15, samples=4)
    mixed = interval_of_shares([0.25] * 20, samples=4)
    assert alike == pytest.approx((0.112, 0.469), abs=1e-3)  # Wilson's of 5 in 20
    assert mixed == pytest.approx((0.168, 0.355), abs=1e-3)  # of 20 in 80


def test_nothing_asked() -> None:
    assert Accuracy(0, 0).accuracy == 0
    assert Accuracy(0, 0).interval == (0, 1)
    assert str(Accuracy(0, 0)) == "0/0 = 0.0% (0-100)"


def test_text_and_record() -> None:
    accuracy = Accuracy(10, 40)

    assert str(accuracy) == "10/40 = 25.0% (14-40)"
    record = accuracy.record()
    assert record.pop("interval") == pytest.approx([0.14187, 0.40194], abs=1e-5)
    assert record.pop("naive_interval") == pytest.approx([0.14187, 0.40194], abs=1e-5)
    assert record == {"correct": 10, "total": 40, "accuracy": 0.25, "by_database": {}}


def test_answers_are_counted_by_database_and_read_back() -> None:
    accuracy = Accuracy.of([("shop", True), ("bank", False), ("shop", False), ("bank", True), ("shop", True)])

    assert (accuracy.correct, accuracy.total) == (3, 5)
    assert accuracy.by_database == {"shop": (2, 3), "bank": (1, 2)}
    assert Accuracy.read(accuracy.record()) == accuracy
    assert Accuracy.read({"correct": 1, "total": 2, "interval": [0, 1]}) == Accuracy(1, 2)


def test_one_question_beside_thousands_of_another_database() -> None:
    low, high = Accuracy(10_000, 10_001, {"a": (10_000, 10_000), "b": (0, 1)}).interval
    assert 0 <= low < 0.001 and 0.9999 < high <= 1


def test_uneven_databases_widen_the_interval_and_even_ones_never_narrow_it() -> None:
    uneven = Accuracy(50, 100, {f"db{i}": (10 * (i % 2), 10) for i in range(10)})
    assert str(uneven) == "50/100 = 50.0% (18-82; 40-60)"
    even = Accuracy(50, 100, {f"db{i}": (5, 10) for i in range(10)})
    assert even.interval == even.naive_interval
    none = Accuracy(0, 50, {f"db{i}": (0, 5) for i in range(10)})
    assert none.interval == none.naive_interval
    alone = Accuracy(5, 10, {"shop": (5, 10)})
    assert alone.interval == alone.naive_interval and str(alone) == "5/10 = 50.0% (24-76)"


@pytest.mark.parametrize("databases", [4, 8, 20])
def test_the_interval_covers_the_truth_where_questions_share_databases(databases: int) -> None:
    """Databases of 20 questions, each with a difficulty of its own; the truth is the mean of all."""
    rng = np.random.default_rng(1)
    covered = naively = 0
    for _ in range(200):
        right = rng.binomial(20, rng.beta(1.2, 1.2, size=databases))
        counts = {str(i): (int(n), 20) for i, n in enumerate(right)}
        accuracy = Accuracy(int(right.sum()), 20 * databases, counts)
        (low, high), (naive_low, naive_high) = accuracy.interval, accuracy.naive_interval
        covered += low <= 0.5 <= high
        naively += naive_low <= 0.5 <= naive_high
    assert 186 <= covered <= 197  # 93% to 98.5%
    assert naively <= 130


@given(st.lists(st.integers(-5, 5), max_size=10))
def test_the_sign_flip_counts_all_signs(differences: list[int]) -> None:
    sums = [
        abs(sum(sign * d for sign, d in zip(signs, differences, strict=True)))
        for signs in product((-1, 1), repeat=len(differences))
    ]
    expected = sum(one >= abs(sum(differences)) for one in sums) / len(sums)
    assert sign_flip_p(differences) == pytest.approx(expected)


def test_random_flips_above_20_databases_agree_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = [3, -1, 2, 2, -2, 1, 4, -3, 1, 1, 2, -1, 1, 3, -2, 2, 1, -1, 1, 1, 2]
    drawn = sign_flip_p(differences)
    with monkeypatch.context() as patch:
        patch.setattr(statistics, "EXACT_DATABASES", 21)
        exact = sign_flip_p(differences)
    assert exact != drawn == pytest.approx(exact, abs=0.01)
    assert sign_flip_p([1] * 40) == pytest.approx(1 / 20_001)


def test_few_databases_are_remarked() -> None:
    assert [bool(remark(count)) for count in (0, 1, 5, 6, 20)] == [False, True, True, False, False]
    assert remark(3).startswith("3 databases are few")
