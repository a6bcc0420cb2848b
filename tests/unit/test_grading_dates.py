import pytest

from text2sql_grpo.grading.dates import date_format
from text2sql_grpo.sql.outcome import Cell

COLUMNS: list[tuple[list[Cell], Cell, Cell]] = [
    (["1997-01-05", "1998-12-31"], "1997-05-01", "1998-01-01"),
    (["2020-01-31 10:00:00", "2021-12-01 09:30:00"], "1997-05-31 23:59:59", "1998-01-01 00:00:00"),
    (["2020-01-31T10:00:00.000Z"], "1997-05-01T00:00:00.000Z", "1998-01-01T00:00:00.000Z"),
    (["3/14/2019", "12/1/2020"], "5/1/1997", "1/1/1998"),
    (["23-OCT-10", "02-MAY-11"], "01-MAY-97", "01-JAN-98"),
    (["March 5, 2019"], "May 1, 1997", "January 1, 1998"),
    ([20190101, 20200229], 19970501, 19980101),
]


@pytest.mark.parametrize(("values", "inside", "beside"), COLUMNS)
def test_dates_are_planted_in_the_columns_own_format(values: list[Cell], inside: Cell, beside: Cell) -> None:
    dates = date_format(values)
    assert dates is not None
    for literal in ("1997", 1997, "1997%", "1997-"):
        exact, near = dates.around(literal, values)
        assert beside in near and date_format([*exact, *near]) == dates
    assert inside in dates.around("1997-05", values)[0]
    for own in values:
        exact, near = dates.around(own, values)
        assert exact == [own] and own not in near and len(near) >= 4
    for text in (
        "%Y-%m",
        "%y",
        "now",
        "-30 days",
        "start of month",
        "9999-99-99",
        "9999-12-31",
        10**30,
        -7.5,
    ):
        assert dates.around(text, values) == ([], [])


def test_months_and_days_of_any_year_are_planted() -> None:
    dates = date_format(["2020-01-31"])
    assert dates is not None
    assert dates.around("05", ["2020-01-31"])[0] == ["2020-05-01", "2020-01-05"]
    assert dates.around("%-31", ["2020-01-31"])[0] == ["2020-01-31"]


def test_a_month_in_the_columns_own_format_is_planted() -> None:
    dates = date_format(["23-OCT-10"])
    assert dates is not None
    exact, near = dates.around("%-MAY-97", ["23-OCT-10"])
    assert (exact, near) == (["01-MAY-97", "31-MAY-97"], ["30-APR-97", "01-JUN-97", "01-MAY-98"])


def test_a_day_in_the_columns_own_format_is_planted_with_hours_of_one_digit() -> None:
    dates = date_format(["8/21/2015 17:03", "8/1/2015 9:05"])
    assert dates is not None
    assert dates.around("8/2/2015%", [])[0] == ["8/2/2015 0:00"]


def test_a_day_is_planted_at_both_ends_of_it_where_the_column_has_times() -> None:
    dates = date_format(["2020-01-31 10:00:00"])
    assert dates is not None
    exact, near = dates.around("2021-03-04", [])
    assert exact == ["2021-03-04 00:00:00"]
    assert {"2021-03-04 23:59:59", "2021-03-03 00:00:00", "2021-03-05 00:00:00"} <= set(near)


@pytest.mark.parametrize(
    "values",
    [[], [5, 6], ["1997", "1998"], [1577836800], ["2020-01-01", "x"], ["2020-13-01"], [20201301], [1.5]],
)
def test_other_columns_hold_no_dates(values: list[Cell]) -> None:
    assert date_format(values) is None
