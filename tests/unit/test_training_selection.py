"""Which questions a step plays: each family by its share, none twice before all were met."""

from collections import Counter
from collections.abc import Mapping
from itertools import islice

import pytest

from text2sql_grpo.errors import DataError
from text2sql_grpo.training.selection import StratifiedSampler

FAMILIES = ["lookup"] * 5 + ["count"] * 8 + ["join"] * 4


def sampler(
    shares: Mapping[str, float], *, batch_size: int = 4, seed: int = 0, **repeats: int
) -> StratifiedSampler:
    options = {"mini_repeat_count": 1, "repeat_count": 1} | repeats
    return StratifiedSampler(FAMILIES, shares, seed=seed, batch_size=batch_size, **options)


def batches(sampler: StratifiedSampler, count: int) -> list[list[int]]:
    """The first batches of questions, over as many epochs as they take."""
    drawn: list[int] = []
    while len(drawn) < count * sampler.batch_size:
        drawn += sampler
    return [drawn[i * sampler.batch_size :][: sampler.batch_size] for i in range(count)]


@pytest.mark.parametrize("batch_size", [2, 4, 7])
def test_each_batch_and_each_part_of_it_holds_the_mix(batch_size: int) -> None:
    drawn = batches(sampler({"lookup": 0.5}, batch_size=batch_size), 40)
    for batch in drawn:
        for start in range(batch_size):
            for end in range(start + 1, batch_size + 1):
                lookups = sum(FAMILIES[number] == "lookup" for number in batch[start:end])
                assert abs(lookups - (end - start) / 2) <= 0.5
        assert len(set(batch)) == batch_size
    others = Counter(FAMILIES[number] for batch in drawn for number in batch)
    assert others["count"] / (others["count"] + others["join"]) == pytest.approx(8 / 12, abs=0.03)


def test_shares_that_no_batch_can_hold_are_met_in_the_long_run() -> None:
    drawn = batches(sampler({"lookup": 0.1, "join": 0.6}, batch_size=3), 100)
    counts = Counter(FAMILIES[number] for batch in drawn for number in batch)
    assert counts == {"lookup": 30, "join": 180, "count": 90}
    assert {sum(FAMILIES[number] == "join" for number in batch) for batch in drawn} == {1, 2}


def test_every_question_is_met_before_one_repeats_in_its_stratum() -> None:
    drawn = [number for batch in batches(sampler({"lookup": 0.5}), 30) for number in batch]
    for members in (range(5), range(5, 17)):
        own = [number for number in drawn if number in members]
        rounds = [own[i : i + len(members)] for i in range(0, len(own) - len(members), len(members))]
        assert len(rounds) > 3
        assert all(sorted(one) == list(members) for one in rounds)
        assert len({tuple(one) for one in rounds}) > 3  # in orders of their own


def test_the_order_follows_the_seed_and_goes_on_where_epochs_were_drawn() -> None:
    assert batches(sampler({"lookup": 0.5}), 9) == batches(sampler({"lookup": 0.5}), 9)
    assert batches(sampler({"lookup": 0.5}), 9) != batches(sampler({"lookup": 0.5}, seed=1), 9)
    resumed = sampler({"lookup": 0.5})
    for _ in range(2):  # as `trl_compat.draw_orders` does after two epochs of four batches
        next(iter(resumed))
    assert batches(resumed, 4) == batches(sampler({"lookup": 0.5}), 12)[8:]


def test_questions_are_repeated_as_trl_repeats_them() -> None:
    repeated = sampler({"lookup": 0.5}, batch_size=2, mini_repeat_count=3, repeat_count=2)
    (one, two), *_ = batches(sampler({"lookup": 0.5}, batch_size=2), 1)
    assert list(islice(repeated, 12)) == ([one] * 3 + [two] * 3) * 2
    assert len(list(repeated)) == len(repeated) == 8 * 2 * 3 * 2


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (
            {"look-up": 0.5},
            "names the family look-up, but no training question is of it: .* are count, join, lookup",
        ),
        ({"lookup": 0.5, "count": 0.2, "join": 0.2}, "adds up to 0.9, but no .* let the shares add up to 1"),
    ],
)
def test_shares_that_cannot_be_met(shares: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        sampler(shares)
