"""What the executor costs beside a bare sqlite3 loop and other ways to bound a query, and what they leave.

All methods run in turns, round after round, on the same databases, so that other load meets all alike. Two
figures stand for each: of its best round and of its median round. Our executor runs with all guards on, no
cache and two workers.

Run: python benchmarks/executor.py [--quick] [--rounds 15] [--seed 0]
Linux only. The last line is JSON.
"""

import argparse
import json
import os
import random
import resource
import shutil
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import executor_methods as methods
from executor_methods import Method, Query, one_by_one
from rich.console import Console
from rich.table import Table

LIMIT_S = 30.0  # where no query is late
HOSTILE_LIMIT_S = 1.0
WATCHED_S = 0.3  # after a hostile query, for what is left behind
HOSTILE_MEMORY = 3 << 30  # of a process that runs a hostile query without our guards
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

_NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
_LONG = "(SELECT hex(zeroblob(400000)))"
_CTES = ", ".join(f"c{i} AS (SELECT x.a FROM c{i - 1} x, c{i - 1} y)" for i in range(1, 21))
HOSTILE = {
    "endless count": _NUMBERS + "SELECT count(*) FROM n",
    "one long opcode: instr": f"SELECT instr({_LONG}, hex(zeroblob(150000)) || '1')",
    "endless cross join": "SELECT count(*) FROM item a, item b, item c",
    "one long opcode: trim": f"SELECT trim({_LONG}, replace(hex(zeroblob(30000)), '0', '1') || '0')",
    "long opcodes: instr": _NUMBERS + f"SELECT sum(instr({_LONG} || i, '00001')) FROM n",
    "long opcodes: replace": _NUMBERS + f"SELECT sum(length(replace({_LONG}, '0', i))) FROM n",
    "long opcodes: json": _NUMBERS + f"SELECT max(json_array({_LONG}, i)) FROM n",
    "endless sort": _NUMBERS + "SELECT i FROM n ORDER BY -i LIMIT 5",
    "endless rows": _NUMBERS + "SELECT i FROM n",
    "endless long rows": _NUMBERS + f"SELECT i, {_LONG} FROM n",
    "endless text": _NUMBERS + "SELECT group_concat(i) FROM n",
    "endless distinct": _NUMBERS + "SELECT count(DISTINCT i) FROM n",
    "nested CTEs": f"WITH c0 AS (SELECT 1 a), {_CTES} SELECT count(*) FROM c20",
    "printf": "SELECT printf('%.*c', 999999999, 'x')",
}
QUICK_HOSTILE = 2  # of the others; ours runs all

Batch = Callable[[Sequence[Query], float], list[Any]]
BARE, BATCH, SINGLE, SKYRL, BIRD = "bare loop", "ours, batch", "ours, single calls", "SkyRL", "BIRD"
CEILING = "two bare loops, two processes"


@dataclass
class Side:
    """One method on one workload.

    Attributes:
        stride: It runs every n-th query, for slow methods.
        seconds: Per query, of each round.
    """

    run: Batch
    stride: int = 1
    seconds: list[float] = field(default_factory=list)


@dataclass
class Attack:
    """How one hostile query ended.

    Attributes:
        elapsed_s: Until the caller had control again; None if it never had.
        threads: Left behind, processes counted with them.
        cores: Kept busy afterwards, as a mean over `WATCHED_S`.
    """

    elapsed_s: float | None
    threads: int = 0
    cores: float = 0.0


def lookup_database(folder: Path, rng: random.Random) -> tuple[str, list[Query], list[Query]]:
    """A database of its own, 2,000 look-ups by key, and queries of 20 to 50 ms."""
    path = str(folder / "lookup.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL, shop INTEGER)")
        connection.execute("CREATE TABLE shop (id INTEGER PRIMARY KEY, city TEXT)")
        items = [(i, f"item {i}", rng.random(), rng.randrange(200)) for i in range(40_000)]
        connection.executemany("INSERT INTO item VALUES (?, ?, ?, ?)", items)
        connection.executemany("INSERT INTO shop VALUES (?, ?)", [(i, f"city {i % 50}") for i in range(200)])
        connection.commit()
    lookups = [f"SELECT name, price FROM item WHERE id = {i}" for i in rng.sample(range(40_000), 2_000)]
    medium = [
        "SELECT city, count(*), avg(price), max(name) FROM item JOIN shop ON shop = shop.id"
        f" WHERE price > {i / 1000} GROUP BY city ORDER BY 2 DESC, 1"
        for i in range(20)
    ]
    return path, [(path, sql) for sql in lookups], [(path, sql) for sql in medium]


def spider_golds(data: Path, folder: Path) -> list[Query]:
    """Spider's dev golds, on copies of their databases."""
    questions = json.loads((data / "dev.json").read_text(encoding="utf-8"))
    for name in {question["db_id"] for question in questions}:
        shutil.copy(data / "database" / name / f"{name}.sqlite", folder)
    return [(str(folder / f"{question['db_id']}.sqlite"), question["query"]) for question in questions]


