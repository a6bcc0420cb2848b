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
from typing import Any

import pytest

from tests.chat_endpoint import Answer as Reply
from tests.chat_endpoint import served
from tests.tiny_model import write_model
from text2sql_grpo.commands import main
from text2sql_grpo.config import Config, DataConfig, EnvironmentConfig, ModelConfig, dump_config
from text2sql_grpo.evaluation.bench import Bench
from text2sql_grpo.evaluation.published import with_published
from text2sql_grpo.evaluation.summary import summary
from text2sql_grpo.reporting.accuracy_tables import accuracy_table
from text2sql_grpo.reporting.shown import show_answer, show_line
from text2sql_grpo.reporting.terminal import TextConsole
from text2sql_grpo.rewards import Answer

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
    with Bench.open(config) as bench:
        session = bench.environment.sessions.session(bench.test["test_values"][0])
        session.start()
        for turn in turns:
            session.step(turn)
        database = bench.environment.databases.address("clinic")
        answer = bench.environment.judge().judge(session.episode, database)
        return with_published(answer, bench.environment.executor, database)


def printed(answer: Answer) -> str:
    console = TextConsole(file=StringIO(), width=100)
    show_answer(answer, "test_values", console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_right_answer_is_shown_with_its_turns(config: Config) -> None:
    text = printed(played(config, ["<sql>select id, ward from visit</sql>", f"<answer>{GOLD}</answer>"]))
    assert "test_values: test_values-0 (database clinic)" in text
    assert "How many visits had the [bold]Lisbon[/bold] ward?" in text
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip(" ─")]
    start = lines.index("turn 1 of 3: run_sql")
    assert lines[start + 1 : start + 6] == ["select id,", "ward", "from visit", "id ward", "1 LSB[1]"]
    assert "20 of 33 rows" in text
    assert text.count("WHERE ward = 'LSB[1]'") == 1  # no gold
    assert "RIGHT (equal)  strict: yes  official: yes  stopped: submitted" in text


def test_control_characters_of_an_answer_do_not_reach_the_terminal(config: Config) -> None:
    answer = played(config, ["<answer>SELECT 7 -- \x1b]52;c;ZQ==\x07\t\x1b[2J</answer>"])
    console = TextConsole(file=StringIO(), width=100)
    show_line(answer, console)
    text = printed(answer) + console.file.getvalue()  # type: ignore[attr-defined]
    assert not {"\x1b", "\x07"} & {*text} and text.count("\ufffd]52;c;ZQ==") == 2


def test_wrong_and_malformed_answers_are_shown_with_the_gold_and_the_reason(config: Config) -> None:
    text = printed(played(config, ["hello", "<sql>SELECT x FROM y</sql>", "<answer>SELECT 7</answer>"]))
    assert "turn 1 of 3: malformed" in text and "  expected one <sql>" in text
    assert "  Error: " in text
    assert "gold SQL:" in text
    assert "WRONG (values)  strict: no  official: no  stopped: submitted" in text
    text = printed(played(config, ["hello"] * 3))
    assert "none submitted" in text
    assert "WRONG (not_submitted)" in text
    assert "stopped: max_turns" in text
    deep = "(" * 3000 + "1" + ")" * 3000
    assert "((((" in printed(played(config, [f"<answer>SELECT {deep}</answer>"]))


def test_the_table_fits_a_terminal_and_holds_both_gradings(config: Config) -> None:
    """And a kind of question has a row if ten of all sets were asked."""
    answers = [played(config, [f"<answer>{GOLD}</answer>"]), played(config, ["<answer>SELECT 7</answer>"])]
    console = TextConsole(file=StringIO(), width=80)
    few, many = summary(answers), summary(answers * 5)
    few["by_tables"] = {name: many["overall"] for name in ("1 to 5 tables", "16 to 50 tables")}
    many["by_tables"] = {name: many["overall"] for name in ("6 to 15 tables", "over 50 tables")}
    console.print(accuracy_table({"few": few, "test_values": many}))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    rows = [" ".join(line.split()) for line in lines if "=" in line]
    titles = [row.partition("/")[0].rpartition(" ")[0] for row in rows]
    sizes = ["1 to 5 tables", "6 to 15 tables", "16 to 50 tables", "over 50 tables"]
    assert titles == ["few", "test_values", "difficulty: easy", *sizes]
    assert rows[0].count("1/2 = 50.0% (9-91)") == rows[2].count("6/12 = 50.0% (25-75)") == 2


