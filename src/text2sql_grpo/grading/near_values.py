"""Values and dates near a literal of a query, which a slightly different condition treats differently."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from text2sql_grpo.sql.outcome import Cell

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_INTEGER = re.compile(r"-?\d{1,15}")
_DAYS = (
    *("%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%m/%d/%Y", "%d/%m/%Y", "%m-%d-%Y", "%d-%m-%Y", "%d.%m.%Y"),
    *("%Y%m%d", "%d %B %Y", "%d %b %Y", "%B %d, %Y", "%b %d, %Y", "%d-%b-%Y", "%d-%b-%y", "%m/%d/%y"),
    *("%d-%^b-%Y", "%d-%^b-%y", "%d %^b %Y"),
)
_CLOCK = re.compile(r"(?<=\d)([ T])\d?\d:\d\d(:\d\d)?(\.\d+)?(Z|[+-]\d\d:\d\d)?$")
_PERIOD = re.compile(r"([12]\d{3})(?:-(0[1-9]|1[0-2])?)?")  # a year, or a month of it
_TIME = re.compile(r"(\d\d?)(?::([0-5]\d)(?::([0-5]\d))?)?")
_DAY, _SECOND = timedelta(days=1), timedelta(seconds=1)


def near_values(literal: Cell, alike: Sequence[Cell]) -> list[Cell]:
    """Values closest to the literal, in the type and format of the values `alike`.

    >>> near_values(20, alike=[18, 35])
    [19, 21, 10, 40]
    >>> near_values("2014", alike=["2013", "2015"])
    ['2013', '2015']
    >>> near_values("France", alike=["Spain"])
    ['france', 'FRANCE', 'Frances', 'Franc', 'xFrance']
    """
    typed = as_column_value(literal, alike)
    if typed is None:
        return []
    if isinstance(typed, int):
        return _distinct(typed, [typed - 1, typed + 1, typed // 2, typed * 2])
    if isinstance(typed, float):
        near = [typed - 1, typed - 0.5, typed + 0.5, typed + 1, typed * 0.9, typed * 1.1]
        near += [typed - 0.25, typed + 0.25]  # round() moves a half up, these back
        grain = 10.0 ** -len(str(typed).partition(".")[2].rstrip("0"))
        near += [round(typed - grain / 25, 9), round(typed + grain / 25, 9)]  # of a digit more
        return _distinct(typed, near)
    if isinstance(typed, bytes):
        return [typed + b"\x00", typed[:-1]]
    text = str(typed)
    if _INTEGER.fullmatch(text):
        width = len(text) if text.startswith("0") else 0
        near_texts: list[Cell] = [str(int(text) + step).zfill(width) for step in (-1, 1)]
        return _distinct(text, near_texts + (of_other_lengths(text) if is_number_as_text(alike) else []))
    if _DATE.match(text):
        form = date_format([text[:10]])
        if form is None:
            return []
        return [day + text[10:] for day in form.around(text[:10], ())[1] if isinstance(day, str)]
    return _distinct(text, [text.lower(), text.upper(), text + "s", text[:-1], "x" + text])


def as_column_value(literal: Cell, alike: Sequence[Cell]) -> Cell:
    """Convert the literal to the type of a column's values; None if the column would not hold such a value.

    >>> as_column_value(3, alike=["1", "2"]), as_column_value("x", alike=[1, 2])
    ('3', None)
    """
    kinds = {type(value) for value in alike if value is not None}
    if not kinds:
        return literal
    if isinstance(literal, str) and str not in kinds and _INTEGER.fullmatch(literal):
        literal = int(literal)
    if isinstance(literal, int | float) and float in kinds:
        return float(literal)
    if type(literal) in kinds:
        return literal
    if not isinstance(literal, int | float):
        return None
    if int in kinds:
        return int(literal)
    has_numbers = any(_NUMBER.fullmatch(text) for text in alike if isinstance(text, str))
    return str(literal) if has_numbers else None


def is_number_as_text(values: Sequence[Cell]) -> bool:
    """True if a column holds numbers as texts of any length: none padded, and not all years.

    >>> [is_number_as_text(values) for values in (["62", "88"], ["007", "010"], ["2013", "2015"])]
    [True, False, False]
    """
    texts = [value for value in values if isinstance(value, str)]
    found = [_NUMBER.fullmatch(text) for text in texts]
    if not texts or not all(found) or any(re.match(r"-?0\d", text) for text in texts):
        return False
    is_code = len(set(map(len, texts))) == 1 and len(texts[0]) > 4
    return not is_code and not all(re.fullmatch(r"1\d{3}|20\d\d", text) for text in texts)


def of_other_lengths(text: str) -> list[Cell]:
    """Numbers as texts whose order as numbers is not their order as texts.

    >>> of_other_lengths("62")
    ['100', '9', '620', '7']
    """
    n_digits = len(text.lstrip("-").partition(".")[0])
    first = int(text.lstrip("-")[0])
    found = [
        f"1{'0' * n_digits}",
        "9" * max(n_digits - 1, 1),
        f"{first}{'0' * n_digits}",
        str(min(first + 1, 9)),
    ]
    if n_digits > 1:
        found[2] = f"{text.lstrip('-').partition('.')[0]}0"
    return list(dict.fromkeys(value for value in found if value != text))


def _distinct(literal: Cell, values: Sequence[Cell]) -> list[Cell]:
    return [value for value in dict.fromkeys(values) if value != literal]


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
        """Dates that meet a literal, and dates closest to it; none for a format or a modifier.

        Args:
            literal: A date in this format or as of ISO 8601, a part of one, or a time of day.
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
            near = [m.replace(year=m.year + 1) for m in exact]
            near += [m.replace(month=number % 12 + 1) for m in exact]
            exact += [m.replace(month=1, day=number) for m in moments if 0 < number < 32]
            has_time = "H" in self.pattern
            times = [m.replace(**time) for m in moments for time in _times(text)] if has_time else []
            exact += times
            near += [moment + step for moment in times for step in (-_SECOND, _SECOND)]
        met = dict.fromkeys(map(self.written, exact))
        return list(met), [value for value in dict.fromkeys(map(self.written, near)) if value not in met]


def _times(text: str) -> list[dict[str, Any]]:
    """Times that meet a time of day, or a number as an hour or as minutes; as arguments of `replace`.

    >>> _times("15:30")
    [{'hour': 15, 'minute': 30, 'second': 0, 'microsecond': 0}]
    >>> [(time.get("hour"), time["minute"]) for text in ("18", "45") for time in _times(text)]
    [(18, 0), (18, 59), (None, 18), (None, 45)]
    """
    found = _TIME.fullmatch(text)
    if found is None:
        return []
    first, minute, second = int(found[1]), int(found[2] or 0), int(found[3] or 0)
    times: list[dict[str, Any]] = []
    if first < 24:
        times.append({"hour": first, "minute": minute, "second": second})
    if first < 24 and not found[2]:
        times.append({"hour": first, "minute": 59, "second": 59})
    if first < 60 and not found[2]:
        times.append({"minute": first, "second": 0})
    return [time | {"microsecond": 0} for time in times]


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
