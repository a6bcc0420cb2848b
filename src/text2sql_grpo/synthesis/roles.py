"""Roles of columns: which questions people would ask about them, by noun and values."""

import re
from typing import Literal

from text2sql_grpo.synthesis.nouns import is_plural, vocabulary

Value = str | int | float
Kind = Literal["number", "date", "text"]

MAX_GROUPS = 24
MAX_TEXT_LENGTH = 60
_DAY = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d+)?)?)?")
_NUMERIC = re.compile(r"[-+\d.,:/ ()$%#*]*")


def roles_of(
    noun: str, kind: Kind, values: tuple[Value, ...], n_rows: int, *, is_key: bool, has_nulls: bool
) -> frozenset[str]:
    """Slots of templates that a column fits, besides those of `drafts._FITS`.

    `label` names a row; `title` and `named` name it alone; `category` is a text that repeats, `kind` one with
    few values; `detail` is worth showing; `measure` can be averaged and ranked, `sum` added up, `range`
    compared with a number; `day` is a date, `blank` has NULLs. Constants, serial numbers and columns with
    another mark for missing values than NULL fit none.
    """
    known = vocabulary()
    words = noun.split()
    is_named = noun in known["names"] or ('"' in noun and kind == "text" and len(values) == n_rows > 2)
    if len(values) < 2 or (is_key and not (is_named and kind == "text")):
        return frozenset()
    if any(str(value).strip().lower() in known["missing"] for value in values):
        return frozenset()
    found = {"blank"} if has_nulls and not is_key else set[str]()
    if kind == "date":
        is_day = all(_DAY.fullmatch(str(value)) for value in values)
        return frozenset(found | ({"day", "detail"} if is_day else set()))
    if kind == "number":
        return frozenset(found | _of_number(noun, values, n_rows))
    texts = [str(value) for value in values]
    if any(text != " ".join(text.split()) or not text.isprintable() or "\\" in text for text in texts):
        return frozenset()
    if max(map(len, texts)) <= MAX_TEXT_LENGTH:
        found |= {"detail"}
    has_numbers = any(map(_NUMERIC.fullmatch, texts))
    if is_named and not has_numbers and not has_nulls:
        found |= {"label"} | ({"title", "named"} if len(texts) == n_rows else set())
    elif not (is_named or has_numbers or is_plural(noun) or set(words) & set(known["contacts"])):
        if len(texts) * 4 <= n_rows * 3:
            found |= {"category"}
        if 2 < len(texts) <= min(MAX_GROUPS, n_rows // 2) and not has_nulls:
            found |= {"kind"}
    return frozenset(found)


def _of_number(noun: str, values: tuple[Value, ...], n_rows: int) -> set[str]:
    """Roles of a column of numbers."""
    known = vocabulary()
    words = noun.split()
    numbers = [value for value in values if not isinstance(value, str)]
    is_whole = all(number == int(number) for number in numbers)
    is_serial = (
        is_whole and numbers[0] in (0, 1) and numbers[-1] - numbers[0] == n_rows - 1 == len(numbers) - 1
    )
    if is_serial or len(numbers) < 3:
        return set()
    if '"' in noun and is_whole and len({len(str(number)) for number in numbers}) == 1 and numbers[0] > 999:
        return {"detail"}  # a name that was not read may be that of a code
    is_year = is_whole and numbers[0] >= 1500 and numbers[-1] <= 2100
    if "year" in words and is_year:
        return {"detail", "range"}
    is_count = noun.startswith("number of ")
    is_code = not is_count and (words[-1] in known["codes"] or set(words) & set(known["code_words"]))
    if is_code or is_year:
        return {"detail"} if not is_year else set()
    found = {"detail", "range"} | (
        {"measure"} if words[0] not in known["no_sums"] or len(words) == 1 else set()
    )
    is_sum = is_count or set(words) & set(known["sums"])
    return found | ({"sum"} if is_sum and not set(words) & set(known["no_sums"]) else set())
