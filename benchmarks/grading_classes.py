# ruff: noqa: E501 (queries)
"""Shares of wrong answers paid and of right ones refused, by the class of the mistake, on three engines.

Each case is a gold, an answer that has the gold's result on the database, and whether it is right. Half of
the cases (`held_out`) were not looked at while the grader was written. A third run on DuckDB and PostgreSQL too.

Run: OMP_NUM_THREADS=1 python benchmarks/grading_classes.py [--engine duckdb] [--url URL] [--held_out]
     python benchmarks/grading_classes.py --quick    (under a minute)
The last line is JSON.
"""

import argparse
import json
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from text2sql_grpo.grading.suite import TestSuite
from text2sql_grpo.grading.verdict import Grader
from text2sql_grpo.sql.executor import SQLExecutor

QUICK_STRIDE = 8
COLOURS = ["Amber", "Black", "Blue", "Brown", "Gold", "Green", "Grey", "Hazel", "Red", "Silver", "Violet", "White"]  # fmt: skip
PUBLISHERS = ["Ace", "Blue Sky", "Capitol", "Dark Horse", "Eclipse", "Icon", "Marvel", "Oni", "Rebellion"]
POWERS = ["Agility", "Cold", "Durability", "Fire", "Flight", "Healing", "Invisibility", "Magic", "Mimicry", "Speed", "Stealth", "Time"]  # fmt: skip
NAMES = ["Abe", "Ana", "Ajax", "Atom", "Bane", "Beak", "Bolt", "Cole", "Cyan", "Dash", "Dora", "Echo", "Elan", "Ezra", "Flux", "Gaia", "Gale", "Hope", "Iris", "Jade", "Jinx", "Juno", "Karl", "Kite", "Lark", "Luna", "Mara", "Milo", "Nash", "Nova", "Onyx", "Opal", "Pyro", "Quin", "Rhea", "Rune", "Sage", "Thor", "Uma", "Vera"]  # fmt: skip
CITIES = ["Arles", "Basel", "Cork", "Derby", "Essen", "Faro", "Ghent", "Hull"]
CATEGORIES = ["Books", "Games", "Garden", "Kitchen", "Music", "Office", "Shoes", "Sport", "Tools", "Toys"]

HEROES = """
CREATE TABLE colour (id INTEGER PRIMARY KEY, colour TEXT);
CREATE TABLE publisher (id INTEGER PRIMARY KEY, title TEXT);
CREATE TABLE power (id INTEGER PRIMARY KEY, power TEXT NOT NULL);
CREATE TABLE hero (id INTEGER PRIMARY KEY, name TEXT, eye INTEGER REFERENCES colour (id),
    hair INTEGER REFERENCES colour (id), publisher INTEGER REFERENCES publisher (id), height INTEGER,
    weight REAL, mass TEXT, born DATE);
CREATE TABLE hero_power (hero INTEGER REFERENCES hero (id), power INTEGER REFERENCES power (id));
"""
SHOP = """
CREATE TABLE category (id INTEGER PRIMARY KEY, label TEXT);
CREATE TABLE customer (id INTEGER PRIMARY KEY, name TEXT, city TEXT, joined DATE, points TEXT);
CREATE TABLE product (id INTEGER PRIMARY KEY, title TEXT, category INTEGER, price REAL, stock INTEGER,
    rating TEXT);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER REFERENCES customer (id), placed TIMESTAMP,
    shipped DATE, total DOUBLE PRECISION);
CREATE TABLE item (orders INTEGER REFERENCES orders (id), product INTEGER REFERENCES product (id),
    quantity INTEGER, discount DOUBLE PRECISION);
"""
STAFF = """
CREATE TABLE department (id INTEGER PRIMARY KEY, department TEXT);
CREATE TABLE employee (id INTEGER PRIMARY KEY, name TEXT, boss INTEGER REFERENCES employee (id),
    department INTEGER, salary INTEGER, bonus INTEGER, hired DATE);
CREATE TABLE part (id INTEGER PRIMARY KEY, part TEXT);
CREATE TABLE assembly (whole INTEGER REFERENCES part (id), piece INTEGER REFERENCES part (id), n INTEGER);
CREATE TABLE station (id INTEGER PRIMARY KEY, station TEXT);
CREATE TABLE reading (id INTEGER PRIMARY KEY, station INTEGER REFERENCES station (id), day DATE, celsius REAL,
    level INTEGER);
"""
PHARMACY = """
CREATE TABLE buyer (id INTEGER PRIMARY KEY, name TEXT, mail TEXT, note TEXT);
CREATE TABLE drug (id INTEGER PRIMARY KEY, label TEXT, tags TEXT, code TEXT, subject TEXT);
"""
SCHEMAS = {"heroes": HEROES, "shop": SHOP, "staff": STAFF, "pharmacy": PHARMACY}


@dataclass(frozen=True)
class Case:
    """One pair; `engines`: True if every engine has its SQL."""

    kind: str
    schema: str
    gold: str
    answer: str
    is_right: bool
    engines: bool = False
    held_out: bool = False


