"""Questions that a teacher behind a real endpoint words for golds: `data teach`."""

import json
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.chat_endpoint import Answer, served
from tests.tiers import but_first_thorough
from text2sql_grpo.commands import main
from text2sql_grpo.data.databases import CACHE_VARIABLE, Databases
from text2sql_grpo.data.loading import load_examples
from text2sql_grpo.sql import SQLExecutor

Script = Callable[[dict[str, Any]], Answer | str]

GOLDS = {
    "How many visits had the ward Lisbon?": "SELECT COUNT(*) FROM visit WHERE ward = 'Lisbon'",
    "What is the total of all fees?": "SELECT SUM(fee) FROM visit",
    "Which wards are there?": "SELECT DISTINCT ward FROM visit",
    "Who was treated for more than 90?": "SELECT patient FROM visit WHERE fee > 90",
    "What is the highest fee in Porto?": "SELECT MAX(fee) FROM visit WHERE ward = 'Porto'",
}
PATIENTS = [f"Marguerite Olabode-{number}" for number in range(40)]


@pytest.fixture(autouse=True)
def _clinic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect("clinic.sqlite")) as connection:
        connection.execute(
            "CREATE TABLE visit (id INTEGER PRIMARY KEY, ward TEXT, patient TEXT, fee INTEGER, born TEXT)"
        )
        connection.executemany(
            "INSERT INTO visit (ward, patient, fee, born) VALUES (?, ?, ?, ?)",
            [
                (("Lisbon", "Porto", "Braga")[i % 3], name, 50 + i * 7 % 60, f"19{41 + i}-03-17 13:47:{i:02}")
                for i, name in enumerate(PATIENTS)
            ],
        )
        connection.commit()
    write_golds(*GOLDS.values())


