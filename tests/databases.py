"""Real databases of a test's own, and a small shop with every constraint that test databases must keep."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

SHOP = """
CREATE TABLE city (id INTEGER PRIMARY KEY, name TEXT NOT NULL, country TEXT, UNIQUE (name));
CREATE TABLE person (
    code VARCHAR(8) PRIMARY KEY, name TEXT NOT NULL, age INTEGER CHECK (age BETWEEN 0 AND 120),
    city INTEGER REFERENCES city (id), joined DATE, note TEXT, rating REAL
);
CREATE TABLE friend (a VARCHAR(8), b VARCHAR(8), PRIMARY KEY (a, b),
    FOREIGN KEY (a) REFERENCES person (code), FOREIGN KEY (b) REFERENCES person (code)) WITHOUT ROWID;
CREATE TABLE visit (n INTEGER PRIMARY KEY, person VARCHAR(8) NOT NULL, paid INTEGER, kind TEXT COLLATE NOCASE,
    doubled INTEGER GENERATED ALWAYS AS (paid * 2));
CREATE TABLE empty (id INTEGER PRIMARY KEY, label TEXT);
CREATE VIEW adult AS SELECT * FROM person WHERE age >= 18;
"""


def sqlite_file(path: Path, script: str, rows: dict[str, Iterable[tuple[object, ...]]] | None = None) -> Path:
    """Run a script in a SQLite file, new or not, and insert rows by table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.executescript(script)
        for table, values in (rows or {}).items():
            values = list(values)
            connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values[0]))})", values)
    return path


def duckdb_file(path: Path, script: str) -> str:
    """Run a script in a DuckDB file, new or not; its URL."""
    import duckdb

    with duckdb.connect(str(path)) as connection:
        connection.execute(script)
    return f"duckdb:///{path}"


def sqlite_rows(path: Path, sql: str) -> list[tuple[object, ...]]:
    """Rows of one query, read without the package."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def make_shop(path: Path) -> Path:
    """Write the shop; `visit.person` refers to people without saying so."""
    notes = [None if n % 5 == 0 else f"note {n % 3}" for n in range(14)]
    people = [
        (f"p{n:02}", f"Name {n % 9}", 15 + 3 * n, 1 + n % 4, f"20{10 + n}-03-0{1 + n % 9}", notes[n], n / 4)
        for n in range(14)
    ]
    visits = [(n, f"p{n % 11:02}", 10 * n % 70, ("day", "Night")[n % 2]) for n in range(1, 31)]
    rows = {
        "city": [(1, "Rome", "Italy"), (2, "Oslo", "Norway"), (3, "Bari", "Italy"), (4, "Lima", "Peru")],
        "person": people,
        "friend": [(f"p{n:02}", f"p{(n * 3 + 1) % 14:02}") for n in range(14)],
        "visit": visits,
    }
    return sqlite_file(path, SHOP, rows)
