"""What held-out questions share with training files: on a handful of lines, and on the bundled ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.overlap import KEYS, format_overlap, overlap
from text2sql_grpo.errors import DataError

QUESTIONS = Path(__file__).parents[2] / "data" / "questions"


def write(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    lines = [json.dumps({"id": f"{name}-{number}", **row}) for number, row in enumerate(rows)]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def row(question: str, gold: str, template: str | None = "a", **more: str) -> dict[str, Any]:
    return {"database": "clinic", "question": question, "gold_sql": gold, "template": template, **more}


WARD = row(
    "How many visits?",
    "SELECT COUNT(*) FROM visit WHERE ward = 'LSB'",
    look_sql="SELECT DISTINCT ward FROM visit",
    guess_sql="SELECT COUNT(*) FROM visit WHERE ward = 'Lisbon'",
)


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        (WARD, set(KEYS)),
        (
            {**WARD, "question": "how many  visits?", "gold_sql": WARD["gold_sql"].lower()},
            {*KEYS} - {"literal", "stored_value"},
        ),
        (
            {**WARD, "question": "Count.", "gold_sql": WARD["gold_sql"].replace("LSB", "PRT")},
            {"combination", "template", "database"},
        ),
        (
            row(
                "Fee?",
                "SELECT MAX(visit.fee) FROM visit AS v JOIN nurse ON v.n = nurse.id WHERE v.ward = 'LSB'",
            ),
            {"literal", "template", "database"},
        ),
        (row("Fee?", "SELECT fee FROM visit WHERE town = 'LSB'", "b"), {"database"}),
        (row("Fee?", "SELECT AVG(fee) FROM visit WHERE fee > 20", None) | {"database": "bank"}, set()),
    ],
)
def test_what_counts_as_shared(tmp_path: Path, other: dict[str, Any], shared: set[str]) -> None:
    write(tmp_path, "demonstrations", WARD)
    write(tmp_path, "test_mine", other)
    (only,) = overlap(tmp_path)
    assert (only.training_set, only.other_set, only.count) == ("demonstrations", "test_mine", 1)
    assert {key for key, share in only.shares.items() if share} == shared


def test_shares_are_of_the_questions_that_have_such_a_key(tmp_path: Path) -> None:
    write(tmp_path, "train", WARD)
    write(
        tmp_path,
        "dev",
        WARD,
        row("All?", "SELECT COUNT(*) FROM visit"),
        row("Fees?", "SELECT fee FROM visit"),
    )
    (only,) = overlap(tmp_path)
    assert only.shares["question"] == pytest.approx(1 / 3)
    assert only.shares["literal"] == 1.0
    assert only.shares["stored_value"] == 1.0


def test_the_table_for_people(tmp_path: Path) -> None:
    write(tmp_path, "train", WARD)
    write(tmp_path, "dev", row("Fees?", "SELECT fee FROM visit"))
    header, line = format_overlap(overlap(tmp_path)).splitlines()
    assert header.split()[:4] == ["training", "set", "other", "set"]
    assert line.split() == ["train", "dev", "1", "0.0%", "0.0%", "0.0%", "-", "100.0%", "100.0%", "-"]
    assert len(header) == len(line)


@pytest.mark.parametrize("text", ["{", '{"question": "How many?"}', '{"database": 1}'])
def test_a_line_that_is_no_question_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"train\.jsonl"):
        overlap(tmp_path)


def test_a_folder_without_training_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="demonstrations"):
        overlap(tmp_path)


@pytest.mark.thorough
def test_the_bundled_test_files_are_held_out_as_they_say() -> None:
    rows = {(row.training_set, row.other_set): row.shares for row in overlap(QUESTIONS)}
    for training_set in ("demonstrations", "train"):
        for name in ("dev", "test_values", "test_templates", "test_databases"):
            assert rows[training_set, name]["question"] == rows[training_set, name]["gold_sql"] == 0
        values = rows[training_set, "test_values"]
        assert values["combination"] == values["literal"] == values["stored_value"] == 0
        assert rows[training_set, "test_templates"]["template"] == 0
        for name in ("dev", "test_databases"):
            assert rows[training_set, name]["database"] == rows[training_set, name]["stored_value"] == 0
    both = rows["demonstrations", "train"]
    assert both["question"] == both["gold_sql"] == 0


def test_sql_is_parsed_in_the_dialect_of_its_database(tmp_path: Path) -> None:
    gold = "SELECT fee // 2 FROM visit WHERE ward = 'LSB'"
    asked = row("Which?", gold)
    write(tmp_path, "train", asked)
    write(tmp_path, "dev", asked)
    with pytest.raises(DataError, match=r"(?s)cannot be parsed.*needs --databases"):
        overlap(tmp_path)
    (tmp_path / "clinic.duckdb").touch()
    (result,) = overlap(tmp_path, Databases(tmp_path / "clinic.duckdb"))
    assert result.shares["gold_sql"] == result.shares["literal"] == 1


def test_files_without_databases_and_with_columns_of_other_names(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("Question;SQL\nHow many?;SELECT 1 FROM t\n")
    (tmp_path / "dev.jsonl").write_text('{"question": "How  many?", "answer": "SELECT 2 FROM t"}')
    (only,) = overlap(tmp_path)
    assert (only.training_set, only.shares["question"], only.shares["gold_sql"]) == ("train", 1.0, 0.0)