def write_golds(*golds: str) -> None:
    rows = [{"id": f"g{i}", "database": "clinic", "gold_sql": sql} for i, sql in enumerate(golds)]
    rows = [row | ({"question": ""} if i % 2 else {}) for i, row in enumerate(rows)]
    Path("golds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def word(url: str, *options: str) -> int:
    """The verb, with one gold at a time and no retries unless options differ."""
    words = ["--databases", "clinic.sqlite", "--questions", "golds.jsonl", "--teacher", url, "--model", "t"]
    return main(["data", "teach", *words, "--parallel", "1", "--retries", "0", *options])


def says(text: Any, prompt_tokens: Any = 100, completion_tokens: Any = 10, **more: Any) -> Answer:
    return Answer({"role": "assistant", "content": text}, prompt_tokens, completion_tokens, **more)


def prompt(request: dict[str, Any]) -> str:
    return str(request["messages"][-1]["content"])


def gold_of(request: dict[str, Any]) -> str:
    """The gold of a request for a question; empty for a request for SQL."""
    return prompt(request).partition("\nQuery:\n")[2].partition("\n\nStyle")[0]


def honest(request: dict[str, Any]) -> Answer:
    gold = gold_of(request)
    if gold:
        return says(next(question for question, sql in GOLDS.items() if sql == gold))
    return says(f"```sql\n{GOLDS[prompt(request).rpartition(chr(10))[2]]};\n```")


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def verdicts() -> list[str]:
    return [line["verdict"] for line in lines("taught_log.jsonl") if "verdict" in line]


def test_nothing_is_sent_before_yes_and_what_would_be_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    requests: list[Any] = []

    def answer(request: dict[str, Any]) -> Answer:
        requests.append(request)
        return honest(request)

    with served(answer) as url:
        assert word(url, "--price_per_million", "2", "8") == 2
    out = capsys.readouterr().out
    assert requests == [] and not Path("taught.jsonl").exists() and not Path("taught_log.jsonl").exists()
    assert url in out and "at most 10 requests for 5 golds" in out and "--yes" in out
    assert "CREATE TABLE" in out and GOLDS["How many visits had the ward Lisbon?"] in out
    assert re.search(r"about [\d,]+ tokens to read and 800 to write, about 0\.\d+ at these prices", out)
    assert "literals of a gold are real values" in out


def test_kept_questions_load_and_the_log_holds_prompts_verdicts_and_costs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = Path("clinic.sqlite").read_bytes()
    keys: list[Any] = []
    with served(honest, fails=lambda request: keys.append(request) or False) as url:
        assert word(url, "--yes", "--price_per_million", "2", "8", "--parallel", "3") == 0
    rows = lines("taught.jsonl")
    assert [(row["question"], row["gold_sql"]) for row in rows] == list(GOLDS.items())
    styles = ["plain", "short", "colloquial", "formal", "intent_first"]
    assert [row["id"] for row in rows] == [f"g{i}-{style}" for i, style in enumerate(styles)]
    with SQLExecutor() as executor:
        assert len(load_examples(Path("taught.jsonl"), Databases("clinic.sqlite"), executor)) == 5
    log = lines("taught_log.jsonl")
    asked = [line for line in log if "text" in line]
    assert len(asked) == len(keys) == 10 and verdicts() == ["kept"] * 5
    assert all(line["messages"] and line["read"] == 100 and line["written"] == 10 for line in asked)
    assert sum(line["cost"] for line in asked) == pytest.approx(10 * (100 * 2 + 10 * 8) / 1e6)
    out = capsys.readouterr().out
    assert "kept 5 of 5" in out and "1,000 tokens read, 100 written, cost 0.0028" in out
    assert Path("clinic.sqlite").read_bytes() == before
    answers = [request for request in keys if not gold_of(request)]
    assert all(len(request["messages"]) == 2 and "SELECT" not in prompt(request) for request in answers)


def test_only_literals_of_golds_are_real_values_unless_asked_for() -> None:
    sent: list[str] = []

    def answer(request: dict[str, Any]) -> Answer:
        sent.append(json.dumps(request))
        return honest(request)

    stored = {*PATIENTS, "Braga", "13:47", *(f"19{41 + i}-03-17" for i in range(40))}
    with served(answer) as url:
        assert word(url, "--yes") == 0
        text = "\n".join(sent)
        assert "Rows of visit: id | ward | patient | fee | born" in text
        assert [value for value in stored if value in text] == []
        sent.clear()
        assert word(url, "--yes", "--real-rows", "--out", "real.jsonl") == 0
    assert PATIENTS[0] in "\n".join(sent)


@pytest.mark.thorough
def test_golds_on_csv_files_are_worded_too(tmp_path: Path) -> None:
    sent: list[str] = []

    def answer(request: dict[str, Any]) -> Answer:
        sent.append(prompt(request))
        return honest(request)

    folder = tmp_path / "clinic"
    folder.mkdir()
    text = "ward,patient,fee\n" + "".join(f"Lisbon,{name},{i % 60}\n" for i, name in enumerate(PATIENTS))
    (folder / "visit.csv").write_text(text, encoding="utf-8")
    write_golds(*list(GOLDS.values())[:2])
    with served(answer) as url:
        assert word(url, "--yes", "--databases", str(folder)) == 0
    assert len(lines("taught.jsonl")) == 2
    assert "Rows of visit: " in sent[0] and "Olabode" not in "".join(sent)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("<b>How many visits?</b>", "markup"),
        ("```sql\nSELECT COUNT(*) FROM visit\n```", "markup"),
        ('{"question": "How many visits?"}', "markup"),
        ("How many\x00 visits?", "markup"),
        ("Half a pair \ud83d?", "markup"),
        ("SELECT COUNT(*) FROM visit", "sql"),
        ("How many visits? How many wards?", "several"),
        ("1. How many visits\n2. How many wards", "several"),
        ("", "empty"),
        (None, "empty"),
        (["a", "list"], "empty"),
        ("?!", "empty"),
        ("x" * 1_000_000, "too_long"),
    ],
)
def test_replies_that_are_no_question_are_counted_by_reason(
    reply: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_golds(GOLDS["Which wards are there?"])
    with served(lambda request: says(reply)) as url:
        assert word(url, "--yes") == 1
    assert verdicts() == [reason] and not Path("taught.jsonl").exists()
    out = capsys.readouterr().out
    assert re.search(rf"^ +1  {reason}: ", out, re.MULTILINE) and "kept 0 of 1" in out
    assert Path("taught_log.jsonl").stat().st_size < 50_000


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("SELECT COUNT(*) FROM visit", "other_result"),
        ("SELECT 14", "test_database"),
        ("I cannot answer that.", "query_failed"),
        ("DELETE FROM visit", "query_failed"),
        ("```sql\nSELECT 1\n```\nor\n```sql\nSELECT 2\n```", "no_sql"),
        ("", "no_sql"),
    ],
)
def test_a_question_whose_answer_differs_is_not_kept(sql: str, reason: str) -> None:
    question, gold = next(iter(GOLDS.items()))
    write_golds(gold)
    with served(lambda request: says(question if gold_of(request) else sql)) as url:
        assert word(url, "--yes") == 1
    assert verdicts() == [reason]
    with closing(sqlite3.connect("clinic.sqlite")) as connection:
        assert connection.execute("SELECT COUNT(*) FROM visit").fetchone() == (40,)


