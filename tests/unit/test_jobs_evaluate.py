"""Evaluating a real (random, tiny) model on real files: what is shown, counted and written, and errors."""

import json
import math
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from text2sql_grpo.run.evaluate_job import accuracy_table, evaluate, show

from tests.tiny_model import write_model
from text2sql_grpo.commands import main
from text2sql_grpo.config import Config, DataConfig, EnvironmentConfig, ModelConfig, dump_config
from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import ConfigError, ModelError
from text2sql_grpo.evaluation.bench import Workbench, open_workbench
from text2sql_grpo.evaluation.summary import summary
from text2sql_grpo.rewards import Answer, Judge
from text2sql_grpo.run import evaluate_job as job

GOLD = "SELECT COUNT(*) FROM visit WHERE ward = 'LSB[1]'"


@pytest.fixture(autouse=True)
def _no_env_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run folder `run` with a random model that writes a few tokens, a database, and two sets of four."""
    databases = tmp_path / "databases"
    databases.mkdir()
    with closing(sqlite3.connect(databases / "clinic.sqlite")) as connection:
        connection.execute("CREATE TABLE visit (id INTEGER PRIMARY KEY, ward TEXT)")
        connection.executemany("INSERT INTO visit (ward) VALUES (?)", [("LSB[1]",)] * 3 + [("PRT",)] * 30)
        connection.commit()
    for name in ("test_values", "test_databases"):
        rows = [
            {
                "id": f"{name}-{number}",
                "database": "clinic",
                "question": "How many visits had the [bold]Lisbon[/bold] ward?",
                "gold_sql": GOLD,
                "difficulty": "easy",
                "family": "lookup" if number < 3 else "count",
            }
            for number in range(4)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    model = write_model(tmp_path / "run" / "merged")
    settings = json.loads((model / "config.json").read_text())
    settings["max_position_embeddings"] = 2048
    (model / "config.json").write_text(json.dumps(settings))
    config = Config(
        model=ModelConfig(path=str(model)),
        data=DataConfig(
            databases=databases,
            train=tmp_path / "train.jsonl",
            test={name: tmp_path / f"{name}.jsonl" for name in ("test_values", "test_databases")},
        ),
        environment=EnvironmentConfig(max_turns=3, max_turn_tokens=8, max_episode_tokens=64),
    )
    (tmp_path / "run" / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    return config


def played(config: Config, turns: Sequence[str]) -> Answer:
    """The first question, answered by these turns in a real session and graded."""
    bench = open_workbench(config)
    example = bench.test["test_values"][0]
    session = bench.environment.session(example)
    session.start()
    for turn in turns:
        session.step(turn)
    database = bench.databases.address("clinic")
    return Answer(session.episode, bench.grader.grade(database, example.gold_sql, session.episode.final_sql))


def printed(answer: Answer) -> str:
    console = Console(file=StringIO(), width=100)
    show(answer, "test_values", console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_right_answer_is_shown_with_its_turns(config: Config) -> None:
    text = printed(played(config, ["<sql>select id, ward from visit</sql>", f"<answer>{GOLD}</answer>"]))
    assert "test_values: test_values-0 (database clinic)" in text
    assert "How many visits had the [bold]Lisbon[/bold] ward?" in text
    assert "turn 1 of 3: run_sql\n  select id,\n         ward\n  from visit\n  -> id | ward\n" in text
    assert "1 | LSB[1]" in text
    assert "(8 of 33 rows shown)" in text
    assert "turn 2 of 3: submit_sql" in text
    assert text.count("WHERE ward = 'LSB[1]'") == 2  # the turn and the final query, no gold
    assert "RIGHT (equal)  strict: yes  official: yes  stopped: submitted" in text


def test_wrong_and_malformed_answers_are_shown_with_the_gold_and_the_reason(config: Config) -> None:
    text = printed(played(config, ["hello", "<sql>SELECT x FROM y</sql>", "<answer>SELECT 7</answer>"]))
    assert "turn 1 of 3: malformed\n  could not be read: expected one <sql>" in text
    assert "-> Error: " in text
    assert "gold SQL:" in text
    assert "WRONG (values)  strict: no  official: no  stopped: submitted" in text
    text = printed(played(config, ["hello"] * 3))
    assert "none submitted" in text
    assert "WRONG (not_submitted)" in text
    assert "stopped: max_turns" in text
    deep = "(" * 3000 + "1" + ")" * 3000
    assert "((((" in printed(played(config, [f"<answer>SELECT {deep}</answer>"]))


def test_the_table_fits_a_terminal_and_holds_both_gradings(config: Config) -> None:
    answers = [played(config, [f"<answer>{GOLD}</answer>"]), played(config, ["<answer>SELECT 7</answer>"])]
    console = Console(file=StringIO(), width=80)
    console.print(accuracy_table({"test_templates": summary(answers), "test_values": summary(answers)}))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    rows = [line.split() for line in lines if "=" in line]
    assert [" ".join(row).split(" 1/2")[0] for row in rows[:3]] == [
        "test_templates",
        "family lookup",
        "difficulty easy",
    ]
    assert all(" ".join(row).count("1/2 = 50.0% (9-91)") == 2 for row in rows)
    assert len(rows) == 6


def test_the_verb_shows_some_questions_and_writes_the_counts(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["evaluate", "--model_path", "run/merged", "--num_samples", "2", "--environment.max_turns", "1"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert [f"test_values-{i} (" in out for i in range(4)] == [True, False, True, False]
    assert out.count("WRONG (not_submitted)") == 4
    assert "turn 1 of 3" not in out
    record = json.loads((tmp_path / "run" / "evaluation-merged.json").read_text(encoding="utf-8"))
    assert list(record["sets"]) == ["test_values", "test_databases"]
    assert record["sets"]["test_values"]["overall"]["strict"]["total"] == 2
    assert record["sets"]["test_values"]["by_family"]["lookup"]["official"]["correct"] == 0
    assert (record["model"], record["temperature"], record["seed"], record["num_samples"]) == (
        *("run/merged", 0, 0),
        2,
    )


def test_right_answers_are_timed_against_their_golds_on_a_bundled_database(
    config: Config,
    tmp_path: Path,
    repo_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow = "SELECT COUNT(*) FROM sale a, sale b"
    golds = {"fast": slow, "wrong": "SELECT 1", "none": "SELECT 2"}
    rows = [
        {"id": name, "database": "bakery", "question": "?", "gold_sql": sql} for name, sql in golds.items()
    ]
    (tmp_path / "bakery.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def answers(
        policy: object, bench: Workbench, chosen: dict[str, list[Example]], *_: object, **__: object
    ) -> dict[str, list[Answer]]:
        submitted = {"fast": "SELECT COUNT(*) * COUNT(*) FROM sale", "wrong": slow}
        database = bench.databases.address("bakery")
        judge, answered = Judge(bench.grader, bench.executor), []
        for example in chosen["bakery"]:
            session = bench.environment.session(example)
            session.start()
            session.step(f"<answer>{submitted[example.id]}</answer>" if example.id in submitted else "hm")
            answered.append(judge.judge(session.episode, database, runs_published=True))
        return {"bakery": answered}

    monkeypatch.setattr(job, "answer_all", answers)
    argv = [
        "evaluate",
        "--model_path",
        "run/merged",
        "--data.test",
        f"{{bakery: {tmp_path / 'bakery.jsonl'}}}",
    ]
    argv += ["--data.databases", str(repo_root / "data" / "databases")]
    assert main([*argv, "--metrics", "ves"]) == 0
    scores = json.loads((tmp_path / "run" / "evaluation-merged.json").read_text(encoding="utf-8"))["sets"]
    r_ves = round(100 * math.sqrt(1.25) / 3, 2)  # twice as fast at least, wrong, not submitted
    assert scores["bakery"]["r_ves"] == r_ves
    out = capsys.readouterr().out
    assert re.search(rf"\bbakery +1/3 = 33.3%.* 1/3 = 33.3%.* {r_ves:.1f} *\n", out), out
    assert "strict  official  R-VES" in re.sub(" {2,}", "  ", out)

    assert main([*argv, "--metrics", "strict"]) == 0
    out = capsys.readouterr().out
    assert "R-VES" not in out and "official" not in out
    assert "r_ves" not in (tmp_path / "run" / "evaluation-merged.json").read_text(encoding="utf-8")


def test_all_questions_of_one_set_sampled_alike_under_one_seed(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str) -> str:
        options = [
            "--sets",
            "test_databases",
            "--temperature",
            "1",
            "--seed",
            "4",
            "--out",
            f"new/{name}.json",
        ]
        assert main(["evaluate", "--model_path", "run/merged", *options]) == 0
        return (tmp_path / "new" / f"{name}.json").read_text(encoding="utf-8")

    record = json.loads(run("a"))
    assert record["sets"].keys() == {"test_databases"}
    assert record["sets"]["test_databases"]["overall"]["strict"]["total"] == 4
    assert "question:" not in capsys.readouterr().out
    assert run("a") == run("b")


def test_wrong_model_set_and_place_are_errors_that_leave_nothing(config: Config, tmp_path: Path) -> None:
    out, console = tmp_path / "evaluation.json", Console(file=StringIO())
    with pytest.raises(ModelError, match="cannot read the model"):
        evaluate(str(tmp_path / "databases"), config, out=out, console=console)
    with pytest.raises(
        ConfigError, match=r"--sets must be of data\.test \(test_values, test_databases\), got 'dev'"
    ):
        evaluate("run/merged", config, out=out, console=console, sets=["dev"])
    with pytest.raises(ConfigError, match="--out"):
        evaluate("run/merged", config, out=tmp_path, console=console)
    bare = replace(config, data=replace(config.data, test={}))
    with pytest.raises(ConfigError, match=r"data\.test has no held-out sets"):
        evaluate("run/merged", bare, out=out, console=console)
    assert not out.exists()
