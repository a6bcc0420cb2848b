"""One question about a real database: by a scripted policy, and by a tiny random model."""

import json
import sqlite3
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_policy import SHOP, ScriptedPolicy
from tests.tiny_model import write_model, write_tokenizer
from text2sql_grpo.commands import main
from text2sql_grpo.evaluation.bench import Asked, Environment
from text2sql_grpo.evaluation.sampler import Sampler
from text2sql_grpo.reporting.shown import asked_record, show_asked
from text2sql_grpo.reporting.terminal import TextConsole
from text2sql_grpo.rollout.chat_format import ChatFormat

QUESTION = "How many staff has [bold]Lisbon[/bold]?"
LOOK, FINAL = "SELECT code, city FROM branch", "SELECT staff FROM branch WHERE code = 'LIS-02'"


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect(tmp_path / "shop.db3")) as connection:
        connection.executescript(SHOP)
    return tmp_path / "shop.db3"


def asked(database: Path, turns: list[str], **settings: Any) -> Asked:
    chat = ChatFormat(write_tokenizer(database.parent / "tokenizer"))
    with Environment(database, test_databases=0, **settings) as environment:
        return environment.ask(QUESTION, Sampler(ScriptedPolicy(chat, {QUESTION: turns}), chat))


def printed(answer: Asked) -> str:
    console = TextConsole(file=StringIO(), width=80)
    show_asked(answer, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_look_its_rows_the_answer_and_its_result(database: Path) -> None:
    answer = asked(database, [f"<sql>{LOOK}</sql>", f"<answer>{FINAL}</answer>"])

    assert [" ".join(line.split()) for line in printed(answer).splitlines() if line.strip(" ─")] == [
        *("turn 1 of 5: run_sql", "SELECT code,", "city", "FROM branch", "code city"),
        *("LIS-02 Lisbon", "OPO-01 Porto", "FAO-09 NULL"),
        *("answer", "SELECT staff", "FROM branch", "WHERE code = 'LIS-02'", "staff", "7"),
    ]
    record = json.loads(json.dumps(asked_record(answer)))
    assert record["question"] == QUESTION
    assert [turn["kind"] for turn in record["turns"]] == ["run_sql", "submit_sql"]
    assert record["turns"][0]["result"]["rows"][2] == ["FAO-09", None]
    assert (record["final_sql"], record["result"]["rows"], record["failure"]) == (FINAL, [[7]], "")


def test_failures_of_the_model_are_printed(database: Path) -> None:
    text = printed(asked(database, ["hello", "<sql>SELECT x FROM branch</sql>"], max_turns=2))
    assert "turn 1 of 2: malformed" in text and "expected one <sql>" in text
    assert "Error: no such column: x" in text
    assert text.endswith("no final SQL: the episode stopped with max_turns (raise environment.max_turns)\n")
    wrong = asked(database, ["<answer>DROP TABLE branch</answer>"])
    assert wrong.failure.startswith("the final SQL failed: not allowed")
    assert wrong.failure in " ".join(printed(wrong).split())
    assert asked_record(wrong)["result"]["status"] == "denied"


def test_large_results_markup_and_control_characters(database: Path) -> None:
    many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 30) SELECT i FROM n"
    assert "20 of 30 rows" in printed(asked(database, [f"<answer>{many}</answer>"]))
    odd = asked(
        database, ["<answer>SELECT '[red] :x:' AS \"[b]\", char(27) || '[2J', x'00ff', 9e999</answer>"]
    )
    text = printed(odd)
    assert "[red] :x:" in text and "[b]" in text and "<2 bytes>" in text
    assert "\x1b" not in text
    assert json.loads(json.dumps(asked_record(odd), allow_nan=False))["result"]["rows"][0][2:] == [
        "<2 bytes>",
        "inf",
    ]
    assert "no rows" in printed(asked(database, ["<answer>SELECT city FROM branch WHERE 0</answer>"]))


def test_the_verb_asks_a_model_in_the_environment_of_its_run(
    database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(database.parent / "run" / "merged", max_positions=1024)
    argv = ["ask", QUESTION, "--model", "run/merged", "--db", "shop.db3"]
    assert main([*argv, "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["question"], record["model"], record["final_sql"]) == (QUESTION, "run/merged", None)
    environment = {"max_turns": 2, "max_turn_tokens": 3, "instructions": False}
    config = {"model": {"path": "m"}, "data": {"databases": ".", "train": "t"}, "environment": environment}
    Path("run/config.yaml").write_text(json.dumps(config))  # JSON is YAML

    assert main(argv) == 1

    out = capsys.readouterr().out
    assert "no final SQL: the episode stopped with" in out
    assert "of 2: " in out or "raise environment.max_turn_tokens" in out


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"--db": "gone.sqlite"}, "no such file or folder (at gone.sqlite)"),
        (
            {"--db": "text.db"},
            "cannot read the SQLite database file: it is not a database (at ",
        ),
        ({"--model": "run/gone"}, "run/gone"),
        ({"--config": "gone.yaml"}, "gone.yaml"),
        ({"question": " "}, "the question is empty"),
    ],
)
def test_wrong_arguments_are_one_line(
    database: Path, changes: dict[str, str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.db").write_text("CREATE TABLE t (a);")
    options = {"--model": "run/merged", "--db": "shop.db3"} | changes
    question = options.pop("question", QUESTION)

    assert main(["ask", question, *(word for pair in options.items() for word in pair)]) == 1

    captured = capsys.readouterr()
    assert captured.out == "" and reason in captured.err
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
