"""How a value is stored otherwise than it is said: patterns like `{Last}, {F}. | {Last}, {F}.`

The left part makes the stored form, the right part its near-duplicate: another person of that surname, a
subsidiary, a closed entry. Some rows hold it, and nobody asks about it, so that a guess finds both.
Fields of any value: `{name} {Name} {NAME} {snake}` (LATE_RETURN), `{WORD}` (its key word), `{ABC} {abc} {AB}`
(letters of its key word), `{I}` (initials), `{code}` (see `wording.py`), `{street}` (Rd for Road), `{suffix}
{SUFFIX} {club}` and the digits `{n} {nn} {nnn}`, which follow no rule. Fields of people: `{First} {F} {f}
{Last} {LAST} {last} {L}`.
"""

import re
from dataclasses import dataclass
from random import Random

from specs.kit import Column, Database, Table
from specs.wording import CODES, WORDING

VOWELS = "aeiouy"
MAX_LISTED = 20
"""Distinct values of a column that is looked up by its whole list."""
TRIES = 400
SUFFIXES = ("Ltd", "plc", "Inc", "LLC", "GmbH", "S.A.", "& Co")
CLUBS = ("FC", "AFC", "SC", "CF")
STREETS = {"Street": "St", "Road": "Rd", "Lane": "Ln", "Walk": "Wlk", "Square": "Sq", "Row": "Row"}
LETTERS = ("{ABC}", "{abc}", "{AB}", "{I}")
PEOPLE = ("{Last}", "{LAST}", "{last}", "{L}")


@dataclass(frozen=True)
class Forms:
    """Stored forms of one column.

    Attributes:
        stored: Said form -> stored form.
        near: Stored form -> near-duplicate; not every value has one.
    """

    stored: dict[str, str]
    near: dict[str, str]


def pattern_of(database: Database, table: Table, column: Column) -> str:
    """`stored | near-duplicate` of a column."""
    return WORDING[f"{database.name}.{table.name}.{column.name}"][0]


def shows_the_word(pattern: str) -> bool:
    """True where stored forms hold a word that people say, so that LIKE finds them."""
    return not any(field in pattern for field in (*LETTERS, "{code}")) or bool(
        re.search("{name}|{NAME}", pattern)
    )


def short(rng: Random, key: str, size: int) -> str:
    """The key's first letters, or its first letter and the next consonants, or (seldom) any in order."""
    consonants = [letter for letter in dict.fromkeys(key[1:]) if letter not in VOWELS + key[0].lower()]
    draw = rng.random()
    if draw < 0.5 or len(consonants) < size - 1:
        return key[:size]
    if draw < 0.99:
        return key[0] + "".join(consonants[: size - 1])
    return key[0] + "".join(key[place] for place in sorted(rng.sample(range(1, len(key)), size - 1)))


def fit(stored: str, key: str) -> int:
    """Length of the longest run of letters in `stored` that can stand for the word `key`, or 0.

    A run can stand for a word if it opens with the word's first letter and keeps the order of the word's
    letters. This is how a reader matches the two.

    >>> fit("02-LSB", "Lisbon"), fit("02-LSB", "Leiria")
    (3, 0)
    """
    best = 0
    for run in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", stored):
        letters = iter(key.lower())
        if run[0].lower() == key[0].lower() and all(letter in letters for letter in run.lower()):
            best = max(best, len(run))
    return best


def _fields(rng: Random, name: str, key_word: int, other: str) -> dict[str, str]:
    """What a pattern may name; `other` lends a near-duplicate its first name, or its surname's initial."""
    words = name.split()
    key = words[key_word].strip("'").capitalize()
    first, last = (other or name).split()[0], words[-1]
    return {
        "name": name,
        "Name": name[0].upper() + name[1:],
        "NAME": name.upper(),
        "snake": name.upper().replace(" ", "_"),
        "WORD": words[0].upper(),
        "ABC": short(rng, key, 3).upper(),
        "abc": short(rng, key, 3).lower(),
        "AB": short(rng, key, 2).upper(),
        "I": "".join(word[0] for word in words).upper(),
        "code": CODES.get(name, ""),
        "street": " ".join(STREETS.get(word, word) for word in words),
        "suffix": rng.choice(SUFFIXES),
        "SUFFIX": rng.choice(SUFFIXES).upper(),
        "club": rng.choice(CLUBS),
        "n": str(rng.randrange(1, 10)),
        "nn": f"{rng.randrange(1, 100):02}",
        "nnn": str(rng.randrange(100, 1000)),
        "First": first,
        "F": first[0],
        "f": first[0].lower(),
        "Last": last,
        "LAST": last.upper(),
        "last": last.lower(),
        "L": (other or name).split()[-1][0],
    }


