"""One hardened SQLite connection for untrusted SQL.

Effects are bounded by an authorizer that allows only reading: a read-only file alone still lets SQL
create files (ATTACH, VACUUM INTO) and shadow tables (TEMP). Time is bounded by a progress handler,
which SQLite calls between its instructions; a single long instruction is not interrupted, and only the
end of the process bounds it (see `worker`). Imported by the workers: nothing heavy here.
"""

from __future__ import annotations

import os
import sqlite3
import time
from itertools import accumulate
from operator import itemgetter

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.failure_text import (
    NO_MEMORY,
    NO_TEMPORARY_FILE,
    NOTHING_TO_RUN,
    ONLY_READING,
    SEVERAL_STATEMENTS,
    cut_values,
    failed,
    late_text,
)
from text2sql_grpo.sql.frames import marshalled
from text2sql_grpo.sql.sqlite_file import (
    MAX_STORED_BYTES,
    PAGE_CACHE_KIB,
    Fingerprint,
    connect,
    fingerprint_of,
    is_unlocked,
    linked,
    open_file,
    prepare_virtual_tables,
    text_of,
    version_of,
)
from text2sql_grpo.sql.sqlite_guard import (
    MAX_COLUMNS,
    MAX_VALUE_BYTES,
    SQLITE_LIMITS,
    ReadGuard,
    may_read_clock,
    own_tables,
)

TYPE_CHECKING = False  # the typing module would double the time in which a worker starts
if TYPE_CHECKING:
    from text2sql_grpo.sql.outcome import Limits, Row, Status

spills_to_disk = True  # False where no temporary folder can be written
PROGRESS_STEPS = 10_000  # SQLite instructions between two checks of the deadline
BUSY_TIMEOUT_MS = 100  # wait inside a query for another process that writes the file; the worker retries
OVERHEAD_BYTES = 100_000  # of a connection and its schema
MAX_FETCHED_BYTES = 64 * MAX_VALUE_BYTES  # of the rows fetched together, if every value has maximum length

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
# A sort that fills the disk: nothing else is written.
_FULL_DISK = frozenset(
    (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_TRUNCATE)
)
# A full disk as SQLite reports it, no memory, or a value over the length limit.
_SIZE_FAULTS = frozenset((sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_FULL))

