"""One judge for training, evaluation, audits and collections: verdict, scores, reward, flags, record."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scripted_policy import ask, shop_environment
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.environment.session import EnvironmentSettings
from text2sql_grpo.grading import Grader, Verdict
from text2sql_grpo.rewards import Answer, Judge, RewardMix

RIGHT = "SELECT staff FROM branch WHERE code = 'LIS-02'"
GOLD_FAILED = Verdict(official=False, strict=False, reason="gold_failed", executes=False)
REWARDS = RewardMix({"execution": 1.0, "executes": 0.25, "turn_cost": 0.1})
Judged = Callable[..., Answer]


@pytest.fixture
def judged(tmp_path: Path) -> Judged:
    """Plays turns about a question and judges the episode."""
    environment = shop_environment(tmp_path, EnvironmentSettings(instructions=False, max_turns=4))

    def play(*turns: str, gold: str = RIGHT, rewards: RewardMix | None = REWARDS) -> Answer:
        session = environment.session(ask("Lisbon?", gold, family="lookup"))
        session.start()
        for turn in turns:
            session.step(turn)
        episode = session.episode
        episode.prompt_ids, episode.completion_ids, episode.completion_mask = [1, 2], [3, 4, 5], [1, 0, 1]
        episode.log_probs = [-0.1234567, 0.0, math.nan]
        judge = Judge(Grader(environment.executor), environment.executor, rewards)
        return judge.judge(episode, environment.databases.address("shop"))

    return play


def test_the_reward_is_the_weighted_sum_of_the_scores(judged: Judged) -> None:
    answer = judged("<sql>SELECT 1</sql>", f"<answer>{RIGHT}</answer>")
    assert answer.verdict.strict and answer.flags == ()
    assert answer.scores == {"execution": 1.0, "executes": 1.0, "turn_cost": -1 / 3}
    assert answer.reward == pytest.approx(1.25 - 0.1 / 3)


def test_flags_are_raised(judged: Judged) -> None:
    answer = judged("<answer>SELECT 8</answer>")
    assert answer.flags == ("no_table",) and not answer.verdict.strict


def test_a_failing_gold_and_an_absent_mix_pay_nothing(judged: Judged) -> None:
    for answer in (
        judged("<answer>SELECT 8</answer>", gold="SELECT absent FROM branch"),
        judged("<answer>SELECT 8</answer>", rewards=None),
    ):
        assert answer.scores is None and answer.reward is None


def test_record_holds_the_whole_episode(judged: Judged) -> None:
    answer = judged(
        "<sql>SELECT x'00ff' AS raw, 1e999 AS big, cast(x'ff' AS TEXT) AS odd, NULL</sql>",
        "?",
        "<sql>SELECT nowhere</sql>",
        "<answer>SELECT 8</answer>",
    )
    record = json.loads(json.dumps(answer.record()))
    assert record["messages"] == answer.episode.messages
    look, malformed, failed, submitted = record["actions"]
    assert look["outcome"].pop("elapsed_s") >= 0
    assert look["outcome"] == {"status": "ok", "rows": 1, "is_truncated": False, "error": ""}
    assert malformed["kind"] == "malformed" and malformed["error"].startswith("expected one <sql>")
    assert failed["outcome"]["error"] == "no such column: nowhere"
    assert submitted == {"kind": "submit_sql", "sql": "SELECT 8"}
    expected = {
        **{"example": "Lisbon?", "database": "shop", "family": "lookup", "difficulty": "medium"},
        **{"question": "Lisbon?", "gold_sql": RIGHT, "other_golds": []},
        **{"final_sql": "SELECT 8", "stop_reason": "submitted", "is_masked": False},
        **{"strict": answer.verdict.strict, "official": answer.verdict.official},
        **{"reason": answer.verdict.reason, "gap": "", "flags": list(answer.flags)},
        **{"scores": answer.scores, "reward": answer.reward},
        **{"prompt_ids": [1, 2], "completion_ids": [3, 4, 5], "completion_mask": [1, 0, 1]},
        "log_probs": [-0.12346, None],
    }
    assert {key: record[key] for key in expected} == expected
    assert set(record) == {*expected, "messages", "actions"}


def test_record_of_a_masked_episode() -> None:
    record = Answer(Episode(ask("Lisbon?"), is_masked=True, stop_reason="budget"), GOLD_FAILED).record()
    assert (record["scores"], record["reward"], record["final_sql"]) == (None, None, None)
    assert record["log_probs"] is None
    assert json.loads(json.dumps(record)) == record
