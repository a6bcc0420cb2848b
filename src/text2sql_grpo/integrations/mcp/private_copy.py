"""Private copies of databases for tool servers, and a watch over the originals."""

import os
import shutil
import tempfile
from pathlib import Path

from text2sql_grpo.errors import DataError
from text2sql_grpo.files import sha256
from text2sql_grpo.sql.sqlite_file import fingerprint_of, linked


class PrivateCopy:
    """Read-only copy of a SQLite database in a folder of its own, for one server process.

    Raises:
        OSError: It cannot be copied.
    """

    def __init__(self, database: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="text2sql-grpo-mcp-", ignore_cleanup_errors=True)
        self.path = Path(self._folder.name) / database.name
        try:
            for suffix, source in _files(database).items():
                target = self.path.with_name(self.path.name + suffix)
                shutil.copyfile(source, target)
                os.utime(target, (0, 0))  # so that any later write shows
            self.path.chmod(0o444)
        except OSError:
            self.remove()
            raise
        self._times = _times(self.path)

    def is_changed(self) -> bool:
        """True if the server wrote to it, which its owner's rights may allow."""
        try:
            return _times(self.path) != self._times
        except DataError:  # it is gone
            return True

    def remove(self) -> None:
        """Delete it."""
        self._folder.cleanup()


class Originals:
    """Watch over databases that no tool may change."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[object, list[str]]] = {}

    def check(self, database: Path, *, by_hash: bool = False) -> None:
        """Compare a database with its content when it was first checked.

        Args:
            by_hash: Compare hashes even if times and sizes are the same, which a tool can set back.

        Raises:
            DataError: It has changed, or it is gone.
        """
        times = _times(database)
        if database not in self._known:
            self._known[database] = times, _digests(database)
        known, digests = self._known[database]
        if times == known and not by_hash:
            return
        if _digests(database) != digests:
            raise DataError(
                f"the database {database} changed while an MCP server's tools were in use: restore it, and"
                " let the server open {database} alone, which is a private copy"
            )
        self._known[database] = times, digests

    def check_all(self) -> None:
        """Check every known database by its hash.

        Raises:
            DataError: One has changed.
        """
        for database in list(self._known):
            self.check(database, by_hash=True)


def _files(database: Path) -> dict[str, Path]:
    """The file, and what SQLite has not yet written back into it, by the end of its name."""
    log = Path(linked(str(database)) + "-wal")
    return {"": database} | ({"-wal": log} if log.exists() and log.stat().st_size else {})


def _times(database: Path) -> object:
    """Fingerprint of the files without its last field, which tells how old they are."""
    return fingerprint_of(str(database), logs=["-wal"])[:-1]


def _digests(database: Path) -> list[str]:
    try:
        return [sha256(path) for path in _files(database).values()]
    except OSError as error:
        raise DataError(f"cannot read a database that an MCP server's tools were used on: {error}") from error
