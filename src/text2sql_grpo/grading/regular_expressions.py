"""Texts that a regular expression of a query matches, and texts next to them."""

import re
import string
import warnings
from collections.abc import Sequence
from functools import lru_cache
from random import Random
from re import _parser as parser  # type: ignore[attr-defined]  # the parts of a pattern
from typing import Any

import regex

from text2sql_grpo.sql.outcome import Cell

MAX_STEPS = 300  # parts of one that is drawn, each repetition counted
MAX_UNROLLED = 4_000  # parts of an expression: its compiler repeats them, which takes seconds for a million
MORE = 2  # repetitions above the least number
MAX_KNOWN = 400  # texts of a column in which it is searched
MAX_TEXT = 300  # characters of each
N_CHANGED = 6  # of them are changed where it matches
TIMEOUT_S = 0.02  # of a search in one text: a model's expression may backtrack without end
_SIGNS = string.ascii_letters + string.digits + "-_. "
_CATEGORIES = {
    f"CATEGORY_{prefix}{name}": re.compile(rf"\{sign}")
    for name, letter in (("DIGIT", "d"), ("SPACE", "s"), ("WORD", "w"))
    for prefix, sign in (("", letter), ("NOT_", letter.upper()))
}


class _TooLongError(Exception):
    """A text of more than `MAX_STEPS` parts, or an expression of more than `MAX_UNROLLED`."""


_ERRORS = (re.error, regex.error, OverflowError, RecursionError, TimeoutError, _TooLongError)


def texts_around(expression: str, known: Sequence[Cell], rng: Random) -> tuple[list[Cell], list[Cell]]:
    """Texts of a column that an expression matches, and texts next to them, which it may miss.

    Each is a known text with another part in place of the part that matches. If all known texts match, all
    others do: an answer may rely on their form.

    >>> texts_around(r"-(\\d+)", ["MOV-12", "SER-7"], Random(3))
    (['MOV-97', 'MOV-977', 'MOV-12', 'MOV-1', 'SER-129', 'SER-77'], [])

    Returns:
        Both empty for an expression that Python does not read, or that is too long.
    """
    own = [text for text in known[:MAX_KNOWN] if isinstance(text, str) and len(text) <= MAX_TEXT]
    exact: list[Cell] = []
    near: list[Cell] = []
    try:
        tree, compiled = _compiled(expression)
        places = {text: span for text in own if (span := _span(compiled, text))}
        is_form = bool(own) and len(places) == len(own)
        for text in rng.sample(list(places), min(N_CHANGED, len(places))) or [""]:
            start, end = places.get(text, (0, 0))
            drawn = _Drawing(rng).text(tree)
            exact.append(text[:start] + drawn + text[end:])
            for part in (drawn, text[start:end], text[start:end]):
                other = text[:start] + _changed(part, rng) + text[end:]
                if _span(compiled, other):
                    exact.append(other)
                elif not is_form:
                    near.append(other)
    except _ERRORS:
        return [], []
    return exact, near


def matches(expression: str, text: object) -> bool | None:
    """True if an expression of a schema matches a part of a text; None if that is not known.

    >>> matches("^B[0-9]{3}$", "B017"), matches("^B[0-9]{3}$", "17"), matches("(", "17")
    (True, False, None)
    """
    if text is None or len(str(text)) > MAX_TEXT:
        return None
    try:
        return _span(_compiled(expression)[1], str(text)) is not None
    except _ERRORS:
        return None


@lru_cache(maxsize=64)
def _compiled(expression: str) -> tuple[Any, "regex.Pattern[str]"]:
    """Parts of an expression, and it compiled.

    Raises:
        re.error, regex.error, OverflowError, RecursionError: Python does not read it.
        _TooLongError: It would take seconds.
    """
    with warnings.catch_warnings(action="ignore"):
        tree = parser.parse(expression)
        if _unrolled(tree) > MAX_UNROLLED:
            raise _TooLongError
        return tree, regex.compile(expression)


def _unrolled(node: Any) -> int:
    """Number of parts, of a repeated one as often as it is repeated at least."""
    if isinstance(node, parser.SubPattern):
        return sum(
            1 + (argument[0] if str(name).endswith("_REPEAT") else 1) * _unrolled(argument)
            for name, argument in node
        )
    return sum(map(_unrolled, node)) if isinstance(node, list | tuple) else 0


def _span(compiled: "regex.Pattern[str]", text: str) -> tuple[int, int] | None:
    """Start and end of the part that matches.

    Raises:
        TimeoutError: After `TIMEOUT_S`.
    """
    found = compiled.search(text, timeout=TIMEOUT_S)
    return found.span() if found else None


def _changed(text: str, rng: Random) -> str:
    """Text with one sign more or less, or with another sign or case: at an end or inside."""
    place = rng.choice([0, rng.randrange(len(text) + 1), max(len(text) - 1, 0)])
    sign = text[place : place + 1]
    other = rng.choice(["", sign.swapcase(), sign * 2, *rng.sample(_SIGNS, 2)])
    return text[:place] + other + text[place + 1 :]


class _Drawing:
    """One text drawn from the parts of a regular expression."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._left = MAX_STEPS

    def text(self, parts: Any) -> str:
        """Text that the parts match, anchors, look-arounds and references aside.

        Raises:
            _TooLongError: It has too many parts.
        """
        return "".join(self._part(str(name), argument) for name, argument in parts)

    def _part(self, name: str, argument: Any) -> str:
        self._left -= 1
        if self._left < 0:
            raise _TooLongError
        if name == "LITERAL":
            return chr(argument)
        if name in ("ANY", "NOT_LITERAL", "IN"):
            signs = _of_class(argument) if name == "IN" else _SIGNS
            return self._rng.choice([sign for sign in signs if name == "IN" or ord(sign) != argument] or [""])
        if name == "BRANCH":
            return self.text(self._rng.choice(argument[1]))
        if name == "SUBPATTERN":
            return self.text(argument[-1])
        if name.endswith("_REPEAT"):
            least, most, inner = argument
            return "".join(self.text(inner) for _ in range(self._rng.randint(least, min(most, least + MORE))))
        return ""


def _of_class(items: Any) -> list[str]:
    """Signs of a class such as `[a-z_]`; compiling it takes too long for a model's text."""
    parts = [(str(name), argument) for name, argument in items]
    bounds = [argument for name, argument in parts if name in ("LITERAL", "RANGE")]
    own = {chr(bound) for one in bounds for bound in (one if isinstance(one, tuple) else (one,))}
    is_negated = any(name == "NEGATE" for name, _ in parts)
    signs = sorted({*_SIGNS, *own})
    return [sign for sign in signs if any(_holds(name, part, sign) for name, part in parts) != is_negated]


def _holds(name: str, argument: Any, sign: str) -> bool:
    """True if a part of a class has the sign."""
    if name == "LITERAL":
        return ord(sign) == int(argument)
    if name == "RANGE":
        return int(argument[0]) <= ord(sign) <= int(argument[1])
    return name == "CATEGORY" and _CATEGORIES[str(argument)].match(sign) is not None
