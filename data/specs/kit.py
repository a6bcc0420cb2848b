"""The few words in which a database is described: tables, columns and where their values come from."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, timedelta
from random import Random

Value = str | int | float | None
Made = dict[str, list[Value]]


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: As in the schema.
        phrase: The words people use for it; None for keys.
        declared: SQL type and constraints.
        make: Values of `count` rows, from a generator, the count and the columns already made.
        said: For a column stored otherwise than said: the said forms.
        codes: Stored form of each said one, where the spec itself names them (flags).
        clauses: Said form -> phrases about its rows, for flags; `wording.py` has those of other columns.
        key_word: Which word of a said form its stored form keeps letters of.
        parent: For a foreign key: the table it points to.
    """

    name: str
    phrase: str | None
    declared: str
    make: Callable[[Random, int, Made], list[Value]]
    said: tuple[str, ...] = ()
    codes: tuple[str | int, ...] = ()
    clauses: dict[str, tuple[str, ...]] = field(default_factory=dict)
    key_word: int = 0
    parent: str | None = None


@dataclass(frozen=True)
class Table:
    """One table; its key column is made by the builder."""

    name: str
    phrase: str
    rows: int
    columns: tuple[Column, ...]


@dataclass(frozen=True)
class Database:
    """One database and the split it belongs to."""

    name: str
    split: str
    about: str
    tables: tuple[Table, ...]


def table(name: str, phrase: str, rows: int, *columns: Column) -> Table:
    """A table of `rows` rows."""
    return Table(name, phrase, rows, columns)


def key_of(name: str) -> str:
    """Name of the key column of a table: the last word of its name and `_id`."""
    return f"{name.split()[-1]}_id"


def split_words(listed: str) -> tuple[str, ...]:
    """The parts of a comma-separated list."""
    return tuple(part.strip() for part in listed.split(","))


def _with_gaps(rng: Random, values: list[Value], null: float) -> list[Value]:
    return [None if rng.random() < null else value for value in values]


def _declared(kind: str, null: float) -> str:
    return kind if null else f"{kind} NOT NULL"


def spread(rng: Random, values: tuple[str, ...], count: int) -> list[Value]:
    """`count` values, each of the given ones at least twice, the earlier drawn ones more often."""
    chosen = list(values) * 2
    order = list(values)
    rng.shuffle(order)
    while len(chosen) < count:
        chosen.append(order[min(rng.randrange(len(order)), rng.randrange(len(order) + 4))])
    rng.shuffle(chosen)
    return list(chosen)


def said(name: str, phrase: str, listed: str, *, key_word: int = 0) -> Column:
    """A categorical column stored otherwise than people say it; `listed` holds the said forms."""
    forms = split_words(listed)
    return Column(
        name,
        phrase,
        "TEXT NOT NULL",
        lambda rng, count, made: spread(rng, forms, count),
        said=forms,
        key_word=key_word,
    )


def person(name: str, phrase: str, listed: str) -> Column:
    """A `said` column of people, known by their surnames."""
    return said(name, phrase, listed, key_word=-1)


def flag(
    name: str, phrase: str, codes: str, *, yes: str, no: str, yes_too: str = "", no_too: str = ""
) -> Column:
    """A yes-or-no column; `codes` are the stored forms of yes and no, `yes` and `no` phrases about rows."""
    stored: tuple[str | int, ...] = tuple(
        int(code) if code.isdigit() else code for code in split_words(codes)
    )
    return Column(
        name,
        phrase,
        "INTEGER NOT NULL" if isinstance(stored[0], int) else "TEXT NOT NULL",
        lambda rng, count, made: ["yes" if rng.random() < 0.4 else "no" for _ in range(count)],
        said=("yes", "no"),
        codes=stored,
        clauses={
            said: tuple(filter(None, phrases))
            for said, phrases in (("yes", (yes, yes_too)), ("no", (no, no_too)))
        },
    )


def plain(name: str, phrase: str, listed: str, *, null: float = 0.0) -> Column:
    """A categorical column stored as people say it."""
    forms = split_words(listed)

    def make(rng: Random, count: int, made: Made) -> list[Value]:
        return _with_gaps(rng, spread(rng, forms, count), null)

    return Column(name, phrase, _declared("TEXT", null), make)


def paired(name: str, phrase: str, left: str, right: str) -> Column:
    """Free text of two parts, all different: people's names, titles."""
    lefts, rights = split_words(left), split_words(right)

    def make(rng: Random, count: int, made: Made) -> list[Value]:
        every = [f"{a} {b}" for a in lefts for b in rights]
        rng.shuffle(every)
        return list(every[:count])

    return Column(name, phrase, "TEXT NOT NULL", make)


def whole(name: str, phrase: str, low: int, high: int, *, step: int = 1, null: float = 0.0) -> Column:
    """Whole numbers from `low` to `high`."""

    def make(rng: Random, count: int, made: Made) -> list[Value]:
        return _with_gaps(rng, [rng.randrange(low, high + 1, step) for _ in range(count)], null)

    return Column(name, phrase, _declared("INTEGER", null), make)


def real(name: str, phrase: str, low: int, high: int, *, cents: int = 50, null: float = 0.0) -> Column:
    """Decimal numbers from `low` to `high` in steps of `cents` hundredths."""

    def make(rng: Random, count: int, made: Made) -> list[Value]:
        drawn = [rng.randrange(low * 100, high * 100 + 1, cents) / 100 for _ in range(count)]
        return _with_gaps(rng, list(drawn), null)

    return Column(name, phrase, _declared("REAL", null), make)


def day(name: str, phrase: str, first: str, last: str, *, null: float = 0.0) -> Column:
    """Dates from `first` to `last`."""
    start, end = date.fromisoformat(first).toordinal(), date.fromisoformat(last).toordinal()

    def make(rng: Random, count: int, made: Made) -> list[Value]:
        days = [date.fromordinal(rng.randrange(start, end + 1)).isoformat() for _ in range(count)]
        return _with_gaps(rng, list(days), null)

    return Column(name, phrase, _declared("DATE", null), make)


def later(name: str, phrase: str, than: str, low: int, high: int, *, null: float = 0.0) -> Column:
    """Dates `low` to `high` days after those of the column `than`."""

    def make(rng: Random, count: int, made: Made) -> list[Value]:
        days: list[Value] = [
            (date.fromisoformat(str(start)) + timedelta(days=rng.randrange(low, high + 1))).isoformat()
            for start in made[than]
        ]
        return _with_gaps(rng, days, null)

    return Column(name, phrase, _declared("DATE", null), make)


def ref(parent: str, parent_rows: int) -> Column:
    """A foreign key to a table of `parent_rows` rows; about one parent in ten has no children."""

    def make(rng: Random, count: int, made: Made) -> list[Value]:
        used = [number for number in range(1, parent_rows + 1) if rng.random() < 0.9]
        return [used[rng.randrange(len(used))] for _ in range(count)]

    return Column(key_of(parent), None, "INTEGER NOT NULL", make, parent=parent)
