"""Advice on names that are not there, from the real messages of each engine."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.databases import sqlite_file
from tests.scripted_policy import ask, shop_environment
from text2sql_grpo.environment.missing_names import missing_name_advice
from text2sql_grpo.environment.observation import ObservationLimits
from text2sql_grpo.environment.session import EnvironmentSettings
from text2sql_grpo.environment.tools import ExecutorBackend
from text2sql_grpo.sql import Limits, SQLExecutor
from text2sql_grpo.sql.hidden import hide
from text2sql_grpo.sql.schema import read_schema

SCRIPT = """
    CREATE TABLE station (id INTEGER PRIMARY KEY, name TEXT, lat REAL, "dock count" INTEGER);
    CREATE TABLE trip (id INTEGER PRIMARY KEY, station_id INTEGER, minutes INTEGER);
    CREATE TABLE "Bike Type" (id INTEGER PRIMARY KEY, wheels INTEGER);
    CREATE TABLE "order" (id INTEGER PRIMARY KEY, "group" TEXT);
"""


@pytest.fixture(scope="module", params=["sqlite", "duckdb", "postgresql"])
def advice(
    request: pytest.FixtureRequest, make_database: Callable[[str, str], Path | str], executor: SQLExecutor
) -> Callable[[str], str]:
    """Advice on a query that fails on the stations."""
    address = make_database(request.param, SCRIPT)
    schema = read_schema(address)

    def advised(sql: str) -> str:
        outcome = executor.execute(address, sql)
        assert outcome.status == "error"
        return missing_name_advice(schema, sql, outcome.error)

    return advised


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        pytest.param("SELECT latitude FROM station", "take lat from station", id="like"),
        pytest.param("SELECT dock_count FROM station", 'take "dock count" from station', id="spelling"),
        pytest.param("SELECT T1.minutes FROM station T1", "join trip, which has minutes", id="elsewhere"),
        pytest.param(
            "SELECT T2.name FROM station T1 JOIN trip T2 ON T1.id = T2.station_id",
            "take name from station",
            id="alias",
        ),
        pytest.param("SELECT wheel_count FROM trip", "take other columns: trip has id, station_id, minutes"),
        pytest.param("SELECT minutes FROM trips", "read trip", id="table"),
        pytest.param("SELECT wheels FROM bike_type", 'read "Bike Type"', id="table-spelling"),
        pytest.param("SELECT count(*) FROM order", 'write "order" with its quotes', id="keyword"),
        pytest.param(
            """SELECT id FROM "order" WHERE group = 'a'""",
            'write "group" with its quotes',
            id="keyword-column",
        ),
        pytest.param("SELECT id FROM trip LIMIT 1 ORDER BY id", "", id="keyword-as-such"),
        pytest.param("SELECT 1 FROM zzz", "", id="nothing-like-it"),
        pytest.param("SELECT no_function(1)", "", id="other-error"),
    ],
)
def test_the_advice_names_what_is_there(advice: Callable[[str], str], sql: str, expected: str) -> None:
    assert advice(sql) == expected


def test_long_names_are_not_compared(make_database: Callable[[str, str], Path | str]) -> None:
    schema = read_schema(make_database("sqlite", SCRIPT))
    name = "lat" * 20_000

    advised = missing_name_advice(schema, f"SELECT {name} FROM station", f"no such column: {name}")

    assert advised == 'take other columns: station has id, name, lat, "dock count"'


@pytest.mark.parametrize("instructions", [True, False])
def test_only_instructed_models_read_the_advice(tmp_path: Path, *, instructions: bool) -> None:
    settings = EnvironmentSettings(max_turns=3, instructions=instructions)
    session = shop_environment(tmp_path, settings).session(ask("How many people work in Lisbon?"))
    session.start()

    reply = session.step("<sql>SELECT town FROM branch</sql>")

    advised = (
        "\nTo fix the query, take other columns: branch has code, city, staff."
        "\n(2 turns left: write another query)"
    )
    assert reply is not None
    assert reply["content"] == "Error: no such column: town" + (advised if instructions else "")


def test_no_hidden_name_is_advised(make_database: Callable[[str, str], Path | str]) -> None:
    schema = hide(read_schema(make_database("sqlite", SCRIPT)), ["station.lat"]).schema

    advised = missing_name_advice(schema, "SELECT latitude FROM station", "no such column: latitude")

    assert advised == 'take other columns: station has id, name, "dock count"'


def test_a_missing_table_is_advised_on_where_something_is_hidden(tmp_path: Path) -> None:
    script = "CREATE TABLE station (id INTEGER, email TEXT); CREATE TABLE stations_log (email TEXT)"
    database = sqlite_file(tmp_path / "t.sqlite", script)
    with SQLExecutor(workers=1) as executor:
        hidden = hide(read_schema(database), ["*.email"])
        backend = ExecutorBackend(executor, database, Limits(), ObservationLimits(), hidden)
        found = backend.call("run_sql", {"sql": "SELECT id FROM statoin"})
    assert (found.text, found.advice) == ("Error: no table statoin in the schema", "read station")
