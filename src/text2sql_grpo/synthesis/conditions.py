"""Conditions of a question on a column, in SQL and in words."""

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import MAXYEAR, date, timedelta
from itertools import chain

from text2sql_grpo.synthesis.nouns import is_plural, vocabulary, with_article
from text2sql_grpo.synthesis.profile import Value
from text2sql_grpo.synthesis.roles import plain_text
from text2sql_grpo.synthesis.words import Column
from text2sql_grpo.synthesis.words_file import HOLE

_AMOUNTS = {
    ">": ("above", "greater than", "more than", "over"),
    "<": ("below", "less than", "under"),
    ">=": ("at least",),
    "<=": ("at most",),
}
_COUNTS = _AMOUNTS | {">": ("more than",), "<": ("fewer than",)}
_YEARS = {">": ("after",), "<": ("before",)}
_ONE_DAY = timedelta(days=1)
_IS_NULL = "IS NULL"
_MISSING = ("missing", "not recorded", "unknown", "not known")
MAX_QUOTED_LENGTH = 40
COLUMN = "\0"
_UNQUOTED = re.compile('"| [?.,]')  # no sentence keeps them as they are
_Test = tuple[str, str]  # SQL behind the column, and words


@dataclass(frozen=True)
class Condition:
    """A test of one column: `> 20` in SQL, `above 20` in words.

    Attributes:
        test: SQL text behind the column, with `COLUMN` where it names the column once more.
        value: The value as people say it; for a bound, a date or a pattern the same as `words`.
        words: Text behind "whose salary is"; empty for flags.
        phrases: Texts behind the plural of the row's noun: "with a salary above 20".
        verb: Verb between the noun and `words`.
    """

    column: Column
    test: str
    value: str
    words: str
    phrases: tuple[str, ...]
    verb: str = "is "

    @property
    def literal(self) -> str:
        """SQL literal of the value; empty for IS NULL."""
        return "" if self.test == _IS_NULL else self.test.partition(" ")[2]


def in_words(
    conditions: Sequence[Condition], rng: random.Random, *, owners: Sequence[str] | None = None
) -> str:
    """All conditions as one phrase, in one of three styles; empty without conditions.

    With `owners`, words before each column such as "customer's ", in the style of "whose" where a condition
    has words for it, and a value no phrases of its own.
    """
    if not conditions:
        return ""
    if owners is not None:
        pairs = zip(owners, conditions, strict=True)
        return " and ".join(_owned(owner, each, rng) for owner, each in pairs)
    style = rng.choice(("phrase", "phrase", "phrase", "whose", "whose", "where"))
    if style == "phrase" or not all(condition.words for condition in conditions):
        return " and ".join(rng.choice(condition.phrases) for condition in conditions)
    start, link = ("whose ", " and whose ") if style == "whose" else ("where the ", " and the ")
    return start + link.join(f"{condition.column.noun} is {condition.words}" for condition in conditions)


def _owned(owner: str, condition: Condition, rng: random.Random) -> str:
    noun = condition.column.noun
    has_own_phrases = bool(condition.column.clauses.get("")) and condition.test.startswith("= ")
    if not condition.words or (has_own_phrases and not owner):
        return rng.choice(condition.phrases)
    verb = "are " if condition.verb and is_plural(noun) else condition.verb
    start = owner if owner.startswith("with ") else f"whose {owner}"
    return f"{start}{noun} {verb}{condition.words}"


def is_calendar_day(text: str) -> bool:
    """True for a day of the calendar as `YYYY-MM-DD`, but not for the last year that Python can count.

    Databases mark missing days by the first and last ones that they can store.

    >>> [is_calendar_day(text) for text in ("2023-05-03", "2023-02-30", "20230503", "9999-12-31")]
    [True, False, False, False]
    """
    try:
        day = date.fromisoformat(text)
    except ValueError:
        return False
    return str(day) == text and day.year < MAXYEAR  # Python reads other forms too


def day_words(day: str) -> str:
    """Day in words.

    >>> day_words("2023-05-03")
    '3 May 2023'
    """
    parsed = date.fromisoformat(day[:10])
    return f"{parsed.day} {month_words(day)}"


