"""Writes the bundled databases, `data/databases/*.sql` and `*.json`, from their specs.

    python data/make_databases.py            # write every file, byte for byte the same each time
    python data/make_databases.py --check    # compare only; exit 1 on a difference
    python data/make_databases.py --blind    # how often guessing a stored form without looking works

A `said` column stores its values as real databases do: codes, surnames first, legal suffixes, flags. The form
cannot be worked out without looking at the column (see `specs/stored_forms.py`).
"""

import argparse
import json
import re
import sqlite3
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random

from specs import ALL_DATABASES
from specs.kit import Column, Database, Made, Table, Value, key_of
from specs.stored_forms import Namer
from specs.wording import WORDING

FOLDER = Path(__file__).parent / "databases"


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[a-z_]+", name) and name not in ("order", "group") else f'"{name}"'


def _literal(value: Value) -> str:
    if value is None:
        return "NULL"
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


def _with_near(rng: Random, stored: list[Value], near: dict[str, str]) -> list[Value]:
    """Some rows of most values hold the near-duplicate, which nobody asks about; two rows stay at least."""
    values = list(stored)
    for form in sorted(near):
        places = [place for place, value in enumerate(stored) if value == form]
        count = min(len(places) - 2, max(1, len(places) // 4))
        for place in rng.sample(places, max(0, count)):
            values[place] = near[form]
    return values


def make_table(database: Database, spec: Table, namer: Namer) -> tuple[str, dict[str, dict[str, str]]]:
    """SQL text of one table, and the `said` maps of its columns."""
    made: Made = {}
    said: dict[str, dict[str, str]] = {}
    for column in spec.columns:
        rng = Random(f"{database.name}.{spec.name}.{column.name}")
        made[column.name] = column.make(rng, spec.rows, made)
        if column.said:
            forms = namer.forms(database, spec, column)
            stored = [forms.stored[str(name)] for name in made[column.name]]
            made[column.name] = _with_near(rng, stored, forms.near)
            said[f"{spec.name}.{column.name}"] = {str(code): name for name, code in forms.stored.items()}
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


def _clauses(database: Database, table: Table, column: Column) -> dict[str, list[str]] | list[str]:
    if column.clauses:
        return {said: list(phrases) for said, phrases in column.clauses.items()}
    return list(WORDING.get(f"{database.name}.{table.name}.{column.name}", ())[1:])


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
            "clauses": {
                f"{spec.name}.{column.name}": clauses
                for spec in database.tables
                for column in spec.columns
                if (clauses := _clauses(database, spec, column))
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
    with ExitStack() as stack:
        for name in (name for name in files if name.endswith(".json")):
            words = json.loads(files[name])
            connection = stack.enter_context(closing(sqlite3.connect(":memory:")))
            connection.executescript(files[name.replace(".json", ".sql")])
            for place, forms in words["said"].items():
                table, column = place.split(".")
                rows = connection.execute(f'SELECT DISTINCT CAST({column} AS TEXT) FROM "{table}"').fetchall()
                pairs[words["split"]] += len(forms)
                for guess, predicate in GUESSES.items():
                    for stored, said in forms.items():
                        operator, pattern = predicate(said)
                        selected = {
                            other
                            for (other,) in rows
                            if connection.execute(f"SELECT ? {operator} ?", (other, pattern)).fetchone()[0]
                        }
                        hits[guess][words["split"]] += selected == {stored}
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
