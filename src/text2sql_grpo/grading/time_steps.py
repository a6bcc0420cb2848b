"""Steps in time by which a query moves moments: `INTERVAL '30 days'`, or a number of days."""

import re
from calendar import monthrange
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random

from text2sql_grpo.grading.near_values import DateFormat, date_format
from text2sql_grpo.sql.outcome import Cell

_PART = re.compile(r"(-?\d{1,9}(?:\.\d{1,9})?)\s*([a-z]+)", re.IGNORECASE)
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
OF_PARTS = [Step(months=12), Step(months=120), Step(seconds=18_000.0)]


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
    seconds = rng.choice([0, 0, 0, -1, 1, 43_200])  # whole days of a distance leave out half a day
    beside = timedelta(seconds=seconds, days=rng.choice([0, 0, 0, -1, 1]))
    named = [step for step in steps if step not in OF_PARTS]
    some = named if named and rng.random() < 0.5 else [*steps, Step()]
    with suppress(ValueError, OverflowError):
        step = rng.choice(some)
        return dates.written(step.from_moment(moment, rng.choice([-1, 1])) + beside)
    return None
