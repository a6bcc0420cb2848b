"""What SQLite, DuckDB and PostgreSQL do alike with a query, in workers on real databases."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from text2sql_grpo.sql import ExecutionOutcome, Limits, SQLExecutor

ENGINES = ("sqlite", "duckdb", "postgresql")
GOLDEN = Path(__file__).parents[1] / "golden" / "queries.jsonl"
CASES = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
WARDS = """
CREATE TABLE ward (id INTEGER PRIMARY KEY, name VARCHAR(9));
INSERT INTO ward VALUES (1, 'North'), (2, 'South');
"""
MORE = {
    "sqlite": """
        CREATE TABLE visit (
            id INTEGER PRIMARY KEY, ward_id INTEGER REFERENCES ward (id), fee REAL, notes TEXT
        );
        CREATE INDEX visit_fee ON visit (fee);
        CREATE VIEW dear AS SELECT * FROM visit WHERE fee > 10;
        INSERT INTO visit VALUES (1, 1, 5.5, '{"a": [1, 2]}'), (2, 1, 20, NULL), (3, 2, 30, '{"a": []}')
    """,
    "duckdb": "CREATE VIEW named AS SELECT name FROM ward",
    "postgresql": """
        CREATE TYPE mood AS ENUM ('sad', 'ok');
        CREATE SCHEMA vault; CREATE TABLE vault.hidden (secret text)
    """,
}
NUMBERS = {
    "sqlite": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n LIMIT {}",
    "duckdb": "SELECT * FROM range({})",
    "postgresql": "SELECT generate_series(1, {})",
}
BLOBS = {"sqlite": "x'00ff'", "duckdb": "'\\x00\\xFF'::BLOB", "postgresql": "'\\x00ff'::bytea"}
Run = Callable[..., ExecutionOutcome]


@pytest.fixture(scope="module")
def run(make_database: Callable[[str, str], Path | str]) -> Iterator[Run]:
    """Run one query on an engine's database; what it leaves in the one worker would show in the next."""
    addresses: dict[str, Path | str] = {}
    with SQLExecutor(workers=1, cache_entries=0) as executor:

        def made(engine: str, sql: str, **limits: Any) -> ExecutionOutcome:
            if engine not in addresses:
                addresses[engine] = make_database(engine, WARDS + MORE[engine])
            return executor.execute(addresses[engine], sql, limits=Limits(**limits))

        yield made


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['engine']}: {case['sql']}")
def test_golden_query(run: Run, case: dict[str, Any]) -> None:
    """It returns its rows, with their types; or some rows, if the case names none; or an error."""
    outcome = run(case["engine"], case["sql"])
    if "error" in case:
        assert outcome.status in ("error", "denied") and case["error"] in outcome.error
        assert outcome.columns == outcome.rows == ()
        return
    assert (outcome.status, outcome.error, outcome.is_truncated) == ("ok", "", False)
    assert outcome.columns
    if "rows" in case:
        assert json.dumps(outcome.rows) == json.dumps(case["rows"])
    else:
        assert outcome.rows or "nope" in case["sql"]


@pytest.mark.parametrize("engine", ENGINES)
def test_blobs_are_bytes_and_column_names_are_kept(run: Run, engine: str) -> None:
    outcome = run(engine, f'SELECT {BLOBS[engine]} AS a, 2 AS a, 3 AS "x y"; -- end')
    assert (outcome.columns, outcome.rows) == (("a", "a", "x y"), ((b"\0\xff", 2, 3),))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("limit", "n_rows"), [("max_rows", 100), ("max_bytes", 100), ("max_rows", 1)])
def test_rows_beyond_a_cap_are_cut_and_flagged(run: Run, engine: str, limit: str, n_rows: int) -> None:
    limits = {limit: n_rows * 10 if limit == "max_bytes" else n_rows}
    many, fitting = (NUMBERS[engine].format(number) for number in (10**12, n_rows))
    cut, whole = run(engine, many, **limits), run(engine, fitting, **limits)
    assert (cut.status, cut.is_truncated) == ("ok", True)
    assert len(cut.rows) == n_rows
    assert (len(whole.rows), whole.is_truncated) == (n_rows, False)
    assert run(engine, "SELECT 1").rows == ((1,),)


@pytest.mark.parametrize("engine", ENGINES)
def test_late_query_is_stopped(run: Run, engine: str) -> None:
    outcome = run(engine, f"SELECT count(*) FROM ({NUMBERS[engine].format(10**13)}) AS n", timeout_s=0.25)
    assert outcome.status == "timeout" and "0.25 s" in outcome.error
    assert run(engine, "SELECT count(*) FROM ward").rows == ((2,),)
