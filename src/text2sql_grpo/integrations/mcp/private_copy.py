"""Private copies of databases for tool servers, and a watch over the originals."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from text2sql_grpo.errors import DataError
from text2sql_grpo.files import sha256

_EMPTY = hashlib.sha256().hexdigest()
_State = tuple[tuple[int, int, int] | None, ...]


class PrivateCopy:
    """Read-only copy of a SQLite database in a folder of its own, for one server process.

    Raises:
        OSError: It cannot be copied.
    """

    def __init__(self, database: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="text2sql-grpo-mcp-", ignore_cleanup_errors=True)
        self.path = Path(self._folder.name) / database.name
        try:
            for source, target in zip(_files(database), _files(self.path), strict=True):
                if source.exists():
                    shutil.copyfile(source, target)
                    os.utime(target, (0, 0))  # so that any later write shows
            self.path.chmod(0o444)
        except OSError:
            self.remove()
            raise
        self._state = _state(self.path)

    def is_changed(self) -> bool:
        """True if the server wrote to it, which its owner's rights may allow."""
        return _state(self.path) != self._state

    def remove(self) -> None:
        """Delete it."""
        self._folder.cleanup()


class Originals:
    """Watch over databases that no tool may change."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[_State, list[str]]] = {}

    def check(self, database: Path, *, by_hash: bool = False) -> None:
        """Compare a database with its content when it was first checked.

        Args:
            by_hash: Compare hashes even if times and sizes are the same, which a tool can set back.

        Raises:
            DataError: It has changed, or it is gone.
        """
        state = _state(database)
        if database not in self._known:
            self._known[database] = state, _digests(database)
        known, digests = self._known[database]
        if state == known and not by_hash:
            return
        if _digests(database) != digests:
            raise DataError(
                f"the database {database} changed while an MCP server's tools were in use: restore it, and"
                " let the server open {database} alone, which is a private copy"
            )
        self._known[database] = state, digests

    def check_all(self) -> None:
        """Check every known database by its hash.

        Raises:
            DataError: One has changed.
        """
        for database in list(self._known):
            self.check(database, by_hash=True)


def _files(database: Path) -> tuple[Path, Path]:
    """The file, and what SQLite has not yet written back into it."""
    return database, database.with_name(f"{database.name}-wal")


def _state(database: Path) -> _State:
    """Times and sizes; None for a file that is missing or, where that means the same, empty."""
    found: list[tuple[int, int, int] | None] = []
    for path in _files(database):
        try:
            stat = path.stat()
        except FileNotFoundError:
            found.append(None)
            continue
        is_empty_wal = path != database and stat.st_size == 0
        found.append(None if is_empty_wal else (stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return tuple(found)


def _digests(database: Path) -> list[str]:
    """Hashes of the files; a missing file of recent writes counts as an empty one."""
    try:
        return [sha256(path) if path == database or path.exists() else _EMPTY for path in _files(database)]
    except OSError as error:
        raise DataError(f"cannot read a database that an MCP server's tools were used on: {error}") from error
