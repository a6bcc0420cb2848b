import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.sqlite import open_database


def test_path_with_characters_of_a_uri_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "50% of a?b#c é.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (a)")

    with closing(open_database(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("t",)]


def test_connection_does_not_write(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (a)")

    with (
        closing(open_database(path)) as connection,
        pytest.raises(sqlite3.OperationalError, match="readonly"),
    ):
        connection.execute("INSERT INTO t VALUES (1)")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "No such file"),
        (b"", "an empty file"),
        (b"CREATE TABLE t (a);", "a file that is not a database"),
        (b"SQLite format 3\0" + b"\xff" * 5000, "not a database"),
    ],
)
def test_file_that_is_no_database(tmp_path: Path, content: bytes | None, found: str) -> None:
    path = tmp_path / "bad.sqlite"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(DataError, match=rf"expected a .*SQLite database file.*{found}.*bad\.sqlite"):
        open_database(path)


def test_folder_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected a readable SQLite database file"):
        open_database(tmp_path)
