"""Questions of rows, their columns mapped by name: dicts, a `datasets.Dataset`, a dataset of the Hub."""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain, combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from text2sql_grpo.checked import adapter, problems
from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.names import plain_name

if TYPE_CHECKING:  # slow to import
    from datasets import Dataset

Source = Path | str | Iterable[Mapping[str, Any] | Example]

_REQUIRED = tuple(field.name for field in fields(Example) if field.default is MISSING)
_COLUMNS = {field.name: (field.name,) for field in fields(Example)} | {
    "id": ("id", "question_id", "instance_id", "qid"),
    "gold_sql": ("gold_sql", "query", "sql", "gold", "gold_query", "golden_sql", "golden_query", "sql_query"),
    "database": ("database", "db_id", "db_name", "db", "selected_database"),
    "difficulty": ("difficulty", "hardness"),
    "other_golds": ("other_golds", "alternatives"),
}
# Read where a row has none of the columns above: they may also hold a result, or the text of a prompt.
_LAST_COLUMNS = {
    "question": ("nl_question", "natural_language_question", "utterance", "prompt", "text"),
    "gold_sql": ("answer", "answer_sql", "expected", "expected_sql", "reference", "target", "output"),
}
_HINTS = ("evidence", "instructions")
EDITED = "-edited"  # behind the id of a question that a review corrected
_QUOTED = re.compile("'(?:[^']|'')*'|\"[^\"]*\"|\0")  # and the mark of `accepted_queries` itself
_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")
_HUB_ID = re.compile(r"hub:(?P<path>[^:]+)(:(?P<name>[^:\[]+))??(:(?P<split>[^:\[]+(\[.*\])?))?")


