"""Values, dates and texts near a literal, which a slightly different condition treats differently."""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache, partial
from itertools import islice
from random import Random
from typing import Any

from text2sql_grpo.sql.outcome import Cell

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_LETTER = re.compile(r"[^\W\d_]")
_INTEGER = re.compile(r"-?\d{1,15}")
_DAYS = (
    *("%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%m/%d/%Y", "%d/%m/%Y", "%m-%d-%Y", "%d-%m-%Y", "%d.%m.%Y"),
    *("%Y%m%d", "%d %B %Y", "%d %b %Y", "%B %d, %Y", "%b %d, %Y", "%d-%b-%Y", "%d-%b-%y", "%m/%d/%y"),
    *("%d-%^b-%Y", "%d-%^b-%y", "%d %^b %Y"),
)
_CLOCK = re.compile(r"(?<=\d)([ T])\d?\d:\d\d(:\d\d)?(\.\d+)?(Z|[+-]\d\d:\d\d)?$")
_PERIOD = re.compile(r"([12]\d{3})(?:-(0[1-9]|1[0-2])?)?")  # a year, or a month of it
_TIME = re.compile(r"(\d\d?)(?::([0-5]\d)(?::([0-5]\d))?)?")
_HOUR = re.compile(r"([01]?\d|2[0-3])(:[0-5]\d){1,2}")
_DAY, _SECOND = timedelta(days=1), timedelta(seconds=1)
_ESCAPED = str.maketrans({"%": "\ue000", "_": "\ue001"})  # signs that are no wildcards of a LIKE pattern
RESHAPED = 8  # texts of a column that are drawn anew
MAX_PLACEHOLDERS = 2  # values of a column of dates that stand for none
DATES_FOR_EACH = 5  # dates at least for each of these values
MAX_READ = 300  # characters of a text that is taken apart
MIN_ALIKE = 3  # texts that show which signs all of a column have
_CLASS = re.compile(r"\[(\^?)(.)(?:-(.))?[^\]]*\]")
_WILDCARD = re.compile(r"(?<![^\W_])_|_(?![^\W_])")  # inside of a word, `_` is meant as itself
_RUN = re.compile(r"[^\W\d_]+|\d+|[\W_]+")
_PADDED = re.compile(r"(?<!\d)0\d")
_PART = re.compile(r"[^\W\d_]+|[^\w\s]")  # a word or a sign
_ANY_DIGITS = re.compile(r"\d{1,15}")
_ANY_NUMBER = re.compile(r"\d+(?:[.]\d+)?")
_WORDS = re.compile(r"[^\W\d_]+(?:[ .,;'-]+[^\W\d_]+)*[.,]?")


