import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import duckdb
import pandas  # type: ignore[import-untyped]
import pytest

from tests.file_limits import file_size_limit
from text2sql_grpo.data.databases import Databases, cache_folder, open_address
from text2sql_grpo.errors import DataError
from text2sql_grpo.sql import SQLExecutor

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
    assert [databases.address(name) for name in ("plain", "short", "spider")] == [plain, short, spider]
    assert databases.address("text").parent == cache_folder("databases")


def test_every_suffix_is_found_in_a_folder_of_its_name_too(tmp_path: Path) -> None:
    for kind in ("sqlite", "sqlite3", "db", "duckdb", "ddb"):
        for path in (tmp_path / f"a{kind}.{kind}", tmp_path / f"b{kind}" / f"b{kind}.{kind}"):
            path.parent.mkdir(exist_ok=True)
            if kind in ("duckdb", "ddb"):
                duckdb.connect(str(path)).close()
            else:
                with closing(sqlite3.connect(path)) as connection:
                    connection.execute("CREATE TABLE t (n)")
    kinds = ("db", "ddb", "duckdb", "sqlite", "sqlite3")

    assert Databases(tmp_path).names() == [f"a{kind}" for kind in kinds] + [f"b{kind}" for kind in kinds]


def test_sqlite_file_goes_before_text(folder: Path) -> None:
    built = build(folder / "shop.sqlite")
    (folder / "shop.sql").write_text("broken")

    assert Databases(folder).address("shop") == built


def test_sql_text_is_built_once_per_content(folder: Path) -> None:
    source = folder / "shop.sql"
    source.write_text(SCRIPT, "utf-8")
    first = Databases(folder).address("shop")
    made_at = first.stat().st_mtime_ns

    again = Databases(folder).address("shop")
    source.write_text(SCRIPT + "INSERT INTO t VALUES ('new');", "utf-8")
    changed = Databases(folder).address("shop")

    assert (again, again.stat().st_mtime_ns) == (first, made_at)
    assert rows(first) == [("é;x",)]
    assert rows(changed) == [("é;x",), ("new",)]
    assert sorted(cache_folder("databases").iterdir()) == sorted([first, changed])


def test_rows_are_read_again_when_only_their_content_changed(folder: Path) -> None:
    file = folder / "rows" / "t.csv"
    file.parent.mkdir()
    for price in (11, 55):
        file.write_text(f"name,price\naa,{price}\n")
        os.utime(file, (1, 1))
        built = Databases(file.parent).address("rows")
        with closing(duckdb.connect(str(built).removeprefix("duckdb://"), read_only=True)) as connection:
            assert connection.execute("SELECT price FROM t").fetchall() == [(price,)]


@pytest.mark.thorough
def test_two_processes_build_the_same_database(folder: Path) -> None:
    inserts = "".join(f"INSERT INTO t VALUES ('{number}');\n" for number in range(2000))
    (folder / "shop.sql").write_text(f"{SCRIPT}{inserts}", "utf-8")
    code = (
        "import sys; from pathlib import Path; from text2sql_grpo.data.databases import Databases;"
        "print(Databases(Path(sys.argv[1])).address('shop'))"
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
        Databases(folder).address("../x")


def test_folder_of_folders_of_rows_names_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "item.csv").write_text("id,name\n1,Lamp\n", "utf-8")

    with pytest.raises(DataError, match=r"unknown database 'shop' .*known: none; give .*mapping of names"):
        Databases(tmp_path).address("shop")


def test_long_list_of_names_is_cut(folder: Path) -> None:
    for number in range(25):
        (folder / f"d{number:02}.sql").write_text(SCRIPT, "utf-8")

    with pytest.raises(DataError, match=r"unknown database 'x' .*known: d00, .*d19 and 5 more"):
        Databases(folder).address("x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("CREATE TABLE t (a); INSERT INTO u VALUES (1);", "no such table: u"),
        ("CREATE TABLE t (a", "incomplete input"),
        ("-- nothing", "no CREATE TABLE"),
        ("", "no CREATE TABLE"),
        ("CREATE TABLE t (a);\0", "null"),
        ("ATTACH 'other.sqlite' AS other;", "too many attached databases"),
        ("-- PostgreSQL database dump\nSET statement_timeout = 0;", "SET.*a dump of PostgreSQL"),
    ],
)
def test_broken_sql_text(folder: Path, text: str, message: str) -> None:
    (folder / "shop.sql").write_text(text)

    with pytest.raises(DataError, match=rf"the SQL text builds no database: .*{message}") as caught:
        Databases(folder).address("shop")

    assert "shop.sql" in str(caught.value)
    assert list(cache_folder("databases").iterdir()) == []


