"""Weighted rewards, their presets and the judge."""

import itertools
import json
import math
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Action, ActionKind, Episode
from text2sql_grpo.environment.session import EnvironmentSettings, SQLEnvironment
from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.grading import Grader, Verdict
from text2sql_grpo.grading.suite import TestSuite
from text2sql_grpo.rewards import Results, RewardMix
from text2sql_grpo.rewards.presets import PRESETS
from text2sql_grpo.sql import SQLExecutor

RIGHT = Verdict(official=True, strict=True, reason="equal", executes=True)
WRONG = Verdict(official=False, strict=False, reason="values", executes=True)
FAILED = Verdict(official=False, strict=False, reason="query_failed", executes=False)
GOLD_FAILED = Verdict(official=False, strict=False, reason="gold_failed", executes=False)
NO_RESULTS = Results(SQLExecutor(), Path("unread.sqlite"), Episode(Example("q", "d", "?", "SELECT 1")))
WEIGHTS = {"execution": 1.0, "executes": 0.1, "format": 0.1, "schema_linking": 0.2, "turn_cost": 0.1}


def make_episode(n_turns: int = 2, *, max_turns: int = 3, n_malformed: int = 0) -> Episode:
    kinds: list[ActionKind] = ["run_sql"] * (n_turns - 1) + ["submit_sql"]
    kinds[:n_malformed] = ["malformed"] * n_malformed
    return Episode(
        Example(id="q1", database="d", question="?", gold_sql="SELECT a FROM t"),
        actions=[Action(kind) for kind in kinds[:n_turns]],
        max_turns=max_turns,
        final_sql="SELECT a FROM t",
    )


def test_scores_by_name_and_their_weighted_sum() -> None:
    rewards = RewardMix(WEIGHTS)
    scores = rewards.score(make_episode(), WRONG, NO_RESULTS)
    assert scores == {"execution": 0, "executes": 1, "format": 1, "schema_linking": 1, "turn_cost": -0.5}
    assert rewards.total(scores) == pytest.approx(0.1 + 0.1 + 0.2 - 0.05)


def test_weight_zero_scores_but_does_not_count() -> None:
    rewards = RewardMix({"execution": 2, "format": 0})
    scores = rewards.score(make_episode(), RIGHT, NO_RESULTS)
    assert scores == {"execution": 1, "format": 1}
    assert rewards.total(scores) == 2


def test_masked_samples_have_no_scores() -> None:
    rewards = RewardMix(WEIGHTS)
    assert rewards.score(make_episode(), GOLD_FAILED, NO_RESULTS) is None
    assert rewards.score(replace(make_episode(), is_masked=True), RIGHT, NO_RESULTS) is None


@given(
    st.fixed_dictionaries(
        {"execution": st.floats(-3, 3)}, optional={name: st.floats(-1, 1) for name in list(WEIGHTS)[1:]}
    )
)
def test_accepted_weights_never_pay_a_wrong_answer_more(weights: dict[str, float]) -> None:
    try:
        rewards = RewardMix(weights)
    except ConfigError:
        return
    shapes = [(1, 0), (1, 1), (3, 0), (3, 2), (3, 3)]
    episodes = [make_episode(n_turns, n_malformed=n_malformed) for n_turns, n_malformed in shapes]

    def total(episode: Episode, verdict: Verdict) -> float:
        scores = rewards.score(episode, verdict, NO_RESULTS)
        assert scores is not None
        return rewards.total(scores)

    wrong = [total(episode, verdict) for episode, verdict in itertools.product(episodes, (WRONG, FAILED))]
    right = [total(episode, RIGHT) for episode in episodes]
    assert max(wrong) < min(right)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            {"execution": 1.0, "schema_linking": 1.0, "executes": 0.5},
            r"wrong one can earn 1\.5 and a right one as little as 1\.5; lower schema_linking: 1\.0",
        ),
        (
            {"execution": 1.0, "format": 0.6, "turn_cost": 0.4},
            r"earn 0\.6 .* little as 0\.6; lower format: 0\.6, turn_cost: 0\.4",
        ),
        ({"execution": 1.0, "turn_cost": 1.0}, r"earn 0 .* little as 0; lower turn_cost: 1\.0"),
        ({"execution": 1.0, "turn_cost": -2.0}, r"earn 2 .* little as 1; lower turn_cost: -2\.0"),
        ({"execution": -1.0}, r"earn 0 .* little as -1; lower execution: -1\.0"),
        ({"execution": 1.0, "executes": -1.0}, r"lower executes: -1\.0"),
        ({"execution": 0.0, "executes": 1.0}, r"earn 1 .* little as 1"),
        ({"execution": 0.0}, r"raise execution above 0"),
    ],
)
def test_weights_with_which_wrong_could_reach_right_are_refused(
    weights: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardMix(weights)


def test_execution_is_included_where_no_weight_is_given_for_it() -> None:
    assert RewardMix({}).weights == {"execution": 1.0}
    assert RewardMix({"executes": 0.5}).weights == {"execution": 1.0, "executes": 0.5}


def test_weights_just_inside_the_invariant_are_accepted() -> None:
    assert RewardMix({"execution": 1.0, "format": 0.5, "turn_cost": 0.49}).weights["turn_cost"] == 0.49


def test_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="unknown name 'executed': did you mean executes"):
        RewardMix({"execution": 1.0, "executed": 0.1})


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, True, "1", None])
def test_weight_must_be_a_finite_number(weight: object) -> None:
    with pytest.raises(ConfigError, match="execution must be a finite number"):
        RewardMix({"execution": weight})  # type: ignore[dict-item]


