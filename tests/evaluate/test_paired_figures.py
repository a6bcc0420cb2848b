"""Paired figures against independent computations, and what is refused."""

from dataclasses import replace
from itertools import product
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.answers import Judged
from text2sql_grpo.evaluation.comparison import Paired, compare

COUNTS = st.tuples(*[st.integers(0, 40)] * 4)


def judged(
    name: str,
    *,
    strict: bool,
    official: bool | None = None,
    set: str = "dev",
    family: str = "count",
    database: str = "shop",
) -> Judged:
    return Judged(
        set=set,
        example=name,
        database=database,
        family=family,
        difficulty="easy",
        question=f"{name}?",
        gold_sql="SELECT 1",
        final_sql="SELECT 2",
        strict=strict,
        official=strict if official is None else official,
        reason="equal" if strict else "values",
    )


@given(st.integers(0, 9), st.integers(0, 9))
def test_the_exact_test_counts_the_tosses_of_coins(gained: int, lost: int) -> None:
    """Each changed question falls to either side alike: all outcomes as lopsided or more are counted."""
    n, extreme = gained + lost, abs(gained - lost)
    as_lopsided = sum(comb(n, k) for k in range(n + 1) if abs(2 * k - n) >= extreme)

    assert Paired(3, gained, lost, 5).p_value == pytest.approx(as_lopsided / 2**n)
    if n <= 8:
        tosses = [abs(2 * sum(toss) - n) >= extreme for toss in product((0, 1), repeat=n)]
        assert Paired(0, gained, lost, 0).p_value == pytest.approx(sum(tosses) / len(tosses))


def test_figures_agree_with_published_ones() -> None:
    """Fagerland, Lydersen and Laake 2014 (Stat. Med. 33, 2850-2875), airway reactivity of 21 children."""
    paired = Paired(both=1, gained=1, lost=7, neither=12)
    assert paired.difference == pytest.approx(-0.286, abs=5e-4)
    assert paired.p_value == pytest.approx(0.0703, abs=5e-5)
    assert paired.interval == pytest.approx((-0.507, -0.026), abs=5e-4)


def test_many_changed_questions_do_not_overflow() -> None:
    assert Paired(0, 3_000, 3_000, 0).p_value == 1
    assert Paired(0, 3_000, 2_000, 0).p_value < 1e-40


@given(COUNTS)
def test_the_interval_holds_the_difference_and_mirrors(counts: tuple[int, int, int, int]) -> None:
    both, gained, lost, neither = counts
    paired = Paired(both, gained, lost, neither)
    low, high = paired.interval

    assert -1 <= low <= paired.difference <= high <= 1
    if paired.total:
        mirrored = Paired(both, lost, gained, neither).interval
        assert mirrored == pytest.approx((-high, -low))


@pytest.mark.parametrize("shares", [(0.5, 0.2, 0.1, 0.2), (0.1, 0.3, 0.05, 0.55), (0.4, 0.25, 0.1, 0.25)])
def test_the_interval_covers_the_truth_19_times_in_20(shares: tuple[float, ...]) -> None:
    """All outcomes of 24 questions, each with its probability."""
    n, truth, covered = 24, shares[1] - shares[2], 0.0
    for a in range(n + 1):
        for b in range(n + 1 - a):
            for c in range(n + 1 - a - b):
                d = n - a - b - c
                ways = comb(n, a) * comb(n - a, b) * comb(n - a - b, c)
                low, high = Paired(a, b, c, d).interval
                if low <= truth <= high:
                    covered += ways * shares[0] ** a * shares[1] ** b * shares[2] ** c * shares[3] ** d
    assert 0.93 < covered < 0.98