def test_text_that_is_not_utf8(folder: Path) -> None:
    (folder / "shop.sql").write_bytes(b"-- \xff")

    with pytest.raises(DataError, match=r"UTF-8.*shop\.sql"):
        Databases(folder).address("shop")


def test_cache_folder_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "shop.sql").write_text(SCRIPT, "utf-8")
    monkeypatch.setenv("TEXT2SQL_GRPO_CACHE", str(folder / "shop.sql"))

    with pytest.raises(DataError, match=r"cannot write the cache folder.*TEXT2SQL_GRPO_CACHE"):
        Databases(folder).address("shop")


def test_a_full_disk_under_the_cache_folder_is_not_blamed_on_the_text(folder: Path) -> None:
    (folder / "shop.sql").write_text("CREATE TABLE t (a);" + "INSERT INTO t VALUES (zeroblob(9000));" * 9)

    with file_size_limit(50_000), pytest.raises(DataError, match=r"cannot write the cache folder.*_CACHE"):
        Databases(folder).address("shop")


def test_cache_lies_under_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEXT2SQL_GRPO_CACHE", raising=False)

    assert cache_folder("databases") == Path.home() / ".cache" / "text2sql-grpo" / "databases"


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file or folder.*nowhere"):
        Databases(tmp_path / "nowhere")


def rows_of(databases: Databases, name: str, sql: str) -> list[tuple[Any, ...]]:
    with SQLExecutor() as executor:
        outcome = executor.execute(databases.address(name), sql)
    assert outcome.is_ok, outcome.error
    return list(outcome.rows)


def test_a_folder_of_rows_is_one_database(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "sale.csv").write_text("id,day,price\n1,2024-05-01,2.5\n2,2024-05-02,\n")
    (folder / "staff list.tsv").write_text("name\tage\nAnn\t41\n")
    (folder / "branch.jsonl").write_text('{"code": "LIS", "tags": ["a", "b"]}\n')
    duckdb.sql("SELECT 7 AS n").write_parquet(str(folder / "number.parquet"))
    sheet = pandas.DataFrame(
        {"town": ["Lisbon", "Porto"], "opened": [date(2021, 3, 1), None], "size": [3, 4.5]}
    )
    sheet.to_excel(folder / "office.xlsx", index=False)
    for name in ("._sale.csv", "~$office.xlsx"):  # of macOS, and of Excel while it shows the file
        (folder / name).write_bytes(b"\0\5\x16\7")
    caplog.set_level("INFO")

    databases = Databases(folder)

    assert databases.names() == ["shop"]
    assert len(rows_of(databases, "shop", "SHOW TABLES")) == 5
    assert rows_of(databases, "shop", "SELECT sum(price), max(day) FROM sale") == [(2.5, "2024-05-02")]
    assert rows_of(databases, "shop", 'SELECT age, code, n FROM "staff list", branch, number') == [
        (41, "LIS", 7)
    ]
    assert rows_of(databases, "shop", "SELECT max(town), sum(size), year(max(opened)) FROM office") == [
        ("Porto", 7.5, 2021)
    ]
    assert "table sale (id BIGINT, day DATE, price DOUBLE)" in caplog.text
    built = databases.address("shop")
    assert Databases(folder).address("shop") == built
    (folder / "number.parquet").unlink()
    assert Databases(folder).address("shop") != built


