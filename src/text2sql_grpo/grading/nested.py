"""Columns of lists, structs, maps and JSON as an engine's text: new values of the same shape."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from text2sql_grpo.grading.near_values import (
    as_column_value,
    matching_texts,
    near_values,
    of_other_lengths,
    reshaped,
)
from text2sql_grpo.sql.outcome import Cell

_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_CLOSERS = {"[": "]", "{": "}", "(": ")"}
MAX_LENGTH = 4  # elements of a list that is drawn, or one more than the longest known
MAX_ASKED = 30  # elements of a list whose length the query compares
SWAPPED = 0.3  # share of maps in which a key may have a value of another key
NEAR = 0.5  # share of scalars that no row holds: a literal of the query, or a number next to a known one


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


def draw_nested(
    known: Sequence[Nested], literals: Sequence[Cell], rng: Random, json_keys: Sequence[str] = ()
) -> Nested:
    """New value, of elements like those of known ones.

    A list gets up to `MAX_LENGTH` elements, or one more than the longest known, and none only if a known one
    has none; a map some of the keys; a struct all. NULL stands where one is.

    Args:
        known: Values of the column, at least one.
        literals: Values that the query compares.
        rng: Random numbers.
        json_keys: Keys that the query reads: some objects of JSON get one of them, where known ones differ
            in their keys.
    """
    shape = rng.choice(known)
    alike = [value for value in known if (value.brackets, value.mark) == (shape.brackets, shape.mark)]
    if not shape.brackets:
        return _scalar(shape, known, literals, rng)
    if not shape.mark:
        items = [item for value in alike for _, item in value.items]
        lengths = [len(value.items) for value in alike]
        sizes = list(range(min(1, *lengths), max(MAX_LENGTH, max(lengths) + 1) + 1))
        if rng.random() < NEAR:  # a number may be compared with the length
            asked_sizes = [
                value + step for value in literals if isinstance(value, int) for step in (-1, 0, 1)
            ]
            sizes = [size for size in asked_sizes if sizes[0] <= size <= MAX_ASKED] or sizes
        made = [draw_nested(items, literals, rng) for _ in range(rng.choice(sizes) if items else 0)]
        if made and rng.random() < 0.3:  # an element twice
            made[-1] = made[0]
        asked = [item for item in items if item.text.strip("'\"") in map(str, literals)]
        others = [item for item in items if item not in asked]
        if asked and others and rng.random() < 0.2:  # further back than in any known list
            made = [*rng.choices(others, k=max(lengths)), rng.choice(asked)]
        return Nested(shape.brackets, "", "", tuple(("", item) for item in made))
    by_key: dict[str, list[Nested]] = {}
    for value in alike:
        for key, item in value.items:
            by_key.setdefault(key, []).append(item)
    keys = [key for key, _ in shape.items]
    if shape.mark == "=":
        keys = rng.sample(list(by_key), rng.randint(0, len(by_key)))
        if rng.random() < SWAPPED:
            items = [item for own in by_key.values() for item in own]
            by_key = {key: items for key in by_key}
    elif json_keys and len({frozenset(key for key, _ in value.items) for value in known}) > 1:
        key = json.dumps(rng.choice(json_keys), ensure_ascii=False)
        if key not in keys and rng.random() < NEAR:
            keys.append(key)
            by_key.setdefault(key, [item for own in by_key.values() for item in own])
    entries = tuple((key, draw_nested(by_key[key], literals, rng)) for key in keys)
    return Nested(shape.brackets, "", shape.mark, entries)


def _scalar(shape: Nested, known: Sequence[Nested], literals: Sequence[Cell], rng: Random) -> Nested:
    texts = [value.text for value in known if not value.brackets and value.text.upper() != "NULL"]
    if rng.random() >= NEAR or shape.text.upper() == "NULL":
        return shape
    if shape.text in ("true", "false"):
        return Nested("", rng.choice(("true", "false")))
    quote = shape.text[:1] if shape.text[:1] in ("'", '"') else ""
    is_code = all(map(str.isdecimal, texts)) and len(set(map(len, texts))) == 1
    is_code = is_code and (len(texts[0]) > 4 or any(text[0] == "0" for text in texts if len(text) > 1))
    is_number = not quote and all(_NUMBER.fullmatch(text) for text in texts) and not is_code

    def value(text: str) -> Cell:
        if is_number:
            return float(text) if "." in text else int(text)
        return text.strip(quote or " ")

    alike, own = [value(text) for text in texts], value(shape.text)
    asked = [as_column_value(literal, alike) for literal in literals]
    near = [near for literal in literals for near in near_values(literal, alike)]
    changed = near_values(own, alike)
    if not is_number:
        patterns = [literal for literal in literals if isinstance(literal, str) and "%" in literal]
        near += [text for pattern in patterns for text in matching_texts(pattern)]
        changed += reshaped(alike, rng)
    elif shape.text.isdecimal():  # numbers in JSON may be compared as texts
        changed += [int(str(text)) for text in of_other_lengths(shape.text)]
    choices = [plain for plain in map(_plain, (asked, near, changed)) if plain]
    if is_code:  # all of one length
        choices = [[one + str(own)[len(one) :] for one in plain if one.isdecimal()] for plain in choices]
        choices = [plain for plain in choices if plain]
    return Nested("", f"{quote}{rng.choice(rng.choice(choices))}{quote}") if choices else shape


def _plain(values: Sequence[Cell]) -> list[str]:
    """Texts of those values that need no other quotes."""
    return [
        str(one)
        for one in values
        if isinstance(one, int | float) or re.fullmatch(r"[\w-]+( [\w-]+)*", str(one or ""))
    ]


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
