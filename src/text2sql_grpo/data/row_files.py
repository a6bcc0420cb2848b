"""Files of rows (CSV, TSV, Parquet, JSON, Excel) as one DuckDB database in the cache, a table a file."""

import codecs
import csv
import hashlib
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from text2sql_grpo.data.row_values import columns_of_csv
from text2sql_grpo.errors import DataError, needs_extra
from text2sql_grpo.files import draft, sha256
from text2sql_grpo.phrases import listed, many
from text2sql_grpo.sql.names import quote_name

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

ROW_FILES = (".csv", ".tsv", ".parquet", ".jsonl", ".ndjson", ".json", ".xlsx")
_DELIMITERS = ",;\t|"
EXCEL_SEPARATOR = re.compile(r"sep=([^\w'\"\r\n])\r?\n", re.IGNORECASE)  # the first line, before the names
FIRST_ROWS = 20  # of a CSV file, by which its delimiter is found
MAX_COLUMNS_SHOWN = 12
MAX_ODD = 0.15  # share of characters above ASCII in a Western file
FORMAT = 6  # of the copies, raised when values are read in another way

_logger = logging.getLogger(__name__)


def build_from_rows(source: Path, files: Sequence[Path], cache: Path) -> Path:
    """DuckDB file with a table for each file, made once for each name and content of the files.

    DuckDB infers the columns' types from all rows, and streams: a file may be larger than memory. What it
    found is logged. Safe if several processes call it at once.

    Args:
        source: File that the user named, or the folder of the files.

    Raises:
        DataError: Two files give one table, a file cannot be read, or the disk is too small.
    """
    with needs_extra("duckdb", f"the files of rows at {source}"):
        import duckdb

    tables: dict[str, Path] = {}
    for file in files:
        other = tables.setdefault(file.stem.lower(), file)
        if other is not file:
            raise DataError(
                f"two files make one table {file.stem!r}: {other.name} and {file.name} (at {source})"
            )
    try:
        versions = [(str(file.absolute()), sha256(file)) for file in files]  # copies may keep a time
        digest = hashlib.sha256(json.dumps([duckdb.__version__, FORMAT, versions]).encode()).hexdigest()
        target = cache / f"{source.stem}-{digest[:16]}.duckdb"
        if target.exists():
            return target
        cache.mkdir(parents=True, exist_ok=True)
        needed, free = sum(file.stat().st_size for file in files), shutil.disk_usage(cache).free
        if needed > free:
            raise DataError(
                f"too little disk space to copy {needed / 1e9:.1f} GB of rows: {free / 1e9:.1f} GB are free "
                f"in the cache (at {cache})"
            )
        with draft(target) as scratch:
            with closing(duckdb.connect(str(scratch))) as connection:
                for file in files:
                    with tempfile.TemporaryDirectory(dir=cache) as folder:
                        _copy(connection, file, Path(folder))
            _logger.info("Copied %s of rows to %s", many(len(files), "file"), target)
    except OSError as error:
        raise DataError(f"cannot copy the files of rows: {error} (from {source} to {cache})") from error
    return target


def _copy(connection: "DuckDBPyConnection", file: Path, folder: Path) -> None:
    """Copy a file into a table; `folder` may hold what is read in its place."""
    import duckdb

    if not file.stat().st_size:
        raise DataError(f"cannot read the rows: the file is empty (at {file})")
    table, suffix = quote_name(file.stem, "duckdb"), file.suffix.lower()
    is_csv, read = suffix in (".csv", ".tsv", ".xlsx"), file
    if is_csv:
        read = _sheet_as_csv(file, folder) if suffix == ".xlsx" else _as_utf8(file, folder)
    try:
        shown, reader = "*", "read_json(?, sample_size = -1)"
        if suffix == ".parquet":
            reader = "read_parquet(?)"
        elif is_csv:
            shown, reader = columns_of_csv(connection, read, _csv_reader(read))
        connection.execute(f"CREATE TABLE {table} AS SELECT {shown} FROM {reader}", [str(read)])
        columns = connection.execute(f"DESCRIBE {table}").fetchall()
    except duckdb.Error as error:
        lines = [line for line in str(error).partition("\nLINE ")[0].splitlines() if line.strip()]
        why = (_odd_line(read) if is_csv else "") or " ".join(lines[:3])
        raise DataError(f"cannot read the rows: {why} (at {file})") from error
    shown = listed([f"{name} {kind}" for name, kind, *_ in columns], MAX_COLUMNS_SHOWN)
    _logger.info("%s: table %s (%s)", file, file.stem, shown)


