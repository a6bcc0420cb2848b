"""One hardened DuckDB connection for untrusted SQL.

Effects are bounded by a read-only open and a locked configuration (no file but the database, no extension,
no setting), by statement types, and by a fresh session for each query.
Time is bounded by an interrupt, which DuckDB checks between two batches of rows: a single long call such as
`repeat('x', 1e9)` is not interrupted, and takes memory beyond the limit. Only killing the process bounds it.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import duckdb

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.bounds import (
    TimeLimitReachedError,
    exact_number,
    failure,
    first_word,
    keep_rows,
)
from text2sql_grpo.sql.failure_text import (
    NO_MEMORY,
    NOTHING_TO_RUN,
    ONLY_READING,
    SEVERAL_STATEMENTS,
    late_text,
    why_unfit,
)
from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits, Row

MEMORY_LIMIT = "512MB"
FETCHED_ROWS = 64
AGAIN_S = 0.05  # between two interrupts of a late query

CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "access_mode": "READ_ONLY",
    "threads": 1,
    "external_threads": 1,
    "memory_limit": MEMORY_LIMIT,
    "temp_directory": "",  # nothing is written to disk, beside the database or elsewhere
    "enable_external_access": False,
    "autoload_known_extensions": False,
    "autoinstall_known_extensions": False,
    "allow_community_extensions": False,
    "allow_persistent_secrets": False,
    "python_enable_replacements": False,  # else `FROM name` reads Python variables
    "lock_configuration": True,
}
_READING_WORDS = frozenset(("SELECT", "FROM", "WITH", "PIVOT", "PIVOT_WIDER", "DESCRIBE", "SUMMARIZE"))
_EXPLAIN = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*EXPLAIN\b\s*(?:ANALYZE\b\s*)?(?:\([\w\s,]*\))?", re.DOTALL | re.IGNORECASE
)
# Functions that pass SQL text or host objects to the engine: none reads a table better than plain SQL.
_DENIED_FUNCTION = re.compile(
    r"\b(query|query_table|json_execute_serialized_sql|write_log|truncate_duckdb_logs|pandas_scan"
    r"|checkpoint|force_checkpoint|arrow_scan|arrow_scan_dumb|python_arrow_scan|python_map_function|\w+_external_resource\w*)"
    r'"?(?:\s|--[^\n]*\n|/\*.*?\*/)*\(',
    re.DOTALL | re.IGNORECASE,
)
# Nothing but `;`, blanks and comments without quotes: the end of a statement, never the inside of a string.
_END_OF_STATEMENT = re.compile(r""";(?:[\s;]|--[^\n'"$]*(?:\n|\Z)|/\*[^*'"$]*\*/)*\Z""")

# Types whose Python values lose nothing, and how to turn them into plain cells. Others are read as the
# engine's own text: Python has no month, no nanosecond, no 24:00, and needs a time zone package.
_CONVERTED: dict[str, Callable[[Any], int | float | str]] = {
    "boolean": int,
    "decimal": exact_number,
    "date": str,
    "timestamp": str,
    "uuid": str,
}
_PLAIN = frozenset(
    ("tinyint", "smallint", "integer", "bigint", "hugeint", "utinyint", "usmallint", "uinteger", "ubigint")
) | {"uhugeint", "float", "double", "varchar", "blob", "enum", "null", *_CONVERTED}
_NESTED = frozenset(("list", "array", "struct", "map", "union", "variant"))

Fingerprint = tuple[int, int, int, bool]


def fingerprint_of(path: str) -> Fingerprint:
    """Modification time (ns), size, inode, and whether a log beside the file holds unmerged changes."""
    try:
        status = os.stat(path)
        has_log = os.path.exists(path + ".wal")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the DuckDB database file: {error} (at {path})") from error
    return (status.st_mtime_ns, status.st_size, status.st_ino, has_log)


class HardenedDuckDB:
    """One DuckDB file, opened for reading; each query runs in a session of its own.

    DuckDB keeps one instance of a file in a process: close this one before opening a changed file again.

    Attributes:
        location: Path of the file.
        fingerprint: Fingerprint of the file when it was opened.
    """

    def __init__(self, location: str, fingerprint: Fingerprint) -> None:
        """Open the file.

        Raises:
            DataError: The file is missing, corrupt, no DuckDB database, or locked by a writer.
        """
        self.location = location
        self.fingerprint = fingerprint
        self._database: duckdb.DuckDBPyConnection | None = self._opened()

    def _opened(self) -> duckdb.DuckDBPyConnection:
        try:
            return duckdb.connect(self.location, read_only=True, config=CONFIG)
        except duckdb.PermissionException as error:  # it would load an extension that reads this file
            raise DataError(
                "cannot read the DuckDB database file: it is of another system, such as SQLite"
                f" (at {self.location})"
            ) from error
        except duckdb.Error as error:
            raise self._fault(error) from error

    def close(self) -> None:
        """Close the file; a later `run` opens it again."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def run(self, sql: str, limits: Limits) -> ExecutionOutcome:
        """Run a query; the outcome has no time yet.

        Raises:
            DataError: The file is at fault, not the query.
        """
        reason = why_unfit(sql, limits)
        if reason:
            return failure("error", reason)
        if self._database is None:
            self._database = self._opened()
        deadline = time.monotonic() + limits.timeout_s
        session = self._database.cursor()
        is_over = threading.Event()
        threading.Thread(target=_interrupt, args=(session, is_over, limits.timeout_s), daemon=True).start()
        try:
            return _refusal(session, sql) or _result(session, sql, limits, deadline)
        except TimeLimitReachedError:
            return failure("timeout", late_text(limits.timeout_s))
        except MemoryError:
            return failure("memory", NO_MEMORY)
        except duckdb.Error as error:
            return self._outcome_of(error, limits, deadline)
        finally:
            is_over.set()
            session.close()

    def _outcome_of(self, error: duckdb.Error, limits: Limits, deadline: float) -> ExecutionOutcome:
        text = str(error)
        if isinstance(error, duckdb.InterruptException):
            if time.monotonic() >= deadline:
                return failure("timeout", late_text(limits.timeout_s))
            raise KeyboardInterrupt from error
        if isinstance(error, duckdb.OutOfMemoryException):
            return failure("memory", NO_MEMORY)
        is_refused = isinstance(error, duckdb.PermissionException)
        if is_refused or "in read-only mode" in text or "configuration has been locked" in text:
            return failure("denied", f"not allowed: {text.splitlines()[0]}; {ONLY_READING}")
        if isinstance(error, duckdb.FatalException | duckdb.InternalException):
            self.close()  # the instance refuses further work; the next query opens a new one
            return failure("error", text)
        is_file_fault = isinstance(error, duckdb.IOException | duckdb.SerializationException)
        if is_file_fault or text.startswith("Corrupt"):
            raise self._fault(error) from error
        return failure("error", text)

    def _fault(self, error: duckdb.Error) -> DataError:
        found = " ".join(str(error).split())
        return DataError(f"cannot read the DuckDB database file: {found} (at {self.location})")


def _interrupt(session: duckdb.DuckDBPyConnection, is_over: threading.Event, timeout_s: float) -> None:
    wait_s = timeout_s
    while not is_over.wait(wait_s):
        with contextlib.suppress(duckdb.ConnectionException):  # closed just before
            session.interrupt()
        wait_s = AGAIN_S  # an interrupt that comes before a statement starts is lost


def _refusal(session: duckdb.DuckDBPyConnection, sql: str) -> ExecutionOutcome | None:
    """Outcome of a refused query; None if it is one statement that reads."""
    statements = session.extract_statements(sql)
    if not statements:
        return failure("error", NOTHING_TO_RUN)
    if len(statements) > 1:
        return failure("error", SEVERAL_STATEMENTS)
    word = first_word(sql)
    explain = _EXPLAIN.match(sql)
    if explain is not None:  # EXPLAIN ANALYZE runs what it explains
        inner = sql[explain.end() :]
        statements = session.extract_statements(inner)
        word = first_word(inner)
    kind = statements[0].type if len(statements) == 1 else duckdb.StatementType.INVALID
    # A pivot over the values of a column counts as several statements, whatever it is a part of.
    is_pivot = kind == duckdb.StatementType.MULTI and word in _READING_WORDS
    if kind != duckdb.StatementType.SELECT and not is_pivot:
        return failure("denied", f"not allowed: {word or 'this statement'}; {ONLY_READING}")
    function = _DENIED_FUNCTION.search(sql)
    if function is not None:
        name = function.group(1).lower()
        return failure("denied", f"not allowed: the function {name}; {ONLY_READING}")
    return None


def _result(
    session: duckdb.DuckDBPyConnection, sql: str, limits: Limits, deadline: float
) -> ExecutionOutcome:
    session.execute(sql)
    if session.description is None:
        return failure("error", NOTHING_TO_RUN)
    columns = tuple(str(entry[0]) for entry in session.description)
    types = [str(entry[1].id) for entry in session.description]
    if not _PLAIN.issuperset(types):
        # Run again, with these columns as text. One thread: the order of the rows stays.
        session.execute(_as_text(sql, types))
    converters = [(index, _CONVERTED[kind]) for index, kind in enumerate(types) if kind in _CONVERTED]
    rows, is_truncated = keep_rows(_rows(session, converters), limits, deadline)
    return ExecutionOutcome("ok", columns, rows, is_truncated)


def _as_text(sql: str, types: list[str]) -> str:
    names = [f"c{index}" for index in range(len(types))]
    shown = [
        name
        if kind in _PLAIN
        else f"CAST(to_json({name}) AS VARCHAR)"
        if kind in _NESTED
        else f"CAST({name} AS VARCHAR)"
        for name, kind in zip(names, types, strict=True)
    ]
    query = _END_OF_STATEMENT.sub("", sql)
    return f"SELECT {', '.join(shown)} FROM ({query}\n) AS result({', '.join(names)})"


def _rows(
    session: duckdb.DuckDBPyConnection, converters: list[tuple[int, Callable[[Any], int | float | str]]]
) -> Iterator[Row]:
    while rows := session.fetchmany(FETCHED_ROWS):
        for row in rows:
            if not converters:
                yield row
                continue
            cells = list(row)
            for index, convert in converters:
                if cells[index] is not None:
                    cells[index] = convert(cells[index])
            yield tuple(cells)
