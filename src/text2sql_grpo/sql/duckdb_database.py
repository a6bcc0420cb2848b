"""One hardened DuckDB connection for untrusted SQL.

Effects are bounded by a read-only open and a locked configuration (no file but the database, no extension,
no setting), by a parse tree in which every query only reads, by a fresh session after each query that could
leave something in it, and by the kernel: the thread that runs queries may open no file.
Time is bounded by an interrupt, which DuckDB checks between two batches of rows: a single long call such as
`repeat('x', 1e9)` is not interrupted, and takes memory beyond the limit. Only killing the process bounds it.
"""

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import duckdb

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql import sandbox
from text2sql_grpo.sql.bounds import TimeLimitReachedError, exact_number, failure, first_word, keep_rows
from text2sql_grpo.sql.failure_text import (
    NO_MEMORY,
    NOTHING_TO_RUN,
    ONLY_READING,
    SEVERAL_STATEMENTS,
    late_text,
)
from text2sql_grpo.sql.outcome import Cell, ExecutionOutcome, Limits, Row
from text2sql_grpo.sql.sqlite_file import linked

FETCHED_ROWS = 64

CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "access_mode": "READ_ONLY",
    "threads": 1,
    "external_threads": 1,
    "memory_limit": "512MB",
    "temp_directory": "",  # nothing is written to disk, next to the database or elsewhere
    "enable_external_access": False,
    "autoload_known_extensions": False,
    "autoinstall_known_extensions": False,
    "allow_community_extensions": False,
    "allow_persistent_secrets": False,
    "python_enable_replacements": False,  # else `FROM name` reads Python variables
    "lock_configuration": True,
}
_READING_WORDS = frozenset(("SELECT", "FROM", "WITH", "PIVOT", "PIVOT_WIDER", "DESCRIBE", "SUMMARIZE"))

# Kinds of query in DuckDB's parse tree, written as JSON: there a quote inside a text is escaped.
_READING_NODES = frozenset(("SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"))
_NODE = re.compile(r'"type":"(\w+_NODE)"')
_FUNCTION = re.compile(r'"function_name":"(\w+)"')
# The bodies of a WITH that write, for the queries without such a tree: a pivot over the values of a column.
_WRITING_WORDS = frozenset(("copy", "insert", "update", "delete", "merge"))
_ASCII_WORD = re.compile(rb'"?(\w*)')
# The engine's own table functions that may be called: no other reads a table better than plain SQL, and
# some read files, run SQL given as text, or take pointers of the host.
_TABLE_FUNCTIONS = frozenset(
    """
    range generate_series unnest repeat repeat_row json_each json_tree summary test_all_types
    duckdb_columns duckdb_constraints duckdb_databases duckdb_dependencies duckdb_functions duckdb_indexes
    duckdb_keywords duckdb_memory duckdb_optimizers duckdb_schemas duckdb_sequences duckdb_settings
    duckdb_tables duckdb_types duckdb_variables duckdb_views duckdb_extensions duckdb_secrets
    duckdb_temporary_files test_vector_types
    pragma_collations pragma_database_size pragma_platform pragma_show pragma_storage_info pragma_table_info
    pragma_user_agent pragma_version icu_calendar_names pg_timezone_names
    """.split()  # noqa: SIM905 (a list would take 30 lines)
)
_READS_FILES = re.compile("read_|parquet_|sniff_|glob")
_INTERNAL = """
    SELECT function_name FROM duckdb_functions() WHERE internal
    GROUP BY ALL HAVING bool_and(function_type IN ('table', 'pragma'))
"""
# What a plan that always gives the same rows does not hold. The catalogue takes some functions for constants
# that read the clock: those without arguments, and age(). A subquery that must return one row calls error().
_CHANGING = """
    SELECT function_name FROM duckdb_functions() WHERE stability <> 'CONSISTENT' OR function_type = 'table'
    UNION SELECT function_name FROM duckdb_functions() WHERE function_type = 'scalar'
    GROUP BY ALL HAVING max(len(parameters)) = 0 AND count(varargs) = 0
    UNION VALUES ('age')
"""
_STEADY = frozenset(("seq_scan", "error", "pi"))
# Their rows change with their arguments alone, which a plan does not show.
_LISTING = frozenset(("range", "generate_series", "unnest", "repeat", "repeat_row", "json_each", "json_tree"))
_LISTING_CALL = re.compile(rf"\b(?:{'|'.join(sorted(_LISTING))})\s*\(", re.IGNORECASE)
_OWN_FUNCTIONS = "SELECT DISTINCT lower(function_name) FROM duckdb_functions() WHERE NOT internal"
_ALL_TABLES = """
    SELECT format('SELECT bit_xor(hash(COLUMNS(*))) FROM "{}"."{}"', replace(schema_name, '"', '""'),
    replace(table_name, '"', '""')) FROM duckdb_tables() WHERE NOT internal
"""
MAX_PLANNED_CHARS = 50_000  # of a parse tree: the plan of a larger one may take longer than the query
_UNBOUND = tuple(f'{{"error":true,"error_type":"{kind}"' for kind in ("binder", "catalog", "parser"))
_PLANNED = re.compile(r'"qname":\{"path":\[(?:"(?:[^"\\]|\\.)*",)*"((?:[^"\\]|\\.)*)"\]')

