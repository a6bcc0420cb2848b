"""Random SQL returns an outcome in time and changes nothing, and the next query is right."""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import duckdb
import psycopg
import pytest

from tests.hostile.grammar import random_sql
from tests.hostile.surroundings import files_below
from text2sql_grpo.environment.observation import ObservationLimits, observation_text
from text2sql_grpo.sql import Limits, SQLExecutor
from text2sql_grpo.sql.postgres_role import restricted_role_sql

ENGINES = ("sqlite", "duckdb", "postgresql")
LIMIT_S = 0.5
# On an idle machine 0.15; where other programs use the processors, what they take comes on top.
MAX_LATE_S = float(os.environ.get("TEXT2SQL_GRPO_MAX_LATE_S", "1.5"))
CHECKED_EACH = 50
TABLES = "CREATE TABLE ward (id INT, name VARCHAR(9)); INSERT INTO ward VALUES (1, 'North'), (2, 'South');"
WARDS = ((1, "North"), (2, "South"))


@pytest.fixture
def location_of(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], tuple[str, str]]:
    """Location of an engine's database, and the path of its file."""

    def made(engine: str) -> tuple[str, str]:
        if engine == "sqlite":
            path = tmp_path / "clinic.sqlite"
            with contextlib.closing(sqlite3.connect(path)) as connection:
                connection.executescript(TABLES)
            os.utime(path, (1, 1))
            return str(path), str(path)
        if engine == "duckdb":
            path = tmp_path / "clinic.duckdb"
            with duckdb.connect(str(path)) as database:
                database.execute(f"{TABLES} CREATE SEQUENCE numbers")
            return f"duckdb:///{path}", str(path)
        server = request.getfixturevalue("postgres_server")
        with psycopg.connect(server.admin_url(), autocommit=True) as admin:
            admin.execute("DROP DATABASE IF EXISTS grammar WITH (FORCE)")
            admin.execute("DROP ROLE IF EXISTS of_grammar")
            admin.execute("CREATE DATABASE grammar")
        with psycopg.connect(server.admin_url("grammar"), autocommit=True) as admin:
            admin.execute(f"{TABLES} CREATE SEQUENCE numbers")
            admin.execute(restricted_role_sql("of_grammar", "secret", "grammar"))
        return server.url("of_grammar", "secret", "grammar"), "clinic"

    return made


def assert_harmless(location: str, path: str, engine: str, folder: Path, n_queries: int, seed: int) -> None:
    random = Random(seed)
    before = files_below(folder)
    limits = Limits(timeout_s=LIMIT_S)
    with SQLExecutor(Limits(timeout_s=20.0), workers=1, cache_entries=0) as executor:
        assert executor.execute(location, "SELECT id, name FROM ward ORDER BY id").rows == WARDS
        for number in range(n_queries):
            sql = random_sql(engine, random, database=path, beside=str(folder / "new"))
            started = time.monotonic()
            outcome = executor.execute(location, sql, limits=limits)
            late_s = time.monotonic() - started - LIMIT_S

            assert late_s < MAX_LATE_S, (seed, number, sql)
            assert (42,) not in outcome.rows, (seed, number, sql)
            assert observation_text(outcome, ObservationLimits()), (seed, number, sql)
            if number % CHECKED_EACH == 0 or number == n_queries - 1:
                assert executor.execute(location, "SELECT id, name FROM ward ORDER BY id").rows == WARDS, sql
                assert files_below(folder) == before, (seed, number)


@pytest.mark.parametrize("engine", ENGINES)
def test_random_sql_is_harmless(
    location_of: Callable[[str], tuple[str, str]], engine: str, tmp_path: Path
) -> None:
    assert_harmless(*location_of(engine), engine, tmp_path, 300, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_much_random_sql_is_harmless(
    location_of: Callable[[str], tuple[str, str]], engine: str, tmp_path: Path
) -> None:
    assert_harmless(*location_of(engine), engine, tmp_path, 20_000, seed=2)
