"""Advantages of GRPO, against a computation by hand."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from text2sql_grpo.training.credit import group_advantages


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


@settings(max_examples=60)
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