def sides(bird_pool: Batch, bare_pair: Batch, stride: int) -> dict[str, Side]:
    """All methods of running queries; those with a thread or process per query run every `stride`-th."""
    return {
        BARE: Side(one_by_one(methods.bare)),
        BATCH: Side(methods.ours_batch),
        SINGLE: Side(one_by_one(methods.ours)),
        CEILING: Side(bare_pair),
        "bare loop, immutable file": Side(one_by_one(methods.bare_immutable)),
        "SIGALRM": Side(one_by_one(methods.sigalrm)),
        "thread + interrupt()": Side(one_by_one(methods.interrupt), 2 * stride),
        "func_timeout": Side(one_by_one(methods.func_timeout_kept), 4 * stride),
        "process per query": Side(one_by_one(methods.process), 20 * stride),
        SKYRL: Side(one_by_one(methods.skyrl), stride),
        BIRD: Side(one_by_one(methods.bird), stride),
        "BIRD, two queries a connection": Side(methods.bird_pairs, stride),
        "BIRD, pool of two": Side(bird_pool, stride),
    }


def measure(queries: Sequence[Query], found: dict[str, Side], rounds: int) -> None:
    """Runs every side in each round, in another order each time."""
    truth = one_by_one(methods.bare)(queries, LIMIT_S)
    for side in found.values():  # warm, and right
        asked = queries[:: side.stride]
        for rows, expected in zip(side.run(asked, LIMIT_S), truth[:: side.stride], strict=False):
            is_set = isinstance(rows, frozenset)
            assert rows is None or (rows if is_set else list(rows)) == (set(expected) if is_set else expected)
    names = list(found)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            asked = queries[:: found[name].stride]
            started = time.perf_counter()
            n_answers = len(found[name].run(asked, LIMIT_S))
            n_run = 2 * n_answers if found[name].run is methods.bird_pairs else n_answers
            found[name].seconds.append((time.perf_counter() - started) / n_run)


def speed_table(title: str, found: dict[str, Side]) -> Table:
    """Best and median round of each side."""
    table = Table("method", "queries/s", "median", "over bare, µs", "median", "ratio to bare", "median")
    table.title, table.title_justify = title, "left"
    base = found[BARE]
    for name, side in found.items():
        values = []
        for pick in (min, statistics.median):
            mine, bares = pick(side.seconds), pick(base.seconds)
            values.append((f"{1 / mine:,.0f}", f"{1e6 * (mine - bares):,.1f}", f"{bares / mine:.3f}"))
        table.add_row(name, *(value for pair in zip(*values, strict=True) for value in pair))
    return table


def attack(method: Method, path: str, sql: str, has_guards: bool, pipe: Connection) -> None:
    """In a process of its own: one hostile query, and what is left of it."""
    if not has_guards:
        resource.setrlimit(resource.RLIMIT_AS, (HOSTILE_MEMORY, HOSTILE_MEMORY))
    method(path, "SELECT 1", HOSTILE_LIMIT_S)
    started = time.perf_counter()
    with suppress(BaseException):  # FunctionTimedOut is no Exception; the clock is all that matters
        method(path, sql, HOSTILE_LIMIT_S)
    elapsed_s = time.perf_counter() - started
    if has_guards:
        methods.close()
    cpu_s, started = _cpu_s(), time.perf_counter()
    time.sleep(WATCHED_S)
    cores = (_cpu_s() - cpu_s) / (time.perf_counter() - started)
    pipe.send(Attack(elapsed_s, threading.active_count() - 1 + len(_children()), cores))
    pipe.recv()  # is killed


