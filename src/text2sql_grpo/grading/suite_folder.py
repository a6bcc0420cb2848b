"""Folder of test suites: one subfolder per database content and gold query, shared by processes and runs."""

import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from text2sql_grpo.errors import DataError
from text2sql_grpo.files import sha256
from text2sql_grpo.grading.base_sample import DatabaseSample
from text2sql_grpo.grading.materialise import Content, materialise
from text2sql_grpo.sql.address import Database
from text2sql_grpo.sql.sqlite_file import Fingerprint, fingerprint_of

FORMAT = 5  # to be raised when other databases are drawn for the same gold query
UNUSED_DAYS = 60  # after which an entry is deleted


@dataclass(frozen=True)
class Suite:
    """Test databases of one gold query.

    Attributes:
        databases: SQLite files, or URLs.
        gap: Why they are fewer than asked for, or let a hard-coded answer pass; empty if neither.
    """

    databases: tuple[Database, ...] = ()
    gap: str = ""


def entry_of(parent: Path, database: Path, gold_sql: str, size: int) -> Path:
    """Folder of the test databases of a gold query, named by all that decides about them.

    These are the content of the database, the gold query, the number asked for, `FORMAT`, and the versions of
    sqlglot and SQLite. Failures are not kept: another version may not fail.

    Raises:
        DataError: The database cannot be read.
    """
    content = _content_hash(database, fingerprint_of(str(database)))
    parts = (content, gold_sql, str(size), str(FORMAT), version("sqlglot"), sqlite3.sqlite_version)
    return parent / hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def read_entry(folder: Path) -> Suite | None:
    """Test databases in a folder; None if there is none.

    Raises:
        DataError: It cannot be read.
    """
    try:
        gap = json.loads((folder / "record.json").read_text(encoding="utf-8"))["gap"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read a test suite: {error}; delete it (at {folder})") from error
    with suppress(OSError):  # another user's
        os.utime(folder)
    return Suite(tuple(sorted(folder.glob("*.sqlite"))), gap)


def write_entry(
    folder: Path, base: DatabaseSample, contents: Sequence[Content], record: dict[str, object]
) -> None:
    """Write test databases into a new folder atomically; that of another process stays.

    Raises:
        DataError: It cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        prune_once(folder.parent)
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".partial-"))
    except OSError as error:
        raise DataError(f"cannot write the cache folder: {error} (at {folder})") from error
    try:
        for index, content in enumerate(contents):
            materialise(base, content, partial / f"{index}.sqlite").close()
        (partial / "record.json").write_text(json.dumps(record), encoding="utf-8")
        partial.chmod(0o755)
        os.rename(partial, folder)
    except (OSError, sqlite3.Error) as error:
        if not folder.is_dir():
            raise DataError(f"cannot write a test database: {error} (at {folder})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def prune(folder: Path, *, unused_days: float = UNUSED_DAYS) -> None:
    """Delete the entries that no process used for some days."""
    oldest = time.time() - unused_days * 86_400
    for entry in os.scandir(folder):
        with suppress(OSError):  # deleted by another process meanwhile
            if entry.stat().st_mtime < oldest:
                shutil.rmtree(entry.path) if entry.is_dir() else os.unlink(entry.path)


prune_once = lru_cache(maxsize=64)(prune)  # per process and folder


@lru_cache(maxsize=1_024)
def _content_hash(database: Path, fingerprint: Fingerprint) -> str:
    """Hash of the file and its log; the fingerprint is the key of the cache."""
    found = (path for path in (database, Path(f"{database}-wal")) if path.exists())
    return "".join(map(sha256, found))
