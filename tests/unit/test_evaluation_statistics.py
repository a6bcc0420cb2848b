import pytest
from hypothesis import given
from hypothesis import strategies as st

from text2sql_grpo.evaluation.statistics import Accuracy


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


def test_nothing_asked() -> None:
    assert Accuracy(0, 0).accuracy == 0
    assert Accuracy(0, 0).interval == (0, 1)
    assert str(Accuracy(0, 0)) == "0/0 = 0.0% (0%-100%)"


def test_text_and_record() -> None:
    accuracy = Accuracy(10, 40)

    assert str(accuracy) == "10/40 = 25.0% (14%-40%)"
    record = accuracy.record()
    assert record.pop("interval") == pytest.approx([0.14187, 0.40194], abs=1e-5)
    assert record == {"correct": 10, "total": 40, "accuracy": 0.25}
