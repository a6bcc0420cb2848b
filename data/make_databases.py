"""Writes the bundled databases, `data/databases/*.sql` and `*.json`, from their specs.

    python data/make_databases.py            # write every file, byte for byte the same each time
    python data/make_databases.py --check    # compare only; exit 1 on a difference
    python data/make_databases.py --blind    # how often guessing a stored form without looking works

A `said` column stores its values in a form that keeps letters of what people say, but that cannot be
worked out without looking at the column. The conventions below make those forms.
"""

import argparse
import json
import re
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from specs import ALL_DATABASES
from specs.kit import Column, Database, Made, Table, Value, key_of

FOLDER = Path(__file__).parent / "databases"
VOWELS = "aeiou"

# --- how stored forms are made -----------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """What a stored form is put together from.

    Attributes:
        rng: Where the unruly parts come from.
        key: The word whose letters are kept.
        initial: First letter of the other word, in upper case.
        mark: Two letters that all values of the column share.
        letters: First letters of what the column's values are called, in lower case.
    """

    rng: Random
    key: str
    initial: str
    mark: str
    letters: str

    def short(self, size: int) -> str:
        """The key's first letter and `size - 1` later ones in their order, mostly consonants."""
        rest = list(enumerate(self.key[1:]))
        self.rng.shuffle(rest)
        rest.sort(key=lambda spot: spot[1] in VOWELS and self.rng.random() < 0.8)
        return self.key[0] + "".join(letter for _, letter in sorted(rest[: size - 1]))

    def digits(self, size: int) -> str:
        """That many digits that follow no rule."""
        return str(self.rng.randrange(10**size)).zfill(size)

    def noise(self) -> str:
        """A lower-case letter that means nothing, but makes guessing by first letters go wrong."""
        return self.letters[self.rng.randrange(len(self.letters))]


Convention = Callable[[Parts], str]
CONVENTIONS: dict[str, Convention] = {
    "LSB-02": lambda p: f"{p.short(3).upper()}-{p.digits(2)}",
    "02-LSB": lambda p: f"{p.digits(2)}-{p.short(3).upper()}",
    "4k_Lisbon": lambda p: f"{p.digits(1)}{p.noise()}_{p.key}",
    "Lisbon (pt)": lambda p: f"{p.key} ({p.noise()}{p.noise()})",
    "X7LSB": lambda p: f"{p.mark[0]}{p.digits(1)}{p.short(3).upper()}",
    "LS-18k": lambda p: f"{p.short(2).upper()}-{p.digits(2)}{p.noise()}",
    "LN": lambda p: p.short(2).upper(),
    "#Lb3k": lambda p: f"#{p.short(2)}{p.digits(1)}{p.noise()}",
    "HQ:Lsb": lambda p: f"{p.mark}:{p.short(3)}",
    "LSBN": lambda p: p.short(max(2, len(p.key) - 2)).upper(),
    "7k/Lb": lambda p: f"{p.digits(1)}{p.noise()}/{p.short(2)}",
    "[Lsb]5k": lambda p: f"[{p.short(3)}]{p.digits(1)}{p.noise()}",
    "bon.Li": lambda p: f"{p.key[-3:]}.{p.short(2)}",
    "(hq)Lsb": lambda p: f"({p.mark.lower()}){p.short(3)}",
    "k8.LSB": lambda p: f"{p.noise()}{p.digits(1)}.{p.short(3).upper()}",
    "9LBk": lambda p: f"{p.digits(1)}{p.short(2).upper()}{p.noise()}",
}
FOR_TWO_WORDS: dict[str, Convention] = {
    "SMITH, J.": lambda p: f"{p.key.upper()}, {p.initial}.",
    "J.Smith/31": lambda p: f"{p.initial}.{p.key}/{p.digits(2)}",
    "SMT.J": lambda p: f"{p.short(3).upper()}.{p.initial}",
    "j/SMT4": lambda p: f"{p.initial.lower()}/{p.short(3).upper()}{p.digits(1)}",
}
# Met in no training database.
FOR_TEST_ONLY: dict[str, Convention] = {
    "**Lb4k": lambda p: f"**{p.short(2)}{p.digits(1)}{p.noise()}",
    "1k=Lsb": lambda p: f"{p.digits(1)}{p.noise()}={p.short(3)}",
}


def fit(stored: str, key: str) -> int:
    """Length of the longest run of letters in `stored` that can stand for the word `key`, or 0.

    A run can stand for a word if it opens with the word's first letter, in upper case, and keeps the
    order of the word's letters. This is how a reader matches the two.

    >>> fit("02-LSB", "Lisbon"), fit("02-LSB", "Leiria")
    (3, 0)
    """
    best = 0
    for run in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", stored):
        letters = iter(key.lower())
        if run[0] == key[0].upper() and all(letter in letters for letter in run.lower()):
            best = max(best, len(run))
    return best


