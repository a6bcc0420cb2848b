"""Readers of question files: this package's JSONL and CSV, and the files of Spider, BIRD and sql-eval."""

import csv
import json
from collections.abc import Iterator
from dataclasses import MISSING, fields
from io import StringIO
from itertools import chain, combinations, islice
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import DataError

_TYPES = {
    name: get_args(hint) if isinstance(hint, UnionType) else (get_origin(hint) or hint,)
    for name, hint in get_type_hints(Example).items()
}
_REQUIRED = tuple(field.name for field in fields(Example) if field.default is MISSING)
_JSON_NAMES = {str: "a string", bool: "true or false", NoneType: "null", tuple: "a list of non-empty strings"}
_NAMED_BY = "query (Spider) or SQL (BIRD)"


class Question(NamedTuple):
    """One question and its place.

    Attributes:
        place: File and line (or index in a JSON list), for errors.
        has_gold_is_empty: True if the format of its file has the field `gold_is_empty`.
    """

    example: Example
    place: str
    has_gold_is_empty: bool


def read_questions(path: Path, *, limit: int | None = None) -> list[Question]:
    """Read the questions of a file, in order, without running their golds.

    The file's suffix decides: `.jsonl` (any suffix but the next two), one object a line with the fields of
    `Example`; `.csv` with those fields as its header, where an empty cell is an absent field and
    `other_golds` a JSON list; `.json`, a list as published by Spider (`db_id`, `question`, `query`), BIRD
    (`db_id`, `question`, `evidence`, `SQL`, `question_id`) and defog's sql-eval (`db_name`, `question`,
    `query`, `instructions`), whose CSV is read too. Evidence and instructions are put behind the
    question, and sql-eval's alternatives (see `accepted_queries`) become `other_golds`. There ids are made
    of the file's name and the question's id or number, and further fields are skipped.

    Args:
        path: The file, in UTF-8. Blank lines are skipped.
        limit: Only the first n questions; None for all.

    Raises:
        DataError: The file or a question in it is wrong; names the place.
    """
    if limit is not None and limit < 1:
        raise DataError(f"limit must be an int >= 1 or None, got {limit} (for {path})")
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the questions as UTF-8: {error} (at {path})") from error
    readers = {".json": _published, ".csv": _csv_rows}
    read = readers.get(path.suffix.lower(), _json_lines)
    questions = list(islice(read(text, path), limit))
    places: dict[str, str] = {}
    for example, place, _ in questions:
        first = places.setdefault(example.id, place)
        if first != place:
            raise DataError(f"id {example.id!r} is used twice (at {place}, first at {first})")
    if not questions:
        forms = {".json": "a list of objects", ".csv": "a header and one question a row"}
        form = forms.get(path.suffix.lower(), "one JSON object a line")
        raise DataError(f"no questions in {path}; it must hold {form}")
    return questions


def _json_lines(text: str, path: Path) -> Iterator[Question]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield read_line(line, f"{path}:{number}")


