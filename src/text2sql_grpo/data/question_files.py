"""Questions of any source, and readers of question files: JSONL, CSV, TSV and JSON lists."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from io import BytesIO, StringIO
from numbers import Integral
from pathlib import Path
from typing import Any

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.question_rows import (
    Question,
    Source,
    hub_dataset,
    is_hub_id,
    is_known,
    row_question,
    source_name,
)
from text2sql_grpo.data.row_files import EXCEL_SEPARATOR
from text2sql_grpo.errors import DataError

_TABLES = (".csv", ".tsv")
_SEPARATORS = ",;\t|"
_LEFT_OUT = ("wrong", "skip")  # verdicts of a review
_OTHER_FILES = (".parquet", ".xlsx", ".arrow", ".feather")

_Rows = Iterator[tuple[int, str, Any]]  # number, place and value of each


def only_name(databases: Databases) -> str | None:
    """Name of the database of questions that name none; None if there are several databases."""
    names = databases.names()
    return names[0] if len(names) == 1 else None


def read_questions(
    source: Source,
    *,
    limit: int | None = None,
    database: str | None = None,
    keep: Callable[[Example], bool] = lambda example: True,
) -> list[Question]:
    """Read the questions of a source, in order, without running their golds.

    A source is a list of dicts, a `datasets.Dataset`, a Hub id such as `hub:xlangai/spider:train`, a list of
    examples, or a file in UTF-8. Columns of each are mapped by `row_question`. The file's suffix decides:
    `.json` holds a list of objects; `.csv` and `.tsv` a header, where commas, semicolons, tabs or bars
    separate and an empty cell is an absent field; any other file one object a line. Of questions that
    `review` wrote, the right and the corrected ones are read.

    Args:
        limit: Only the first n questions, of those that `keep` chooses; None for all.
        database: Name of the database for rows without one.
        keep: Function that chooses among the questions.

    Raises:
        DataError: The source or a question in it is wrong; names the place.
    """
    if limit is not None and not (isinstance(limit, Integral) and limit >= 1):
        raise DataError(f"limit must be an int >= 1 or None, got {limit!r} (for {source_name(source)})")
    kept: list[Question] = []
    places: dict[str, str] = {}
    for question in _questions(source, database):
        first = places.setdefault(question.example.id, question.place)
        if first != question.place:
            raise DataError(
                f"id {question.example.id!r} is used twice (at {question.place}, first at {first})"
            )
        if keep(question.example):
            kept.append(question)
        if len(kept) == limit:
            break
    if not places:
        forms = {".json": "a list of objects"} | dict.fromkeys(_TABLES, "a header and one question a row")
        where, hint = source_name(source), ""
        if isinstance(source, str | Path) and not is_hub_id(source):
            hint = f"; it must hold {forms.get(Path(source).suffix.lower(), 'one JSON object a line')}"
        raise DataError(f"no questions in {where}{hint}")
    return kept


def _questions(source: Source, database: str | None) -> Iterator[Question]:
    if not isinstance(source, str | Path):
        origin, rows = "", _given_rows(source)
    elif is_hub_id(source):
        dataset = hub_dataset(source)
        origin = re.split(r"\W", str(dataset.split))[0]
        rows = ((number, f"{source}[{number}]", row) for number, row in enumerate(dataset))
    else:
        origin, rows = Path(source).stem, _file_rows(source)
    for number, place, row in rows:
        yield row_question(row, number, place, origin=origin, database=database)


def _given_rows(rows: Any) -> _Rows:
    if isinstance(rows, Mapping):
        raise DataError(f"questions must be rows, got a mapping of {', '.join(map(str, rows))}: choose one")
    rows = rows.to_dict("records") if hasattr(rows, "iterrows") else rows  # of pandas
    if not isinstance(rows, Iterable):
        raise DataError(f"questions must be rows, a file or hub:owner/name, got {type(rows).__name__}")
    return ((number, f"row {number}", row) for number, row in enumerate(rows))


def _file_rows(source: str | Path) -> _Rows:
    path = Path(source)
    if path.suffix.lower() in _OTHER_FILES:
        raise DataError(
            f"questions are read from .jsonl, .json, .csv and .tsv, got {path}: load it with `datasets`"
        )
    if not path.exists() and re.fullmatch(r"[\w-]+/[\w-]+", str(source)):
        raise DataError(f"cannot read the questions: no file {path}; a dataset of the Hub is hub:{source}")
    if path.suffix.lower() not in (".json", *_TABLES):
        return _json_lines(path)
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        hint = ": save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise DataError(f"cannot read the questions: {error} (at {path}){hint}") from error
    return (_json_list if path.suffix.lower() == ".json" else _csv_rows)(text, path)


def _json_lines(path: Path) -> _Rows:
    for number, _, line in question_lines(path):
        yield number, f"{path}:{number}", _json_row(line, path, number)


def question_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number from 1, first byte and content of each line of a JSONL file, but for blank and judged ones.

    Left out are judgements of a review that are wrong or skipped. Of several judgements of one query of a
    question, the last one counts.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            lines = file if file.seekable() else BytesIO(file.read())  # a pipe is read once
            left_out, offset = _left_out_by_review(lines), 0
            lines.seek(0)
            for number, line in enumerate(lines, start=1):
                if line.strip() and number not in left_out:
                    yield number, offset, line
                offset += len(line)
    except OSError as error:
        raise DataError(f"cannot read the questions: {error} (at {path})") from error


def _left_out_by_review(lines: Iterable[bytes]) -> set[int]:
    left_out, last = set[int](), dict[tuple[str, ...], int]()
    for number, line in enumerate(lines, start=1):
        if b'"verified_at"' not in line:
            continue
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if not isinstance(row, dict) or "verified_at" not in row:
                continue
            key = tuple(str(row.get(name)) for name in ("database", "question", "sql"))
            if row.get("verdict") in _LEFT_OUT:
                left_out.add(number)
            if key in last:
                left_out.add(last[key])
            last[key] = number
    return left_out


def read_line(line: bytes, path: Path, number: int, *, database: str | None = None) -> Question:
    """Parse one line of a JSONL file.

    Args:
        number: Number of the line, from 1.
        database: Name of its database if the line has none.

    Raises:
        DataError: It is no question; names the place.
    """
    row = _json_row(line, path, number)
    return row_question(row, number, f"{path}:{number}", origin=path.stem, database=database)


def _json_row(line: bytes, path: Path, number: int) -> Any:
    place = f"{path}:{number}"
    try:
        text = line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read the questions: {error} (at {place}): save it as UTF-8") from error
    hint = " (.json holds a list)" if text.startswith("[") else ""
    return parsed_json(text, f"{text[:80]!r} as a JSON object{hint}", place)


def parsed_json(text: str, what: str, place: object) -> Any:
    """Value of a JSON text; a DataError that names what cannot be read where, if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"cannot read {what}: {error} (at {place})") from error


def _csv_rows(text: str, path: Path) -> _Rows:
    header, declared = text.partition("\n")[0], EXCEL_SEPARATOR.match(text)
    found = max(_SEPARATORS, key=lambda sign: sum(map(is_known, header.split(sign))))
    separator = declared[1] if declared else found
    reader = csv.DictReader(StringIO(text, newline=""), delimiter=separator, strict=True)
    if declared:
        next(reader.reader)
    try:
        for row in reader:
            place = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                n_cells = len(reader.fieldnames or ())
                raise DataError(
                    f"the row must have {n_cells} cells, got more or fewer: quote a cell that holds "
                    f"{separator!r} (at {place})"
                )
            cells = {name: cell if cell.strip() else None for name, cell in row.items()}
            yield reader.line_num, place, cells
    except csv.Error as error:
        raise DataError(f"cannot read CSV: {error} (at {path}:{reader.line_num})") from error


def _json_list(text: str, path: Path) -> _Rows:
    rows = parsed_json(text, "a JSON list of questions (.jsonl holds an object a line)", path)
    if not isinstance(rows, list):
        raise DataError(f"a .json file of questions must be a list, got {type(rows).__name__} (at {path})")
    return ((number, f"{path}[{number}]", row) for number, row in enumerate(rows))