def test_cells_of_an_excel_file_are_read_as_those_of_csv(tmp_path: Path) -> None:
    sheet = pandas.DataFrame(
        {
            "region": ["NA", "None", "a;b"],
            "boss": [None, 1, 2],
            "plz": ["00123", "01234", "99000"],
            "price": ["$1,200.50", "N/A", "$7.25"],
            "is open": [True, None, False],
        },
        dtype=object,
    )
    sheet.to_excel(tmp_path / "shop.xlsx", index=False)
    databases = Databases(tmp_path / "shop.xlsx")
    assert rows_of(databases, "shop", "FROM shop") == [
        ("NA", None, "00123", 1200.5, 1),
        ("None", 1, "01234", None, None),
        ("a;b", 2, "99000", 7.25, 0),
    ]
    assert rows_of(databases, "shop", "SELECT typeof(boss) FROM shop LIMIT 1") == [("BIGINT",)]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.csv": "x\n1\n", "A.tsv": "x\n1\n"}, r"two files make one table '\w': \S+ and \S+ \(at .*rows\)"),
        ({"a.jsonl": '{"x": 1}\n{"x": \n'}, r"cannot read the rows: .*a\.jsonl\)"),
        ({"a.parquet": "no parquet"}, r"cannot read the rows: .*a\.parquet\)"),
        ({"a.csv": ""}, r"cannot read the rows: .*a\.csv\)"),
        (
            {"a.csv": 'x,y\n1,2\n"3,4\n5,6,7\n'},
            r"line 4 ends a row with 1 fields, the first line has 2 names",
        ),
        (
            {"a.csv": "x,y\n1,2\n3,4,5\n"},
            r"line 3 ends a row with 3 fields, the first line has 2 names .*csv",
        ),
        (
            {"a.tsv": "Sales of May\n\nx\ty\n1\t2\n"},
            r"line 3 ends a row with 2 fields, the first line has 1 names",
        ),
        ({"a.csv": "id,name\n1,Jos\udc81\n"}, r"line 2 is not UTF-8 text; save the file .*a\.csv\)"),
        (  # Windows-1251: Moscow
            {"a.csv": "id,name\n1,\udccc\udcee\udcf1\udcea\udce2\udce0\n"},
            r"line 2 is not UTF-8 text; save the file .*a\.csv\)",
        ),
        ({"a.csv": "Name,Alias;Town\na,b;c\n"}, r"',' and ';' both fit: .* such as sep=; .*a\.csv\)"),
        ({"a.csv": "\n\n"}, r"the first line holds no names .*a\.csv\)"),
        ({"a.csv": "1,0.25\n2,0.5\n"}, r"the first line holds no names .*a\.csv\)"),
        ({"a.csv": "\ufeff1,0.25\n2,0.5\n"}, r"the first line holds no names .*a\.csv\)"),
        ({"a.xlsx": "no archive"}, r"cannot read the sheet: .*a\.xlsx\)"),
    ],
)
def test_rows_that_cannot_be_read(
    tmp_path: Path, files: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEXT2SQL_GRPO_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "rows"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=message) as failure:
        Databases(folder).address("rows")
    assert "\n" not in str(failure.value) and "LINE 1" not in str(failure.value)
    assert not list(cache_folder("databases").glob("rows*"))


