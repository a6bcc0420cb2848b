"""Values of CSV files as people write them."""

import logging
from pathlib import Path
from typing import Any

import pytest

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.sql import SQLExecutor

pytestmark = pytest.mark.usefixtures("own_cache")


def write_column(path: Path, values: list[str]) -> None:
    lines = ["id;x", *(f"{place};{value}" for place, value in enumerate(values))]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def column(databases: Databases, executor: SQLExecutor, table: str) -> list[Any]:
    """Values of a column of a CSV file, as queries see them."""
    outcome = executor.execute(databases.address("rows"), f"SELECT x FROM {table} ORDER BY id")
    assert outcome.is_ok, outcome.error
    return [row[0] for row in outcome.rows]


def own_column(tmp_path: Path, executor: SQLExecutor, values: list[str]) -> list[Any]:
    folder = tmp_path / "rows"
    folder.mkdir()
    write_column(folder / "t.csv", values)
    return column(Databases(folder), executor, "t")


CASES = [
    (["$1,115.50", "$3.00", ""], [1115.5, 3.0, None]),
    (["1.234,56", "0,50", "12.345.678,00"], [1234.56, 0.5, 12345678.0]),
    (["1 234,50 kr", "7,25 kr"], [1234.5, 7.25]),
    (["1'234.50", "9.75"], [1234.5, 9.75]),
    (["($12.50)", "$4.00", "-$3.25"], [-12.5, 4.0, -3.25]),
    (["EUR 12,50", "EUR 1.000,00"], [12.5, 1000.0]),
    (["12,5 %", "3 %"], [12.5, 3.0]),
    (["12 Jan 2024", "1 Feb 2024"], ["2024-01-12", "2024-02-01"]),
    (["January 12, 2024", "February 1, 2024"], ["2024-01-12", "2024-02-01"]),
    (["Jan 1 2000", "Nov 12 2001"], ["2000-01-01", "2001-11-12"]),
    (["31.12.2023", "01.02.2024"], ["2023-12-31", "2024-02-01"]),
    (["01067", "10115"], ["01067", "10115"]),
    (["A-1", "B-2"], ["A-1", "B-2"]),
    (["$1", "n/a"], [1.0, None]),
    (["$65,548 ", "$48,252 "], [65548.0, 48252.0]),
    (["1.234 €", "12.000 €", "7 €"], [1234.0, 12000.0, 7.0]),
    (["$5.00 off", "$3.00 off"], ["$5.00 off", "$3.00 off"]),
    (["$1,234", "1,234"], ["$1,234", "1,234"]),
    (["12", "#N/A", "7", "-"], [12, None, 7, None]),
    (["1.5", "NA", ""], [1.5, None, None]),
    (["2024-01-02", "?"], ["2024-01-02", None]),
    (["12 Jan 2024", "--"], ["2024-01-12", None]),
    (["31.12.2023", "N/A"], ["2023-12-31", None]),
    (["12-31-2023", "N/A"], ["12-31-2023", "N/A"]),
    (["01067", "N/A"], ["01067", "N/A"]),
    (["NA", "DE", "-"], ["NA", "DE", "-"]),  # Namibia
    (["N/A", "n/a"], ["N/A", "n/a"]),
    ([" 66", " ", " 7"], [66, None, 7]),
    ([" GK", " M ", ""], ["GK", "M", None]),
    ([" GK", "M"], [" GK", "M"]),
    (["$5", "$1200", "-$3"], [5.0, 1200.0, -3.0]),
    (["JAF-001", "SUP-002"], ["JAF-001", "SUP-002"]),
    (["1,234", "5,678"], ["1,234", "5,678"]),  # thousands, or thousandths
    (["12:30", "13:45"], ["12:30:00", "13:45:00"]),
    (["USD 1,200.00", "EUR 950.00"], ["USD 1,200.00", "EUR 950.00"]),
    (["USD 1,200.00", "950.00"], ["USD 1,200.00", "950.00"]),
    (["5%", "0.05"], ["5%", "0.05"]),
    (["kr 1 200,50", "7,25 kr.", "(3 kr)"], [1200.5, 7.25, -3.0]),
    (["+4915112345678", "+4930901820"], ["+4915112345678", "+4930901820"]),
    (["+0200", "+1000", "-0530"], ["+0200", "+1000", "-0530"]),
    (["+5", "-3", "0"], [5.0, -3.0, 0.0]),
    (["5 apples", "6 pears"], ["5 apples", "6 pears"]),
]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Databases:
    """A CSV file for each case."""
    folder = tmp_path_factory.mktemp("cases") / "rows"
    folder.mkdir()
    for number, (values, _) in enumerate(CASES):
        write_column(folder / f"t{number}.csv", values)
    return Databases(folder)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(values) for values, _ in CASES])
def test_values_are_read_as_they_are_meant(tables: Databases, executor: SQLExecutor, number: int) -> None:
    assert column(tables, executor, f"t{number}") == CASES[number][1]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (["$1,115.50", "$3.00"], "column x holds amounts like 1,234.5: read as numbers"),
        (["1,234", "5,678"], "can be read in two ways: kept as text"),
        (["$5.00", "5.00 €"], "column x holds amounts in different units: kept as text"),
        (["03/04/2024", "05/06/2024"], "can be read with the day or the month first"),
        (["1.234", "2.345"], "read as decimals, not as thousands"),
        (["12 Jan 2024"], "read as dates"),
    ],
)
def test_what_is_changed_or_unclear_is_logged(
    tmp_path: Path, executor: SQLExecutor, values: list[str], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        own_column(tmp_path, executor, values)
    assert text in caplog.text


def test_plain_files_are_read_without_a_word(
    tmp_path: Path, executor: SQLExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    for place, values in enumerate([["1.5", "2.25"], ["AB-1", "AB-2"]]):
        (tmp_path / str(place)).mkdir()
        with caplog.at_level(logging.WARNING):
            assert list(map(str, own_column(tmp_path / str(place), executor, values))) == values
    assert not caplog.text
