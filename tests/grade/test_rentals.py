"""A PostgreSQL database as people have it, read with an ordinary role: schema, queries, test databases."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.postgres_server import PostgresServer
from text2sql_grpo.grading.suite import TestSuite
from text2sql_grpo.grading.verdict import Grader
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.sql.schema import read_schema
from text2sql_grpo.sql.schema_text import ddl_text

# After Pagila: enums, domains, arrays, generated columns, partitions, triggers, views, owner's functions.
RENTALS = """
CREATE TYPE mpaa_rating AS ENUM ('G', 'PG', 'R');
CREATE DOMAIN year AS integer CHECK (VALUE BETWEEN 1901 AND 2155);
CREATE FUNCTION last_updated() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN NEW.last_update = now(); RETURN NEW; END';
CREATE TABLE customer (
    customer_id serial PRIMARY KEY, first_name text NOT NULL, email varchar(50) UNIQUE,
    active boolean NOT NULL DEFAULT true, create_date date NOT NULL DEFAULT DATE '2022-02-14'
);
CREATE TABLE film (
    film_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, title text NOT NULL, release_year year,
    rating mpaa_rating DEFAULT 'G', rental_rate numeric(4,2) NOT NULL DEFAULT 4.99,
    length smallint CHECK (length > 0),
    special_features text[], full_price numeric(6,2) GENERATED ALWAYS AS (rental_rate * 1.2) STORED,
    fulltext tsvector, last_update timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX film_fulltext ON film USING gin (fulltext);
CREATE TABLE rental (
    rental_id serial PRIMARY KEY, film_id integer NOT NULL REFERENCES film, customer_id integer NOT NULL
    REFERENCES customer, rental_date timestamp NOT NULL, return_date timestamp
);
CREATE TABLE payment (
    payment_id integer NOT NULL, customer_id integer NOT NULL, amount numeric(5,2) NOT NULL,
    payment_date date NOT NULL, PRIMARY KEY (payment_date, payment_id)
) PARTITION BY RANGE (payment_date);
CREATE TABLE payment_p2022_01 PARTITION OF payment FOR VALUES FROM ('2022-01-01') TO ('2022-02-01');
CREATE TABLE payment_p2022_02 PARTITION OF payment FOR VALUES FROM ('2022-02-01') TO ('2022-03-01');
CREATE TRIGGER last_updated BEFORE UPDATE ON film FOR EACH ROW EXECUTE FUNCTION last_updated();
CREATE FUNCTION rewards_report(lowest integer) RETURNS SETOF customer LANGUAGE plpgsql SECURITY DEFINER AS
    'BEGIN CREATE TEMP TABLE best (customer_id integer); RETURN QUERY SELECT * FROM customer; END';
CREATE VIEW customer_list AS SELECT customer_id AS id, first_name AS name,
    CASE WHEN active THEN 'active' ELSE '' END AS notes FROM customer;
CREATE MATERIALIZED VIEW rental_by_film AS SELECT film_id, count(*) AS rentals FROM rental GROUP BY film_id;
INSERT INTO customer (first_name, email, active) SELECT 'Name ' || n, n || '@x.org', n % 3 > 0
    FROM generate_series(1, 20) AS n;
INSERT INTO film (title, release_year, rating, rental_rate, length, special_features)
    SELECT 'Film ' || n, 2000 + n % 9, (ARRAY['G', 'PG', 'R'])[1 + n % 3]::mpaa_rating, 0.99 + n % 4,
    60 + 5 * n,
    ARRAY['Trailers', 'Commentaries'] FROM generate_series(1, 15) AS n;
INSERT INTO rental (film_id, customer_id, rental_date, return_date) SELECT 1 + n % 15, 1 + n % 20,
    TIMESTAMP '2022-01-01 10:00' + n * INTERVAL '1 day', TIMESTAMP '2022-01-03 10:00' + n * INTERVAL '1 day'
    FROM generate_series(1, 40) AS n;
INSERT INTO payment SELECT n, 1 + n % 20, n % 7 + 0.99, DATE '2022-01-01' + n
    FROM generate_series(1, 50) AS n;
REFRESH MATERIALIZED VIEW rental_by_film;
"""
LONG = "SELECT title FROM film WHERE length >= 100"
CHEAPEST = "SELECT title FROM film ORDER BY rental_rate FETCH FIRST 2 ROWS ONLY"  # of three
LONGER = "FROM film WHERE length > 70 GROUP BY rating"
TOP = f"SELECT rating {LONGER} ORDER BY count(*) DESC FETCH FIRST 1 ROW WITH TIES"
RATED = "SELECT count(*) FROM film WHERE rating = 'PG'"


@pytest.fixture(scope="module")
def url(postgres_server: PostgresServer) -> str:
    with postgres_server.admin() as admin:
        admin.execute("CREATE DATABASE rentals")
    with postgres_server.admin("rentals") as admin:
        admin.execute(RENTALS)
        admin.execute("CREATE ROLE analyst LOGIN PASSWORD 'x'")
        admin.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO analyst")
        admin.execute("ALTER ROLE analyst SET default_transaction_read_only = on")
    return postgres_server.url("analyst", "x", "rentals")


@pytest.fixture(scope="module")
def grader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grader]:
    with SQLExecutor(workers=2) as executor:
        folder: Path = tmp_path_factory.mktemp("suites")
        yield Grader(executor, suite=TestSuite(executor, folder))


def test_ordinary_role_reads_schema_and_rows(url: str) -> None:
    schema = read_schema(url)
    names = {table.name for table in schema.tables} | {view.name for view in schema.views}
    assert {"film", "customer", "rental", "payment", "customer_list", "rental_by_film"} <= names
    assert "mpaa_rating" in ddl_text(schema) or "rating" in ddl_text(schema)
    with SQLExecutor(workers=1, cache_entries=0) as executor:
        for sql, rows in (
            (RATED, ((5,),)),
            (
                "SELECT full_price, special_features FROM film WHERE film_id = 1",
                (("2.39", '["Trailers","Commentaries"]'),),
            ),
            ("SELECT notes FROM customer_list WHERE id = 3", (("",),)),
            ("SELECT count(*) FROM payment WHERE payment_date >= DATE '2022-02-01'", ((20,),)),
        ):
            outcome = executor.execute(url, sql)
            assert outcome.error == ""
            assert [[str(cell) for cell in row] for row in outcome.rows] == [
                [str(c) for c in row] for row in rows
            ]
        for sql in (
            "SELECT * FROM rewards_report(1)",
            "SELECT nextval('rental_rental_id_seq')",
            "CREATE TEMP TABLE film AS SELECT 1",
            "EXPLAIN ANALYZE CREATE TEMP TABLE film AS SELECT 1",
            "COMMIT; DELETE FROM rental",
            "DELETE FROM rental",
        ):
            assert executor.execute(url, sql).status == "denied", sql
        assert executor.execute(url, "SELECT count(*) FROM rental").rows == ((40,),)


@pytest.mark.parametrize(
    ("gold", "answer", "is_right"),
    [
        (LONG, "SELECT title FROM film WHERE NOT length < 100", True),
        (LONG, "SELECT title FROM film WHERE length > 95", False),
        (RATED, "SELECT 5", False),
        (RATED, "SELECT count(film_id) FROM film WHERE rating = 'PG'", True),
        (CHEAPEST, "SELECT title FROM film ORDER BY rental_rate, film_id DESC LIMIT 2", True),
        (TOP, TOP.replace("FETCH FIRST 1 ROW WITH TIES", "LIMIT 1"), False),
        (
            TOP,
            f"SELECT rating FROM (SELECT rating, rank() OVER (ORDER BY count(*) DESC) AS place {LONGER})"
            " AS ranked WHERE place = 1",
            True,
        ),
    ],
)
def test_answers_are_graded_on_test_databases(
    url: str, grader: Grader, gold: str, answer: str, is_right: bool
) -> None:
    verdict = grader.grade(url, gold, answer)
    assert verdict.reason == ("equal" if is_right else "test_database")
    assert verdict.gap == ""
