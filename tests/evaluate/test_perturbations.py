"""Questions in other forms: what changes, what stays, and that no database of the user is touched."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.databases import duckdb_file, sqlite_file
from tests.tiny_model import write_model
from text2sql_grpo.commands import main
from text2sql_grpo.config import Config, DataConfig, EnvironmentConfig, ModelConfig, dump_config
from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.bench import Bench
from text2sql_grpo.evaluation.perturbations import (
    DuckDBCopies,
    Perturbed,
    SQLiteCopies,
    check_perturbations,
    copies_of,
    perturbed,
)

STAFF = """CREATE TABLE city (id INTEGER PRIMARY KEY, name TEXT, country TEXT);
CREATE TABLE staff (id INTEGER PRIMARY KEY, name TEXT, salary INTEGER, city_id INTEGER REFERENCES city(id));
CREATE VIEW paid AS SELECT name, salary FROM staff;"""
SHOP = "CREATE TABLE item (code TEXT, price REAL); CREATE TABLE label (code TEXT, colour TEXT);"
QUESTIONS = [
    ("a", "Which salaries does Miriam get?", "SELECT salary FROM staff WHERE name = 'Miriam'"),
    (
        "b",
        "People by country, please.",
        "SELECT c.country, count(*) FROM staff s JOIN city c ON s.city_id = c.id "
        "GROUP BY c.country ORDER BY c.country",
    ),
    (
        "c",
        "Names of both kinds?",
        "SELECT name FROM staff JOIN city USING (name) UNION SELECT name FROM paid",
    ),
    ("d", "Total salary?", "SELECT sum(salary) AS salary FROM staff ORDER BY salary"),
    ("e", "Who?", "SELECT name FROM city"),
]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    folder = tmp_path / "databases"
    folder.mkdir()
    people = [(1, "Miriam", 10, 1), (2, "Otto", 20, 2), (3, "Ida", 30, 1)]
    cities = [(1, "Rome", "Italy"), (2, "Oslo", "Norway")]
    sqlite_file(folder / "staff.sqlite", STAFF, {"city": cities, "staff": people})
    sqlite_file(folder / "shop.sqlite", SHOP, {"item": [("x", 1.5)] * 30})
    rows = [{"id": i, "database": "staff", "question": q, "gold_sql": sql} for i, q, sql in QUESTIONS]
    rows.append({"id": "f", "database": "shop", "question": "Prices?", "gold_sql": "SELECT price FROM item"})
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Config(
        model=ModelConfig(path=str(tmp_path / "model")),
        data=DataConfig(
            databases=folder, train=tmp_path / "train.jsonl", test={"held": tmp_path / "questions.jsonl"}
        ),
        environment=EnvironmentConfig(max_turns=2, max_turn_tokens=8, max_episode_tokens=32),
    )


@pytest.fixture
def bench(config: Config) -> Iterator[Bench]:
    with Bench.open(config) as bench:
        yield bench


def changed(kind: Any, bench: Bench, folder: Path) -> Perturbed:
    def contents() -> dict[str, str]:
        return {path.name: sha256(path.read_bytes()).hexdigest() for path in files.iterdir()}

    files = Path(str(bench.config.data.databases))
    before = contents()
    copies = folder / kind
    copies.mkdir()
    found = perturbed(kind, bench, bench.test, folder=copies, seed=1)
    assert contents() == before
    return found


def schemas(form: Perturbed) -> str:
    return "\n".join(form.environment.sessions.schema_text(name) for name in ("shop", "staff"))


def test_another_order_shows_the_same_columns(bench: Bench, tmp_path: Path) -> None:
    form, plain = changed("order", bench, tmp_path), bench.environment
    with form.environment:
        text, known = form.environment.sessions.schema_text("staff"), plain.sessions.schema_text("staff")
        assert text != known
        assert sorted(text.replace(",", " ").split()) == sorted(known.replace(",", " ").split())
        assert form.sets == bench.test


def test_shorter_names_hold_in_the_schema_and_in_each_gold(bench: Bench, tmp_path: Path) -> None:
    form = changed("rename", bench, tmp_path)
    with form.environment as environment:
        assert "slry" in schemas(form) and "salary" not in schemas(form).replace("paid", "")
        golds = {one.id: one.gold_sql for one in form.sets["held"]}
        assert golds["a"] == """SELECT "slry" FROM staff WHERE "nm" = 'Miriam'"""
        assert golds.keys() == {"a", "b", "c", "e", "f"} and form.left_out == 1  # an alias hides its column
        for example in form.sets["held"]:
            first = environment.executor.execute(
                environment.databases.address(example.database), example.gold_sql
            )
            plain = next(one for one in bench.test["held"] if one.id == example.id)
            address = bench.environment.databases.address(example.database)
            assert (
                first.is_ok and first.rows == bench.environment.executor.execute(address, plain.gold_sql).rows
            )


def test_shorter_names_show_nothing_hidden(config: Config, tmp_path: Path) -> None:
    rows = {"client": [(1, "Rome", "ida@example.com", 10)]}
    script = "CREATE TABLE client (id INTEGER, country TEXT, email TEXT, salary INTEGER)"
    sqlite_file(Path(str(config.data.databases)) / "shop.sqlite", script, rows)
    data = replace(config.data, hide=["personal", "client.salary"])
    with Bench.open(replace(config, data=data)) as bench:
        form = changed("rename", bench, tmp_path)
    with form.environment as environment:
        text = environment.sessions.schema_text("shop")
        assert "cntry" in text and not [name for name in ("eml", "email", "salary", "slry") if name in text]
        assert "ida@" not in str(environment.sessions.guarded("shop").run("SELECT * FROM client").rows)


def test_tables_of_another_database_are_added(bench: Bench, tmp_path: Path) -> None:
    form = changed("distractors", bench, tmp_path)
    with form.environment:
        assert {"item", "label"} <= set(
            form.environment.sessions.schema_text("staff").replace("(", " ").split()
        )
        with closing(sqlite3.connect(tmp_path / "distractors" / "staff.sqlite")) as connection:
            assert connection.execute("SELECT count(*) FROM item").fetchone() == (20,)
        assert form.sets == bench.test


def test_a_typo_spares_the_values_and_a_phrasing_keeps_the_question(bench: Bench, tmp_path: Path) -> None:
    form = changed("typos", bench, tmp_path)
    form.environment.close()
    typos = {one.id: one.question for one in form.sets["held"]}
    assert "Miriam" in typos["a"] and typos["a"] != QUESTIONS[0][1]
    assert sorted(typos["a"]) == sorted(QUESTIONS[0][1])
    assert typos["e"] == "Who?"  # no word is long enough
    form = changed("phrasing", bench, tmp_path)
    form.environment.close()
    for plain, one in zip(bench.test["held"], form.sets["held"], strict=True):
        assert plain.question in one.question and plain.question != one.question


def test_no_schema_shows_none(bench: Bench, tmp_path: Path) -> None:
    form = changed("no_schema", bench, tmp_path)
    with form.environment:
        assert "salary" not in schemas(form)


def test_one_database_has_no_distractors(config: Config, tmp_path: Path) -> None:
    rows = (tmp_path / "questions.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "questions.jsonl").write_text("".join(rows[:-1]))
    with Bench.open(config) as bench, pytest.raises(DataError, match="there is only one"):
        check_perturbations(["order", "distractors"], bench, bench.held_out())


def test_the_verb_prints_what_each_form_costs(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model", max_positions=2048)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    argv = ["evaluate", "--model_path", str(model), "--config", str(tmp_path / "config.yaml")]
    argv += ["--out", str(tmp_path / "e.json"), "--perturb", "order", "rename"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "perturbed" in out
    record = json.loads((tmp_path / "e.json").read_text())
    assert (record["perturbed"]["rename"]["left_out"], record["perturbed"]["order"]["left_out"]) == (1, 0)
    assert record["perturbed"]["rename"]["neither"] == 5
    assert (
        record["questions_sha256"]["held"] == sha256((tmp_path / "questions.jsonl").read_bytes()).hexdigest()
    )
    assert len((tmp_path / "e-rename.jsonl").read_text().splitlines()) == 5


DUCKDB_STAFF = """CREATE TYPE mood AS ENUM ('good', 'bad'); CREATE SCHEMA sales;
CREATE TABLE city (id INTEGER PRIMARY KEY, name VARCHAR UNIQUE, country VARCHAR);
CREATE TABLE staff (id INTEGER PRIMARY KEY, name VARCHAR, salary INTEGER CHECK (salary > 0), feeling mood,
    doubled INTEGER GENERATED ALWAYS AS (salary * 2), city_id INTEGER REFERENCES city(id));
