"""Databases by name: SQLite files, or ones built from SQL text into a cache folder."""

import hashlib
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from text2sql_grpo.errors import DataError
from text2sql_grpo.files import draft

CACHE_VARIABLE = "TEXT2SQL_GRPO_CACHE"
MAX_NAMES_SHOWN = 20


def cache_folder(kind: str) -> Path:
    """Cache folder of one kind of files, such as `databases` or `sft`.

    It is under $TEXT2SQL_GRPO_CACHE, or `.cache/text2sql-grpo` in the home folder.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    base = Path(chosen) if chosen else Path.home() / ".cache" / "text2sql-grpo"
    return base / kind


class Databases:
    """The databases of one folder, by name.

    Name `shop` is, in this order, `shop.sqlite`, `shop.db`, `shop/shop.sqlite` (the layout of Spider
    and BIRD), or `shop.sql`, which is built once per content.

    Raises:
        DataError: The folder is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise DataError(f"no folder of databases (at {folder})")
        self._sources: dict[str, Path] = {}
        for pattern in ("*.sqlite", "*.db", "*/*.sqlite", "*.sql"):
            for path in folder.glob(pattern):
                is_own_folder = path.parent == folder or path.parent.name == path.stem
                if is_own_folder and path.is_file() and not path.name.startswith("."):
                    self._sources.setdefault(path.stem, path)
        self._built: dict[str, Path] = {}

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._sources)

    def source(self, name: str) -> Path:
        """File that a database is read from or built of.

        Raises:
            DataError: No database has this name.
        """
        source = self._sources.get(name)
        if source is None:
            names = self.names()
            shown = ", ".join(names[:MAX_NAMES_SHOWN]) or "none"
            more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
            raise DataError(f"unknown database {name!r} (in {self.folder}); known: {shown}{more}")
        return source

    def path(self, name: str) -> Path:
        """SQLite file of a database, built first if its source is SQL text.

        Raises:
            DataError: No database has this name, or its SQL text is broken.
        """
        source = self.source(name)
        if source.suffix != ".sql":
            return source
        if name not in self._built:
            self._built[name] = _build(source)
        return self._built[name]


def _build(source: Path) -> Path:
    """Build a database from SQL text; safe if several processes do so at once."""
    try:
        content = source.read_bytes()
        script = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the SQL text as UTF-8: {error} (at {source})") from error
    folder = cache_folder("databases")
    target = folder / f"{source.stem}-{hashlib.sha256(content).hexdigest()[:16]}.sqlite"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with draft(target) as scratch:
            scratch.touch()
            _run_script(script, scratch, source)
    except OSError as error:
        raise DataError(
            f"cannot write the cache folder: {error} (at {folder}; set {CACHE_VARIABLE})"
        ) from error
    return target


def _run_script(script: str, target: Path, source: Path) -> None:
    try:
        with closing(sqlite3.connect(target)) as connection:
            connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # the text may touch no other file
            connection.execute("PRAGMA synchronous = OFF")
            connection.executescript(script)
            connection.commit()
    except (sqlite3.Error, ValueError) as error:  # ValueError: a NUL character
        raise DataError(f"the SQL text builds no database: {error} (at {source})") from error
    if target.stat().st_size == 0:
        raise DataError(f"the SQL text builds no database: no CREATE TABLE (at {source})")
