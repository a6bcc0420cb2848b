"""Fills the stored forms into the questions written by hand: `specs/handwritten.jsonl` -> `questions/`.

    python data/make_handwritten.py            # write both files, byte for byte the same each time
    python data/make_handwritten.py --check    # compare only; exit 1 on a difference

Questions about the test databases go to `test_handwritten.jsonl`, the others to `handwritten.jsonl`. In the
source a value stands as people say it, `{visit.doctor=Jon Smith}`; the databases' words say how it is stored.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "specs" / "handwritten.jsonl"
QUESTIONS = FOLDER / "questions"
SAID = re.compile(r"\{([a-z ]+)\.([a-z]+)=([^}]+)\}")


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _name(name: str) -> str:
    return name if re.fullmatch(r"[a-z_]+", name) and name not in ("order", "group") else f'"{name}"'


def _look(table: str, column: str) -> str:
    """Query that lists a column: how a value is written there is known only after a look."""
    return f"SELECT DISTINCT {column} FROM {_name(table)}"


def _row(number: int, source: dict[str, Any]) -> dict[str, Any]:
    words = json.loads((FOLDER / "databases" / f"{source['database']}.json").read_text(encoding="utf-8"))

    def stored(match: re.Match[str]) -> str:
        table, column, said = match.groups()
        forms = words["said"].get(f"{table}.{column}", {said: said})
        for form, name in forms.items():
            if name.lower() == said.lower():
                return str(form) if form.isdigit() else _text(form)
        where = f"{SOURCE}:{number}"
        raise SystemExit(f"no value of {table}.{column} is said as {said!r} ({where})")

    split = "test_handwritten" if words["split"] == "test" else "handwritten"
    row = {
        "id": f"hand-{number:04}",
        "database": source["database"],
        "question": source["question"],
        "gold_sql": SAID.sub(stored, source["sql"]),
        "difficulty": source["difficulty"],
        "split": split,
        "family": source["family"],
        "template": None,
    }
    values = list(dict.fromkeys(match.groups() for match in SAID.finditer(source["sql"])))
    if source["family"] == "lookup":
        row["look_sql"] = " UNION ALL ".join(_look(table, column) for table, column, _ in values)
        row["guess_sql"] = SAID.sub(lambda match: _text(match[3]), source["sql"])
    elif values:
        ((table, column, value),) = values
        row["check_sql"] = f"{_look(table, column)} WHERE {column} LIKE {_text(f'%{value}%')}"
    if source.get("gold_is_empty"):
        row["gold_is_empty"] = True
    return row


def made() -> dict[str, str]:
    """Text of each file, by its name."""
    texts = {"handwritten": "", "test_handwritten": ""}
    for number, line in enumerate(SOURCE.read_text(encoding="utf-8").splitlines(), start=1):
        row = _row(number, json.loads(line))
        texts[row["split"]] += json.dumps(row, ensure_ascii=False) + "\n"
    return {f"{split}.jsonl": text for split, text in texts.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only; do not write")
    only_check = parser.parse_args().check
    files = made()
    if only_check:
        sys.exit(any((QUESTIONS / name).read_text(encoding="utf-8") != text for name, text in files.items()))
    for name, text in files.items():
        (QUESTIONS / name).write_text(text, encoding="utf-8", newline="\n")
    print(f"wrote {' and '.join(files)} to {QUESTIONS}")
