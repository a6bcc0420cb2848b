"""Questions of rows, their columns mapped by name: dicts, a `datasets.Dataset`, a dataset of the Hub."""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from itertools import chain, combinations
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin, get_type_hints

from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import DataError

if TYPE_CHECKING:  # slow to import
    from datasets import Dataset

Source = Path | str | Iterable[Mapping[str, Any] | Example]

TYPES = {
    name: get_args(hint) if isinstance(hint, UnionType) else (get_origin(hint) or hint,)
    for name, hint in get_type_hints(Example).items()
}
_REQUIRED = tuple(field.name for field in fields(Example) if field.default is MISSING)
_JSON_NAMES = {str: "a string", bool: "true or false", NoneType: "null", tuple: "a list of non-empty strings"}
_COLUMNS = {name: (name,) for name in TYPES} | {
    "gold_sql": ("gold_sql", "query", "sql", "SQL"),
    "database": ("database", "db_id", "db_name"),
    "difficulty": ("difficulty", "hardness"),
    "other_golds": ("other_golds", "alternatives"),
}
# Fields of a reviewed question beyond those of `Example`.
_REVIEW = ("name", "verified_by", "verified_at", "use_as_onboarding_question", "phrasings", "verdict", "was")
EDITED = "-edited"  # behind the id of a question that a review corrected
_QUOTED = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"")
_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")
_HUB_ID = re.compile(r"hub:(?P<path>[^:]+)(:(?P<name>[^:\[]+))??(:(?P<split>[^:\[]+(\[.*\])?))?")


class Question(NamedTuple):
    """One question and its place.

    Attributes:
        place: File and line, or index of the row, for errors.
        has_gold_is_empty: True if its row or the format of its file has the field `gold_is_empty`.
    """

    example: Example
    place: str
    has_gold_is_empty: bool


def is_hub_id(source: object) -> bool:
    """True for `hub:owner/name`, as text or as a path of the command line."""
    return isinstance(source, str | Path) and os.fspath(source).startswith("hub:")


def source_name(source: Source) -> str:
    """Name of a source of questions, for errors."""
    return str(source) if isinstance(source, str | Path) else "the rows"


def hub_dataset(source: Path | str) -> "Dataset":
    """Load `hub:owner/name[:split]` or `hub:owner/name:config:split`; the split is `train` if not named.

    Raises:
        DataError: The id is wrong, or the dataset is neither in the cache of `datasets` nor can be loaded.
    """
    found = _HUB_ID.fullmatch(os.fspath(source))
    if found is None:
        raise DataError(f"a dataset of the Hub must be hub:owner/name[:config][:split], got {source}")
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        return load_dataset(found["path"], found["name"], split=found["split"] or "train")
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(
            f"cannot load the dataset: {error} ({source}); check its name, config and split, and "
            "HF_TOKEN; without a network, load it once where there is one and copy the cache (HF_HOME)"
        ) from error


def hub_questions(source: Path | str, database: str | None) -> Iterator[Question]:
    """Questions of a dataset of the Hub; see `row_question`."""
    dataset = hub_dataset(source)
    for number, row in enumerate(dataset):
        split = re.split(r"\W", str(dataset.split))[0]
        yield row_question(row, number, f"{source}[{number}]", origin=split, database=database)


def iterable_questions(rows: Any, database: str | None) -> Iterator[Question]:
    """Questions of dicts or examples; see `row_question`."""
    if isinstance(rows, Mapping):
        raise DataError(f"questions must be rows, got a mapping of {', '.join(map(str, rows))}: choose one")
    rows = rows.to_dict("records") if hasattr(rows, "iterrows") else rows  # of pandas
    if not isinstance(rows, Iterable):
        raise DataError(f"questions must be rows, a file or hub:owner/name, got {type(rows).__name__}")
    for number, row in enumerate(rows):
        place = f"row {number}"
        is_example = isinstance(row, Example)
        yield (
            Question(row, place, True) if is_example else row_question(row, number, place, database=database)
        )


