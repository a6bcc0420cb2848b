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
from pathlib import Path
from random import Random

from specs import ALL_DATABASES
from specs.kit import Column, Database, Made, Table, Value, key_of

FOLDER = Path(__file__).parent / "databases"
VOWELS = "aeiou"

# --- how stored forms are made -----------------------------------------------------------------------


def short(rng: Random, word: str, size: int) -> str:
    """The first letter and `size - 1` later ones in their order, mostly consonants."""
    rest = list(enumerate(word[1:].lower()))
    rng.shuffle(rest)
    rest.sort(key=lambda spot: spot[1] in VOWELS and rng.random() < 0.8)
    return word[0].upper() + "".join(letter for _, letter in sorted(rest[: size - 1]))


def _digits(rng: Random, size: int) -> str:
    return str(rng.randrange(10**size)).zfill(size)


def _noise(rng: Random) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[rng.randrange(26)]


def _swapped(rng: Random, key: str) -> str:
    return f"{key[-3:].lower()}.{key[0].upper()}{key[1].lower()}"


# Each: (generator, key word, first letter of the other word, mark of the column) -> stored form.
Convention = Callable[[Random, str, str, str], str]
CONVENTIONS: dict[str, Convention] = {
    "LSB-02": lambda rng, key, other, mark: f"{short(rng, key, 3).upper()}-{_digits(rng, 2)}",
    "02-LSB": lambda rng, key, other, mark: f"{_digits(rng, 2)}-{short(rng, key, 3).upper()}",
    "4_Lisbon": lambda rng, key, other, mark: f"{_digits(rng, 1)}_{key}",
    "Lisbon (PT)": lambda rng, key, other, mark: f"{key} ({(_noise(rng) + _noise(rng)).upper()})",
    "X7LSB": lambda rng, key, other, mark: f"{mark[0]}{_digits(rng, 1)}{short(rng, key, 3).upper()}",
    "L-118": lambda rng, key, other, mark: f"{short(rng, key, 2).upper()}-{_digits(rng, 2)}{_noise(rng)}",
    "LN": lambda rng, key, other, mark: short(rng, key, 2).upper(),
    "#L33": lambda rng, key, other, mark: f"#{short(rng, key, 2)}{_digits(rng, 2)}",
    "HQ:Lsb": lambda rng, key, other, mark: f"{mark}:{short(rng, key, 3)}",
    "LSBN": lambda rng, key, other, mark: short(rng, key, max(3, len(key) - 2)).upper(),
    "7/Lb": lambda rng, key, other, mark: f"{_digits(rng, 3)}/{short(rng, key, 2)}",
    "[Lsb]5": lambda rng, key, other, mark: f"[{short(rng, key, 3)}]{_digits(rng, 1)}{_noise(rng)}",
    "bon.Li": lambda rng, key, other, mark: _swapped(rng, key),
    "Lsb_HQ": lambda rng, key, other, mark: f"{short(rng, key, 3)}_{mark}",
    "k8.LSB": lambda rng, key, other, mark: f"{_noise(rng)}{_digits(rng, 1)}.{short(rng, key, 3).upper()}",
    "9LB": lambda rng, key, other, mark: f"{_digits(rng, 1)}{short(rng, key, 2).upper()}{_noise(rng)}",
}
FOR_TWO_WORDS: dict[str, Convention] = {
    "SMITH, J.": lambda rng, key, other, mark: f"{key.upper()}, {other}.",
    "J.Smith/31": lambda rng, key, other, mark: f"{other}.{key}/{_digits(rng, 2)}",
    "SMT.J": lambda rng, key, other, mark: f"{short(rng, key, 3).upper()}.{other}",
    "j/SMT4": lambda rng, key, other, mark: f"{other.lower()}/{short(rng, key, 3).upper()}{_digits(rng, 1)}",
}
# Met in no training database.
FOR_TEST_ONLY: dict[str, Convention] = {
    "L**b": lambda rng, key, other, mark: (
        f"{short(rng, key, 2)[0]}**{short(rng, key, 2)[1]}{_digits(rng, 1)}"
    ),
    "Lsb=14": lambda rng, key, other, mark: f"{short(rng, key, 3)}={_digits(rng, 2)}",
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
        mark = (_noise(rng) + _noise(rng)).upper()
        keys: dict[str, str] = {}
        forms: dict[str, str] = {}
        for name in column.said:
            words = name.split()
            key = words[column.key_word].capitalize()
            other = words[0 if column.key_word else -1][0].upper()
            for _ in range(20):
                stored = convention(rng, key, other, mark)
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