def read_line(line: str, place: str) -> Question:
    """Parse one line of a JSONL file.

    Raises:
        DataError: It is no question; names the place.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"cannot read {line[:80]!r} as a JSON object: {error} (at {place})") from error
    return Question(_example(row, place), place, has_gold_is_empty=True)


def _csv_rows(text: str, path: Path) -> Iterator[Question]:
    reader = csv.DictReader(StringIO(text, newline=""), strict=True)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise DataError(f"cannot read CSV: {error} (at {path}:{reader.line_num})") from error
        if row is None:
            return
        place = f"{path}:{reader.line_num}"
        if None in row or None in row.values():
            n_cells = len(reader.fieldnames or ())
            raise DataError(f"the row must have {n_cells} cells, got more or fewer (at {place})")
        if "db_name" in row:
            yield _published_question(row, reader.line_num, path, place)
            continue
        cells = {name: _csv_value(name, cell, place) for name, cell in row.items() if cell != ""}
        yield Question(_example(cells, place), place, has_gold_is_empty=True)


def _csv_value(name: str, cell: str, place: str) -> Any:
    if bool in _TYPES.get(name, ()):
        return {"true": True, "false": False}.get(cell.lower(), cell)
    if tuple in _TYPES.get(name, ()):
        try:
            return json.loads(cell)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{name} must be a JSON list, got {cell[:80]!r} (at {place})") from error
    return cell


def _published(text: str, path: Path) -> Iterator[Question]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"cannot read a JSON list of questions: {error} (at {path})") from error
    if not isinstance(rows, list):
        raise DataError(f"a .json file of questions must be a list, got {type(rows).__name__} (at {path})")
    for number, row in enumerate(rows):
        yield _published_question(row, number, path, f"{path}[{number}]")


def _published_question(row: Any, number: int, path: Path, place: str) -> Question:
    """Question of a published file; `number` makes its id if it has none."""
    if not isinstance(row, dict):
        raise DataError(f"a question must be a JSON object, got {json.dumps(row)[:80]} (at {place})")
    gold = row.get("query", row.get("SQL"))
    if gold is None:
        names = ", ".join(row) or "none"
        raise DataError(f"a question needs its gold as {_NAMED_BY}, got {names} (at {place})")
    has_choices = "db_name" in row and isinstance(gold, str)
    accepted = (accepted_queries(gold) or [""]) if has_choices else [gold]
    own = {
        "id": f"{path.stem}-{row.get('question_id', number)}",
        "database": row.get("db_id", row.get("db_name")),
        "question": row.get("question"),
        "gold_sql": accepted[0],
        "other_golds": row.get("alternatives") or accepted[1:],
        "difficulty": row.get("difficulty", row.get("hardness", "medium")),
        "split": "train" if path.stem.startswith("train") else path.stem,
    }
    for title in ("Evidence", "Instructions"):
        if (hint := row.get(title.lower())) and isinstance(own["question"], str):
            own["question"] += f"\n{title}: {hint}"
    return Question(_example(own, place), place, has_gold_is_empty=False)


def accepted_queries(query: str) -> list[str]:
    """Queries that a `query` of sql-eval accepts, by its own rule (`eval/eval.py`).

    Semicolons separate them, and braces stand for every choice of the columns within.

    >>> accepted_queries("SELECT {id, name} FROM t; SELECT 1;")
    ['SELECT id FROM t', 'SELECT name FROM t', 'SELECT id, name FROM t', 'SELECT 1']
    """
    found = []
    for part in filter(None, map(str.strip, query.split(";"))):
        before, brace, rest = part.partition("{")
        inside, end, after = rest.partition("}")
        if not brace or not end:
            found.append(part)
            continue
        columns = [column.strip() for column in inside.split(",")]
        sizes = range(1, len(columns) + 1)
        for chosen in map(", ".join, chain.from_iterable(combinations(columns, size) for size in sizes)):
            found.append(before + chosen + after.replace("GROUP BY {}", f"GROUP BY {chosen}"))
    return found


def _example(row: Any, place: str) -> Example:
    if not isinstance(row, dict):
        raise DataError(f"a question must be a JSON object, got {json.dumps(row)[:80]!r} (at {place})")
    row = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    for name, value in row.items():
        if name not in _TYPES:
            raise DataError(f"unknown field {name!r} (at {place}); known: {', '.join(_TYPES)}")
        is_text = not isinstance(value, tuple) or all(
            isinstance(part, str) and part.strip() for part in value
        )
        if type(value) not in _TYPES[name] or not is_text:
            expected = " or ".join(_JSON_NAMES[kind] for kind in _TYPES[name])
            raise DataError(f"{name} must be {expected}, got {json.dumps(value)[:80]} (at {place})")
    for name in _REQUIRED:
        if not row.get(name, "").strip():
            found = "an empty one" if name in row else "none"
            raise DataError(f"a question needs a field {name!r} with text, got {found} (at {place})")
    return Example(**row)
