import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from text2sql_grpo.data.databases import Databases, cache_folder
from text2sql_grpo.errors import DataError

SCRIPT = "CREATE TABLE t (a TEXT);\nINSERT INTO t VALUES ('é;x');\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TEXT2SQL_GRPO_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "databases"
    folder.mkdir()
    return folder


def build(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCRIPT)
    return path


def rows(path: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT * FROM t").fetchall()


def test_files_are_found_in_every_layout(folder: Path) -> None:
    plain = build(folder / "plain.sqlite")
    short = build(folder / "short.db")
    spider = build(folder / "spider" / "spider.sqlite")
    build(folder / "spider" / "copy_of_something.sqlite")
    build(folder / "._plain.sqlite")
    (folder / "text.sql").write_text(SCRIPT, "utf-8")
    (folder / "notes.txt").write_text("no database")
    databases = Databases(folder)

    assert databases.names() == ["plain", "short", "spider", "text"]
    assert [databases.path(name) for name in ("plain", "short", "spider")] == [plain, short, spider]
    assert databases.path("text").parent == cache_folder("databases")


def test_sqlite_file_goes_before_text(folder: Path) -> None:
    built = build(folder / "shop.sqlite")
    (folder / "shop.sql").write_text("broken")

    assert Databases(folder).path("shop") == built


def test_sql_text_is_built_once_per_content(folder: Path) -> None:
    source = folder / "shop.sql"
    source.write_text(SCRIPT, "utf-8")
    first = Databases(folder).path("shop")
    made_at = first.stat().st_mtime_ns

    again = Databases(folder).path("shop")
    source.write_text(SCRIPT + "INSERT INTO t VALUES ('new');", "utf-8")
    changed = Databases(folder).path("shop")

    assert (again, again.stat().st_mtime_ns) == (first, made_at)
    assert rows(first) == [("é;x",)]
    assert rows(changed) == [("é;x",), ("new",)]
    assert sorted(cache_folder("databases").iterdir()) == sorted([first, changed])


def test_two_processes_build_the_same_database(folder: Path) -> None:
    inserts = "".join(f"INSERT INTO t VALUES ('{number}');\n" for number in range(2000))
    (folder / "shop.sql").write_text(f"{SCRIPT}{inserts}", "utf-8")
    code = (
        "import sys; from pathlib import Path; from text2sql_grpo.data.databases import Databases;"
        "print(Databases(Path(sys.argv[1])).path('shop'))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]

    paths = {process.communicate(timeout=60)[0].strip() for process in processes}

    assert len(paths) == 1
    assert len(rows(Path(paths.pop()))) == 2001
    assert len(list(cache_folder("databases").iterdir())) == 1


def test_unknown_name_lists_what_is_there(folder: Path) -> None:
    build(folder / "clinic.sqlite")
    build(folder / "shop.sqlite")

    with pytest.raises(DataError, match=r"unknown database '\.\./x' \(in .*"):
        Databases(folder).path("../x")


def test_long_list_of_names_is_cut(folder: Path) -> None:
    for number in range(25):
        (folder / f"d{number:02}.sql").write_text(SCRIPT, "utf-8")

    with pytest.raises(DataError, match=r"unknown database 'x' .*known: d00, .*d19 and 5 more"):
        Databases(folder).path("x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("CREATE TABLE t (a); INSERT INTO u VALUES (1);", "no such table: u"),
        ("CREATE TABLE t (a", "incomplete input"),
        ("-- nothing", "no CREATE TABLE"),
        ("", "no CREATE TABLE"),
        ("CREATE TABLE t (a);\0", "null"),
        ("ATTACH 'other.sqlite' AS other;", "too many attached databases"),
    ],
)
def test_broken_sql_text(folder: Path, text: str, message: str) -> None:
    (folder / "shop.sql").write_text(text)

    with pytest.raises(DataError, match=rf"the SQL text builds no database: .*{message}.*shop\.sql"):
        Databases(folder).path("shop")

    assert list(cache_folder("databases").iterdir()) == []


def test_text_that_is_not_utf8(folder: Path) -> None:
    (folder / "shop.sql").write_bytes(b"-- \xff")

    with pytest.raises(DataError, match=r"UTF-8.*shop\.sql"):
        Databases(folder).path("shop")


def test_cache_folder_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "shop.sql").write_text(SCRIPT, "utf-8")
    monkeypatch.setenv("TEXT2SQL_GRPO_CACHE", str(folder / "shop.sql"))

    with pytest.raises(DataError, match=r"cannot write the cache folder.*TEXT2SQL_GRPO_CACHE"):
        Databases(folder).path("shop")


def test_cache_lies_under_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEXT2SQL_GRPO_CACHE", raising=False)

    assert cache_folder("databases") == Path.home() / ".cache" / "text2sql-grpo" / "databases"


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no folder of databases.*nowhere"):
        Databases(tmp_path / "nowhere")
