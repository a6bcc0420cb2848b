"""SQLite's own report of functions that may return something else the next time.

The library lists its deterministic functions. Those of dates are among them, though they read the clock where
an argument is 'now' or missing: a call of the system, which is seen here. Imported by the workers.
"""

from __future__ import annotations

import _sqlite3
import contextlib
import ctypes
import sqlite3
from functools import cache

_FUNCTIONS = "SELECT lower(name), type, flags FROM pragma_function_list"
_DETERMINISTIC = 0x800  # SQLITE_DETERMINISTIC


class _Clock:
    """Clock of this process's SQLite library.

    Attributes:
        was_read: True after a query that read it; cleared by the caller before each query.
    """

    was_read = False


CLOCK = _Clock()

_Read = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _System(ctypes.Structure):
    """`sqlite3_vfs`, from version 2 on, up to xCurrentTimeInt64."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("sizes", ctypes.c_int * 2),
        ("others", ctypes.c_void_p * 15),
        ("read_clock", ctypes.c_void_p),
    )


@cache
def deterministic_functions() -> frozenset[str]:
    """Names of the functions that return the same for the same rows; with the clock watched from now on.

    Aggregates alone where the clock cannot be watched, none where the library has no list of functions.
    """
    listed: list[tuple[str, str, int]] = []
    with contextlib.suppress(AttributeError, OSError, ValueError):  # a library that is not open to ctypes
        _watch_clock()
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        CLOCK.was_read = False
        connection.execute("SELECT date('now')").fetchall()
        trusted = _DETERMINISTIC if CLOCK.was_read else 0
        with contextlib.suppress(sqlite3.OperationalError):  # before SQLite 3.31
            listed = connection.execute(_FUNCTIONS).fetchall()
    changing = {name for name, kind, flags in listed if kind == "s" and not flags & trusted}
    return frozenset(name for name, _, _ in listed) - changing


_kept: list[object] = []  # called by the library from now on


def _watch_clock() -> None:
    library = ctypes.CDLL(getattr(_sqlite3, "__file__", None))
    library.sqlite3_vfs_find.restype = ctypes.POINTER(_System)
    system = library.sqlite3_vfs_find(None).contents
    read = _Read(system.read_clock)

    def noted_read(vfs: int, found: int) -> int:
        CLOCK.was_read = True
        return int(read(vfs, found))

    watched = _Read(noted_read)
    _kept.append(watched)
    if system.version >= 2:
        system.read_clock = ctypes.cast(watched, ctypes.c_void_p).value
