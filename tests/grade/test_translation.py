"""Queries of DuckDB and PostgreSQL that return the same on the SQLite mirror, or at least run there."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from text2sql_grpo.grading.mirror import Translator
from text2sql_grpo.grading.translation import as_sqlite
from text2sql_grpo.sql.executor import SQLExecutor

SCRIPT = """
CREATE TABLE stay (id INTEGER PRIMARY KEY, guest VARCHAR(40), room VARCHAR(5), came DATE NOT NULL, went DATE,
    booked TIMESTAMP, paid DECIMAL(8, 2), nights INTEGER);
INSERT INTO stay VALUES
    (1, 'ann@mail.com', 'A-1', '2024-01-30', '2024-02-03', '2023-12-31 23:59:30', 120.50, 4),
    (2, 'Bo@uni.org', 'A-2', '2024-02-29', '2024-03-02', '2024-01-01 08:30:00', 99.95, 2),
    (3, NULL, 'B-1', '2024-02-29', NULL, '2024-01-02 17:00:00', NULL, NULL),
    (4, 'cy', 'B-1', '2025-12-31', '2026-01-02', '2025-12-01 00:00:00', 10.05, 2),
    (5, 'ann@mail.com', 'B-2', '2025-03-03', '2025-03-04', '2025-02-28 12:00:00', 7.00, 1);
