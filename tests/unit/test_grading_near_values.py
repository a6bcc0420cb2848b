import pytest

from text2sql_grpo.grading.near_values import as_column_value, matching_texts, near_values
from text2sql_grpo.sql.outcome import Cell


@pytest.mark.parametrize(
    ("literal", "alike", "expected"),
    [
        (0, [1, 2], [-1, 1]),
        (3, [0.5, 2.0], [2.0, 2.5, 3.5, 4.0, 2.7, 3.3000000000000003, 2.75, 3.25]),
        ("007", ["003"], ["006", "008"]),
        ("2020-02-29", ["2020-01-01"], ["2020-02-28", "2020-03-01", "2019-02-28", "2021-03-01"]),
        ("2020-02-29 10:00", ["2020-01-01 09:00"], ["2020-02-28 10:00"]),
        ("2020-99-99", ["2020-01-01"], []),
        ("ab", ["x"], ["AB", "abs", "a", "xab"]),
        (2014, ["2013"], ["2013", "2015"]),
        ("17", [3, 4], [16, 18]),
        ("Rome", [3, 4], []),
        (3, [b"x"], []),
    ],
)
def test_values_beside_a_literal_have_the_columns_type_and_format(
    literal: Cell, alike: list[Cell], expected: list[Cell]
) -> None:
    found = near_values(literal, alike)
    assert found[: len(expected)] == expected
    assert expected or not found
    assert literal not in found
    assert {type(value) for value in found} <= {type(value) for value in alike}


def test_a_literal_for_an_empty_column_stays_as_it_is() -> None:
    assert as_column_value("x", []) == "x"
    assert as_column_value(3, [None]) == 3


def test_texts_around_a_pattern_match_it_or_miss_it() -> None:
    texts = matching_texts("Jo%")
    assert "Jo" in texts and "Jox" in texts and "xJo" in texts
    assert matching_texts("%") == ["x", "xy"]
