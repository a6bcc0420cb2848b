import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from tests.postgres_server import PostgresServer
from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.names import quote_name
from text2sql_grpo.sql.schema import MAX_COUNTED_ROWS, Column, ForeignKey, Schema, read_schema
from text2sql_grpo.sql.schema_text import compact_text, ddl_text

psycopg = pytest.importorskip("psycopg", reason="needs the package psycopg")

CLINIC = """
CREATE TYPE mood AS ENUM ('calm', 'busy');
CREATE TABLE staff (id serial PRIMARY KEY, name varchar(20) NOT NULL, "Boss" integer REFERENCES staff,
  mood mood, papers jsonb, tags integer[], salary numeric(8, 2), seen timestamptz, is_chief boolean,
  photo bytea, number uuid, letter text);
COMMENT ON TABLE staff IS 'people who
work here';
COMMENT ON COLUMN staff.name IS 'as on the badge';
CREATE TABLE ward (hospital varchar, code varchar, PRIMARY KEY (hospital, code));
CREATE TABLE "Order" ("unit price" float, hospital varchar, code varchar, "user" integer,
  FOREIGN KEY (hospital, code) REFERENCES ward (hospital, code));
CREATE SCHEMA billing;
CREATE TABLE billing.bill (number integer PRIMARY KEY);
CREATE TABLE billing.line (bill integer REFERENCES billing.bill, total integer);
CREATE TABLE visit (day date, fee integer) PARTITION BY RANGE (day);
CREATE TABLE visit_2024 PARTITION OF visit FOR VALUES FROM ('2024-01-01') TO ('2025-01-01');
CREATE TABLE bare ();
CREATE VIEW chiefs AS SELECT id, name FROM staff WHERE "Boss" IS NULL;
COMMENT ON VIEW chiefs IS 'without a boss';
COMMENT ON COLUMN chiefs.id IS 'badge number';
CREATE MATERIALIZED VIEW frozen AS SELECT 1 AS one;
INSERT INTO staff (name, mood, papers, tags, salary, seen, is_chief, photo, number, letter) VALUES
  ('Ada', 'calm', '{}', '{1}', 12.50, '2024-01-05 10:00+02', true, 'x',
    '00000000-0000-0000-0000-000000000001', repeat('long', 20)),
  ('Bo O''Hara', 'busy', NULL, NULL, 'NaN', 'infinity', false, NULL, NULL, NULL);
INSERT INTO visit VALUES ('2024-03-04', 7);
"""