@pytest.mark.parametrize("encoding", ["windows-1252", "utf-16", "utf-8-sig"])
def test_rows_of_a_spreadsheet_in_its_own_encoding(
    tmp_path: Path, encoding: str, executor: SQLExecutor, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv("TEXT2SQL_GRPO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows").mkdir()
    text = "id,name\r\n1,José Núñez\r\n2,“Anna”\r\n3,Ann\r\n"
    (tmp_path / "rows" / "a.csv").write_bytes(text.encode(encoding))
    with caplog.at_level("WARNING"):
        address = Databases(tmp_path / "rows").address("rows")
    outcome = executor.execute(address, "SELECT * FROM a ORDER BY id")
    assert list(outcome.rows) == [(1, "José Núñez"), (2, "“Anna”"), (3, "Ann")]
    logged = "" if encoding == "utf-8-sig" else f"a.csv: is not UTF-8: read as {encoding}, such as"
    assert logged in caplog.text and bool(caplog.text) == bool(logged)
    assert [path.suffix for path in cache_folder("databases").iterdir()] == [".duckdb"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "sep=;\r\nid;price, net\r\n1;2,5\r\n"),
        ("a.csv", "\ufeffSEP=|\nid|price, net\n1|2,5\n"),
        ("a.tsv", "sep=;\nid;price, net\n1;2,5\n"),
    ],
)
def test_rows_below_the_line_in_which_excel_declares_the_delimiter(
    tmp_path: Path, name: str, text: str, executor: SQLExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEXT2SQL_GRPO_CACHE", str(tmp_path / "cache"))
    file = tmp_path / name
    file.write_text(text, "utf-8", newline="")
    outcome = executor.execute(Databases(file).address("a"), 'SELECT id, "price, net" FROM a')
    assert list(outcome.rows) == [(1, 2.5)]
    file.write_text(f"{text}2\n", "utf-8", newline="")
    with pytest.raises(DataError, match="line 4 ends a row with 1 fields"):
        Databases(file).address("a")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("Amount, EUR;Date\n1,5;2024-01-02\n", ["Amount, EUR", "Date"]),
        ("Name, first;Street, No;Town\nLee, Ann;High, 5;Bonn\n", ["Name, first", "Street, No", "Town"]),
        ('"Amount, EUR";"Date"\n1;2024-01-02\n', ["Amount, EUR", "Date"]),
        ('"a, b";"c";"d, e, f"\n1;2;3\n', ["a, b", "c", "d, e, f"]),
        ("id, name, price;net\n1, a, 2\n", ["id", "name", "price;net"]),
        ('id,"note; long"\n1,"a\nb;c"\n2,d\n', ["id", "note; long"]),
        ("id|name,alias,town\n1|a\n2|b\n", ["id", "name,alias,town"]),
    ],
)
def test_the_delimiter_is_the_one_that_splits_all_rows_evenly(
    tmp_path: Path, text: str, names: list[str], executor: SQLExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEXT2SQL_GRPO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.csv").write_text(text, "utf-8")
    outcome = executor.execute(Databases(tmp_path / "a.csv").address("a"), "SELECT * FROM a")
    assert list(outcome.columns or ()) == names


def test_files_urls_and_mappings(tmp_path: Path) -> None:
    with closing(duckdb.connect(str(tmp_path / "wards.duckdb"))) as connection:
        connection.execute("CREATE TABLE ward AS SELECT 3 AS id")
    with closing(sqlite3.connect(tmp_path / "plain")) as file:
        file.execute("CREATE TABLE t (a)")
        file.commit()
    (tmp_path / "shop.sql").write_text("CREATE TABLE shop (a);")
    address = f"duckdb:///{tmp_path / 'wards.duckdb'}"
    assert Databases(tmp_path).names() == ["shop", "wards"]
    assert Databases(tmp_path / "wards.duckdb").address("wards") == address
    assert Databases(address).address("wards") == address
    assert Databases(tmp_path / "plain").address("plain") == tmp_path / "plain"
    named = Databases(
        {"one": address, "two": str(tmp_path / "plain"), "three": "postgresql://reader@host/sales"}
    )
    assert named.names() == ["one", "three", "two"]
    assert named.address("one") == address and named.address("three") == "postgresql://reader@host/sales"
    assert rows_of(named, "one", "SELECT id FROM ward") == [(3,)]
    assert Databases("postgresql://reader@host/sales").names() == ["sales"]
    assert open_address(str(tmp_path / "plain")) == ("plain", tmp_path / "plain")
    with pytest.raises(DataError, match=r"data make reads SQLite databases only, and 'one' is another"):
        named.sqlite_file("one", "data make")


def test_files_are_read_by_their_content(tmp_path: Path) -> None:
    address = f"duckdb:///{tmp_path / 'ward.db'}"
    with closing(duckdb.connect(str(tmp_path / "ward.db"))) as connection:
        connection.execute("CREATE TABLE ward AS SELECT 3 AS id")
    shutil.copy(tmp_path / "ward.db", tmp_path / "WARD.DUCKDB")
    build(tmp_path / "plain.duckdb")

    for where in (tmp_path, tmp_path / "ward.db", f"sqlite:///{tmp_path / 'ward.db'}"):
        assert Databases(where).address("ward") == address
        assert Databases(where).dialect("ward") == "duckdb"
    assert open_address(tmp_path / "WARD.DUCKDB")[1] == f"duckdb:///{tmp_path / 'WARD.DUCKDB'}"
    assert Databases(tmp_path).dialect("plain") == "sqlite"
    plain = tmp_path / "plain.duckdb"
    assert Databases(f"duckdb:///{plain}").address("plain") == f"sqlite:///{plain}"


def test_names_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "shop.v2"
    folder.mkdir()
    (folder / "item.csv").write_text("id\n1\n")
    monkeypatch.chdir(folder)

    assert Databases(folder).names() == Databases(".").names() == ["shop.v2"]
    assert Databases("postgresql://reader@host/my%20shop.v2?sslmode=require").names() == ["my shop.v2"]


def test_a_name_needs_one_database(folder: Path) -> None:
    build(folder / "clinic.sqlite")
    build(folder / "shop.sqlite")

    with pytest.raises(DataError, match=r"one database is needed, and this folder holds clinic, shop \(at"):
        Databases({"all": folder}).address("all")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("", "'' is not a database: it names no file"),
        ({"shop": None}, "None is not a database: use a path"),
        ("postgresql://reader%3Asecret@host/x", "may hold no password"),
        ("postgresql://reader@host/x?pass%77ord=secret", "may hold no password"),
        ("notes.txt", r"it is of another kind \(at notes\.txt\): give a folder of"),
        ("gone.duckdb", r"no such file or folder \(at gone\.duckdb\)"),
        ("duckdb:///gone.duckdb", r"no such database file \(at .*gone\.duckdb\)"),
        ("mysql://root:secret@host/x", "unknown URL scheme 'mysql'"),
        ("postgresql://reader:secret@host/x", "may hold no password"),
        ("postgresql://reader@host/x?password=secret", "may hold no password"),
        ("postgresql://reader:se/cret@host/x", "may hold no password|malformed"),
    ],
)
def test_places_without_databases(
    tmp_path: Path, where: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("nothing")
    with pytest.raises(DataError, match=message) as failure:
        Databases(where)
    assert "secret" not in str(failure.value) and "cret@" not in str(failure.value)


def test_only_one_database_is_opened_by_an_address(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="one database is needed, got none"):
        open_address(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
@pytest.mark.parametrize("name", ["shop.csv", "shop.sql", "shop.jsonl"])
def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for place in (tmp_path / name, tmp_path):
        with pytest.raises(DataError, match="give a folder of"):
            open_address(place)
