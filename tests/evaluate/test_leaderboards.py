"""Files of predictions, read back as the evaluators of the benchmarks read them."""

import json
from pathlib import Path

import pytest

from text2sql_grpo.data.example import Example
from text2sql_grpo.data.question_files import read_questions
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.evaluation.leaderboards import NO_ANSWER, export
from text2sql_grpo.grading import Verdict
from text2sql_grpo.rewards import Answer

WRONG = Verdict(official=False, strict=False, reason="values", executes=True)
QUERIES = ["SELECT a\n\tFROM t -- 'x'\nWHERE b = 'two  blanks -- kept'", None, "SELECT /* c */ 1"]
LINES = ["SELECT a  FROM t   WHERE b = 'two  blanks -- kept'", NO_ANSWER, "SELECT   1"]


def answers(*ids: str) -> list[Answer]:
    return [
        Answer(Episode(example=Example(name, f"db{i}", "?", f"SELECT\n{i}"), final_sql=sql), WRONG)
        for i, (name, sql) in enumerate(zip(ids, QUERIES, strict=True))
    ]


def test_each_board_reads_one_statement_a_question_in_order(tmp_path: Path) -> None:
    given = answers("q1", "q2", "q3")
    bird = json.loads(export("bird", given, tmp_path / "p").read_text())
    assert [bird[str(i)].split("\t----- bird -----\t") for i in range(3)] == [
        [sql, f"db{i}"] for i, sql in enumerate(LINES)
    ]
    spider = export("spider", given, tmp_path / "p")
    assert spider.read_text().splitlines() == LINES
    golds = (tmp_path / "p.gold.sql").read_text().splitlines()
    assert [line.split("\t") for line in golds] == [[f"SELECT {i}", f"db{i}"] for i in range(3)]
    livesql = export("livesql", given, tmp_path / "p").read_text().splitlines()
    assert [(line["instance_id"], line["pred_sqls"]) for line in map(json.loads, livesql)] == [
        (f"q{i + 1}", [sql]) for i, sql in enumerate(LINES)
    ]
    folder = export("spider2", given, tmp_path / "p")
    assert {path.name for path in folder.iterdir()} == {"q1.sql", "q2.sql", "q3.sql"}
    assert (folder / "q1.sql").read_text() == QUERIES[0] + "\n"


def test_an_answer_of_comments_alone_leaves_no_empty_line(tmp_path: Path) -> None:
    answer = Answer(Episode(example=Example("q", "db", "?", "SELECT 1"), final_sql="-- SELECT 1"), WRONG)
    assert export("spider", [answer], tmp_path / "p").read_text() == f"{NO_ANSWER}\n"


@pytest.mark.parametrize("order", ["", " ORDER BY a"])
def test_a_line_of_livesqlbench_is_one_of_its_questions_with_an_answer(tmp_path: Path, order: str) -> None:
    example = Example("shop_1", "shop", "?", f"SELECT a FROM t{order}")
    answer = Answer(Episode(example=example, final_sql="SELECT a FROM t"), WRONG)

    path = export("livesql", [answer], tmp_path / "p")

    line = json.loads(path.read_text())
    # Of evaluation.py: a line without one of the first four counts as failed.
    assert line | {"instance_id": "shop_1", "query": "?", "test_cases": [], "clean_up_sql": []} == line
    assert (line["selected_database"], line["preprocess_sql"]) == ("shop", [])
    assert (line["sol_sql"], line["pred_sqls"]) == ([example.gold_sql], ["SELECT a FROM t"])
    assert (line["category"], line["conditions"]) == ("Query", {"order": bool(order)})
    (read,) = read_questions(path)
    assert (read.example.id, read.example.gold_sql) == ("shop_1", example.gold_sql)


@pytest.mark.parametrize("ids", [("a", "../b", "c"), ("a", ".b", "c"), ("a", "b/c", "d")])
def test_ids_that_name_no_file_of_their_own_are_refused(tmp_path: Path, ids: tuple[str, str, str]) -> None:
    with pytest.raises(ConfigError, match="writes a file for each question"):
        export("spider2", answers(*ids), tmp_path / "p")
    assert not list(tmp_path.rglob("*.sql"))