def row_question(
    row: Any, number: int, place: str, *, origin: str = "", database: str | None = None
) -> Question:
    """Question of one row as Spider, BIRD, sql-eval or this package publish them; other columns are skipped.

    The gold query is in `gold_sql`, `query`, `sql` or `SQL`, the database's name in `database`, `db_id` or
    `db_name`, and any other field of `Example` in the column of its name. Evidence and instructions are put
    behind the question, and sql-eval's alternatives (see `accepted_queries`) become `other_golds`.

    Args:
        number: Makes the id of a row without `id` and `question_id`.
        origin: File or split, in front of such an id.
        database: Name of the database for a row without one.

    Raises:
        DataError: A column is missing, or a value is wrong; names the place.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"a question must be a JSON object, got {str(row)[:80]} (at {place})")
    row = {column: _plain(value) for column, value in row.items()}
    for columns in _COLUMNS.values():
        texts = {column: row[column] for column in columns if isinstance(row.get(column), str)}
        if len(set(texts.values())) > 1:
            raise DataError(f"the columns {' and '.join(texts)} contradict each other: keep one (at {place})")
    given = {
        name: next((row[column] for column in columns if row.get(column) is not None), None)
        for name, columns in _COLUMNS.items()
    }
    if given["id"] is None:
        key = number if row.get("question_id") is None else row["question_id"]
        given["id"] = f"{origin}-{key}" if origin else key
    if isinstance(given["id"], int):
        given["id"] = str(given["id"])
    given["database"] = given["database"] or database
    if origin and given["split"] is None:
        given["split"] = "train" if origin.startswith("train") else origin
    missing = [" or ".join(_COLUMNS[name]) for name in _REQUIRED if given[name] is None]
    if missing:
        wanted, found = ", and of ".join(missing), ", ".join(map(str, row)) or "none"
        raise DataError(f"a question needs a value of {wanted}, got the columns {found} (at {place})")
    if "db_name" in row and isinstance(given["gold_sql"], str):
        given["gold_sql"], *others = accepted_queries(given["gold_sql"]) or [""]
        given["other_golds"] = given["other_golds"] or others
    for title in ("Evidence", "Instructions"):
        if (hint := row.get(title.lower())) and isinstance(given["question"], str):
            given["question"] += f"\n{title}: {hint}"
    known = {name: value for name, value in given.items() if value is not None}
    return Question(example_of(known, place), place, has_gold_is_empty="gold_is_empty" in known)


def with_field_names(row: Any, number: int | str, database: str | None) -> Any:
    """Row with its columns named as the fields of `Example`, an id of its number and a default database.

    Other columns stay as they are, so that a misspelt field can be refused; those of a review are dropped.
    """
    if not isinstance(row, dict):
        return row
    row = dict(row)
    if "verified_at" in row:
        if row.get("verdict") == "edit" and isinstance(row.get("id"), str):
            row["id"] += EDITED  # the id alone is the question as it was, which is in quarantine
        row = {name: value for name, value in row.items() if name not in _REVIEW}
    for name, columns in (_COLUMNS | {"id": ("id", "question_id")}).items():
        column = next((column for column in columns if column in row), None)
        if column is not None:
            row[name] = row.pop(column)
    key = row.get("id", number)
    row["id"] = str(key) if type(key) is int else key  # no bool
    if database is not None:
        row.setdefault("database", database)
    return row


def accepted_queries(query: str) -> list[str]:
    """Queries that a `query` of sql-eval accepts, by its own rule (`eval/eval.py`).

    Semicolons separate them, and braces stand for every choice of the columns within; not so in quotes.

    >>> accepted_queries("SELECT {id, name} FROM t; SELECT 1;")
    ['SELECT id FROM t', 'SELECT name FROM t', 'SELECT id, name FROM t', 'SELECT 1']
    """
    found, quoted = list[str](), list[str]()

    def hidden(match: re.Match[str]) -> str:
        quoted.append(match[0])
        return f"\0{len(quoted) - 1}\0"

    query = _QUOTED.sub(hidden, query)
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
    return [re.sub("\0(\\d+)\0", lambda place: quoted[int(place[1])], part) for part in found]


def _plain(value: Any) -> Any:
    """Value as JSON has it: pandas' NaN is a missing one, and NumPy's text is text."""
    if isinstance(value, float) and math.isnan(value):
        return None
    return str(value) if isinstance(value, str) else value


def example_of(row: Any, place: str) -> Example:
    """Example of an object with the fields of `Example`.

    Raises:
        DataError: A field is unknown, missing or of a wrong type; names the place.
    """
    if not isinstance(row, dict):
        raise DataError(f"a question must be a JSON object, got {json.dumps(row)[:80]!r} (at {place})")
    row = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    for name, value in row.items():
        if name not in TYPES:
            raise DataError(f"unknown field {name!r} (at {place}); known: {', '.join(TYPES)}")
        is_text = not isinstance(value, tuple) or all(
            isinstance(part, str) and part.strip() for part in value
        )
        if isinstance(value, str) and _HALF_OF_A_PAIR.search(value):
            raise DataError(
                f"{name} holds half of a surrogate pair, which is no text, {value!r:.80} (at {place})"
            )
        if type(value) not in TYPES[name] or not is_text:
            expected = " or ".join(_JSON_NAMES[kind] for kind in TYPES[name])
            shown = json.dumps(value, default=str)[:80]
            raise DataError(f"{name} must be {expected}, got {shown} (at {place})")
    for name in _REQUIRED:
        if not row.get(name, "").strip():
            found = "an empty one" if name in row else "none"
            raise DataError(f"a question needs a field {name!r} with text, got {found} (at {place})")
    return Example(**row)
