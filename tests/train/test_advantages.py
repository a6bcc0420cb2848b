"""Advantages: GRPO's, computed by hand, and those of scores that are normalised one by one."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from text2sql_grpo.training.credit import group_advantages, normalized_each


def by_hand(rewards: list[float | None], size: int, scale: str) -> list[float]:
    """GRPO's advantages; 0 for a masked rollout, which does not count in its group."""

    def deviation(values: list[float | None]) -> float:
        known = [value for value in values if value is not None]
        return statistics.stdev(known) if len(known) > 1 else 0.0

    found = []
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        known = [reward for reward in group if reward is not None]
        mean = statistics.fmean(known) if known else 0.0
        spread = {"group": deviation(group), "batch": deviation(rewards)}.get(scale)
        divisor = 1.0 if spread is None else spread + 1e-4
        found += [0.0 if reward is None else (reward - mean) / divisor for reward in group]
    return found


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.none() | st.floats(-1, 2, width=32), min_size=12, max_size=12),
    st.sampled_from([2, 3, 4]),
    st.sampled_from(["group", "batch", "none"]),
)
def test_they_are_those_of_grpo(rewards: list[float | None], size: int, scale: str) -> None:
    tensor = torch.tensor([math.nan if one is None else one for one in rewards], dtype=torch.double)
    found = group_advantages(tensor, size, scale).tolist()
    expected = by_hand(rewards, size, scale)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)  # `nanstd` is of float32


def test_a_score_that_a_rollout_lacks_is_left_out_of_its_sum() -> None:
    nan = math.nan
    scores = torch.tensor([[1.0, nan], [0.0, nan], [1.0, 0.5], [nan, nan]])
    found = normalized_each(scores, torch.tensor([1.0, 1.0]), 4)
    known = (scores[:3, 0] - scores[:3, 0].mean()) / (scores[:3, 0].std() + 1e-4)
    expected = (known - known.mean()) / (known.std() + 1e-4)  # the second score has one value: no deviation
    torch.testing.assert_close(found, torch.tensor([*expected.tolist(), 0.0]), rtol=1e-4, atol=1e-4)
    assert found[:3].abs().min() > 0
