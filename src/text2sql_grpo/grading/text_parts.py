"""Parts of texts that a query reads: patterns, texts that it searches for, places at which it cuts them."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from random import Random

from sqlglot import exp

from text2sql_grpo.grading.near_values import near_values
from text2sql_grpo.grading.query_columns import COMPARISONS, ColumnRef, columns_among
from text2sql_grpo.sql.outcome import Cell

_ESCAPED = str.maketrans({"%": "\ue000", "_": "\ue001"})  # signs that are no wildcards of a LIKE pattern
RESHAPED = 8  # texts of a column that are drawn anew
MAX_READ = 300  # characters of a text that is taken apart
MIN_ALIKE = 3  # texts that show which signs all of a column have
_CLASS = re.compile(r"\[(\^?)(.)(?:-(.))?[^\]]*\]")
_SEARCHED = (exp.ILike, exp.StartsWith, exp.EndsWith, exp.Contains, exp.StrPosition)
_CUT = (
    *(exp.Substring, exp.Left, exp.Right, exp.StrPosition, exp.Split, exp.SplitPart),
    *(exp.RegexpExtract, exp.Trim, exp.Replace, exp.Cast, exp.TryCast),
)
_WILDCARD = re.compile(r"(?<![^\W_])_|_(?![^\W_])")  # inside of a word, `_` is meant as itself
_RUN = re.compile(r"[^\W\d_]+|\d+|[\W_]+")
_PART = re.compile(r"[^\W\d_]+|[^\w\s]")  # a word or a sign
_NUMBER = re.compile(r"\d+(?:[.]\d+)?")
_WORDS = re.compile(r"[^\W\d_]+(?:[ .,;'-]+[^\W\d_]+)*[.,]?")


def searches_in(
    tree: exp.Query, columns_of: Mapping[int, ColumnRef]
) -> Iterator[tuple[list[ColumnRef], str]]:
    """Columns in whose texts a query searches, and what for, as a LIKE pattern; LIKE and GLOB aside."""
    for node in tree.find_all(*_SEARCHED):
        sought = node.args.get("substr") or node.args.get("expression")
        is_cut = isinstance(node, exp.StrPosition) and not isinstance(node.parent, COMPARISONS)
        if is_cut or not isinstance(sought, exp.Literal) or not sought.is_string:
            continue
        text = sought.name if isinstance(node, exp.ILike) else f"%{sought.name.translate(_ESCAPED)}%"
        yield columns_among(node.this.walk(), columns_of), text


def cuts_in(tree: exp.Query, columns_of: Mapping[int, ColumnRef]) -> list[ColumnRef]:
    """Columns of whose texts a query takes a part, or cuts one off, or that it casts."""
    return [column for node in tree.find_all(*_CUT) for column in columns_among(node.walk(), columns_of)]


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
        separator = next((sign for sign in " ,;" if sign in text), "")
        if are_words and separator:
            words = text.split(separator)
            words.insert(rng.randrange(1, len(words)), rng.choice(words[:-1]))
            found[separator.join(words)] = None
    return list(found)


def with_number(number: Cell, known: Sequence[Cell]) -> list[Cell]:
    """Texts of a column such as `90 min` with another number, and ones next to it; none in any other column.

    >>> with_number(60, ["90 min", "45 min"])
    ['60 min', '59 min', '61 min', '30 min', '120 min']
    """
    texts = [text for text in known if isinstance(text, str)][:1]
    if not texts or not isinstance(number, int) or len(_NUMBER.findall(texts[0])) != 1:
        return []
    return [_NUMBER.sub(str(one), texts[0]) for one in (number, *near_values(number, [number]))]


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


def fitted(
    texts: Sequence[Cell], known: Sequence[Cell], common: Mapping[str, int], rng: Random
) -> list[Cell]:
    """Texts with each sign or word as often as all known texts have it.

    A text that lacks a sign takes the place of a part of a known one; one with too many is left out. Blank
    texts stay.

    >>> fitted(["x.org", "@x.org", "a@b@c", 5], ["ann@mail.com", "bo@mail.com"], {"@": 1}, Random(1))
    ['x.org@mail.com', '@x.org', 5]
    """

    def fits(text: str) -> bool:
        counts = Counter(_PART.findall(text))
        return all(counts[part] == n for part, n in common.items())

    own = [text for text in known if isinstance(text, str)]
    found: list[Cell] = []
    for text in texts:
        if not isinstance(text, str) or not text.strip() or fits(text):
            found.append(text)
            continue
        missing = "".join(part for part in common if part not in text and not part.isalnum())
        parts = re.split(f"([{re.escape(missing)}])", rng.choice(own)) if missing else []
        options = ["".join([*parts[:place], text, *parts[place + 1 :]]) for place in range(0, len(parts), 2)]
        found += [rng.choice(fitting)] if (fitting := [option for option in options if fits(option)]) else []
    return found


def unescaped(pattern: str, escape: str) -> str:
    """LIKE pattern whose escaped signs cannot be taken for wildcards."""
    return re.sub(re.escape(escape) + "(.)", lambda found: found[1].translate(_ESCAPED), pattern)


def like_of(pattern: str) -> str:
    """LIKE pattern of a GLOB pattern, with one sign of each class.

    >>> like_of("*[0-9]?")
    '%4_'
    """
    plain = _CLASS.sub(_of_class, pattern.translate(_ESCAPED))
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


def _of_class(found: re.Match[str]) -> str:
    """Sign of a class such as `[a-z]`: the middle one of its first range."""
    if found[1]:
        return next(sign for sign in "q-5" if sign != found[2])
    return chr((ord(found[2]) + ord(found[3] or found[2])) // 2)
