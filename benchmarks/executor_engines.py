"""The executor on DuckDB and PostgreSQL beside the bare driver; `executor.py --engine` runs it.

Look-ups by key, single calls beside single calls, in turns. The bare side is a kept connection of the
engine's own driver, one thread, autocommit. Ours runs with all guards on, no cache and two workers.
PostgreSQL is a private server from the system's package, on this machine.
"""

import gc
import json
import os
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Limits

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tests' server

N_ROWS = 40_000
LIMIT_S = 1.0
TABLE = "CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price DOUBLE PRECISION, shop INTEGER)"
LATE = {
    "sqlite": [
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
        "SELECT count(*) FROM item a, item b, item c",
    ],
    "duckdb": ["SELECT sum(a.price * b.price + c.price) FROM item a, item b, item c"],
    "postgres": ["SELECT count(*) FROM item a, item b, item c", "SELECT pg_sleep(100)"],
}
LATE["duckdb"] += ["SELECT count(*) FROM range(10_000_000_000_000)"]

Bare = Callable[[str], list[tuple[Any, ...]]]


@contextmanager
def served(engine: str, folder: Path) -> Iterator[tuple[str, Bare]]:
    """A database of one table: its address, and the bare driver on it."""
    rows = [(i, f"item {i}", i / 7, i % 200) for i in range(N_ROWS)]
    if engine == "sqlite":
        path = str(folder / "item.sqlite")
        with closing(sqlite3.connect(path)) as opened:
            opened.execute(TABLE)
            opened.executemany("INSERT INTO item VALUES (?, ?, ?, ?)", rows)
            opened.commit()
        with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as opened:
            yield path, lambda sql: opened.execute(sql).fetchall()
    elif engine == "duckdb":
        import duckdb

        path = str(folder / "item.duckdb")
        with duckdb.connect(path) as writer:
            writer.execute(TABLE)
            made = "range, 'item ' || range, range / 7.0::DOUBLE, range % 200"
            writer.execute(f"INSERT INTO item SELECT {made} FROM range({N_ROWS})")
        with duckdb.connect(path, read_only=True, config={"threads": 1}) as reader:
            yield f"duckdb:///{path}", lambda sql: reader.execute(sql).fetchall()
    else:
        import psycopg

        from tests.postgres_server import running_postgres
        from text2sql_grpo.sql.postgres_role import restricted_role_sql

        with running_postgres() as server:
            with psycopg.connect(server.admin_url(), autocommit=True) as admin:
                admin.execute(TABLE)
                admin.cursor().executemany("INSERT INTO item VALUES (%s, %s, %s, %s)", rows)
                admin.execute("ANALYZE item")
                admin.execute(restricted_role_sql("reader", "x", "postgres"))
            url = server.url("reader", "x")
            with psycopg.connect(url, autocommit=True) as connection:
                yield url, lambda sql: connection.execute(sql).fetchall()


def lookup(i: int) -> str:
    return f"SELECT name, price FROM item WHERE id = {i}"


def speed(address: str, bare: Bare, executor: SQLExecutor, seed: int, rounds: int) -> dict[str, float]:
    """Microseconds of a look-up, medians over the rounds."""
    asked = [lookup(i) for i in random.Random(seed).sample(range(N_ROWS), 600)]
    seconds: dict[str, list[float]] = {"bare": [], "single": [], "batch": []}
    for _ in range(rounds + 1):
        ways: dict[str, Callable[[], list[Any]]] = {
            "bare": lambda: [bare(sql) for sql in asked],
            "single": lambda: [list(executor.execute(address, sql).rows) for sql in asked],
            "batch": lambda: [
                list(outcome.rows) for outcome in executor.execute_many([(address, sql) for sql in asked])
            ],
        }
        found = {}
        for name, run in ways.items():
            started = time.perf_counter()
            found[name] = run()
            seconds[name].append((time.perf_counter() - started) / len(asked))
        assert found["bare"] == found["single"] == found["batch"]
    us = {name: round(1e6 * statistics.median(all_s[1:]), 1) for name, all_s in seconds.items()}
    best = {name: round(1e6 * min(all_s[1:]), 1) for name, all_s in seconds.items()}
    return {
        **{f"{name}_us": value for name, value in us.items()},
        "single_over_bare_us": round(us["single"] - us["bare"], 1),
        "single_over_bare_us_best": round(best["single"] - best["bare"], 1),
    }


