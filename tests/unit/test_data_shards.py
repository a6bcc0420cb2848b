import json
import logging
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_policy import SHOP
from text2sql_grpo.data import loading
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.loading import load_examples
from text2sql_grpo.data.shards import ExamplesOnDisk, load_shards, shard_files
from text2sql_grpo.errors import DataError
from text2sql_grpo.sql import SQLExecutor


def row(i: int, **fields: Any) -> dict[str, Any]:
    base = {"id": f"é{i}", "database": "shop", "question": f"{i}?", "gold_sql": f"SELECT {i} FROM branch"}
    return base | fields


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture
def databases(tmp_path: Path) -> Databases:
    (tmp_path / "databases").mkdir()
    (tmp_path / "databases" / "shop.sql").write_text(SHOP, "utf-8")
    return Databases(tmp_path / "databases")


@pytest.fixture(scope="module")
def executor() -> Iterator[SQLExecutor]:
    with SQLExecutor() as executor:
        yield executor


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "README.md").write_text("No questions.")
    write(folder / "b.jsonl", row(3), row(4, other_golds=["SELECT 1"], family="lookup"))
    (folder / "a.jsonl").write_text(f"\ufeff{json.dumps(row(0))}\r\n\n  \n{json.dumps(row(1))}", "utf-8")
    return shard_files(folder)


def test_a_folder_s_files_in_order(tmp_path: Path, shards: list[Path]) -> None:
    folder = tmp_path / "shards"

    assert [file.name for file in shards] == ["a.jsonl", "b.jsonl"]
    assert shard_files(folder / "*.jsonl") == shards
    assert shard_files(tmp_path / "**" / "b.jsonl") == shards[1:]
    assert shard_files(folder / "a.jsonl") == shards[:1]
    assert shard_files(tmp_path / "missing.jsonl") == [tmp_path / "missing.jsonl"]
    for nothing in (tmp_path / "databases" / "*.jsonl", tmp_path):
        with pytest.raises(DataError, match=r"no files of questions \(\.jsonl\) \(at "):
            shard_files(nothing)


def test_the_same_examples_as_from_memory(
    shards: list[Path], databases: Databases, executor: SQLExecutor
) -> None:
    held = [example for file in shards for example in load_examples(file, databases, executor)]

    examples = load_shards(shards, databases, executor)

    assert list(examples) == held
    assert len(examples) == 4
    assert (examples[-1], examples[1:3]) == (held[-1], held[1:3])
    with pytest.raises(IndexError):
        examples[4]


def test_limit_and_quarantine(
    shards: list[Path], databases: Databases, executor: SQLExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        examples = load_shards(shards, databases, executor, limit=2, leave_out={"é1", "other"})

    assert [example.id for example in examples] == ["é0", "é3"]
    assert "left out 1 questions in quarantine" in caplog.text
    with pytest.raises(DataError, match="no questions, or all in quarantine"):
        load_shards(shards, databases, executor, leave_out={f"é{i}" for i in range(5)})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (row(5, gold_sql="SELECT missing FROM branch"), "1 of 6 do not:\n  é5 (at {}:3): error: no such col"),
        (row(5, gold_sql="SELECT 1 WHERE 0"), "é5 (at {}:3): no rows and not marked gold_is_empty"),
        (row(5, other_golds=["SELECT"]), "1 of 7 do not:\n  é5 (at {}:3): error"),
        (row(5, database="zoo"), "unknown database 'zoo' (in "),
        (row(5, database="zoo"), "for the question at {}:3"),
        (row(0), "id 'é0' is used twice (at {}:3, first at "),
        (row(5, gold=""), "unknown field 'gold' (at {}:3)"),
    ],
)
def test_a_wrong_question_is_named_before_any_is_used(
    shards: list[Path], databases: Databases, executor: SQLExecutor, wrong: dict[str, Any], message: str
) -> None:
    with shards[1].open("a", encoding="utf-8") as file:
        file.write(json.dumps(wrong))

    with pytest.raises(DataError) as caught:
        load_shards(shards, databases, executor)

    assert message.format(shards[1]) in str(caught.value)


def test_bytes_that_are_no_text(shards: list[Path]) -> None:
    with shards[1].open("ab") as file:
        file.write(b'{"id": "\xff"}\n')

    with pytest.raises(DataError, match=r"as UTF-8: 'utf-8' codec.*b\.jsonl:3\)"):
        ExamplesOnDisk(shards)


def test_golds_need_not_be_checked(shards: list[Path], databases: Databases, executor: SQLExecutor) -> None:
    write(shards[1], row(3, gold_sql="SELECT nothing"))

    assert len(load_shards(shards, databases, executor, check_gold=False)) == 3

    write(shards[1], row(3, database="zoo"))
    with pytest.raises(DataError, match=r"for the question at .*b\.jsonl:1"):
        load_shards(shards, databases, executor, check_gold=False)


def test_a_file_that_changes_later_is_refused(shards: list[Path]) -> None:
    examples = ExamplesOnDisk(shards)
    write(shards[1], row(3), row(4, gold_sql="SELECT 2"))

    assert examples[2].id == "é3"
    with pytest.raises(DataError, match=r"b\.jsonl:2 has changed since it was checked"):
        examples[3]
    shards[1].unlink()
    with pytest.raises(DataError, match=r"cannot read the questions: .*No such file"):
        examples[2]


def test_memory_does_not_follow_the_number_of_questions(
    tmp_path: Path, databases: Databases, executor: SQLExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stays is the index; what is held for a moment is a batch of golds."""
    monkeypatch.setattr(loading, "GOLDS_PER_BATCH", 16)
    kept, peak = [], []
    for count in (200, 3_000):
        shard = write(tmp_path / f"{count}.jsonl", *(row(i, gold_sql="SELECT 1") for i in range(count)))
        load_shards([shard], databases, executor)  # what Python itself keeps for the next time
        tracemalloc.start()
        examples = load_shards([shard], databases, executor)
        now, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert examples[count - 1].question == f"{count - 1}?"
        kept.append(now)
        peak.append(most)

    assert kept[1] - kept[0] < 40 * 2_800
    assert peak[1] - peak[0] < 160 * 2_800  # ids are compared as numbers, once