def _children() -> list[list[str]]:
    """The `stat` fields after the name of this process's children; Linux."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.append(fields)
    return found


def _cpu_s() -> float:
    return time.process_time() + sum(int(f[11]) + int(f[12]) for f in _children()) / CLOCK_TICKS


def hostile_run(method: Method, path: str, sql: str, wait_s: float, *, has_guards: bool) -> Attack:
    """One hostile query in a process that is killed after `wait_s`."""
    here, there = methods.fork.Pipe()
    child = methods.fork.Process(target=attack, args=(method, path, sql, has_guards, there))
    child.start()
    there.close()
    try:
        return here.recv() if here.poll(wait_s) else Attack(None)
    except EOFError:  # a process out of memory
        return Attack(None)
    finally:
        child.kill()
        child.join()
        here.close()


def hostile(path: str, n_repeats: int, *, is_quick: bool) -> tuple[Table, dict[str, Any]]:
    """How late a limit is honoured, and what is left behind."""
    cut_s = 2.0 if is_quick else 3.0
    table = Table(
        "method",
        "queries",
        f"not back in {cut_s:g} s",
        "late, ms: median",
        "worst",
        "threads left",
        "cores busy",
    )
    table.title = f"{HOSTILE_LIMIT_S:g} s limit on hostile queries; late of those that had run for so long"
    table.title_justify = "left"
    found = {
        "ours": methods.ours,
        "SIGALRM": methods.sigalrm,
        "thread + interrupt()": methods.interrupt,
        "func_timeout": methods.func_timeout_kept,
        "process per query": methods.process,
        SKYRL: methods.skyrl,
        BIRD: methods.bird,
    }
    figures: dict[str, Any] = {}
    for name, method in found.items():
        is_ours = method is methods.ours
        chosen = list(HOSTILE.values()) * (n_repeats if is_ours else 1)
        if is_quick and not is_ours:
            chosen = chosen[:QUICK_HOSTILE]
        wait_s = (10.0 if is_ours else cut_s) + WATCHED_S
        ends = [hostile_run(method, path, sql, wait_s, has_guards=is_ours) for sql in chosen]
        back = [end.elapsed_s for end in ends if end.elapsed_s is not None]
        late = [1000 * (elapsed_s - HOSTILE_LIMIT_S) for elapsed_s in back if elapsed_s >= HOSTILE_LIMIT_S]
        n_never, threads = len(ends) - len(back), max(end.threads for end in ends)
        cores = max(end.cores for end in ends)
        median, worst = (statistics.median(late), max(late)) if late else (0.0, 0.0)
        row = (len(ends), n_never, f"{median:.0f}", f"{worst:.0f}", threads, f"{cores:.2f}")
        table.add_row(name, *map(str, row))
        if is_ours:
            figures = {
                "late_ms_worst": round(worst, 1) if not n_never else None,
                "late_ms_median": round(median, 1),
                "left_behind": n_never + sum(end.threads for end in ends),
                "cores_left_busy": round(cores, 3),
                "hostile_queries": len(ends),
            }
    return table, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    default = os.environ.get("TEXT2SQL_GRPO_SHARED_DATA") or Path(__file__).parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=Path(default) / "spider", help="Spider's folder")
    parser.add_argument("--rounds", type=int, help="15; with --quick 3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--skip-hostile", action="store_true")
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 15)
    console = Console(width=120)
    started = time.perf_counter()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path, lookups, medium = lookup_database(Path(folder), random.Random(options.seed))
        golds = spider_golds(options.data, Path(folder))
        time.sleep(0.2)  # until the files count as settled
        console.print(
            f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; func_timeout: "
            f"{methods.FUNC_TIMEOUT}; SQLite {sqlite3.sqlite_version}; seed {options.seed}"
        )
        if not options.skip_hostile:  # first, as it forks
            table, figures = hostile(path, 1 if options.quick else 2, is_quick=options.quick)
            console.print(table)
        bird_pool, bare_pair = methods.BirdPool(), methods.BarePair()
        workloads = {
            "lookup": ("2,000 look-ups by key", lookups, rounds),
            "spider": (f"Spider dev, {len(golds):,} golds", golds, rounds),
            "medium": ("queries of 20 to 50 ms", medium[: 4 if options.quick else 20], 1 + rounds // 5),
        }
        for name, (title, queries, n_rounds) in workloads.items():
            found = sides(bird_pool, bare_pair, 4 if options.quick and len(queries) > 100 else 1)
            measure(queries, found, n_rounds)
            console.print(speed_table(f"{title}; {n_rounds} rounds", found))
            figures |= speed_figures(name, found)
        bird_pool.close()
        bare_pair.close()
        methods.close()
    console.print(f"load {os.getloadavg()[0]:.1f}; {time.perf_counter() - started:.0f} s")
    print(json.dumps(figures))


def speed_figures(workload: str, found: dict[str, Side]) -> dict[str, float]:
    """Ratios of best rounds, and of median rounds."""
    figures: dict[str, float] = {}
    for suffix, pick in (("", min), ("_median", statistics.median)):
        seconds = {name: pick(side.seconds) for name, side in found.items()}
        figures[f"ratio_to_bare_{workload}{suffix}"] = round(seconds[BARE] / seconds[BATCH], 2)
        figures[f"ceiling_{workload}{suffix}"] = round(seconds[BARE] / seconds[CEILING], 2)
        if workload == "lookup":
            figures[f"overhead_us{suffix}"] = round(1e6 * (seconds[SINGLE] - seconds[BARE]), 1)
        if workload == "spider":
            figures[f"ratio_to_skyrl{suffix}"] = round(seconds[SKYRL] / seconds[BATCH], 2)
            figures[f"ratio_to_bird{suffix}"] = round(seconds[BIRD] / seconds[BATCH], 2)
    return figures


if __name__ == "__main__":
    main()
