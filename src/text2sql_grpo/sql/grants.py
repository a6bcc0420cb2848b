"""Files that SQL workers may read: databases, the files next to them, and their siblings.

The rights of a worker are fixed when it starts. Each new file raises the version of the grants, and a worker
may read what was granted up to the version at which it started.
"""

import glob
import os
import stat
import threading
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from urllib.parse import parse_qsl, urlsplit

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.address import Kind
from text2sql_grpo.sql.engines import ENGINES

MANY_SIBLINGS = 3  # databases side by side, from which on workers may read the others there too
MAX_LISTED = 2_000  # siblings that are granted together

Identity = tuple[int, int] | None  # device and inode; None if there is no file

# Next to a database's file; those that are there when a worker starts are read, and none is made.
_SIDE_FILES: dict[Kind, tuple[str, ...]] = {
    "sqlite": ("-wal", "-shm", "-journal"),
    "duckdb": (".wal", ".wal.recovery", ".wal.checkpoint"),
}
_MARKS: dict[Kind, tuple[int, bytes]] = {"sqlite": (0, b"SQLite format 3\0"), "duckdb": (8, b"DUCK")}


class Grants:
    """Thread-safe record of the files that workers for one kind of database may read."""

    def __init__(self, kind: Kind, folders: Iterable[str] = ()) -> None:
        """Grant nothing yet.

        Args:
            folders: Folders of databases of this package's own, each granted with all that will be in it.
        """
        self._kind = kind
        self._folders = folders
        self._lock = threading.Lock()
        self._version = 0
        self._files: dict[str, Identity] = {}
        # Files of each database, and the version from which on they are readable.
        self._locations: dict[str, tuple[dict[str, Identity], int]] = {}
        self._asked: dict[str, set[str]] = {}  # databases or folders by the pattern of their siblings

    def snapshot(self) -> tuple[tuple[str, ...], int]:
        """Paths that a worker which starts now may read, and their version."""
        with self._lock:
            return tuple(self._files), self._version

    def version_of(self, location: str) -> int:
        """Version from which on workers may read a database, which is granted if it is a new one."""
        known = self._locations.get(location)
        return known[1] if known is not None else self.grant(location)

    def grant(self, location: str) -> int:
        """Let workers that start from now on read a database as it is now; the version of those that may.

        Raises:
            DataError: It is not a file.
        """
        with self._lock:
            files = self._files_of(location)
            if not files.items() <= self._files.items():
                self._version += 1
                granted = {path: self._files_of(path) for path in self._siblings_of(location)}
                for place, found in {**granted, location: files}.items():
                    self._files |= found
                    self._locations[place] = (found, self._version)
            known = self._locations.get(location)
            if known is None or known[0] != files:  # files that were granted for another database
                known = self._locations[location] = (files, self._version)
            return known[1]

    def _files_of(self, location: str) -> dict[str, Identity]:
        """Files and folders that a worker reads for a database besides Python's own."""
        if ENGINES[self._kind].is_server:
            return {path: _identity(path) for path in _client_files(location)}
        path = os.path.realpath(location)
        identity = _identity(path, self._kind)
        for folder in map(os.path.realpath, tuple(self._folders)):  # another thread may grant one now
            if path.startswith(folder + os.sep):
                return {folder: _identity(folder)}
        beside = {path + suffix: _identity(path + suffix) for suffix in _SIDE_FILES[self._kind]}
        return {path: identity} | {path: known for path, known in beside.items() if known}

    def _siblings_of(self, location: str) -> list[str]:
        """Databases next to this one, or in folders next to its own, once several were asked for there."""
        if ENGINES[self._kind].is_server:
            return []
        folder, suffix = os.path.dirname(location), glob.escape(os.path.splitext(location)[1])
        beside = os.path.join(glob.escape(folder), f"*{suffix}")
        near = os.path.join(glob.escape(os.path.dirname(folder)), "*", f"*{suffix}")
        found: list[str] = []
        for pattern, place in ((beside, location), (near, folder)):
            asked = self._asked.setdefault(pattern, set())
            if len(asked) < MANY_SIBLINGS:
                asked.add(place)
                if len(asked) == MANY_SIBLINGS:
                    found += islice(glob.iglob(pattern), MAX_LISTED)
        return [path for path in found if path not in self._locations and _is_database(path, self._kind)]


def _identity(path: str, kind: Kind | None = None) -> Identity:
    """Device and inode; raises DataError if opening it, as a database of this kind, would wait."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # opening it raises the error
        return None
    if kind is not None and not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise DataError(f"cannot read the {kind} database file: it is not a regular file (at {path})")
    return (status.st_dev, status.st_ino)


def _is_database(path: str, kind: Kind) -> bool:
    """True for a regular file, not a link, with the engine's mark."""
    offset, mark = _MARKS[kind]
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        with open(path, "rb", buffering=0) as file:
            return file.read(offset + len(mark))[offset:] == mark
    except OSError:
        return False


def _client_files(location: str) -> set[str]:
    """Files of PostgreSQL's client that the user, the environment or the URL names."""
    home = [os.path.expanduser(f"~/{name}") for name in (".pgpass", ".postgresql", ".pg_service.conf")]
    values = [value for name, value in os.environ.items() if name.startswith("PG")]
    with suppress(ValueError):  # a malformed URL, which the worker reports
        values += [value for _, value in parse_qsl(urlsplit(location).query)]
    return {*home, *filter(os.path.isabs, values)}
