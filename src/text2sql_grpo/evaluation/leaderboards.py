"""Files of predictions in the forms that the published benchmarks take."""

import re
from collections.abc import Sequence
from pathlib import Path

from text2sql_grpo.errors import ConfigError
from text2sql_grpo.evaluation import Board
from text2sql_grpo.files import write_json, write_jsonl, write_text
from text2sql_grpo.grading.strict import has_top_level_order
from text2sql_grpo.rewards import Answer
from text2sql_grpo.sql.query import without_comments

NO_ANSWER = "SELECT 'no answer'"  # the evaluators of Spider and BIRD need a statement for each question


def export(board: Board, answers: Sequence[Answer], place: Path) -> Path:
    """Write the final queries of a whole held-out set, in the order of its questions.

    | board | form | read by |
    | --- | --- | --- |
    | bird | JSON `{"0": "SQL\\t----- bird -----\\tdatabase"}` | `evaluation.py` of BIRD |
    | spider | a query a line; next to it `.gold.sql` of `query<tab>database` | `evaluation.py` of test-suite-sql-eval |
    | spider2 | a folder of `ID.sql` | `evaluate.py` of Spider 2.0 |
    | livesql | JSONL of its questions, with `pred_sqls` | `evaluation.py` of LiveSQLBench |

    Args:
        place: Path without an ending.

    Returns:
        The file or folder that was written.

    Raises:
        ConfigError: An id is no name of a file.
        RunError: It cannot be written.
    """  # noqa: E501 (a table)
    queries = [_one_line(answer.episode.final_sql or "") or NO_ANSWER for answer in answers]
    if board == "bird":
        path = place.with_name(f"{place.name}.json")
        named = zip(queries, (answer.example.database for answer in answers), strict=True)
        write_json(path, {str(i): f"{sql}\t----- bird -----\t{name}" for i, (sql, name) in enumerate(named)})
    elif board == "spider":
        path = place.with_name(f"{place.name}.sql")
        golds = [f"{_one_line(one.example.gold_sql)}\t{one.example.database}" for one in answers]
        write_text(path, "\n".join(queries) + "\n")
        write_text(path.with_suffix(".gold.sql"), "\n".join(golds) + "\n")
    elif board == "livesql":
        path = place.with_name(f"{place.name}.jsonl")
        write_jsonl(path, map(_livesql_line, answers, queries))
    else:
        path = place
        for answer in answers:
            name = answer.example.id
            if Path(name).name != name or name.startswith("."):
                raise ConfigError(
                    f"--export spider2 writes a file for each question, and an id is no name: {name!r}"
                )
        path.mkdir(parents=True, exist_ok=True)
        for answer in answers:
            write_text(path / f"{answer.example.id}.sql", f"{answer.episode.final_sql or NO_ANSWER}\n")
    return path


def _livesql_line(answer: Answer, query: str) -> dict[str, object]:
    """Line of one question that only reads; the order of its rows counts if the gold query has one."""
    example = answer.example
    return {
        "instance_id": example.id,
        "selected_database": example.database,
        "query": example.question,
        "category": "Query",
        "preprocess_sql": [],
        "clean_up_sql": [],
        "sol_sql": [example.gold_sql],
        "conditions": {"order": has_top_level_order(example.gold_sql, "postgres")},
        "test_cases": [],
        "pred_sqls": [query],
    }


def _one_line(sql: str) -> str:
    """A query without comments, line breaks and tabs, which separate in these files."""
    return re.sub(r"[\r\n\t]", " ", without_comments(sql)).strip()
