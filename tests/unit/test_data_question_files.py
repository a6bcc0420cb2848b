import json
from pathlib import Path

import pytest

from text2sql_grpo.data.example import Example
from text2sql_grpo.data.question_files import read_questions
from text2sql_grpo.errors import DataError

ROW = {"id": "q1", "database": "shop", "question": "How many?", "gold_sql": "SELECT count(*) FROM t"}
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


def write(folder: Path, name: str, content: object) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return path


def test_spider(tmp_path: Path) -> None:
    first, second = read_questions(
        write(tmp_path, "train_spider.json", [SPIDER, SPIDER | {"hardness": "hard"}])
    )

    assert first.example == Example(
        "train_spider-0", "shop", "How many?", "SELECT count(*) FROM t", "medium", "train"
    )
    assert (second.example.id, second.example.difficulty) == ("train_spider-1", "hard")
    assert second.place == f"{tmp_path}/train_spider.json[1]"
    assert not second.has_gold_is_empty


def test_bird(tmp_path: Path) -> None:
    (question,) = read_questions(write(tmp_path, "dev.json", [BIRD]))

    assert question.example == Example(
        "dev-7", "shop", "How many adults?\nEvidence: adult refers to age > 17", BIRD["SQL"], "simple", "dev"
    )


def test_sql_eval(tmp_path: Path) -> None:
    query = "SELECT {id, name}, count(*) FROM t GROUP BY {};SELECT max(a) FROM t;"
    row = {"db_name": "shop", "query": query, "question": "Who?", "instructions": "Use t."}
    text = f"{','.join(row)}\n" + ",".join(f'"{cell}"' for cell in row.values())
    for name, content, number in (("eval.json", [row], 0), ("eval.csv", text, 2)):
        (question,) = read_questions(write(tmp_path, name, content))

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


def test_semicolons_of_spider_and_bird_are_no_alternatives(tmp_path: Path) -> None:
    (question,) = read_questions(
        write(tmp_path, "a.json", [SPIDER | {"query": "SELECT ';'", "alternatives": ["SELECT 2"]}])
    )

    assert (question.example.gold_sql, question.example.other_golds) == ("SELECT ';'", ("SELECT 2",))


def test_csv(tmp_path: Path) -> None:
    lines = (
        f'{HEADER}\nq1,shop,"How many, in all?",SELECT 1,,\nq2,shop,None?,SELECT 2,True,"[""SELECT 3""]"\n'
    )
    first, second = read_questions(write(tmp_path, "mine.CSV", "\ufeff" + lines))

    assert first.example == Example("q1", "shop", "How many, in all?", "SELECT 1")
    assert second.example == Example(
        "q2", "shop", "None?", "SELECT 2", gold_is_empty=True, other_golds=("SELECT 3",)
    )
    assert second.has_gold_is_empty


def test_spiders_own_files(shared_data: Path) -> None:
    train = read_questions(shared_data / "spider" / "train_spider.json")
    dev = read_questions(shared_data / "spider" / "dev.json", limit=3)

    assert len(train) == 6725
    assert {question.example.split for question in train} == {"train"}
    assert [question.example.id for question in dev] == ["dev-0", "dev-1", "dev-2"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[", "cannot read a JSON list of questions: "),
        ("a.json", "[" * 100_000, "cannot read a JSON list of questions: "),
        ("a.json", {"a": 1}, "a .json file of questions must be a list, got dict"),
        ("a.json", [], "it must hold a list of objects"),
        ("a.json", [3], "a question must be a JSON object, got 3 (at "),
        ("a.json", [{"db_id": "shop", "question": "?"}], "sql or SQL, got the columns db_id, question"),
        ("a.json", [SPIDER, SPIDER | {"db_id": 3}], "database must be a string, got 3 (at "),
        ("a.json", [SPIDER | {"db_id": None}], "a value of database or db_id or db_name, got"),
        ("a.json", [SPIDER | {"question": ["?"]}], 'question must be a string, got ["?"]'),
        ("a.json", [SPIDER | {"query": " "}], "a field 'gold_sql' with text, got an empty one"),
        ("a.json", [BIRD, BIRD], "id 'a-7' is used twice (at "),
        ("a.csv", "", "it must hold a header and one question a row"),
        ("a.csv", HEADER, "it must hold a header and one question a row"),
        ("a.csv", "id,gold\n1,2\n", "unknown field 'gold' (at "),
        ("a.csv", f"{HEADER}\nq1,shop,?\n", "the row must have 6 cells, got more or fewer (at "),
        ("a.csv", f"{HEADER}\nq1,shop,?,SELECT 1,,,7\n", "the row must have 6 cells, got more or fewer (at "),
        (
            "a.csv",
            f"{HEADER}\nq1,shop,?,SELECT 1,maybe,\n",
            'gold_is_empty must be true or false, got "maybe"',
        ),
        (
            "a.csv",
            f"{HEADER}\nq1,shop,?,SELECT 1,,SELECT 2\n",
            "other_golds must be a JSON list, got 'SELECT 2'",
        ),
        ("a.csv", f"{HEADER}\nq1,shop,,SELECT 1,,\n", "a field 'question' with text, got none"),
        ("a.csv", f'{HEADER}\n"q1" x,shop,?,SELECT 1,,\n', "cannot read CSV: "),
        ("a.csv", "db_name,query,question\nshop,;,?\n", "a field 'gold_sql' with text, got an empty one"),
        ("a.jsonl", "[" * 100_000, "as a JSON object: "),
    ],
)
def test_what_cannot_be_read_is_said_with_its_place(
    tmp_path: Path, name: str, content: object, message: str
) -> None:
    path = write(tmp_path, name, content)

    with pytest.raises(DataError) as refused:
        read_questions(path)

    assert message in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.jsonl", "folder"])
def test_missing_file_and_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"cannot read the questions as UTF-8.*" + name):
        read_questions(tmp_path / name)