"""
BOTH = """
SELECT id, went - came, came + 3, came - 1 FROM stay
SELECT id FROM stay WHERE went - came > 2 AND DATE '2024-03-01' - came < 60
SELECT id, EXTRACT(YEAR FROM came), EXTRACT(QUARTER FROM came), EXTRACT(DOW FROM came) FROM stay
SELECT id, EXTRACT(ISODOW FROM came), EXTRACT(DOY FROM came), EXTRACT(WEEK FROM came) FROM stay
SELECT id, EXTRACT(HOUR FROM booked), EXTRACT(MINUTE FROM booked), date_part('month', booked) FROM stay
SELECT date_trunc('month', booked), count(*) FROM stay GROUP BY 1
SELECT id FROM stay WHERE date_trunc('quarter', booked) = TIMESTAMP '2024-01-01'
SELECT id FROM stay WHERE booked < '2024-01-02' OR booked >= DATE '2025-12-01'
SELECT id FROM stay WHERE booked::time >= '08:30' AND booked::time < '17:00'
SELECT id, booked::date FROM stay WHERE booked::date = DATE '2024-01-01'
SELECT id, booked + INTERVAL '36 hours', came + nights * INTERVAL '1 day' FROM stay WHERE nights > 0
SELECT id FROM stay WHERE came - booked > INTERVAL '20 days'
SELECT id, EXTRACT(EPOCH FROM came - booked) / 3600 FROM stay
SELECT id, CAST(paid / 3 AS INTEGER), CAST(paid / 3 AS DECIMAL(8, 1)) FROM stay
SELECT id, concat_ws(', ', guest, room), concat(guest, room), split_part(guest, '@', 2) FROM stay
SELECT id, lpad(room, 6, '0'), repeat(room, 2), translate(room, 'A', 'C') FROM stay
SELECT id, left(room, 1), right(room, 1), strpos(room, '-') FROM stay WHERE starts_with(room, 'A')
SELECT count(DISTINCT (room, nights)), stddev(paid), var_pop(paid) FROM stay
SELECT id FROM stay WHERE paid > ALL (SELECT paid FROM stay WHERE paid < 100 AND room <> 'B-2')
SELECT id FROM stay WHERE paid > 0 AND paid > ALL (SELECT paid FROM stay WHERE nights = 99)
SELECT id FROM stay WHERE guest <> '' AND guest <= ALL (SELECT guest FROM stay WHERE nights = 99)
SELECT id FROM stay WHERE id = ANY (ARRAY[3])
SELECT id FROM stay WHERE paid >= ANY (SELECT paid FROM stay WHERE nights = 2)
SELECT g.n, count(s.id) FROM generate_series(1, 4) AS g (n) LEFT JOIN stay s ON s.nights = g.n GROUP BY g.n
SELECT v.word, s.id FROM (VALUES (1, 'one'), (2, 'two')) AS v (n, word) JOIN stay s ON s.nights = v.n
SELECT s.id, l.m FROM stay s CROSS JOIN LATERAL (SELECT max(o.went) AS m FROM stay o WHERE o.room = s.room) l
SELECT id, sum(paid) OVER (ORDER BY came RANGE BETWEEN INTERVAL '40 days' PRECEDING AND CURRENT ROW) FROM stay
SELECT id, count(*) OVER (ORDER BY came RANGE BETWEEN INTERVAL '1 month' PRECEDING AND CURRENT ROW) FROM stay
"""
DUCKDB = """
SELECT id, date_diff('month', came, went), date_diff('day', booked, came) FROM stay
SELECT id, date_sub('month', came, went), date_sub('year', came, DATE '2026-03-05') FROM stay
SELECT room, count(*) FROM stay GROUP BY ALL
SELECT room, nights, id FROM stay ORDER BY ALL DESC LIMIT 3
SELECT id, string_split(room, '-')[2], dayofweek(came), isodow(came), last_day(came) FROM stay
SELECT id, booked + to_days(nights), came + INTERVAL (nights) MONTH FROM stay WHERE id <> 4
SELECT arg_max(room, paid), arg_min(room, came) FROM stay
SELECT id FROM stay WHERE regexp_matches(room, '^[AC]-\\d$') AND regexp_full_match(room, '.-1')
SELECT time_bucket(INTERVAL '6 hours', booked), count(*) FROM stay GROUP BY 1
SELECT i FROM range(1, 4) AS r (i)
SELECT epoch(booked), year(came) FROM stay
"""
POSTGRESQL = """
SELECT id, date_part('year', age(went, came)), EXTRACT(DAY FROM came - booked) FROM stay
SELECT id, to_char(came, 'YYYY-MM'), to_char(booked, 'Q') FROM stay
SELECT id, make_date(2024, nights, 3) FROM stay WHERE nights > 0
SELECT m::date FROM generate_series(DATE '2024-01-31', DATE '2024-02-03', INTERVAL '1 day') m
SELECT id, (string_to_array(guest, '@'))[1] FROM stay
SELECT id FROM stay WHERE room ~ '^[AC]-' AND guest ~* 'ANN.mail'
SELECT count(*), count(came) FROM stay WHERE came <> ALL (ARRAY[DATE '2024-02-29'])
"""
ROUGHLY = {
    "duckdb": "SELECT room, list(guest), median(paid), mode(nights), first(id) FROM stay GROUP BY 1"
    " EXCEPT ALL SELECT 'B-1', [], 0, 0, 0",
    "postgresql": "SELECT room, string_agg(DISTINCT guest, '; ' ORDER BY guest), array_agg(id ORDER BY id),"
    " percentile_cont(0.5) WITHIN GROUP (ORDER BY paid), mode() WITHIN GROUP (ORDER BY nights)"
    " FROM stay GROUP BY room",
}


@pytest.mark.parametrize(("engine", "own"), [("duckdb", DUCKDB), ("postgresql", POSTGRESQL)])
def test_a_translation_returns_what_the_engine_returns(
    engine: str, own: str, make_database: Callable[[str, str], str], executor: SQLExecutor, tmp_path: Path
) -> None:
    translator = Translator(executor, make_database(engine, SCRIPT), tmp_path)
    queries = [line for line in (BOTH + own).splitlines() if line]
    assert [sql for sql in queries if translator.in_sqlite(sql) is None] == []
    with closing(sqlite3.connect(translator.path)) as connection:
        rough = as_sqlite(ROUGHLY[engine], engine.removesuffix("ql"))
        assert rough is not None and len(connection.execute(rough).fetchall()) == 4
