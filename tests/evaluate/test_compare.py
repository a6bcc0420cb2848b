"""Comparing answers at hand and real (random, tiny) models, through the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import write_model
from tests.tiny_run import QUESTIONS, json_lines, write_config
from text2sql_grpo.commands import main
from text2sql_grpo.config import load_config
from text2sql_grpo.evaluation.answers import read_answers, write_answers
from text2sql_grpo.evaluation.bench import Bench

WRONG = "SELECT 7"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The folder of a config with one held-out set of four questions."""
    monkeypatch.chdir(tmp_path)
    environment = {"schema_text": "compact", "instructions": False, "max_turns": 1, "max_turn_tokens": 4}
    path = write_config(tmp_path, environment=environment)
    (tmp_path / "run").mkdir()
    path.rename(tmp_path / "run" / "config.yaml")
    return Bench.open(load_config(tmp_path / "run" / "config.yaml"))


def write(bench: Bench, path: Path, *, right: set[str]) -> Path:
    """A file of answers: right ones to these questions."""
    answers = []
    for example in bench.test["test_values"]:
        environment = bench.environment
        session = environment.sessions.session(example)
        session.start()
        session.step(f"<answer>{example.gold_sql if example.id in right else WRONG}</answer>")
        database = environment.databases.address(example.database)
        answers.append(environment.judge().judge(session.episode, database))
    write_answers(path, {"test_values": answers})
    return path


def record(path: str) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def test_answers_at_hand_are_compared_without_a_model(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(bench, tmp_path / "run" / "evaluation-before.jsonl", right={"count"})
    write(bench, tmp_path / "run" / "evaluation.jsonl", right={"look-Lisbon", "cities"})

    assert main(["compare", "run/evaluation-before.jsonl", "run"]) == 0

    out = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in out.splitlines()[:12]]
    assert "test_values 4 25 (5-70) 50 (15-85) +25 (-46 to +75) +2 -1 1.00" in rows
    assert not any(row.startswith("lookup") for row in rows)  # two questions have no row
    assert max(len(line) for line in out.splitlines()[:12]) <= 80
    assert "GAINED  test_values: look-Lisbon (database shop)" in out
    assert "LOST  test_values: count (database shop)" in out
    assert "question  Staff of the Lisbon branch?" in out
    assert "gold      SELECT staff FROM branch WHERE code = 'LIS-02'" in out
    assert "base      SELECT 7  (" in out
    assert "trained   SELECT staff FROM branch WHERE code = 'LIS-02'  (equal)" in out
    assert "95% intervals by question" in out and "by database" not in out
    assert record("run/comparison.report.json")["interval_unit"] == "by question"
    assert "gains 2 and loses 1: better, +25.0 points" in out and "This could be chance" in out
    written = record("run/comparison.json")
    figures = {"both": 0, "gained": 2, "lost": 1, "neither": 1, "difference": 0.25}
    figures |= {"p_value": 1.0, "naive_p_value": 1.0, "databases": 1}
    assert figures.items() <= written["overall"]["strict"].items()
    assert written["overall"]["strict"]["trained"]["by_database"] == {"shop": [2, 4]}
    assert written["verdict"] in out
    assert {one["example"] for one in written["changed"]} == {"look-Lisbon", "cities", "count"}


def test_questions_of_several_databases_have_a_row_by_question_and_a_remark(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, right in (("a", {"count"}), ("b", {"count", "cities"})):
        path = write(bench, tmp_path / f"{name}.jsonl", right=right)
        rows = [row | {"database": f"shop{i % 2}"} for i, row in enumerate(json_lines(path))]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert main(["compare", "a.jsonl", "b.jsonl", "--out", "c.json"]) == 0

    out = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in out.splitlines()[:14]]
    assert "test_values 4 25 (0-100) 50 (15-85) +25 (-100 to +100) +1 -0 -" in rows
    assert "by question (5-70) (15-85) (-32 to +66) 1.00" in rows
    assert max(len(line) for line in out.splitlines()[:14]) <= 80
    assert "2 databases are few" in " ".join(out.split()) and "95% intervals by database" in out
    assert record("c.report.json")["interval_unit"] == "by database"


