"""Fingerprint of a SQLite file, and a read-only connection to it.

Imported by the workers: nothing heavy here.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import time

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.sqlite_guard import MAX_VALUE_BYTES, SQLITE_LIMITS, ReadGuard

TYPE_CHECKING = False  # see `sqlite`
if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

OPEN_TIMEOUT_S = 5.0  # wait for another process that writes the file
SETTLED_NS = 100_000_000  # a file changed within this time may change again under the same time stamp

MAX_STEPS = 10_000_000_000  # SQLite instructions of this package's own queries on one connection: minutes
_STEPS_OF_A_CALL = 1_000_000
MAX_STORED_BYTES = 32 * MAX_VALUE_BYTES  # of a stored value that is read, and cut
_VIRTUAL_TABLES = "SELECT name FROM sqlite_master WHERE rootpage = 0 AND type = 'table'"
PAGE_CACHE_KIB = 2_000  # of each connection
# The last one reads the schema, which finds a corrupt file.
_SETTINGS = (
    "PRAGMA query_only = ON; PRAGMA cell_size_check = ON; PRAGMA trusted_schema = OFF;"
    f" PRAGMA cache_size = -{PAGE_CACHE_KIB};"
)

# Modification time (ns), size, inode, time of the inode's last change (ns), time and size of logs next to the
# file, and whether all are settled.
Fingerprint = tuple[int, int, int, int, tuple[tuple[int, int], ...], bool]


def fingerprint_of(path: str, logs: Iterable[str] = ("-wal", "-journal")) -> Fingerprint:
    """Time stamps, sizes and the inode of a database file, which change when its content does.

    The inode's own time stamp changes where a copy sets the other one back (`cp -p`).

    The last field is False while the file has a log of unmerged changes, or changed a moment ago: then it
    may change again with the same fingerprint.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the SQLite database file: {error} (at {path})") from error
    seen = []
    for log in [linked(path) + suffix for suffix in logs]:
        with contextlib.suppress(FileNotFoundError):  # merged meanwhile
            if os.access(log, os.F_OK) and (found := os.stat(log)).st_size:
                seen.append((found.st_mtime_ns, found.st_size))
    is_settled = not seen and abs(time.time_ns() - status.st_mtime_ns) > SETTLED_NS
    return (*version_of(status), tuple(seen), is_settled)


def linked(path: str) -> str:
    """Path of the file that a link leads to, next to which SQLite keeps its logs; else the path itself."""
    return os.path.realpath(path) if os.path.islink(path) else path


def version_of(status: os.stat_result) -> tuple[int, int, int, int]:
    """Part of a fingerprint without the logs."""
    return (status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns)


def open_database(database: Path | str) -> sqlite3.Connection:
    """Open a read-only connection to a SQLite database, for queries of this package.

    The file may be hostile: its expressions (of generated columns and indexes) may do no more than an
    untrusted query, and all queries together take at most `MAX_STEPS`.

    Raises:
        DataError: The file is missing, unreadable, empty, corrupt or no SQLite database.
    """
    path = os.fspath(database)
    file, has_log_mode = open_file(path)
    longest = min(os.fstat(file).st_size, MAX_STORED_BYTES)
    os.close(file)
    connection = connect(path, is_settled=fingerprint_of(path)[-1], has_log_mode=has_log_mode)
    try:
        prepare_virtual_tables(connection)
        for limit, value in SQLITE_LIMITS.items():
            connection.setlimit(limit, value)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, max(MAX_VALUE_BYTES, longest))
        connection.set_authorizer(ReadGuard().authorize)
        limit_steps(connection)
    except sqlite3.Error as error:
        connection.close()
        raise DataError(f"cannot read the SQLite database file: {error} (at {path})") from error
    return connection


def limit_steps(connection: sqlite3.Connection) -> None:
    """Stop the connection's queries, from now on, after `MAX_STEPS` instructions of SQLite together."""
    calls = iter(range(MAX_STEPS // _STEPS_OF_A_CALL))
    connection.set_progress_handler(lambda: next(calls, None) is None, _STEPS_OF_A_CALL)


def prepare_virtual_tables(connection: sqlite3.Connection) -> None:
    """Let rtree and fts5 prepare the writes that they prepare when first read, which the guard refuses.

    A table whose module is missing stays unreadable, and a query on it fails with that reason.
    """
    for (name,) in connection.execute(_VIRTUAL_TABLES).fetchall():
        quoted = name.replace('"', '""')
        with contextlib.suppress(sqlite3.OperationalError):
            connection.execute(f'SELECT 1 FROM "{quoted}" LIMIT 0').close()


def open_file(path: str) -> tuple[int, bool]:
    """Open a database file, and read whether a write-ahead log may belong to it.

    Raises:
        DataError: The file is missing, unreadable, empty or no SQLite database.
    """
    file = None
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR):  # a FIFO would be waited for
            raise OSError("it is not a regular file")
        file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
        header = os.read(file, 20)  # fails for a folder
        if header[:16] != b"SQLite format 3\0":
            raise OSError("it is not a database" if header else "it is empty")
    except (OSError, ValueError) as error:
        if file is not None:
            os.close(file)
        raise DataError(f"cannot read the SQLite database file: {error} (at {path})") from error
    return file, header[18:19] == b"\2"


def connect(path: str, *, is_settled: bool, has_log_mode: bool) -> sqlite3.Connection:
    """Connect to a database file that is there.

    Raises:
        DataError: The file is corrupt or locked.
    """
    try:
        if is_settled:
            # Halves the cost of small queries, but sees no write-ahead log and no later change.
            return _connected(path, "immutable=1")
        if not has_log_mode or os.name == "nt":
            return _connected(path)
        if os.access(linked(path) + "-shm", os.F_OK):
            with contextlib.suppress(sqlite3.OperationalError):  # its writer is gone
                return _connected(path, "readonly_shm=1")
        # Without a lock, for which SQLite would make a file next to the log. See `is_unlocked`.
        if not os.access(linked(path) + "-wal", os.F_OK):
            return _connected(path, "immutable=1", "PRAGMA locking_mode = EXCLUSIVE;")
        return _connected(path, "vfs=unix-none", "PRAGMA locking_mode = EXCLUSIVE;")
    except sqlite3.Error as error:
        raise DataError(f"cannot read the SQLite database file: {error} (at {path})") from error


def _connected(path: str, option: str = "", setting: str = "") -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{_uri_of(path)}?mode=ro&{option}",
        uri=True,
        timeout=OPEN_TIMEOUT_S,
        isolation_level=None,
        cached_statements=0,
        check_same_thread=False,
    )
    try:
        connection.executescript(setting + _SETTINGS)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def is_unlocked(connection: sqlite3.Connection) -> bool:
    """True if a write-ahead log is read without a lock, so that its file may change meanwhile."""
    mode: str = connection.execute("PRAGMA locking_mode").fetchone()[0]
    return mode == "exclusive"


def text_of(raw: bytes) -> str:
    """Decode text, and keep invalid UTF-8 byte for byte, as lone surrogates."""
    return raw.decode("utf-8", "surrogateescape")


def _uri_of(path: str) -> str:
    absolute = path if path.startswith("/") else os.path.abspath(path)
    if os.name == "nt":
        absolute = "/" + absolute.replace("\\", "/")
    return "file:" + absolute.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
