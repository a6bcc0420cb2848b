"""One hardened SQLite connection: what a stranger's SQL may do on it, and for how long.

Effects are bounded by an authorizer that allows only reading: a read-only file alone still lets SQL
create files (ATTACH, VACUUM INTO) and shadow tables (TEMP). Time is bounded by a progress handler,
which SQLite calls between its instructions: a single long instruction is not interrupted.
"""

import contextlib
import os
import sqlite3
import time
from pathlib import Path

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits, Row, Status

MAX_ERROR_CHARS = 300
PROGRESS_STEPS = 10_000  # SQLite instructions between two looks at the clock
BUSY_TIMEOUT_S = 5.0  # wait for another process that writes the file
HEAP_LIMIT_BYTES = 512 * 1024 * 1024
MAX_COLUMNS = 500

_SQLITE_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1_000_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 1_000_000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 1_000,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 200,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 500_000,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 100,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 2_000,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 10,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
    sqlite3.SQLITE_LIMIT_COLUMN: MAX_COLUMNS,
}

_READING_PRAGMAS = frozenset(
    ("table_info", "table_xinfo", "table_list", "foreign_key_list", "index_list", "index_info")
) | {"data_version"}  # asked by fts5 at each search
_SCHEMA_TABLES = frozenset(("sqlite_master", "sqlite_schema"))
# The only tables with the reserved prefix that may be read: `sqlite_stmt` would show other queries.
_READABLE_SQLITE_TABLES = _SCHEMA_TABLES | {"sqlite_sequence", "sqlite_stat1", "sqlite_stat4"}
_DENIED_TABLES = frozenset(("dbstat", "bytecode", "tables_used"))
_DENIED_FUNCTIONS = frozenset(
    ("load_extension", "readfile", "writefile", "edit", "fts3_tokenizer", "optimize", "sqlite_log")
)
_ACTION_NAMES = {
    sqlite3.SQLITE_INSERT: "INSERT",
    sqlite3.SQLITE_UPDATE: "UPDATE",
    sqlite3.SQLITE_DELETE: "DELETE",
    sqlite3.SQLITE_ATTACH: "ATTACH or VACUUM",
    sqlite3.SQLITE_DETACH: "DETACH",
    sqlite3.SQLITE_TRANSACTION: "a transaction",
    sqlite3.SQLITE_SAVEPOINT: "SAVEPOINT",
    sqlite3.SQLITE_ANALYZE: "ANALYZE",
    sqlite3.SQLITE_REINDEX: "REINDEX",
}

# Faults of the file or the disk, never of the query.
_FILE_FAULTS = frozenset(
    (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_PERM,
    )
)
# A sort that fills the disk, or a value over the length limit: stopped for its size.
_SIZE_FAULTS = frozenset((sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_FULL))

Fingerprint = tuple[int, int, int, bool]


