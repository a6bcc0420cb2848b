"""Bounds of one query: its text, its rows, its cells, its time."""

import marshal
import math
import time
from decimal import Decimal

import pytest

from text2sql_grpo.sql.bounds import TimeLimitReachedError, exact_number, first_word, is_blank, keep_rows
from text2sql_grpo.sql.failure_text import MAX_ERROR_CHARS, late_text, short_line, why_unfit
from text2sql_grpo.sql.outcome import Cell, Limits


@pytest.mark.parametrize(
    ("sql", "word"),
    [
        ("select 1", "SELECT"),
        ("\n\t ( (Values (1)))", "VALUES"),
        ("-- a\n/* b */ /* * / */EXPLAIN x", "EXPLAIN"),
        (";; DROP TABLE x", "DROP"),
        ("", ""),
        ("-- a", ""),
        ("'x'", ""),
        # PostgreSQL nests comments and ends a line at a carriage return: both run what is hidden here.
        ("/* /* */ EXPLAIN */ DROP TABLE x", ""),
        ("-- \rDROP TABLE x /*\nEXPLAIN */", "DROP"),
        # No blank for a database.
        ("\u00a0EXPLAIN", ""),
    ],
)
def test_first_word(sql: str, word: str) -> None:
    assert first_word(sql) == word


@pytest.mark.parametrize(
    ("sql", "blank"), [("", True), (" ;-- a", True), ("/* a */", True), ("/* a", False), ("1", False)]
)
def test_blank_text(sql: str, blank: bool) -> None:
    assert is_blank(sql) is blank


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2.00", 2),
        ("1.5", 1.5),
        ("-0", 0),
        ("1e30", 10**30),
        ("123456789012345678901234567890", 123456789012345678901234567890),
        ("Infinity", math.inf),
        ("0.1", 0.1),
        ("99999999999999999999.5", 1e20),
    ],
)
def test_number_is_an_integer_where_it_can_be(text: str, number: float) -> None:
    got = exact_number(Decimal(text))
    assert (got, type(got)) == (number, type(number))


def test_fraction_beyond_floats_becomes_text() -> None:
    assert exact_number(Decimal("9" * 400 + ".5")) == "9" * 400 + ".5"
    assert exact_number(Decimal("Infinity")) == math.inf


def test_integers_beyond_floats_become_text() -> None:
    assert exact_number(Decimal(2**1023 - 1)) == 2**1023 - 1
    assert exact_number(Decimal(2**1023)) == str(2**1023)
    assert exact_number(Decimal("-1e400")) == f"-1{'0' * 400}"
    rows, _ = keep_rows(iter([(2**1023 - 1, -(2**1023), 2**2000)]), Limits(), math.inf)
    assert rows == ((2**1023 - 1, str(-(2**1023)), str(2**2000)),)


def test_not_a_number_stays_so() -> None:
    assert math.isnan(exact_number(Decimal("NaN")))


@pytest.mark.parametrize(
    ("limits", "n_kept", "is_truncated"),
    [
        (Limits(max_rows=3, max_bytes=1000), 3, False),
        (Limits(max_rows=2, max_bytes=1000), 2, True),
        (Limits(max_rows=3, max_bytes=3 * (5 + 1 + 5 + 7 + 6)), 3, False),
        (Limits(max_rows=3, max_bytes=3 * (5 + 1 + 5 + 7 + 6) - 1), 2, True),
        (Limits(max_rows=3, max_bytes=1), 0, True),
    ],
)
def test_rows_are_kept_up_to_the_caps(limits: Limits, n_kept: int, is_truncated: bool) -> None:
    rows = [(None, 1, "ab", b"c")] * 3
    assert keep_rows(iter(rows), limits, math.inf) == (tuple(rows[:n_kept]), is_truncated)


@pytest.mark.parametrize("row", [("漢" * 400_000,), ("",) * 300, (2**900, -1, None, 1.5, b"") * 20])
def test_rows_take_no_more_bytes_than_the_limit(row: tuple[Cell, ...]) -> None:
    rows, is_truncated = keep_rows(iter([row] * 20_000), Limits(max_rows=20_000), math.inf)
    assert is_truncated and len(rows) > 1
    assert len(marshal.dumps(rows)) < 1.1 * Limits().max_bytes  # a few bytes for each row


def test_a_value_that_was_cut_in_an_earlier_row_counts() -> None:
    rows = [("x" * 1_000_001,), ("漢" * 400_000,)]
    assert keep_rows(iter(rows), Limits(), math.inf)[1]


def test_digits_of_large_numbers_count() -> None:
    rows, is_truncated = keep_rows(iter([(2**80_000,)] * 3), Limits(max_bytes=25_000), math.inf)
    assert (len(rows), is_truncated) == (2, True)


def test_rows_that_come_too_late_are_not_kept() -> None:
    with pytest.raises(TimeLimitReachedError):
        keep_rows(iter([(1,)]), Limits(), time.monotonic() - 1)


def test_numbers_too_long_to_print_become_text_and_long_values_are_cut() -> None:
    rows, is_truncated = keep_rows(iter([(10**5_000, 1)]), Limits(), math.inf)
    assert (rows, is_truncated) == (((f"1{'0' * 5_000}", 1),), False)

    rows, is_truncated = keep_rows(iter([("x" * 6_000_000, b"y" * 2_000_000, 3)]), Limits(), math.inf)
    assert (rows, is_truncated) == ((("x" * 1_000_000, b"y" * 1_000_000, 3),), True)


def test_late_text_has_no_superfluous_digits() -> None:
    assert late_text(5.0) == "stopped: the query ran longer than 5 s"
    assert late_text(0.25) == "stopped: the query ran longer than 0.25 s"


def test_error_text_is_one_short_line() -> None:
    assert short_line("near\n  the\tend ") == "near the end"
    assert short_line("x" * MAX_ERROR_CHARS) == "x" * MAX_ERROR_CHARS
    assert short_line("x" * (MAX_ERROR_CHARS + 1)) == "x" * (MAX_ERROR_CHARS - 3) + "..."


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("SELECT 'é'", ""),  # 11 bytes
        ("SELECT 'ee'", ""),
        ("SELECT 'ée'", "the query is too long: expected at most 11 bytes, got 12"),
        ("SELECT 1\0", "the query contains a NUL character"),
        (
            "SELECT '\ud800'",
            "the query contains a character that is not valid Unicode (a lone surrogate)",
        ),
    ],
)
def test_text_that_no_database_is_given(sql: str, reason: str) -> None:
    assert why_unfit(sql, Limits(max_sql_bytes=11)) == reason
