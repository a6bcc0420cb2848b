import sqlite3
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.schema import Column, ForeignKey, Schema, SchemaText, Table, View, schema_text
from text2sql_grpo.sql.schema_budget import estimated_tokens

KINDS: tuple[SchemaText, ...] = ("compact", "ddl", "commented_ddl", "m_schema")


def column(name: str, *, key: bool = False, comment: str = "", examples: tuple[str, ...] = ()) -> Column:
    return Column(name, "TEXT", not key, key, comment, examples)


WARD = Table(
    "ward",
    (
        column("ward_id", key=True),
        column("title", comment="what people call it", examples=("North", "South")),
        column("floor", examples=("1", "2")),
        column("beds"),
        column("phone"),
    ),
    (),
    2,
    comment="a part of the hospital",
)
VISIT = Table(
    "visit",
    (
        column("visit_id", key=True),
        column("ward_code"),
        column("fee", comment="in EUR", examples=("a", "b")),
        column("paid"),
    ),
    (ForeignKey(("ward_code",), "ward", ("phone",)),),
    9,
)
LOG = Table("log", (column("line"), column("written")), (), 3)
BILLS = View("bills", (column("ward", comment="its title"), column("total"), column("year")))
SCHEMA = Schema((WARD, VISIT, LOG), (BILLS,), name="clinic")


def last_line(kind: SchemaText, max_tokens: int) -> str:
    return schema_text(SCHEMA, kind, max_tokens=max_tokens).split("\n")[-1]


def test_text_that_fits_is_the_full_text() -> None:
    for kind in KINDS:
        full = schema_text(SCHEMA, kind)
        assert schema_text(SCHEMA, kind, max_tokens=estimated_tokens(full)) == full
        assert "Left out" not in full


def body_chars(text: str) -> int:
    """Tokens by which the last line costs nothing, so that each limit shows one more thing left out."""
    lines = text.split("\n")
    is_short = "Left out" in lines[-1]
    return len("\n".join(lines[:-1])) if is_short else len(text)


def test_order_of_what_is_left_out() -> None:
    told: list[str] = []
    for max_tokens in range(body_chars(schema_text(SCHEMA, "commented_ddl")) - 1, -1, -1):
        text = schema_text(SCHEMA, "commented_ddl", max_tokens=max_tokens, count_tokens=body_chars)
        line = text.split("\n")[-1].removeprefix("-- Left out to save space: ")
        if line not in told:
            told.append(line)
    before, columns = "all examples; all comments; ", " columns that are no keys"
    assert told == [
        "examples of visit",
        "all examples",
        "all examples; comments of bills",
        "all examples; comments of visit, bills",
        "all examples; all comments",
        # The longest first, and its last column; `phone` stays, for a foreign key names it.
        f"{before}1 column that is no key (of ward)",
        f"{before}2{columns} (of ward, bills)",
        f"{before}3{columns} (of ward, visit, bills)",
        f"{before}4{columns} (of ward, visit, bills)",
        f"{before}5{columns} (of ward, visit, bills)",
        f"{before}6{columns} (of ward, visit, log, bills)",
        f"{before}7{columns} (of ward, visit, log, bills)",
        f"{before}all 8{columns}",
        f"{before}all 8{columns}; 1 of 4 tables and views: bills",
        f"{before}all 8{columns}; 2 of 4 tables and views: log, bills",
        f"{before}all 8{columns}; 3 of 4 tables and views: visit, log, bills",
        f"{before}all 8{columns}; 4 of 4 tables and views: ward, visit, log, bills",
    ]


def test_keys_stay_longest() -> None:
    text = schema_text(SCHEMA, "compact", max_tokens=115, count_tokens=body_chars)

    assert text == (
        "table ward.ward_id, ward.phone\ntable visit.visit_id, visit.ward_code = ward.phone\ntable log.line\n"
        "view bills.ward\nLeft out to save space: all 8 columns that are no keys"
    )


def test_texts_without_values_have_none_to_leave_out() -> None:
    for kind in KINDS[:2]:
        for max_tokens in range(40, 80):
            assert "examples" not in last_line(kind, max_tokens)


@given(st.sampled_from(KINDS), st.integers(min_value=45, max_value=400))
def test_text_keeps_to_its_limit(kind: SchemaText, max_tokens: int) -> None:
    assert estimated_tokens(schema_text(SCHEMA, kind, max_tokens=max_tokens)) <= max_tokens


def test_tokens_are_counted_as_the_caller_does() -> None:
    text = schema_text(SCHEMA, "compact", max_tokens=300, count_tokens=len)

    assert len(text) <= 300 < len(schema_text(SCHEMA, "compact")) + 300
    assert schema_text(SCHEMA, "compact", max_tokens=30, count_tokens=lambda _: 30) == schema_text(
        SCHEMA, "compact"
    )


def test_many_left_out_tables_are_named_up_to_ten() -> None:
    tables = tuple(Table(f"t{number}", (column("x", key=True),), (), 0) for number in range(50))
    text = schema_text(Schema(tables), "compact", max_tokens=45)

    assert "of 50 tables: t" in text and text.endswith(" more")
    assert text.split("\n")[0] == "table t0.x"


def test_limit_without_room_for_the_last_line() -> None:
    with pytest.raises(DataError, match=r"max_tokens must be >= \d+, .*got 5 \(schema of clinic\)"):
        schema_text(SCHEMA, "ddl", max_tokens=5)


def test_the_shortened_ddl_still_runs() -> None:
    for kind in KINDS[1:3]:
        for max_tokens in range(45, 300, 5):
            with closing(sqlite3.connect(":memory:")) as connection:
                connection.executescript(schema_text(SCHEMA, kind, max_tokens=max_tokens))


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2)])
def test_estimated_tokens(text: str, tokens: int) -> None:
    assert estimated_tokens(text) == tokens