def rows(schema: str) -> dict[str, Any]:
    """Rows of each table of a schema, parents first."""
    if schema == "heroes":
        heroes = [
            (n, name, 1 + n * 7 % 12, 1 + n * 5 % 12, 1 + n * 4 % 9, 150 + n * 11 % 50, 51.5 + n * 13 % 48,
             str(51 + n * 13 % 48), f"19{81 + n % 9}-{1 + n % 12:02}-{1 + n * 3 % 28:02}")
            for n, name in enumerate(NAMES, 1)
        ]  # fmt: skip
        return {
            "colour": list(enumerate(COLOURS, 1)),
            "publisher": list(enumerate(PUBLISHERS, 1)),
            "power": list(enumerate(POWERS, 1)),
            "hero": heroes,
            "hero_power": [(1 + n * 3 % 31, 1 + n * 5 % 12) for n in range(90)],
        }
    if schema == "shop":
        customers = [
            (n, NAMES[n], CITIES[n % 8], f"2019-{1 + n % 6:02}-{1 + n * 2 % 28:02}", str(20 + n * 7 % 70))
            for n in range(1, 33)
        ]
        products = [
            (
                n,
                f"{NAMES[n]}{'x' * (n % 9)}",
                1 + n % 10,
                4.0 + n * 17 % 40,
                n * 7 % 30,
                str(30 + n * 11 % 60),
            )
            for n in range(1, 31)
        ]
        orders = [
            (n, 1 + n * 5 % 32, f"2020-03-{1 + n % 28:02} {8 + n % 10:02}:{n % 60:02}:00",
             f"2020-04-{1 + n % 28:02}", 10.0 + n * 31 % 90)
            for n in range(1, 65)
        ]  # fmt: skip
        items = [(1 + n % 64, 1 + n * 7 % 30, 1 + n % 5, n % 4 * 0.05) for n in range(150)]
        tables = {"category": list(enumerate(CATEGORIES, 1)), "customer": customers}
        return tables | {"product": products, "orders": orders, "item": items}
    if schema == "pharmacy":
        notes = [None, "", "Call back", "Pays late", "Regular"]
        buyers = [
            (n, f"{first} {POWERS[n % 12]}", f"{first.lower()}@{('mail.com', 'post.net', 'webs.org')[n % 3]}", notes[n % 5])
            for n, first in enumerate(NAMES, 1)
        ]  # fmt: skip
        drugs = [
            (n, f"{POWERS[n % 12]} {100 + n * 70 % 800} mg", ("new,rx", "otc", "new,otc,rx", "old")[n % 4],
             f"RX{10 + n}", (" Late", "Late", "Broken", "Where is it?")[n * 3 % 4])
            for n in range(1, 31)
        ]  # fmt: skip
        return {"buyer": buyers, "drug": drugs}
    bosses = [None, *(max(1, n // 3) for n in range(2, 31))]
    employees = [
        (n, NAMES[n], bosses[n - 1], 1 + n % 6, 2000 + n * 370 % 3000, n * 90 % 700,
         f"20{10 + n % 8}-{1 + n % 12:02}-15")
        for n in range(1, 31)
    ]  # fmt: skip
    readings = [
        (n, 1 + n % 9, f"2021-05-{1 + n // 9:02}", 10.0 + n * 7 % 19, n * 5 % 13) for n in range(1, 46)
    ]
    return {
        "department": list(enumerate(["Audit", "Board", "Claims", "Design", "Events", "Finance"], 1)),
        "employee": employees,
        "part": [(n, f"P-{name}") for n, name in enumerate(NAMES[:24], 1)],
        "assembly": [(max(1, n // 3), n, 1 + n % 4) for n in range(2, 25)],
        "station": list(enumerate([*CITIES, "Izmir"], 1)),
        "reading": readings,
    }


def script(schema: str) -> Iterator[str]:
    """Statements that make a database, in the SQL of each engine."""
    yield from filter(None, map(str.strip, SCHEMAS[schema].split(";")))
    for table, content in rows(schema).items():
        written = ["(" + ", ".join(map(_literal, row)) + ")" for row in content]
        parts = written if table == "employee" else [", ".join(written)]  # which refers to itself
        yield from (f"INSERT INTO {table} VALUES {part}" for part in parts)


def _literal(cell: object) -> str:
    return "NULL" if cell is None else repr(cell)


def cases() -> list[Case]:
    """All cases; every second one of a class and side is held out."""
    seen: Counter[tuple[str, bool]] = Counter()
    found = []
    for kind, schema, gold, answer, is_right, engines in _cases():
        seen[kind, is_right] += 1
        is_held_out = seen[kind, is_right] % 2 == 0
        found.append(Case(kind, schema, gold, answer, is_right, engines, is_held_out))
    return found


Raw = tuple[str, str, str, str, bool, bool]


def _cases() -> Iterator[Raw]:
    yield from _look_ups()
    yield from _numbers_as_text()
    yield from _thresholds()
    yield from _recursion()
    yield from _frames()
    yield from _date_parts()
    yield from _clock()
    yield from _duplicates()
    yield from _joins()
    yield from _text_lengths()
    yield from _computed()
    yield from _time_steps()
    yield from _text_parts()
    yield from _tied_groups()
    yield from _amounts()


def _look_ups() -> Iterator[Raw]:
    kind = "look-up"
    for column, table, label, value, other in (
        ("eye", "colour", "colour", "Blue", "Red"),
        ("hair", "colour", "colour", "Black", "White"),
        ("publisher", "publisher", "title", "Marvel", "Oni"),
    ):
        for shown in ("h.name", "count(*)", "avg(h.height)"):
            join = f"SELECT {shown} FROM hero h JOIN {table} c ON h.{column} = c.id WHERE c.{label}"
            plain = f"SELECT {shown} FROM hero h WHERE h.{column}"
            found = f"(SELECT id FROM {table} WHERE {label} = '{value}')"
            yield kind, "heroes", f"{join} = '{value}'", f"{plain} = {found}", True, shown == "h.name"
            yield kind, "heroes", f"{plain} = {found}", f"{join} = '{value}'", True, False
            gold = f"{join} <> '{value}'"
            yield kind, "heroes", gold, f"{plain} <> {found}", True, shown == "count(*)"
            listed = f"SELECT id FROM {table} WHERE {label} IN ('{value}', '{other}')"
            gold = f"{join} NOT IN ('{value}', '{other}')"
            yield kind, "heroes", gold, f"{plain} NOT IN ({listed})", True, False
            number = rows("heroes")[table]
            key = next(n for n, name in number if name == value)
            yield kind, "heroes", f"{join} = '{value}'", f"{plain} = {key}", False, shown == "h.name"
            gold = f"{join} = '{value}'"
            yield kind, "heroes", gold, f"{join} LIKE '{value[:-1]}%'", False, False
            keys = ", ".join(str(n) for n, name in number if name not in (value, other))
            gold = f"{join} NOT IN ('{value}', '{other}')"
            yield kind, "heroes", gold, f"{plain} IN ({keys})", False, False
    names = "SELECT h.name FROM hero h JOIN hero_power p ON p.hero = h.id"
    for gold, answer in (
        (
            f"SELECT name FROM hero WHERE name NOT IN ({names})",
            "SELECT name FROM hero WHERE id NOT IN (SELECT hero FROM hero_power)",
        ),
        (
            f"SELECT name FROM hero EXCEPT {names}",
            "SELECT name FROM hero WHERE id NOT IN (SELECT hero FROM hero_power)",
        ),
        (
            "SELECT name FROM hero WHERE id NOT IN (SELECT hero FROM hero_power)",
            f"SELECT name FROM hero EXCEPT {names}",
        ),
        (
            "SELECT count(*) FROM hero WHERE id NOT IN (SELECT hero FROM hero_power)",
            f"SELECT count(*) FROM hero WHERE name NOT IN ({names})",
        ),
        (
            "SELECT part FROM part WHERE id NOT IN (SELECT whole FROM assembly)",
            "SELECT part FROM part EXCEPT SELECT p.part FROM part p JOIN assembly a ON a.whole = p.id",
        ),
    ):
        yield kind, "heroes" if "hero" in gold else "staff", gold, answer, True, True
    by_category = "FROM product p JOIN category c ON p.category = c.id WHERE c.label = 'Music'"
    found = "(SELECT id FROM category WHERE label = 'Music')"
    for shown in ("p.title", "sum(p.stock)", "max(p.price)"):
        gold = f"SELECT {shown} {by_category}"
        yield kind, "shop", gold, f"SELECT {shown} FROM product p WHERE p.category = {found}", True, True
        yield kind, "shop", gold, f"SELECT {shown} FROM product p WHERE p.category = 5", False, True


def _numbers_as_text() -> Iterator[Raw]:
    kind = "number as text"
    for schema, table, column, shown, low, high in (
        ("heroes", "hero", "mass", "name", 60, 90),
        ("shop", "product", "rating", "title", 40, 80),
        ("shop", "customer", "points", "name", 30, 70),
    ):
        number = f"CAST({column} AS INTEGER)"
        for sign, bound in ((">", high), ("<", low), (">=", low)):
            gold = f"SELECT {shown} FROM {table} WHERE {number} {sign} {bound}"
            yield (
                kind,
                schema,
                gold,
                f"SELECT {shown} FROM {table} WHERE {column} {sign} '{bound}'",
                False,
                True,
            )
            right = f"SELECT {shown} FROM {table} WHERE CAST({column} AS REAL) {sign} {bound}"
            yield kind, schema, gold, right, True, True
        for turn in ("", " DESC"):
            gold = f"SELECT {shown} FROM {table} ORDER BY {number}{turn} LIMIT 1"
            yield (
                kind,
                schema,
                gold,
                f"SELECT {shown} FROM {table} ORDER BY {column}{turn} LIMIT 1",
                False,
                False,
            )
            yield (
                kind,
                schema,
                gold,
                f"SELECT {shown} FROM {table} ORDER BY {column} + 0{turn} LIMIT 1",
                True,
                False,
            )
        for function in ("max", "min"):
            gold = f"SELECT {function}({number}) FROM {table}"
            yield (
                kind,
                schema,
                gold,
                f"SELECT CAST({function}({column}) AS INTEGER) FROM {table}",
                False,
                True,
            )
            yield kind, schema, gold, f"SELECT {function}(CAST({column} AS REAL)) FROM {table}", True, False
        gold = f"SELECT count(*) FROM {table} WHERE {number} BETWEEN {low} AND {high}"
        answer = f"SELECT count(*) FROM {table} WHERE {column} BETWEEN '{low}' AND '{high}'"
        yield kind, schema, gold, answer, False, False


def _thresholds() -> Iterator[Raw]:
    kind = "threshold"
    for schema, query, bound, others in (
        ("heroes", "SELECT name FROM hero WHERE weight > {}", 70.25, (70.3, 70)),
        ("heroes", "SELECT name FROM hero WHERE weight / height > {}", 0.4123, (0.41, 0.412)),
        ("heroes", "SELECT count(*) FROM hero WHERE height * 2.54 > {}", 465.5, (468.1, 467.4)),
        ("shop", "SELECT title FROM product WHERE price * stock > {}", 401.5, (401, 402)),
        ("shop", "SELECT title FROM product WHERE price * 1.19 >= {}", 30.01, (30, 30.3)),
        ("shop", "SELECT title FROM product WHERE price - stock > {}", 10.5, (10.7, 10.2)),
        (
            "shop",
            "SELECT customer FROM orders GROUP BY customer HAVING sum(total) > {}",
            150.4,
            (150.9, 150.1),
        ),
        (
            "shop",
            "SELECT customer FROM orders GROUP BY customer HAVING avg(total) > {}",
            55.2,
            (55.15, 55.24),
        ),
        (
            "shop",
            "SELECT orders FROM item GROUP BY orders HAVING sum(quantity * discount) > {}",
            0.62,
            (0.63, 0.61),
        ),
        (
            "shop",
            "SELECT category, avg(price) FROM product GROUP BY category HAVING avg(price) > {}",
            20.35,
            (20.4,),
        ),
        ("staff", "SELECT name FROM employee WHERE salary + bonus > {}", 3701, (3705, 3708)),
        ("staff", "SELECT name FROM employee WHERE 1.0 * bonus / salary > {}", 0.1111, (0.111, 0.1112)),
        ("staff", "SELECT name FROM employee WHERE 12 * salary > {}", 33500, (33480, 33490)),
        (
            "staff",
            "SELECT department FROM employee GROUP BY department HAVING avg(salary) > {}",
            3301,
            (3300.5,),
        ),
        (
            "staff",
            "SELECT station FROM reading GROUP BY station HAVING max(celsius) > {}",
            24.37,
            (24.4, 24.3),
        ),
    ):
        gold = query.format(bound)
        for n, other in enumerate(others):
            yield kind, schema, gold, query.format(other), False, n == 0
        yield kind, schema, gold, query.format(f"({bound})").replace("SELECT", "SELECT ALL", 1), True, False
        yield kind, schema, gold, query.format(f"0.5 * {2 * bound}"), True, True


def _tree(table: str, key: str, parent: str, start: str, shown: str) -> Iterator[tuple[str, str]]:
    """Pairs of a recursive gold and its unrolling to the depth of the bundled rows."""
    top = f"SELECT {key} FROM {table} WHERE {start}"
    below = f"SELECT t.{key} FROM {table} t JOIN down d ON t.{parent} = d.{key}"
    gold = f"WITH RECURSIVE down AS ({top} UNION ALL {below}) SELECT {shown} FROM down"
    levels = [top]
    for _ in range(4):
        levels.append(f"SELECT {key} FROM {table} WHERE {parent} IN ({levels[-1]})")
    yield gold, f"SELECT {shown} FROM ({' UNION ALL '.join(levels)}) AS down"


def _recursion() -> Iterator[Raw]:
    kind = "fixed depth"
    for start in ("boss IS NULL", "id = 1", "name = 'Ana'", "id = 2", "id = 3", "id = 4"):
        for shown in ("count(*)", "id"):
            for gold, answer in _tree("employee", "id", "boss", start, shown):
                yield kind, "staff", gold, answer, False, shown == "id"
                right = gold.replace("down", "below").replace("UNION ALL", "UNION")
                yield kind, "staff", gold, right, True, shown == "id"
    for start in ("whole = 1", "whole = 2", "whole = 3"):
        for shown in ("count(*)", "piece"):
            for gold, answer in _tree("assembly", "piece", "whole", start, shown):
                yield kind, "staff", gold, answer, False, shown == "piece"
                yield kind, "staff", gold, gold.replace("down", "below"), True, False
    up = "SELECT b.id, b.boss, u.n + 1 FROM employee b JOIN up u ON b.id = u.boss"
    gold = f"WITH RECURSIVE up AS (SELECT id, boss, 0 AS n FROM employee WHERE id = 30 UNION ALL {up}) SELECT max(n) FROM up"
    limited = gold.replace("u.boss)", "u.boss WHERE u.n < 4)")
    yield kind, "staff", gold, limited, False, False
    yield kind, "staff", gold, gold.replace("max(n)", "count(*) - 1"), True, False


def _frames() -> Iterator[Raw]:
    kind = "frame"
    for value in ("celsius", "level"):
        for function in ("sum", "max", "count"):
            shown = "SELECT station, day, {} FROM reading"
            over = f"{function}({value}) OVER (PARTITION BY station ORDER BY day, id"
            gold = shown.format(f"{over} ROWS UNBOUNDED PRECEDING) AS x")
            whole = shown.format(f"{over} ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS x")
            yield kind, "staff", gold, whole, True, function == "sum"
            yield kind, "staff", gold, shown.format(f"{over}) AS x"), True, False
            for n in (4, 6):
                cut = shown.format(f"{over} ROWS {n} PRECEDING) AS x")
                yield kind, "staff", gold, cut, False, n == 6
                if function != "count":
                    yield kind, "staff", cut, gold, False, False
    ranked = "SELECT id FROM (SELECT id, {}() OVER (PARTITION BY station ORDER BY celsius, id) AS n FROM reading) AS r"
    gold = ranked.format("row_number") + " WHERE n <= 5"
    yield kind, "staff", gold, "SELECT id FROM reading", False, True
    yield kind, "staff", gold, gold.replace("<= 5", "< 6"), True, True
    lag = "SELECT id, lag(level, {}) OVER (PARTITION BY station ORDER BY day, id) AS x FROM reading"
    yield kind, "staff", lag.format(5), lag.format(6), False, True
    moving = "SELECT id, avg(celsius) OVER (PARTITION BY station ORDER BY day, id ROWS 6 PRECEDING) AS x FROM reading"
    yield (
        kind,
        "staff",
        moving,
        moving.replace("ROWS 6", "ROWS BETWEEN 6").replace("PRECEDING)", "PRECEDING AND CURRENT ROW)"),
        True,
        False,
    )


def _date_parts() -> Iterator[Raw]:
    kind = "date part"
    for schema, table, column, shown, year, month in (
        ("shop", "customer", "joined", "name", 2019, 3),
        ("shop", "orders", "placed", "id", 2020, 3),
        ("shop", "orders", "shipped", "id", 2020, 4),
        ("staff", "reading", "day", "id", 2021, 5),
    ):
        start = f"SELECT {shown} FROM {table} WHERE "
        full = f"strftime('%Y-%m', {column})"
        gold = f"{start}{full} = '{year}-{month:02}'"
        yield kind, schema, gold, f"{start}strftime('%m', {column}) = '{month:02}'", False, False
        yield kind, schema, gold, f"{start}{column} LIKE '{year}-{month:02}-%'", True, False
        split = f"strftime('%Y', {column}) = '{year}' AND strftime('%m', {column}) = '{month:02}'"
        yield kind, schema, gold, start + split, True, False
        native = f"EXTRACT(YEAR FROM {column}) = {year} AND EXTRACT(MONTH FROM {column}) = {month}"
        if schema == "shop":
            grouped = "SELECT {0}, count(*) FROM {1} GROUP BY {0}"
            yield (
                kind,
                schema,
                grouped.format(full, table),
                f"SELECT '{year}-' || strftime('%m', {column}), count(*) FROM {table} GROUP BY 1",
                False,
                False,
            )
            yield (
                kind,
                schema,
                grouped.format(full, table),
                f"SELECT substr({column}, 1, 7), count(*) FROM {table} GROUP BY substr({column}, 1, 7)",
                True,
                False,
            )
            counted = f"SELECT count(DISTINCT {full}) FROM {table}"
            yield (
                kind,
                schema,
                counted,
                f"SELECT count(DISTINCT strftime('%m', {column})) FROM {table}",
                False,
                False,
            )
            yield (
                kind,
                schema,
                counted,
                f"SELECT count(DISTINCT substr({column}, 1, 7)) FROM {table}",
                True,
                False,
            )
        if column != "joined":
            gold = f"{start}strftime('%Y', {column}) = '{year}'"
            yield kind, schema, gold, f"{start}{full} = '{year}-{month:02}'", False, False
            yield kind, schema, gold, f"{start}strftime('%m', {column}) = '{month:02}'", False, False
            next_year = f"{start}{column} >= '{year}-01-01' AND {column} < '{year + 1}-01-01'"
            yield kind, schema, gold, next_year, True, False
            early = f"{start}{column} >= DATE '{year}-01-01' AND {column} < DATE '{year + 1}-01-01'"
            wide = f"{start}EXTRACT(YEAR FROM {column}) = {year}"
            if schema == "staff":
                yield kind, "native " + schema, wide, start + native, False, True
                yield kind, "native " + schema, wide, early, True, True
        yield (
            kind,
            "native " + schema,
            start + native,
            f"{start}EXTRACT(MONTH FROM {column}) = {month}",
            False,
            True,
        )
    days = "SELECT date(placed), count(*) FROM orders GROUP BY date(placed)"
    yield (
        kind,
        "shop",
        days,
        "SELECT '2020-03-' || strftime('%d', placed), count(*) FROM orders GROUP BY 1",
        False,
        False,
    )
    yield kind, "shop", days, "SELECT substr(placed, 1, 10), count(*) FROM orders GROUP BY 1", True, False


def _clock() -> Iterator[Raw]:
    kind = "clock"
    now = time.gmtime()
    for schema, table, column, shown in (
        ("shop", "customer", "joined", "name"),
        ("shop", "orders", "shipped", "id"),
        ("staff", "employee", "hired", "name"),
        ("heroes", "hero", "born", "name"),
    ):
        gold = f"SELECT {shown} FROM {table} WHERE {column} > '2019-02-10'"
        days = int(time.time() // 86_400) - 17_937
        yield (
            kind,
            schema,
            gold,
            f"SELECT {shown} FROM {table} WHERE {column} > date('now', '-{days} days')",
            False,
            False,
        )
        native = f"SELECT {shown} FROM {table} WHERE {column} > DATE '2019-02-10'"
        yield (
            kind,
            "native " + schema,
            native,
            f"SELECT {shown} FROM {table} WHERE {column} > current_date - {days}",
            False,
            True,
        )
        gold = f"SELECT {shown}, {now.tm_year} - CAST(strftime('%Y', {column}) AS INTEGER) FROM {table}"
        answer = f"SELECT {shown}, strftime('%Y', 'now') - strftime('%Y', {column}) FROM {table}"
        yield kind, schema, gold, answer, False, False
        age = f"SELECT {shown}, CAST(strftime('%Y', CURRENT_TIMESTAMP) AS INTEGER) - CAST(strftime('%Y', {column}) AS INTEGER) FROM {table}"
        yield kind, schema, gold, age, False, False
        gold = f"SELECT count(*) FROM {table}"
        yield kind, schema, gold, f"{gold} WHERE CURRENT_DATE >= '2020-01-01'", True, True
        until = f"{gold} WHERE {column} < CURRENT_DATE"
        yield kind, schema, until, f"{gold} WHERE NOT {column} >= CURRENT_DATE", True, True
        yield kind, schema, until, f"{gold} WHERE {column} < date('now')", True, False


def _duplicates() -> Iterator[Raw]:
    kind = "count distinct"
    for schema, source, column in (
        ("heroes", "hero", "name"),
        ("heroes", "hero JOIN publisher p ON hero.publisher = p.id WHERE p.title = 'Marvel'", "hero.height"),
        ("heroes", "hero WHERE weight > 90", "weight"),
        ("heroes", "hero WHERE height > 190", "height"),
        ("shop", "customer", "name"),
        ("shop", "orders WHERE id < 30", "customer"),
        ("shop", "product", "title"),
        ("shop", "product WHERE price > 38", "category"),
        ("staff", "employee", "name"),
        ("staff", "employee WHERE salary > 4500", "salary"),
        ("staff", "station", "station"),
        ("staff", "reading WHERE station = 3", "day"),
        ("staff", "part", "part"),
    ):
        gold = f"SELECT count({column}) FROM {source}"
        distinct = f"SELECT count(DISTINCT {column}) FROM {source}"
        yield kind, schema, gold, distinct, False, True
        yield kind, schema, distinct, gold, False, False
        cased = f"SELECT sum(CASE WHEN {column} IS NULL THEN 0 ELSE 1 END) FROM {source}"
        yield kind, schema, gold, cased, True, True
        grouped = (
            f"SELECT count(*) FROM (SELECT DISTINCT {column} AS x FROM {source}) AS d WHERE x IS NOT NULL"
        )
        yield kind, schema, distinct, grouped, True, True


def _joins() -> Iterator[Raw]:
    kind = "join"
    for schema, parent, key, child, own, shown in (
        ("shop", "customer", "id", "orders", "customer", "name"),
        ("shop", "category", "id", "product", "category", "label"),
        ("heroes", "colour", "id", "hero", "eye", "colour"),
        ("heroes", "publisher", "id", "hero", "publisher", "title"),
        ("heroes", "power", "id", "hero_power", "power", "power"),
        ("staff", "station", "id", "reading", "station", "station"),
        ("staff", "department", "id", "employee", "department", "department"),
    ):
        tables = f"{parent} a {{}}JOIN {child} b ON b.{own} = a.{key}"
        counted = f"SELECT a.{key}, a.{shown}, count(b.{own}) FROM {tables} GROUP BY a.{key}, a.{shown}"
        yield kind, schema, counted.format("LEFT "), counted.format(""), False, True
        yield (
            kind,
            schema,
            f"SELECT {shown} FROM {parent}",
            f"SELECT DISTINCT a.{shown} FROM {tables}".format(""),
            False,
            False,
        )
        gold = (
            f"SELECT a.{shown} FROM {parent} a WHERE EXISTS (SELECT 1 FROM {child} b WHERE b.{own} = a.{key})"
        )
        yield kind, schema, gold, f"SELECT {shown} FROM {parent}", False, True
        yield (
            kind,
            schema,
            gold,
            f"SELECT {shown} FROM {parent} WHERE {key} IN (SELECT {own} FROM {child})",
            True,
            True,
        )
        subquery = f"SELECT a.{key}, a.{shown}, (SELECT count(*) FROM {child} b WHERE b.{own} = a.{key}) FROM {parent} a"
        yield kind, schema, counted.format("LEFT "), subquery, True, False


def _text_lengths() -> Iterator[Raw]:
    kind = "text length"
    for schema, table, column, bound, other in (
        ("heroes", "hero", "name", 4, 6),
        ("heroes", "colour", "colour", 6, 9),
        ("heroes", "publisher", "title", 10, 12),
        ("heroes", "power", "power", 12, 20),
        ("shop", "product", "title", 13, 14),
        ("shop", "product", "title", 12, 15),
        ("shop", "category", "label", 8, 30),
        ("shop", "customer", "city", 5, 7),
        ("staff", "department", "department", 7, 11),
        ("staff", "part", "part", 6, 13),
        ("staff", "station", "station", 5, 9),
    ):
        for shown in (column, "count(*)"):
            query = f"SELECT {shown} FROM {table} WHERE length({column}) {{}}"
            if shown == column:
                yield kind, schema, query.format(f"> {bound}"), query.format(f"> {other}"), False, True
            yield (
                kind,
                schema,
                query.format(f"> {bound}"),
                query.format(f">= {bound + 1}"),
                True,
                shown == column,
            )
        query = f"SELECT id FROM {table} WHERE length({column}) {{}}"
        yield kind, schema, query.format(f"<= {bound + 10}"), f"SELECT id FROM {table}", False, False


def _computed() -> Iterator[Raw]:
    """Conditions on what a subquery, a CTE or an alias computes."""
    kind = "computed column"
    worth = "SELECT id, title, stock * price AS worth FROM product"
    spent = "SELECT customer, sum(total) AS spent, count(*) AS n FROM orders GROUP BY customer"
    ranked = "SELECT title, row_number() OVER (PARTITION BY category ORDER BY price DESC, id) AS place FROM product"
    paid = "SELECT e.name, e.salary + e.bonus AS paid FROM employee e"
    opposite = {">": "<=", "<=": ">", "<": ">=", ">=": "<"}
    for schema, inner, column, op, other, number, near, shown in (
        ("shop", worth, "worth", ">", ">=", 500, 499.5, "title"),
        ("shop", worth, "worth", "<", "<=", 40, 40.5, "count(*)"),
        ("shop", spent, "spent", ">=", ">", 111, 110.5, "customer"),
        ("shop", spent, "n", ">", ">=", 3, None, "customer"),
        ("shop", ranked, "place", "<", "<=", 4, None, "title"),
        ("staff", paid, "paid", ">", ">=", 4000, 4001, "name"),
        ("staff", paid, "paid", "<=", "<", 2500, 2501, "name"),
    ):
        gold = f"SELECT {shown} FROM ({inner}) AS t WHERE t.{column} {op} {number}"
        cte = f"WITH t AS ({inner}) SELECT {shown} FROM t WHERE NOT t.{column} {opposite[op]} {number}"
        yield kind, schema, gold, cte, True, True
        yield (
            kind,
            schema,
            cte,
            f"WITH t AS ({inner}) SELECT {shown} FROM t WHERE {column} {op} {number}",
            True,
            True,
        )
        yield kind, schema, gold, gold.replace(f" {op} {number}", f" {other} {number}"), False, True
        if near is not None:
            yield kind, schema, cte, gold.replace(f" {op} {number}", f" {op} {near}"), False, True
    alias = "SELECT customer, sum(total) AS spent FROM orders GROUP BY customer HAVING spent > 150"
    yield (
        kind,
        "shop",
        alias,
        "SELECT customer, sum(total) FROM orders GROUP BY 1 HAVING sum(total) > 150",
        True,
        False,
    )
    yield kind, "shop", alias, alias.replace("> 150", ">= 150"), False, False


def _time_steps() -> Iterator[Raw]:
    """Moments compared over an interval, and parts of them in place of the whole; not of SQLite."""
    kind, schema = "time step", "native shop"
    gaps = "SELECT placed - lag(placed) OVER (PARTITION BY customer ORDER BY placed) AS gap FROM orders"
    later = "o.customer = p.customer AND p.placed > o.placed AND p.placed {} o.placed + INTERVAL '12 days'"
    months = "SELECT min(date_trunc('month', placed)), sum(total) FROM orders GROUP BY {}"
    for gold, wrong, right in (
        (
            "SELECT count(*) FROM orders WHERE placed >= TIMESTAMP '2020-03-28' - INTERVAL '10 days'",
            "SELECT count(*) FROM orders WHERE placed > TIMESTAMP '2020-03-18'",
            "SELECT count(*) FROM orders WHERE placed >= TIMESTAMP '2020-03-18'",
        ),
        (
            "SELECT count(*) FROM orders o JOIN customer c ON c.id = o.customer "
            "WHERE o.placed < c.joined + INTERVAL '1 year'",
            "SELECT count(*) FROM orders o JOIN customer c ON c.id = o.customer "
            "WHERE o.placed <= c.joined + INTERVAL '1 year'",
            "SELECT count(*) FROM orders o WHERE EXISTS (SELECT 1 FROM customer c "
            "WHERE c.id = o.customer AND c.joined + INTERVAL '1 year' > o.placed)",
        ),
        (
            "SELECT id FROM orders WHERE shipped - CAST(placed AS DATE) > 20",
            "SELECT id FROM orders WHERE shipped - placed > INTERVAL '19 days'",
            "SELECT id FROM orders WHERE shipped - CAST(placed AS DATE) >= 21",
        ),
        (
            f"SELECT count(*) FROM ({gaps}) AS t WHERE gap > INTERVAL '3 days'",
            f"SELECT count(*) FROM ({gaps}) AS t WHERE gap >= INTERVAL '3 days'",
            f"SELECT count(*) FROM ({gaps}) AS t WHERE NOT gap <= INTERVAL '3 days'",
        ),
        (
            f"SELECT count(*) FROM orders o WHERE EXISTS (SELECT 1 FROM orders p WHERE {later.format('<=')})",
            f"SELECT count(*) FROM orders o WHERE EXISTS (SELECT 1 FROM orders p WHERE {later.format('<')})",
            f"SELECT count(DISTINCT o.id) FROM orders o JOIN orders p ON {later.format('<=')}",
        ),
        (
            months.format("date_trunc('month', placed)"),
            months.format("extract(month FROM placed)"),
            months.format("extract(year FROM placed), extract(month FROM placed)"),
        ),
    ):
        yield kind, schema, gold, wrong, False, True
        yield kind, schema, gold, right, True, True


def _text_parts() -> Iterator[Raw]:
    """Parts of texts: fixed lengths for separators, listed texts for conditions, blanks, patterns."""
    kind, schema = "text part", "pharmacy"
    domain, first = "substr(mail, instr(mail, '@') + 1)", "substr(name, 1, instr(name, ' ') - 1)"
    amount = "CAST(substr(label, instr(label, ' ') + 1) AS INTEGER)"
    for engines, gold, wrong, right in (
        (True, "SELECT name FROM buyer WHERE mail LIKE '%@mail.com'", "SELECT name FROM buyer WHERE mail LIKE '%mail%'", "SELECT name FROM buyer WHERE id IN (SELECT id FROM buyer WHERE mail LIKE '%_@mail.com' OR mail LIKE '@mail.com')"),
        (False, f"SELECT name FROM buyer WHERE {domain} = 'mail.com'", "SELECT name FROM buyer WHERE mail LIKE '%mail.com'", "SELECT name FROM buyer WHERE substr(mail, -9) = '@mail.com'"),
        (False, f"SELECT name FROM buyer WHERE length({first}) = 3", "SELECT name FROM buyer WHERE name LIKE 'A%' AND substr(name, 4, 1) = ' ' OR name LIKE 'Uma %'", "SELECT name FROM buyer WHERE instr(name, ' ') = 4"),
        (False, f"SELECT {first}, count(*) FROM buyer GROUP BY 1", "SELECT trim(substr(name, 1, 4)), count(*) FROM buyer GROUP BY 1", f"SELECT {first} AS f, count(id) FROM buyer GROUP BY f"),
        (False, "SELECT substr(name, instr(name, ' ') + 1) FROM buyer", "SELECT replace(name, rtrim(name, replace(name, ' ', '')), '') FROM buyer", "SELECT substr(name, 1 + instr(name, ' '), 100) FROM buyer"),
        (True, "SELECT count(*) FROM buyer WHERE note IS NULL OR trim(note) = ''", "SELECT count(*) FROM buyer WHERE note IS NULL OR note = ''", "SELECT count(*) FROM buyer WHERE coalesce(trim(note), '') = ''"),
        (True, "SELECT count(*) FROM buyer WHERE trim(note) <> ''", "SELECT count(*) FROM buyer WHERE note <> ''", "SELECT count(*) FROM buyer WHERE length(trim(note)) > 0"),
        (False, f"SELECT max({amount}) FROM drug", "SELECT CAST(max(substr(label, instr(label, ' ') + 1)) AS INTEGER) FROM drug", f"SELECT {amount} AS n FROM drug ORDER BY n DESC LIMIT 1"),
        (False, f"SELECT id FROM drug WHERE {amount} > 400", "SELECT id FROM drug WHERE label GLOB '* [4-9]* mg' AND label NOT LIKE '% 400 mg'", f"SELECT id FROM drug WHERE {amount} >= 401"),
        (True, "SELECT id FROM drug WHERE ',' || tags || ',' LIKE '%,rx,%'", "SELECT id FROM drug WHERE tags LIKE '%,rx' OR tags LIKE '%,rx,%'", "SELECT id FROM drug WHERE tags LIKE 'rx' OR tags LIKE 'rx,%' OR tags LIKE '%,rx' OR tags LIKE '%,rx,%'"),
        (True, "SELECT id FROM drug WHERE ',' || tags || ',' LIKE '%,otc,%'", "SELECT id FROM drug WHERE tags LIKE '%otc%'", "SELECT id FROM drug WHERE tags LIKE 'otc' OR tags LIKE 'otc,%' OR tags LIKE '%,otc' OR tags LIKE '%,otc,%'"),
        (True, "SELECT id, CAST(substr(code, 3) AS INTEGER) FROM drug", "SELECT id, CAST(substr(code, 3, 2) AS INTEGER) FROM drug", "SELECT id, CAST(replace(code, 'RX', '') AS INTEGER) FROM drug"),
        (True, "SELECT id FROM drug WHERE trim(subject) = 'Late'", "SELECT id FROM drug WHERE ltrim(subject) = 'Late'", "SELECT id FROM drug WHERE rtrim(ltrim(subject)) = 'Late'"),
        (True, "SELECT id FROM drug WHERE subject LIKE '%?'", "SELECT id FROM drug WHERE subject LIKE '%?%'", "SELECT id FROM drug WHERE substr(subject, length(subject)) = '?'"),
        (False, "SELECT id FROM drug WHERE label GLOB '*[0-9]*'", "SELECT id FROM drug WHERE label LIKE '%0%'", "SELECT id FROM drug WHERE NOT label NOT GLOB '*[0-9]*'"),
        (False, f"SELECT count(DISTINCT {domain}) FROM buyer", "SELECT count(DISTINCT substr(mail, -8)) FROM buyer", f"SELECT count(*) FROM (SELECT DISTINCT {domain} FROM buyer)"),
    ):  # fmt: skip
        yield kind, schema, gold, wrong, False, engines
        yield kind, schema, gold, right, True, engines


NESTED = """
CREATE TABLE film (id INTEGER PRIMARY KEY, title VARCHAR, tags VARCHAR[], scores INTEGER[],
    maker STRUCT(name VARCHAR, born INTEGER), awards MAP(VARCHAR, INTEGER));
INSERT INTO film SELECT n, 'Film ' || n, ['drama', 'tag ' || n % 5], [n % 7, n % 5 + 3],
    {'name': 'Maker ' || n % 6, 'born': 1950 + n}, MAP {'oscar': n % 4, 'bear': n % 3 + 1}
    FROM range(24) AS s (n)
"""
NESTED_CASES = [
    # gold, wrong answer, right answer
    ("len(tags) >= 2", "len(tags) >= 1", "array_length(tags) > 1"),
    ("list_contains(tags, 'tag 3')", "tags[2] = 'tag 3'", "len(list_filter(tags, lambda x: x = 'tag 3')) > 0"),
    ("list_contains(tags, 'tag 1')", "tags[-1] = 'tag 1'", "array_has(tags, 'tag 1')"),
    ("list_sum(scores) > 8", "scores[1] + scores[2] > 8", "8 < list_sum(scores)"),
    ("list_max(scores) = 6", "greatest(scores[1], scores[2]) = 6", "list_max(scores) BETWEEN 6 AND 6"),
    ("list_min(scores) < 2", "least(scores[1], scores[2]) < 2", "NOT list_min(scores) >= 2"),
    ("len(list_distinct(scores)) = 1", "scores[1] = scores[2]", "list_unique(scores) = 1"),
    ("maker.born > 1965", "maker.born > 1965 AND maker.name LIKE 'Maker%'", "maker['born'] >= 1966"),
    ("maker.name = 'Maker 2'", "maker.name LIKE '%2'", "struct_extract(maker, 'name') = 'Maker 2'"),
    ("maker.born BETWEEN 1955 AND 1960", "id BETWEEN 5 AND 10", "maker.born >= 1955 AND maker.born <= 1960"),
    ("awards['oscar'] = 3", "list_contains(map_values(awards), 3) AND awards['oscar'] > 2", "3 = awards['oscar']"),
    ("awards['bear'] IS NOT NULL", "true", "map_contains(awards, 'bear')"),
    ("cardinality(awards) = 2", "true", "len(map_keys(awards)) = 2"),
    ("list_contains(map_values(awards), 3)", "awards['oscar'] = 3 OR awards['bear'] = 3", "list_has(map_values(awards), 3)"),
    ("tags[1] = 'drama'", "list_contains(tags, 'drama')", "list_extract(tags, 1) = 'drama'"),
]  # fmt: skip


def _tied_groups() -> Iterator[Raw]:
    """Ranks of groups, which differ only where sums are equal."""
    kind, schema = "tied groups", "shop"
    by_customer = "orders o JOIN customer c ON c.id = o.customer"
    for value, rows, by, of in (
        ("sum(total)", "orders", "customer", ""),
        ("sum(price * stock)", "product", "category", ""),
        ("avg(price)", "product", "category", ""),
        ("max(total)", by_customer, "name", "city"),
        ("sum(total)", by_customer, "name", "city"),
    ):
        keys = f"{of}, {by}" if of else by
        part = f"PARTITION BY {of} " if of else ""
        groups = f"SELECT {keys}, {value} AS v FROM {rows} GROUP BY {keys}"

        def ranked(rank: str, which: str, keys: str = keys, part: str = part, groups: str = groups) -> str:
            over = f"SELECT {keys}, {rank}() OVER ({part}ORDER BY v DESC) AS place FROM ({groups}) AS g"
            return f"SELECT {keys} FROM ({over}) AS t WHERE place {which}"

        for rank, which, others in (
            ("rank", "= 1", ["row_number"]),
            ("rank", "<= 2", ["row_number", "dense_rank"]),
            ("dense_rank", "<= 2", ["rank"]),
        ):
            for other in others:
                yield kind, schema, ranked(rank, which), ranked(other, which), False, True
        more = f"SELECT count(*) FROM ({groups}) AS h WHERE h.v > g.v"
        more += f" AND h.{of} = g.{of}" if of else ""
        right = f"SELECT {keys} FROM ({groups}) AS g WHERE ({more}) < 2"
        yield kind, schema, ranked("rank", "<= 2"), right, True, True


def _amounts() -> Iterator[Raw]:
    """Amounts of several rows, and bounds that no group meets exactly."""
    kind = "amount"
    per_category = "SELECT category FROM product GROUP BY category HAVING {}"
    steps = "SELECT station, celsius - lag(celsius) OVER (PARTITION BY station ORDER BY day, id) AS step FROM reading"
    for schema, query, amount, bound in (
        ("shop", "SELECT customer FROM orders GROUP BY customer HAVING {}", "sum(total)", "120.5"),
        ("shop", per_category, "avg(price)", "22.5"),
        ("shop", "SELECT orders FROM item GROUP BY orders HAVING {}", "sum(quantity * discount)", "0.37"),
        ("shop", per_category, "100.0 * sum(CASE WHEN stock > 20 THEN 1 ELSE 0 END) / count(*)", "40"),
        (
            "shop",
            "SELECT o.id FROM orders o WHERE {}",
            "o.total",
            "(SELECT avg(p.total) + 7.3 FROM orders p WHERE p.customer = o.customer)",
        ),
        (
            "shop",
            "SELECT a.id, b.id FROM product a JOIN product b ON a.category = b.category AND a.id < b.id WHERE {}",
            "abs(a.price - b.price)",
            "3.5",
        ),
        (
            "shop",
            "SELECT c.name FROM customer c JOIN orders o ON o.customer = c.id GROUP BY c.id, c.name HAVING {}",
            "sum(o.total)",
            "(SELECT avg(total) * 2 + 0.3 FROM orders)",
        ),
        (
            "staff",
            "SELECT e.name FROM employee e JOIN employee b ON b.id = e.boss WHERE {}",
            "e.salary",
            "b.salary + 255",
        ),
        (
            "staff",
            "SELECT station FROM reading GROUP BY station HAVING {}",
            "max(celsius) - min(celsius)",
            "12.5",
        ),
        ("staff", f"SELECT station FROM ({steps}) AS s WHERE {{}}", "step", "6.5"),
    ):
        for op, other, reverse, opposite in ((">", ">=", "<", "<="), ("<=", "<", ">=", ">")):
            gold = query.format(f"{amount} {op} {bound}")
            yield kind, schema, gold, query.format(f"{amount} {other} {bound}"), False, True
            yield kind, schema, gold, query.format(f"{bound} {reverse} {amount}"), True, True
            yield kind, schema, gold, query.format(f"NOT {amount} {opposite} {bound}"), True, True
            if amount.startswith(("sum", "avg")):
                distinct = amount.replace("(", "(DISTINCT ", 1)
                yield kind, schema, gold, query.format(f"{distinct} {op} {bound}"), False, True


def nested_cases() -> Iterator[Case]:
    """Cases of lists, structs and maps of DuckDB."""
    for number, (gold, wrong, right) in enumerate(NESTED_CASES):
        for answer, is_right in ((wrong, False), (right, True)):
            query = "SELECT title FROM film WHERE "
            yield Case("nested", "nested", query + gold, query + answer, is_right, True, number % 2 == 1)


def made(engine: str, schema: str, folder: Path, url: str = "") -> str | Path:
    """Path or URL of a new database of one schema."""
    statements = [NESTED] if engine == "duckdb" and schema == "nested" else script(schema)
    return new_database(engine, f"classes_{schema}", ";\n".join(statements), folder, url)


def new_database(engine: str, name: str, sql: str, folder: Path, url: str = "") -> str | Path:
    """Path or URL of a new database that a script makes.

    Args:
        url: URL of a superuser of a PostgreSQL server, where a database of that name is replaced.
    """
    if engine == "sqlite":
        path = folder / f"{name}.sqlite"
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(sql)
        return path
    if engine == "duckdb":
        import duckdb

        with duckdb.connect(str(folder / f"{name}.duckdb")) as duck:
            duck.execute(sql)
        return f"duckdb:///{folder}/{name}.duckdb"
    import psycopg

    from text2sql_grpo.sql.postgres_role import restricted_role_sql

    server = url.rpartition("/")[0]
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(f"DROP DATABASE IF EXISTS {name}")
        admin.execute(f"DROP ROLE IF EXISTS reader_{name}")
        admin.execute(f"CREATE DATABASE {name}")
    with psycopg.connect(f"{server}/{name}", autocommit=True) as admin:
        admin.execute(sql)
        admin.execute(restricted_role_sql(f"reader_{name}", "secret", name))
    return f"postgresql://reader_{name}:secret@{server.rpartition('@')[2]}/{name}"


def chosen(engine: str, *, held_out: bool | None = None) -> list[Case]:
    """Cases that an engine runs."""
    found = [case for case in cases() if case.engines or engine == "sqlite"]
    found = [case for case in found if engine != "sqlite" or not case.schema.startswith("native")]
    found += nested_cases() if engine == "duckdb" else []
    return [case for case in found if held_out is None or case.held_out == held_out]


@dataclass
class Outcome:
    case: Case
    agrees: bool
    is_paid: bool
    uncovered: str


def graded(
    engine: str, found: Iterable[Case], folder: Path, url: str = "", *, with_grader: Grader | None = None
) -> Iterator[Outcome]:
    """Outcome of each case; `agrees`: the answer has the gold's result on the database."""
    executor = SQLExecutor()
    grader = with_grader or Grader(executor, suite=TestSuite(executor, folder / "cache"))
    plain = Grader(executor)
    databases: dict[str, str | Path] = {}
    for case in found:
        schema = case.schema.removeprefix("native ")
        if schema not in databases:
            databases[schema] = made(engine, schema, folder, url)
        agrees = plain.grade(databases[schema], case.gold, case.answer).strict
        verdict = grader.grade(databases[schema], case.gold, case.answer)
        yield Outcome(case, agrees, verdict.strict, verdict.gap)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engine", choices=("sqlite", "duckdb", "postgresql"), default="sqlite")
    parser.add_argument("--url", default="", help="URL of a superuser of a PostgreSQL server")
    parser.add_argument("--held_out", action="store_true", help="the cases not looked at")
    parser.add_argument("--kind", help="one class alone")
    parser.add_argument("--quick", action="store_true", help=f"one of {QUICK_STRIDE} cases")
    parser.add_argument("--declared_nulls", action="store_true", help="as grading.nulls: declared")
    options = parser.parse_args()
    started = time.perf_counter()
    cases = chosen(options.engine, held_out=options.held_out)
    found = [case for case in cases if options.kind in (None, case.kind)]
    if options.quick:
        found = found[::QUICK_STRIDE]
    if not found:
        kinds = sorted({case.kind for case in cases})
        parser.error(f"no class is called {options.kind!r}; there are {', '.join(kinds)}")
    tally: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        executor = SQLExecutor()
        suite = TestSuite(executor, Path(folder) / "cache", declared_nulls=options.declared_nulls)
        grader = Grader(executor, suite=suite)
        for outcome in graded(options.engine, found, Path(folder), options.url, with_grader=grader):
            count = tally.setdefault(outcome.case.kind, Counter())
            side = "right" if outcome.case.is_right else "wrong"
            if not outcome.agrees:
                side = "disagrees"
            count[side] += 1
            bad = outcome.agrees and outcome.is_paid != outcome.case.is_right
            count[f"{side} judged wrongly"] += bad
            count["uncovered"] += bool(outcome.uncovered)
            if bad or not outcome.agrees or outcome.uncovered:
                what = "DISAGREES" if not outcome.agrees else ("REFUSED" if outcome.case.is_right else "PAID")
                if not bad and outcome.agrees:
                    what = "uncovered: " + outcome.uncovered
                print(f"{what} ({outcome.case.kind})\n  {outcome.case.gold}\n  {outcome.case.answer}")
    print(f"{'class':16}  wrong  paid  right  refused  disagrees  uncovered")
    total: Counter[str] = Counter()
    for kind, count in tally.items():
        total.update(count)
        keys = ("wrong", "wrong judged wrongly", "right", "right judged wrongly", "disagrees", "uncovered")
        print(
            f"{kind:16} {count[keys[0]]:6} {count[keys[1]]:5} {count[keys[2]]:6} {count[keys[3]]:8}", end=" "
        )
        print(f"{count[keys[4]]:10} {count[keys[5]]:10}")
    print(json.dumps({"engine": options.engine, **total, "wall_s": round(time.perf_counter() - started, 1)}))


if __name__ == "__main__":
    main()