def fingerprint_of(path: str) -> Fingerprint:
    """Modification time (ns), size, inode, and whether a log beside the file holds unmerged changes."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise DataError(f"expected a SQLite database file, got {error} (at {path})") from error
    has_log = _has_content(path + "-wal") or _has_content(path + "-journal")
    return (status.st_mtime_ns, status.st_size, status.st_ino, has_log)


def _has_content(path: str) -> bool:
    try:
        return os.stat(path).st_size > 0
    except FileNotFoundError:
        return False


def open_database(database: Path | str) -> sqlite3.Connection:
    """A read-only connection, checked to be a SQLite database; its queries are not restricted yet.

    Raises:
        DataError: The file is missing, unreadable, empty, corrupt or no SQLite database.
    """
    path = os.fspath(database)
    has_log = fingerprint_of(path)[3]
    try:
        with open(path, "rb") as file:
            header = file.read(16)
    except OSError as error:
        raise DataError(f"expected a readable SQLite database file, got {error} (at {path})") from error
    if header != b"SQLite format 3\0":
        found = "an empty file" if not header else "a file that is not a database"
        raise DataError(f"expected a SQLite database file, got {found} (at {path})")
    # `immutable` halves the cost of small queries, but does not see a write-ahead log.
    uri = Path(path).absolute().as_uri() + "?mode=ro" + ("" if has_log else "&immutable=1")
    connection = None
    try:
        connection = sqlite3.connect(
            uri,
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            cached_statements=0,
            check_same_thread=False,
        )
        connection.execute("PRAGMA query_only = ON").close()
        connection.execute("PRAGMA cell_size_check = ON").close()
        connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
    except sqlite3.Error as error:
        if connection is not None:
            connection.close()
        raise DataError(f"expected a sound SQLite database file, got: {error} (at {path})") from error
    return connection


class HardenedDatabase:
    """One hardened connection; `denied` says what the authorizer refused in the current query."""

    def __init__(self, path: str, fingerprint: Fingerprint) -> None:
        self.path = path
        self.fingerprint = fingerprint
        self.deadline = float("inf")
        self.denied = ""
        self.connection = open_database(path)
        # For the whole process and can only be lowered: stops queries that grow while being compiled.
        self.connection.execute(f"PRAGMA hard_heap_limit = {HEAP_LIMIT_BYTES}").close()
        self.connection.execute("PRAGMA trusted_schema = OFF").close()
        virtual_tables = self.connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND sql LIKE 'CREATE VIRTUAL TABLE%'"
        ).fetchall()
        for (name,) in virtual_tables:
            # rtree and fts5 prepare writes when first read, which the authorizer would refuse. One whose
            # module is missing stays unreadable, and a query on it says so.
            quoted = name.replace('"', '""')
            with contextlib.suppress(sqlite3.OperationalError):
                self.connection.execute(f'SELECT 1 FROM "{quoted}" LIMIT 0').close()
        for limit, value in _SQLITE_LIMITS.items():
            self.connection.setlimit(limit, value)
        self.connection.set_authorizer(self._authorize)
        self.connection.set_progress_handler(self._is_late, PROGRESS_STEPS)

    def _is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def _authorize(
        self, action: int, first: str | None, second: str | None, _schema: str | None, _source: str | None
    ) -> int:
        if action == sqlite3.SQLITE_SELECT or action == sqlite3.SQLITE_RECURSIVE:
            return sqlite3.SQLITE_OK
        name = ((second if action == sqlite3.SQLITE_FUNCTION else first) or "").lower()
        if action == sqlite3.SQLITE_READ:
            is_reserved = name.startswith("sqlite_") and name not in _READABLE_SQLITE_TABLES
            if not is_reserved and name not in _DENIED_TABLES:
                return sqlite3.SQLITE_OK
            self.denied = f"reading {name}"
        elif action == sqlite3.SQLITE_FUNCTION:
            if name not in _DENIED_FUNCTIONS:
                return sqlite3.SQLITE_OK
            self.denied = f"the function {name}"
        elif action == sqlite3.SQLITE_PRAGMA:
            if name in _READING_PRAGMAS:
                return sqlite3.SQLITE_OK
            self.denied = f"PRAGMA {name}"
        elif action == sqlite3.SQLITE_UPDATE and name in _SCHEMA_TABLES:
            # SQLite < 3.41 asks this when it sets up json_each or pragma_table_info. A real UPDATE of
            # these tables is refused by SQLite itself, and the file is open for reading only.
            return sqlite3.SQLITE_OK
        elif name in _SCHEMA_TABLES or action not in _ACTION_NAMES:
            self.denied = "a change of the schema"
        else:
            self.denied = _ACTION_NAMES[action]
        return sqlite3.SQLITE_DENY

    def run(self, sql: str, limits: Limits) -> ExecutionOutcome:
        """The outcome without its time.

        Raises:
            DataError: The file is at fault, not the query.
        """
        reason = _unfit(sql, limits)
        if reason:
            return _failure("error", reason)
        self.deadline = time.monotonic() + limits.timeout_s
        outcome = self._attempt(sql, limits)
        if outcome.error.startswith("Could not decode to UTF-8"):
            # Text that is not UTF-8: kept byte for byte, so that different bytes stay different.
            self.connection.text_factory = _text_of
            outcome = self._attempt(sql, limits)
            self.connection.text_factory = str
        return outcome

    def _attempt(self, sql: str, limits: Limits) -> ExecutionOutcome:
        self.denied = ""
        cursor = self.connection.cursor()
        try:
            cursor.execute(sql)
            if cursor.description is None:
                return _failure("error", "expected one SELECT query, got nothing that returns rows")
            columns = tuple(entry[0] for entry in cursor.description)
            rows, is_truncated = _fetch(cursor, limits)
            return ExecutionOutcome("ok", columns, rows, is_truncated)
        except MemoryError:
            return _failure("memory", "stopped: the query needs too much memory")
        except sqlite3.Warning:  # Python 3.11; a ProgrammingError from 3.12 on
            return _failure("error", "expected one SELECT query, got several statements")
        except sqlite3.Error as error:
            return self._outcome_of(error, limits)
        finally:
            cursor.close()

    def _outcome_of(self, error: sqlite3.Error, limits: Limits) -> ExecutionOutcome:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # 0: raised by the Python module
        if self.denied:
            return _failure("denied", f"not allowed: {self.denied}; only queries that read the tables run")
        if code == sqlite3.SQLITE_INTERRUPT and self._is_late():
            return _failure("timeout", f"stopped: the query ran longer than {limits.timeout_s:g} s")
        if code in (sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_AUTH):
            # A callback ended by an exception, which the sqlite3 module swallows: Ctrl-C.
            raise KeyboardInterrupt from error
        if code in _FILE_FAULTS:
            raise DataError(
                f"expected a sound SQLite database file, got: {error} (at {self.path})"
            ) from error
        if code in _SIZE_FAULTS:
            return _failure("memory", f"stopped: {error}")
        if code == sqlite3.SQLITE_READONLY or str(error).endswith("may not be modified"):
            return _failure("denied", f"not allowed: {error}; only queries that read the tables run")
        if code == 0 and "one statement at a time" in str(error):
            return _failure("error", "expected one SELECT query, got several statements")
        return _failure("error", str(error))


def _fetch(cursor: sqlite3.Cursor, limits: Limits) -> tuple[tuple[Row, ...], bool]:
    """Rows up to the caps, and whether there were more.

    One row at a time: a batch of rows of long values would be in memory before it is counted.
    """
    rows: list[Row] = []
    n_bytes = 0
    for row in cursor:
        n_bytes += sum([len(cell) if isinstance(cell, str | bytes) else 8 for cell in row])
        if len(rows) == limits.max_rows or n_bytes > limits.max_bytes:
            return tuple(rows), True
        rows.append(row)
    return tuple(rows), False


def _failure(status: Status, text: str) -> ExecutionOutcome:
    line = " ".join(text.split())
    if len(line) > MAX_ERROR_CHARS:
        line = line[: MAX_ERROR_CHARS - 3] + "..."
    return ExecutionOutcome(status, error=line)


def _unfit(sql: str, limits: Limits) -> str:
    """Why the text cannot be given to SQLite at all; empty if it can."""
    if "\0" in sql:
        return "the query contains a NUL character"
    try:
        n_bytes = len(sql.encode())
    except UnicodeEncodeError:
        return "the query contains a character that is not valid Unicode (a lone surrogate)"
    if n_bytes > limits.max_sql_bytes:
        return f"the query is too long: expected at most {limits.max_sql_bytes} bytes, got {n_bytes}"
    return ""


def _text_of(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