# Types whose Python values lose nothing. Others are read as the engine's own text: Python has no month, no
# nanosecond, no infinite date, and needs a time zone package.
_PYTHON = frozenset(
    """
    tinyint smallint integer bigint hugeint utinyint usmallint uinteger ubigint uhugeint float double decimal
    boolean varchar blob enum null
    """.split()  # noqa: SIM905 (a list would take 20 lines)
)
_NESTED = frozenset(("list", "array", "struct", "map", "union", "variant"))

Fingerprint = tuple[int, ...]

_OPENER = ThreadPoolExecutor(1, thread_name_prefix="duckdb-files")


def run_in_query_thread(work: Callable[[], None]) -> None:
    """Run work in a thread that may open no file: not even the database's, which another thread opens."""
    import traceback  # noqa: F401 (its file is out of reach in that thread)

    _OPENER.submit(int).result()  # starts its thread, which `forbid_files` leaves as it is
    with ThreadPoolExecutor(1, initializer=sandbox.forbid_files) as thread:
        thread.submit(work).result()


def fingerprint_of(path: str) -> Fingerprint:
    """Time stamps (ns), size, inode, and whether a log next to the file holds unmerged changes."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        has_log = os.access(linked(path) + ".wal", os.F_OK)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the DuckDB database file: {error} (at {path})") from error
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, has_log)


class HardenedDuckDB:
    """One DuckDB file, opened for reading; each query has a session of its own.

    Queries run in the caller's thread, that of `run_in_query_thread`, and nothing here interrupts them.
    DuckDB keeps one instance of a file in a process: close this one before opening a changed file again.

    Attributes:
        location: Path of the file.
        fingerprint: Fingerprint of the file when it was opened.
        is_volatile: False if the last query would return the same again.
        session: That of the last query, for another thread to interrupt it.
    """

    def __init__(self, location: str, fingerprint: Fingerprint) -> None:
        """Open the file.

        Raises:
            DataError: The file is missing, corrupt, no DuckDB database, or locked by a writer.
        """
        self.location = location
        self.fingerprint = fingerprint
        self.is_volatile = True
        self._database: duckdb.DuckDBPyConnection | None = self._opened()
        with self._database.cursor() as self.session:  # loads what a first query loads, before a limit counts
            denied_functions()
            changing_functions()
            self.session.execute("SELECT 1").fetchall()

    def _opened(self) -> duckdb.DuckDBPyConnection:
        try:
            return _OPENER.submit(duckdb.connect, self.location, read_only=True, config=CONFIG).result()
        except duckdb.Error as error:
            raise self._fault(error) from error

    def is_current(self) -> bool:
        """True if a new connection would read the same as this one."""
        return fingerprint_of(self.location) == self.fingerprint

    def is_unchanged(self) -> bool:
        """True: DuckDB locks an open file."""
        return True

    def close(self) -> None:
        """Close the file; a later `run` opens it again."""
        if self._database is not None:
            self.session.close()
            self._database.close()
            self._database = None

    def run(self, sql: str, limits: Limits) -> ExecutionOutcome:
        """Run a query that `why_unfit` accepts; the outcome has no time yet.

        Raises:
            DataError: The file is at fault, not the query.
        """
        if self._database is None:
            self._database = self._opened()
        deadline = time.monotonic() + limits.timeout_s
        self.session = self._database.cursor()
        self.is_volatile = False
        try:
            return self._answer(sql, limits, deadline)
        except TimeLimitReachedError:
            return failure("timeout", late_text(limits.timeout_s))
        except MemoryError:
            return failure("memory", NO_MEMORY)
        except duckdb.Error as error:
            return self._outcome_of(error, limits)
        finally:
            self.session.close()

    def _answer(self, sql: str, limits: Limits, deadline: float) -> ExecutionOutcome:
        session = self.session
        read, statements = sql, session.extract_statements(sql)
        if not statements:
            return failure("error", NOTHING_TO_RUN)
        if len(statements) > 1:
            return failure("error", SEVERAL_STATEMENTS)
        if first_word(sql) == "EXPLAIN":  # its ANALYZE runs what it explains
            read = _explained(session, sql)
            statements = session.extract_statements(read)
        kind = _kind(statements[0])
        # A pivot over the values of a column counts as several statements, whatever it is a part of.
        is_pivot = kind == duckdb.StatementType.MULTI and first_word(read) in _READING_WORDS
        if kind != duckdb.StatementType.SELECT and not is_pivot:
            return failure("denied", f"not allowed: {first_word(read) or 'this statement'}; {ONLY_READING}")
        tree = _asked(session, "json_serialize_sql", read)
        refused = refused_part(tree, read)
        if refused:
            return failure("denied", f"not allowed: {refused}; {ONLY_READING}")
        self.is_volatile = len(tree) > MAX_PLANNED_CHARS or _is_volatile(session, sql)
        is_bound_first = read is sql and not is_pivot
        return self._result(sql, limits, deadline, is_bound_first=is_bound_first)

    def _result(self, sql: str, limits: Limits, deadline: float, *, is_bound_first: bool) -> ExecutionOutcome:
        """Rows of a query that only reads; `is_bound_first` if its types are found before its only run."""
        if is_bound_first:
            relation = self.session.sql(sql)
            columns, types = tuple(relation.columns), [str(kind.id) for kind in relation.types]
        else:
            description = self.session.execute(sql).description or []
            columns = tuple(str(entry[0]) for entry in description)
            types = [str(entry[1].id) for entry in description]
        if not _PYTHON.issuperset(types):
            self.session.execute(_as_text(sql, types))  # one thread: the order of the rows stays
        elif is_bound_first:
            self.session.execute(sql)
        if not columns:
            return failure("error", NOTHING_TO_RUN)
        converters = [(index, _CONVERTED[kind]) for index, kind in enumerate(types) if kind in _CONVERTED]
        rows, is_truncated = keep_rows(_rows(self.session, converters), limits, deadline)
        return ExecutionOutcome("ok", columns, rows, is_truncated)

    def _outcome_of(self, error: duckdb.Error, limits: Limits) -> ExecutionOutcome:
        text = str(error)
        if isinstance(error, duckdb.InterruptException):  # at the end of its time, by the worker
            return failure("timeout", late_text(limits.timeout_s))
        if isinstance(error, duckdb.OutOfMemoryException):
            return failure("memory", NO_MEMORY)
        is_refused = isinstance(error, duckdb.PermissionException) or "Permission denied" in text
        if is_refused or "in read-only mode" in text or "configuration has been locked" in text:
            return failure("denied", f"not allowed: {text.splitlines()[0]}; {ONLY_READING}")
        if isinstance(error, duckdb.FatalException | duckdb.InternalException):
            self.close()  # the instance refuses further work; the next query opens a new one
            return failure("error", text)
        is_file_fault = isinstance(error, duckdb.IOException | duckdb.SerializationException)
        if (is_file_fault or text.startswith("Corrupt")) and not self._is_sound():
            raise self._fault(error) from error
        return failure("error", text)

    def _is_sound(self) -> bool:
        """True unless reading all tables until an interrupt fails, so that an error was the query's own."""
        assert self._database is not None
        with self._database.cursor() as self.session:
            try:
                for (counted,) in self.session.execute(_ALL_TABLES).fetchall():
                    self.session.execute(counted).fetchall()
            except (duckdb.InterruptException, duckdb.OutOfMemoryException):
                return True
            except duckdb.Error:
                return False
            return True

    def _fault(self, error: duckdb.Error) -> DataError:
        found = " ".join(str(error).split())
        if isinstance(error, duckdb.PermissionException):  # it would load an extension that reads the file
            found = "it is of another system, such as SQLite"
        return DataError(f"cannot read the DuckDB database file: {found} (at {self.location})")