class Namer:
    """Names the values of all columns, and keeps what training stores apart from the rest."""

    def __init__(self) -> None:
        self._used: dict[bool, set[str]] = {True: set(), False: set()}

    def forms(self, database: Database, table: Table, column: Column) -> Forms:
        """Stored forms of one `said` column and their near-duplicates."""
        if column.codes:
            return Forms({name: code for name, code in zip(column.said, column.codes, strict=True)}, {})
        is_train = database.split == "train"
        pattern = pattern_of(database, table, column)
        rng = Random(f"stored forms of {database.name}.{table.name}.{column.name}")
        for _ in range(TRIES):
            forms = _try_forms(rng, column, pattern)
            if forms and not {*forms.stored.values(), *forms.near.values()} & self._used[not is_train]:
                self._used[is_train] |= {*forms.stored.values(), *forms.near.values()}
                return forms
        raise SystemExit(
            f"no `{pattern}` forms that a reader can tell apart"
            f" ({database.name}.{table.name}.{column.name}: {', '.join(column.said)})"
        )


def _try_forms(rng: Random, column: Column, pattern: str) -> Forms | None:
    """One draw of stored forms; None where two of them are alike."""
    current, _, near_pattern = pattern.partition("|")
    is_person = any(field in pattern for field in PEOPLE)
    is_code = any(field in current for field in LETTERS) and not {"{NAME}", "{name}", "{I}"} & set(
        re.findall(r"{.*?}", current)
    )
    stored: dict[str, str] = {}
    near: dict[str, str] = {}
    for place, name in enumerate(column.said):
        others = [_key(other, column) for other in column.said if other != name]
        for _ in range(TRIES):
            fields = _fields(rng, name, column.key_word, "")
            stored[name] = current.format(**fields)
            if not is_code or _is_clear(stored[name], _key(name, column), others):
                break
        if near_pattern:
            other = _namesake(column.said, place, "{L}" in pattern) if is_person else ""
            keep = {field: fields[field] for field in ("ABC", "abc", "AB", "suffix", "SUFFIX", "club")}
            second = _fields(rng, name, column.key_word, other) | keep
            if "{L}" in pattern:
                second["First"] = fields["First"]
            near[stored[name]] = near_pattern.format(**second)
    every = [*stored.values(), *near.values()]
    if len({form.lower() for form in every}) < len(every):
        return None
    if {form.lower() for form in every} & {name.lower() for name in column.said}:
        return None
    if not shows_the_word(pattern):
        # Where there is room for some near-duplicates only, those get them whose code a guess would hit.
        easy_first = sorted(near, key=lambda form: _said_of(stored, form)[:2].lower() != form[:2].lower())
        kept = set(easy_first[: MAX_LISTED - len(stored)])
        near = {form: other for form, other in near.items() if form in kept}
    return Forms(stored, near)


def _key(name: str, column: Column) -> str:
    return name.split()[column.key_word]


def _is_clear(form: str, key: str, others: list[str]) -> bool:
    """True for a code that fits the word it stands for better than any other word of its column."""
    return all(fit(form, other) < fit(form, key) for other in others)


def _namesake(people: tuple[str, ...], place: int, has_other_surname: bool) -> str:
    """The next person whose first name, or surname, begins with another letter."""
    part = -1 if has_other_surname else 0
    initial = people[place].split()[part][0]
    following = people[place + 1 :] + people[:place]
    return next(other for other in following if other.split()[part][0] != initial)


def _said_of(stored: dict[str, str], form: str) -> str:
    return next(name for name, code in stored.items() if code == form)