def test_score_outside_the_declared_range_stops_the_run() -> None:
    rewards = RewardMix({"execution": 1.0, "turn_cost": 0.5})
    with pytest.raises(RunError, match=r"turn_cost must be from -1 to 0, got -2\.0 \(question q1"):
        rewards.score(make_episode(3, max_turns=2), RIGHT, NO_RESULTS)


def totals(rewards: RewardMix, *cases: tuple[Episode, Verdict]) -> list[float | None]:
    scores = [rewards.score(episode, verdict, NO_RESULTS) for episode, verdict in cases]
    return [None if score is None else pytest.approx(rewards.total(score)) for score in scores]


def test_clip_bounds_the_reward_and_says_by_how_much() -> None:
    rewards = RewardMix({"execution": 2.0, "turn_cost": 0.5, "clip": [-0.1, 1.7]})

    assert totals(rewards, (make_episode(1), RIGHT), (make_episode(3), RIGHT)) == [1.7, 1.5]
    assert totals(rewards, (make_episode(1), WRONG), (make_episode(3), WRONG)) == [0, -0.1]
    assert rewards.score(make_episode(3), WRONG, NO_RESULTS) == {
        "execution": 0, "turn_cost": -1, "adjustment": pytest.approx(0.4),
    }  # fmt: skip
    assert rewards.weights == {"execution": 2.0, "turn_cost": 0.5, "adjustment": 1.0}


def test_penalty_instead_of_a_mask() -> None:
    rewards = RewardMix({"execution": 1.0, "on_error": "penalty"})
    masked = replace(make_episode(), is_masked=True)

    cases = ((make_episode(), GOLD_FAILED), (masked, RIGHT), (make_episode(), RIGHT), (make_episode(), WRONG))
    assert totals(rewards, *cases) == [-1, -1, 1, 0]
    lost = replace(masked, stop_reason="error")
    assert rewards.score(lost, WRONG, NO_RESULTS) is None, "a server that died is not the model's fault"
    assert RewardMix({"execution": 1.0, "on_error": "mask"}).weights == {"execution": 1.0}


def test_preset_takes_other_weights_beside_and_over_its_own() -> None:
    assert RewardMix({"preset": "strict", "turn_cost": 0.02}).weights == {
        "execution": 1.0, "turn_cost": 0.02,
    }  # fmt: skip
    tamed = RewardMix({"preset": "arctic", "official_execution": 0.0, "execution": 1.0})
    assert tamed.weights == {"official_execution": 0.0, "executes": 0.1, "execution": 1.0}
    assert tamed.warning is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "arctic", "turn_cost": 0.1}, r"earn 1 .* as little as 0; lower official_execution: 0.9,"),
        ({"preset": "skyrl", "clip": [0, 1]}, r"earn 1 .* as little as 0; lower skyrl: 1.0"),
        ({"execution": 1.0, "clip": [1, 2]}, r"earn 1 .* as little as 1; widen clip: \[1, 2\]"),
        ({"execution": 1.0, "clip": [-1, 0]}, r"earn 0 .* as little as 0; widen clip: \[-1, 0\]"),
        ({"execution": 1.0, "clip": 3}, "clip must be two finite numbers, .* got 3"),
        ({"execution": 1.0, "clip": [0, math.nan]}, "clip must be two finite numbers, .* got"),
        ({"execution": 1.0, "clip": [1, 0]}, "clip must be two finite numbers, the lowest first"),
        ({"execution": 1.0, "clip": [1, 1]}, "widen clip"),
        ({"preset": ["arctic"]}, r"preset must be one of strict, .* got \['arctic'\]"),
        ({"execution": 1.0, "on_error": None}, "on_error must be one of mask, penalty, got None"),
        ({"execution": 1.0, "zzzz": 1.0}, "unknown name 'zzzz': known: execution, .*on_error"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardMix(settings)


CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "golden" / "rewards.jsonl").read_text("utf-8").splitlines()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("presets")
    with closing(sqlite3.connect(folder / "staff.sqlite")) as connection:
        connection.executescript(
            "CREATE TABLE emp (id INTEGER PRIMARY KEY, name TEXT, dept TEXT, age INTEGER);"
            "INSERT INTO emp VALUES (1, 'Ann', 'IT', 30), (2, 'Bob', 'IT', 30), (3, 'Cid', 'HR', 45);"
        )
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_episodes(case: dict[str, Any], folder: Path, executor: SQLExecutor) -> None:
    assert list(case["rewards"]) == list(PRESETS)
    environment = SQLEnvironment(Databases(folder), executor, EnvironmentSettings(max_turns=3))
    session = environment.session(
        Example(id=case["name"], database="staff", question="?", gold_sql=case["gold"])
    )
    session.start()
    for turn in case["turns"]:
        session.step(turn)
    episode, database = session.episode, folder / "staff.sqlite"
    grader = Grader(executor, suite=TestSuite(executor, folder / "suites"))
    verdict = grader.grade(database, case["gold"], episode.final_sql)

    for preset, expected in case["rewards"].items():
        rewards = RewardMix({"preset": preset})
        scores = rewards.score(episode, verdict, Results(executor, database, episode))
        assert scores is not None
        assert rewards.total(scores) == pytest.approx(expected, abs=1e-6), (preset, scores)


def test_only_our_own_preset_never_pays_a_wrong_answer() -> None:
    warnings = {name: RewardMix({"preset": name}).warning for name in PRESETS}

    assert [name for name, warning in warnings.items() if warning is None] == ["strict"]
    assert warnings["arctic"] == (
        "Preset arctic reproduces published work and pays wrong answers, up to 1, a right one as little as "
        "0.1. Paid: official_execution: results that are equal as sets of rows on one database: hard-coded "
        "constants, coincidences, wrong order, duplicates, anything empty for an empty gold; executes: any "
        "query that runs."
    )
