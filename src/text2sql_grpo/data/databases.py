"""Databases by name: files of SQLite and DuckDB, PostgreSQL servers, SQL text and files of rows."""

import hashlib
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import unquote

from text2sql_grpo.data.row_files import ROW_FILES, build_from_rows
from text2sql_grpo.errors import DataError
from text2sql_grpo.files import draft
from text2sql_grpo.phrases import listed
from text2sql_grpo.sql.address import DUCKDB_FILES, Database, holds_password, parse_address
from text2sql_grpo.sql.sqlite_file import linked

CACHE_VARIABLE = "TEXT2SQL_GRPO_CACHE"
MAX_NAMES_SHOWN = 20
SQLITE_FILES = (".sqlite", ".db", ".sqlite3")
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

    In a folder, name `shop` is, in this order, `shop.sqlite`, `shop.db`, `shop.sqlite3`, one in a folder
    `shop` (the layout of Spider and BIRD), `shop.duckdb`, `shop.ddb`, one in a folder `shop`, or `shop.sql`,
    which is built once per content. A folder of CSV, TSV, Parquet, JSON or Excel files alone is one
    database, a table a file, built once per version of the files. Methods refuse a name that no database has.

    Args:
        where: See `WHAT_IS_READ`.

    Raises:
        DataError: Nothing of the kind is there, or a URL holds a password.
    """

    def __init__(self, where: Database | Mapping[str, Database]) -> None:
        self._built: dict[str, Database] = {}
        if isinstance(where, Mapping):
            self.shown = "the mapping of names"
            found = {name: _source(one) for name, one in where.items()}
        else:
            source = _source(where)
            self.shown = str(source)
            if isinstance(source, str):
                path = source.partition("?")[0].partition("://")[2].partition("/")[2]
                found = {unquote(path) or "database": source}
            elif not source.is_dir():
                found = {source.stem: source}
            elif _row_files(source):
                found = {Path(os.path.abspath(source)).name: source}  # of `.` too
            else:
                found = _in_folder(source)
        # Absolute, so that a change of the working folder changes no database.
        self._sources = {
            name: one.absolute() if isinstance(one, Path) else one for name, one in found.items()
        }

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
            known = listed(self.names(), MAX_NAMES_SHOWN) or f"none; give {WHAT_IS_READ}"
            raise DataError(f"unknown database {name!r} (in {self.shown}); known: {known}")
        return source

    def address(self, name: str) -> Database:
        """SQLite file or URL of a database, built first if its source is SQL text or files of rows.

        Raises:
            DataError: It cannot be built.
        """
        if name not in self._built:
            self._built[name] = _built(self.source(name))
        return self._built[name]

    def files(self, name: str) -> list[Path]:
        """Files of a database, with its logs of changes that are not merged yet; none for a server's."""
        address = parse_address(self.address(name))
        if address.engine.is_server:
            return []
        logs = [Path(linked(address.location) + suffix) for suffix in address.engine.logs]
        return [Path(address.location), *(log for log in logs if log.is_file() and log.stat().st_size)]

    def dialect(self, name: str) -> str:
        """Name of a database's SQL in sqlglot; builds nothing."""
        source = self.source(name)
        if isinstance(source, str):
            return parse_address(source).dialect
        return "duckdb" if _kind(source) in ("rows", "duckdb") else "sqlite"

    def sqlite_file(self, name: str, purpose: str) -> Path:
        """File of a SQLite database; `purpose` opens the DataError for one of another kind."""
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
        shown = listed(names, MAX_NAMES_SHOWN) or "none"
        raise DataError(f"one database is needed, got {shown} ({databases.shown}): give {WHAT_IS_READ}")
    return names[0], databases.address(names[0])