def near_values(literal: Cell, alike: Sequence[Cell], *, is_code: bool = False) -> list[Cell]:
    """Values closest to the literal, in the type and format of the values `alike`; no other case of a code.

    >>> near_values(20, alike=[18, 35])
    [19, 21, 10, 40]
    >>> near_values("2014", alike=["2013", "2015"])
    ['2013', '2015']
    >>> near_values("France", alike=["Spain"])
    ['france', 'FRANCE', 'Frances', 'Franc', 'xFrance']
    >>> near_values("12:00", alike=["09:30"])
    ['11:59', '12:01', '11:40', '12:20']
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
    if _NUMBER.fullmatch(text) and is_number_as_text(alike) and any("." in str(value) for value in alike):
        numbers = (n for n in near_values(float(text), [0.5]) if isinstance(n, float))
        return _distinct(text, [*(str(round(n, 9)) for n in numbers), *of_other_lengths(text)])
    if _INTEGER.fullmatch(text):
        width = len(text) if text.startswith("0") else 0
        near_texts: list[Cell] = [str(int(text) + step).zfill(width) for step in (-1, 1)]
        return _distinct(text, near_texts + (of_other_lengths(text) if is_number_as_text(alike) else []))
    if _DATE.match(text):
        form = date_format([text[:10]])
        if form is None:
            return []
        return [day + text[10:] for day in form.around(text[:10], ())[1] if isinstance(day, str)]
    if _HOUR.fullmatch(text):
        hour = ("%H" if text[1].isdecimal() else "%-H") + ":%M:%S"[: 3 * text.count(":")]
        unit = timedelta(minutes=1) if text.count(":") == 1 else _SECOND
        moment = datetime.strptime(text, _readable(hour))
        return _distinct(text, [(moment + n * unit).strftime(hour) for n in (-1, 1, -20, 20)])
    counted = [_ANY_DIGITS.sub(partial(_moved_by, step), text) for step in (-1, 1)]  # 2022/23 next to 2023/24
    cased = [] if is_code else [text.lower(), text.upper()]
    return _distinct(text, [*cased, text + "s", text[:-1], "x" + text, *counted])


def _moved_by(step: int, number: re.Match[str]) -> str:
    """The number, as wide as it was, next to a number in a text."""
    return str(max(int(number[0]) + step, 0)).zfill(len(number[0]))


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
    """Numbers as texts whose order as numbers is not their order as texts; none for another text.

    >>> of_other_lengths("62"), of_other_lengths("inf")
    (['100', '9', '620', '7'], [])
    """
    if not _NUMBER.fullmatch(text):
        return []
    digits = text.lstrip("-").partition(".")[0]
    found = [
        f"1{'0' * len(digits)}",
        "9" * max(len(digits) - 1, 1),
        f"{digits}0",
        str(min(int(digits[0]) + 1, 9)),
    ]
    return list(dict.fromkeys(value for value in found if value != text))


def _distinct(literal: Cell, values: Sequence[Cell]) -> list[Cell]:
    return [value for value in dict.fromkeys(values) if value != literal]


@dataclass(frozen=True)
class DateFormat:
    """Format of a column of dates, perhaps with a time.

    Attributes:
        pattern: As of `strftime`, with `%-d`, `%-m` and `%-H` for numbers that are not padded, `%^b` for JAN.
        kind: Type of the values: text, or an integer such as 20190131.
    """

    pattern: str
    kind: type[str] | type[int]

    @property
    def has_time(self) -> bool:
        return "H" in self.pattern

    def read(self, value: Cell) -> datetime | None:
        """Moment that a value stands for; None unless it has the format."""
        return _read_date(self, value)

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
            exact = [moment, start + _DAY - _SECOND] if self.has_time and moment == start else [moment]
            near = [*(moment + step for step in steps), start, start + _DAY - _SECOND]
            near += [start.replace(month=1, day=1), start.replace(month=12, day=31)]  # in a week of two years
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
            times = [m.replace(**time) for m in moments for time in _times(text)] if self.has_time else []
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

    Up to `MAX_PLACEHOLDERS` values may be none, such as `9999-12-31` and an empty text, beside
    `DATES_FOR_EACH` times as many dates.

    Args:
        values: Distinct values of the column, without NULL.

    >>> date_format(["2020-01-31 10:00", "2021-12-01 09:30"]).pattern
    '%Y-%m-%d %H:%M'
    >>> date_format(["", *(f"2020-01-{day}" for day in range(10, 15))]).pattern
    '%Y-%m-%d'
    >>> date_format([5, 6]) is None
    True
    """
    n_others = min(MAX_PLACEHOLDERS, len(values) // (DATES_FOR_EACH + 1))
    found = (_format_like(value, values, n_others) for value in values[: n_others + 1])
    return next(filter(None, found), None)


def _format_like(value: Cell, values: Sequence[Cell], n_others: int) -> DateFormat | None:
    """Format of a value that all but a few values have."""
    kind, first = type(value), str(value)
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
            unread = (one for one in values if not found.read(one))
            if len(list(islice(unread, n_others + 1))) <= n_others:
                return found
    return None


def reshaped(known: Sequence[Cell], rng: Random) -> list[Cell]:
    """Some known texts, and like ones: a word or number is longer, shorter or another's, or one is added.

    Signs between them stay. So does the length of the n-th word if all texts agree in it, as in a code, but
    not that of a text's only number unless one is padded. Only a text of words gets one more.

    >>> reshaped(["Ann Lee", "Bo Ray"], Random(0))
    ['Bo Ray', 'Boo Ray', 'Bo Bo Ray', 'Ann Lee', 'nn Lee', 'Ann Ann Lee']
    """
    own = [text for text in known if isinstance(text, str) and len(text) <= MAX_READ]
    runs = {text: _RUN.findall(text) for text in own}
    lengths: dict[int, set[int]] = {}
    for parts in runs.values():
        for place, part in enumerate(parts):
            lengths.setdefault(place, set()).add(len(part))
    are_padded = any(part.startswith("0") for parts in runs.values() for part in parts)
    are_codes = all(len(sizes) == 1 and min(sizes) > 4 for sizes in lengths.values())
    are_words = all(_WORDS.fullmatch(text) for text in own)
    found: dict[Cell, None] = {}
    for text in rng.sample(list(runs), min(RESHAPED, len(runs))):
        parts, found[text] = runs[text], None
        numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
        places = [place for place, part in enumerate(parts) if part.isalnum() and len(lengths[place]) > 1]
        places += numbers if len(numbers) == 1 and not are_padded else []
        if places:
            place = rng.choice(places)
            part = parts[place]
            other = rng.choice([part[:-1], part[1:], part + part[-1], part[0] + part])
            found["".join([*parts[:place], other or part, *parts[place + 1 :]])] = None
        for place in numbers:
            digit, part = rng.randrange(len(parts[place])), parts[place]
            lowest = 0 if digit or are_padded or are_codes else 1
            other = f"{part[:digit]}{rng.randint(lowest, 9)}{part[digit + 1 :]}"
            found["".join([*parts[:place], other, *parts[place + 1 :]])] = None
        other_parts = runs[rng.choice(list(runs))]
        if 1 < len(parts) == len(other_parts):
            place = rng.randrange(1, len(parts))
            found["".join([*parts[:place], *other_parts[place:]])] = None
        if len(parts) == len(other_parts) == 1 and len(parts[0]) == len(other_parts[0]) and text.isalpha():
            found[text[0] + other_parts[0][1:]] = None  # PE next to PT and DE
        separator = next((sign for sign in " ,;" if sign in text), "")
        if are_words and separator:
            words = text.split(separator)
            words.insert(rng.randrange(1, len(words)), rng.choice(words[:-1]))
            found[separator.join(words)] = None
    return list(found)


def with_number(number: Cell, known: Sequence[Cell]) -> list[Cell]:
    """Texts of a column such as `90 min` with another number, and ones next to it; none in any other column.

    >>> with_number(60, ["90 min", "45 min"]), with_number(60, ["T-0090", "T-0145"])[:2]
    (['60 min', '59 min', '61 min', '30 min', '120 min'], ['T-0060', 'T-0059'])
    """
    texts = [text for text in known if isinstance(text, str)]
    found = _ANY_NUMBER.findall(texts[0]) if texts else []
    if len(found) != 1 or not isinstance(number, int):
        return []
    width = len(found[0]) if any(_PADDED.search(text) for text in texts) else 0
    numbers = (number, *near_values(number, [number]))
    return [_ANY_NUMBER.sub(str(one).zfill(width), texts[0]) for one in numbers]


def common_parts(texts: Sequence[Cell]) -> dict[str, int]:
    """Words and signs that all texts of a column have, such as the `@` of an address, each with its number.

    >>> common_parts(["ann@mail.com", "bo@mail.co.uk", "cy@mail.org"])
    {'@': 1, 'mail': 1}
    """
    own = [text for text in texts if isinstance(text, str)]
    if len(own) < MIN_ALIKE or max(map(len, own)) > MAX_READ:
        return {}
    counts = [Counter(_PART.findall(text)) for text in own]
    return {part: n for part, n in counts[0].items() if all(one[part] == n for one in counts)}


def shape(texts: Sequence[Cell]) -> tuple[str, ...]:
    """Runs of letters, of digits and of signs that all texts of a column have; empty unless they are codes.

    Of padded codes it is one run, with the kind of each place: their order as texts is that of their numbers.

    >>> shape(["6884 BL", "101 HR", "9580 HK"]), shape(["6884 BL", "101", "9580 HK"])
    (('9', ' ', 'A'), ())
    >>> shape(["T-0090", "T-0145", "T-1002"])
    ('A-9999',)
    """
    own = [text for text in texts if isinstance(text, str)]
    if len(own) < MIN_ALIKE or max(map(len, own)) > MAX_READ:
        return ()
    places = _places(own[0])
    if any(_PADDED.search(text) for text in own) and all(_places(text) == places for text in own):
        return (places,)
    first = _runs(own[0])
    return first if "9" in first and all(_runs(text) == first for text in own) else ()


@lru_cache(maxsize=10_000)
def _read_date(dates: DateFormat, value: Cell) -> datetime | None:
    with suppress(ValueError):
        moment = datetime.strptime(str(value), _readable(dates.pattern))
        if 1000 < moment.year < 3000 and dates.written(moment) == value:
            return moment
    return None


def another_code(texts: Sequence[str], rng: Random) -> str:
    """Text like some of one length, with other letters and digits where they differ.

    >>> another_code(["LIS-07", "LOP-06"], Random(0))
    'LYN-00'
    """
    letters = (string.ascii_uppercase, string.ascii_lowercase, string.digits)
    places = zip(rng.choice(texts), zip(*texts, strict=True), strict=True)
    return "".join(
        sign if len(set(known)) == 1 else rng.choice(next((one for one in letters if sign in one), sign))
        for sign, known in places
    )


def _places(text: str) -> str:
    return "".join("9" if sign.isdecimal() else "A" if sign.isalpha() else sign for sign in text)


def _runs(text: str) -> tuple[str, ...]:
    found = _RUN.findall(text.strip())
    return tuple("9" if run.isdecimal() else "A" if run.isalpha() else run for run in found)


def fitted(
    texts: Sequence[Cell],
    known: Sequence[Cell],
    common: Mapping[str, int],
    runs: tuple[str, ...],
    rng: Random,
) -> list[Cell]:
    """Texts with each sign or word as often as all known texts have it, and with their shape.

    A text that lacks a sign, or has another shape, takes the place of a part of a known one; one that fits
    nowhere is left out.

    >>> fitted(["x.org", "@x.org", "a@b@c", 5], ["ann@mail.com", "bo@mail.com"], {"@": 1}, (), Random(1))
    ['x.org@mail.com', '@x.org', 5]
    >>> fitted(["68", "x68", "6884 CL"], ["6884 BL"], {}, ("9", " ", "A"), Random(1))
    ['68 BL', '768 BL', '6884 CL']
    """

    if not common and not runs:
        return list(texts)

    def fits(text: str) -> bool:
        counts = Counter(_PART.findall(text))
        is_like = not runs or _runs(text) == runs or (_places(text),) == runs
        return is_like and all(counts[part] == n for part, n in common.items())

    own = [text for text in known if isinstance(text, str)]
    found: list[Cell] = []
    for text in texts:
        if not isinstance(text, str) or fits(text):
            found.append(text)
            continue
        if len(text) > MAX_READ:
            continue
        missing = "".join(part for part in common if part not in text and not part.isalnum())
        if runs:
            parts, step = _RUN.findall(rng.choice(own)), 1
        else:
            parts, step = re.split(f"([{re.escape(missing)}])", rng.choice(own)) if missing else [], 2
        options = [
            "".join([*parts[:place], part, *parts[place + 1 :]])
            for part in dict.fromkeys((text, _LETTER.sub("7", text)) if runs else (text,))
            for place in range(0, len(parts), step)
        ]
        found += [rng.choice(fitting)] if (fitting := [option for option in options if fits(option)]) else []
    return found


def secant(
    difference: Callable[[float], float | None], start: float, n_steps: int
) -> tuple[float, float | None]:
    """Number near which a difference is 0, if the secant method finds one, and the difference there."""
    last, number = start, start + 1
    low, high = difference(last), difference(number)
    for _ in range(n_steps):
        if low is None or high is None or high in (0, low):
            break
        last, number, low = number, number - high * (number - last) / (high - low), high
        high = difference(number)
    return number, high


def literally(text: str) -> str:
    """LIKE pattern of a text whose signs cannot be taken for wildcards."""
    return text.translate(_ESCAPED)


def unescaped(pattern: str, escape: str) -> str:
    """LIKE pattern whose escaped signs cannot be taken for wildcards."""
    return re.sub(re.escape(escape) + "(.)", lambda found: found[1].translate(_ESCAPED), pattern)


def like_of(pattern: str) -> str:
    """LIKE pattern of a GLOB pattern, with one sign of each class.

    >>> like_of("*[0-9]?")
    '%4_'
    """
    plain = _CLASS.sub(_sign_of_class, pattern.translate(_ESCAPED))
    return plain.replace("*", "%").replace("?", "_")


def matching_texts(pattern: str) -> list[Cell]:
    """Texts around a LIKE pattern: some match it, some miss it at one end, some between separators.

    >>> matching_texts("%ab%")
    ['ab', 'xab', 'abx', 'xabx', 'AB', 'a', 'axb', 'Ab']
    >>> matching_texts("%,a,%")[-3:]
    ['a', 'a,x', 'x,a']
    """
    core = _WILDCARD.sub("q", pattern.strip("%").replace("%", ""))
    if not core:
        return ["x", "xy"]
    middle = core[: len(core) // 2] + "x" + core[len(core) // 2 :]
    texts = [
        core,
        "x" + core,
        core + "x",
        f"x{core}x",
        core.upper(),
        core.lower(),
        core[:-1],
        middle,
        core.title(),
    ]
    texts.append(re.sub(r"(\d)(?!\d)", r"\g<1>0", core, count=1))  # another number begins so
    if (inner := core.strip(core[-1])) and not core[-1].isalnum():
        texts += [inner, f"{inner}{core[-1]}x", f"x{core[-1]}{inner}"]
    if core.isdecimal():  # a longer number begins with it
        texts += [str(int(core) + 1), str(max(int(core) - 1, 0))]
    for sign, mark in _ESCAPED.items():
        texts = [text.replace(mark, chr(sign)) for text in texts]
    return list(dict.fromkeys(texts))


def inside_codes(pattern: str, known: Sequence[Cell]) -> list[Cell]:
    """Codes of one length with a LIKE pattern's text at the start, in the middle and at the end.

    >>> inside_codes("04%", ["04109", "20095"]), inside_codes("04%", ["04109", "209"])
    (['04095', '20045', '20004'], [])
    """
    core, codes = pattern.strip("%"), [value for value in known if isinstance(value, str)]
    code = next((value for value in codes if core not in value), "")
    if not re.fullmatch(r"[^%_\ue000\ue001]+", core) or {*map(len, codes)} != {len(code)}:
        return []
    last = len(code) - len(core)
    places = sorted({0, (last + 1) // 2, last})
    return [code[:at] + core + code[at + len(core) :] for at in places]


def _sign_of_class(found: re.Match[str]) -> str:
    """Sign of a class such as `[a-z]`: the middle one of its first range."""
    if found[1]:
        return next(sign for sign in "q-5" if sign != found[2])
    return chr((ord(found[2]) + ord(found[3] or found[2])) // 2)
