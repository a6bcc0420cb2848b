"""Database addresses: a path to a SQLite file, or a URL."""

import os
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import unquote

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.engines import ENGINES, Engine

Kind = Literal["sqlite", "duckdb", "postgresql"]
Database = Path | str  # a SQLite file, or a URL; see `parse_address`

_FORMS = "a path, sqlite:///path, duckdb:///path or postgresql://user@host/name"
_FILE_KINDS: dict[str, Kind] = {"sqlite": "sqlite", "duckdb": "duckdb"}
DUCKDB_FILES = (".duckdb", ".ddb")


class Address(NamedTuple):
    """One database.

    Attributes:
        kind: Its engine.
        location: Absolute path of the file; for PostgreSQL the whole URL.
    """

    kind: Kind
    location: str

    @property
    def engine(self) -> Engine:
        """Properties of its kind of database."""
        return ENGINES[self.kind]

    @property
    def dialect(self) -> str:
        """Name of its SQL in sqlglot."""
        return self.engine.dialect


def parse_address(database: Path | str) -> Address:
    """Address of a path or a URL; the database need not exist.

    As in SQLAlchemy, three slashes begin a relative path and four an absolute one. Nothing in a path is
    decoded. A path without a scheme is a DuckDB file if it ends in .duckdb or .ddb, else a SQLite file.

    Raises:
        DataError: Neither a path nor a URL of a known kind.

    >>> parse_address("duckdb:////data/shop.duckdb")
    Address(kind='duckdb', location='/data/shop.duckdb')
    """
    if not isinstance(database, str | os.PathLike) or not isinstance(text := os.fspath(database), str):
        raise DataError(f"{database!r} is not a database: use {_FORMS}")
    if text.startswith("/"):
        return _absolute(text)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return _absolute(_file(text, text))
    if scheme in _FILE_KINDS:
        if not rest.startswith("/"):
            raise DataError(f"{text!r} is not a database: use {scheme}:///path with three slashes")
        return Address(_FILE_KINDS[scheme], _file(rest[1:], text))
    if scheme in ("postgresql", "postgres"):
        return Address("postgresql", f"postgresql://{rest}")
    # The rest of the URL may hold a password.
    raise DataError(f"unknown URL scheme {scheme!r} of a database: use {_FORMS}")


def holds_password(url: str) -> bool:
    """True if a URL names a password, before the host or as a parameter.

    >>> holds_password("postgresql://me:pw@host/d"), holds_password("postgresql://me@host:5432/d")
    (True, False)
    """
    plain = unquote(url)
    return ":" in plain.partition("://")[2].rpartition("@")[0] or "password=" in plain


@lru_cache(maxsize=4096)
def _absolute(path: str) -> Address:
    return Address("duckdb" if path.lower().endswith(DUCKDB_FILES) else "sqlite", os.path.abspath(path))


def _file(path: str, text: str) -> str:
    if not path or path.startswith(":"):
        raise DataError(f"{text!r} is not a database: it names no file")
    return os.path.abspath(path)
