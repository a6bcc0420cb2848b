import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.loading import load_examples, read_quarantine
from text2sql_grpo.errors import DataError
from text2sql_grpo.sql import Limits, SQLExecutor

ROW = {"id": "q1", "database": "shop", "question": "How many?", "gold_sql": "SELECT count(*) FROM t"}


@pytest.fixture
def databases(tmp_path: Path) -> Databases:
    folder = tmp_path / "databases"
    folder.mkdir()
    with closing(sqlite3.connect(folder / "shop.sqlite")) as connection:
        connection.executescript(
            "CREATE TABLE t (a INTEGER PRIMARY KEY); INSERT INTO t VALUES (1), (2), (3);"
        )
    return Databases(folder)


@pytest.fixture
def executor() -> Iterator[SQLExecutor]:
    with SQLExecutor() as executor:
        yield executor


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "questions.jsonl"


def write(path: Path, *rows: object) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def test_rows_become_examples_in_order(path: Path, databases: Databases, executor: SQLExecutor) -> None:
    full = {
        **ROW, "id": "é2", "difficulty": "hard", "split": "dev", "family": "lookup", "template": "t1",
        "look_sql": "SELECT a FROM t", "guess_sql": None, "gold_sql": "SELECT a FROM t WHERE a > 9",
        "gold_is_empty": True, "other_golds": ["SELECT a FROM t WHERE a > 10"],
    }  # fmt: skip
    path.write_text("\ufeff" + json.dumps(ROW) + "\r\n\n" + json.dumps(full), "utf-8")

    assert load_examples(path, databases, executor) == [
        Example(**ROW),
        Example(**{**full, "other_golds": ("SELECT a FROM t WHERE a > 10",)}),
    ]


def test_limit_reads_only_the_first(path: Path, databases: Databases, executor: SQLExecutor) -> None:
    write(path, ROW, {**ROW, "id": "q2"}, "broken")

    assert [example.id for example in load_examples(path, databases, executor, limit=2)] == ["q1", "q2"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "cannot read '{' as a JSON object: "),
        ("[1]", "a question must be a JSON object, got "),
        (json.dumps({**ROW, "id": "q2", "gold": "x"}), "unknown field 'gold' (at "),
        (json.dumps({**ROW, "id": 7.5}), "id must be a string, got 7.5"),
        (json.dumps({**ROW, "id": "q2", "question": None}), "question must be a string, got null"),
        (json.dumps({**ROW, "id": "q2", "template": 1}), "template must be a string or null, got 1"),
        (json.dumps({**ROW, "id": "q2", "gold_is_empty": 1}), "gold_is_empty must be true or false, got 1"),
        (
            json.dumps({**ROW, "id": "q2", "other_golds": "x"}),
            'other_golds must be a list of non-empty strings, got "x"',
        ),
        (
            json.dumps({**ROW, "id": "q2", "other_golds": [""]}),
            'must be a list of non-empty strings, got [""]',
        ),
        (json.dumps({**ROW, "id": "q2", "other_golds": [1]}), "must be a list of non-empty strings, got [1]"),
        (json.dumps({**ROW, "id": "q2", "gold_sql": ["x"]}), 'gold_sql must be a string, got ["x"]'),
        (
            json.dumps({"id": "q2", "database": "shop", "question": "?"}),
            "a field 'gold_sql' with text, got none",
        ),
        (json.dumps({**ROW, "id": "q2", "question": " "}), "a field 'question' with text, got an empty one"),
        (json.dumps(ROW), "id 'q1' is used twice"),
        (json.dumps({**ROW, "id": "q2", "database": "other"}), "unknown database 'other' (in "),
    ],
)
def test_wrong_line_is_named(
    path: Path, databases: Databases, executor: SQLExecutor, line: str, message: str
) -> None:
    path.write_text(json.dumps(ROW) + "\n" + line + "\n", "utf-8")

    with pytest.raises(DataError) as caught:
        load_examples(path, databases, executor)

    assert message in str(caught.value)
    assert f"{path}:2" in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_file_without_questions(path: Path, databases: Databases, executor: SQLExecutor, text: str) -> None:
    path.write_text(text)

    with pytest.raises(DataError, match=r"no questions in .*questions\.jsonl"):
        load_examples(path, databases, executor)


def test_missing_file(path: Path, databases: Databases, executor: SQLExecutor) -> None:
    with pytest.raises(DataError, match=r"cannot read the questions.*questions\.jsonl"):
        load_examples(path, databases, executor)


def test_file_that_is_not_utf8(path: Path, databases: Databases, executor: SQLExecutor) -> None:
    path.write_bytes(b"\xff\xfe")

    with pytest.raises(DataError, match=r"UTF-8.*questions\.jsonl"):
        load_examples(path, databases, executor)


def test_limit_below_one(path: Path, databases: Databases, executor: SQLExecutor) -> None:
    with pytest.raises(DataError, match="limit must be an int >= 1 or None, got 0"):
        load_examples(path, databases, executor, limit=0)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"gold_sql": "SELECT nope FROM t"}, "error: no such column: nope"),
        ({"gold_sql": "DELETE FROM t"}, "denied: not allowed: DELETE"),
        ({"gold_sql": "SELECT a FROM t WHERE a > 9"}, "no rows and not marked gold_is_empty"),
        ({"gold_is_empty": True}, "1 rows although marked gold_is_empty"),
        ({"gold_sql": "SELECT random() FROM t x, t"}, "cut after 5 rows"),
    ],
)
def test_wrong_gold_is_named(
    path: Path, databases: Databases, changes: dict[str, object], fault: str
) -> None:
    write(path, ROW, {**ROW, "id": "q2", **changes})

    with SQLExecutor(Limits(max_rows=5)) as executor, pytest.raises(DataError) as caught:
        load_examples(path, databases, executor)

    assert f"1 of 2 do not:\n  q2 (at {path}:2): " in str(caught.value)
    assert fault in str(caught.value)


