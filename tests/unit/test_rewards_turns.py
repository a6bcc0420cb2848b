"""Rewards of turns: what they pay, that repeating pays nothing, and that they cannot outweigh the verdict."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from text2sql_grpo.config import parse_config
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Action, Episode
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.rewards import RewardMix
from text2sql_grpo.rewards.turn_rewards import TurnRewards
from text2sql_grpo.sql import ExecutionOutcome

GOLD = "SELECT age FROM emp WHERE dept = 'IT 4' AND city = 'Rome'"  # the question holds Rome
AGES = ExecutionOutcome("ok", ("age", "name"), ((31, "Ann"),))
DEPTS = ExecutionOutcome("ok", ("dept",), (("HR 2",), ("IT 4",)))
EMPTY = ExecutionOutcome("ok", ("city",))
ERROR = ExecutionOutcome("error", error="no such column: cty")


def episode(*results: ExecutionOutcome | None) -> Episode:
    actions = [
        Action("malformed") if result is None else Action("run_sql", "..", result) for result in results
    ]
    return Episode(
        Example("q", "d", "Age of those in IT in Rome?", GOLD), actions=[*actions, Action("submit_sql", GOLD)]
    )


def scores(*results: ExecutionOutcome | None, max_rows: int = 10) -> dict[str, list[float]]:
    return TurnRewards().score(episode(*results), max_rows_shown=max_rows, dialect="sqlite")


def test_what_the_gold_needs_pays_where_it_is_shown_first() -> None:
    found = scores(AGES, DEPTS, DEPTS, EMPTY, ERROR, None)
    assert found["gold_shown"] == [0.25, 0.5, 0, 0, 0, 0, 0]  # of age, dept, city and IT 4
    assert found["failed_call"] == [0, 0, 0, 0, -1, -1, 0]


def test_rows_that_the_model_did_not_see_pay_nothing() -> None:
    assert scores(DEPTS, max_rows=1)["gold_shown"] == [0.25, 0]


def test_masked_episodes_earn_nothing_and_a_weighted_sum_is_by_turn() -> None:
    cut = dataclasses.replace(episode(AGES, ERROR), is_masked=True)
    rewards = TurnRewards({"gold_shown": 0.4, "failed_call": 0.1})
    assert rewards.total(rewards.score(cut, max_rows_shown=5, dialect="sqlite")) == [0, 0, 0]
    assert rewards.total(scores(AGES, ERROR)) == pytest.approx([0.1, -0.1, 0])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from([AGES, DEPTS, EMPTY, ERROR, None]), max_size=8), st.integers(0, 8))
def test_no_episode_earns_more_than_the_weight_and_repeating_adds_nothing(
    results: list[ExecutionOutcome | None], again: int
) -> None:
    shown = scores(*results)["gold_shown"]
    assert sum(shown) <= 1
    assert sum(scores(*results, *results[:again])["gold_shown"]) == pytest.approx(sum(shown))


@pytest.mark.parametrize(
    ("turns", "max_turns", "fault"),
    [
        ({"gold_shown": 0.5}, 5, ""),
        ({"gold_shown": 1.0}, 5, "a wrong one can earn 1 "),
        ({"gold_shown": 0.5, "failed_call": 0.125}, 4, ""),
        ({"gold_shown": 0.5, "failed_call": 0.125}, 5, "a right one as little as 0.5"),
        ({"shown": 0.5}, 5, "unknown name 'shown'"),
        ({"gold_shown": -0.5}, 5, "must be a number >= 0"),
        ([0.5], 5, "must be a mapping"),
    ],
)
def test_weights_with_which_wrong_could_earn_as_much_are_refused(
    turns: object, max_turns: int, fault: str
) -> None:
    def check() -> None:
        mix = RewardMix({"execution": 1.0, "turns": turns})
        mix.turns.check(*mix.bounds(), max_turns=max_turns)

    if not fault:
        return check()
    with pytest.raises(ConfigError, match=fault):
        check()


def config(credit: str, rewards: dict[str, object], **environment: int) -> None:
    data = {"databases": "d", "train": "t"}
    tree = {"model": {"path": "m"}, "data": data, "rewards": rewards, "environment": environment}
    parse_config(tree | {"grpo": {"turn_credit": credit}}, source="c.yaml")


def test_a_config_is_checked_over_its_turns() -> None:
    rewards = {"execution": 1.0, "turns": {"gold_shown": 0.5, "failed_call": 0.1}}
    config("rewards", rewards, max_turns=5)
    with pytest.raises(ConfigError, match="max_turns 7"):
        config("rewards", rewards, max_turns=7)
    with pytest.raises(ConfigError, match=r"rewards\.turns needs grpo\.turn_credit"):
        config("tree", rewards, max_turns=5)
    config("gae", {"execution": 1.0}, max_turns=14)
    with pytest.raises(ConfigError, match="max_turns <= 14"):
        config("gae", {"execution": 1.0}, max_turns=15)
    with pytest.raises(ConfigError, match="right answer earns more"):
        config("gae", {"preset": "arctic"}, max_turns=5)
