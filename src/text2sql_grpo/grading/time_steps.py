"""Steps in time by which a query moves moments: `INTERVAL '30 days'`, or a number of days."""

import re
from calendar import monthrange
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random

from sqlglot import exp

from text2sql_grpo.grading.near_values import DateFormat, date_format
from text2sql_grpo.grading.query_columns import COMPARISONS, ColumnRef, columns_among, inside
from text2sql_grpo.sql.outcome import Cell

_PART = re.compile(r"(-?\d{1,9}(?:\.\d{1,9})?)\s*([a-z]+)", re.IGNORECASE)
_MODIFIER = re.compile(r"[-+]?\d{1,9}(\.\d{1,9})?\s*[a-z]{1,9}", re.IGNORECASE)  # of SQLite's date functions
_NUMBER = re.compile(r"[0-9]{1,4}")
_MONTHS = {"y": 12, "q": 3, "mon": 1}
_SECONDS = {"w": 604_800, "d": 86_400, "h": 3_600, "min": 60, "s": 1}


@dataclass(frozen=True)
class Step:
    """Months and seconds, which are added one after the other."""

    months: int = 0
    seconds: float = 0.0

    def from_moment(self, moment: datetime, sign: int) -> datetime:
        """The moment moved by the step, forwards or, with -1, backwards; its day at most the month's last.

        >>> Step(months=1).from_moment(datetime(2023, 3, 31), -1)
        datetime.datetime(2023, 2, 28, 0, 0)

        Raises:
            OverflowError, ValueError: Out of the range of dates.
        """
        year, month = divmod(moment.year * 12 + moment.month - 1 + sign * self.months, 12)
        day = min(moment.day, monthrange(year, month + 1)[1])
        return moment.replace(year, month + 1, day) + sign * timedelta(seconds=self.seconds)

    def modifiers(self, sign: int) -> list[str]:
        """The step, or with -1 that backwards, for SQLite's `datetime`.

        >>> Step(months=1, seconds=60.0).modifiers(-1)
        ['-1 MONTHS', '-60 SECONDS']
        """
        parts = {"MONTHS": self.months, "SECONDS": self.seconds}
        return [f"{sign * number:+.0f} {unit}" for unit, number in parts.items() if number]


# Moments so far apart are alike in a part, such as the month, and not as a whole.
_OF_PARTS = [Step(months=12), Step(months=120), Step(seconds=18_000.0)]
_DISTANCES = (exp.DateDiff, exp.TsOrDsDiff, exp.Anonymous)  # `date_sub`, `age`
_PARTS = (
    *(exp.Extract, exp.DateTrunc, exp.TimestampTrunc, exp.Date, exp.TsOrDsToDate, exp.Cast, exp.TimeToStr),
    *(exp.Year, exp.Quarter, exp.Month, exp.Week, exp.WeekOfYear, exp.Day, exp.Hour, exp.Substring, exp.Left),
)


def read_step(text: str) -> Step | None:
    """Step that a text stands for; None if it is none.

    >>> read_step("1 day 2 hours"), read_step("10 YEARS"), read_step("soon")
    (Step(months=0, seconds=93600.0), Step(months=120, seconds=0.0), None)
    """
    months, seconds = 0.0, 0.0
    for number, unit in _PART.findall(text):
        in_months = next((n for start, n in _MONTHS.items() if unit.lower().startswith(start)), 0)
        in_seconds = next((n for start, n in _SECONDS.items() if unit.lower().startswith(start)), 0)
        months += float(number) * in_months
        seconds += 0 if in_months else float(number) * in_seconds
    return Step(round(months), seconds) if months or seconds else None


def stepped(dates: DateFormat, value: Cell, steps: Sequence[Step], rng: Random) -> Cell:
    """A date one of the steps away from another date of any format, or next to it; None if there is none."""
    known = None if value is None else date_format([value])
    moment = known.read(value) if known else None
    if moment is None:
        return None
    beside = timedelta(seconds=rng.choice([0, 0, 0, -1, 1]), days=rng.choice([0, 0, 0, -1, 1]))
    with suppress(ValueError, OverflowError):
        step = rng.choice([*steps, Step()])
        return dates.written(step.from_moment(moment, rng.choice([-1, 1])) + beside)
    return None


def steps_in(
    tree: exp.Query, columns_of: Mapping[int, ColumnRef]
) -> Iterator[tuple[list[ColumnRef], list[Step], list[str]]]:
    """Columns of each comparison with steps, the steps, and the moments next to them, moved by each.

    Then columns of which a part is taken, such as the month.
    """
    for node in tree.find_all(*COMPARISONS):
        below = list(inside(node))
        columns = columns_among(below, columns_of)
        texts = [
            f"{part.this.name} {part.text('unit')}"
            for part in below
            if isinstance(part, exp.Interval) and part.this
        ]
        literals = [part.name for part in below if isinstance(part, exp.Literal) and part.is_string]
        texts += [text for text in literals if _MODIFIER.fullmatch(text)]
        if any(isinstance(part, (exp.Add, exp.Sub, *_DISTANCES)) for part in below):
            numbers = [part.name for part in below if isinstance(part, exp.Literal) and not part.is_string]
            texts += [f"{n} {unit}" for n in numbers if _NUMBER.fullmatch(n) for unit in _units(below)]
        steps = [step for step in map(read_step, texts) if step]
        columns = columns or list(columns_of.values())  # the distance is computed elsewhere, by lag() say
        if steps:
            yield columns, steps, [moved for text in literals for moved in _moved(text, steps)]
    for part in tree.find_all(*_PARTS):
        yield columns_among(part.find_all(exp.Column), columns_of), _OF_PARTS, []


def _units(parts: Sequence[exp.Expr]) -> list[str]:
    """Units in which a comparison may measure a distance in time."""
    named = [part.text("unit") for part in parts if isinstance(part, exp.DateDiff | exp.TsOrDsDiff)]
    is_in_seconds = any(isinstance(part, exp.Extract | exp.TimeToUnix | exp.Anonymous) for part in parts)
    return [*filter(None, named), *(("seconds", "minutes", "hours") if is_in_seconds else ())] or ["days"]


def _moved(text: str, steps: list[Step]) -> Iterator[str]:
    with suppress(ValueError, OverflowError):
        moment = datetime.fromisoformat(text).replace(tzinfo=None)
        for step in steps:
            for sign in (-1, 1):
                yield str(step.from_moment(moment, sign))