def test_questions_with_large_golds_are_left_out_with_a_warning_where_they_may(
    path: Path, databases: Databases, caplog: pytest.LogCaptureFixture
) -> None:
    large = {**ROW, "id": "large", "gold_sql": "SELECT random() FROM t x, t"}
    write(path, ROW, large, {**ROW, "id": "other", "other_golds": [large["gold_sql"]]})

    with SQLExecutor(Limits(max_rows=5)) as executor:
        assert [e.id for e in load_examples(path, databases, executor, leaves_out_large=True)] == ["q1"]
        assert "left out 2 of 3 questions: a gold returns more rows" in caplog.text
        assert "(max_rows: 5, max_bytes: 5000000); raise them to keep: large, other (" in caplog.text
        write(path, large)
        with pytest.raises(DataError, match="every gold returns more rows"):
            load_examples(path, databases, executor, leaves_out_large=True)
        write(path, ROW, {**ROW, "id": "q2", "gold_sql": "SELECT b FROM t"})
        with pytest.raises(DataError, match="no such column: b"):
            load_examples(path, databases, executor, leaves_out_large=True)


def test_large_golds_that_the_database_can_compare_are_kept(path: Path, databases: Databases) -> None:
    write(path, {**ROW, "gold_sql": "SELECT x.a FROM t x, t"})

    with SQLExecutor(Limits(max_rows=5)) as executor:
        assert [example.id for example in load_examples(path, databases, executor)] == ["q1"]


def test_other_accepted_golds_are_checked_too(
    path: Path, databases: Databases, executor: SQLExecutor
) -> None:
    write(path, {**ROW, "other_golds": ["SELECT max(a) FROM t", "SELECT b FROM t"]})

    with pytest.raises(DataError, match=r"1 of 3 do not:\n  q1 .*: error: no such column: b"):
        load_examples(path, databases, executor)


def test_only_five_wrong_golds_are_shown(path: Path, databases: Databases, executor: SQLExecutor) -> None:
    write(path, *({**ROW, "id": f"q{number}", "gold_sql": f"SELECT c{number} FROM t"} for number in range(7)))

    with pytest.raises(DataError) as caught:
        load_examples(path, databases, executor)

    lines = str(caught.value).split("\n")
    assert lines[0].endswith("7 of 7 do not:")
    assert lines[5] == f"  q4 (at {path}:5): error: no such column: c4"
    assert lines[6:] == ["  and 2 more"]


def test_golds_need_not_be_checked(path: Path, databases: Databases, executor: SQLExecutor) -> None:
    write(path, {**ROW, "gold_sql": "nonsense"})

    assert load_examples(path, databases, executor, check_gold=False)[0].gold_sql == "nonsense"
    assert executor.queries == 0


def test_large_file_loads_fast(path: Path, databases: Databases, executor: SQLExecutor) -> None:
    write(path, *({**ROW, "id": f"q{number}"} for number in range(6000)))

    started = time.monotonic()
    examples = load_examples(path, databases, executor)

    assert len(examples) == executor.queries == 6000
    assert time.monotonic() - started < 10.0


def test_files_that_cannot_say_so_take_empty_golds_as_they_are(
    tmp_path: Path, databases: Databases, executor: SQLExecutor
) -> None:
    golds = ["SELECT a FROM t", "SELECT a FROM t WHERE a > 9"]
    path = tmp_path / "dev.json"
    path.write_text(json.dumps([{"db_id": "shop", "question": "?", "query": gold} for gold in golds]))

    examples = load_examples(path, databases, executor)

    assert [example.gold_is_empty for example in examples] == [False, True]


def test_questions_in_quarantine_are_left_out_whatever_is_wrong_with_them(
    path: Path, databases: Databases, executor: SQLExecutor
) -> None:
    write(path, {**ROW, "id": "q0", "gold_sql": "nonsense"}, ROW, {**ROW, "id": "q2", "database": "gone"})

    def load(*left_out: str, limit: int | None = None) -> list[str]:
        return [e.id for e in load_examples(path, databases, executor, leave_out=left_out, limit=limit)]

    assert load("q0", "q2", "unknown") == load("q0", limit=1) == ["q1"]
    with pytest.raises(DataError, match=r"every question is in quarantine \(at .*questions\.jsonl\)"):
        load("q0", "q1", "q2")


def test_quarantine_file(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    path.write_text('{"id": "a", "reasons": ["error"]}\n\n{"id": "b"}\n')

    assert read_quarantine(path) == {"a", "b"}


@pytest.mark.parametrize("line", ["{", "3", '{"id": 3}', "{}", "[" * 100_000])
def test_wrong_quarantine_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "quarantine.jsonl"
    path.write_text('{"id": "a"}\n' + line)

    with pytest.raises(DataError, match=r"cannot read ids in quarantine, .*quarantine\.jsonl, line 2\)"):
        read_quarantine(path)


def test_missing_quarantine_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read ids in quarantine, .*No such file.*gone\.jsonl"):
        read_quarantine(tmp_path / "gone.jsonl")
