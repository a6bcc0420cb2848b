"""Authorizer of untrusted SQL in SQLite: allows reading tables, and nothing else.

Imported by the workers: nothing heavy here.
"""

from __future__ import annotations

import contextlib
import sqlite3
from functools import cache

MAX_VALUE_BYTES = 1_000_000
MAX_COLUMNS = 2_000  # SQLite's own limit
MAX_READABLE = 10_000  # names of tables that are remembered

SQLITE_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
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
) | {"data_version"}  # read by fts5 at each search
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

# They read the clock where an argument is 'now' or missing.
_CLOCK_FUNCTIONS = frozenset(
    ("date", "time", "datetime", "julianday", "unixepoch", "strftime", "timediff")
) | {"current_date", "current_time", "current_timestamp"}
_CLOCK = (
    r"\bnow\b|\bcurrent_(date|time|timestamp)\b"
    r"|\b(date|time|datetime|julianday|unixepoch)[\"`\]]?{0}\({0}\)"
    r"|\bstrftime[\"`\]]?{0}\([^,()]*\)"
).format(r"(?:\s|--[^\n]*|/\*.*?\*/)*")
_FUNCTIONS = "SELECT lower(name), type, flags FROM pragma_function_list"
_DETERMINISTIC = 0x800  # SQLITE_DETERMINISTIC

_OK, _SELECT, _READ = sqlite3.SQLITE_OK, sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ


class ReadGuard:
    """An authorizer that allows only reading.

    Attributes:
        denied: Last refused action; cleared by the caller before each query.
        is_volatile: True if the query calls a function that may return something else the next time; likewise
            cleared.
        calls_clock: True if it calls a function that reads the clock for some arguments; likewise cleared.
        clock_in_view: True if a view that it reads calls such a function; likewise cleared.
        own_tables: Names of tables of the file that SQLite has tables of its own for.
    """

    _readable: set[str | None] = set()  # noqa: RUF012 (shared: the rule knows names alone)

    def __init__(self) -> None:
        self.denied = ""
        self.is_volatile = self.calls_clock = self.clock_in_view = False
        self.own_tables: frozenset[str] = frozenset()
        self._deterministic = deterministic_functions()

    def authorize(
        self, action: int, first: str | None, second: str | None, _schema: str | None, source: str | None
    ) -> int:
        """Allow or deny one access; SQLite calls this while it compiles a query."""
        # The first two lines decide nearly every call.
        if action == _SELECT or (action == _READ and first in self._readable):
            return _OK
        if action == sqlite3.SQLITE_RECURSIVE:
            return _OK
        name = ((second if action == sqlite3.SQLITE_FUNCTION else first) or "").lower()
        if action == _READ:
            is_reserved = name.startswith("sqlite_") and name not in _READABLE_SQLITE_TABLES
            if name in self.own_tables:
                return _OK
            if not is_reserved and name not in _DENIED_TABLES:
                if len(self._readable) < MAX_READABLE:
                    self._readable.add(first)
                return _OK
            self.denied = f"reading {name}"
        elif action == sqlite3.SQLITE_FUNCTION:
            if name not in _DENIED_FUNCTIONS:
                self.is_volatile = self.is_volatile or name not in self._deterministic
                if name in _CLOCK_FUNCTIONS:
                    self.calls_clock = True
                    self.clock_in_view = self.clock_in_view or source is not None
                return _OK
            self.denied = f"the function {name}"
        elif action == sqlite3.SQLITE_PRAGMA:
            if name in _READING_PRAGMAS:
                return _OK
            self.denied = f"PRAGMA {name}"
        elif action == sqlite3.SQLITE_UPDATE and name in _SCHEMA_TABLES:
            # SQLite < 3.41 checks this when it sets up json_each or pragma_table_info. A real UPDATE of
            # these tables is refused by SQLite itself, and the file is open for reading only.
            return _OK
        elif name in _SCHEMA_TABLES or action not in _ACTION_NAMES:
            self.denied = "a change of the schema"
        else:
            self.denied = _ACTION_NAMES[action]
        return sqlite3.SQLITE_DENY


def may_read_clock(text: str) -> bool:
    """True if the functions of dates that a text calls may read the clock.

    >>> may_read_clock("SELECT strftime('%Y')"), may_read_clock("SELECT strftime('%Y', born) FROM t")
    (True, False)
    """
    import re  # would add a tenth to the time in which a worker starts

    return re.search(_CLOCK, text, re.IGNORECASE | re.DOTALL) is not None


@cache
def deterministic_functions() -> frozenset[str]:
    """Names of the functions that return the same for the same rows, the clock aside.

    Empty where the library has no list of functions (before SQLite 3.31).
    """
    listed: list[tuple[str, str, int]] = []
    connection = sqlite3.connect(":memory:")
    with contextlib.closing(connection), contextlib.suppress(sqlite3.OperationalError):
        listed = connection.execute(_FUNCTIONS).fetchall()
    changing = {name for name, kind, flags in listed if kind == "s" and not flags & _DETERMINISTIC}
    return frozenset(name for name, _, _ in listed) - (changing - _CLOCK_FUNCTIONS)


def own_tables(connection: sqlite3.Connection) -> frozenset[str]:
    """Names of the tables and views of a file that are named like tables about SQLite itself."""
    found = connection.execute("SELECT lower(name) FROM sqlite_master WHERE type IN ('table', 'view')")
    return frozenset(name for (name,) in found.fetchall()) & _DENIED_TABLES
