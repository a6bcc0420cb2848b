"""Judging recorded episodes once more, through the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_policy import SHOP
from tests.tiny_run import QUESTIONS, json_lines, write_config, write_questions
from text2sql_grpo.commands import main
from text2sql_grpo.config import load_config
from text2sql_grpo.evaluation.answers import write_answers
from text2sql_grpo.evaluation.bench import Bench
from text2sql_grpo.rewards import RewardMix

REWARDS = {"execution": 1.0, "turn_cost": 0.25}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with four judged answers: right after a look, right, wrong by accident, and none."""
    path = write_config(tmp_path, grading={"test_databases": 4}, rewards=REWARDS)
    (tmp_path / "run").mkdir()
    path = path.rename(tmp_path / "run" / "config.yaml")
    turns = {
        "look-Lisbon": ["<sql>SELECT code FROM branch</sql>", f"<answer>{QUESTIONS[0]['gold_sql']}</answer>"],
        "look-Porto": ["?", "?"],
        "count": ["<answer>SELECT 3</answer>"],
        "cities": ["<answer>SELECT city FROM branch</answer>"],
    }
    with Bench.open(load_config(path)) as bench:
        answers = []
        for example in bench.test["test_values"]:
            session = bench.environment.sessions.session(example)
            session.start()
            for text in turns[example.id]:
                session.step(text)
            database = bench.environment.databases.address(example.database)
            answers.append(bench.environment.judge(RewardMix(REWARDS)).judge(session.episode, database))
    write_answers(tmp_path / "run" / "evaluation.jsonl", {"test_values": answers})
    return tmp_path / "run"


def replayed(run: Path, *options: str) -> list[dict[str, Any]]:
    out = run.parent / "again.jsonl"
    assert main(["replay", str(run), "--out", str(out), *options]) == 0
    return json_lines(out)


def test_the_same_judgement_comes_out_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = json_lines(run / "evaluation.jsonl")
    assert [row["strict"] for row in recorded] == [True, False, False, True]
    assert recorded[2]["reason"] == "test_database"
    for row, again in zip(recorded, replayed(run), strict=True):
        for action in (*row["actions"], *again["actions"]):
            (action.get("outcome") or {}).pop("elapsed_s", None)
        row.pop("log_probs"), again.pop("log_probs")
        assert again == row
    out = capsys.readouterr().out
    assert "4 answers: 0 become right, 0 become wrong" in out
    assert "mean reward: 0.375 as recorded, 0.375 now" in out


def test_another_grading_another_reward_and_corrected_golds(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = replayed(run, "--grading.test_databases", "0", "--rewards", "{execution: 1.0}")
    assert [row["reward"] for row in rows] == [1, 0, 1, 1]
    out = capsys.readouterr().out
    assert "NOW RIGHT  count (database shop)" in out and "reason    test_database -> equal" in out
    assert "1 become right, 0 become wrong" in out
    assert "right: 2/4 = 50.0%" in out and "3/4 = 75.0%" in out
    corrected = write_questions(tmp_path / "golds.jsonl", [QUESTIONS[3] | {"gold_sql": "SELECT 5"}])
    rows = replayed(run, "--golds", str(corrected))
    assert [row["strict"] for row in rows] == [True, False, False, False]
    out = capsys.readouterr().out
    assert "NOW WRONG  cities" in out
    assert "gold      SELECT city FROM branch -> SELECT 5" in out


def test_training_episodes_and_wrong_input(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*argv: str) -> str:
        assert main(["replay", *argv]) == 1
        return capsys.readouterr().err

    assert "rollouts.jsonl is missing" in fails(str(run), "--episodes")
    (run / "evaluation.jsonl").rename(run / "rollouts.jsonl")
    assert "--episodes grades the training episodes" in fails(str(run))
    assert main(["replay", str(run), "--episodes"]) == 0
    assert "4 answers" in capsys.readouterr().out
    for other in ({"question": "Who?"}, {"database": "bank"}, {"id": "unknown"}):
        others = write_questions(tmp_path / "others.jsonl", [QUESTIONS[0] | other])
        assert "has the id, text and database" in fails(str(run), "--episodes", "--golds", str(others))
    whole, wrong = (run / "rollouts.jsonl").read_text().splitlines()[0], run / "wrong.jsonl"
    for field, value in {"example": None, "strict": None, "actions": [{"kind": "run_sql"}]}.items():
        changed = json.loads(whole) | {field: value}
        if value is None:
            del changed[field]
        wrong.write_text(f"{whole}\n{json.dumps(changed)}\n")
        lacks = "sql" if value else field
        for options in ([], ["--golds", str(others)]):
            assert f"no field '{lacks}' ({wrong}, line 2)" in fails(str(wrong), *options)
    assert f"there is no {tmp_path / 'nowhere'}: give a run folder" in fails(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert "no config.yaml around" in fails(str(tmp_path / "empty"))
    assert SHOP in (tmp_path / "databases" / "shop.sql").read_text()
