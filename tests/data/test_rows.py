"""Questions handed in as rows, datasets and Hub ids."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from text2sql_grpo.config import dump_config, load_config
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.loading import load_examples
from text2sql_grpo.data.question_files import read_questions
from text2sql_grpo.data.shards import content_files, shard_files
from text2sql_grpo.errors import DataError
from text2sql_grpo.sql import SQLExecutor

SPIDER = [
    {"db_id": "shop", "question": "How many?", "query": "SELECT count(*) FROM t", "query_toks": ["SELECT"]},
    {"db_id": "shop", "question": "Above 9?", "query": "SELECT a FROM t WHERE a > 9", "query_toks": []},
]


@pytest.fixture
def databases(tmp_path: Path) -> Databases:
    folder = tmp_path / "databases"
    folder.mkdir()
    with closing(sqlite3.connect(folder / "shop.sqlite")) as connection:
        connection.executescript("CREATE TABLE t (a INTEGER); INSERT INTO t VALUES (1), (2), (3);")
    return Databases(folder)


@pytest.fixture
def executor() -> Iterator[SQLExecutor]:
    with SQLExecutor() as executor:
        yield executor


@pytest.fixture
def hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Id of a dataset in a folder, which `datasets` reads as it reads a repository of the Hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "spider"
    folder.mkdir()
    for split, rows in (("train", SPIDER), ("validation", SPIDER[:1])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"hub:{folder}"


@pytest.mark.parametrize("make", [list, Dataset.from_list, iter], ids=["list", "dataset", "iterator"])
def test_columns_are_mapped_by_name(databases: Databases, executor: SQLExecutor, make: Any) -> None:
    examples = load_examples(make(SPIDER), databases, executor)

    assert examples == [
        Example("row-0", "shop", "How many?", "SELECT count(*) FROM t"),
        Example("row-1", "shop", "Above 9?", "SELECT a FROM t WHERE a > 9", gold_is_empty=True),
    ]


@pytest.mark.parametrize("column", ["gold_sql", "query", "sql", "SQL"])
def test_a_row_needs_no_database_where_there_is_one_only(
    databases: Databases, executor: SQLExecutor, column: str
) -> None:
    rows = [{"question_id": 7, "question": "How many?", column: "SELECT 3", "evidence": "Rows of t."}]

    (example,) = load_examples(rows, databases, executor)

    assert example == Example("7", "shop", "How many?\nEvidence: Rows of t.", "SELECT 3")


def test_fields_of_this_package_and_nulls_of_a_dataset() -> None:
    full = {"id": 3, "database": "shop", "question": "?", "gold_sql": "SELECT 1", "family": "lookup"}
    full |= {"look_sql": "SELECT 2", "other_golds": ["SELECT 4"], "gold_is_empty": False}
    bare = {"id": 4, "database": "shop", "question": "!", "gold_sql": "SELECT 5"}

    first, second = read_questions(Dataset.from_list([full, bare]))

    assert first.example == Example(**full | {"id": "3", "other_golds": ("SELECT 4",)})
    assert first.has_gold_is_empty and second.has_gold_is_empty
    assert second.example == Example(**bare | {"id": "4"})


def test_examples_are_checked_too(databases: Databases, executor: SQLExecutor) -> None:
    right = Example("q", "shop", "?", "SELECT 1")

    assert load_examples([right], databases, executor) == [right]
    with pytest.raises(DataError, match=r"no such table: gone"):
        load_examples([Example("r", "shop", "?", "SELECT a FROM gone")], databases, executor)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"question": "?", "answers": "SELECT 1"}],
            "unknown field 'answers' (at row 0): did you mean gold_sql?",
        ),
        (
            [{"question": "?", "solution": "SELECT 1", "db": "shop"}],
            "gold_sql or query or sql, got the columns question, ",
        ),
        (
            [{"query": "SELECT 1", "db_id": "shop"}],
            "a value of question, got the columns query, db_id (at row 0)",
        ),
        (
            [{"question": "?", "sql": "SELECT 1"}],
            "database or db_id or db_name, got the columns question, sql",
        ),
        ([{"question": "?", "sql": None, "db_id": "shop"}], "gold_sql or query or sql, got nothing in sql"),
        ([{"question": "?", "db_id": "shop"}], "gold_sql or query or sql, got the columns question, db_id"),
        (
            [{"question": 3, "sql": "SELECT 1", "db_id": "shop"}],
            "question must be a valid string, got 3 (at row 0)",
        ),
        (
            [{**SPIDER[0], "id": 1}, {**SPIDER[0], "id": "1"}],
            "'1' is used twice (at row 1, first at row 0)",
        ),
        (["question"], "got question (at row 0)"),
        ({"train": SPIDER}, "got a mapping of train: choose one"),
        ([], "no questions in the rows"),
        ("hub:a:b:c:d", "must be hub:owner/name[:config][:split], got hub:a:b:c:d"),
    ],
)
def test_refusals_name_what_was_found(rows: Any, message: str) -> None:
    with pytest.raises(DataError) as refused:
        read_questions(rows)

    assert message in str(refused.value)


def test_a_hub_id_with_its_split(databases: Databases, executor: SQLExecutor, hub_id: str) -> None:
    train = load_examples(hub_id, databases, executor)
    (held_out,) = load_examples(f"{hub_id}:default:validation", databases, executor)

    assert [(one.id, one.split) for one in train] == [("train-0", "train"), ("train-1", "train")]
    assert (held_out.id, held_out.split) == ("validation-0", "validation")
    assert [one.id for one in load_examples(f"{hub_id}:train[1:]", databases, executor)] == ["train-0"]


def test_a_hub_id_is_one_source_whose_content_is_hashed(hub_id: str) -> None:
    assert shard_files(f"{hub_id}:train[:1]") == [f"{hub_id}:train[:1]"]
    assert all(file.is_file() for file in content_files(hub_id)) and content_files(hub_id)


def test_a_dataset_that_cannot_be_loaded(hub_id: str) -> None:
    with pytest.raises(DataError, match=r"cannot load the dataset: .*HF_TOKEN; without a network, load it"):
        read_questions(f"{hub_id}-absent:train")
    with pytest.raises(DataError, match=r"cannot load the dataset: .*test.*hub:"):
        read_questions(f"{hub_id}:test")


def test_a_config_keeps_hub_ids(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {databases: d, train: hub:xlangai/spider:train}\n")
    options = ["--data.test", "{dev: hub:xlangai/spider:validation}", "--data.dev", "hub:a/b:c:train"]

    config = load_config(path, options)
    path.write_text(dump_config(config))

    assert load_config(path) == config
    assert (config.data.train, config.data.dev) == ("hub:xlangai/spider:train", "hub:a/b:c:train")
    assert config.data.test == {"dev": "hub:xlangai/spider:validation"}


def test_a_limit_counts_only_questions_that_are_kept(databases: Databases, executor: SQLExecutor) -> None:
    rows = [{**SPIDER[0], "id": str(number)} for number in range(6)]

    found = load_examples(
        rows, databases, executor, limit=2, leave_out=["3"], keep=lambda example: int(example.id) >= 2
    )

    assert [example.id for example in found] == ["2", "4"]
