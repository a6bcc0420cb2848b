"""Advantages of turns: by hand, and equal to GRPO's where turns earn nothing."""

import pytest
import torch

from text2sql_grpo.training.advantages import token_advantages, turn_advantages


def test_without_rewards_of_turns_they_are_those_of_grpo() -> None:
    rewards = [1.0, 0.0, 0.5, 0.0]
    rows = [(reward, [0.0] * turns) for reward, turns in zip(rewards, (1, 3, 2, 1), strict=True)]
    grpo = (torch.tensor(rewards) - 0.375) / (torch.tensor(rewards).std() + 1e-4)
    for own, expected in zip(turn_advantages(rows, group_size=4, scale="group"), grpo, strict=True):
        assert own == pytest.approx([expected.item()] * len(own))


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
    output = {"completion_ids": torch.zeros(2, 6), "advantages": torch.zeros(2)}
    masks = [[1, 1, 0, 1, 0], [0, 0]]
    assert token_advantages([[0.5, -1.0], []], masks, output).tolist() == [
        [0.5, 0.5, 0.0, -1.0, 0.0, 0.0],
        [0.0] * 6,
    ]
