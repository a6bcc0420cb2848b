"""Files of predictions, read back as the evaluators of the benchmarks read them."""

import json
from pathlib import Path

import pytest

from text2sql_grpo.data.example import Example
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
    assert [json.loads(line) for line in livesql] == [
        {"instance_id": f"q{i + 1}", "pred_sqls": [sql]} for i, sql in enumerate(LINES)
    ]
    folder = export("spider2", given, tmp_path / "p")
    assert {path.name for path in folder.iterdir()} == {"q1.sql", "q2.sql", "q3.sql"}
    assert (folder / "q1.sql").read_text() == QUERIES[0] + "\n"


@pytest.mark.parametrize("ids", [("a", "../b", "c"), ("a", ".b", "c"), ("a", "b/c", "d"), ("a", "a", "b")])
def test_ids_that_name_no_file_of_their_own_are_refused(tmp_path: Path, ids: tuple[str, str, str]) -> None:
    with pytest.raises(ConfigError, match="writes a file for each question"):
        export("spider2", answers(*ids), tmp_path / "p")
    assert not list(tmp_path.rglob("*.sql"))