def test_some_questions_of_answers_at_hand(bench: Bench, tmp_path: Path) -> None:
    first = write(bench, tmp_path / "a.jsonl", right=set())
    write(bench, tmp_path / "b.jsonl", right={question["id"] for question in QUESTIONS})
    (tmp_path / "b.json").write_text("{}")

    assert main(["compare", str(first), "b.json", "--num_samples", "2", "--out", "c.json"]) == 0

    written = record("c.json")
    assert written["num_samples"] == 2
    assert [one["example"] for one in written["changed"]] == ["look-Lisbon", "count"]


def test_a_model_is_asked_what_the_other_side_was_asked(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "base", max_positions=512)
    write(bench, tmp_path / "at_hand.jsonl", right={"count"})
    lines = (tmp_path / "at_hand.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "at_hand.jsonl").write_text("".join(lines[1:3]))  # look-Porto and count

    options = ["--config", "run/config.yaml", "--out", "made/comparison.json", "--data.test_samples", "1"]
    assert main(["compare", "base", "at_hand.jsonl", *options]) == 0

    assert record("made/comparison.json")["overall"]["strict"]["gained"] == 1
    asked = read_answers(Path("made/comparison-base.jsonl"))
    assert [(one.set, one.example, one.strict) for one in asked] == [
        ("test_values", "look-Porto", False),
        ("test_values", "count", False),
    ]
    episode = json_lines(Path("made/comparison-base.jsonl"))[0]
    assert episode["prompt_ids"] and "Porto" in episode["messages"][0]["content"]
    assert "were left out" not in capsys.readouterr().out
    # What was asked once is at hand from then on.
    assert main(["compare", "made/comparison-base.jsonl", "at_hand.jsonl", "--out", "again.json"]) == 0
    assert record("again.json")["overall"] == record("made/comparison.json")["overall"]


def test_two_models(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "base", max_positions=512)
    write_model(tmp_path / "run" / "merged", max_positions=512, seed=1)

    assert main(["compare", "base", "run/merged", "--num_samples", "2"]) == 0

    assert "The two differ on none of" in capsys.readouterr().out
    assert record("run/comparison.json")["overall"]["strict"]["neither"] == 2
    for role in ("base", "trained"):
        assert len(read_answers(tmp_path / "run" / f"comparison-{role}.jsonl")) == 2


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["run", "a.jsonl"], "the run folder has no evaluation.jsonl (run)"),
        (["a.jsonl", "a.jsonl", "--sets", "dev"], "--sets must be of test_values, got 'dev'"),
        (["a.jsonl", "broken.jsonl"], "broken.jsonl, line 1"),
        (["a.jsonl", "mistyped.jsonl"], "No such file or directory: 'mistyped.jsonl'"),
        (["a.jsonl", "a.jsonl", "--run.seed", "1"], "--run.seed has no effect: both sides are saved answers"),
        (["a.jsonl", "a.jsonl", "--out", "c.txt"], "--out must name a .json file, got c.txt"),
        (
            ["nobody/base", "nobody/model"],
            "no config.yaml around nobody/model (no such file or folder) or "
            "nobody/base (no such file or folder): add --config FILE",
        ),
        (["a.jsonl", "lonely.json"], "No such file or directory: 'lonely.jsonl'"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    bench: Bench, tmp_path: Path, argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(bench, tmp_path / "a.jsonl", right=set())
    (tmp_path / "broken.jsonl").write_text('{"set": "dev"}\n')
    (tmp_path / "lonely.json").write_text("{}")

    assert main(["compare", *argv]) == 1

    assert reason in capsys.readouterr().err
    assert not list(tmp_path.rglob("comparison*"))


@pytest.mark.parametrize("option", [("--sets", "dev"), ("--num_samples", "2"), ("--run.seed", "1")])
def test_an_option_that_several_runs_would_ignore_is_refused(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "a", "b", "c", *option]) == 1
    assert "only --out has an effect" in capsys.readouterr().err