def _kind(statement: duckdb.Statement) -> duckdb.StatementType | None:
    """Kind of a statement; None for one that the Python package has no name for."""
    try:
        return statement.type
    except ValueError:
        return None


def _explained(session: duckdb.DuckDBPyConnection, sql: str) -> str:
    """Statement inside an EXPLAIN: the longest ending of the text that is one; else the text itself."""
    text = sql.encode()
    for start, _ in duckdb.tokenize(sql)[1:]:
        with contextlib.suppress(duckdb.Error):
            inner = text[start:].decode()
            if len(session.extract_statements(inner)) == 1:
                return inner
    return sql


def _asked(session: duckdb.DuckDBPyConnection, function: str, sql: str) -> str:
    """The engine's own description of a query, as JSON."""
    ((found,),) = session.execute(f"SELECT system.main.{function}(?::VARCHAR)", [sql]).fetchall()
    return str(found)


def refused_part(tree: str, sql: str) -> str:
    """First part of a query that does more than read; empty if there is none."""
    if tree.startswith('{"error":true'):
        functions = _words(sql)
        writing = functions & _WRITING_WORDS
    else:
        writing = {name.removesuffix("_QUERY_NODE") for name in _NODE.findall(tree)} - _READING_NODES
        functions = {name.lower() for name in _FUNCTION.findall(tree)}
    denied = functions & denied_functions()
    if writing:
        return min(writing).upper()
    if not denied:
        return ""
    why = " (file system operations are disabled)" if _READS_FILES.match(min(denied)) else ""
    return f"the function {min(denied)}{why}"


