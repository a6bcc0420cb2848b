import os
from pathlib import Path

import pytest

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.address import Address, parse_address


@pytest.mark.parametrize(
    ("database", "expected"),
    [
        ("/data/x.sqlite", ("sqlite", "/data/x.sqlite")),
        (Path("/data/x.db"), ("sqlite", "/data/x.db")),
        ("/data/../data//x", ("sqlite", "/data/x")),
        ("/data/50%25 a?b#c.sqlite", ("sqlite", "/data/50%25 a?b#c.sqlite")),
        ("sqlite:////data/x.sqlite", ("sqlite", "/data/x.sqlite")),
        ("duckdb:////data/x.duckdb", ("duckdb", "/data/x.duckdb")),
        ("/data/x.duckdb", ("duckdb", "/data/x.duckdb")),
        (Path("/data/x.DDB"), ("duckdb", "/data/x.DDB")),
        ("sqlite:////data/x.duckdb", ("sqlite", "/data/x.duckdb")),
        ("postgresql://u:p@h:5433/shop?x=1", ("postgresql", "postgresql://u:p@h:5433/shop?x=1")),
        ("postgres:///shop", ("postgresql", "postgresql:///shop")),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="absolute paths begin with a slash here")
def test_absolute_addresses(database: Path | str, expected: tuple[str, str]) -> None:
    assert parse_address(database) == Address(*expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("database", "kind"),
    [
        ("x.sqlite", "sqlite"),
        (Path("x.sqlite"), "sqlite"),
        ("sqlite:///x.sqlite", "sqlite"),
        ("duckdb:///x.sqlite", "duckdb"),
    ],
)
def test_relative_paths_are_of_the_folder_of_the_moment(
    database: Path | str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        monkeypatch.chdir(folder)
        assert parse_address(database) == (kind, str(folder / "x.sqlite"))


@pytest.mark.parametrize(
    "database",
    [
        *("", ":memory:", "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite://x.sqlite", "duckdb:///"),
        *("mysql://h/x", "://x", "postgresql+psycopg://h/x", None, 7, b"/data/x.sqlite"),
    ],
)
def test_what_is_no_address(database: str) -> None:
    with pytest.raises(DataError, match=r"(is not a database|of a database): "):
        parse_address(database)


def test_password_is_not_shown() -> None:
    with pytest.raises(DataError) as caught:
        parse_address("postgresq://me:secret@host/shop")

    assert "secret" not in str(caught.value)
