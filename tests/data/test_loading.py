"""Questions from files and folders."""

import dataclasses
import json
import logging
import re
import time
import tracemalloc
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy
import pandas
import pytest

from tests.databases import sqlite_file
from tests.scripted_policy import SHOP
from text2sql_grpo.data import loading
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.loading import load_examples, read_quarantine
from text2sql_grpo.data.question_files import read_questions
from text2sql_grpo.data.shards import ExamplesOnDisk, load_shards, shard_files
from text2sql_grpo.errors import DataError
from text2sql_grpo.sql import Limits, SQLExecutor

ROW = {"id": "q1", "database": "shop", "question": "How many?", "gold_sql": "SELECT count(*) FROM t"}


@pytest.fixture
def databases(tmp_path: Path) -> Databases:
    script = f"CREATE TABLE t (a INTEGER PRIMARY KEY); INSERT INTO t VALUES (1), (2), (3); {SHOP}"
    return Databases(sqlite_file(tmp_path / "databases" / "shop.sqlite", script).parent)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "questions.jsonl"


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def test_rows_become_examples_in_order(path: Path, databases: Databases, executor: SQLExecutor) -> None:
    full = {
        **ROW, "id": "é2", "difficulty": "hard", "split": "dev", "family": "lookup", "template": "t1",
        "look_sql": "SELECT a FROM t", "guess_sql": None, "gold_sql": "SELECT a FROM t WHERE a > 9",
        "gold_is_empty": True, "other_golds": ["SELECT a FROM t WHERE a > 10"],
    }  # fmt: skip
    path.write_text("\ufeff" + json.dumps(ROW) + "\r\n\n" + json.dumps(full), "utf-8")

    assert load_examples(path, databases, executor) == [
        Example(**ROW, split="questions"),
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
        (json.dumps({**ROW, "id": "q2", "other_gold": "x"}), "did you mean other_golds?"),
        (json.dumps({**ROW, "id": "q2", "gold": "x"}), "the columns gold_sql and gold contradict each other"),
        (json.dumps({**ROW, "id": 7.5}), "id must be a valid string, got 7.5"),
        (json.dumps({**ROW, "id": "q2", "question": None}), "a value of question, got nothing in question"),
        (json.dumps({**ROW, "id": "q2", "template": 1}), "template must be a valid string, got 1"),
        (json.dumps({**ROW, "id": "q2", "gold_is_empty": 7}), "gold_is_empty must be a valid boolean"),
        (json.dumps({**ROW, "id": "q2", "other_golds": "x"}), "other_golds must be a valid tuple, got 'x'"),
        (
            json.dumps({**ROW, "id": "q2", "other_golds": [""]}),
            "a field 'other_golds' with text",
        ),
        (json.dumps({**ROW, "id": "q2", "other_golds": [1]}), "other_golds.0 must be a valid string, got 1"),
        (json.dumps({**ROW, "id": "q2", "gold_sql": ["x"]}), "gold_sql must be a valid string, got ['x']"),
        (
            json.dumps({"id": "q2", "database": "shop", "question": "?"}),
            "a value of gold_sql or query or sql, got the columns id, database, question (at ",
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

    with pytest.raises(DataError, match=r"utf-8.*questions\.jsonl"):
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

    before = executor.queries
    assert load_examples(path, databases, executor, check_gold=False)[0].gold_sql == "nonsense"
    assert executor.queries == before


def test_large_file_loads_fast(path: Path, databases: Databases, executor: SQLExecutor) -> None:
    write(path, *({**ROW, "id": f"q{number}"} for number in range(6000)))

    before, started = executor.queries, time.monotonic()
    examples = load_examples(path, databases, executor)

    assert len(examples) == executor.queries - before == 6000
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


SPIDER = {
    "db_id": "shop",
    "question": "How many?",
    "query": "SELECT count(*) FROM t",
    "query_toks": ["SELECT"],
}
BIRD = {
    "question_id": 7,
    "db_id": "shop",
    "question": "How many adults?",
    "evidence": "adult refers to age > 17",
    "SQL": "SELECT count(*) FROM t WHERE age > 17",
    "difficulty": "simple",
}
HEADER = "id,database,question,gold_sql,gold_is_empty,other_golds"


def put(folder: Path, name: str, content: object) -> Path:
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return path


def test_spider(tmp_path: Path) -> None:
    first, second = read_questions(
        put(tmp_path, "train_spider.json", [SPIDER, SPIDER | {"hardness": "hard"}])
    )

    assert first.example == Example(
        "train_spider-0", "shop", "How many?", "SELECT count(*) FROM t", "medium", "train"
    )
    assert (second.example.id, second.example.difficulty) == ("train_spider-1", "hard")
    assert second.place == f"{tmp_path}/train_spider.json[1]"
    assert not second.has_gold_is_empty


@pytest.mark.parametrize("solution", ["SELECT count(*) FROM t", ["SELECT count(*) FROM t"]])
def test_livesqlbench(tmp_path: Path, solution: str | list[str]) -> None:
    row = {"instance_id": "shop_1", "selected_database": "shop", "query": "How many?", "sol_sql": solution}
    row |= {"preprocess_sql": [], "conditions": {"order": False}, "category": "Query"}

    (question,) = read_questions(put(tmp_path, "livesqlbench_data.jsonl", json.dumps(row)))

    assert question.example == Example(
        "shop_1", "shop", "How many?", "SELECT count(*) FROM t", split="livesqlbench_data"
    )


def test_livesqlbench_of_several_statements(tmp_path: Path) -> None:
    row = {
        "instance_id": "shop_2",
        "selected_database": "shop",
        "query": "?",
        "sol_sql": ["DROP TABLE t", "x"],
    }

    with pytest.raises(DataError, match=r"gold_sql must be a valid string, got \['DROP TABLE t'"):
        read_questions(put(tmp_path, "livesqlbench_data.jsonl", json.dumps(row)))


def test_bird(tmp_path: Path) -> None:
    (question,) = read_questions(put(tmp_path, "dev.json", [BIRD]))

    assert question.example == Example(
        "dev-7", "shop", "How many adults?\nEvidence: adult refers to age > 17", BIRD["SQL"], "simple", "dev"
    )


def test_sql_eval(tmp_path: Path) -> None:
    query = "SELECT {id, name}, count(*) FROM t GROUP BY {};SELECT max(a) FROM t;"
    row = {"db_name": "shop", "query": query, "question": "Who?", "instructions": "Use t."}
    text = f"{','.join(row)}\n" + ",".join(f'"{cell}"' for cell in row.values())
    for name, content, number in (("eval.json", [row], 0), ("eval.csv", text, 2)):
        (question,) = read_questions(put(tmp_path, name, content))

        assert question.example == Example(
            f"eval-{number}", "shop", "Who?\nInstructions: Use t.",
            "SELECT id, count(*) FROM t GROUP BY id", split="eval",
            other_golds=(
                "SELECT name, count(*) FROM t GROUP BY name",
                "SELECT id, name, count(*) FROM t GROUP BY id, name",
                "SELECT max(a) FROM t",
            ),
        )  # fmt: skip
        assert not question.has_gold_is_empty
    (odd,) = read_questions(put(tmp_path, "odd.json", [row | {"query": "SELECT '{a}', \0007\0"}]))
    assert odd.example.gold_sql == "SELECT '{a}', \0007\0"


def test_semicolons_of_spider_and_bird_are_no_alternatives(tmp_path: Path) -> None:
    (question,) = read_questions(
        put(tmp_path, "a.json", [SPIDER | {"query": "SELECT ';'", "alternatives": ["SELECT 2"]}])
    )

    assert (question.example.gold_sql, question.example.other_golds) == ("SELECT ';'", ("SELECT 2",))


def test_csv(tmp_path: Path) -> None:
    lines = (
        f'{HEADER}\nq1,shop,"How many, in all?",SELECT 1,,\nq2,shop,None?,SELECT 2,True,"[""SELECT 3""]"\n'
    )
    first, second = read_questions(put(tmp_path, "mine.CSV", "\ufeff" + lines))

    assert first.example == Example("q1", "shop", "How many, in all?", "SELECT 1", split="mine")
    assert second.example == Example(
        "q2", "shop", "None?", "SELECT 2", split="mine", gold_is_empty=True, other_golds=("SELECT 3",)
    )
    assert second.has_gold_is_empty


PEOPLE_S_FILES = {
    "excel.csv": '\ufeffQuestion;Gold SQL\r\n"Above 2, please?";"SELECT a FROM t WHERE a > 2"\r\n',
    "query.csv": "question,query\nAbove 2; please?,SELECT a FROM t WHERE a > 2\n",
    "tabs.tsv": " question \tgold\tnotes\nAbove 2, please?\tSELECT a FROM t WHERE a > 2\t\n",
    "declared.csv": 'sep=;\r\nQuestion;Gold SQL\r\n"Above 2, please?";"SELECT a FROM t WHERE a > 2"\r\n',
    "bars.csv": "ID|QUESTION|SQL\n7|Above 2, please?|SELECT a FROM t WHERE a > 2\n",
    "answers.jsonl": '{"question": "Above 2, please?", "answer": "SELECT a FROM t WHERE a > 2"}\n',
    "prompts.json": [{"prompt": "Above 2, please?", "Golden-Query": "SELECT a FROM t WHERE a > 2", "n": 1}],
    "results.jsonl": '{"question": "Above 2, please?", "sql": "SELECT a FROM t WHERE a > 2", "answer": 3}\n',
    "numbers.jsonl": '{"qid": 7, "question": "Above 2, please?", "sql": "SELECT a FROM t WHERE a > 2"}\n',
}


@pytest.mark.parametrize("name", PEOPLE_S_FILES)
def test_question_files_as_people_have_them(
    tmp_path: Path, databases: Databases, executor: SQLExecutor, name: str
) -> None:
    path = put(tmp_path, name, PEOPLE_S_FILES[name])

    (example,) = load_examples(path, databases, executor)

    assert example.question.replace(";", ",") == "Above 2, please?"
    assert (example.database, example.gold_sql) == ("shop", "SELECT a FROM t WHERE a > 2")
    assert example.id in ("7", f"{path.stem}-7", *(f"{path.stem}-{number}" for number in range(4)))


def test_rows_of_any_form_are_mapped_in_one_way(tmp_path: Path) -> None:
    rows = [{"ID": "3", "Question": "?", "SQL": "SELECT 1", "DB": "shop", "Gold is empty": "True", "x": "y"}]
    line = [",".join(rows[0]), ",".join(rows[0].values())]
    sources = [
        put(tmp_path, "a.json", rows),
        put(tmp_path, "a.jsonl", json.dumps(rows[0])),
        put(tmp_path, "a.csv", "\n".join(line)),
        put(tmp_path, "a.tsv", "\n".join(line).replace(",", "\t")),
    ]
    expected = Example("3", "shop", "?", "SELECT 1", split="a", gold_is_empty=True)

    assert [read_questions(source)[0].example for source in sources] == [expected] * 4
    assert read_questions(rows)[0].example == dataclasses.replace(expected, split="train")


def test_values_of_numpy_and_pandas_are_those_of_python() -> None:
    row = {"question": "?", "sql": "SELECT 1", "database": "shop"}
    others = numpy.array(["SELECT 1 AS x"], dtype=object)
    rows = [
        row | {"id": numpy.int64(1), "gold_is_empty": numpy.bool_(True), "other_golds": others},
        row | {"id": pandas.NA, "difficulty": numpy.str_("hard"), "evidence": pandas.NaT},
    ]
    for source in (rows, pandas.DataFrame(rows)):
        first, second = (question.example for question in read_questions(source))
        assert (first.id, first.gold_is_empty, first.other_golds) == ("1", True, ("SELECT 1 AS x",))
        assert (second.id, second.difficulty, second.question) == ("row-1", "hard", "?")
    for wrong, shown in ((0.5, "got 0.5"), (UUID(int=1), "got UUID('00000000")):
        with pytest.raises(DataError, match=re.escape(f"id must be a valid string, {shown}")):
            read_questions([row | {"id": wrong}])


def test_lines_on_disk_need_no_database_where_there_is_one_only(
    path: Path, databases: Databases, executor: SQLExecutor
) -> None:
    write(path, {"question": "How many?", "sql": "SELECT 3"})

    assert list(load_shards([path], databases, executor)) == load_examples(path, databases, executor)


@pytest.mark.parametrize("column", ["template_id", "question_toks", "notes", "query_category"])
def test_columns_that_are_no_typo_are_skipped(path: Path, column: str) -> None:
    assert len(read_questions(write(path, ROW | {column: "x"}))) == 1


def test_spiders_own_files(shared_data: Path) -> None:
    train = read_questions(shared_data / "spider" / "train_spider.json")
    dev = read_questions(shared_data / "spider" / "dev.json", limit=3)

    assert len(train) == 6725
    assert {question.example.split for question in train} == {"train"}
    assert [question.example.id for question in dev] == ["dev-0", "dev-1", "dev-2"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[", "cannot read a JSON list of questions"),
        ("a.json", "[" * 100_000, "cannot read a JSON list of questions"),
        ("a.json", "{}\n{}", "(.jsonl holds an object a line)"),
        ("a.jsonl", "[\n{}]", "(.json holds a list)"),
        ("a.json", {"a": 1}, "a .json file of questions must be a list, got dict"),
        ("a.json", [], "it must hold a list of objects"),
        ("a.json", [3], "a question must be a JSON object, got 3 (at "),
        ("a.json", [{"db_id": "shop", "question": "?"}], "query or sql, got the columns db_id, question"),
        ("a.json", [SPIDER, SPIDER | {"db_id": 3}], "database must be a valid string, got 3 (at "),
        ("a.json", [SPIDER | {"db_id": None}], "a value of database or db_id or db_name, got"),
        ("a.json", [SPIDER | {"question": ["?"]}], "question must be a valid string, got ['?']"),
        ("a.json", [SPIDER | {"query": " "}], "a field 'gold_sql' with text, got an empty one"),
        ("a.json", [BIRD, BIRD], "id 'a-7' is used twice (at "),
        ("a.csv", "", "it must hold a header and one question a row"),
        ("a.csv", HEADER, "it must hold a header and one question a row"),
        ("a.csv", "id,questoin\n1,2\n", "unknown field 'questoin' (at "),
        ("a.csv", f"{HEADER}\nq1,shop,?\n", "the row must have 6 cells, got more or fewer: quote"),
        (
            "a.csv",
            f"{HEADER}\nq1,shop,?,SELECT 1,,,7\n",
            "the row must have 6 cells, got more or fewer: quote",
        ),
        (
            "a.csv",
            f"{HEADER}\nq1,shop,?,SELECT 1,maybe,\n",
            "gold_is_empty must be a valid boolean",
        ),
        (
            "a.csv",
            f"{HEADER}\nq1,shop,?,SELECT 1,,SELECT 2\n",
            "other_golds must be a valid tuple, got 'SELECT 2'",
        ),
        (
            "a.csv",
            f"{HEADER}\nq1,shop,,SELECT 1,,\n",
            "a value of question, got nothing in question",
        ),
        ("a.csv", f"question,{'x' * 200_000}\n?,1\n", "cannot read CSV: field larger"),
        ("a.csv", f'{HEADER}\n"q1" x,shop,?,SELECT 1,,\n', "cannot read CSV: "),
        ("a.csv", "db_name,query,question\nshop,;,?\n", "a field 'gold_sql' with text, got an empty one"),
        ("a.jsonl", "[" * 100_000, "as a JSON object (.json holds a list): "),
        ("a.csv", "question,sql\nLäden?,SELECT 1\n".encode("cp1252"), "save it as UTF-8"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_place(
    tmp_path: Path, name: str, content: object, message: str
) -> None:
    path = put(tmp_path, name, content)

    with pytest.raises(DataError) as refused:
        read_questions(path)

    assert message in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.jsonl", "folder"])
def test_missing_file_and_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"cannot read the questions: .*" + name):
        read_questions(tmp_path / name)


def row(i: int, **fields: Any) -> dict[str, Any]:
    base = {"id": f"é{i}", "database": "shop", "question": f"{i}?", "gold_sql": f"SELECT {i} FROM branch"}
    return base | fields


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


def test_of_a_review_right_and_corrected_questions_are_read(
    shards: list[Path], databases: Databases, executor: SQLExecutor
) -> None:
    verdicts = ("right", "wrong", "edit", "skip", "right")
    judged = [row(i, verdict=verdict, verified_at=9) for i, verdict in enumerate(verdicts, start=3)]
    again = row(7, verdict="wrong", verified_at=10)
    for one in (*judged, again):
        one["sql"] = one.pop("gold_sql")
    write(shards[1], *judged, again)
    ids = [example.id for example in load_examples(shards[1], databases, executor)]
    assert ids == ["é3", "é5-edited"]
    assert [example.id for example in load_shards(shards[1:], databases, executor)] == ids


def test_limit_and_quarantine(
    shards: list[Path], databases: Databases, executor: SQLExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        examples = load_shards(shards, databases, executor, limit=2, leave_out={"é1", "other"})

    assert [example.id for example in examples] == ["é0", "é3"]
    assert "left out 1 question in quarantine" in caplog.text
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
        (row(5, famly="x"), "unknown field 'famly' (at {}:3): did you mean family?"),
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

    with pytest.raises(DataError, match=r"questions: 'utf-8' codec.*b\.jsonl:3\)"):
        ExamplesOnDisk(shards)


def test_rows_of_another_format_may_have_an_empty_result(
    shards: list[Path], databases: Databases, executor: SQLExecutor
) -> None:
    spider = {"db_id": "shop", "question": "Which shops are old?", "query": "SELECT 1 WHERE 0"}
    write(shards[1], spider)

    assert load_shards(shards, databases, executor)[2].gold_sql == "SELECT 1 WHERE 0"
    assert len(load_examples(shards[1], databases, executor)) == 1


def test_gold_queries_that_take_long_are_counted_and_a_late_one_names_the_limit(
    tmp_path: Path, databases: Databases, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "LINE_EVERY_S", -1.0)
    caplog.set_level("INFO")
    endless = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
    file = write(tmp_path / "late.jsonl", *(row(i) for i in range(70)), row(70, gold_sql=endless))
    with SQLExecutor(Limits(timeout_s=0.5)) as executor, pytest.raises(DataError, match=r"limits\.timeout_s"):
        load_examples(file, databases, executor)
    assert "Gold queries run: 64" in caplog.text


def test_large_golds_of_a_folder_are_left_out_too(
    shards: list[Path], databases: Databases, caplog: pytest.LogCaptureFixture
) -> None:
    write(shards[0], row(7, gold_sql="SELECT random() FROM branch x, branch"), row(8))
    with SQLExecutor(Limits(max_rows=2)) as executor:
        examples = load_shards(shards, databases, executor)
        assert [one.question for one in examples] == ["8?", "3?", "4?"]
        assert examples[-1].other_golds == ("SELECT 1",)
        assert "left out 1 of 4 questions" in caplog.text and "keep: é7 (" in caplog.text
        checksum = examples.checksum
        assert load_shards(shards, databases, executor).checksum == checksum
        write(shards[0], row(8))
        assert load_shards(shards, databases, executor).checksum != checksum  # on another line
        write(shards[0], row(7, gold_sql="SELECT random() FROM branch x, branch"))
        with pytest.raises(DataError, match="every gold returns more rows"):
            load_shards(shards[:1], databases, executor)


def test_a_file_that_changes_later_is_refused(shards: list[Path]) -> None:
    examples = ExamplesOnDisk(shards)
    write(shards[1], row(3), row(4, gold_sql="SELECT 2"))

    assert examples[2].id == "é3"
    with pytest.raises(DataError, match=r"b\.jsonl:2 has changed since it was checked"):
        examples[3]
    shards[1].unlink()
    with pytest.raises(DataError, match=r"cannot read the questions: .*No such file"):
        examples[2]


@pytest.mark.thorough
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
