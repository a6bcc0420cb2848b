"""Where a named database lies: a SQLite file, or one built from SQL text into a cache folder."""

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
    """Where things of one kind are kept that can be made again: `databases`, `sft`.

    Under $TEXT2SQL_GRPO_CACHE, or `.cache/text2sql-grpo` in the home folder.
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
            raise DataError(f"expected a folder of databases, got nothing there (at {folder})")
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
        """The file that this database is read from or built of.

        Raises:
            DataError: No database has this name.
        """
        source = self._sources.get(name)
        if source is None:
            names = self.names()
            shown = ", ".join(names[:MAX_NAMES_SHOWN]) or "none"
            more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
            raise DataError(f"expected one of the databases {shown}{more}, got {name!r} (in {self.folder})")
        return source

    def path(self, name: str) -> Path:
        """The SQLite file of this database, built if it is given as SQL text.

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
    """The database that the SQL text makes; safe when several processes build it at once."""
    try:
        content = source.read_bytes()
        script = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"expected SQL text in UTF-8, got {error} (at {source})") from error
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
            f"expected a cache folder that can be written, got {error} (at {folder}; set {CACHE_VARIABLE})"
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
        raise DataError(f"expected SQL that builds a database, got: {error} (at {source})") from error
    if target.stat().st_size == 0:
        raise DataError(f"expected SQL that builds a database, got no CREATE TABLE (at {source})")
