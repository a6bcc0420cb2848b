"""Both audits through the command line, on the tiny run's shop."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import QUESTIONS, write_config, write_questions
from text2sql_grpo.commands import main
from text2sql_grpo.config import load_config
from text2sql_grpo.data.loading import read_quarantine
from text2sql_grpo.evaluation.bench import Bench

BROKEN = {**QUESTIONS[2], "id": "broken", "question": "Lisbon?", "gold_sql": "SELECT nope FROM branch"}
AGAIN = {**QUESTIONS[3], "id": "again"}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_config(tmp_path)


def printed(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(argv) == code
    return capsys.readouterr().out


def test_questions_are_reported_and_training_leaves_the_wrong_ones_out(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_questions(tmp_path / "train.jsonl", [*QUESTIONS, BROKEN, AGAIN])
    argv = ("audit", "data", "train.jsonl", "--db", "databases", "--quarantine", "out/quarantine.jsonl")
    argv += ("--against", str(tmp_path / "train.jsonl"))  # as a glob that matches the file itself

    report = printed(capsys, *argv)

    assert "error: broken (at train.jsonl:5): error: no such column: nope" in report
    assert "duplicated: again (at train.jsonl:6): asked as cities, with the same gold" in report
    assert "6 questions, 2 for quarantine" in report
    assert read_quarantine(Path("out/quarantine.jsonl")) == {"broken", "again"}
    own = load_config(config, ["--data.quarantine", "out/quarantine.jsonl"])
    kept = [example.id for example in Bench.open(own).load(Path("train.jsonl"))]
    assert kept == [row["id"] for row in QUESTIONS]
    printed(capsys, *argv, "--keep", "duplicated")
    assert read_quarantine(Path("out/quarantine.jsonl")) == {"broken"}


def test_a_gold_that_fails_ends_with_1_unless_it_is_left_out(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("text2sql_grpo.reporting.counting.LINE_EVERY_S", 0.0)
    write_questions(tmp_path / "train.jsonl", [*QUESTIONS, BROKEN])
    argv = ["audit", "data", "train.jsonl", "--db", "databases", "--test_databases", "0"]
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert "golds that fail (error, hidden): 1 question; --quarantine FILE leaves them out" in out
    assert err.splitlines() == [f"Golds {done}/5" for done in range(1, 6)]
    assert main([*argv, "--quarantine", "left_out.jsonl", "--keep", "error"]) == 1
    assert main([*argv, "--quarantine", "left_out.jsonl"]) == 0


def test_golds_that_most_answers_contradict_are_listed(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [{"id": "count", "sql": "SELECT MAX(staff) FROM branch"}] * 4 + [{"id": "?", "sql": "SELECT 1"}]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    argv = ("audit", "data", "questions.jsonl", "--db", "databases", "--answers", "answers.jsonl")

    report = printed(capsys, *argv, "--test_databases", "0", "--quarantine", "none.jsonl")

    assert "suspect: count (at questions.jsonl:3): 100% of 4 answers have another result" in report
    assert "suspects: suspects.jsonl, to read: suspects.md" in report
    assert read_quarantine(Path("none.jsonl")) == set()
    assert read_quarantine(Path("suspects.jsonl")) == {"count"}
    assert "SELECT MAX(staff) FROM branch" in Path("suspects.md").read_text()


def test_questions_as_json(tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_questions(tmp_path / "train.jsonl", [QUESTIONS[2], BROKEN])

    record = json.loads(
        printed(
            capsys,
            *("audit", "data", "train.jsonl", "--db", "databases", "--against", "questions.jsonl"),
            *("--config", str(config), "--max_prompt_tokens", "1", "--json"),
            code=1,
        )
    )

    assert record["questions"] == record["quarantined"] == 2
    assert record["counts"] == {"error": 1, "leaking": 1, "too_long": 2}
    assert record["findings"][0] == {
        "id": "count", "place": "train.jsonl:1", "reason": "leaking",
        "detail": "question also in questions.jsonl",
    }  # fmt: skip


def reward_audit(capsys: pytest.CaptureFixture[str], config: Path, *settings: str) -> dict[str, Any]:
    argv = ("audit", "reward", "--config", str(config), "--golds", "2", "--json", *settings)
    record: dict[str, Any] = json.loads(printed(capsys, *argv))
    return record


@pytest.mark.thorough
def test_reward_of_a_config_and_a_published_one_beside_it(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = reward_audit(capsys, config)
    rates = own["rates"]

    assert own["misjudged"] == []
    assert own["warning"] is None
    assert [rate["reward"] for rate in rates.values()] == [0] * 5
    assert rates["wrong probes accepted"]["official"] > 5
    assert rates["hard-coded answers accepted"]["official_share"] == 1

    out = printed(capsys, "audit", "reward", "--config", str(config), "--golds", "1")
    assert "wrong probes accepted" in out and "official EX" in out


def test_published_reward_is_shown_with_what_it_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path, rewards={"preset": "arctic"}, grading={"test_databases": 0})

    report = printed(capsys, "audit", "reward", "--config", str(config), "--golds", "1")

    assert "Preset arctic reproduces published work and pays wrong answers, up to 1" in report
    assert "paid though wrong (probe: nothing for an empty gold, 100% of the gold's reward" in report
    assert "refused though right (probe: 0.1 + 0.2 for 0.3" in report
