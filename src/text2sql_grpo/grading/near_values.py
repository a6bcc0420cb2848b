"""Values near a literal of a query, which a slightly different condition would treat differently."""

import re
from collections.abc import Sequence

from text2sql_grpo.grading.dates import date_format
from text2sql_grpo.sql.outcome import Cell

ESCAPED = {"%": "\ue000", "_": "\ue001"}  # wildcards that a LIKE pattern escapes
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_INTEGER = re.compile(r"-?\d{1,15}")


def near_values(literal: Cell, alike: Sequence[Cell]) -> list[Cell]:
    """Values just beside the literal, in the type and format of the values `alike`.

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
        return _distinct(typed, [*near, typed - 0.25, typed + 0.25])  # round() moves a half up, these back
    if isinstance(typed, bytes):
        return [typed + b"\x00", typed[:-1]]
    text = str(typed)
    if _INTEGER.fullmatch(text):
        near_texts = [_padded(int(text) - 1, text), _padded(int(text) + 1, text)]
        return _distinct(text, near_texts + (of_other_lengths(text) if is_number_as_text(alike) else []))
    if _DATE.match(text):
        form = date_format([text[:10]])
        if form is None:
            return []
        return [day + text[10:] for day in form.around(text[:10], ())[1] if isinstance(day, str)]
    return _distinct(text, [text.lower(), text.upper(), text + "s", text[:-1], "x" + text])


def matching_texts(pattern: str) -> list[Cell]:
    """Texts around a LIKE pattern: some match it, some miss it at one end.

    >>> matching_texts("%ab%")
    ['ab', 'xab', 'abx', 'xabx', 'AB', 'a', 'axb']
    """
    core = pattern.strip("%*").replace("%", "").replace("*", "").replace("_", "q").replace("?", "q")
    if not core:
        return ["x", "xy"]
    middle = core[: len(core) // 2] + "x" + core[len(core) // 2 :]
    for wildcard, mark in ESCAPED.items():
        core, middle = core.replace(mark, wildcard), middle.replace(mark, wildcard)
    texts = [core, "x" + core, core + "x", f"x{core}x", core.upper(), core[:-1], middle]
    return list(dict.fromkeys(texts))


def as_column_value(literal: Cell, alike: Sequence[Cell]) -> Cell:
    """Convert the literal to the type of a column's values; None if the column would not hold such a value.

    >>> as_column_value(3, alike=["1", "2"]), as_column_value("x", alike=[1, 2])
    ('3', None)
    """
    kinds = {type(value) for value in alike if value is not None}
    if not kinds or type(literal) in kinds:
        if isinstance(literal, int) and float in kinds:
            return float(literal)
        return literal
    if isinstance(literal, int | float):
        if float in kinds:
            return float(literal)
        if int in kinds:
            return int(literal)
        return (
            str(literal) if any(_NUMBER.fullmatch(text) for text in alike if isinstance(text, str)) else None
        )
    if isinstance(literal, str) and kinds & {int, float} and _INTEGER.fullmatch(literal):
        return float(literal) if float in kinds else int(literal)
    return None


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


def _padded(number: int, like: str) -> str:
    return str(number).zfill(len(like)) if like.startswith("0") else str(number)


def _distinct(literal: Cell, values: Sequence[Cell]) -> list[Cell]:
    return [value for value in dict.fromkeys(values) if value != literal]
