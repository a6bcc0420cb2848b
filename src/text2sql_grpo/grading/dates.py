"""Columns of dates: their own format, and dates around a literal in it."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from text2sql_grpo.sql.outcome import Cell

_DAYS = (
    *("%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%m/%d/%Y", "%d/%m/%Y", "%m-%d-%Y", "%d-%m-%Y", "%d.%m.%Y"),
    *("%Y%m%d", "%d %B %Y", "%d %b %Y", "%B %d, %Y", "%b %d, %Y", "%d-%b-%Y", "%d-%b-%y", "%m/%d/%y"),
    *("%d-%^b-%Y", "%d-%^b-%y", "%d %^b %Y"),
)
_CLOCK = re.compile(r"(?<=\d)([ T])\d?\d:\d\d(:\d\d)?(\.\d+)?(Z|[+-]\d\d:\d\d)?$")
_PERIOD = re.compile(r"([12]\d{3})(?:-(0[1-9]|1[0-2])?)?")  # a year, or a month of it
_DAY, _SECOND = timedelta(days=1), timedelta(seconds=1)


@dataclass(frozen=True)
class DateFormat:
    """Format of a column in which every value is a date, perhaps with a time.

    Attributes:
        pattern: As of `strftime`, with `%-d`, `%-m` and `%-H` for numbers that are not padded, `%^b` for JAN.
        kind: Type of the values: text, or an integer such as 20190131.
    """

    pattern: str
    kind: type[str] | type[int]

    def read(self, value: Cell) -> datetime | None:
        """Moment that a value stands for; None unless it has the format."""
        with suppress(ValueError):
            moment = datetime.strptime(str(value), _readable(self.pattern))
            if 1000 < moment.year < 3000 and self.written(moment) == value:
                return moment
        return None

    def written(self, moment: datetime) -> Cell:
        """Value that stands for a moment."""
        return self.kind(moment.strftime(self.pattern))

    def around(self, literal: Cell, known: Sequence[Cell]) -> tuple[list[Cell], list[Cell]]:
        """Dates that meet a literal, and dates just beside it; none for a format or a modifier.

        Args:
            literal: A date in this format or as of ISO 8601, or a part of one: its year, month or day.
            known: Values of the column, to move into a year or month.
        """
        text = str(literal).strip("%")
        moments = [moment for moment in map(self.read, known[:3]) if moment]
        day = DateFormat(re.split("[ T]%-?H", self.pattern)[0], self.kind)
        moment = self.read(literal) or day.read(text)
        with suppress(ValueError):
            moment = moment or datetime.fromisoformat(text).replace(tzinfo=None)
        after_day = _readable(self.pattern).partition("%d")[2].strip("-/. ")
        with suppress(ValueError):  # OCT-10 of 23-OCT-10
            if re.match("%[bBm]", after_day):
                text = datetime.strptime(text.strip("-/. "), after_day).strftime("%Y-%m")
        if moment and 1001 < moment.year < 2999:
            start = moment.replace(hour=0, minute=0, second=0, microsecond=0)
            steps = (-_DAY, _DAY, -366 * _DAY, 366 * _DAY, -_SECOND, _SECOND)
            exact = [moment]
            near = [*(moment + step for step in steps), start, start + _DAY - _SECOND]
        elif period := _PERIOD.fullmatch(text):
            year, month = int(period[1]), int(period[2] or 0)
            start = datetime(year, month or 1, 1)
            end = datetime(year + (month in (0, 12)), month % 12 + 1 if month else 1, 1)
            inside = [m.replace(year=year, month=month or m.month, day=1) for m in moments]
            exact = [start, end - _SECOND, *inside]
            near = [start - _SECOND, end, start.replace(year=year + 1)]
        else:
            number = int(text.strip("-")) if re.fullmatch(r"-?\d\d?-?", text) else 0
            exact = [m.replace(month=number, day=1) for m in moments if 0 < number < 13]
            exact += [m.replace(month=1, day=number) for m in moments if 0 < number < 32]
            near = []
        met = dict.fromkeys(map(self.written, exact))
        return list(met), [value for value in dict.fromkeys(map(self.written, near)) if value not in met]


def _readable(pattern: str) -> str:
    """Pattern as `strptime` takes it, which reads numbers and names in any form."""
    return re.sub("%[-^]", "%", pattern)


def date_format(values: Sequence[Cell]) -> DateFormat | None:
    """Format of a column; None unless every value is a date in it.

    Args:
        values: Values of the column, without NULL.

    >>> date_format(["2020-01-31 10:00", "2021-12-01 09:30"]).pattern
    '%Y-%m-%d %H:%M'
    >>> date_format([5, 6]) is None
    True
    """
    kind = type(values[0]) if values else None
    first = str(values[0]) if values else ""
    if (kind is not str and kind is not int) or not 6 <= len(first) <= 40 or not re.search(r"\d", first):
        return None
    clock = _CLOCK.search(first)
    time = ""
    if clock:
        fraction = ".%f" if len(clock[3] or "") == 7 else clock[3] or ""
        time = f"{clock[1]}%H:%M{':%S' if clock[2] else ''}{fraction}{clock[4] or ''}"
    for day in _DAYS:
        short = day.replace("%d", "%-d").replace("%m", "%-m")
        for pattern in (day + time, short + time, short + time.replace("%H", "%-H")):
            found = DateFormat(pattern, kind)
            if all(found.read(value) for value in values):
                return found
    return None