NO_TEXT = "the query reads a table or column whose name is not valid UTF-8"
_LIST_HEADER_BYTES = 5
# By the number of columns.
_FETCHED_ROWS = [max(1, MAX_FETCHED_BYTES // (MAX_VALUE_BYTES * (n or 1))) for n in range(MAX_COLUMNS + 1)]
_first = itemgetter(0)


class DatabaseLocked(DataError):
    """Another process writes the file; a retry may succeed."""


class OutOfMemory(Exception):
    """A query exhausted SQLite's memory limit, with its marshalled answer; its connection must be closed."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer


class HardenedDatabase:
    """One hardened connection.

    Attributes:
        path: Path of the file.
        fingerprint: Fingerprint of the file when it was opened.
        n_bytes: Memory that the connection may keep between two queries.
    """

    def __init__(self, path: str, fingerprint: Fingerprint) -> None:
        self.path = path
        self.fingerprint = fingerprint
        self._deadline = float("inf")
        self._guard = ReadGuard()
        self._version = fingerprint[:4]
        self._log = linked(path) + "-wal"  # another target of a link is another version
        self._is_settled = fingerprint[-1]
        self.n_bytes = OVERHEAD_BYTES + min(fingerprint[1], 1024 * PAGE_CACHE_KIB)
        self._file, self._has_wal_header = open_file(path)
        try:
            self.connection = connect(path, is_settled=self._is_settled, has_log_mode=self._has_wal_header)
        except BaseException:
            os.close(self._file)
            raise
        self._is_unlocked = self._has_wal_header and is_unlocked(self.connection)
        self._has_long_values = self._has_prepared = False
        if not self._is_settled:
            self.connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}").close()
        if not spills_to_disk:
            self.connection.execute("PRAGMA temp_store = MEMORY").close()
        for limit, value in SQLITE_LIMITS.items():
            self.connection.setlimit(limit, value)
        self.connection.set_authorizer(self._guard.authorize)
        self.connection.set_progress_handler(self._is_late, PROGRESS_STEPS)
        self._cursor = self.connection.cursor()

    def close(self) -> None:
        """Close the connection for good."""
        self.connection.close()
        os.close(self._file)
        del self.connection, self._cursor  # its handlers hold this object

    def is_current(self) -> bool:
        """True if a new connection would read the same as this one."""
        if not self._is_settled:
            return fingerprint_of(self.path) == self.fingerprint
        # Less than a whole fingerprint: while this file is the same, only a write-ahead log can hold rows,
        # and the file's header marks that mode.
        try:
            is_same = version_of(os.stat(self.path)) == self._version
        except OSError:
            return False
        return is_same and not (self._has_wal_header and os.access(self._log, os.F_OK))

    def is_unchanged(self) -> bool:
        """True if all reads since the opening saw one state of the file.

        A connection that takes no lock reads a file that may change meanwhile; any other reads under a lock.
        """
        if self._is_unlocked:
            return os.path.exists(self.path) and fingerprint_of(self.path) == self.fingerprint
        # Without the inode's time, which changes when the file is removed or linked.
        return not self._is_settled or version_of(os.fstat(self._file))[:3] == self._version[:3]

    def _is_late(self) -> bool:
        return time.perf_counter() > self._deadline

    def run_marshalled(self, sql: str, limits: Limits, started: float) -> bytes:
        """Marshalled fields of an outcome, and True as the last if another run may return other rows.

        Args:
            sql: A text that `why_unfit` accepts.
            started: Seconds of `time.perf_counter`.

        Raises:
            OutOfMemory: SQLite's memory limit was reached; holds the answer.
            DataError: The file is at fault, not the query.
        """
        guard = self._guard
        guard.denied = ""
        guard.is_volatile = guard.calls_clock = guard.clock_in_view = False
        self._deadline = started + limits.timeout_s
        try:
            cursor = self._cursor.execute(sql)
            if cursor.description is None:
                return self._failure("error", NOTHING_TO_RUN, started)
            columns = tuple(map(_first, cursor.description))
            rows, is_truncated = self._read(cursor, len(columns), limits)
            elapsed_s = time.perf_counter() - started
            return marshalled(("ok", columns, rows, is_truncated, "", elapsed_s, *self._changes(sql)))
        except MemoryError as error:
            raise OutOfMemory(self._failure("memory", NO_MEMORY, started)) from error
        except sqlite3.Warning:  # Python 3.11; a ProgrammingError from 3.12 on
            return self._failure("error", SEVERAL_STATEMENTS, started)
        except sqlite3.Error as error:
            if str(error).startswith("Could not decode to UTF-8") and self.connection.text_factory is str:
                return self._again_with_any_bytes(sql, limits, started)
            return self._answer_to(error, sql, limits, started)
        except UnicodeDecodeError:  # raised before the guard is called
            return self._failure("error", NO_TEXT, started)
        finally:
            self._deadline = float("inf")

    def _again_with_any_bytes(self, sql: str, limits: Limits, started: float) -> bytes:
        """Run again, keeping invalid UTF-8 byte for byte, so that different bytes stay different."""
        self.connection.text_factory = text_of
        try:
            return self.run_marshalled(sql, limits, started)
        finally:
            self.connection.text_factory = str

    def _again_with_long_values(self, sql: str, limits: Limits, started: float) -> bytes:
        """Run again, reading stored values over the limit, which no longer than their file can be."""
        longest = min(os.fstat(self._file).st_size, MAX_STORED_BYTES)
        self._has_long_values = True
        self.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, longest)
        try:
            return self.run_marshalled(sql, limits, started)
        finally:
            self._has_long_values = False
            self.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)

    def _read(self, cursor: sqlite3.Cursor, n_columns: int, limits: Limits) -> tuple[tuple[Row, ...], bool]:
        """Rows up to the caps, and whether there were more or a value was cut."""
        n_fetched = 1 if self._has_long_values else _FETCHED_ROWS[n_columns]
        kept: list[Row] = []
        n_bytes_left = limits.max_bytes
        is_cut = False
        while rows := cursor.fetchmany(n_fetched):
            if self._has_long_values:
                rows, was_cut = cut_values(rows, MAX_VALUE_BYTES)
                is_cut = is_cut or was_cut
            n_bytes = len(marshalled(rows)) - _LIST_HEADER_BYTES
            if n_bytes > n_bytes_left or len(kept) + len(rows) > limits.max_rows:
                kept += _fitting(rows[: limits.max_rows - len(kept)], n_bytes_left)
                self._cursor.close()  # ends the statement
                self._cursor = self.connection.cursor()
                return tuple(kept), True
            kept += rows
            n_bytes_left -= n_bytes
            if len(rows) < n_fetched:
                break
        return tuple(kept), is_cut

    def _changes(self, sql: str) -> tuple[bool, bool]:
        """Volatility of the last query, and whether it must not be cached.

        Functions of dates are not cached: one of their values may be 'now', wherever it comes from.
        """
        guard = self._guard
        if guard.is_volatile or not guard.calls_clock:
            return guard.is_volatile, guard.is_volatile
        texts = [sql]
        if guard.clock_in_view:
            found = self.connection.execute("SELECT sql FROM sqlite_master WHERE type = 'view'").fetchall()
            texts += [str(text) for (text,) in found]
        return any(map(may_read_clock, texts)), True

    def _prepare_tables(self) -> None:
        """Prepare what the guard may have refused although it is harmless."""
        self._has_prepared = True
        self.connection.set_authorizer(None)
        try:
            prepare_virtual_tables(self.connection)
            self._guard.own_tables = own_tables(self.connection)
        finally:
            self.connection.set_authorizer(self._guard.authorize)

    def _failure(self, status: Status, text: str, started: float) -> bytes:
        elapsed_s = time.perf_counter() - started
        may_change = self._guard.is_volatile or self._guard.calls_clock
        return marshalled(failed(status, text, elapsed_s, may_change=may_change))

    def _answer_to(self, error: sqlite3.Error, sql: str, limits: Limits, started: float) -> bytes:
        extended = getattr(error, "sqlite_errorcode", 0)  # 0: raised by the Python module
        code = extended & 0xFF
        if self._guard.denied:
            if not self._has_prepared:
                self._prepare_tables()
                return self.run_marshalled(sql, limits, started)
            return self._failure("denied", f"not allowed: {self._guard.denied}; {ONLY_READING}", started)
        if code == sqlite3.SQLITE_INTERRUPT and self._is_late():
            return self._failure("timeout", late_text(limits.timeout_s), started)
        if code == sqlite3.SQLITE_AUTH:  # the guard could not be called
            return self._failure("error", NO_TEXT, started)
        if code == sqlite3.SQLITE_INTERRUPT:
            # A callback ended by an exception, which the sqlite3 module swallows: Ctrl-C.
            raise KeyboardInterrupt from error
        is_long = code == sqlite3.SQLITE_TOOBIG and os.fstat(self._file).st_size > MAX_VALUE_BYTES
        if is_long and not self._has_long_values:
            return self._again_with_long_values(sql, limits, started)
        has_log = not self._is_settled and (self._has_wal_header or self.fingerprint[4])
        if (code == sqlite3.SQLITE_CANTOPEN or extended == sqlite3.SQLITE_IOERR_GETTEMPPATH) and not has_log:
            return self._failure("memory", NO_TEMPORARY_FILE, started)
        if code in _SIZE_FAULTS or extended in _FULL_DISK:
            answer = self._failure("memory", f"stopped: {error}", started)
            if code == sqlite3.SQLITE_NOMEM:
                raise OutOfMemory(answer) from error
            return answer
        if code in _FILE_FAULTS or (code == sqlite3.SQLITE_READONLY and extended != code):
            kind = DatabaseLocked if code == sqlite3.SQLITE_BUSY else DataError
            raise kind(f"cannot read the SQLite database file: {error} (at {self.path})") from error
        if code == sqlite3.SQLITE_READONLY or str(error).endswith("may not be modified"):
            return self._failure("denied", f"not allowed: {error}; {ONLY_READING}", started)
        if code == 0 and "one statement at a time" in str(error):
            return self._failure("error", SEVERAL_STATEMENTS, started)
        return self._failure("error", str(error), started)


def _fitting(rows: list[Row], max_bytes: int) -> list[Row]:
    """First rows that fit into `max_bytes` when they are marshalled."""
    ends = accumulate(len(marshalled(row)) for row in rows)
    return [row for row, end in zip(rows, ends, strict=True) if end <= max_bytes]
