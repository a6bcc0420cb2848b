"""Roles of columns: which questions people would ask about them, by noun and values."""

import re

from text2sql_grpo.synthesis.nouns import is_english, is_plural, vocabulary, words_of
from text2sql_grpo.synthesis.profile import MAX_VALUES, Values

MAX_GROUPS = 24
MAX_TEXT_LENGTH = 60
# A moment with a time zone is one of UTC, in which every query runs.
_DAY = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|\+00(:?00)?)?)?")
_NUMERIC = re.compile(r"[-+\d.,:/ ()$%#*]*")


def roles_of(
    noun: str, found: Values, n_rows: int, *, is_key: bool, is_named: bool = False
) -> frozenset[str]:
    """Slots of templates that a column fits, besides those of `candidates._fits`.

    `label` names a row, mostly alone, `title` always alone, and `named` is the name of some rows alone;
    `category` is a text or code that repeats, `kind` one with few values; `detail` is worth showing;
    `measure` can be averaged and ranked, `sum` added up, `range` compared with a number; `day` is a date,
    `blank` has NULLs.
    (`words` adds `boolean`, of a declared type, and `flag`, of 0 and 1: categories that are true or false.)
    Constants, serial numbers and columns with another mark for missing values than NULL fit none.

    Args:
        n_rows: Number of rows that the values were read from.
        is_key: True for a part of a primary or foreign key.
        is_named: True if it names the rows by its values; see `names_rows`.
    """
    known = vocabulary()
    words = words_of(noun) or [noun]
    values = found.values
    is_name = words[-1] in ("name", "title") or noun in known["names"]
    is_named = is_named or is_name or ('"' in noun and found.kind == "text" and found.is_unique)
    if len(values) < 2 or (is_key and not (is_name and found.kind == "text")):
        return frozenset()
    # A mark for missing values repeats: a single show may be called "Unknown".
    if not found.is_unique and any(str(value).strip().lower() in known["missing"] for value in values):
        return frozenset()
    roles = {"blank"} if found.has_nulls and not is_key else set[str]()
    if found.kind == "date":
        is_day = all(_DAY.fullmatch(str(value)) for value in values)
        return frozenset(roles | ({"day", "detail"} if is_day else set()))
    if found.kind == "number":
        return frozenset(roles | _of_number(noun, words, found, n_rows))
    texts = [str(value) for value in values]
    few = len(texts) // 10
    if sum(text != plain_text(text) for text in texts) > few:
        return frozenset()
    if sum(len(text) > MAX_TEXT_LENGTH for text in texts) <= few:
        roles |= {"detail"}
    has_numbers = sum(bool(_NUMERIC.fullmatch(text)) for text in texts) > few
    if is_named and not has_numbers and "detail" in roles:
        if found.repeated is not None and len(found.repeated - {None}) * 5 <= len(texts):
            roles |= {"named"}
        if not found.has_nulls and len(texts) * 2 >= min(n_rows, MAX_VALUES):
            roles |= {"label"} | ({"title", "named"} if found.is_unique else set())
    elif not (is_named or has_numbers or is_plural(noun) or set(words) & set(known["contacts"])):
        if len(texts) * 4 <= n_rows * 3:
            roles |= {"category"}
        if 2 < len(texts) <= min(MAX_GROUPS, n_rows // 2) and not found.has_nulls:
            roles |= {"kind"}
    return frozenset(roles)


def names_rows(found: Values) -> bool:
    """True for texts that differ from row to row, at most a tenth of them with a digit, as codes have."""
    with_digits = sum(bool(re.search(r"\d", str(value))) for value in found.values)
    return found.kind == "text" and found.is_unique and with_digits * 10 <= len(found.values)


def plain_text(text: str) -> str:
    """A text as a question can quote it: without odd blanks, and with characters that can be seen.

    >>> plain_text(" Old  Town ")
    'Old Town'
    """
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable() and letter != "\\")


def _of_number(noun: str, words: list[str], found: Values, n_rows: int) -> set[str]:
    known = vocabulary()
    values = found.values
    numbers = [value for value in values if not isinstance(value, str)]
    is_whole = all(number == int(number) for number in numbers)
    is_serial = (
        is_whole and numbers[0] in (0, 1) and numbers[-1] - numbers[0] == n_rows - 1 == len(numbers) - 1
    )
    if is_serial or len(numbers) < 3:
        return set()
    if any(unit <= numbers[0] and numbers[-1] <= 2.2 * unit for unit in (1e9, 1e12, 1e15, 1e18)):
        return {"detail"}  # moments: (nano)seconds since 1970
    if is_whole and numbers[0] >= 1500 and numbers[-1] <= 2100:  # years
        return {"detail", "range"} if "year" in words else set()
    is_count = noun.startswith("number of ")
    is_measured = words[-2:-1] == ["in"] and words[-1] in known["measures"].values()
    # A name that is not read, or ends in "via", may be that of a code.
    is_unread = '"' in noun and (words[-1] in known["joints"] or not is_english(" ".join(words)))
    may_be_code = is_unread and is_whole and numbers[0] >= 0
    is_coded = may_be_code or words[-1] in known["codes"] or set(words) & set(known["code_words"])
    if is_coded and not (is_count or is_measured):
        names_kinds = is_whole and len(numbers) <= min(MAX_GROUPS, n_rows // 2) and not is_plural(noun)
        kinds = {"category"} if found.has_nulls else {"category", "kind"}
        return {"detail"} | (kinds if names_kinds else set())
    roles = {"detail", "range"}
    if words[0] not in known["no_sums"] or len(words) == 1:
        roles.add("measure")
    is_added = is_count or ('"' not in noun and set(words) & set(known["sums"]))
    if is_added and not set(words) & {*known["no_sums"], *known["states"]}:
        roles.add("sum")
    return roles
