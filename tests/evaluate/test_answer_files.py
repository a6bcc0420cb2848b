"""Answers are written whole and read back; what is no answer is refused with its line."""

import json
from pathlib import Path

import pytest

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Action, Episode
from text2sql_grpo.errors import DataError, RunError
from text2sql_grpo.evaluation.answers import judged, read_answers, write_answers
from text2sql_grpo.grading import Verdict
from text2sql_grpo.rewards import Answer


def answer(name: str, sql: str | None) -> Answer:
    example = Example(name, "shop", "Wie viele Läden? \ud800", "SELECT 1", family="count")
    episode = Episode(example=example, final_sql=sql, stop_reason="submitted" if sql else "max_turns")
    episode.messages = [{"role": "user", "content": example.question}]
    episode.actions = [Action("submit_sql", sql)] if sql else []
    episode.completion_ids, episode.completion_mask = [5, 6], [1, 0]
    episode.log_probs = [float("nan"), 0.0]
    is_right = sql == "SELECT 1"
    return Answer(
        episode,
        Verdict(executes=True, strict=is_right, official=is_right, reason="equal" if is_right else "values"),
    )


SETS = {"dev": [answer("a", "SELECT 1"), answer("b", "SELECT 2")], "other": [answer("a", None)]}


def test_written_answers_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.jsonl"
    write_answers(path, {"dev": [answer("old", "SELECT 1")]})
    write_answers(path, SETS)

    answers = read_answers(path)

    assert [(one.key, one.final_sql, one.strict) for one in answers] == [
        (("dev", "a"), "SELECT 1", True),
        (("dev", "b"), "SELECT 2", False),
        (("other", "a"), None, False),
    ]
    assert [one.reason for one in answers] == [one.reason for one in judged(SETS)]
    whole = json.loads(path.read_text(encoding="utf-8").splitlines()[1])
    assert whole["completion_ids"] == [5, 6] and whole["actions"][0]["sql"] == "SELECT 2"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("line", ["", "{", "[]", '{"set": "dev", "example": "a"}', "5"])
def test_a_line_that_is_no_answer_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "evaluation.jsonl"
    write_answers(path, SETS)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(
        DataError, match=r"cannot read the answers of an evaluation.*evaluation\.jsonl, line 4"
    ):
        read_answers(path)


def test_places_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"No such file.*gone\.jsonl"):
        read_answers(tmp_path / "gone.jsonl")
    with pytest.raises(RunError, match=r"cannot write .*gone.*evaluation\.jsonl"):
        write_answers(tmp_path / "gone" / "evaluation.jsonl", SETS)