def test_a_comparison_by_set_and_kind_with_what_changed() -> None:
    base = [
        judged(f"q{i}", strict=i < 4, official=i < 5, family="lookup" if i % 2 else "count") for i in range(8)
    ]
    trained = [replace(one, strict=i in (0, 1, 2, 5, 6), official=True) for i, one in enumerate(base)]
    base += [judged("q0", strict=True, set="other"), judged("gone", strict=True)]
    trained += [judged("q0", strict=True, set="other")]

    comparison = compare(base, trained)

    record = comparison.record()
    assert record["overall"]["strict"]["gained"] == 2
    assert record["sets"].keys() == {"dev", "other"}
    whole = record["sets"]["dev"]["overall"]
    assert (whole["strict"]["both"], whole["strict"]["gained"], whole["strict"]["lost"]) == (3, 2, 1)
    assert whole["strict"]["trained"]["correct"] == 5 and whole["strict"]["base"]["correct"] == 4
    assert whole["strict"]["difference"] == 0.125
    assert whole["official"]["gained"] == 3 and whole["official"]["lost"] == 0
    kinds = record["sets"]["dev"]["by_family"]
    assert (kinds["lookup"]["strict"]["gained"], kinds["lookup"]["strict"]["lost"]) == (1, 1)
    assert (kinds["count"]["strict"]["gained"], kinds["count"]["strict"]["lost"]) == (1, 0)
    assert [(one["change"], one["example"]) for one in record["changed"]] == [
        *(("gained", "q5"), ("gained", "q6"), ("lost", "q3")),
    ]
    assert (comparison.only_base, comparison.only_trained) == (1, 0)
    assert len(comparison.only({("dev", "q5")}).pairs) == 1


@pytest.mark.parametrize(
    ("gained", "lost", "said"),
    [
        (0, 0, "The two differ on none of 10 questions."),
        (3, 1, "gains 3 and loses 1: better, +20.0 points ("),
        (3, 1, "This could be chance: two equally good models would differ as much or more with"),
        (3, 1, " or more with probability 0.62."),
        (0, 8, "loses 8: worse, -80.0 points ("),
        (0, 8, "This is hardly chance: two equally good models would differ as much or more with"),
        (0, 8, " or more with probability 0.0078."),
        (2, 2, "as good, +0.0 points ("),
    ],
)
def test_the_verdict_in_plain_words(gained: int, lost: int, said: str) -> None:
    flags = [(False, True)] * gained + [(True, False)] * lost
    flags += [(True, True)] * (10 - len(flags))
    pairs = [[judged(str(i), strict=pair[side]) for i, pair in enumerate(flags)] for side in (0, 1)]
    assert said in compare(*pairs).verdict()


def test_questions_that_share_databases_prove_less() -> None:
    """Ten questions gained, all of one database of nine: hardly chance by question, nothing by database."""
    base = [judged(f"{d}-{i}", strict=False, database=f"db{d}") for d in range(9) for i in range(10)]
    trained = [replace(one, strict=one.database == "db0") for one in base]

    paired = compare(base, trained).paired()

    assert paired.gained == 10 and len(paired.by_database) == 9
    assert paired.naive_p_value < 0.01 and paired.p_value == 1
    assert paired.interval[0] < 0 < paired.naive_interval[0]
    assert paired.base.by_database["db0"] == (0, 10) and paired.trained.by_database["db0"] == (10, 10)
    verdict = compare(base, trained).verdict()
    assert "better, +11.1 points (-14.8 to +35.4 by database; +4.7 to +19.3 by question)" in verdict
    assert "This could be chance" in verdict and "probability 1 (0.002 by question)" in verdict
    assert "few" not in verdict
    trained = [replace(one, strict=True) for one in base]
    record = compare(base, trained).record()["overall"]["strict"]
    assert (record["p_value"], record["databases"]) == (0.003906, 9)
    few = compare(*[[one for one in side if one.database < "db3"] for side in (base, trained)])
    assert "hardly chance" not in few.verdict() and few.verdict().endswith("below 6, so there is no p.")


def test_what_cannot_be_compared_is_refused() -> None:
    one = judged("a", strict=True)
    with pytest.raises(DataError, match="cannot compare: no question in common"):
        compare([one], [judged("b", strict=True)])
    with pytest.raises(DataError, match=r"another text or gold of one question \(a in dev\)"):
        compare([one], [replace(one, gold_sql="SELECT 3")])
    with pytest.raises(DataError, match="each question must occur once, got 1 of them again"):
        compare([one, one], [one])