CREATE TABLE sales."Order Line" (id INTEGER, "unit price" DECIMAL(5, 2));
CREATE VIEW paid AS SELECT name, salary FROM staff;
INSERT INTO city VALUES (1, 'Rome', 'Italy'), (2, 'Oslo', 'Norway');
INSERT INTO staff (id, name, salary, feeling, city_id)
    VALUES (1, 'Miriam', 10, 'good', 1), (2, 'Otto', 20, 'bad', 2);
INSERT INTO sales."Order Line" VALUES (1, 2.5);"""
DUCKDB_SHOP = (
    "CREATE TABLE item (code VARCHAR, price DOUBLE); INSERT INTO item SELECT 'x', 1.5 FROM range(30);"
)


@pytest.fixture
def duckdb_bench(config: Config, tmp_path: Path) -> Iterator[Bench]:
    folder = tmp_path / "it's duckdb"
    folder.mkdir()
    duckdb_file(folder / "staff.duckdb", DUCKDB_STAFF)
    duckdb_file(folder / "shop.db", DUCKDB_SHOP)
    with Bench.open(replace(config, data=replace(config.data, databases=folder))) as bench:
        yield bench


@pytest.mark.thorough
def test_shorter_names_and_other_tables_on_duckdb(duckdb_bench: Bench, tmp_path: Path) -> None:
    golds = [
        "SELECT c.country, sum(s.doubled) FROM staff s JOIN city c ON s.city_id = c.id GROUP BY c.country",
        "SELECT strftime(DATE '2024-01-02', '%Y'), salary FROM paid WHERE name ILIKE 'mir%'",
        'SELECT "unit price" FROM sales."Order Line"',
    ]
    sets = {"held": [Example(f"q{i}", "staff", "?", gold) for i, gold in enumerate(golds)]}
    sets["held"].append(Example("q3", "shop", "?", "SELECT price FROM item"))
    for name in ("renamed", "added"):
        (tmp_path / name).mkdir()

    short = perturbed("rename", duckdb_bench, sets, folder=tmp_path / "renamed")
    assert short.left_out == 0
    schema = short.environment.sessions.hidden("staff").schema
    (staff,) = (table for table in schema.tables if table.name == "staff")
    assert [column.name for column in staff.columns] == ["id", "nm", "slry", "flng", "dbld", "cty_d"]
    assert [(key.columns, key.references) for key in staff.foreign_keys] == [(("cty_d",), ("id",))]
    assert '"slry"' in short.sets["held"][1].gold_sql

    more = perturbed("distractors", duckdb_bench, sets, folder=tmp_path / "added")
    schema = more.environment.sessions.hidden("staff").schema
    assert {table.name for table in schema.tables} == {"city", "staff", "Order Line", "item"}
    assert len([key for table in schema.tables for key in table.foreign_keys]) == 1
    assert more.sets == sets


def test_generated_columns_of_another_database_are_computed(tmp_path: Path) -> None:
    create = "CREATE TABLE sale (id INTEGER PRIMARY KEY, qty INTEGER, twice AS (2 * qty))"
    donor = sqlite_file(tmp_path / "a.sqlite", f"{create}; INSERT INTO sale (id, qty) VALUES (1, 4)")
    own = sqlite_file(tmp_path / "b.sqlite", "CREATE TABLE item (id INTEGER)")

    SQLiteCopies().with_tables_of(donor, own, tmp_path / "c.sqlite", Random(1))

    with closing(sqlite3.connect(tmp_path / "c.sqlite")) as connection:
        assert connection.execute("SELECT id, qty, twice FROM sale").fetchall() == [(1, 4, 8)]


def test_virtual_tables_and_what_is_broken_end_no_copy(tmp_path: Path) -> None:
    script = """CREATE TABLE doc (id INTEGER, title TEXT); CREATE VIRTUAL TABLE found USING fts5(title, body);
        CREATE TABLE gone (title TEXT); CREATE VIEW stale AS SELECT title FROM gone;
        CREATE VIEW titles AS SELECT title FROM doc; CREATE VIEW item AS SELECT 1 AS code;
        CREATE TRIGGER late AFTER INSERT ON doc BEGIN INSERT INTO gone VALUES (1); END;
        CREATE TRIGGER instead INSTEAD OF INSERT ON stale BEGIN SELECT 1; END; DROP TABLE gone"""
    own = sqlite_file(tmp_path / "own.sqlite", script)
    other = sqlite_file(
        tmp_path / "other.sqlite", f"{script.replace('doc', 'paper')}; DROP VIEW item; {SHOP}"
    )

    assert SQLiteCopies().renamed(own, tmp_path / "renamed.sqlite") == {"title": "ttl"}
    SQLiteCopies().with_tables_of(other, own, tmp_path / "added.sqlite", Random(1))

    with closing(sqlite3.connect(tmp_path / "renamed.sqlite")) as connection:
        for sql in ("SELECT ttl FROM doc", "SELECT ttl FROM titles", "SELECT title FROM found"):
            assert connection.execute(sql).fetchall() == []
    with closing(sqlite3.connect(tmp_path / "added.sqlite")) as connection:
        assert connection.execute("SELECT * FROM paper JOIN label").fetchall() == []
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes(b"SQLite format 3\0" + b"?" * 4_096)
    with pytest.raises(DataError, match=r"damaged\.sqlite"):
        SQLiteCopies().with_tables_of(damaged, own, tmp_path / "none.sqlite", Random(1))


@pytest.mark.parametrize("name", ["known", "donor", "target", "a.b"])
def test_a_duckdb_file_of_any_name_gets_tables_of_another(tmp_path: Path, name: str) -> None:
    duckdb = pytest.importorskip("duckdb", reason="needs the extra duckdb")
    duckdb_file(tmp_path / "shop.duckdb", "CREATE TABLE item (code VARCHAR, host AS (upper(code)))")
    duckdb_file(tmp_path / f"{name}_own.duckdb", "CREATE TABLE own (id INTEGER)")
    target = tmp_path / f"{name}.duckdb"

    DuckDBCopies().with_tables_of(
        tmp_path / "shop.duckdb", tmp_path / f"{name}_own.duckdb", target, Random(1)
    )

    with duckdb.connect(str(target)) as connection:
        tables = connection.execute("SELECT table_name FROM duckdb_tables() ORDER BY 1").fetchall()
        columns = connection.execute("SELECT column_name FROM duckdb_columns() WHERE NOT internal").fetchall()
    assert tables == [("item",), ("own",)]
    assert {name for (name,) in columns} == {"code", "id"}


def test_a_file_with_signs_of_a_uri_in_its_name_is_copied(tmp_path: Path) -> None:
    source = sqlite_file(tmp_path / "50%25 off?#1.sqlite", "CREATE TABLE sale (amount INTEGER)")

    assert SQLiteCopies().renamed(source, tmp_path / "short.sqlite") == {"amount": "amnt"}


def test_a_server_is_not_copied() -> None:
    with pytest.raises(
        DataError, match=r"--perturb rename copies files of SQLite and DuckDB, and 'shop' is on"
    ):
        copies_of("postgresql://reader@host/shop", "shop", "--perturb rename")
