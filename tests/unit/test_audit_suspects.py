import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from text2sql_grpo.audit.suspects import find_suspects, read_samples, write_suspects
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.loading import read_quarantine
from text2sql_grpo.errors import DataError
from text2sql_grpo.grading import Grader
from text2sql_grpo.sql import SQLExecutor

RIGHT = "SELECT name FROM pet WHERE kg > 10"


@pytest.fixture
def databases(tmp_path: Path) -> Databases:
    folder = tmp_path / "databases"
    folder.mkdir()
    with closing(sqlite3.connect(folder / "zoo.sqlite")) as connection:
        connection.executescript(
            "CREATE TABLE pet (id INTEGER PRIMARY KEY, name TEXT, kg INTEGER);"
            "INSERT INTO pet (name, kg) VALUES ('Ada', 3), ('Bo', 10), ('Cy', 25), ('Di', 31), ('Ed', 4);"
        )
    return Databases(folder)


@pytest.fixture
def executor() -> Iterator[SQLExecutor]:
    with SQLExecutor(workers=1) as executor:
        yield executor


def suspects(
    databases: Databases, executor: SQLExecutor, gold: str, answers: list[Any], *others: str
) -> list[dict[str, Any]]:
    example = Example("q", "zoo", "Pets over 10 kg?", gold, other_golds=others)
    samples = {"q": [a if isinstance(a, dict) else {"example": "q", "final_sql": a} for a in answers]}
    return find_suspects([example], samples, databases, executor, Grader(executor))


def test_gold_that_most_answers_contradict_is_listed_with_a_small_database(
    databases: Databases, executor: SQLExecutor, tmp_path: Path
) -> None:
    answers = [RIGHT, RIGHT, "SELECT name FROM pet WHERE kg >= 11", "SELECT nope"]
    (found,) = suspects(databases, executor, "SELECT name FROM pet WHERE kg < 10", answers)
    assert (found["share"], found["answers"], found["on"]) == (0.75, 4, "database")
    assert found["answer_sql"] == RIGHT
    rows = found["tables"]["pet"].splitlines()
    assert rows[0] == "id | name | kg" and len(rows) == 2  # one row is enough to differ
    assert found["answer_result"].splitlines()[1] in rows[1] and "(no rows)" in found["gold_result"]

    write_suspects(tmp_path / "suspects.jsonl", [found])
    assert read_quarantine(tmp_path / "suspects.jsonl") == {"q"}
    page = (tmp_path / "suspects.md").read_text()
    assert "75% of 4 answers contradict the gold on the database" in page and f"    {RIGHT}\n" in page


def test_gold_that_agrees_on_the_database_by_chance_is_listed(
    databases: Databases, executor: SQLExecutor, tmp_path: Path
) -> None:
    (found,) = suspects(databases, executor, "SELECT name FROM pet WHERE kg > 24", [RIGHT] * 4)
    assert found["on"] == "variants" and found["gold_result"] != found["answer_result"]


@pytest.mark.parametrize(
    ("gold", "answers", "others"),
    [
        ("SELECT name FROM pet WHERE kg >= 11", [RIGHT] * 4, ()),  # the same query in other words
        ("SELECT 1", [RIGHT] * 4, (RIGHT,)),
        ("SELECT 1", [RIGHT] * 3, ()),  # too few answers
        ("SELECT 1", [RIGHT, RIGHT, None, "SELECT 2"], ()),  # too few of them agree
        ("SELECT 1", ["SELECT name FROM pet WHERE kg > 99"] * 4, ()),  # a guess that finds nothing
        ("SELECT nope", [RIGHT] * 4, ()),  # a broken gold is found without answers
        (
            "SELECT 1",
            [{"example": "q", "final_sql": RIGHT, "strict": True, "gold_sql": "SELECT 1"}] * 4,
            (),
        ),  # judged right
        ("SELECT 1", ["(" * 3_000, "\x00", "\ud800", "DROP TABLE pet", "WITH", RIGHT], ()),
    ],
)
def test_golds_without_evidence_are_not_listed(
    databases: Databases,
    executor: SQLExecutor,
    tmp_path: Path,
    gold: str,
    answers: list[Any],
    others: tuple[str, ...],
) -> None:
    assert suspects(databases, executor, gold, answers, *others) == []


def test_answers_are_read_from_episodes_and_predictions(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    episode = {"example": "q", "database": "zoo", "question": "?", "gold_sql": RIGHT, "final_sql": None}
    episode |= {"is_masked": False, "strict": False, "messages": []}
    rows = [episode, {**episode, "is_masked": True}, {"id": "p", "sql": "SELECT 1"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert {id: len(found) for id, found in read_samples(path).items()} == {"q": 1, "p": 1}
    path.write_text('{"question": "?"}\n')
    with pytest.raises(DataError, match=r"answers\.jsonl"):
        read_samples(path)
