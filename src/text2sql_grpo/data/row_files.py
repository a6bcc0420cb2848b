"""Files of rows (CSV, TSV, Parquet, JSON, Excel) as one DuckDB database in the cache, a table a file."""

import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from text2sql_grpo.errors import DataError, needs_extra
from text2sql_grpo.files import draft
from text2sql_grpo.sql.names import quote_name

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

ROW_FILES = (".csv", ".tsv", ".parquet", ".jsonl", ".ndjson", ".json", ".xlsx")
_READERS = {
    ".csv": "read_csv",
    ".tsv": "read_csv",
    ".parquet": "read_parquet",
    ".jsonl": "read_json",
    ".ndjson": "read_json",
    ".json": "read_json",
}
MAX_COLUMNS_SHOWN = 12

_logger = logging.getLogger(__name__)


def build_from_rows(source: Path, files: Sequence[Path], cache: Path) -> Path:
    """DuckDB file with a table for each file, made once for each version (name, size, time) of the files.

    DuckDB infers the columns' types from all rows, and streams: a file may be larger than memory. What it
    found is logged. Safe if several processes call it at once.

    Args:
        source: File that the user named, or the folder of the files.
        cache: Folder of the result.

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
        stats = [file.stat() for file in files]
        versions = [
            (str(file.absolute()), stat.st_size, stat.st_mtime_ns)
            for file, stat in zip(files, stats, strict=True)
        ]
        digest = hashlib.sha256(json.dumps([duckdb.__version__, versions]).encode()).hexdigest()
        target = cache / f"{source.stem}-{digest[:16]}.duckdb"
        if target.exists():
            return target
        cache.mkdir(parents=True, exist_ok=True)
        needed, free = sum(stat.st_size for stat in stats), shutil.disk_usage(cache).free
        if needed > free:
            raise DataError(
                f"too little disk space to copy {needed / 1e9:.1f} GB of rows: {free / 1e9:.1f} GB are free "
                f"in the cache (at {cache})"
            )
        with draft(target) as scratch:
            with closing(duckdb.connect(str(scratch))) as connection:
                for file in files:
                    _copy(connection, file)
            _logger.info("Copied %d files of rows to %s", len(files), target)
    except OSError as error:
        raise DataError(f"cannot copy the files of rows: {error} (from {source} to {cache})") from error
    return target


def _copy(connection: "DuckDBPyConnection", file: Path) -> None:
    import duckdb

    if not file.stat().st_size:
        raise DataError(f"cannot read the rows: the file is empty (at {file})")
    table = quote_name(file.stem, "duckdb")
    try:
        if file.suffix.lower() == ".xlsx":
            connection.register("_sheet", _sheet(file))
            connection.execute(f"CREATE TABLE {table} AS SELECT * FROM _sheet")
            connection.unregister("_sheet")
        else:
            options = ", sample_size = -1" if file.suffix.lower() != ".parquet" else ""
            reader = f"{_READERS[file.suffix.lower()]}(?{options})"
            connection.execute(f"CREATE TABLE {table} AS SELECT * FROM {reader}", [str(file)])
        columns = connection.execute(f"DESCRIBE {table}").fetchall()
    except duckdb.Error as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise DataError(f"cannot read the rows: {' '.join(lines[:3])} (at {file})") from error
    shown = ", ".join(f"{name} {kind}" for name, kind, *_ in columns[:MAX_COLUMNS_SHOWN])
    more = f" and {len(columns) - MAX_COLUMNS_SHOWN} more" if len(columns) > MAX_COLUMNS_SHOWN else ""
    _logger.info("%s: table %s (%s%s)", file, file.stem, shown, more)


def _sheet(file: Path) -> Any:
    """First sheet of an Excel file, as a data frame."""
    import pandas  # type: ignore[import-untyped]

    try:
        return pandas.read_excel(file)
    except ImportError as error:
        raise DataError(f"Excel files need a package: pip install openpyxl (at {file})") from error
    except Exception as error:  # the parser of a broken archive raises anything
        raise DataError(f"cannot read the sheet: {error} (at {file})") from error