def are_apart(stored: str, key: str, others: dict[str, str]) -> bool:
    """Whether `stored` fits `key` better than any other stored form or key word does.

    Args:
        stored: A stored form.
        key: The key word it stands for.
        others: Key word of each other stored form of the column.
    """
    own = fit(stored, key)
    return own > 0 and all(
        fit(stored, other_key) < own
        and fit(other, key) < own
        and fit(other, key) < fit(other, other_key)
        and fit(stored, other_key) < fit(other, other_key)
        for other, other_key in others.items()
    )


class Namer:
    """Deals the conventions out, one deck for each split, and keeps what is stored apart.

    A deck holds every convention once; when it is used up, a new one is shuffled. So the conventions
    have equal weight, and a database added at the end of a split changes nothing before it.
    """

    def __init__(self) -> None:
        self._decks: dict[str, list[str]] = {}
        self._dealers: dict[str, Random] = {}
        self._used: dict[str, set[str]] = {}
        self.dealt: dict[tuple[str, str, str], str] = {}

    def _deal(self, split: str, two_words: bool) -> tuple[str, Convention]:
        known = CONVENTIONS | FOR_TWO_WORDS | (FOR_TEST_ONLY if split == "test" else {})
        dealer = self._dealers.setdefault(split, Random(f"conventions of {split}"))
        deck = self._decks.setdefault(split, [])
        playable = [name for name in deck if two_words or name not in FOR_TWO_WORDS]
        if not playable:
            fresh = list(known)
            dealer.shuffle(fresh)
            deck.extend(fresh)
            playable = [name for name in deck if two_words or name not in FOR_TWO_WORDS]
        preferred = [name for name in playable if two_words and name in FOR_TWO_WORDS]
        name = (preferred or playable)[0]
        deck.remove(name)
        return name, known[name]

    def stored_forms(self, database: Database, table: Table, column: Column) -> dict[str, str]:
        """Stored form of each said form of one column."""
        split = database.split
        rng = Random(f"stored forms of {database.name}.{table.name}.{column.name}")
        two_words = all(len(name.split()) == 2 for name in column.said)
        title, convention = self._deal(split, two_words)
        self.dealt[database.name, table.name, column.name] = title
        # Training shares no stored form with the rest.
        kept_apart = self._used.setdefault("train" if split != "train" else "rest", set())
        said_by_any = {name.lower() for name in column.said}
        for _ in range(200):
            forms = self._try_forms(column, convention, rng, kept_apart | said_by_any)
            if forms:
                self._used.setdefault("train" if split == "train" else "rest", set()).update(forms.values())
                return forms
        raise SystemExit(
            f"expected `{title}` forms that no reader confuses, found none"
            f" ({database.name}.{table.name}.{column.name}: {', '.join(column.said)})"
        )

    @staticmethod
    def _try_forms(
        column: Column, convention: Convention, rng: Random, taken: set[str]
    ) -> dict[str, str] | None:
        alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        mark = alphabet[rng.randrange(26)] + alphabet[rng.randrange(26)]
        letters = "".join(sorted({name[0].lower() for name in column.said}))
        keys: dict[str, str] = {}
        forms: dict[str, str] = {}
        for name in column.said:
            words = name.split()
            key = words[column.key_word].capitalize()
            parts = Parts(rng, key, words[0 if column.key_word else -1][0].upper(), mark, letters)
            for _ in range(20):
                stored = convention(parts)
                is_free = stored not in keys and not taken & {stored, stored.lower()}
                if is_free and are_apart(stored, key, keys):
                    break
            else:
                return None
            forms[name], keys[stored] = stored, key
        return forms


# --- files ------------------------------------------------------------------------------------------


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[a-z_]+", name) and name not in ("order", "group") else f'"{name}"'


def _literal(value: Value) -> str:
    if value is None:
        return "NULL"
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


def make_table(database: Database, spec: Table, namer: Namer) -> tuple[str, dict[str, dict[str, str]]]:
    """SQL text of one table, and the `said` maps of its columns."""
    made: Made = {}
    said: dict[str, dict[str, str]] = {}
    for column in spec.columns:
        rng = Random(f"{database.name}.{spec.name}.{column.name}")
        made[column.name] = column.make(rng, spec.rows, made)
        if column.said:
            stored = namer.stored_forms(database, spec, column)
            made[column.name] = [stored[str(name)] for name in made[column.name]]
            said[f"{spec.name}.{column.name}"] = {code: name for name, code in sorted(stored.items())}
    lines = [f"  {key_of(spec.name)} INTEGER PRIMARY KEY"]
    lines += [f"  {_quoted(column.name)} {column.declared}" for column in spec.columns]
    lines += [
        f"  FOREIGN KEY ({column.name}) REFERENCES {_quoted(column.parent)} ({key_of(column.parent)})"
        for column in spec.columns
        if column.parent
    ]
    rows = [
        f"({', '.join(_literal(value) for value in (number, *values))})"
        for number, values in enumerate(zip(*made.values(), strict=True), start=1)
    ]
    create = f"CREATE TABLE {_quoted(spec.name)} (\n" + ",\n".join(lines) + "\n);\n"
    return create + f"INSERT INTO {_quoted(spec.name)} VALUES\n" + ",\n".join(rows) + ";\n", said