@pytest.fixture
def make(postgres_server: PostgresServer, request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Makes a database of the test's own and runs a script in it; its URL."""

    def _make(script: str) -> str:
        name = f"schema_{abs(hash(request.node.name)) % 10**9}"
        with psycopg.connect(postgres_server.admin_url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        request.addfinalizer(lambda: _drop(postgres_server, name))
        url = postgres_server.admin_url(name)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(script)
        return url

    return _make


def _drop(server: PostgresServer, name: str) -> None:
    with closing(psycopg.connect(server.admin_url(), autocommit=True)) as connection:
        connection.execute(f"DROP DATABASE {name}")


def table_of(schema: Schema, name: str) -> tuple[Column, ...]:
    return next(table.columns for table in schema.tables if table.name == name)


def test_tables_columns_keys_and_comments(make: Callable[[str], str]) -> None:
    schema = read_schema(make(CLINIC))
    staff, _, order, bill, line, visit, _ = schema.tables

    assert schema.dialect == "postgresql" and schema.name.startswith("schema_")
    assert [(table.namespace, table.name, table.n_rows) for table in schema.tables] == [
        ("", "staff", 2),
        ("", "ward", 0),
        ("", "Order", 0),
        ("billing", "bill", 0),
        ("billing", "line", 0),
        ("", "visit", 1),
        ("", "bare", 0),
    ]
    assert staff.comment == "people who work here"
    assert staff.columns[:3] == (
        Column("id", "integer", is_nullable=False, is_primary_key=True, examples=(1, 2)),
        Column("name", "character varying(20)", False, False, "as on the badge", ("Ada", "Bo O'Hara")),
        Column("Boss", "integer", is_nullable=True, is_primary_key=False),
    )
    assert staff.foreign_keys == (ForeignKey(("Boss",), "staff", ("id",)),)
    assert order.foreign_keys == (ForeignKey(("hospital", "code"), "ward", ("hospital", "code")),)
    assert line.foreign_keys == (ForeignKey(("bill",), "bill", ("number",), "billing"),)
    assert bill.columns[0].is_primary_key and [column.name for column in visit.columns] == ["day", "fee"]
    assert [(view.name, view.comment) for view in schema.views] == [
        ("chiefs", "without a boss"),
        ("frozen", ""),
    ]
    assert [(column.name, column.comment) for column in schema.views[0].columns] == [
        ("id", "badge number"),
        ("name", ""),
    ]


def test_examples_of_each_type(make: Callable[[str], str]) -> None:
    columns = table_of(read_schema(make(CLINIC)), "staff")

    assert {column.name: [str(value) for value in column.examples] for column in columns} == {
        "id": ["1", "2"],
        "name": ["Ada", "Bo O'Hara"],
        "Boss": [],
        "mood": ["calm", "busy"],
        "papers": [],
        "tags": [],
        "salary": ["12.50"],
        "seen": ["2024-01-05 08:00:00+00"],
        "is_chief": ["True", "False"],
        "photo": [],
        "number": ["00000000-0000-0000-0000-000000000001"],
        "letter": [],
    }


def test_names_are_quoted_as_postgresql_needs_them(make: Callable[[str], str]) -> None:
    url = make(CLINIC)
    schema = read_schema(url)

    lines = compact_text(schema).split("\n")
    keys = '"Order".hospital = ward.hospital, "Order".code = ward.code'
    assert f'table "Order"."unit price", {keys}, "Order"."user"' in lines
    assert "table billing.line.bill = billing.bill.number, billing.line.total" in lines
    with psycopg.connect(url) as connection:
        words = {row[0] for row in connection.execute("SELECT word FROM pg_get_keywords()").fetchall()}
        assert len(words) > 400
        for word in words:
            (quoted,) = connection.execute("SELECT quote_ident(%s)", (word,)).fetchone()
            # DuckDB's keywords are quoted here too; never one too few.
            assert quote_name(word, "postgresql") in {quoted, f'"{word}"'}


def test_ddl_text_makes_the_same_schema(make: Callable[[str], str]) -> None:
    url = make(CLINIC)
    schema = read_schema(url)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA billing, public CASCADE; CREATE SCHEMA public; CREATE SCHEMA billing")
        connection.execute("CREATE TYPE mood AS ENUM ('calm')")
        connection.execute(ddl_text(schema))

    copy = read_schema(url)
    assert ddl_text(copy) == ddl_text(Schema(schema.tables, dialect="postgresql"))


def test_role_sees_what_it_may_read(make: Callable[[str], str], postgres_server: PostgresServer) -> None:
    url = make(
        "DROP ROLE IF EXISTS schema_reader; CREATE ROLE schema_reader LOGIN PASSWORD 'open';"
        "CREATE TABLE shown (x integer, hidden integer); CREATE TABLE secret (y integer);"
        "INSERT INTO shown VALUES (1, 2); ALTER TABLE shown ADD PRIMARY KEY (x, hidden);"
        "CREATE SCHEMA inner_; CREATE TABLE inner_.t (z integer);"
        "GRANT SELECT (x) ON shown TO schema_reader; GRANT SELECT ON inner_.t TO schema_reader"
    )
    reader = postgres_server.url(user="schema_reader", password="open", database=url.rpartition("/")[2])
    (shown,) = read_schema(reader).tables
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP OWNED BY schema_reader; DROP ROLE schema_reader")

    assert (shown.name, shown.n_rows) == ("shown", 1)
    assert [(column.name, column.examples) for column in shown.columns] == [("x", (1,))]
    assert not shown.columns[0].is_primary_key, "it is a part of the key"


def test_no_view_is_run_and_nothing_is_written(make: Callable[[str], str]) -> None:
    url = make(
        "CREATE TABLE log (x integer); CREATE FUNCTION f() RETURNS integer LANGUAGE sql AS "
        "'INSERT INTO log VALUES (1) RETURNING x'; CREATE VIEW slow AS SELECT f() AS y, pg_sleep(60)::text"
    )
    start = time.monotonic()
    schema = read_schema(url)

    assert [view.name for view in schema.views] == ["slow"] and time.monotonic() - start < 20
    assert schema.tables[0].n_rows == 0


def test_rows_are_counted_up_to_a_limit(make: Callable[[str], str]) -> None:
    url = make(f"CREATE TABLE many AS SELECT * FROM generate_series(1, {MAX_COUNTED_ROWS + 5})")
    (many,) = read_schema(url).tables

    assert (many.n_rows, many.has_more_rows) == (MAX_COUNTED_ROWS, True)


def test_reading_stops_at_the_time_limit(make: Callable[[str], str]) -> None:
    url = make("CREATE TABLE t (x integer)")
    with psycopg.connect(url) as other:
        other.execute("LOCK TABLE t")  # held by a transaction that does not end
        start = time.monotonic()
        with pytest.raises(DataError, match=r"schema of postgresql://.*/schema_.* took longer than 0\.5 s"):
            read_schema(url, timeout_s=0.5)
    assert time.monotonic() - start < 20


def test_errors_name_the_database_and_no_password(postgres_server: PostgresServer) -> None:
    wrong = postgres_server.url(user="admin", password="hunter2", database="postgres")
    with pytest.raises(
        DataError,
        match=r"password authentication failed.*at postgresql://admin@\S+/postgres\): set PGPASSWORD",
    ) as refused:
        read_schema(wrong)
    assert "hunter2" not in str(refused.value)

    with pytest.raises(DataError, match="malformed PostgreSQL URL") as refused:
        read_schema("postgresql://admin:hunter2@host:port:1/x?y")
    assert "hunter2" not in str(refused.value) and refused.value.__cause__ is None


def test_server_that_is_not_there() -> None:
    with pytest.raises(DataError, match="cannot read the PostgreSQL schema: connection"):
        read_schema("postgresql://reader@127.0.0.1:1/sales")


def test_generated_columns_labels_domains_and_unique_keys(make: Callable[[str], str]) -> None:
    url = make(
        """
        CREATE TYPE mood AS ENUM ('calm', 'it''s busy, "very"');
        CREATE DOMAIN price AS numeric(12, 2) CHECK (VALUE >= 0);
        CREATE DOMAIN fee AS price NOT NULL;
        CREATE DOMAIN state AS mood;
        CREATE TABLE line (number integer, bill integer, mood mood, state state, moods mood[], price price,
            fee fee, total numeric(12, 2) GENERATED ALWAYS AS (number * 2) STORED, label varchar(9) UNIQUE,
            UNIQUE (price, number), PRIMARY KEY (bill, number));
        CREATE UNIQUE INDEX first ON line (total, bill) INCLUDE (label);
        CREATE UNIQUE INDEX partly ON line (number) WHERE price > 0;
        CREATE UNIQUE INDEX folded ON line (bill, lower(label));
        """
    )
    (line,) = read_schema(url).tables
    columns = {column.name: column for column in line.columns}
    busy = ("calm", 'it\'s busy, "very"')

    assert [column.name for column in line.columns if column.is_generated] == ["total"]
    assert line.keys == (("bill", "number"), ("label",), ("price", "number"), ("total", "bill"))
    assert {name: column.labels for name, column in columns.items() if column.labels} == {
        "mood": busy,
        "state": busy,
    }
    assert {name: column.cast_type for name, column in columns.items() if column.base_type} == {
        "state": "mood",
        "price": "numeric(12,2)",
        "fee": "numeric(12,2)",
    }
    assert columns["fee"].is_nullable and not columns["fee"].accepts_null and columns["price"].accepts_null
    assert "fee fee," in ddl_text(read_schema(url))


def test_a_server_that_falls_silent_is_given_up() -> None:
    ready = b"R" + struct.pack(">ii", 8, 0)
    for name, value in ((b"server_version", b"15.3"), (b"client_encoding", b"UTF8")):
        ready += b"S" + struct.pack(">i", 6 + len(name) + len(value)) + name + b"\0" + value + b"\0"
    ready += b"Z" + struct.pack(">i", 5) + b"I"

    def serve() -> None:
        with listener.accept()[0] as client:
            client.recv(4096)
            client.sendall(ready)
            while client.recv(4096):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        url = f"postgresql://reader@127.0.0.1:{listener.getsockname()[1]}/shop?sslmode=disable&gssencmode=disable"
        with pytest.raises(DataError, match=r"schema of postgresql:.*shop took longer than 0\.5 s"):
            read_schema(url, timeout_s=0.5)
        thread.join()