def _source(where: Database) -> Database:
    """URL, or path of a file or folder that exists."""
    address, text = parse_address(where), os.fspath(where)
    if "://" not in text:
        path = Path(where)
        if not os.path.exists(path):
            raise DataError(f"no databases: no such file or folder (at {path}): give {WHAT_IS_READ}")
        if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            raise DataError(f"no databases: no right to list the folder (at {path})")
        if not _kind(path):
            raise DataError(f"no databases: it is of another kind (at {path}): give {WHAT_IS_READ}")
        return path
    if not address.engine.is_server:
        path = Path(address.location)
        if not path.is_file():
            raise DataError(f"no such database file (at {path})")
        return path
    if holds_password(text):
        raise DataError(
            "the URL of a database may hold no password, since configs and run folders are shared: put it "
            "into PGPASSWORD or ~/.pgpass"
        )
    return address.location


def _kind(path: Path) -> str:
    """`rows` for a folder or a file of rows, `sql` for SQL text, `sqlite` or `duckdb`; else empty.

    The file's first bytes decide between the last two, else its suffix.
    """
    suffix = path.suffix.lower()
    if path.is_dir():
        return "rows"
    if not os.path.isfile(path):  # reading a FIFO would wait forever
        return ""
    if suffix in ROW_FILES:
        return "rows"
    if suffix == ".sql":
        return "sql"
    with suppress(OSError), path.open("rb") as file:  # the engine reports it
        first = file.read(16)
        if first == b"SQLite format 3\0":
            return "sqlite"
        if first[8:12] == b"DUCK":
            return "duckdb"
    return "sqlite" if suffix in SQLITE_FILES else "duckdb" if suffix in DUCKDB_FILES else ""


def _in_folder(folder: Path) -> dict[str, Database]:
    """Databases of a folder by name; of several with one name, the first of the order in `Databases`."""
    sqlite = [f"{where}*{suffix}" for where in ("", "*/") for suffix in SQLITE_FILES]
    duckdb = [f"{where}*{suffix}" for where in ("", "*/") for suffix in DUCKDB_FILES]
    found: dict[str, Database] = {}
    for pattern in (*sqlite, *duckdb, "*.sql"):
        for path in folder.glob(pattern):
            is_own_folder = path.parent == folder or path.parent.name == path.stem
            if is_own_folder and path.is_file() and not path.name.startswith("."):
                found.setdefault(path.stem, path)
    return found


def _row_files(folder: Path) -> list[Path]:
    """Files of rows, if the folder holds no database; not those that macOS and Excel put next to them."""
    if _in_folder(folder):
        return []
    files = (path for path in folder.iterdir() if not path.name.startswith((".", "~$")))
    return sorted(path for path in files if path.suffix.lower() in ROW_FILES and path.is_file())


def _built(source: Database) -> Database:
    if isinstance(source, str):
        return source
    kind = _kind(source)
    if kind == "rows":
        files = _row_files(source) if source.is_dir() else [source]
        if not files:
            found = ", ".join(sorted(_in_folder(source))) or "none"
            raise DataError(f"one database is needed, and this folder holds {found} (at {source})")
        return f"duckdb:///{build_from_rows(source, files, cache_folder('databases'))}"
    if kind == "sql":
        return _built_of_text(source)
    is_misnamed = kind == "sqlite" and source.suffix.lower() in DUCKDB_FILES
    return f"{kind}:///{source.absolute()}" if kind == "duckdb" or is_misnamed else source


def _built_of_text(source: Path) -> Path:
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
            scratch.touch()  # fails like other files, not as a database
            with closing(sqlite3.connect(scratch)) as connection:
                connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # the text may touch no other file
                connection.execute("PRAGMA synchronous = OFF")
                connection.executescript(script)
                connection.commit()
            if scratch.stat().st_size == 0:
                raise DataError(f"the SQL text builds no database: no CREATE TABLE (at {source})")
    except (OSError, sqlite3.Error, ValueError) as error:  # ValueError: a NUL character
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if isinstance(error, OSError) or code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise DataError(
                f"cannot write the cache folder: {error} (at {folder}; set {CACHE_VARIABLE})"
            ) from error
        raise DataError(
            f"the SQL text builds no database: {error} (at {source}, which SQLite runs; load a dump of"
            " PostgreSQL into a server and give its postgresql:// URL, and tables of others as CSV files)"
        ) from error
    return target
