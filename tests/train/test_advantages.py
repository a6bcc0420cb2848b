"""Advantages: GRPO's by hand, equal to those of turns that earn nothing, right above wrong in every mode."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scripted_policy import ask
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.training.credit import (
    group_advantages,
    normalized_each,
    token_advantages,
    turn_advantages,
)
from text2sql_grpo.training.parts import Batch, Judged, Row

SCALES = st.sampled_from(["group", "batch", "none"])


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.none() | st.floats(-1, 2, width=32), min_size=12, max_size=12),
    st.sampled_from([2, 3, 4]),
    SCALES,
)
def test_without_rewards_of_turns_they_are_those_of_grpo(
    rewards: list[float | None], size: int, scale: str
) -> None:
    tensor = torch.tensor([math.nan if one is None else one for one in rewards], dtype=torch.double)
    grpo = group_advantages(tensor, size, scale).tolist()
    rows = [(reward, [0.0] * (1 + number % 3)) for number, reward in enumerate(rewards)]
    for own, expected in zip(turn_advantages(rows, group_size=size, scale=scale), grpo, strict=True):
        assert own == pytest.approx([expected] * len(own), rel=1e-5, abs=1e-5)  # `nanstd` is of float32


def test_a_turn_is_not_credited_with_what_was_earned_before_it() -> None:
    first, second, third = turn_advantages(
        [(1.0, [1.0, 0.0]), (0.0, [0.0, 0.0]), (0.5, [0.0, 0.5])], group_size=3, scale="none"
    )
    assert first == pytest.approx([0.5 + 1.0 - 0.5, 0.5 - 1 / 6])
    assert second == pytest.approx([-0.5 - 0.5, -0.5 - 1 / 6])
    assert third == pytest.approx([0.0, 0.5 - 1 / 6])


def test_a_turn_is_compared_with_rollouts_that_came_so_far() -> None:
    assert turn_advantages([(0.0, [0.0]), (0.0, [0.0, 2.0])], group_size=2, scale="none") == [
        [-1.0],
        [1.0, 0.0],
    ]


def test_masked_rollouts_do_not_count() -> None:
    rows = [(None, [5.0]), (1.0, [1.0]), (0.0, [0.0]), (None, [])]
    assert turn_advantages(rows, group_size=4, scale="none") == [[0.0], [1.0], [-1.0], []]
    assert turn_advantages([(None, [1.0])], group_size=1, scale="group") == [[0.0]]


@pytest.mark.parametrize(("scale", "deviation"), [("group", 2**0.5), ("batch", (2 / 3) ** 0.5)])
def test_scales_are_those_of_whole_sums(scale: str, deviation: float) -> None:
    rows = [(1.0, [1.0]), (0.0, [0.0]), (1.0, [0.0]), (1.0, [0.0])]
    advantages = turn_advantages(rows, group_size=2, scale=scale)
    assert advantages[0] == pytest.approx([1.0 / (deviation + 1e-4)])
    assert advantages[2] == [0.0]


def test_they_stand_on_the_tokens_of_their_turns() -> None:
    masks = [[1, 1, 0, 1, 0], [0, 0], [1]]
    rows = [
        Row(Episode(ask("q"), completion_mask=mask), Judged(0, {}, 1.0, "submitted", True)) for mask in masks
    ]
    by_token = token_advantages([[0.5, -1.0], [], []], Batch.of(rows), torch.zeros(3, 6))
    assert by_token.tolist() == [[0.5, 0.5, 0.0, -1.0, 0.0, 0.0], [0.0] * 6, [0.0] * 6]


def test_a_score_that_a_rollout_lacks_is_left_out_of_its_sum() -> None:
    nan = math.nan
    scores = torch.tensor([[1.0, nan], [0.0, nan], [1.0, 0.5], [nan, nan]])
    found = normalized_each(scores, torch.tensor([1.0, 1.0]), 4)
    known = (scores[:3, 0] - scores[:3, 0].mean()) / (scores[:3, 0].std() + 1e-4)
    expected = (known - known.mean()) / (known.std() + 1e-4)  # the second score has one value: no deviation
    torch.testing.assert_close(found, torch.tensor([*expected.tolist(), 0.0]), rtol=1e-4, atol=1e-4)
    assert found[:3].abs().min() > 0
