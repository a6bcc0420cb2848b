"""One question drawn from one template on one database."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from text2sql_grpo.data.templates import Template
from text2sql_grpo.data.words import Column, Database, Link, Table, Value, plural
from text2sql_grpo.sql.schema import quote_name

Side = Literal["seen", "held_out", "any"]

MAX_CATEGORIES = 24
MAX_LITERAL_LENGTH = 30
_NOT_MEASURED = ("year", "code", "phone", "postcode", "zip")
_NOT_ADDED = (
    *("age", "rating", "score", "price", "rate", "share", "percentage", "temperature", "depth", "height"),
    *("width", "level", "rank", "grade", "speed", "latitude", "longitude"),
)
_AMOUNTS = (
    (">", ("above", "greater than", "more than")),
    ("<", ("below", "less than")),
    (">=", ("at least",)),
)


@dataclass(frozen=True)
class Condition:
    """A test of one column: `> 20` in SQL, `above 20` in words.

    Attributes:
        guess: The test with the value as people say it; the same as `test` where that does not differ.
        literal: The value as SQL writes it; empty for IS NULL.
    """

    column: Column
    test: str
    words: str
    guess: str
    literal: str


@dataclass(frozen=True)
class Draft:
    """A question with its SQL, not yet run.

    Attributes:
        look_sql: With `guess_sql`, for look-up templates; else None.
    """

    question: str
    gold_sql: str
    look_sql: str | None
    guess_sql: str | None


class Drafter:
    """Draws drafts of one template on one database.

    Args:
        database: Where names and values come from.
        template: The shape of the questions.
        side: Which (database, template, columns) combinations and (column, literal) pairs to draw:
            those held out for `test_values`, the others, or any.
    """

    def __init__(self, database: Database, template: Template, *, side: Side) -> None:
        self.database = database
        self.template = template
        self.side = side
        self._columns: dict[tuple[str, str], list[Column]] = {}
        self._conditions: dict[tuple[str, str, str], list[Condition]] = {}
        anchors: tuple[Table | Link, ...] = database.links if template.is_join else database.tables
        self.anchors = [anchor for anchor in anchors if self._has_all_slots(anchor)]

    def _has_all_slots(self, anchor: Table | Link) -> bool:
        return all(self._choices(anchor, slot) for slot in self.template.slots)

    def _choices(self, anchor: Table | Link, slot: str) -> list[Column]:
        if isinstance(anchor, Link):
            anchor = anchor.parent if slot.startswith("parent.") else anchor.child
        kind = slot.removeprefix("parent.")
        if (anchor.name, kind) not in self._columns:
            columns = [column for column in anchor.columns if _FITS[kind](column, anchor)]
            if kind in _CONDITIONS:
                for column in columns:
                    self._conditions[column.table, column.name, kind] = self._wanted(column, kind)
                columns = [column for column in columns if self._conditions[column.table, column.name, kind]]
            self._columns[anchor.name, kind] = columns
        return self._columns[anchor.name, kind]

    def _wanted(self, column: Column, kind: str) -> list[Condition]:
        """All conditions on a column whose literal is on the wanted side."""
        place = f"{column.table}.{column.name}"
        return [
            condition
            for condition in _CONDITIONS[kind](column)
            if not condition.literal or self._is_wanted("literal", place, condition.literal)
        ]

    def _is_wanted(self, *key: str) -> bool:
        return self.side == "any" or is_held_out(*key) == (self.side == "held_out")

    def draw(self, rng: random.Random) -> Draft | None:
        """A draft; None where this draw led nowhere (then draw again)."""
        anchor = rng.choice(self.anchors)
        picked: dict[str, Column] = {}
        conditions: list[Condition] = []
        for slot in self.template.slots:
            kind = slot.removeprefix("parent.")
            free = [column for column in self._choices(anchor, slot) if column not in picked.values()]
            if not free:
                return None
            column = picked[kind] = rng.choice(free)
            if kind in _CONDITIONS:
                conditions.append(rng.choice(self._conditions[column.table, column.name, kind]))
        table = anchor.child if isinstance(anchor, Link) else anchor
        places = sorted({table.name, *(f"{column.table}.{column.name}" for column in picked.values())})
        if not self._is_wanted("columns", self.database.name, self.template.name, *places):
            return None
        k = str(rng.choice((2, 3, 4, 5)))
        nouns = {kind: column.noun for kind, column in picked.items()}
        nouns |= {"row": table.noun, "rows": plural(table.noun), "k": k, "where": _where(conditions, rng)}
        if isinstance(anchor, Link):
            nouns["parents"] = plural(anchor.parent.noun)
        look = guess = None
        if said := picked.get("said"):
            nouns["value"] = conditions[0].words
            look = _look(said, stored=conditions[0].literal, words=conditions[0].words)
            guess = self._sql(anchor, picked, [(each.column, each.guess) for each in conditions], k)
        gold = self._sql(anchor, picked, [(each.column, each.test) for each in conditions], k)
        return Draft(rng.choice(self.template.phrases).format(**nouns), gold, look, guess)

    def _sql(
        self, anchor: Table | Link, picked: dict[str, Column], tests: list[tuple[Column, str]], k: str
    ) -> str:
        def name(column: Column) -> str:
            return f"{quote_name(column.table)}.{column.sql}" if isinstance(anchor, Link) else column.sql

        names = {kind: name(column) for kind, column in picked.items()} | {"k": k}
        names["where"] = " AND ".join(f"{name(column)} {test}" for column, test in tests)
        if isinstance(anchor, Link):
            names["join"] = f"{anchor.child.sql} JOIN {anchor.parent.sql} ON {anchor.on}"
        else:
            names["table"] = anchor.sql
        return self.template.sql.format(**names)


def _look(column: Column, *, stored: str, words: str) -> str:
    """A query that shows the stored form: by a word that it shares with what is said, or the whole list."""
    listed = f"SELECT DISTINCT {column.sql} FROM {quote_name(column.table)}"
    shared = [word for word in words.split() if len(word) > 2 and word.lower() in stored.lower()]
    if not shared:
        return listed
    return f"{listed} WHERE {column.sql} LIKE {literal(f'%{max(shared, key=len)}%')}"


def is_held_out(*key: str) -> bool:
    """True for about one key in six, always the same ones: kept for `test_values`."""
    return stable_number(*key) % 6 == 0


def stable_number(*key: str) -> int:
    """A number that depends on the text alone, on every machine."""
    return int.from_bytes(hashlib.sha256("\x1f".join(key).encode()).digest()[:8], "big")


def literal(value: Value) -> str:
    """A value as SQL writes it.

    >>> literal("O'Neil"), literal(3)
    ("'O''Neil'", '3')
    """
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


def thresholds(values: tuple[Value, ...]) -> list[Value]:
    """At most 12 values spread over a sorted column, numbers rounded to what people would ask for.

    >>> thresholds((3.21, 47.9, 212.5, 480.0))
    [50, 210]
    """
    low, high = values[0], values[-1]
    spread = [values[index * len(values) // 13] for index in range(1, 13)]
    if isinstance(low, str) or isinstance(high, str):
        return sorted({str(value)[:10] for value in spread} - {low, high})
    span = high - low
    digits = 2 - len(str(int(span))) if span >= 1 else 2
    rounded = {round(value, digits) for value in spread if not isinstance(value, str)}
    return [int(value) if value == int(value) else value for value in sorted(rounded) if low < value < high]


def _where(conditions: list[Condition], rng: random.Random) -> str:
    """All conditions as one phrase, in one of three styles; empty without conditions."""
    if not conditions:
        return ""
    start, link, verb = rng.choice(
        (("whose ", " and whose ", " is "), ("with ", " and ", " "), ("where the ", " and the ", " is "))
    )
    return start + link.join(f"{condition.column.noun}{verb}{condition.words}" for condition in conditions)


def _said(column: Column) -> list[Condition]:
    return [
        Condition(column, f"= {literal(value)}", form, f"= {literal(form)}", literal(value))
        for value, form in sorted(column.said.items(), key=str)
    ]


def _plain(column: Column, operator: str, value: Value, words: str) -> Condition:
    test = f"{operator} {literal(value)}"
    return Condition(column, test, words, test, literal(value))


def _text(column: Column) -> list[Condition]:
    clean = [value for value in column.values if value and str(value).strip() == value]
    return [_plain(column, "=", value, str(value)) for value in clean]


def _amount(column: Column) -> list[Condition]:
    return [
        _plain(column, operator, value, f"{word} {value}")
        for value in thresholds(column.values)
        for operator, words in _AMOUNTS
        for word in words
    ]


def _date(column: Column) -> list[Condition]:
    return [
        _plain(column, operator, value, f"{word} {value}")
        for value in thresholds(column.values)
        for operator, word in ((">", "after"), ("<", "before"))
    ]


def _null(column: Column) -> list[Condition]:
    return [Condition(column, "IS NULL", "missing", "IS NULL", "")]


_CONDITIONS: dict[str, Callable[[Column], list[Condition]]] = {
    "said": _said,
    "text": _text,
    "amount": _amount,
    "date": _date,
    "null": _null,
}


def _is_number(column: Column) -> bool:
    return column.kind == "number" and not column.is_key and not column.said and len(column.values) > 2


def _is_measure(column: Column) -> bool:
    is_name = column.noun.endswith("number") or set(column.noun.split()) & set(_NOT_MEASURED)
    return _is_number(column) and not is_name


def _is_short(column: Column) -> bool:
    longest = max(len(str(value)) for value in column.values)
    return not column.is_key and len(column.values) > 1 and longest <= MAX_LITERAL_LENGTH


_FITS: dict[str, Callable[[Column, Table], bool]] = {
    "said": lambda column, _: 1 < len(column.values) <= MAX_CATEGORIES,
    "text": lambda column, _: column.kind == "text" and not column.said and _is_short(column),
    "amount": lambda column, _: _is_number(column),
    "date": lambda column, _: column.kind == "date" and not column.is_key,
    "null": lambda column, _: column.has_nulls and not column.is_key,
    "column": lambda column, _: not column.is_key,
    "number": lambda column, _: _is_measure(column),
    "total": lambda column, _: _is_measure(column) and not set(column.noun.split()) & set(_NOT_ADDED),
    "short": lambda column, table: _is_short(column) and len(column.values) <= min(50, table.row_count // 2),
    "repeated": lambda column, table: (
        not column.is_key and len(column.values) > 1 and len(column.values) * 4 <= table.row_count * 3
    ),
    "group": lambda column, _: (
        column.kind == "text"
        and _is_short(column)
        and len(column.values) <= MAX_CATEGORIES
        and not column.has_nulls
    ),
}