def _as_utf8(file: Path, folder: Path) -> Path:
    """A CSV file in UTF-8: itself, or a copy of one that a spreadsheet wrote as UTF-16 or Windows-1252.

    A file with many letters that are not English is in another encoding than Windows-1252: it stays as it is.
    """
    with file.open("rb") as opened:
        is_utf16 = opened.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    with suppress(UnicodeDecodeError), file.open(encoding="utf-8") as lines:
        for _ in lines:
            pass
        return file
    encoding, copy, odd = "utf-16" if is_utf16 else "windows-1252", folder / file.name, ""
    n_chars = n_odd = 0
    with (
        file.open(encoding=encoding, newline="") as lines,
        copy.open("w", encoding="utf-8", newline="") as out,
    ):
        try:
            for line in lines:
                out.write(line)
                n_chars, n_odd = n_chars + len(line), n_odd + len(line) - len(line.encode("ascii", "ignore"))
                odd = odd or next((word for word in line.split() if not word.isascii()), "")
        except UnicodeDecodeError:
            return file
    if not is_utf16 and n_odd > MAX_ODD * n_chars:
        return file
    _logger.warning(
        "%s: is not UTF-8: read as %s, such as %s; if that is wrong, save it as UTF-8",
        file.name,
        encoding,
        odd[:60],
    )
    return copy


def _csv_reader(file: Path) -> str:
    names, delimiter, n_before = _layout(file)
    if all(re.fullmatch(r"\s*-?[\d.]*\s*", name) for name in names.strip().split(delimiter)):
        raise DataError(f"cannot read the rows: the first line holds no names (at {file})")
    # Left to itself, DuckDB passes over lines, or takes another delimiter, until the rest has one shape.
    dialect = f"delim = '{delimiter}', quote = '\"', escape = '\"', header = true, skip = {n_before}"
    return f"read_csv(?, {dialect}, strict_mode = true, null_padding = false, sample_size = -1)"


def _layout(file: Path) -> tuple[str, str, int]:
    """Line of the names in a CSV file, their delimiter, and the number of lines before: Excel's `sep=;`."""
    with file.open("rb") as opened:
        first, second = (opened.readline().decode("utf-8-sig", errors="replace") for _ in range(2))
    if declared := EXCEL_SEPARATOR.fullmatch(first):
        return second, declared[1], 1
    return first, {".tsv": "\t", ".xlsx": ","}.get(file.suffix.lower()) or _delimiter(file), 0


def _delimiter(file: Path) -> str:
    """Delimiter of a CSV file: the one that splits the first rows evenly, into plain names."""
    fits: dict[str, tuple[bool | int, ...]] = {}
    for delimiter in _DELIMITERS:
        with file.open(encoding="utf-8-sig", errors="replace", newline="") as opened:
            names, is_even = list[str](), False
            rows = csv.reader(opened, delimiter=delimiter)
            with suppress(csv.Error):
                names = next(rows, [])
                is_even = all(len(row) == len(names) for row in islice(rows, FIRST_ROWS) if row)
        has_blanks = any(name.startswith(" ") for name in names)
        has_others = any(set(name) & set(_DELIMITERS) for name in names)
        fits[delimiter] = (len(names) > 1, is_even, not has_blanks, not has_others, len(names))
    best = max(fits.values())
    first, *others = (delimiter for delimiter, fit in fits.items() if fit == best)
    if others and best[:2] == (True, True):
        raise DataError(
            f"cannot read the rows: {first!r} and {others[0]!r} both fit: name the right one in a "
            f"line above, such as sep={others[0]} (at {file})"
        )
    return first


def _odd_line(file: Path) -> str:
    """Description of the first row of a CSV file that is not UTF-8 or as long as its names; or empty."""
    _, delimiter, n_before = _layout(file)
    with file.open("rb") as opened, suppress(csv.Error):
        rows = csv.reader(map(bytes.decode, opened), delimiter=delimiter)
        try:
            *_, names = islice(rows, n_before + 1)
            for row in rows:
                if row and len(row) != len(names):
                    place = f"line {rows.line_num} ends a row"
                    return f"{place} with {len(row)} fields, the first line has {len(names)} names"
        except UnicodeDecodeError:
            return f"line {rows.line_num + 1} is not UTF-8 text; save the file as UTF-8"
    return ""


def _sheet_as_csv(file: Path, folder: Path) -> Path:
    """First sheet of an Excel file as CSV, cell by cell: left to itself, pandas reads `00123` as 123."""
    with needs_extra("excel", f"the Excel file {file}"):
        import openpyxl  # type: ignore[import-untyped]  # noqa: F401 (pandas reads with it)
    import pandas  # type: ignore[import-untyped]

    try:
        sheet = pandas.read_excel(file, dtype=object, keep_default_na=False)
    except Exception as error:  # the parser of a broken archive raises anything
        raise DataError(f"cannot read the sheet: {error} (at {file})") from error
    copy = folder / file.name
    sheet.to_csv(copy, index=False)
    return copy
