"""Every preset on golden episodes, played through the real session and judged by the real grader."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.session import EnvironmentSettings, SQLEnvironment
from text2sql_grpo.grading import Grader
from text2sql_grpo.grading.neighbours import Neighbours
from text2sql_grpo.rewards import PRESETS, Results, RewardMix
from text2sql_grpo.sql import SQLExecutor

CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "golden" / "rewards.jsonl").read_text("utf-8").splitlines()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("presets")
    with closing(sqlite3.connect(folder / "staff.sqlite")) as connection:
        connection.executescript(
            "CREATE TABLE emp (id INTEGER PRIMARY KEY, name TEXT, dept TEXT, age INTEGER);"
            "INSERT INTO emp VALUES (1, 'Ann', 'IT', 30), (2, 'Bob', 'IT', 30), (3, 'Cid', 'HR', 45);"
        )
    return folder


@pytest.fixture(scope="module")
def executor() -> Iterator[SQLExecutor]:
    with SQLExecutor() as executor:
        yield executor


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_episodes(case: dict[str, Any], folder: Path, executor: SQLExecutor) -> None:
    assert list(case["rewards"]) == list(PRESETS)
    environment = SQLEnvironment(Databases(folder), executor, EnvironmentSettings(max_turns=3))
    session = environment.session(
        Example(id=case["name"], database="staff", question="?", gold_sql=case["gold"])
    )
    session.start()
    for turn in case["turns"]:
        session.step(turn)
    episode, database = session.episode, folder / "staff.sqlite"
    grader = Grader(executor, neighbours=Neighbours(executor, folder / "neighbours"))
    verdict = grader.grade(database, case["gold"], episode.final_sql)

    for preset, expected in case["rewards"].items():
        rewards = RewardMix({"preset": preset})
        scores = rewards.score(episode, verdict, Results(executor, database, episode))
        assert scores is not None
        assert rewards.total(scores) == pytest.approx(expected, abs=1e-6), (preset, scores)


def test_only_our_own_preset_never_pays_a_wrong_answer() -> None:
    warnings = {name: RewardMix({"preset": name}).warning for name in PRESETS}

    assert [name for name, warning in warnings.items() if warning is None] == ["strict_neighbours"]
    assert warnings["arctic"] == (
        "Preset arctic reproduces published work and pays wrong answers, up to 1, a right one as little as "
        "0.1. Paid: official_execution: results that are equal as sets of rows on one database: hard-coded "
        "constants, coincidences, wrong order, duplicates, anything empty for an empty gold; executes: any "
        "query that runs."
    )
