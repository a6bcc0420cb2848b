"""Cost of a guarded query beside the engine's own driver, and the overrun of the time limit.

The bare side is a kept connection of the engine's driver in one thread: no limit, no authorizer, no sandbox;
on SQLite the file is opened as immutable. The executor runs with all guards on, no cache and two workers: one
query a call (`single`) and all queries in one call (`batch`). The sides take turns, round after round, so
that other load meets all of them. Figures are medians over the rounds, in microseconds a query: by the clock
(`us`) and of processor time of this process and the SQL workers (`cpu_us`; PostgreSQL's server is not
counted). `ratio` and `cpu_ratio` are the bare side's time over this one's.

The queries are look-ups by key in a table of 40,000 rows and, on SQLite, Spider's dev gold queries. Hostile
queries then run against a limit of 1 s: `late_ms_worst` is the longest overrun, `left_behind` the number of
threads and processes that are still there a second after the executor was closed.

Run: python benchmarks/executor.py --quick                    (under a minute)
     python benchmarks/executor.py --engine duckdb|postgres
Linux only. The last line is JSON.
"""

import argparse
import json
import random
import resource
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from spider import SPIDER, check_spider

from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Limits

N_ROWS = 40_000
N_LOOKUPS = 600
QUICK_STRIDE = 8  # of Spider's gold queries
# Two of Spider's gold queries return more rows than the executor keeps by default.
LIMITS = Limits(timeout_s=30, max_rows=100_000, max_bytes=50_000_000)
HOSTILE_LIMIT_S = 1.0
TABLE = "CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price DOUBLE PRECISION, shop INTEGER)"

_NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
_LONG = "(SELECT hex(zeroblob(400000)))"
_CTES = ", ".join(f"c{i} AS (SELECT x.a FROM c{i - 1} x, c{i - 1} y)" for i in range(1, 21))
_CROSS_JOIN = "SELECT count(*) FROM item a, item b, item c"
HOSTILE = {
    "sqlite": [
        _CROSS_JOIN,
        _NUMBERS + "SELECT count(*) FROM n",
        f"SELECT instr({_LONG}, hex(zeroblob(150000)) || '1')",  # one long opcode, like the next
        f"SELECT trim({_LONG}, replace(hex(zeroblob(30000)), '0', '1') || '0')",
        _NUMBERS + f"SELECT sum(instr({_LONG} || i, '00001')) FROM n",
        _NUMBERS + f"SELECT sum(length(replace({_LONG}, '0', i))) FROM n",
        _NUMBERS + f"SELECT max(json_array({_LONG}, i)) FROM n",
        _NUMBERS + "SELECT i FROM n ORDER BY -i LIMIT 5",
        _NUMBERS + "SELECT i FROM n",
        _NUMBERS + f"SELECT i, {_LONG} FROM n",
        _NUMBERS + "SELECT group_concat(i) FROM n",
        _NUMBERS + "SELECT count(DISTINCT i) FROM n",
        f"WITH c0 AS (SELECT 1 a), {_CTES} SELECT count(*) FROM c20",
        "SELECT printf('%.*c', 999999999, 'x')",
    ],
    "duckdb": [
        "SELECT sum(a.price * b.price + c.price) FROM item a, item b, item c",
        "SELECT count(*) FROM range(10_000_000_000_000)",
    ],
    "postgres": [_CROSS_JOIN, "SELECT pg_sleep(100)"],
}

Rows = list[tuple[Any, ...]]
Query = tuple[str, str]  # address and SQL


@dataclass
class Side:
    """One way to run queries.

    Attributes:
        wall_s: Seconds a query, of each round.
        cpu_s: Seconds of processor time a query, of each round.
    """

    run: Callable[[Sequence[Query]], list[Rows]]
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


class BareSQLite:
    """One immutable connection a database, without protection."""

    def __init__(self) -> None:
        self._open: dict[str, sqlite3.Connection] = {}

    def __call__(self, address: str, sql: str) -> Rows:
        if address not in self._open:
            self._open[address] = sqlite3.connect(f"file:{address}?mode=ro&immutable=1", uri=True)
        return self._open[address].execute(sql).fetchall()


@contextmanager
def served(engine: str, folder: Path) -> Iterator[tuple[str, Callable[[str, str], Rows]]]:
    """Address of a database with one table, and the bare driver."""
    rows = [(i, f"item {i}", i / 7, i % 200) for i in range(N_ROWS)]
    if engine == "sqlite":
        path = str(folder / "item.sqlite")
        with closing(sqlite3.connect(path)) as writer:
            writer.execute(TABLE)
            writer.executemany("INSERT INTO item VALUES (?, ?, ?, ?)", rows)
            writer.commit()
        yield path, BareSQLite()
    elif engine == "duckdb":
        import duckdb

        path = str(folder / "item.duckdb")
        with duckdb.connect(path) as database:
            database.execute(TABLE)
            made = "range, 'item ' || range, range / 7.0::DOUBLE, range % 200"
            database.execute(f"INSERT INTO item SELECT {made} FROM range({N_ROWS})")
        with duckdb.connect(path, read_only=True, config={"threads": 1}) as reader:
            yield f"duckdb:///{path}", lambda _, sql: reader.execute(sql).fetchall()
    else:
        import psycopg

        from text2sql_grpo.grading.postgres_server import PostgresServer
        from text2sql_grpo.sql.postgres_role import restricted_role_sql

        server = PostgresServer(folder)
        with psycopg.connect(server.url, autocommit=True) as admin:
            admin.execute(TABLE)
            admin.cursor().executemany("INSERT INTO item VALUES (%s, %s, %s, %s)", rows)
            admin.execute("ANALYZE item")
            admin.execute(restricted_role_sql("reader", "secret", "postgres"))
        url = f"postgresql://reader:secret@{server.url.rpartition('@')[2]}"
        with psycopg.connect(url, autocommit=True) as connection:
            yield url, lambda _, sql: connection.execute(sql).fetchall()