def test_the_verb_samples_answers_and_votes_on_them(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["evaluate", "--model_path", "run/merged", "--num_samples", "2", "--sets", "test_values"]
    assert main([*argv, "--samples", "1"]) == 1
    assert "--samples must be at least 2" in capsys.readouterr().err
    assert main([*argv, "--export", "spider"]) == 1
    assert "--export needs whole sets" in capsys.readouterr().err
    more = f"--data.test.spider/dev={config.data.test['test_databases']}"
    assert main([*argv[:3], "--export", "spider", "--out", "whole.json", more]) == 0
    for name in ("test_databases", "spider-dev"):
        assert len((tmp_path / f"whole-{name}.sql").read_text().splitlines()) == 4
    capsys.readouterr()
    assert main([*argv, "--samples", "3", "--temperature", "1.5"]) == 0
    assert "vote@3" in capsys.readouterr().out
    record = json.loads((tmp_path / "run" / "evaluation-merged.json").read_text(encoding="utf-8"))
    own = record["sets"]["test_values"]["samples"]
    assert (own["samples"], own["pass_at"], own["oracle"]["total"]) == (3, [0.0, 0.0, 0.0], 2)
    assert (own["vote"]["correct"], own["soft_vote"]["correct"]) == (0, 0)
    samples = (tmp_path / "run" / "evaluation-merged-samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["example"] for line in samples] == ["test_values-0"] * 3 + ["test_values-2"] * 3
    greedy = (tmp_path / "run" / "evaluation-merged.jsonl").read_text().splitlines()
    assert len(greedy) == 2


def test_the_verb_shows_some_questions_and_writes_the_counts(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["evaluate", "--model_path", "run/merged", "--num_samples", "2", "--environment.max_turns", "1"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert out.count("wrong How many visits had the [bold]Lisbon[/bold] ward? (not submitted)") == 4
    assert "Verdicts: 4 not submitted\nEpisodes ended: 4 " in out
    assert " hold a turn that could not be read" in out
    assert "turn 1 of 1" not in out
    assert main([*argv, "--show"]) == 0
    out = capsys.readouterr().out
    assert [f"test_values-{i} (" in out for i in range(4)] == [True, False, True, False]
    assert out.count("WRONG (not_submitted)") == 4
    assert out.count("final SQL:\n  none submitted") == 4
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
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow = "SELECT COUNT(*) FROM sale a, sale b"
    golds = {"fast": slow, "wrong": "SELECT 1", "none": "SELECT 2"}
    rows = [
        {"id": name, "database": "bakery", "question": name, "gold_sql": sql} for name, sql in golds.items()
    ]
    (tmp_path / "bakery.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def answer(request: dict[str, Any]) -> Reply:
        question = request["messages"][-1]["content"]
        sql = "SELECT COUNT(*) * COUNT(*) FROM sale" if "fast" in question else slow
        text = "hm" if "none" in question else f"<answer>{sql}</answer>"
        return Reply({"role": "assistant", "content": text}, 1, 1)

    argv = ["evaluate", "--model", "script", "--config", "run/config.yaml", "--out", "e.json"]
    argv += ["--data.test", f"{{bakery: {tmp_path / 'bakery.jsonl'}}}", "--environment.max_turns", "1"]
    argv += ["--data.databases", str(repo_root / "data" / "databases")]
    with served(answer) as url:
        argv += ["--base_url", url]
        assert main([*argv, "--metrics", "ves"]) == 0
        scores = json.loads(Path("e.json").read_text(encoding="utf-8"))["sets"]
        out = capsys.readouterr().out
        assert main([*argv, "--metrics", "strict"]) == 0
    r_ves = round(100 * math.sqrt(1.25) / 3, 2)  # twice as fast at least, wrong, not submitted
    assert scores["bakery"]["r_ves"] == r_ves
    assert re.search(rf"\bbakery +1/3 = 33.3%.* 1/3 = 33.3%.* {r_ves:.1f} *\n", out), out
    assert "strict  official  R-VES" in re.sub(" {2,}", "  ", out)
    out = capsys.readouterr().out
    assert "R-VES" not in out and "official" not in out
    assert "r_ves" not in Path("e.json").read_text(encoding="utf-8")


def test_a_run_is_evaluated_as_it_was_and_a_difference_is_named(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    own = replace(
        config,
        data=replace(config.data, test_samples=3),
        run=replace(config.run, seed=5),
        evaluation=replace(config.evaluation, temperature=0.5),
    )
    Path("run/config.yaml").write_text(dump_config(own), encoding="utf-8")

    def evaluated(*options: str) -> tuple[Any, str]:
        assert main(["evaluate", "--model_path", "run/merged", "--out", "e.json", *options]) == 0
        return json.loads(Path("e.json").read_text(encoding="utf-8")), capsys.readouterr().out

    record, out = evaluated()
    assert [record[name] for name in ("temperature", "seed", "num_samples")] == [0.5, 5, 3]
    assert all(scores["overall"]["strict"]["total"] == 3 for scores in record["sets"].values())
    assert "Not to be compared" not in out and "question:" not in out
    record, out = evaluated("--num_samples", "1", "--temperature", "0", "--sets", "test_values")
    assert record["temperature"] == 0 and record["sets"]["test_values"]["overall"]["strict"]["total"] == 1
    (line,) = [line for line in out.splitlines() if "Not to be compared" in line]
    assert all(name in line for name in ("sets", "questions", "temperature")) and "seed" not in line
    settings = ("--run.seed", "6", "--data.test_samples", "2", "--environment.max_turns", "1")
    record, out = evaluated(*settings)
    (line,) = [line for line in out.splitlines() if "Not to be compared" in line]
    assert all(name in line for name in ("questions", "seed 6", "environment.max_turns 1"))
    assert record["environment"]["max_turns"] == 1
    Path("run/config.yaml").rename("mine.yaml")
    Path("run/config.yaml").write_text("a: 1\n", encoding="utf-8")
    record, _ = evaluated("--config", "mine.yaml", "--num_samples", "1")
    assert record["num_samples"] == 1


def test_a_run_is_evaluated_without_the_modules_of_its_rewards(config: Config) -> None:
    own = replace(config, rewards={"absent_module:short": 0.1})
    Path("run/config.yaml").write_text(dump_config(own), encoding="utf-8")
    assert main(["evaluate", "--model_path", "run/merged", "--out", "e.json", "--num_samples", "1"]) == 0


def test_nothing_but_an_earlier_evaluation_is_overwritten(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = str(next(iter(config.data.test.values())))
    before = Path(questions).read_bytes()
    assert (
        main(["evaluate", "--model_path", "run/merged", "--out", questions.replace(".jsonl", ".json")]) == 1
    )
    assert Path(questions).read_bytes() == before
    assert main(["evaluate", "--model_path", "run/merged", "--out", "run/evaluation.json"]) == 1
    assert "record of the run" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--model_path", "databases", "--config", "run/config.yaml"], "no model in the folder"),
        (["--sets", "dev"], "test_values, test_databases"),
        (["--out", "."], "--out"),
        (["--data.test", "{}"], "data.test has no held-out sets"),
    ],
)
def test_a_wrong_model_set_or_place_is_an_error_that_leaves_nothing(
    config: Config, options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = dict(zip(["--model_path", "--out"], ["run/merged", "e.json"], strict=True))
    given |= dict(zip(options[::2], options[1::2], strict=True))
    assert main(["evaluate", *(word for pair in given.items() for word in pair)]) == 1
    assert reason in capsys.readouterr().err
    assert not Path("e.json").exists()