@pytest.mark.parametrize("status", but_first_thorough([429, 500, 400]))
def test_a_run_that_stops_resumes_and_asks_nothing_twice(
    status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    answered: Counter[str] = Counter()
    is_down = [True]

    def answer(request: dict[str, Any]) -> Answer:
        answered[json.dumps(request["messages"])] += 1
        return honest(request)

    def fails(request: dict[str, Any]) -> bool:
        return is_down[0] and sum(answered.values()) >= 3

    with served(answer, fails=fails, status=status) as url:
        assert word(url, "--yes") in (0, 1)
        first = lines("taught.jsonl")
        assert [row["id"] for row in first] == ["g0-plain"]
        is_down[0] = False
        with Path("taught_log.jsonl").open("a") as log:
            log.write('{"id": "g1", "text": "ha')  # killed while it was writing
        assert word(url, "--yes") == 0
        assert len(lines("taught.jsonl")) == 5 and set(answered.values()) == {1} and len(answered) == 10
        assert word(url, "--yes") == 0
    assert len(answered) == 10 and "10 replies" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_teacher_that_is_slow_or_refuses_the_key_stops_with_a_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def slow(request: dict[str, Any]) -> Answer:
        time.sleep(0.4)
        return honest(request)

    with served(slow) as url:
        assert word(url, "--yes", "--timeout_s", "0.1") == 1
    printed = capsys.readouterr()
    assert "4 times in a row" in printed.err and "Timeout" in printed.err
    assert "      4  failed: " in printed.out
    with served(honest, fails=lambda request: "no such key", status=401) as url:
        assert word(url, "--yes") == 1
    assert "no such key" in capsys.readouterr().err
    with served(lambda request: "<html>busy</html>") as url:
        assert word(url, "--yes") == 1
    assert "without choices" in capsys.readouterr().err


def test_reported_tokens_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    counts: list[tuple[Any, Any]] = [(-5, 3), ("many", "few")]

    def lies(request: dict[str, Any]) -> Answer:
        answer = honest(request)
        return says(answer.message["content"], *(counts.pop() if counts else (10**9, 0)))

    with served(lies) as url:
        assert word(url, "--yes") == 0
    out = capsys.readouterr().out
    assert "2 replies had no valid token counts" in out and "far from the estimate" in out


def test_broken_golds_cost_no_request_and_copies_are_kept_once(capsys: pytest.CaptureFixture[str]) -> None:
    gold = GOLDS["What is the total of all fees?"]
    write_golds("SELECT nothing FROM nowhere", gold, gold.lower(), gold)
    asked: list[Any] = []

    def answer(request: dict[str, Any]) -> Answer:
        asked.append(request)
        return says("What is the total of all fees?" if gold_of(request) else gold)

    with served(answer) as url:
        assert word(url, "--yes") == 0
    assert len(lines("taught.jsonl")) == 1
    assert "1  gold_failed" in capsys.readouterr().out and "duplicated" in verdicts()
    assert all("nowhere" not in prompt(request) for request in asked)


def test_thinking_is_not_read() -> None:
    def thinks(request: dict[str, Any]) -> Answer:
        return says(f"<think>{'SELECT? <b>' * 2_000}</think>\n{honest(request).message['content']}")

    with served(thinks) as url:
        assert word(url, "--yes") == 0
    assert verdicts() == ["kept"] * 5
    with served(lambda request: says("<think>How many")) as url:
        assert word(url, "--yes", "--out", "other.jsonl") == 1


def test_cut_replies_are_not_read() -> None:
    with served(lambda request: says("How many visits", has_ended=False)) as url:
        assert word(url, "--yes") == 1
    assert set(verdicts()) == {"cut"}


def test_bad_input_is_refused_before_anything_is_read_or_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with served(honest) as url:
        assert word(url, "--yes") == 0
        with Path("taught.jsonl").open("a") as file:
            file.write("{}\n")
        assert word(url, "--yes") == 1
        assert "edited" in capsys.readouterr().err
    assert word("ftp://teacher") == 1
    assert "--teacher must be a URL" in capsys.readouterr().err
    assert word("http://localhost:1", "--price_per_million", "2") == 1
    assert "two prices" in capsys.readouterr().err
    Path("golds.jsonl").write_text('{"gold_sql": "SELECT 1", "database": "elsewhere"}\n')
    assert word("http://localhost:1") == 1
    assert "elsewhere" in capsys.readouterr().err