def spider_golds(data: Path) -> list[Query]:
    """Spider's dev gold queries with the paths of their databases."""
    questions = json.loads((data / "dev.json").read_text(encoding="utf-8"))
    paths = {name: data / "database" / name / f"{name}.sqlite" for name in {q["db_id"] for q in questions}}
    return [(str(paths[question["db_id"]]), question["query"]) for question in questions]


def measure(
    queries: Sequence[Query], bare: Callable[[str, str], Rows], executor: SQLExecutor, rounds: int
) -> dict[str, Side]:
    """Times of each side, which take turns in another order each round; their rows must be equal."""

    def single(address: str, sql: str) -> Rows:
        return list(executor.execute(address, sql, limits=LIMITS).rows)

    sides = {
        "bare": Side(lambda asked: [bare(*query) for query in asked]),
        "single": Side(lambda asked: [single(*query) for query in asked]),
        "batch": Side(lambda asked: [list(one.rows) for one in executor.execute_many(asked, limits=LIMITS)]),
    }
    warm = [side.run(queries) for side in sides.values()]
    if any(rows != warm[0] for rows in warm):
        raise RuntimeError("the executor returns rows that differ from the bare driver's")
    names = list(sides)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            cpu_s, started = processor_s(), time.perf_counter()
            sides[name].run(queries)
            sides[name].wall_s.append((time.perf_counter() - started) / len(queries))
            sides[name].cpu_s.append((processor_s() - cpu_s) / len(queries))
    return sides


def processor_s() -> float:
    """Processor seconds of this process and of its children, ended ones included."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    living_s = 0.0
    for pid in children():
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):
                living_s += int(task.read_text().split()[0]) / 1e9
    return time.process_time() + ended.ru_utime + ended.ru_stime + living_s


def children() -> set[int]:
    """Ids of the processes that this one started."""
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that ended
            found |= set(map(int, file.read_text().split()))
    return found


def figures(sides: dict[str, Side]) -> dict[str, dict[str, float]]:
    """Medians of each side in microseconds a query, and the bare side's over them."""
    found: dict[str, dict[str, float]] = {}
    bare_s, bare_cpu_s = (statistics.median(each) for each in (sides["bare"].wall_s, sides["bare"].cpu_s))
    for name, side in sides.items():
        wall_s, cpu_s = statistics.median(side.wall_s), statistics.median(side.cpu_s)
        found[name] = {"us": round(1e6 * wall_s, 1), "cpu_us": round(1e6 * cpu_s, 1)}
        found[name] |= {"ratio": round(bare_s / wall_s, 2), "cpu_ratio": round(bare_cpu_s / cpu_s, 2)}
    return found


def table_of(title: str, found: dict[str, dict[str, float]]) -> Table:
    table = Table(
        "side", "us a query", "us of processor time", "ratio", "ratio of processor time", title=title
    )
    for name, row in found.items():
        values = (row["us"], row["cpu_us"], row["ratio"], row["cpu_ratio"])
        table.add_row(name, *(f"{value:,}" for value in values))
    return table


def late_ms(address: str, queries: Sequence[str], executor: SQLExecutor) -> float:
    """Worst overrun of the time limit, in milliseconds."""
    worst = 0.0
    for sql in queries:
        started = time.perf_counter()
        outcome = executor.execute(address, sql, limits=Limits(timeout_s=HOSTILE_LIMIT_S))
        worst = max(worst, time.perf_counter() - started - HOSTILE_LIMIT_S)
        if outcome.is_ok and not outcome.is_truncated:
            raise RuntimeError(f"a hostile query ended within {HOSTILE_LIMIT_S:g} s: {sql}")
    return round(1e3 * worst, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=SPIDER, help="Spider's folder")
    parser.add_argument("--engine", choices=list(HOSTILE), default="sqlite")
    parser.add_argument("--rounds", type=int, help="11; with --quick 3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    options = parser.parse_args()
    if options.engine == "sqlite":
        check_spider(parser, options.data)
    rounds = options.rounds or (3 if options.quick else 11)
    console = Console(width=120)
    result: dict[str, Any] = {"benchmark": "executor", "engine": options.engine, "rounds": rounds}
    with tempfile.TemporaryDirectory() as folder, served(options.engine, Path(folder)) as (address, bare):
        keys = random.Random(options.seed).sample(range(N_ROWS), N_LOOKUPS)
        lookups = [(address, f"SELECT name, price FROM item WHERE id = {key}") for key in keys]
        workloads = {"lookups": lookups}
        if options.engine == "sqlite":
            workloads["spider"] = spider_golds(options.data)[:: QUICK_STRIDE if options.quick else 1]
        time.sleep(0.2)  # until the file counts as settled
        threads, processes = threading.active_count(), children()
        with SQLExecutor(workers=2, cache_entries=0) as executor:
            for name, queries in workloads.items():
                result[name] = figures(measure(queries, bare, executor, rounds))
                console.print(table_of(f"{name}: {len(queries):,} queries, {rounds} rounds", result[name]))
            result["late_ms_worst"] = late_ms(address, HOSTILE[options.engine], executor)
        time.sleep(1)
        result["left_behind"] = threading.active_count() - threads + len(children() - processes)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
