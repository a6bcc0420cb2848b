"""Columns of lists, structs, maps and JSON as an engine's text: new values of the same shape."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from text2sql_grpo.sql.outcome import Cell

_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_CLOSERS = {"[": "]", "{": "}", "(": ")"}
MAX_LENGTH = 4  # elements of a list that is drawn, or one more than the longest known
NEAR = 0.4  # share of scalars that no row holds: a literal of the query, or a number next to a known one


@dataclass(frozen=True)
class Nested:
    """Parsed value: a scalar as its text, or a list, or entries by key.

    Attributes:
        brackets: `[]` or `{}`; empty for a scalar.
        text: Text of a scalar, with its quotes.
        mark: Mark between key and value, `:` or `=`; empty for a list.
        items: Each key (empty in a list) and value.
    """

    brackets: str
    text: str = ""
    mark: str = ""
    items: tuple[tuple[str, "Nested"], ...] = ()

    def written(self) -> str:
        """The value as text."""
        if not self.brackets:
            return self.text
        between = {":": ": ", "=": "=", "": ""}[self.mark]
        return (
            self.brackets[0]
            + ", ".join(f"{key}{between}{item.written()}" for key, item in self.items)
            + self.brackets[1]
        )


def read_nested(values: Sequence[Cell]) -> tuple[Nested, ...]:
    """Values of a column, parsed; empty unless each is a list, a struct, a map or a JSON of one of these.

    >>> [value.written() for value in read_nested(["[a, 'b, c']", "{'k': 1, 'l': [2]}", "{x=1}"])]
    ["[a, 'b, c']", "{'k': 1, 'l': [2]}", '{x=1}']
    >>> read_nested(["[1,10)"])
    ()
    """
    try:
        found = tuple(_read(str(value)) for value in values)
    except ValueError:
        return ()
    return found if all(value.brackets for value in found) else ()


def draw_nested(known: Sequence[Nested], literals: Sequence[Cell], rng: Random) -> Nested:
    """New value, of elements like those of known ones.

    A list gets 0 to `MAX_LENGTH` elements, a map some of the keys, a struct all. NULL stands where one is.

    Args:
        known: Values of the column, at least one.
        literals: Values that the query compares.
        rng: Random numbers.
    """
    shape = rng.choice(known)
    alike = [value for value in known if (value.brackets, value.mark) == (shape.brackets, shape.mark)]
    if not shape.brackets:
        return _scalar(shape, known, literals, rng)
    if not shape.mark:
        items = [item for value in alike for _, item in value.items]
        longest = max(len(value.items) for value in alike)
        size = rng.randint(0, max(MAX_LENGTH, longest + 1)) if items else 0
        made = [draw_nested(items, literals, rng) for _ in range(size)]
        if made and rng.random() < 0.3:  # an element twice
            made[-1] = made[0]
        return Nested(shape.brackets, "", "", tuple(("", item) for item in made))
    by_key: dict[str, list[Nested]] = {}
    for value in alike:
        for key, item in value.items:
            by_key.setdefault(key, []).append(item)
    keys = [key for key, _ in shape.items]
    if shape.mark == "=":
        keys = rng.sample(list(by_key), rng.randint(0, len(by_key)))
    entries = tuple((key, draw_nested(by_key[key], literals, rng)) for key in keys)
    return Nested(shape.brackets, "", shape.mark, entries)


def _scalar(shape: Nested, known: Sequence[Nested], literals: Sequence[Cell], rng: Random) -> Nested:
    if rng.random() >= NEAR or shape.text.upper() == "NULL":
        return shape
    is_number = all(_NUMBER.fullmatch(value.text) or value.text.upper() == "NULL" for value in known)
    if is_number:
        numbers = [value for value in literals if isinstance(value, int | float)]
        whole = "." not in shape.text
        near = [value + step for value in numbers for step in (-1, 0, 1)] + [float(shape.text) + 1]
        chosen = rng.choice(near)
        return Nested("", str(int(chosen) if whole else float(chosen)))
    quotes = {value.text[0] for value in known if value.text[:1] in ("'", '"')} or {""}
    quote = min(quotes)
    texts = [v for v in literals if isinstance(v, str) and re.fullmatch(r"[\w -]+", v) and v.strip() == v]
    texts = [text for literal in texts for text in (literal, f"x{literal}", f"{literal}x")]
    return Nested("", f"{quote}{rng.choice(texts)}{quote}") if texts else shape


def _read(text: str) -> Nested:
    """Parse a value.

    Raises:
        ValueError: Brackets or quotes do not match.
    """
    text = text.strip()
    if text[:1] not in ("[", "{"):
        return Nested("", text)
    brackets = text[0] + _CLOSERS[text[0]]
    parts = list(_split(text[1:-1], ","))
    if text[-1] != brackets[1]:
        raise ValueError(text)
    if parts == [""]:
        return Nested(brackets)
    for mark in (":", "=") if brackets == "{}" else ():
        pairs = [list(_split(part, mark)) for part in parts]
        if all(len(pair) > 1 for pair in pairs):
            entries = tuple((pair[0].strip(), _read(mark.join(pair[1:]))) for pair in pairs)
            return Nested(brackets, "", mark, entries)
    return Nested(brackets, "", "", tuple(("", _read(part)) for part in parts))


def _split(text: str, separator: str) -> Iterator[str]:
    """Parts of a text between separators outside quotes and brackets.

    Raises:
        ValueError: Brackets or quotes do not match.
    """
    start, position, expected = 0, 0, list[str]()
    while position < len(text):
        sign = text[position]
        is_first = not text[start:position].strip() or text[position - 1] in "[{(:=, "
        if sign in "'\"" and is_first:
            position += 1
            while position < len(text) and text[position] != sign:
                position += 1 + (text[position] == "\\")
            if position >= len(text):
                raise ValueError(text)
        elif sign in _CLOSERS:
            expected.append(_CLOSERS[sign])
        elif sign in "]})":
            if not expected or expected.pop() != sign:
                raise ValueError(text)
        elif sign == separator and not expected:
            yield text[start:position]
            start = position + 1
        position += 1
    if expected:
        raise ValueError(text)
    yield text[start:]