class Question(NamedTuple):
    """One question and its place.

    Attributes:
        place: File and line, or index of the row, for errors.
        has_gold_is_empty: True if its row has the field `gold_is_empty` or `gold_sql`, as this package's do.
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


_FIELDS = {
    plain_name(column): name
    for columns in (_COLUMNS, _LAST_COLUMNS)
    for name, names in columns.items()
    for column in names
}


def is_known(column: str) -> bool:
    """True for a column that `row_question` reads."""
    return plain_name(column) in _FIELDS or plain_name(column) in _HINTS


@lru_cache(maxsize=1024)
def _meant(column: str) -> str | None:
    """Field whose name a column nearly has; None for a known or a different name."""
    name = plain_name(column)
    (close,) = get_close_matches(name, _FIELDS, n=1, cutoff=0.84) or (None,)
    is_longer = close is not None and name.startswith(close) and len(name) > len(close) + 1  # query_toks
    return None if close is None or is_longer or is_known(column) else _FIELDS[close]


def row_question(
    row: Any, number: int, place: str, *, origin: str = "", database: str | None = None
) -> Question:
    """Question of one row of Spider, BIRD, sql-eval, LiveSQLBench, this package's files, or a table of yours.

    Columns are found by name, whatever its case, blanks and signs; docs/databases.md lists the names. Further
    columns are skipped. Evidence and instructions are put behind the question, and sql-eval's alternatives
    (see `accepted_queries`) become `other_golds`.

    Args:
        row: The row, or an example.
        number: Makes the id of a row without any.
        origin: File or split, in front of such an id.
        database: Name of the database for a row without one.

    Raises:
        DataError: A column is missing or misspelt, or a value is wrong; names the place.
    """
    if isinstance(row, Example):
        return Question(_example(vars(row), place), place, has_gold_is_empty=True)
    if not isinstance(row, Mapping):
        raise DataError(f"a question must be a JSON object, got {str(row)[:80]} (at {place})")
    if row.get("verdict") == "edit" and "verified_at" in row and isinstance(row.get("id"), str):
        row = {**row, "id": row["id"] + EDITED}  # the id alone is the question as it was, in quarantine
    if "sol_sql" in row:
        row = _of_livesqlbench(row)
    cells: dict[str, dict[str, Any]] = {}  # by the name of their column, then as it is spelt
    for column, value in row.items():
        if (value := _plain(value)) is not None:
            cells.setdefault(plain_name(str(column)), {})[str(column)] = value
    given = {name: _value(cells, columns, place) for name, columns in _COLUMNS.items()}
    for name, columns in _LAST_COLUMNS.items():
        given[name] = _value(cells, columns, place) if given[name] is None else given[name]
    for column in row:
        meant = _meant(str(column))
        if meant is not None and given[meant] is None:
            raise DataError(f"unknown field {column!r} (at {place}): did you mean {meant}?")
    if given["id"] is None or cells.keys().isdisjoint(("id", "instanceid")):
        key = number if given["id"] is None else given["id"]
        prefix = origin or ("row" if given["id"] is None else "")  # a bare number may be the id of another
        given["id"] = f"{prefix}-{key}" if prefix else key
    if type(given["id"]) is int:  # no bool
        given["id"] = str(given["id"])
    given["database"] = given["database"] or database
    if origin and given["split"] is None:
        given["split"] = "train" if origin.startswith("train") else origin
    missing = [name for name in _REQUIRED if given[name] is None]
    if missing:
        wanted = ", and of ".join(" or ".join(_COLUMNS[name][:3]) for name in missing)
        names = {plain_name(column) for name in missing for column in _COLUMNS[name]}
        shown = list(map(str, row))
        empty = ", ".join(column for column in shown if plain_name(column) in names)
        found = f"nothing in {empty}" if empty else f"the columns {', '.join(shown) or 'none'}"
        raise DataError(f"a question needs a value of {wanted}, got {found} (at {place})")
    if "dbname" in cells and isinstance(given["gold_sql"], str):
        given["gold_sql"], *others = accepted_queries(given["gold_sql"]) or [""]
        given["other_golds"] = given["other_golds"] or others
    for hint in _HINTS:
        if (text := _value(cells, (hint,), place)) and isinstance(given["question"], str):
            given["question"] += f"\n{hint.title()}: {text}"
    known = {name: value for name, value in given.items() if value is not None}
    with suppress(KeyError, TypeError, ValueError, RecursionError):  # a cell of CSV holds a JSON list
        known["other_golds"] = json.loads(known["other_golds"])
    has_gold_is_empty = "goldsql" in cells or "gold_is_empty" in known
    return Question(_example(known, place), place, has_gold_is_empty=has_gold_is_empty)


def _of_livesqlbench(row: Mapping[str, Any]) -> dict[str, Any]:
    """Row whose `query` is the question, and whose `sol_sql` is the gold query or a list of it alone."""
    solution = row["sol_sql"]
    gold = solution[0] if isinstance(solution, list) and len(solution) == 1 else solution
    return {**row, "question": row.get("question", row.get("query")), "query": None, "sql": gold}


def _value(cells: Mapping[str, Mapping[str, Any]], columns: Iterable[str], place: str) -> Any:
    """Value of the first of some columns that a row has; None if it has none of them."""
    found = {column: value for name in columns for column, value in cells.get(plain_name(name), {}).items()}
    texts = {column: value for column, value in found.items() if isinstance(value, str)}
    if len(set(texts.values())) > 1:
        raise DataError(f"the columns {' and '.join(texts)} contradict each other: keep one (at {place})")
    return next(iter(found.values()), None)


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
    """Value as JSON has it: pandas' NaN, NA and NaT are missing ones, and values of NumPy are Python's."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and math.isnan(value)):
        return None
    return str(value) if isinstance(value, str) else value


def _example(row: Mapping[str, Any], place: str) -> Example:
    """Example of a mapping with the fields of `Example`.

    Raises:
        DataError: A value is of a wrong type or empty; names the place.
    """
    from pydantic import ValidationError

    try:
        example: Example = adapter(Example).validate_python(row)
    except ValidationError as error:
        raise DataError(f"{problems(error, Example)} (at {place})") from error
    for name, value in row.items():
        if isinstance(value, str) and _HALF_OF_A_PAIR.search(value):
            raise DataError(f"{name} holds half of a surrogate pair, {value!r:.80} (at {place})")
    texts = {name: (row[name],) for name in _REQUIRED} | {"other_golds": example.other_golds}
    for name, values in texts.items():
        if not all(map(str.strip, values)):
            raise DataError(f"a question needs a field {name!r} with text, got an empty one (at {place})")
    return example
