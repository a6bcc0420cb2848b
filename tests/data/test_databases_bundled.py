"""The bundled databases are what their specs make, guessing a stored form does not pay in them, and the
questions written by hand on them hold."""

import json
import re
import runpy
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from text2sql_grpo.data.example import Example

DATA = Path(__file__).parents[2] / "data"
NAMES = sorted(path.stem for path in (DATA / "databases").glob("*.sql"))

HANDWRITTEN = ("handwritten", "test_handwritten")
QUESTIONS = [
    Example(**json.loads(line))
    for name in HANDWRITTEN
    for line in (DATA / "questions" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
]
LOOKUPS = [example for example in QUESTIONS if example.family == "lookup"]
FAMILIES = {"lookup", "list", "count", "filter", "aggregate", "order", "group", "join", "compare", "null"}


@dataclass(frozen=True)
class Bundled:
    """One database as it lies in the folder."""

    words: dict[str, Any]
    connection: sqlite3.Connection

    def rows(self, sql: str, *values: str) -> list[tuple[Any, ...]]:
        return self.connection.execute(sql, values).fetchall()

    def tables(self) -> list[str]:
        return [name for (name,) in self.rows("SELECT name FROM sqlite_master WHERE type = 'table'")]

    def columns(self, table: str) -> list[str]:
        return [name for (name,) in self.rows("SELECT name FROM pragma_table_info(?)", table)]


@pytest.fixture(scope="module")
def bundled() -> Iterator[dict[str, Bundled]]:
    every = {}
    for name in NAMES:
        connection = sqlite3.connect(":memory:")
        connection.executescript((DATA / "databases" / f"{name}.sql").read_text(encoding="utf-8"))
        words = json.loads((DATA / "databases" / f"{name}.json").read_text(encoding="utf-8"))
        every[name] = Bundled(words, connection)
    yield every
    for database in every.values():
        database.connection.close()


@pytest.fixture(scope="module")
def builder() -> Iterator[dict[str, Any]]:
    sys.path.insert(0, str(DATA))
    made = runpy.run_path(str(DATA / "make_databases.py"))
    yield made | {"fit": sys.modules["specs.stored_forms"].fit}
    sys.path.remove(str(DATA))
    for name in [name for name in sys.modules if name.split(".")[0] == "specs"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def files(builder: dict[str, Any]) -> dict[str, str]:
    made: dict[str, str] = builder["make_files"]()
    return made


def said_columns(bundled: dict[str, Bundled], *splits: str) -> list[dict[str, str]]:
    return [
        forms
        for database in bundled.values()
        if database.words["split"] in splits
        for forms in database.words["said"].values()
    ]


def test_files_are_what_the_builder_makes(builder: dict[str, Any], files: dict[str, str]) -> None:
    assert builder["differences"](files) == []
    assert builder["make_files"]() == files


def test_a_changed_or_left_over_file_is_a_difference(
    builder: dict[str, Any], files: dict[str, str], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "clinic.sql").write_text("changed")
    (tmp_path / "old.json").write_text("{}")
    (tmp_path / "zoo.sql").unlink()
    assert builder["differences"](files, tmp_path) == ["clinic.sql", "old.json", "zoo.sql"]


def test_number_of_databases_in_each_split(bundled: dict[str, Bundled]) -> None:
    splits = Counter(database.words["split"] for database in bundled.values())
    assert splits == {"train": 12, "dev": 2, "test": 4}


@pytest.mark.parametrize("name", NAMES)
def test_size_of_the_schema(bundled: dict[str, Bundled], name: str) -> None:
    database = bundled[name]
    tables = database.tables()
    assert 4 <= len(tables) <= 8
    widths = [len(database.columns(table)) for table in tables]
    assert all(3 <= width <= 6 for width in widths) and sum(widths) <= 29
    for table in tables:
        (count,) = database.rows(f'SELECT count(*) FROM "{table}"')[0]
        assert 30 <= count <= 400, table


@pytest.mark.parametrize("name", NAMES)
def test_keys_are_declared_and_hold(bundled: dict[str, Bundled], name: str) -> None:
    database = bundled[name]
    assert database.rows("PRAGMA foreign_key_check") == []
    linked = set()
    for table in database.tables():
        assert len(database.rows("SELECT name FROM pragma_table_info(?) WHERE pk", table)) == 1
        for (parent,) in database.rows('SELECT "table" FROM pragma_foreign_key_list(?)', table):
            linked |= {table, parent}
    assert linked == set(database.tables())


@pytest.mark.parametrize("name", NAMES)
def test_words_name_what_is_there(bundled: dict[str, Bundled], name: str) -> None:
    database = bundled[name]
    assert database.words["database"] == name
    assert set(database.words["tables"]) == set(database.tables())
    there = {f"{table}.{column}" for table in database.tables() for column in database.columns(table)}
    keys = {column for column in there if column.endswith("_id")}
    assert set(database.words["columns"]) == there - keys


@pytest.mark.parametrize("name", NAMES)
def test_said_maps_are_complete_but_for_near_duplicates_and_one_to_one(
    near: dict[str, set[str]], bundled: dict[str, Bundled], name: str
) -> None:
    database = bundled[name]
    assert 4 <= len(database.words["said"]) <= 9
    for where, forms in database.words["said"].items():
        table, column = where.split(".")
        query = f'SELECT CAST("{column}" AS TEXT), count(*) FROM "{table}" GROUP BY 1'
        counts = dict(database.rows(query))
        assert forms.keys() <= counts.keys(), where
        assert counts.keys() - forms.keys() <= near[f"{name}.{where}"], where
        assert len(counts) <= 24 and 2 <= len(forms) <= 12 and min(counts[form] for form in forms) >= 2, where
        lowered = {said.lower() for said in forms.values()}
        assert len(lowered) == len(forms), where
        assert not lowered & {stored.lower() for stored in forms}, where


@pytest.fixture(scope="module")
def near(builder: dict[str, Any]) -> dict[str, set[str]]:
    """Near-duplicates of each column."""
    namer = builder["Namer"]()
    return {
        f"{database.name}.{table.name}.{column.name}": set(namer.forms(database, table, column).near.values())
        for database in builder["ALL_DATABASES"]
        for table in database.tables
        for column in table.columns
        if column.said
    }


def test_a_code_stands_for_one_value_only(builder: dict[str, Any], bundled: dict[str, Bundled]) -> None:
    fit: Callable[[str, str], int] = builder["fit"]
    codes = 0
    for database in builder["ALL_DATABASES"]:
        for table in database.tables:
            for column in table.columns:
                pattern = builder["WORDING"].get(f"{database.name}.{table.name}.{column.name}", [""])[0]
                if not re.search("{(ABC|abc|AB)}", pattern) or re.search("{(name|NAME)}", pattern):
                    continue
                forms = bundled[database.name].words["said"][f"{table.name}.{column.name}"]
                keys = {said: said.split()[column.key_word] for said in forms.values()}
                for stored, said in forms.items():
                    rivals = [fit(stored, key) for other, key in keys.items() if other != said]
                    assert fit(stored, keys[said]) > max(rivals), (stored, said)
                    codes += 1
    assert codes >= 150


@pytest.mark.parametrize(
    ("stored", "key", "expected"),
    [("02-LSB", "Lisbon", 3), ("02-LSB", "Leiria", 0), ("lsb.02", "Lisbon", 3), ("bon.02", "Lisbon", 0)],
)
def test_fit(builder: dict[str, Any], stored: str, key: str, expected: int) -> None:
    assert builder["fit"](stored, key) == expected


def test_training_shares_no_stored_value_with_the_rest(bundled: dict[str, Bundled]) -> None:
    train, rest = said_columns(bundled, "train"), said_columns(bundled, "dev", "test")
    flags = {"Y", "N", "T", "F", "1", "0"}
    shared = {stored for forms in train for stored in forms} & {stored for forms in rest for stored in forms}
    assert shared <= flags
    said_in_train = {said.lower() for forms in train for said in forms.values()}
    said_in_rest = [said.lower() for forms in rest for said in forms.values()]
    assert len(said_in_train) >= 700
    assert sum(said in said_in_train for said in said_in_rest) <= 0.1 * len(said_in_rest)


def test_guessing_a_stored_form_does_not_pay(builder: dict[str, Any], files: dict[str, str]) -> None:
    rates = builder["blind_rates"](files)
    assert len(rates) == 10
    assert {
        (guess, split)
        for guess, by_split in rates.items()
        for split in ("train", "test")
        if by_split[split] > 0.15
    } == set()


def test_stored_forms_are_of_many_kinds_and_some_are_met_in_tests_only(builder: dict[str, Any]) -> None:
    patterns: dict[str, set[str]] = {"train": set(), "dev": set(), "test": set()}
    for database in builder["ALL_DATABASES"]:
        for table in database.tables:
            for column in table.columns:
                if column.said and not column.codes:
                    pattern = builder["WORDING"][f"{database.name}.{table.name}.{column.name}"][0]
                    patterns[database.split].add(pattern.partition("|")[0])
    assert len(patterns["train"]) >= 30
    assert len(patterns["test"] - patterns["train"]) >= 8


def test_awkward_values_are_there(bundled: dict[str, Bundled]) -> None:
    texts = [(DATA / "databases" / f"{name}.sql").read_text(encoding="utf-8") for name in NAMES]
    assert all("NULL," in text or "NULL)" in text for text in texts)
    assert any("O''Brien" in text for text in texts) and any("Zoë" in text for text in texts)
    tables = {table for database in bundled.values() for table in database.tables()}
    assert {"order", "group", "spare part"} <= tables


def test_number_and_kinds_of_questions_written_by_hand(bundled: dict[str, Bundled]) -> None:
    assert len(QUESTIONS) >= 400
    assert len({example.id for example in QUESTIONS}) == len(QUESTIONS)
    assert len({example.question.lower() for example in QUESTIONS}) == len(QUESTIONS)
    assert len({example.gold_sql.lower() for example in QUESTIONS}) == len(QUESTIONS)
    assert {example.difficulty for example in QUESTIONS} == {"easy", "medium", "hard"}
    by_database = Counter(example.database for example in QUESTIONS)
    assert set(by_database) == set(NAMES) and min(by_database.values()) >= 15
    held_out = [example for example in QUESTIONS if example.split == "test_handwritten"]
    assert len(held_out) >= 150
    for examples in (held_out, [example for example in QUESTIONS if example.split == "handwritten"]):
        assert {example.family for example in examples} == FAMILIES
        assert 0.45 <= sum(example.family == "lookup" for example in examples) / len(examples) <= 0.65
        assert sum(example.difficulty == "hard" for example in examples) >= 40
    for example in QUESTIONS:
        is_test = bundled[example.database].words["split"] == "test"
        assert (example.split == "test_handwritten") == is_test, example.id
    assert 2 <= sum(example.gold_is_empty for example in QUESTIONS) <= 3


def test_questions_written_by_hand_are_made_from_their_source() -> None:
    assert runpy.run_path(str(DATA / "make_handwritten.py"))["made"]() == {
        f"{name}.jsonl": (DATA / "questions" / f"{name}.jsonl").read_text(encoding="utf-8")
        for name in HANDWRITTEN
    }


def test_questions_written_by_hand_repeat_no_other_question_and_no_gold() -> None:
    questions, golds = set(), set()
    for name in ("train", "demonstrations", "dev", "test_values", "test_templates", "test_databases"):
        for line in (DATA / "questions" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            questions.add(_folded(row["question"]))
            golds.add(_folded(row["gold_sql"]))
    assert not [example.id for example in QUESTIONS if _folded(example.question) in questions]
    assert not [example.id for example in QUESTIONS if _folded(example.gold_sql) in golds]


def _folded(text: str) -> str:
    return " ".join(text.lower().split())


@pytest.mark.parametrize("name", HANDWRITTEN)
def test_results_of_golds_written_by_hand_say_something(bundled: dict[str, Bundled], name: str) -> None:
    for example in (example for example in QUESTIONS if example.split == name and not example.gold_is_empty):
        rows = bundled[example.database].rows(example.gold_sql)
        assert 1 <= len(rows) <= 50, example.id
        assert rows != [(0,)], example.id
        if example.check_sql is not None:
            shown = [value for (value,) in bundled[example.database].rows(example.check_sql)]
            assert any(f"'{value}'" in example.gold_sql.replace("''", "'") for value in shown), example.id


@pytest.mark.parametrize("example", QUESTIONS, ids=lambda example: example.id)
def test_gold_written_by_hand(bundled: dict[str, Bundled], example: Example) -> None:
    database = bundled[example.database]
    began = time.perf_counter()
    rows = database.rows(example.gold_sql)
    assert time.perf_counter() - began < 0.05
    assert example.gold_is_empty == all(value is None for row in rows for value in row)
    database.connection.execute("PRAGMA reverse_unordered_selects = ON")
    try:
        other_way_round = database.rows(example.gold_sql)
    finally:
        database.connection.execute("PRAGMA reverse_unordered_selects = OFF")
    if "ORDER BY" in example.gold_sql:
        assert rows == other_way_round
    else:
        assert "LIMIT" not in example.gold_sql
        assert Counter(rows) == Counter(other_way_round)


def _literal(value: Any) -> str:
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


@pytest.mark.parametrize("example", LOOKUPS, ids=lambda example: example.id)
def test_look_up_written_by_hand_needs_a_look(bundled: dict[str, Bundled], example: Example) -> None:
    assert example.look_sql and example.guess_sql
    database = bundled[example.database]
    seen = [value for (value,) in database.rows(example.look_sql)]
    needed = [
        value for value in seen if re.search(rf"= {re.escape(_literal(value))}(?!\w)", example.gold_sql)
    ]
    assert needed and len(seen) <= 24 * len(needed)  # two values may stand in two columns
    assert not any(re.search(rf"\b{re.escape(str(value))}\b", example.question) for value in needed)
    assert database.rows(example.guess_sql) != database.rows(example.gold_sql)


def test_only_look_ups_written_by_hand_name_a_stored_form(bundled: dict[str, Bundled]) -> None:
    for example in QUESTIONS:
        has_stored = any(
            re.search(rf"\b{where.partition('.')[2]} = ('?){re.escape(stored)}\1(?!\w)", example.gold_sql)
            for where, forms in bundled[example.database].words["said"].items()
            for stored in forms
        )
        assert has_stored == (example.family == "lookup"), example.id
