import pytest

from text2sql_grpo.environment.observation import ObservationLimits, observation_text
from text2sql_grpo.sql.outcome import Cell, ExecutionOutcome


def shown(*rows: tuple[Cell, ...], is_truncated: bool = False, **caps: int) -> list[str]:
    columns = tuple("abcdef"[: len(rows[0])]) if rows else ("a",)
    outcome = ExecutionOutcome("ok", columns=columns, rows=rows, is_truncated=is_truncated)
    return observation_text(outcome, ObservationLimits(**caps)).split("\n")


def test_rows_under_a_header() -> None:
    assert shown((1, "x"), (2.5, "y")) == ["a | b", "1 | x", "2.5 | y"]


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (None, "NULL"),
        ("", ""),
        (b"\x00\xff", "<2 bytes>"),
        ("two\nlines\r\n and\ttabs", "two lines and tabs"),
        (10**18, "1000000000000000000"),
        (0.1, "0.1"),
        (float("inf"), "inf"),
        ("\udcffA", "?A"),  # how the executor reads stored text that is no UTF-8
        ("é 漢", "é 漢"),
    ],
)
def test_cells(cell: Cell, text: str) -> None:
    assert shown((cell,)) == ["a", text]


def test_long_cell_is_cut_and_says_so() -> None:
    assert shown(("12345", "123456", 123456), max_cell_chars=5) == ["a | b | c", "12345 | 12345… | 12345…"]


def test_long_column_name_is_cut() -> None:
    outcome = ExecutionOutcome("ok", columns=("count(*) > 3",), rows=((1,),))

    assert observation_text(outcome, ObservationLimits(max_cell_chars=5)) == "count…\n1"


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        (0, ["a", "(no rows)"]),
        (2, ["a", "0", "1"]),
        (3, ["a", "0", "1", "(2 of 3 rows shown)"]),
    ],
)
def test_cap_on_rows(rows: int, lines: list[str]) -> None:
    assert shown(*[(i,) for i in range(rows)], max_rows=2) == lines


def test_rows_cut_by_the_executor() -> None:
    assert shown((0,), (1,), (2,), is_truncated=True, max_rows=2)[-1] == "(2 of at least 3 rows shown)"
    assert shown((0,), (1,), is_truncated=True, max_rows=2)[-1] == "(2 of at least 2 rows shown)"


@pytest.mark.parametrize(("max_chars", "n_shown"), [(17, 2), (16, 1), (11, 1), (10, 0), (5, 0)])
def test_cap_on_the_whole_table(max_chars: int, n_shown: int) -> None:
    lines = shown(("1", "2"), ("3", "4"), max_chars=max_chars)  # 5 characters a line, and 2 newlines

    assert lines[: 1 + n_shown] == ["a | b", "1 | 2", "3 | 4"][: 1 + n_shown]
    assert lines[1 + n_shown :] == ([] if n_shown == 2 else [f"({n_shown} of 2 rows shown)"])


def test_many_columns_stay_under_the_cap() -> None:
    wide = ExecutionOutcome("ok", columns=("column",) * 2000, rows=((1,) * 2000,))

    lines = observation_text(wide, ObservationLimits(max_chars=50)).split("\n")

    assert len(lines[0]) == 51 and lines[0].endswith("…")
    assert lines[1:] == ["(0 of 1 rows shown)"]


def test_error() -> None:
    failed = ExecutionOutcome("error", error="no such column: citty")

    assert observation_text(failed, ObservationLimits()) == "Error: no such column: citty"
