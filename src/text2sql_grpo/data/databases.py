"""Databases by name: files of SQLite and DuckDB, PostgreSQL servers, SQL text and files of rows."""

import hashlib
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from text2sql_grpo.data.row_files import ROW_FILES, build_from_rows
from text2sql_grpo.errors import DataError
from text2sql_grpo.files import draft
from text2sql_grpo.sql.address import Database, parse_address

CACHE_VARIABLE = "TEXT2SQL_GRPO_CACHE"
MAX_NAMES_SHOWN = 20
SQLITE_FILES = (".sqlite", ".db", ".sqlite3")
DUCKDB_FILES = (".duckdb", ".ddb")
WHAT_IS_READ = (
    "a folder of .sqlite, .db, .duckdb or .sql files; one such file; a folder of .csv, .tsv, .parquet, "
    ".jsonl, .json or .xlsx files, which make one database; a URL such as postgresql://reader@host/sales; "
    "or a mapping of names to these"
)


def cache_folder(kind: str) -> Path:
    """Cache folder of one kind of files, such as `databases` or `sft`.

    It is under $TEXT2SQL_GRPO_CACHE, or `.cache/text2sql-grpo` in the home folder.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    base = Path(chosen) if chosen else Path.home() / ".cache" / "text2sql-grpo"
    return base / kind


class Databases:
    """Databases by name, of one folder, file or URL, or of a mapping of names to them.

    In a folder, name `shop` is, in this order, `shop.sqlite`, `shop.db`, `shop/shop.sqlite` (the layout of
    Spider and BIRD), `shop.duckdb`, or `shop.sql`, which is built once per content. A folder of CSV, TSV,
    Parquet, JSON or Excel files alone is one database, a table a file, built once per version of the files.

    Args:
        where: See `WHAT_IS_READ`.

    Raises:
        DataError: Nothing of the kind is there, or a URL holds a password.
    """

    def __init__(self, where: Database | Mapping[str, Database]) -> None:
        self._sources: dict[str, Database] = {}
        self._built: dict[str, Database] = {}
        if isinstance(where, Mapping):
            self.shown = "the mapping of names"
            for name, one in where.items():
                self._sources[name] = _source(one)
            return
        source = _source(where)
        self.shown = str(source)
        if isinstance(source, str):
            self._sources[Path(urlsplit(source).path).stem or "database"] = source
        elif source.is_dir() and not _row_files(source):
            self._sources |= _in_folder(source)
        else:
            self._sources[source.stem] = source

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._sources)

    def source(self, name: str) -> Database:
        """File, folder or URL that a database is read from or built of.

        Raises:
            DataError: No database has this name.
        """
        source = self._sources.get(name)
        if source is None:
            names = self.names()
            shown = ", ".join(names[:MAX_NAMES_SHOWN]) or f"none; give {WHAT_IS_READ}"
            more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
            raise DataError(f"unknown database {name!r} (in {self.shown}); known: {shown}{more}")
        return source

    def address(self, name: str) -> Database:
        """SQLite file or URL of a database, built first if its source is SQL text or files of rows.

        Raises:
            DataError: No database has this name, or it cannot be built.
        """
        source = self.source(name)
        if isinstance(source, str) or _is_sqlite(source):
            return source
        if name not in self._built:
            self._built[name] = _built(source)
        return self._built[name]

    def dialect(self, name: str) -> str:
        """Name of a database's SQL in sqlglot; builds nothing.

        Raises:
            DataError: No database has this name.
        """
        source = self.source(name)
        if isinstance(source, str):
            return parse_address(source).dialect
        return "sqlite" if _is_sqlite(source) or source.suffix == ".sql" else "duckdb"

    def sqlite_file(self, name: str, purpose: str) -> Path:
        """File of a SQLite database.

        Args:
            purpose: User of the file, the first words of the error.

        Raises:
            DataError: No database has this name, or it is of another kind.
        """
        address = self.address(name)
        if isinstance(address, str):
            raise DataError(f"{purpose} reads SQLite databases only, and {name!r} is another: {address}")
        return address


def open_address(where: Database) -> tuple[str, Database]:
    """Name and address of the only database of a file, folder or URL.

    Raises:
        DataError: There is none, or several.
    """
    databases = Databases(where)
    names = databases.names()
    if len(names) != 1:
        shown = ", ".join(names[:MAX_NAMES_SHOWN]) or "none"
        raise DataError(f"one database is needed, got {shown} ({databases.shown}): give {WHAT_IS_READ}")
    return names[0], databases.address(names[0])


def _source(where: Database) -> Database:
    """URL, or path of a file or folder that exists."""
    text = os.fspath(where)
    if "://" not in text:
        path = Path(where)
        known = (*DUCKDB_FILES, *ROW_FILES, ".sql")
        if not path.is_dir() and path.suffix.lower() not in known and not _is_sqlite(path):
            found = "it is of another kind" if path.exists() else "no such file or folder"
            raise DataError(f"no databases: {found} (at {path}): give {WHAT_IS_READ}")
        if not path.exists():
            raise DataError(f"no databases: no such file or folder (at {path})")
        return path
    address = parse_address(text)
    if address.kind != "postgresql":
        path = Path(address.location)
        if not path.is_file():
            raise DataError(f"no such database file (at {path})")
        return path if address.kind == "sqlite" else f"duckdb:///{address.location}"
    if ":" in text.partition("://")[2].rpartition("@")[0] or "password=" in text:
        raise DataError(
            "the URL of a database may hold no password, since configs and run folders are shared: put it "
            "into PGPASSWORD or ~/.pgpass"
        )
    return address.location


def _is_sqlite(path: Path) -> bool:
    """True by its suffix, or by its first bytes."""
    if path.suffix.lower() in SQLITE_FILES:
        return True
    if not path.is_file() or path.suffix.lower() in (*ROW_FILES, ".sql"):
        return False
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"


def _in_folder(folder: Path) -> dict[str, Database]:
    found: dict[str, Database] = {}
    for pattern in ("*.sqlite", "*.db", "*/*.sqlite", "*.duckdb", "*.ddb", "*.sql"):
        for path in folder.glob(pattern):
            is_own_folder = path.parent == folder or path.parent.name == path.stem
            if is_own_folder and path.is_file() and not path.name.startswith("."):
                found.setdefault(path.stem, path)
    return found


def _row_files(folder: Path) -> list[Path]:
    """Files of rows, if the folder holds no database."""
    if _in_folder(folder):
        return []
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in ROW_FILES)


def _built(source: Path) -> Database:
    if source.suffix in DUCKDB_FILES:
        return f"duckdb:///{source.absolute()}"
    if source.suffix == ".sql":
        return _build(source)
    files = _row_files(source) if source.is_dir() else [source]
    return f"duckdb:///{build_from_rows(source, files, cache_folder('databases'))}"


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
