"""Questions and test databases of random databases with odd names, types and values."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.databases import duckdb_file, sqlite_file
from tests.tiers import but_first_thorough
from text2sql_grpo.grading import Grader
from text2sql_grpo.grading.suite import TestSuite
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.sql.names import quote_name
from text2sql_grpo.synthesis.generator import QUESTION_SETS, make_questions

TINY_SETS = [replace(each, count=each.count // 50) for each in QUESTION_SETS]
NAMES = (
    *(
        "name",
        "order",
        "Total Amount",
        "x-y",
        "1st",
        "日付",
        "_",
        "key",
        "order_date",
        "price",
        "count",
        'a"b',
    ),
    *("per%", "{x}", "is_active", "status", "year", "city id", "tags", "due date"),
)
DAYS = ("'2023-05-03'", "'2024-02-29'", "'0001-01-01'", "'9999-12-31'")
TEXTS = ("''", "'  '", "'it''s'", "'\"'", "'%'", "'{0}'", "'日本'", "'🙂'", "'NULL'", "'01'", "'Smith, J.'")
TYPES = {
    "sqlite": {
        "DATE": (*DAYS, "'0000-00-00'", "'2023-02-30'", "'2023-13-01'", "'10000-01-01'"),
        "TIMESTAMP": (
            "'2023-05-03 10:00:00'",
            "'9999-12-31 23:59:59'",
            "'0000-00-00 00:00:00'",
            "'2020-05-05'",
        ),
        "NUMERIC": ("0", "3.5", "9e999", "-9e999", "9223372036854775807", "-9223372036854775808", "100"),
        "TEXT": (*TEXTS, "char(10)", "char(0)"),
        "": ("1", "'a'", "x'ff00'", "2.5"),
        "BOOLEAN": ("0", "1"),
    },
    "duckdb": {
        "DATE": (*DAYS, "'infinity'", "'-infinity'", "'10000-01-01'", "'0044-03-15 (BC)'"),
        "TIMESTAMP": (
            "'2023-05-03 10:00:00'",
            "'infinity'",
            "'9999-12-31 23:59:59'",
            "'290000-01-01 00:00:00'",
        ),
        "TIMESTAMPTZ": ("'2023-05-03 10:00:00+02'", "'infinity'", "'0001-01-01 00:00:00+00'"),
        "DOUBLE": ("1.5", "'NaN'", "'inf'", "'-inf'", "1e308"),
        "BIGINT": ("9223372036854775807", "-9223372036854775808", "0", "7"),
        "DECIMAL(20, 4)": ("1.1", "9999999999999999.9999", "0"),
        "VARCHAR": (*TEXTS, "repeat('z', 400)"),
        "INTERVAL": ("INTERVAL 1 DAY", "INTERVAL '-3 months'"),
        "INTEGER[]": ("[1, 2]", "[]", "[NULL]"),
        "JSON": ("'{\"a\": 1}'", "'[]'", "'null'"),
        "BOOLEAN": ("true", "false"),
        "UUID": ("uuid()",),
    },
}


def odd_script(random: Random, types: dict[str, tuple[str, ...]]) -> str:
    """Statements that make and fill one or two tables."""
    statements = []
    for table in map(quote_name, random.sample(NAMES, random.randint(1, 2))):
        kinds = random.choices(list(types), k=random.randint(2, 6))
        names = map(quote_name, random.sample(NAMES, len(kinds)))
        columns = ", ".join(f"{name} {kind}" for name, kind in zip(names, kinds, strict=True))
        statements.append(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, {columns})")
        for key in range(random.choice((3, 20, 40))):
            cells = ["NULL" if random.random() < 0.1 else random.choice(types[kind]) for kind in kinds]
            statements.append(f"INSERT INTO {table} VALUES ({key}, {', '.join(cells)})")
    return ";\n".join(statements)


@pytest.mark.parametrize("seed", but_first_thorough(range(4)))
@pytest.mark.parametrize("engine", list(TYPES))
def test_questions_are_made_and_their_gold_queries_have_test_databases(
    tmp_path: Path, executor: SQLExecutor, engine: str, seed: int
) -> None:
    random = Random(seed)
    script = odd_script(random, TYPES[engine])
    if engine == "sqlite":
        database: Path | str = sqlite_file(tmp_path / "odd.sqlite", script)
    else:
        database = duckdb_file(tmp_path / "odd.duckdb", script)
    made = make_questions(database, tmp_path / "questions", question_sets=TINY_SETS, seed=seed)
    grader = Grader(executor, suite=TestSuite(executor, tmp_path / "cache"))
    golds = [
        json.loads(line)["gold_sql"]
        for path in sorted((tmp_path / "questions").glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    assert golds, made
    for gold in random.sample(golds, min(2, len(golds))):
        verdict = grader.grade(database, gold, gold)
        assert verdict.strict, gold
        assert "internal error" not in verdict.gap, (gold, verdict)
