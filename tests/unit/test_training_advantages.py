"""Advantages of turns: by hand, equal to GRPO's where turns earn nothing, right above wrong in every mode."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from text2sql_grpo.training.advantages import (
    GAE_LAMBDA,
    gae,
    token_advantages,
    tree_advantages,
    turn_advantages,
    whitened,
)

from text2sql_grpo.config import _GAE_MAX_TURNS
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.rewards import RewardMix

MIX = {"execution": 1.0, "executes": 0.2, "turn_cost": 0.1}
SCALES = st.sampled_from(["group", "batch", "none"])


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


@st.composite
def rollouts(draw: Any, *, size: int, max_turns: int, chance: Any) -> list[tuple[bool, float, list[float]]]:
    """Verdict, reward in the bounds of MIX, and a number for each turn of each rollout."""
    highest_wrong, lowest_right = RewardMix(MIX).bounds()
    rows = []
    for _ in range(size):
        is_right = draw(st.booleans())
        low, high = (lowest_right, lowest_right + 0.2) if is_right else (highest_wrong - 0.3, highest_wrong)
        turns = draw(st.lists(chance, min_size=1, max_size=max_turns))
        rows.append((is_right, draw(st.floats(low, high)), turns))
    return rows


def check_right_above_wrong(
    rows: list[tuple[bool, float, list[float]]], advantages: list[list[float]]
) -> None:
    """Each turn of a right rollout against the same turn of each wrong one."""
    pairs = list(zip(rows, advantages, strict=True))
    for (right, *_), high in pairs:
        for (wrong, *_), low in pairs:
            if right and not wrong:
                for turn, (above, below) in enumerate(zip(high, low, strict=False)):
                    assert above > below, turn


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(2, 10), st.floats(0, 0.6), st.floats(0, 0.6), SCALES)
def test_rewards_of_turns_never_lift_wrong_above_right(
    data: Any, max_turns: int, shown: float, failed: float, scale: str
) -> None:
    mix = RewardMix(MIX | {"turns": {"gold_shown": shown, "failed_call": failed / max_turns}})
    try:
        mix.turns.check(*mix.bounds(), max_turns=max_turns)
    except ConfigError:
        assert shown + failed > 0.6  # 0.7 is what the mix leaves
        return
    found = data.draw(rollouts(size=6, max_turns=max_turns, chance=st.floats(-1, 1)))
    rows = []
    for _, reward, scores in found:
        positive = sum(score for score in scores if score > 0)
        earned = [shown * score / max(positive, 1) if score > 0 else 0.0 for score in scores]
        costs = [failed / max_turns * (score < 0) for score in scores[:-1]] + [0.0]
        rows.append((reward, [gain - cost for gain, cost in zip(earned, costs, strict=True)]))
    check_right_above_wrong(found, turn_advantages(rows, group_size=6, scale=scale))


@settings(deadline=None, max_examples=60)
@given(rollouts(size=8, max_turns=5, chance=st.just(0.0)), st.sampled_from([2, 4]), SCALES)
def test_a_tree_credits_both_parts_with_the_advantage_of_grpo(
    found: list[tuple[bool, float, list[float]]], size: int, scale: str
) -> None:
    rows = [(reward, turns) for _, reward, turns in found]
    plain = turn_advantages([(reward, [0.0]) for reward, _ in rows], group_size=8, scale=scale)
    advantages = tree_advantages(rows, group_size=8, subtree_size=size, scale=scale)
    for (own,), (first, *later) in zip(plain, advantages, strict=True):
        assert all(first + value == pytest.approx(own) for value in later)
    for start in range(0, 8, size):
        subtree = advantages[start : start + size]
        assert len({round(first, 9) for first, *_ in subtree}) == 1
        check_right_above_wrong(found[start : start + size], [later for _, *later in subtree])


def test_masked_rollouts_do_not_count_in_a_tree() -> None:
    rows = [(1.0, [0, 0]), (None, [0, 0]), (0.0, [0]), (0.0, [0, 0])]
    assert tree_advantages(rows, group_size=4, subtree_size=2, scale="none") == [
        pytest.approx([2 / 3, 0.0]),
        [0.0, 0.0],
        pytest.approx([-1 / 3]),
        pytest.approx([-1 / 3, 0.0]),
    ]


def test_gae_by_hand() -> None:
    first = (0.5 - 0.2) + GAE_LAMBDA * (1.0 - 0.5)
    assert gae(1.0, [0.2, 0.5]) == pytest.approx([first, 0.5])
    assert whitened([[1.0, 3.0], []], scale="none") == [[-1.0, 1.0], []]


@settings(deadline=None, max_examples=60)
@given(rollouts(size=6, max_turns=_GAE_MAX_TURNS, chance=st.floats(0, 1)), st.floats(0, 1), SCALES)
def test_gae_credits_right_above_wrong_from_the_same_value(
    found: list[tuple[bool, float, list[float]]], start: float, scale: str
) -> None:
    low, high = RewardMix(MIX).bounds()
    values = [[low + (high - low) * share for share in [start, *turns[1:]]] for *_, turns in found]
    raw = [gae(reward, row) for (_, reward, _), row in zip(found, values, strict=True)]
    check_right_above_wrong(found, [row[:1] for row in whitened(raw, scale=scale)])


def test_gae_of_more_turns_than_allowed_could_credit_wrong_above_right() -> None:
    def first(turns: int, *, is_right: bool) -> float:
        return gae(float(is_right), [0.5, *[float(not is_right)] * (turns - 1)])[0]

    assert first(_GAE_MAX_TURNS, is_right=True) > first(_GAE_MAX_TURNS, is_right=False)
    assert first(_GAE_MAX_TURNS + 1, is_right=True) < first(_GAE_MAX_TURNS + 1, is_right=False)
