import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from text2sql_grpo.grading import bird_execution_accuracy
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits, Row

SHARED_DATA = Path(__file__).parents[3] / "shared" / "data"
RECORDED = SHARED_DATA / "evaluator_verdicts" / "verdicts.jsonl"


def ok(*rows: Row, is_truncated: bool = False) -> ExecutionOutcome:
    columns = tuple(f"c{i}" for i in range(len(rows[0]))) if rows else ("c0",)
    return ExecutionOutcome("ok", columns, rows, is_truncated)


@pytest.mark.parametrize(
    ("gold", "predicted", "expected"),
    [
        (ok((1,), (2,)), ok((2,), (1,)), True),
        (ok((1,), (1,)), ok((1,)), True),
        (ok((1, "a")), ok(("a", 1)), False),
        (ok((1,)), ok((1.0,)), True),
        (ok((1,)), ok(("1",)), False),
        (ok((None,)), ok((None,)), True),
        (ok((0.3,)), ok((0.1 + 0.2,)), False),
        (ok(), ExecutionOutcome("ok", ("a", "b")), True),
        (ok((1,)), ok((1,), is_truncated=True), False),
        (ok((1,), is_truncated=True), ok((1,)), False),
        (ok(), ExecutionOutcome("error", error="no such column"), False),
        (ExecutionOutcome("timeout"), ExecutionOutcome("timeout"), False),
    ],
)
def test_bird_set_comparison(gold: ExecutionOutcome, predicted: ExecutionOutcome, expected: bool) -> None:
    assert bird_execution_accuracy(gold, predicted) is expected


@pytest.mark.skipif(not RECORDED.is_file(), reason="needs recorded verdicts of the official evaluators")
def test_agrees_with_recorded_verdicts_of_the_official_evaluator(tmp_path: Path) -> None:
    empty = tmp_path / "empty.sqlite"  # pairs of source `values` read no table
    with closing(sqlite3.connect(empty)) as connection:
        connection.execute("CREATE TABLE unused (a)")
    limits = Limits(timeout_s=30, max_rows=1_000_000, max_bytes=1_000_000_000)
    checked, disagreements = 0, []
    with SQLExecutor(limits) as executor:
        pairs = [json.loads(line) for line in RECORDED.read_text(encoding="utf-8").splitlines()]
        for pair in sorted(pairs, key=lambda pair: str(pair["db_path"])):  # each file is opened once
            if "baseball_1" in pair["db_path"]:  # the same joins over and over, three quarters of the time
                continue
            database = empty if pair["source"] == "values" else SHARED_DATA / pair["db_path"]
            gold, predicted = (executor.execute(database, pair[key]) for key in ("gold", "pred"))
            checked += 1
            if bird_execution_accuracy(gold, predicted) != bool(pair["bird_ex"]):
                disagreements.append((pair["kind"], pair["gold"], pair["pred"], gold.error, predicted.error))
    assert disagreements == []
    assert checked > 2500