def month_words(day: str) -> str:
    """Month of a day in words.

    >>> month_words("2023-05-03")
    'May 2023'
    """
    names = "January February March April May June July August September October November December"
    return f"{names.split()[int(day[5:7]) - 1]} {day[:4]}"


def literal(value: Value) -> str:
    """SQL literal of a value.

    >>> literal("O'Neil"), literal(3)
    ("'O''Neil'", '3')
    """
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


def thresholds(values: tuple[Value, ...]) -> list[Value]:
    """At most 12 values spread over a sorted column, numbers rounded as people would, moments as their days.

    >>> thresholds((3.21, 47.9, 212.5, 480.0))
    [50, 210]
    """
    low, high = values[0], values[-1]
    spread = [values[index * len(values) // 13] for index in range(1, 13)]
    if isinstance(low, str) or isinstance(high, str):
        days = {str(value)[:10] for value in spread} - {low, high}
        return sorted(day for day in days if is_calendar_day(day))
    span = high - low
    digits = 2 - len(str(int(span))) if span >= 1 else 2
    rounded = {round(value, digits) for value in spread if not isinstance(value, str)}
    return [int(value) if value == int(value) else value for value in sorted(rounded) if low < value < high]


def without_unit(noun: str) -> str:
    """Noun of a measure without its unit.

    >>> without_unit("length in metres"), without_unit("fee")
    ('length', 'fee')
    """
    return noun.partition(" in ")[0]


def superlatives(column: Column) -> tuple[str, str]:
    """Words for the most and the least of a column: "highest" and "lowest"."""
    if column.kind == "date":
        return "latest", "earliest"
    is_size = set(column.noun.split()) & set(vocabulary()["sizes"])
    return ("greatest", "smallest") if is_size else ("highest", "lowest")


def _phrases(column: Column, words: str) -> tuple[str, ...]:
    """Phrases of a column about a value or a test in words."""
    return tuple(phrase.replace(HOLE, words) for phrase in column.clauses.get("", ()))


def _said(column: Column) -> list[Condition]:
    return [
        Condition(
            column,
            f"= {literal(value)}",
            form,
            "" if form in column.clauses else form,
            column.clauses.get(form) or _phrases(column, form) or (f"with the {column.noun} {form}",),
        )
        for value, form in sorted(column.said.items(), key=str)
    ]


def _text(column: Column) -> list[Condition]:
    clean = [str(value) for value in column.values if value and str(value).strip() == value]
    return [
        _plain(column, f"= {literal(value)}", value, f"with the {column.noun} {value}") for value in clean
    ]


def _plain(column: Column, test: str, words: str, *phrases: str) -> Condition:
    """Condition whose value is quoted as stored; phrases are the column's own, else the given ones."""
    return Condition(column, test, words, words, _phrases(column, words) or phrases)


def _amount(column: Column) -> list[Condition]:
    is_count = column.noun.startswith("number of ")
    operators = _YEARS if "year" in column.noun.split() else _COUNTS if is_count else _AMOUNTS
    return [
        _plain(column, f"{operator} {value}", f"{word} {value}", _with(column.noun, word, value))
        for value in thresholds(column.values)
        for operator, words in operators.items()
        for word in words
    ]


def _range(column: Column) -> list[Condition]:
    """Amounts, with "is less than 3" instead of "is fewer than 3"."""
    return [replace(each, words=each.words.replace("fewer", "less")) for each in _amount(column)]


def _with(noun: str, word: str, value: Value) -> str:
    """An amount in words.

    >>> _with("number of desks", "fewer than", 9), _with("age in years", "above", 5), _with("fee", "below", 3)
    ('with fewer than 9 desks', 'with an age above 5 years', 'with a fee below 3')
    """
    if noun.startswith("number of ") and value != 1:
        return f"with {word} {value} {noun.removeprefix('number of ')}"
    measure, _, unit = noun.partition(" in ")
    joint = "of " if word in ("more than", "less than", "at least", "at most") else ""
    return f"with {with_article(measure)} {joint}{word} {value} {unit}".rstrip()


def _date(column: Column) -> list[Condition]:
    """Conditions on days, months and years, test by test; LIKE selects parts of a text."""
    days, periods = _calendar(column, is_text=True)
    tests = [*chain.from_iterable(zip(*days, strict=True)), *periods]
    article = f"with {with_article(column.noun)}"
    return [_plain(column, test, words, f"{article} {words}") for test, words in tests]


def _day(column: Column) -> list[Condition]:
    """Conditions on days, months and years, which read the same for texts, dates and moments."""
    days, periods = _calendar(column, is_text=False)
    return [_plain(column, test, words) for test, words in [*chain.from_iterable(days), *periods]]


def _calendar(column: Column, *, is_text: bool) -> tuple[list[list[_Test]], list[_Test]]:
    """Tests of each day with their words, and tests of months and years."""

    def within(first: date, end: date, text: str) -> str:
        return f"LIKE '{text}%'" if is_text else f">= '{first}' AND {COLUMN} < '{end}'"

    days = [date.fromisoformat(str(value)) for value in thresholds(column.values)]
    is_day = all(len(str(value)) == 10 for value in column.values)
    by_day, periods = [], []
    for day in days:
        said, next_day = day_words(str(day)), day + _ONE_DAY
        after = f"> '{day}'" if is_day else f">= '{next_day}'"
        on = f"= '{day}'" if is_day else within(day, next_day, str(day))
        tests = [(after, f"after {said}"), (f"< '{day}'", f"before {said}")]
        tests += [(f">= '{day}'", f"on or after {said}"), (on, f"on {said}" if is_text else said)]
        by_day.append(tests)
    for month in sorted({day.replace(day=1) for day in days}):
        end = (month + 31 * _ONE_DAY).replace(day=1)
        periods.append((within(month, end, str(month)[:8]), f"in {month_words(str(month))}"))
    for year in sorted({day.replace(month=1, day=1) for day in days}):
        end = year.replace(year=year.year + 1)
        periods.append((within(year, end, str(year)[:5]), f"in {year.year}"))
    return by_day, periods


def _null(column: Column) -> list[Condition]:
    noun = without_unit(column.noun)
    phrases = (f"with no {noun} on record", f"without {with_article(noun)} on record")
    return [Condition(column, _IS_NULL, "", words, phrases) for words in _MISSING]


def _category(column: Column) -> list[Condition]:
    if column.roles & {"boolean", "flag"}:
        literals = ("TRUE", "FALSE") if "boolean" in column.roles else ("1", "0")
        return [_plain(column, f"= {literals[0]}", "true"), _plain(column, f"= {literals[1]}", "false")]
    if column.kind != "number":
        return _quoted(column)
    return [_plain(column, f"= {int(value)}", str(int(value))) for value in column.values]


def _quoted(column: Column) -> list[Condition]:
    """Texts in quotes, those that a question can quote as they are."""
    return [
        replace(each, words=f'"{each.value}"', phrases=_phrases(column, f'"{each.value}"') or each.phrases)
        for each in _text(column)
        if len(each.value) <= MAX_QUOTED_LENGTH
        and not _UNQUOTED.search(each.value)
        and each.value == plain_text(each.value)
    ]


def _named(column: Column) -> list[Condition]:
    """Names of one row each."""
    return [condition for condition in _quoted(column) if condition.value not in column.repeated]


def _pattern(column: Column) -> list[Condition]:
    """First letters and words, where LIKE and the case of letters agree."""
    text = "\n".join(map(str, column.values))
    firsts = {str(value)[0] for value in column.values}
    tests = [
        (f"{first}%", f'starts with "{first}"') for first in sorted(firsts) if first.swapcase() not in firsts
    ]
    found = Counter(re.findall(r"[^\W\d_]{4,}", text))
    words = sorted(word for word, count in found.items() if count > 1)
    tests += [
        (f"%{word}%", f'contains "{word}"')
        for word in words[:: 1 + len(words) // 100]
        if text.count(word) == text.lower().count(word.lower())
    ]
    return [replace(_plain(column, f"LIKE {literal(test)}", said), verb="") for test, said in tests]


CONDITIONS: dict[str, Callable[[Column], list[Condition]]] = {
    "said": _said,
    "text": _text,
    "amount": _amount,
    "date": _date,
    "null": _null,
    "category": _category,
    "named": _named,
    "range": _range,
    "day": _day,
    "pattern": _pattern,
    "blank": _null,
}
"""Slot of a template -> every condition that fits it on a column."""