def _is_volatile(session: duckdb.DuckDBPyConnection, sql: str) -> bool:
    """False if the engine's plan of a query, which holds its views and macros, always gives the same rows."""
    try:
        plan = _asked(session, "json_serialize_plan", sql)
    except duckdb.Error:  # the query has an outcome of its own
        return True
    if plan.startswith(_UNBOUND):
        return False
    planned, changing = _PLANNED.findall(plan), changing_functions()
    if listing := sum(name in _LISTING for name in planned):
        own = {name for (name,) in session.execute(_OWN_FUNCTIONS).fetchall()}
        if listing > len(_LISTING_CALL.findall(sql)) or not (changing | own).isdisjoint(_words(sql)):
            return True
    is_random = plan.startswith('{"error":true') or '"type":"LOGICAL_SAMPLE"' in plan
    return is_random or not changing.isdisjoint(planned)


@cache
def denied_functions() -> frozenset[str]:
    """Functions of the engine that do more than compute a value or list rows.

    A plan of SQL in a text holds names, and the largest value, of columns that the query's own tree lacks.
    The text of a statement may hold the gold query, when two large results are compared in one.
    """
    return _listed(_INTERNAL) - _TABLE_FUNCTIONS | {"write_log", "json_serialize_plan", "current_query"}


@cache
def changing_functions() -> frozenset[str]:
    """Functions of the engine that may return something else the next time."""
    return _listed(_CHANGING) - _STEADY - _LISTING


def _listed(query: str) -> frozenset[str]:
    """Names in the engine's own catalogue."""
    with duckdb.connect(":memory:", config=CONFIG | {"access_mode": "AUTOMATIC"}) as connection:
        return frozenset(name for (name,) in connection.execute(query).fetchall())


def _words(sql: str) -> set[str]:
    """Words of a query outside of comments and texts, as the engine's tokenizer divides it."""
    text = sql.encode()
    starts = duckdb.tokenize(sql)
    ends = [start for start, _ in starts[1:]] + [len(text)]
    kinds = (duckdb.token_type.keyword, duckdb.token_type.identifier)
    spans = [(start, end) for (start, kind), end in zip(starts, ends, strict=True) if kind in kinds]
    return {_ASCII_WORD.match(text, *span)[1].decode().lower() for span in spans}  # type: ignore[index]


def _without_end(sql: str) -> str:
    """Query without the semicolons and comments behind it."""
    text = sql.encode()
    for start, kind in reversed(duckdb.tokenize(sql)):
        if kind != duckdb.token_type.comment and not text[start:].startswith(b";"):
            break
        text = text[:start]
    return text.decode()


def _as_text(sql: str, types: list[str]) -> str:
    names = [f"c{index}" for index in range(len(types))]
    shown = [_shown(name, kind) for name, kind in zip(names, types, strict=True)]
    return f"SELECT {', '.join(shown)} FROM ({_without_end(sql)}\n) AS result({', '.join(names)})"


def _shown(name: str, kind: str) -> str:
    if kind in _PYTHON:
        return name
    return f"CAST(to_json({name}) AS VARCHAR)" if kind in _NESTED else f"CAST({name} AS VARCHAR)"


def _moment(text: str) -> Cell:
    """A time with no or six digits of a second, as other databases show it."""
    whole, dot, digits = text.partition(".")
    return f"{whole}.{digits:0<6}" if dot else whole


_CONVERTED: dict[str, Callable[[Any], Cell]] = {"decimal": exact_number, "boolean": int, "timestamp": _moment}


def _rows(
    session: duckdb.DuckDBPyConnection, converters: list[tuple[int, Callable[[Any], Cell]]]
) -> Iterator[Row]:
    while rows := session.fetchmany(FETCHED_ROWS):
        if not converters:
            yield from rows
            continue
        for row in rows:
            cells = list(row)
            for index, convert in converters:
                if cells[index] is not None:
                    cells[index] = convert(cells[index])
            yield tuple(cells)