def late_ms(engine: str, address: str, executor: SQLExecutor, rounds: int) -> float:
    """Worst lateness of the limit of `LIMIT_S`."""
    worst = 0.0
    for sql in LATE[engine] * rounds:
        started = time.perf_counter()
        outcome = executor.execute(address, sql, limits=Limits(timeout_s=LIMIT_S))
        worst = max(worst, time.perf_counter() - started - LIMIT_S)
        assert outcome.status == "timeout", outcome
    return round(1000 * worst, 1)


def soak(address: str, executor: SQLExecutor, n_queries: int, seed: int) -> dict[str, Any]:
    """Queries with a number each, half in batches; one in a hundred fails, one in 2,000 is late."""
    rng = random.Random(seed)
    n_wrong, memory = 0, []
    started = time.perf_counter()
    for first in range(0, n_queries, 100):
        numbers = range(first, min(first + 100, n_queries))
        keys = [rng.randrange(N_ROWS) for _ in numbers]
        asked = [f"SELECT {n}, name FROM item WHERE id = {key}" for n, key in zip(numbers, keys, strict=True)]
        asked[0] = f"SELECT absent_{first} FROM item"
        is_late = first % 2_000 == 0 and len(asked) > 1
        if is_late:
            asked[1] = "SELECT count(*) FROM item a, item b, item c WHERE a.price + b.price > c.price"
        limits = Limits(timeout_s=0.5 if is_late else 10.0)
        if first // 100 % 2:
            outcomes = [executor.execute(address, sql, limits=limits) for sql in asked]
        else:
            outcomes = executor.execute_many([(address, sql) for sql in asked], limits=limits)
        n_wrong += outcomes[0].status != "error" or f"absent_{first}" not in outcomes[0].error
        n_wrong += is_late and outcomes[1].status != "timeout"
        for n, key, outcome in list(zip(numbers, keys, outcomes, strict=True))[2 if is_late else 1 :]:
            n_wrong += outcome.rows != ((n, f"item {key}"),)
        memory.append(_memory_mb())
    third = len(memory) // 3 or 1
    return {
        "soak_queries": n_queries,
        "soak_wrong": n_wrong,
        "soak_memory_mb_early": [
            round(statistics.mean(part), 1) for part in zip(*memory[third : 2 * third], strict=True)
        ],
        "soak_memory_mb_end": [
            round(statistics.mean(part), 1) for part in zip(*memory[-third:], strict=True)
        ],
        "soak_s": round(time.perf_counter() - started),
    }


def _memory_mb() -> tuple[float, float]:
    """Resident memory of this process, and of its largest child that runs SQL."""
    gc.collect()
    children = Path(f"/proc/{os.getpid()}/task/").glob("*/children")
    pids = [pid for file in children for pid in file.read_text().split()]
    return _resident_mb(str(os.getpid())), max([0.0, *map(_resident_mb, pids)])


def _resident_mb(pid: str) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return 0.0


def main(engine: str, *, rounds: int, n_soak: int, seed: int) -> None:
    """Print the figures of one engine; the last line is JSON."""
    figures: dict[str, Any] = {"engine": engine, "load_before": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory() as folder, served(engine, Path(folder)) as (address, bare):
        time.sleep(0.2)  # until the file counts as settled
        with SQLExecutor(workers=2, cache_entries=0) as executor:
            figures |= speed(address, bare, executor, seed, rounds)
            figures["late_ms_worst"] = late_ms(engine, address, executor, rounds)
            if n_soak:
                figures |= soak(address, executor, n_soak, seed)
    print(json.dumps(figures | {"load_after": round(os.getloadavg()[0], 1)}))