def make_files() -> dict[str, str]:
    """Text of every file in the folder, by its name."""
    files: dict[str, str] = {}
    namer = Namer()
    for database in ALL_DATABASES:
        parts = [make_table(database, spec, namer) for spec in database.tables]
        words = {
            "database": database.name,
            "split": database.split,
            "tables": {spec.name: spec.phrase for spec in database.tables},
            "columns": {
                f"{spec.name}.{column.name}": column.phrase
                for spec in database.tables
                for column in spec.columns
                if column.phrase
            },
            "said": {name: forms for _, said in parts for name, forms in said.items()},
        }
        opening = f"-- {database.about}; made by data/make_databases.py.\n"
        files[f"{database.name}.sql"] = opening + "\n".join(text for text, _ in parts)
        files[f"{database.name}.json"] = json.dumps(words, ensure_ascii=False, indent=1) + "\n"
    return files


def differences(files: dict[str, str], folder: Path = FOLDER) -> list[str]:
    """Names of the files in `folder` that are missing, left over or not as made."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".sql", ".json")}
    made = {name: text.encode() for name, text in files.items()}
    return sorted(name for name in found.keys() | made.keys() if found.get(name) != made.get(name))


# --- does guessing pay? -----------------------------------------------------------------------------

GUESSES: dict[str, Callable[[str], tuple[str, str]]] = {
    "= said": lambda said: ("=", said),
    "= upper(said)": lambda said: ("=", said.upper()),
    "LIKE said%": lambda said: ("LIKE", f"{said}%"),
    "LIKE %said%": lambda said: ("LIKE", f"%{said}%"),
    "LIKE %last word%": lambda said: ("LIKE", f"%{said.split()[-1]}%"),
    "LIKE first 3 letters%": lambda said: ("LIKE", f"{said[:3]}%"),
    "LIKE %first 3 letters%": lambda said: ("LIKE", f"%{said[:3]}%"),
    "LIKE first letter%": lambda said: ("LIKE", f"{said[0]}%"),
    "LIKE %first letter%": lambda said: ("LIKE", f"%{said[0]}%"),
    "LIKE initials%": lambda said: ("LIKE", "".join(word[0] for word in said.split()) + "%"),
}


def blind_rates(files: dict[str, str]) -> dict[str, dict[str, float]]:
    """For each guess and split: the share of stored values whose rows, and no others, it selects."""
    splits = ("train", "dev", "test")
    hits = {guess: dict.fromkeys(splits, 0) for guess in GUESSES}
    pairs = dict.fromkeys(splits, 0)
    with sqlite3.connect(":memory:") as connection:
        for name in (name for name in files if name.endswith(".json")):
            words = json.loads(files[name])
            for forms in words["said"].values():
                pairs[words["split"]] += len(forms)
                for guess, predicate in GUESSES.items():
                    for stored, said in forms.items():
                        operator, pattern = predicate(said)
                        selected = {
                            other
                            for other in forms
                            if connection.execute(f"SELECT ? {operator} ?", (other, pattern)).fetchone()[0]
                        }
                        hits[guess][words["split"]] += selected == {stored}
    connection.close()
    return {
        guess: {split: hits[guess][split] / max(1, pairs[split]) for split in splits} for guess in GUESSES
    }


def main() -> int:
    """Writes the files, or checks them, or prints the table of guesses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    parser.add_argument("--blind", action="store_true", help="print how often guessing works")
    options = parser.parse_args()
    files = make_files()
    if options.blind:
        print(f"{'guess':24}{'train':>8}{'dev':>8}{'test':>8}")
        for guess, rates in blind_rates(files).items():
            print(f"{guess:24}" + "".join(f"{rates[split]:8.1%}" for split in ("train", "dev", "test")))
        return 0
    if options.check:
        different = differences(files)
        print("differs: " + ", ".join(different) if different else f"{len(files)} files as made")
        return 1 if different else 0
    FOLDER.mkdir(exist_ok=True)
    for name, text in files.items():
        (FOLDER / name).write_bytes(text.encode())
    print(f"wrote {len(files)} files to {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
