"""The question generator on a database without words, and every promise of the bundled questions."""

import csv
import json
import re
import shutil
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import psycopg
import pytest
import yaml

from tests.databases import duckdb_file, sqlite_file
from tests.tiers import but_first_thorough
from text2sql_grpo.commands import main
from text2sql_grpo.data.databases import CACHE_VARIABLE, Databases
from text2sql_grpo.errors import DataError
from text2sql_grpo.run.new_project import SETS
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.sql.postgres_role import restricted_role_sql
from text2sql_grpo.synthesis.generator import QUESTION_SETS, QuestionSet, make_questions
from text2sql_grpo.synthesis.profile import Profile
from text2sql_grpo.synthesis.templates import OWN, templates
from text2sql_grpo.synthesis.words import with_words
from text2sql_grpo.synthesis.words_file import Words, read_words

DATA = Path(__file__).parents[2] / "data"
SMALL_SETS = [replace(each, count=each.count // 10) for each in QUESTION_SETS]
TINY_SETS = [replace(each, count=each.count // 50) for each in QUESTION_SETS]
TEMPLATES = templates()
HELD_OUT = {template.name for template in TEMPLATES if template.is_held_out}
Row = dict[str, Any]

ORDERS = """
CREATE TABLE Customers (id INTEGER PRIMARY KEY, name TEXT, "home town" TEXT, age INTEGER);
CREATE TABLE "order" (
  id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES Customers, status TEXT, seller TEXT,
  unitPrice REAL, placed TEXT
);
"""
STATES = ("IN_TRANSIT", "ON_HOLD", "SENT_BACK", "NOT_PAID")
SELLERS = ("SMITH, J.", "BRANDT, O.", "OKAFOR, N.")
TOWNS = ("Lisbon", "Porto", "St. John's")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path)


def write_shop(parent: Path) -> Path:
    """A folder with one SQLite file, as a user may have it: odd names, a quoted table, no words."""
    folder = parent / "databases"
    folder.mkdir()
    with closing(sqlite3.connect(folder / "shop.sqlite")) as connection:
        connection.executescript(ORDERS)
        customers = [(i, f"Person {i}", TOWNS[i % 3], 20 + i) for i in range(30)]
        orders = [
            (i, i * 7 % 30, STATES[i % 4], SELLERS[i % 3], i * 37 % 90 + 0.5, f"2024-{i % 12 + 1:02}-10")
            for i in range(90)
        ]
        connection.executemany("INSERT INTO Customers VALUES (?, ?, ?, ?)", customers)
        connection.executemany('INSERT INTO "order" VALUES (?, ?, ?, ?, ?, ?)', orders)
        connection.commit()
    return folder


def read(folder: Path) -> dict[str, list[Row]]:
    files = sorted(folder.glob("*.jsonl"))
    return {
        file.stem: [json.loads(line) for line in file.read_text(encoding="utf-8").strip().split("\n")]
        for file in files
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shop in `databases` and its questions in `questions`."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(folder / "cache"))
        make_questions(write_shop(folder), folder / "questions", question_sets=SMALL_SETS)
    return folder


def test_every_template_has_five_phrasings_and_each_is_used(bundled: dict[str, list[Row]]) -> None:
    assert all(len(set(template.phrases)) >= 5 for template in (*TEMPLATES, *templates(OWN)))
    openings = Counter(row["question"].split()[0] for row in bundled["demonstrations"])
    assert len(openings) >= 30 and max(openings.values()) < 0.4 * len(bundled["demonstrations"])


def test_a_database_without_words_gives_questions_of_all_families(made: Path) -> None:
    sets = read(made / "questions")
    assert set(sets) == {"demonstrations", "train", "test_values", "test_templates"}
    families = {row["family"] for row in sets["demonstrations"]}
    assert families == {template.family for template in TEMPLATES} - {"null"}  # it has no NULLs
    golds = " ".join(row["gold_sql"] for rows in sets.values() for row in rows)
    assert 'FROM "order" JOIN Customers ON "order".customer_id = Customers.id' in golds
    assert "'St. John''s'" in golds
    questions = " ".join(row["question"] for rows in sets.values() for row in rows)
    assert "orders" in questions and "unit price" in questions and "home town" in questions
    with closing(sqlite3.connect(made / "databases" / "shop.sqlite")) as connection:
        for row in [row for rows in sets.values() for row in rows]:
            assert connection.execute(row["gold_sql"]).fetchall(), row


def test_look_ups_are_found_from_stored_values_alone(made: Path) -> None:
    rows = [row for rows in read(made / "questions").values() for row in rows if row["family"] == "lookup"]
    looks = {row["look_sql"] for row in rows}
    assert looks == {'SELECT DISTINCT status FROM "order"', 'SELECT DISTINCT seller FROM "order"'}
    row = next(row for row in rows if "SMITH" in row["gold_sql"] and "seller" in row["look_sql"])
    assert "J. Smith" in row["question"] and "SMITH" not in row["question"]
    assert row["guess_sql"] == row["gold_sql"].replace("SMITH, J.", "J. Smith")


@pytest.mark.thorough
def test_the_seed_alone_decides(shop: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        make_questions(shop, tmp_path / name, seed=seed, question_sets=TINY_SETS)
    assert "test_databases" not in caplog.text  # a set without databases is no set that they cannot fill
    for file in (tmp_path / "first").glob("*.jsonl"):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
        assert file.read_bytes() != (tmp_path / "other" / file.name).read_bytes()


LIBRARY = """
CREATE TABLE Authors (AuthorID INTEGER PRIMARY KEY, AuthorName TEXT, birth_yr INTEGER, Country TEXT);
CREATE TABLE categories (cat_no INTEGER PRIMARY KEY, title TEXT);
CREATE TABLE tbl_Books (
  book_id INTEGER PRIMARY KEY, AuthorID INTEGER REFERENCES Authors, cat INTEGER REFERENCES categories,
  book_title TEXT, num_pages INTEGER, zip INTEGER, HH REAL, bought TIMESTAMP, shelf TEXT
);
CREATE TABLE reads (book INTEGER REFERENCES tbl_Books, author INTEGER REFERENCES Authors);
"""


@pytest.mark.thorough
def test_questions_without_words_have_many_shapes_and_no_odd_columns(tmp_path: Path) -> None:
    (tmp_path / "databases").mkdir()
    with closing(sqlite3.connect(tmp_path / "databases" / "library.sqlite")) as connection:
        connection.executescript(LIBRARY)
        authors = [
            (i, f"{chr(65 + i)}da Lee", 1900 + i * 3, ("Peru", "Chad", "Laos")[i % 3]) for i in range(12)
        ]
        books = [
            (
                *(
                    i,
                    i % 11,
                    i % 5,
                    f"Book {i} of {'Tales' if i % 3 else 'Songs'}",
                    90 + i * 7 % 50,
                    1000 + i,
                ),
                *(
                    i / 7,
                    f"2024-0{i % 9 + 1}-1{i % 4} 12:30:00",
                    None if i % 6 == 0 else f"s{chr(97 + i % 4)} x",
                ),
            )
            for i in range(60)
        ]
        connection.executemany("INSERT INTO Authors VALUES (?, ?, ?, ?)", authors)
        connection.executemany(
            "INSERT INTO categories VALUES (?, ?)", [(i, f"kind {chr(97 + i)}") for i in range(5)]
        )
        connection.executemany("INSERT INTO tbl_Books VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", books)
        connection.executemany("INSERT INTO reads VALUES (?, ?)", [(i, i % 12) for i in range(30)])
        connection.commit()

    make_questions(tmp_path / "databases", tmp_path / "questions", question_sets=SMALL_SETS)

    rows = [row for rows in read(tmp_path / "questions").values() for row in rows]
    golds, questions = ("\n".join(row[key] for row in rows) for key in ("gold_sql", "question"))
    for part in (
        "HAVING COUNT(*)",
        "ORDER BY COUNT(*) DESC",
        "LIKE 'A%'",
        "IS NULL",
        "MIN(",
    ):
        assert part in golds
    assert any(gold.count(" JOIN ") == 2 for gold in golds.split("\n"))
    assert all(f"FROM {table}" in golds for table in ("Authors", "categories", "tbl_Books", "reads"))
    assert "books" in questions and "whose author's name is" in questions and "number of pages" in questions
    assert "birth year is after" in questions and '"reads"' in questions and "tbl" not in questions
    assert not re.search(r"(AVG|SUM|MAX)\((birth_yr|zip|book_id|AuthorID|bought)\)", golds)
    assert '"HH"' in questions
    assert '"bought"' in questions  # no noun


def test_rows_of_a_table_called_by_its_columns_have_the_name_of_its_key(tmp_path: Path) -> None:
    (tmp_path / "databases").mkdir()
    with closing(sqlite3.connect(tmp_path / "databases" / "phones.sqlite")) as connection:
        connection.execute("CREATE TABLE AREA_CODE_STATE (area_code INTEGER PRIMARY KEY, state TEXT)")
        states = [(200 + i, ("NY", "TX", "WY")[i % 3]) for i in range(30)]
        connection.executemany("INSERT INTO AREA_CODE_STATE VALUES (?, ?)", states)
        connection.commit()

    make_questions(tmp_path / "databases", tmp_path / "questions", question_sets=SMALL_SETS)

    rows = [row for rows in read(tmp_path / "questions").values() for row in rows]
    questions = {row["question"] for row in rows}
    assert any('area codes whose state is "WY".' in question for question in questions)
    assert not any("area code state" in question for question in questions)


ANY_NAMES = """
CREATE TABLE stg_orders (id INTEGER PRIMARY KEY, customer TEXT, total REAL);
CREATE TABLE invoice_v2 (id INTEGER PRIMARY KEY, city TEXT, amount REAL);
CREATE TABLE bestellungen2024 (id INTEGER PRIMARY KEY, stadt TEXT, betrag REAL);
CREATE TABLE Kundenbestellungen (id INTEGER PRIMARY KEY, stadt TEXT, betrag REAL);
CREATE TABLE "Заказы" (id INTEGER PRIMARY KEY, "город" TEXT, "сумма" REAL);
CREATE TABLE "注文" (id INTEGER PRIMARY KEY, "都市" TEXT, "金額" REAL);
CREATE TABLE doc (id INTEGER PRIMARY KEY, author TEXT, length INTEGER);
CREATE TABLE t_007_ledger (id INTEGER PRIMARY KEY, "group" TEXT, "my ""own"" sum" REAL);
CREATE TABLE XQ7 (pk INTEGER PRIMARY KEY, a TEXT, b REAL);
CREATE TABLE notes (id INTEGER PRIMARY KEY, body BLOB);
"""


@pytest.fixture(scope="module")
def any_names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with names of daily life."""
    file = tmp_path_factory.mktemp("any_names") / "shop.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(ANY_NAMES)
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            rows = [(i, ("Köln", "Rom", "Oslo", "Kyiv")[i % 4], i * 7 % 90 + i / 8) for i in range(120)]
            if name == "notes":
                connection.executemany("INSERT INTO notes VALUES (?, ?)", [(i, b"x") for i in range(9)])
            else:
                connection.executemany(f'INSERT INTO "{name}" VALUES (?, ?, ?)', rows)
        connection.commit()
    return file


@pytest.mark.thorough
def test_any_name_gets_questions(any_names: Path, tmp_path: Path) -> None:
    made = make_questions(any_names, tmp_path / "questions", question_sets=SMALL_SETS)

    assert not made.lacks
    counts = {one.table: one.n_questions for one in made.tables}
    assert min(count for name, count in counts.items() if name != "notes") > 30 and counts["notes"]
    questions = "\n".join(row["question"] for rows in read(tmp_path / "questions").values() for row in rows)
    for phrase in ("orders", "invoices", '"Kundenbestellungen" rows', '"сумма"', '"注文" rows', "ledgers"):
        assert phrase in questions
    assert "stg" not in questions and "v2" not in questions and "bestellungs" not in questions


def test_prefixes_moments_and_short_forms_are_read(tmp_path: Path) -> None:
    file = tmp_path / "warehouse.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(
            "CREATE TABLE int_fct_shipments_v3"
            " (shipment_sk INTEGER PRIMARY KEY, stat_cd TEXT, created_at TIMESTAMP)"
        )
        connection.execute(
            "CREATE TABLE stg_shop__HTTPLogEntry (id INTEGER PRIMARY KEY, RespTimeMS REAL, based_on TEXT)"
        )
        moments = [f"2024-0{n % 8 + 1}-1{n % 7} 10:00:00" for n in range(90)]
        shipments = [(n, ("LATE", "LOST", "SENT")[n % 3], moment) for n, moment in enumerate(moments)]
        connection.executemany("INSERT INTO int_fct_shipments_v3 VALUES (?, ?, ?)", shipments)
        entries = [(n, n * 7 % 90 + n / 8, ("cookie", "header", "query")[n % 3]) for n in range(90)]
        connection.executemany("INSERT INTO stg_shop__HTTPLogEntry VALUES (?, ?, ?)", entries)
        connection.commit()
    made = make_questions(file, tmp_path / "questions", question_sets=SMALL_SETS)

    assert not made.lacks
    questions = "\n".join(row["question"] for rows in read(tmp_path / "questions").values() for row in rows)
    for phrase in (
        "shipments whose status code",
        "creation date",
        "HTTP log entr",
        "response time in milliseconds",
    ):
        assert phrase in questions
    assert "fct" not in questions and "stg" not in questions and "based date" not in questions


@pytest.mark.parametrize(
    ("tables", "nouns"),
    [
        (("orders", "stg_orders"), ["order", '"stg_orders" row']),
        (("order", "orders", "stg_orders"), ['"order" row', '"orders" row', '"stg_orders" row']),
    ],
)
def test_no_two_tables_are_called_the_same(tmp_path: Path, tables: tuple[str, ...], nouns: list[str]) -> None:
    script = "".join(f'CREATE TABLE "{one}" (id INTEGER PRIMARY KEY, total REAL);' for one in tables)
    file = sqlite_file(tmp_path / "shop.sqlite", script)
    assert main(["data", "words", "--databases", str(file), "--out", str(tmp_path / "words.yaml")]) == 0
    assert list(yaml.safe_load((tmp_path / "words.yaml").read_text())["tables"].values()) == nouns


@pytest.mark.thorough
def test_no_template_floods_the_file_and_tables_share_it(any_names: Path, tmp_path: Path) -> None:
    make_questions(any_names, tmp_path / "questions", question_sets=SMALL_SETS)
    rows = read(tmp_path / "questions")["demonstrations"]
    assert max(Counter(row["template"] for row in rows).values()) <= max(20, 0.1 * len(rows))
    tables = Counter(re.search(r'FROM ("[^"]+"|\w+)', row["gold_sql"])[1] for row in rows)
    assert max(tables.values()) < 0.25 * len(rows)


def test_a_table_of_few_values_gives_few_questions(tmp_path: Path) -> None:
    script = "CREATE TABLE checksum (name TEXT PRIMARY KEY, records INTEGER, errors INTEGER);"
    script += "CREATE TABLE visit (id INTEGER PRIMARY KEY, city TEXT, fee REAL);"
    rows = {
        "checksum": [(f"part {chr(97 + i)}", 400 + 31 * i, i * i + 2) for i in range(5)],
        "visit": [(i, f"City {chr(97 + i % 26)}", i * 1.37) for i in range(90)],
    }
    file = sqlite_file(tmp_path / "shop.sqlite", script, rows)
    make_questions(file, tmp_path / "questions", question_sets=SMALL_SETS)
    golds = [row["gold_sql"] for row in read(tmp_path / "questions")["demonstrations"]]
    assert 0 < sum("FROM checksum" in gold for gold in golds) <= 20 < len(golds) / 2


def test_a_table_without_questions_is_named_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "shop.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(
            'CREATE TABLE visits (id INTEGER PRIMARY KEY, city TEXT, fee TEXT, "Odd Sum" TEXT)'
        )
        connection.execute("CREATE TABLE empty (id INTEGER PRIMARY KEY, city TEXT)")
        connection.execute("CREATE TABLE a_b (a INTEGER REFERENCES visits, b INTEGER REFERENCES empty)")
        rows = [(i, "AB"[i % 2], "free", "kr 7,-") for i in range(40)]
        connection.executemany("INSERT INTO visits VALUES (?, ?, ?, ?)", rows)
        connection.execute("INSERT INTO a_b VALUES (1, 2)")
        connection.commit()
    words = tmp_path / "words.yaml"
    words.write_text("tables: {visits: null, a_b: null}\n", encoding="utf-8")
    with pytest.raises(DataError, match="no question can be made of shop"):
        make_questions(file, tmp_path / "none", question_sets=TINY_SETS, words=words)
    made = make_questions(file, tmp_path / "made", question_sets=TINY_SETS)
    reasons = {one.table: (one.n_questions > 0, one.reason) for one in made.tables}
    assert reasons["visits"] == (True, "not asked about: fee, Odd Sum")
    assert reasons["empty"] == (False, "no rows")


def test_a_table_of_nested_columns_alone_stops_nothing(tmp_path: Path) -> None:
    rows = ", ".join(f"({number}, '{'AB'[number % 2]}')" for number in range(20))
    script = f"CREATE TABLE visits (n INTEGER, city TEXT); INSERT INTO visits VALUES {rows};"
    script += "CREATE TABLE raw (payload JSON, tags INTEGER[]); INSERT INTO raw VALUES ('{}', [1]);"
    duckdb_file(tmp_path / "shop.duckdb", script)
    made = make_questions(tmp_path / "shop.duckdb", tmp_path / "made", question_sets=TINY_SETS)
    assert {one.table for one in made.tables if one.n_questions} == {"visits", "raw"}  # how many there are


@pytest.mark.thorough
def test_tables_of_many_rows_are_sampled_and_golds_run_on_all(tmp_path: Path) -> None:
    file = tmp_path / "shop.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE sale (id INTEGER PRIMARY KEY, store TEXT, price REAL, label TEXT)")
        rows = ((i, f"Store {chr(65 + i % 9)}", i % 977 / 4, f"n{i // 2}") for i in range(50_000))
        connection.executemany("INSERT INTO sale VALUES (?, ?, ?, ?)", rows)
        connection.commit()
    with SQLExecutor() as executor:
        sale = Profile(executor, file).tables["sale"]
    assert sale.n_rows == 50_000 and sale.n_read <= 20_000 and not sale.columns["label"].is_unique
    assert max(sale.columns["price"].values) > 240  # not of the first rows alone
    made = make_questions(file, tmp_path / "questions", question_sets=TINY_SETS)
    assert made.tables[0].n_questions > 40 and not made.lacks
    with closing(sqlite3.connect(file)) as connection:
        for row in read(tmp_path / "questions")["train"]:
            assert connection.execute(row["gold_sql"]).fetchall()


@pytest.mark.parametrize("declares", [False, True])
def test_links_of_undeclared_tables_are_mined_from_equal_names_and_from_codes(
    tmp_path: Path, declares: bool
) -> None:
    file = tmp_path / "flights.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript("""
            CREATE TABLE airlines (carrier TEXT, name TEXT);
            CREATE TABLE airports (faa TEXT, name TEXT, first_pilot TEXT, gate INTEGER, lot_no INTEGER);
            CREATE TABLE flights (carrier TEXT, origin TEXT, dest TEXT, pilot TEXT, hour INTEGER,
              gate INTEGER, lot_no INTEGER);
            CREATE TABLE hours (hour INTEGER, name TEXT);
            INSERT INTO airlines VALUES ('AA', 'American'), ('UA', 'United'), ('DL', 'Delta');
            INSERT INTO airports VALUES ('JFK', 'Kennedy', 'Ann', 3, 1), ('LGA', 'Guardia', 'Bob', 1, 2);
            INSERT INTO airports VALUES ('EWR', 'Newark', 'Cy', 2, 3);
            INSERT INTO hours VALUES (1, 'one'), (2, 'two'), (3, 'three');
        """)
        places = (("JFK", "LGA", "Ann", 1), ("LGA", "EWR", "Bob", 2), ("EWR", "ZZZ", "Cy", 3))
        rows = [
            (carrier, *place, n, n) for carrier in ("AA", "UA", "DL") for n, place in enumerate(places, 1)
        ]
        connection.executemany("INSERT INTO flights VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        if declares:
            connection.execute("CREATE TABLE crew (carrier TEXT REFERENCES airlines (carrier))")
        connection.commit()
    with SQLExecutor() as executor:
        keys = Profile(executor, file).tables["flights"].table.foreign_keys
    found = {(key.columns[0], key.table, key.references[0]) for key in keys}
    # `dest` holds a value that no airport has; `pilot` refers to a column that is not the first of its table;
    # `gate` and `lot_no` count from 1 in both tables.
    wanted = {("carrier", "airlines", "carrier"), ("origin", "airports", "faa"), ("hour", "hours", "hour")}
    assert found == (set() if declares else wanted)


LINKED = """
CREATE TABLE film (film_id INTEGER PRIMARY KEY, title TEXT, length REAL);
CREATE TABLE actor (actor_id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE film_actor (
  film_id INTEGER REFERENCES film, actor_id INTEGER REFERENCES actor, updated TEXT,
  PRIMARY KEY (film_id, actor_id)
);
"""


@pytest.mark.parametrize(
    ("dates", "is_link"),
    [
        (["2024-01-01"] * 2, True),
        (["2024-01-01", None], False),
        (["2024-01-01", "9999-12-31"], False),
        (["2024-01-01", "2024-05-01 10:00:00"], True),
    ],
)
def test_links_that_end_are_rows_of_their_own(tmp_path: Path, dates: list[str | None], is_link: bool) -> None:
    names = [(1, "Ann"), (2, "Bob")]
    films = [(number, name, 90.0) for number, name in names]
    links = [(number, number, date) for number, date in enumerate(dates, 1)]
    rows = {"film": films, "actor": names, "film_actor": links}
    file = sqlite_file(tmp_path / "films.sqlite", LINKED, rows)
    with SQLExecutor() as executor:
        assert Profile(executor, file).tables["film_actor"].is_link == is_link
    two = LINKED.replace("updated TEXT", "since TEXT, until TEXT")
    periods = [(*link, "2025-01-01") for link in links]
    file = sqlite_file(tmp_path / "periods.sqlite", two, rows | {"film_actor": periods})
    with SQLExecutor() as executor:
        assert not Profile(executor, file).tables["film_actor"].is_link


def test_rows_that_only_link_are_never_counted(tmp_path: Path) -> None:
    file = tmp_path / "films.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(LINKED)
        letters = [chr(97 + i) for i in range(26)]
        connection.executemany(
            "INSERT INTO film VALUES (?, ?, ?)", [(i, f"Film {a}", 90 + i / 4) for i, a in enumerate(letters)]
        )
        connection.executemany(
            "INSERT INTO actor VALUES (?, ?)", [(i, f"Ann {a}") for i, a in enumerate(letters)]
        )
        pairs = [(i % 26, i * i % 26, "2024-01-01") for i in range(200)]
        connection.executemany("INSERT OR IGNORE INTO film_actor VALUES (?, ?, ?)", pairs)
        connection.commit()
    made = make_questions(file, tmp_path / "questions", question_sets=SMALL_SETS)
    assert not made.lacks
    rows = [row for rows in read(tmp_path / "questions").values() for row in rows]
    assert not any("film actor" in row["question"] or "film_actor" in row["question"] for row in rows)
    joined = [row for row in rows if "film_actor" in row["gold_sql"]]
    assert any(row["question"].startswith("Count the actors with a film whose title is") for row in joined)
    grouped = [row["question"] for row in joined if "GROUP BY" in row["gold_sql"]]
    assert any("average length" in question for question in grouped)
    assert not any("whose" in question for question in grouped)  # of a column, never of the groups
    with closing(sqlite3.connect(file)) as connection:
        for row in joined:
            if row["gold_sql"].startswith("SELECT COUNT(*)"):  # no actor or film is counted twice
                asked = row["gold_sql"].split(" JOIN ")[1].split()[0]
                once = row["gold_sql"].replace("COUNT(*)", f"COUNT(DISTINCT {asked}.rowid)")
                assert connection.execute(row["gold_sql"]).fetchall() == connection.execute(once).fetchall()


@pytest.mark.parametrize(
    ("key", "unjoined"),
    [("head_id", ["", "boss_id"]), ("employee_id", ["employee_id", "department_id, boss_id"])],
)
def test_joins_of_tables_that_refer_to_each_other_are_named_apart_or_left_out(
    tmp_path: Path, key: str, unjoined: list[str]
) -> None:
    script = f"""
        CREATE TABLE department (
          id INTEGER PRIMARY KEY, name TEXT UNIQUE, {key} INTEGER REFERENCES employee
        );
        CREATE TABLE employee (
          id INTEGER PRIMARY KEY, name TEXT UNIQUE, salary INTEGER,
          department_id INTEGER REFERENCES department, boss_id INTEGER REFERENCES employee
        );
    """
    rows = {
        "department": [(i, f"Part {chr(65 + i)}", i * 3) for i in range(8)],
        "employee": [(i, f"Ann {chr(65 + i)}", 3000 + i * i, i % 8, i // 5) for i in range(26)],
    }
    file = sqlite_file(tmp_path / "firm.sqlite", script, rows)
    made = make_questions(file, tmp_path / "questions", question_sets=SMALL_SETS)
    assert [one.reason.partition("not joined by: ")[2] for one in made.tables] == unjoined
    found = [row for rows in read(tmp_path / "questions").values() for row in rows]
    joined = {row["gold_sql"].split(" ON ")[1].split()[0] for row in found if " ON " in row["gold_sql"]}
    assert joined == ({"department.head_id", "employee.department_id"} if key == "head_id" else set())
    heads = [row["question"] for row in found if "department.head_id" in row["gold_sql"]]
    assert all("head" in question for question in heads)


def test_files_that_were_edited_are_never_written_over(shop: Path, tmp_path: Path) -> None:
    out = tmp_path / "questions"
    make_questions(shop, out, question_sets=TINY_SETS)
    make_questions(shop, out, question_sets=TINY_SETS, seed=1)  # made, not edited
    edited = (out / "train.jsonl").read_text().replace("How many", "how many", 1) + "\n"
    (out / "train.jsonl").write_text(edited)
    with pytest.raises(DataError, match=r"train\.jsonl .* edited"):
        make_questions(shop, out, question_sets=TINY_SETS)
    assert (out / "train.jsonl").read_text() == edited


def test_a_file_that_comes_out_empty_replaces_an_earlier_one(tmp_path: Path) -> None:
    out, rows = tmp_path / "questions", [(i, f"City {chr(97 + i)}", i * 1.37) for i in range(26)]
    script = "CREATE TABLE visits (id INTEGER PRIMARY KEY, city TEXT, fee REAL)"
    file = sqlite_file(tmp_path / "shop.sqlite", script, {"visits": rows})
    sets = [replace(one, databases="train") for one in TINY_SETS if one.name in ("train", "test_templates")]
    assert all(make_questions(file, out, question_sets=sets).files.values())
    for _ in range(2):
        assert not make_questions(file, out, question_sets=sets, hide=["visits.fee"]).files["test_templates"]
        assert sorted(path.name for path in out.iterdir()) == ["made.json", "train.jsonl"]


def test_files_of_another_database_or_of_init_are_never_written_over(shop: Path, tmp_path: Path) -> None:
    out = tmp_path / "questions"
    more = [replace(each, count=40) for each in SETS]
    make_questions(shop, out, question_sets=more)
    made = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(DataError, match=r"holds dev\.jsonl, made with the others by `init`"):
        make_questions(shop, out, question_sets=SMALL_SETS)
    (tmp_path / "others").mkdir()
    shutil.copy(next(shop.glob("*.sqlite")), tmp_path / "others" / "depot.sqlite")
    with pytest.raises(DataError, match="holds questions about shop: nothing is written"):
        make_questions(tmp_path / "others", out, question_sets=more)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == made
    make_questions(shop, out, question_sets=more)


def test_a_pattern_of_what_to_hide_that_names_nothing_is_named(
    shop: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_questions(shop, tmp_path / "questions", question_sets=SMALL_SETS, hide=["personal", "staf.*"])
    assert "--hide: no table or column of shop is named staf.*" in caplog.text


def test_what_is_hidden_may_have_words_and_is_reported(shop: Path, tmp_path: Path) -> None:
    words = {
        "tables": {"Customers": "client", "order": "purchase"},
        "columns": {"order.seller": "agent", "order.status": "state", "Customers.age": "age"},
        "said": {"order.seller": {"SMITH, J.": "Smith"}},
    }
    (shop / "shop.json").write_text(json.dumps(words), encoding="utf-8")
    hide = ["customers", "order.seller"]
    made = make_questions(shop, tmp_path / "made", question_sets=TINY_SETS, hide=hide)
    assert {one.table: (bool(one.n_questions), one.n_rows) for one in made.tables} == {
        "order": (True, 90),
        "customers": (False, None),
    }
    golds = " ".join(row["gold_sql"] for rows in read(tmp_path / "made").values() for row in rows)
    assert "status" in golds and "seller" not in golds and "Customers" not in golds and not made.lacks


@pytest.mark.thorough
def test_words_are_written_edited_and_kept(any_names: Path, tmp_path: Path) -> None:
    words = tmp_path / "words.yaml"
    assert main(["data", "words", "--databases", str(any_names), "--out", str(words)]) == 0
    text = words.read_text(encoding="utf-8")
    assert "stg_orders: order" in text and "Заказы" in text
    text = text.replace("Заказы: '\"Заказы\" row'", "Заказы: purchase")
    words.write_text(text.replace("doc.length: length", "doc.length: null"), encoding="utf-8")
    before = words.read_text(encoding="utf-8")
    assert main(["data", "words", "--databases", str(any_names), "--out", str(words)]) == 0
    assert words.read_text(encoding="utf-8") == before
    make_questions(any_names, tmp_path / "questions", question_sets=SMALL_SETS, words=words)
    rows = [row for rows in read(tmp_path / "questions").values() for row in rows]
    assert any("purchases" in row["question"] and "Заказы" in row["gold_sql"] for row in rows)
    assert not any("length" in row["gold_sql"] for row in rows)


def test_said_forms_of_later_values_are_derived(tmp_path: Path) -> None:
    database, words = tmp_path / "shop.sqlite", tmp_path / "words.yaml"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE parcel (id INTEGER PRIMARY KEY, state TEXT)")
        connection.commit()
        written = []
        for states in (["open", "paid"], ["IN_TRANSIT", "ON_HOLD", "NOT_PAID"]):
            rows = [(state,) for state in states * 9]
            connection.executemany("INSERT INTO parcel (state) VALUES (?)", rows)
            connection.commit()
            assert main(["data", "words", "--databases", str(database), "--out", str(words)]) == 0
            written.append(yaml.safe_load(words.read_text("utf-8")).get("said"))
    assert written[0] is None
    assert written[1]["parcel.state"]["IN_TRANSIT"] == "in transit"
    words.write_text("said: {}\n", "utf-8")  # by hand: no value is called otherwise
    assert main(["data", "words", "--databases", str(database), "--out", str(words)]) == 0
    assert yaml.safe_load(words.read_text("utf-8"))["said"] == {}


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ("02-Lisbon 07-Porto 11-Rome", "Lisbon Porto Rome"),
        ("1-URGENT 2-HIGH 3-LOW", "URGENT HIGH LOW"),
        ("1_month 6_months 14_days", ""),
        ("1.day 2.weeks 3.months", ""),
        ("1-bedroom 2-bedrooms", ""),
        ("404-Missing 500-Broken", ""),
        ("5.kg 05.g", ""),
    ],
)
def test_numbers_before_values_are_dropped_unless_they_are_amounts(
    tmp_path: Path, stored: str, said: str
) -> None:
    values = stored.split()
    rows = [(i, values[i % len(values)]) for i in range(12)]
    script = "CREATE TABLE parcel (id INTEGER PRIMARY KEY, stage TEXT)"
    file = sqlite_file(tmp_path / "post.sqlite", script, {"parcel": rows})
    with SQLExecutor() as executor:
        columns = with_words(Profile(executor, file), "post", Words(), place="").tables["parcel"].columns
    forms = next(column.said for column in columns if column.name == "stage")
    assert [forms[value] for value in values if value in forms] == said.split()


def test_days_of_timestamps_are_compared_by_day(tmp_path: Path) -> None:
    (tmp_path / "databases").mkdir()
    with closing(sqlite3.connect(tmp_path / "databases" / "shop.sqlite")) as connection:
        connection.execute("CREATE TABLE Orders (id INTEGER PRIMARY KEY, order_date TIMESTAMP)")
        days = [(i, f"2024-05-{i % 28 + 1:02} 10:0{i % 7}:00") for i in range(80)]
        connection.executemany("INSERT INTO Orders VALUES (?, ?)", days)
        connection.commit()
    make_questions(tmp_path / "databases", tmp_path / "questions", question_sets=SMALL_SETS)
    with closing(sqlite3.connect(tmp_path / "databases" / "shop.sqlite")) as connection:
        checked = Counter()
        for row in (row for rows in read(tmp_path / "questions").values() for row in rows):
            found = re.search(r"date is (after|before|on or after)? ?(\d+) May 2024", row["question"])
            if found and row["gold_sql"].startswith("SELECT COUNT"):
                test = {"after": ">", "before": "<", "on or after": ">=", None: "="}[found[1]]
                right = (
                    f"SELECT COUNT(*) FROM Orders WHERE date(order_date) {test} '2024-05-{int(found[2]):02}'"
                )
                assert connection.execute(row["gold_sql"]).fetchone() == connection.execute(right).fetchone()
                checked[test] += 1
    assert len(checked) == 4


@pytest.mark.parametrize("engine", ["sqlite", "duckdb"])
def test_rows_are_not_sorted_by_a_column_with_nulls(tmp_path: Path, engine: str) -> None:
    names = ("Physics", "Biology", "History", "Music", "Drama", "Latin", "Greek", "Dance")
    values = ", ".join(f"('{name}', {7 * i % 5 + i}, {i or 'NULL'})" for i, name in enumerate(names))
    script = f"CREATE TABLE club (name TEXT, dues REAL, budget REAL); INSERT INTO club VALUES {values};"
    make = sqlite_file if engine == "sqlite" else duckdb_file
    make(tmp_path / f"school.{engine}", script)
    sets = [QuestionSet("train", "train", 120, 0, "any")]
    make_questions(tmp_path / f"school.{engine}", tmp_path / "questions", question_sets=sets)
    golds = {row["gold_sql"] for row in read(tmp_path / "questions")["train"]}
    assert "SELECT name FROM club ORDER BY dues DESC" in golds
    assert "SELECT name FROM club ORDER BY budget DESC" not in golds


def test_no_group_is_that_of_missing_days(tmp_path: Path) -> None:
    days = [f"2024-{i % 9 + 1:02}-10" for i in range(60)]
    rows = [(i, day, day if i % 7 else None, f"{day} 10:00:00+00") for i, day in enumerate(days)]
    script = "CREATE TABLE orders (id INTEGER PRIMARY KEY, placed_at TEXT, shipped_at TEXT, paid_at TEXT)"
    file = sqlite_file(tmp_path / "shop.sqlite", script, {"orders": rows})
    make_questions(file, tmp_path / "made", question_sets=[QuestionSet("train", "train", 90, 0, "any")])
    golds = [row["gold_sql"] for row in read(tmp_path / "made")["train"]]
    grouped = [gold for gold in golds if "GROUP BY" in gold]
    assert set(re.findall(r"\w+_at", " ".join(grouped))) == {"placed_at"}
    assert set(re.findall(r"\w+_at", " ".join(golds))) == {"placed_at", "shipped_at", "paid_at"}


def test_a_slow_check_of_a_value_costs_its_question_alone(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Profile.rows

    def slow(profile: Profile, sql: str) -> Any:
        if "name LIKE '%" in sql and "DISTINCT" in sql:
            raise TimeoutError("a query takes more than 5 s")
        return rows(profile, sql)

    monkeypatch.setattr(Profile, "rows", slow)
    made = make_questions(shop / "shop.sqlite", tmp_path / "questions", question_sets=TINY_SETS)
    assert not made.lacks
    asked = [row for rows in read(tmp_path / "questions").values() for row in rows]
    assert not any("name LIKE '%" in row.get("check_sql", "") for row in asked)


def test_days_and_numbers_at_the_end_of_their_range_are_read(tmp_path: Path) -> None:
    """Databases mark missing days by the first and last ones that they can store."""
    ends = ["0000-00-00", "2024-02-30", "9999-12-31", *(f"2024-0{i}-11" for i in range(1, 6))]
    (tmp_path / "databases").mkdir()
    with closing(sqlite3.connect(tmp_path / "databases" / "shop.sqlite")) as connection:
        connection.execute("CREATE TABLE sale (id INTEGER PRIMARY KEY, sold TIMESTAMP, due DATE, price REAL)")
        for i in range(40):
            price = float("inf") if i == 3 else i / 2
            row = (i, f"{ends[i % 8]} 00:00:00", ends[i % 8], price)
            connection.execute("INSERT INTO sale VALUES (?, ?, ?, ?)", row)
        connection.commit()
    make_questions(tmp_path / "databases", tmp_path / "questions", question_sets=SMALL_SETS)
    texts = [row["question"] for rows in read(tmp_path / "questions").values() for row in rows]
    assert any("11 April 2024" in text for text in texts)
    assert not any(year in text for text in texts for year in ("9999", "30 February", " 0000"))


@pytest.mark.thorough
def test_of_tables_with_one_name_only_that_of_the_bare_name_is_asked_about(tmp_path: Path) -> None:
    file = tmp_path / "shop.duckdb"
    with duckdb.connect(str(file)) as connection:
        connection.execute(
            """
            CREATE SCHEMA hr; CREATE SCHEMA old;
            CREATE TABLE hr.staff (id INTEGER PRIMARY KEY, wage INTEGER);
            CREATE TABLE staff (id INTEGER PRIMARY KEY, age INTEGER, hired TIMESTAMPTZ);
            CREATE TABLE hr.visit (staff INTEGER REFERENCES hr.staff (id), minutes INTEGER);
            CREATE TABLE hr.room (id INTEGER, seats INTEGER);
            CREATE TABLE old.room (id INTEGER, beds INTEGER);
            """
        )
        for table in ("hr.staff", "staff", "hr.visit", "hr.room", "old.room"):
            more = ", TIMESTAMPTZ '2020-01-01 10:00+00' + n * INTERVAL '5 days'" if table == "staff" else ""
            connection.execute(f"INSERT INTO {table} SELECT n, n * 7 % 41{more} FROM range(60) AS s (n)")
    made = make_questions(file, tmp_path / "questions", question_sets=SMALL_SETS)
    reasons = {one.table: one.reason for one in made.tables}
    same = "another schema has a table of this name"
    assert reasons == {
        "staff": "",
        "visit": "not asked about: staff",
        "hr.staff": same,
        "hr.room": same,
        "old.room": same,
    }
    golds = [row["gold_sql"] for rows in read(tmp_path / "questions").values() for row in rows]
    assert not any("hr.staff" in gold or "room" in gold or "JOIN" in gold for gold in golds)
    assert any("hired >= '2020-" in gold for gold in golds)


def test_a_row_is_named_by_a_text_of_its_own_and_not_by_a_code(tmp_path: Path) -> None:
    (tmp_path / "databases").mkdir()
    letters = [f"{first}{second}ium" for first in "ABCDEFGH" for second in "aeiou"]
    rows = [(i, f"X-{i:03}", text, 7.0 * i % 50) for i, text in enumerate(letters)]
    films = [(i, text if i else "Unknown", 50 + i) for i, text in enumerate(letters)]
    script = (
        "CREATE TABLE Metals (atomic_number INTEGER PRIMARY KEY, batch TEXT, element TEXT, density REAL);"
        "CREATE TABLE Films (film_id INTEGER PRIMARY KEY, title TEXT, minutes INTEGER);"
    )
    sqlite_file(tmp_path / "databases" / "lab.sqlite", script, {"Metals": rows, "Films": films})
    make_questions(tmp_path / "databases", tmp_path / "questions", question_sets=SMALL_SETS)
    text = "\n".join(row["question"] for rows in read(tmp_path / "questions").values() for row in rows)
    assert "the element of" in text and "the title of" in text
    assert "whose element is" in text and "whose batch is" not in text and "atomic_number" not in text


def test_a_person_in_several_rows_is_named_by_the_key(tmp_path: Path) -> None:
    (tmp_path / "databases").mkdir()
    people = [(f"p{i}", f"First{i % 9}", f"Last{i % 7}", 1900 + i) for i in range(60)]
    prizes = [(f"p{i % 40}", ("Gold", "Silver", "Bronze")[i % 3]) for i in range(120)]
    script = (
        "CREATE TABLE People (playerID TEXT PRIMARY KEY, nameFirst TEXT, nameLast TEXT, birthYear INTEGER);"
        "CREATE TABLE Prizes (playerID TEXT REFERENCES People (playerID), medal TEXT);"
    )
    sqlite_file(tmp_path / "databases" / "sport.sqlite", script, {"People": people, "Prizes": prizes})
    make_questions(tmp_path / "databases", tmp_path / "questions", question_sets=SMALL_SETS)
    text = "\n".join(row["question"] for rows in read(tmp_path / "questions").values() for row in rows)
    assert "prizes whose player's birth year is" in text and "prizes whose birth year" not in text
    assert "the last name of" in text and "playerID" not in text


@pytest.mark.parametrize(("key", "is_asked"), [("employee_id", True), ("manager_id", False)])
def test_rows_without_a_partner_are_asked_about_only_by_their_own_noun(
    tmp_path: Path, key: str, is_asked: bool
) -> None:
    script = (
        "CREATE TABLE employees (id INTEGER PRIMARY KEY, name TEXT);"
        f"CREATE TABLE departments (id INTEGER PRIMARY KEY, title TEXT, {key} INTEGER REFERENCES employees);"
    )
    people = [(i, f"Ann {chr(97 + i)}") for i in range(20)]
    departments = [(i, f"Team {chr(97 + i)}", i % 3) for i in range(9)]
    rows = {"employees": people, "departments": departments}
    file = sqlite_file(tmp_path / "firm.sqlite", script, rows)
    sets = [QuestionSet("train", "train", 80, 0, "any")]
    make_questions(file, tmp_path / "questions", question_sets=sets)
    golds = [row["gold_sql"] for row in read(tmp_path / "questions")["train"]]
    assert any("NOT EXISTS" in gold for gold in golds) == is_asked
    assert any("GROUP BY" in gold and "JOIN" in gold for gold in golds)


@pytest.mark.parametrize("engine", but_first_thorough(["sqlite", "duckdb"]))
def test_codes_are_compared_counted_and_never_added(tmp_path: Path, engine: str) -> None:
    (tmp_path / "databases").mkdir()
    codes = (200, 200, 301, 404, 503)
    rows = [
        f"({i}, {codes[i % 5]}, {i % 4 + 1}, {1500 + i % 3}, {i * 37}, '{'POST' if i % 3 else 'GET'}', "
        f"{i % 7 > 3:d}, {i % 5 > 1:d}, {i // 2}, {1600000000 + 977 * i})"
        for i in range(90)
    ]
    script = (
        "CREATE TABLE requests (id INTEGER PRIMARY KEY, status_code INTEGER, priority INTEGER, "
        "order_year INTEGER, bytes_sent INTEGER, method VARCHAR, is_bot INTEGER, "
        "attempt INTEGER, parent INTEGER, seen_epoch INTEGER);"
        f"INSERT INTO requests VALUES {', '.join(rows)};"
    )
    make = {"sqlite": sqlite_file, "duckdb": duckdb_file}[engine]
    make(tmp_path / "databases" / f"web.{engine}", script)
    make_questions(tmp_path / "databases", tmp_path / "questions", question_sets=SMALL_SETS)
    made = [row for rows in read(tmp_path / "questions").values() for row in rows]
    golds = "\n".join(row["gold_sql"] for row in made)
    assert re.search(r"status_code = (200|301|404|503)\b", golds) and "priority = " in golds
    assert any("whose status code is 404" in row["question"] for row in made)
    assert "GROUP BY status_code" in golds and "COUNT(DISTINCT priority)" in golds
    assert "order_year = " not in golds and "attempt = " not in golds  # 0 and 1 may mean anything
    flags = [row for row in made if "whose bot flag is false" in row["question"]]
    assert flags and all("is_bot = 0" in row["gold_sql"] for row in flags)
    codes_only = "(status_code|priority|parent|seen_epoch)"
    assert not re.search(rf"(AVG|SUM|MAX|MIN)\({codes_only}\)|{codes_only} [<>]", golds)


@pytest.mark.parametrize(("n_columns", "are_flags"), [(4, False), (5, True)])
def test_many_columns_of_0_and_1_are_true_or_false(tmp_path: Path, n_columns: int, are_flags: bool) -> None:
    things = ["barn", "beach", "bridge", "cabin", "river"][:n_columns]
    columns = ", ".join(f"{thing} INTEGER" for thing in things)
    rows = [
        f"({i}, 'Meadow {i}', {', '.join(str((i >> n) % 2) for n in range(n_columns))})" for i in range(90)
    ]
    script = f"CREATE TABLE painting (id INTEGER PRIMARY KEY, title VARCHAR, {columns});"
    sqlite_file(
        tmp_path / "databases" / "art.sqlite", f"{script}INSERT INTO painting VALUES {', '.join(rows)};"
    )
    make_questions(tmp_path / "databases", tmp_path / "questions", question_sets=SMALL_SETS)
    made = [row for rows in read(tmp_path / "questions").values() for row in rows]
    barns = [row for row in made if "barn" in row["gold_sql"]]
    asked = [row for row in barns if "barn flag is true" in row["question"]]
    assert all("barn = 1" in row["gold_sql"] for row in asked)
    assert (bool(asked), bool(barns)) == (are_flags, are_flags)


def test_templates_beside_the_databases_replace_the_packages(shop: Path, tmp_path: Path) -> None:
    phrases = [f"Number of {{rows}}, please{mark}" for mark in "?!."]
    one = {"difficulty": "easy", "slots": [], "sql": "SELECT COUNT(*) FROM {table}", "phrases": phrases}
    (tmp_path / "templates.yaml").write_text(json.dumps({"shared": {}, "templates": {"count_rows": one}}))

    make_questions(shop, tmp_path / "questions", question_sets=SMALL_SETS)

    rows = [row for rows in read(tmp_path / "questions").values() for row in rows]
    assert rows and {row["template"] for row in rows} == {"count_rows"}


@pytest.mark.parametrize("text", ["- name: page", "templates: 3", "a: [", "templates: {count: {}}"])
def test_a_file_of_other_templates_beside_the_databases_is_named(
    shop: Path, tmp_path: Path, text: str
) -> None:
    (tmp_path / "templates.yaml").write_text(text)
    with pytest.raises(DataError, match=r"templates of questions: .*templates\.yaml"):
        make_questions(shop, tmp_path / "questions", question_sets=SMALL_SETS)


def test_rows_of_a_relative_folder_are_not_taken_for_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop").mkdir()
    rows = [{"id": n, "name": f"Person {n}", "age": 20 + n} for n in range(20)]
    (tmp_path / "shop" / "shop.json").write_text(json.dumps(rows))
    monkeypatch.chdir(tmp_path)
    made = make_questions(Path("shop"), tmp_path / "questions", question_sets=TINY_SETS)
    assert made.n_questions


def test_a_phrase_shows_the_value_of_a_look_up_in_any_slot(shop: Path, tmp_path: Path) -> None:
    phrases = [f"Number of {{rows}} {{where}}, that is for {{value}}{mark}" for mark in "?!."]
    sql = "SELECT COUNT(*) FROM {table} WHERE {where}"
    one = {"difficulty": "easy", "slots": ["amount", "said"], "sql": sql, "phrases": phrases}
    (tmp_path / "templates.yaml").write_text(json.dumps({"shared": {}, "templates": {"lookup_two": one}}))

    make_questions(shop, tmp_path / "questions", question_sets=TINY_SETS)

    rows = [row for rows in read(tmp_path / "questions").values() for row in rows]
    shown = [row["question"].partition(", that is for ")[2][:-1] for row in rows]
    assert rows and all(f"= '{said}'" in row["guess_sql"] for said, row in zip(shown, rows, strict=True))


def test_no_databases_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no databases .*: give a folder of \.sqlite"):
        make_questions(tmp_path, tmp_path / "questions")


@pytest.mark.parametrize("kind", but_first_thorough(["duckdb", "postgresql", "csv"]))
def test_questions_for_other_engines_hold_there(
    kind: str,
    shop: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = ORDERS.replace("Customers", '"Customers"').replace(" REAL", " DOUBLE PRECISION")
    script = script.replace("unitPrice", '"unitPrice"').replace("placed TEXT", "placed DATE, is_paid BOOLEAN")
    with closing(sqlite3.connect(shop / "shop.sqlite")) as connection:
        clients = connection.execute("SELECT * FROM Customers").fetchall()
        orders = [(*row, row[0] % 2 == 0) for row in connection.execute('SELECT * FROM "order"')]
    where: Path | str = tmp_path / "shop.duckdb"
    if kind == "duckdb":
        with duckdb.connect(str(where)) as database:
            database.execute(script)
            database.executemany('INSERT INTO "Customers" VALUES (?, ?, ?, ?)', clients)
            database.executemany('INSERT INTO "order" VALUES (?, ?, ?, ?, ?, ?, ?)', orders)
    elif kind == "csv":
        where = tmp_path / "shop"
        where.mkdir()
        for name, header, rows in (
            ("Customers", "id,name,home town,age", clients),
            ("order", "id,customer_id,status,seller,unitPrice,placed,is_paid", orders),
        ):
            with (where / f"{name}.csv").open("w", newline="") as file:
                csv.writer(file).writerows([header.split(","), *rows])
    else:
        server = request.getfixturevalue("postgres_server")
        with psycopg.connect(server.admin_url(), autocommit=True) as admin:
            admin.execute("CREATE DATABASE made")
        with psycopg.connect(server.admin_url("made")) as admin, admin.cursor() as cursor:
            cursor.execute("CREATE SCHEMA sales; SET search_path = sales, public")
            cursor.execute(script.replace('"order"', 'sales."order"'))
            cursor.executemany('INSERT INTO "Customers" VALUES (%s, %s, %s, %s)', clients)
            cursor.executemany('INSERT INTO "order" VALUES (%s, %s, %s, %s, %s, %s, %s)', orders)
            cursor.execute(restricted_role_sql("maker", "of it", "made", schemas=["sales", "public"]))
        monkeypatch.setenv("PGPASSWORD", "of it")
        where = server.url("maker", "", "made").replace(":@", "@")
    sets = [QuestionSet("train", "train", 120, 0.2, "any")]
    make_questions(where, tmp_path / "questions", question_sets=sets)
    (rows,) = read(tmp_path / "questions").values()
    named = Databases(where)
    address, golds = named.address(named.names()[0]), [row["gold_sql"] for row in rows]
    with SQLExecutor() as executor:
        outcomes = executor.execute_many([(address, gold) for gold in golds])
    assert len(rows) == 120 and all(outcome.is_ok and outcome.rows for outcome in outcomes)
    text = " ".join(golds)
    assert "ORDER BY" in text and "NULLS" not in text  # unusual SQL for the lowest value
    flags = [row for row in rows if "paid flag is " in row["question"]]
    assert flags and all(re.search("is_paid = (TRUE|FALSE)", row["gold_sql"]) for row in flags)
    if kind == "postgresql":
        assert 'FROM sales."order"' in text and 'sales."Customers"' in text and '"unitPrice"' in text
    else:
        assert 'FROM "order"' in text and "unitPrice" in text and "sales" not in text
    assert "look_sql" in {key for row in rows for key in row}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"tables": {"client": "client"}}, r"unknown tables or columns of .*: \['client'\]"),
        ({"said": {"order.state": {"A": "b"}}}, r"unknown tables or columns of .*: \['order\.state'\]"),
        (
            {"said": {"order.status": {"ON_HOLD": "on_hold", "NOT_PAID": "unpaid"}}},
            "said forms must be distinct and not the stored ones",
        ),
        ({"said": {"order.status": {"ON_HOLD": "open", "NOT_PAID": "Open"}}}, "distinct"),
        ({"said": {"order.status": {"ON_HOLD": True}}}, "said.order.status.ON_HOLD must be a valid string"),
        ({"said": {"order.status": ["ON_HOLD"]}}, "said.order.status must be a mapping"),
        ({"clauses": {"order.id": ["of {id}"]}}, r"clauses.order.id: 'of \{id\}' must hold \{\} once"),
        ({"clauses": {"order.id": ["of a number"]}}, r"must hold \{\} once"),
        ({"clauses": {"order.id": "of {}"}}, "clauses.order.id must be a list"),
        ({"columns": {"order.id": 3}}, "columns.order.id must be a valid string, got 3"),
        ({"columns": {"order.id": " "}}, "columns.order.id String should have at least"),
        ({"tables": {"order": ""}}, "tables.order String should have at least"),
        ({"columns": None}, "columns must be a mapping, got None"),
        ({"tabels": {}}, "unknown key tabels: did you mean tables"),
        ({"split": "training"}, "split must be 'train', 'dev' or 'test'"),
        (["order"], "words must be a mapping"),
    ],
)
def test_words_that_do_not_fit_the_database_are_refused(shop: Path, words: Any, message: str) -> None:
    (shop / "shop.json").write_text(json.dumps(words), encoding="utf-8")
    with pytest.raises(DataError, match=message), SQLExecutor() as executor:
        file = shop / "shop.json"
        with_words(Profile(executor, shop / "shop.sqlite"), "shop", read_words(file), place=file)


def test_words_for_values_that_no_row_holds_are_named(shop: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = {"order.status": {"ON_HOLT": "on hold", "SENT_BACK": "sent back", "NOT_PAID": "unpaid"}}
    (shop / "shop.yaml").write_text(json.dumps({"said": words}), encoding="utf-8")
    with SQLExecutor() as executor:
        profile = Profile(executor, shop / "shop.sqlite")
        database = with_words(profile, "shop", read_words(shop / "shop.yaml"), place="shop.yaml")
    assert "order.status: no row that was read holds ['ON_HOLT']" in caplog.text
    (status,) = (each for each in database.tables["order"].columns if each.name == "status")
    assert status.said == {"SENT_BACK": "sent back", "NOT_PAID": "unpaid"}


def test_a_given_word_changes_what_is_asked_only_where_the_name_is_not_english(shop: Path) -> None:
    with closing(sqlite3.connect(shop / "shop.sqlite")) as connection:
        connection.executescript(
            "ALTER TABLE Customers RENAME COLUMN name TO customer;"
            "ALTER TABLE Customers ADD umsatz INTEGER; UPDATE Customers SET umsatz = age * age;"
        )
    columns = {"age": "grade", "home town": "telephone", "customer": "client code", "umsatz": "pay"}
    given = Words(tables={"Customers": "client"}, columns={f"Customers.{k}": v for k, v in columns.items()})
    with SQLExecutor() as executor:
        profile = Profile(executor, shop / "shop.sqlite")
        bare, worded = (with_words(profile, "shop", words, place="") for words in (Words(), given))
    before = {one.name: one.roles for one in bare.tables["Customers"].columns}
    after = {one.name: (one.noun, one.roles) for one in worded.tables["Customers"].columns}
    for name in ("age", "home town", "customer"):
        assert after[name] == (columns[name], before[name]) and before[name]
    assert before["umsatz"] == {"detail"} and "measure" in after["umsatz"][1]


def nouns_and_roles(
    tmp_path: Path, tables: dict[str, str]
) -> tuple[dict[str, str], dict[str, frozenset[str]]]:
    """Nouns by table and column, and roles by column, of tables that are selected for i = 1 .. 60."""
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 60)"
    script = (
        f'CREATE TABLE "{name}" AS {numbers} SELECT {columns} FROM n;' for name, columns in tables.items()
    )
    file = sqlite_file(tmp_path / "any.sqlite", "".join(script))
    with SQLExecutor() as executor:
        found = with_words(Profile(executor, file), "any", Words(), place="").tables
    columns = [column for table in found.values() for column in table.columns]
    nouns = {name: table.noun for name, table in found.items()} | {one.name: one.noun for one in columns}
    return nouns, {one.name: one.roles for one in columns}


DAY = "date('2020-01-01', i || ' days')"


def test_keys_codes_and_moments_are_no_measures(tmp_path: Path) -> None:
    tables = {
        "trips": "i AS id, 1000 + i % 7 AS from_stop_id, i % 7 + 1 AS hates_key, i % 3 + 1 AS ShipVia, "
        "i % 9 + 1 AS second_pilot, i * 991 AS cik, i * 7 AS country_iso, i * 7 % 50 AS wounds, "
        "i * 1.5 AS gpf, i - 30 AS dep_delay, 1600000000000 + i * 86400123 AS created_ms, "
        "i * 2.5 AS latency_ms, i * 3.5 AS balance_after, i * 4.5 AS opening_balance",
        "pilots": "i AS id, 'P' || char(96 + i % 26) || char(97 + i / 26) AS name",
    }
    nouns, roles = nouns_and_roles(tmp_path, tables)
    assert not {"from_stop_id", "hates_key"} & set(nouns)
    measures = {"wounds", "gpf", "dep_delay", "latency_ms", "balance_after", "opening_balance"}
    assert {name for name, found in roles.items() if "measure" in found} == measures
    assert not any("sum" in found for found in roles.values())


@pytest.mark.parametrize(
    ("tables", "nouns"),
    [
        (
            {"raw_materials": "i / 2.0 AS old_price, i / 3.0 AS price, i / 4.0 AS base_pay, i AS src_port"},
            ["raw material", "old price", "price", "base pay", '"src_port"'],
        ),
        (
            {
                "raw_stores": "i / 2.0 AS qty, i / 3.0 AS quantity, i AS tax, i AS store_tax",
                "raw_items": "i / 2.0 AS price_each",
            },
            ["store", "item", '"qty"', '"quantity"', "tax", "store tax", '"price_each"'],
        ),
        (
            {"penguins-raw": f'{DAY} AS year, {DAY} AS birth_month, {DAY} AS "Date Egg"'},
            ["penguin", "date", '"birth_month"', '"Date Egg"'],
        ),
        (
            {"orders": f"{DAY} AS OrderDate, {DAY} AS shippedDate", "sales": f"{DAY} AS sales_date"},
            ["order", "sales", "order date", "shipped date", "date"],
        ),
        (
            {one: "i / 2.0 AS size" for one in ("player_stats", "bases", "axes", "crimea", "driving")},
            ["player stat", "base", "axis", '"crimea" row', '"driving" row', "size"],
        ),
    ],
)
def test_no_word_of_a_name_is_lost(tmp_path: Path, tables: dict[str, str], nouns: list[str]) -> None:
    assert list(nouns_and_roles(tmp_path, tables)[0].values()) == nouns


def test_a_name_that_many_rows_share_names_none(tmp_path: Path) -> None:
    name = "char(97 + i % 20) || 'o' || char(97 + i % 8)"
    columns = f"i AS id, 'Study ' || char(97 + i % 3) AS study_name, {name} AS last_name"
    _, roles = nouns_and_roles(tmp_path, {"penguins": columns})
    assert [name for name, found in roles.items() if "label" in found] == ["last_name"]


def test_a_database_without_rows_gives_no_question(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "bare.sqlite")) as connection:
        connection.execute("CREATE TABLE sale (id INTEGER PRIMARY KEY, price REAL)")
        connection.execute("CREATE VIEW cheap AS SELECT id FROM sale WHERE price < 1")
    with pytest.raises(DataError, match="question can be made of bare: sale: no rows, cheap: views are not"):
        make_questions(tmp_path, tmp_path / "made")


def test_views_are_named_as_not_asked_about(shop: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(shop / "shop.sqlite")) as connection:
        connection.execute("CREATE VIEW grown AS SELECT age FROM Customers WHERE age > 17")
    made = make_questions(shop, tmp_path / "made")
    assert [one.table for one in made.tables if one.n_rows is None] == ["grown"]
    assert not made.lacks


def test_given_words_replace_derived_ones(shop: Path, tmp_path: Path) -> None:
    words = {
        "tables": {"order": "purchase"},
        "columns": {"order.status": "state"},
        "said": {"order.status": {state: f"said {state[:2]}" for state in STATES}},
    }
    (shop / "shop.json").write_text(json.dumps(words), encoding="utf-8")
    make_questions(shop, tmp_path / "questions", question_sets=TINY_SETS)
    rows = [
        row for rows in read(tmp_path / "questions").values() for row in rows if row["family"] == "lookup"
    ]
    assert {row["look_sql"] for row in rows} == {'SELECT DISTINCT status FROM "order"'}
    assert all(" state" in row["question"] and "said " in row["question"] for row in rows)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("own", "said"), [({}, "whose floor is "), ({"room.floor": ["on floor {}"]}, "on floor ")]
)
def test_given_phrases_of_values_stand_next_to_conditions_on_numbers(
    tmp_path: Path, own: dict[str, list[str]], said: str
) -> None:
    file = tmp_path / "inn.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(
            "CREATE TABLE room (id INTEGER PRIMARY KEY, state TEXT, floor INTEGER, beds INTEGER)"
        )
        rooms = [(i, "AV"[i % 2], i % 5, i % 3 + 1) for i in range(60)]
        connection.executemany("INSERT INTO room VALUES (?, ?, ?, ?)", rooms)
        connection.commit()
    clauses = {"taken": ["that are taken"], "free": ["that are free"]}
    words = {
        "said": {"room.state": {"A": "taken", "V": "free"}},
        "clauses": {"room.state": clauses, **own},
    }
    (tmp_path / "inn.json").write_text(json.dumps(words), encoding="utf-8")
    make_questions(tmp_path, tmp_path / "questions", question_sets=SMALL_SETS)
    asked = [row["question"] for rows in read(tmp_path / "questions").values() for row in rows]
    assert any("that are taken and " + said in text for text in asked)
    assert any("rooms whose floor is 2" in text for text in asked) is not bool(own)


# --- the bundled questions ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundled() -> dict[str, list[Row]]:
    sets = read(DATA / "questions")
    return {question_set.name: sets[question_set.name] for question_set in QUESTION_SETS}


@pytest.fixture(scope="module")
def connections(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, sqlite3.Connection]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        databases = Databases(DATA / "databases")
        opened = {
            name: sqlite3.connect(f"{databases.address(name).as_uri()}?mode=ro", uri=True)
            for name in databases.names()
        }
    yield opened
    for connection in opened.values():
        connection.close()


def all_rows(sets: dict[str, list[Row]]) -> list[Row]:
    return [row for rows in sets.values() for row in rows]


@pytest.mark.thorough
def test_the_bundled_files_are_made_byte_for_byte(bundled: dict[str, list[Row]], tmp_path: Path) -> None:
    make_questions(DATA / "databases", tmp_path / "questions")
    made = sorted((tmp_path / "questions").glob("*.jsonl"))
    assert [file.stem for file in made] == sorted(bundled)
    for file in made:
        assert file.read_bytes() == (DATA / "questions" / file.name).read_bytes(), file.name


def test_sizes_and_look_up_shares(bundled: dict[str, list[Row]]) -> None:
    expected = {
        "demonstrations": (6000, 0.45),
        "train": (3000, 0.45),
        "dev": (300, 0.4),
        "test_values": (300, 0.4),
        "test_templates": (300, 0.4),
        "test_databases": (400, 0.4),
    }
    assert set(bundled) == set(expected)
    for name, (count, share) in expected.items():
        rows = bundled[name]
        assert len(rows) == count
        assert sum(row["family"] == "lookup" for row in rows) >= share * count
        assert [row["id"] for row in rows] == [f"{name}-{number:05}" for number in range(count)]
        assert {row["split"] for row in rows} == {name}


def test_every_gold_runs_fast_and_returns_something(
    bundled: dict[str, list[Row]], connections: dict[str, sqlite3.Connection]
) -> None:
    for row in all_rows(bundled):
        taken = []
        for _ in range(5):
            start = time.perf_counter()
            result = connections[row["database"]].execute(row["gold_sql"]).fetchall()
            taken.append(time.perf_counter() - start)
            if taken[-1] < 0.05:
                break
        assert min(taken) < 0.05, row
        assert 1 <= len(result) <= 50, row
        assert result not in ([(None,)], [(0,)]), row


def test_golds_do_not_depend_on_the_order_of_rows(
    bundled: dict[str, list[Row]], connections: dict[str, sqlite3.Connection]
) -> None:
    golds = {(row["database"], row["gold_sql"]) for row in all_rows(bundled)}
    for database, gold in golds:
        connection = connections[database]
        if "ORDER BY" in gold:  # ties, if there were any, now fall out in opposite ways
            variants = [gold.replace(" LIMIT", f", rowid{way} LIMIT") for way in ("", " DESC")]
            assert gold not in variants
            forward, backward = (connection.execute(sql).fetchall() for sql in variants)
        else:
            forward = sorted(connection.execute(gold).fetchall(), key=repr)
            connection.execute("PRAGMA reverse_unordered_selects = ON")
            backward = sorted(connection.execute(gold).fetchall(), key=repr)
            connection.execute("PRAGMA reverse_unordered_selects = OFF")
        for left, right in zip(forward, backward, strict=True):
            assert [*map(_rounded, left)] == [*map(_rounded, right)], gold


def _rounded(cell: Any) -> Any:
    """Sums of floats depend on their order in the last digits."""
    return f"{cell:.9g}" if isinstance(cell, float) else cell


def test_look_ups_need_the_look(
    bundled: dict[str, list[Row]], connections: dict[str, sqlite3.Connection]
) -> None:
    lookups = [row for row in all_rows(bundled) if row["family"] == "lookup"]
    assert all(("look_sql" in row) == (row["family"] == "lookup") for row in all_rows(bundled))
    for row in lookups:
        connection = connections[row["database"]]
        shown = connection.execute(row["look_sql"]).fetchall()
        assert len(shown) <= 24
        stored = [value for (value,) in shown if _asks_for(row["gold_sql"], value)]
        assert len(stored) == 1, row
        assert not _asks_for(row["guess_sql"], stored[0]), row
        assert not re.search(rf"(?<!\w){re.escape(str(stored[0]))}(?!\w)", row["question"]), row
        gold, guess = (Counter(connection.execute(row[key]).fetchall()) for key in ("gold_sql", "guess_sql"))
        assert gold != guess, row


def _asks_for(sql: str, value: Any) -> bool:
    """True if a query has the condition `= value`."""
    written = "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)
    condition = f"= {written}"
    return condition in sql and bool(re.search(rf"{re.escape(condition)}(?![\w.])", sql))


def test_checks_show_a_value_stored_as_said(
    bundled: dict[str, list[Row]], connections: dict[str, sqlite3.Connection]
) -> None:
    checked = [row for row in all_rows(bundled) if "check_sql" in row]
    assert {row["family"] for row in checked} == {"filter", "join"}
    assert {
        row["template"] for row in all_rows(bundled) if " = '" in row["gold_sql"] and "look_sql" not in row
    } >= {row["template"] for row in checked}
    for row in checked:
        shown = connections[row["database"]].execute(row["check_sql"]).fetchall()
        assert 1 <= len(shown) <= 24
        assert any(_asks_for(row["gold_sql"], value) and value in row["question"] for (value,) in shown), row


def test_questions_are_unique_and_files_share_neither_questions_nor_golds(
    bundled: dict[str, list[Row]],
) -> None:
    owners = defaultdict(set)
    for row in all_rows(bundled):
        owners[row["gold_sql"]].add(row["split"])
    assert all(len(splits) == 1 for splits in owners.values())
    questions = Counter(row["question"] for row in all_rows(bundled))
    assert questions.most_common(1)[0][1] == 1
    for row in all_rows(bundled):
        assert row["question"][0].isupper() and row["question"][-1] in "?." and "{" not in row["question"]


def test_databases_and_templates_are_held_out(bundled: dict[str, list[Row]]) -> None:
    splits = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))["split"]
        for path in (DATA / "databases").glob("*.json")
    }
    for question_set in QUESTION_SETS:
        rows = bundled[question_set.name]
        wanted = {name for name, split in splits.items() if split == question_set.databases}
        assert {row["database"] for row in rows} == wanted
        templates = {row["template"] for row in rows}
        if question_set.name == "test_templates":
            assert templates == HELD_OUT
        else:
            assert not templates & HELD_OUT
    held_out_families = Counter(name.partition("_")[0] for name in HELD_OUT)
    assert held_out_families["lookup"] >= 2 and len(held_out_families) >= 6


def test_files_are_balanced(bundled: dict[str, list[Row]]) -> None:
    for name, rows in bundled.items():
        databases = Counter(row["database"] for row in rows)
        assert max(databases.values()) <= 3.5 * min(databases.values()), (name, databases)
    weights = {template.name: template.weight for template in TEMPLATES}
    for name in ("demonstrations", "train", "dev", "test_databases"):
        templates = Counter(row["template"] for row in bundled[name] if row["family"] == "lookup")
        shares = [count / weights[template] for template, count in templates.items()]
        assert max(shares) <= 1.5 * min(shares), (name, templates)
