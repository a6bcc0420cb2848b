"""What the executor costs beside a bare sqlite3 loop and other ways to bound a query, and what they leave.

Single calls are compared with single calls, batches with batches, on the same databases, in turns, round
after round, so that other load meets all alike. Figures are medians over the rounds, by the clock and by
processor time: of this process and all that it started, in the keys with `_cpu`. The bare loop has the files
open as immutable. Our executor runs with all guards on, no cache and two workers.

Run: python benchmarks/executor.py [--quick] [--rounds 11] [--seed 0]
     python benchmarks/executor.py --engine sqlite|duckdb|postgres [--soak 50000]: see executor_engines.py
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

import executor_engines
import executor_methods as methods
from executor_methods import Method, Query, one_by_one
from rich.console import Console
from rich.table import Table

LIMIT_S = 30.0  # where no query is late
HOSTILE_LIMIT_S = 1.0
WATCHED_S = 0.3  # after a hostile query, for what is left behind
HOSTILE_MEMORY = 3 << 30  # of a process that runs a hostile query without our guards
MAX_COPIED_BYTES = 50_000  # of a database of which many copies are made

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
QUICK_HOSTILE = 1  # of the others; ours runs all
QUICK_STRIDE = 8
QUICK_LOOKUPS = 600

Batch = Callable[[Sequence[Query], float], list[Any]]
BARE, OURS, SKYRL, BIRD = "bare loop, immutable file", "ours", "SkyRL", "BIRD"
BARE_CONNECT, OURS_CONNECT = "bare, connection per query", "our connection per query, in this process"


@dataclass
class Side:
    """One method on one workload.

    Attributes:
        stride: It runs every n-th query, for slow methods.
        wall_s: Seconds per query, of each round.
        cpu_s: The same of processor time.
    """

    run: Batch
    stride: int = 1
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


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


def lookup_database(folder: Path, rng: random.Random) -> tuple[str, list[Query]]:
    """A database of its own, and 2,000 look-ups by key."""
    path = str(folder / "lookup.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL, shop INTEGER)")
        items = [(i, f"item {i}", rng.random(), rng.randrange(200)) for i in range(40_000)]
        connection.executemany("INSERT INTO item VALUES (?, ?, ?, ?)", items)
        connection.commit()
    lookups = [f"SELECT name, price FROM item WHERE id = {i}" for i in rng.sample(range(40_000), 2_000)]
    return path, [(path, sql) for sql in lookups]


def many_databases(golds: Sequence[Query], folder: Path, n_databases: int) -> list[Query]:
    """A gold for each of many copies of Spider's smallest databases."""
    by_path = {path: sql for path, sql in golds if os.path.getsize(path) < MAX_COPIED_BYTES}
    queries = []
    for number in range(n_databases):
        path, sql = list(by_path.items())[number % len(by_path)]
        queries.append((str(shutil.copy(path, folder / f"copy_{number}.sqlite")), sql))
    return queries


def spider_golds(data: Path, folder: Path) -> list[Query]:
    """Spider's dev golds, on copies of their databases."""
    questions = json.loads((data / "dev.json").read_text(encoding="utf-8"))
    for name in {question["db_id"] for question in questions}:
        shutil.copy(data / "database" / name / f"{name}.sqlite", folder)
    return [(str(folder / f"{question['db_id']}.sqlite"), question["query"]) for question in questions]


def singles(stride: int) -> dict[str, Side]:
    """Methods of one query a call; those with a thread or process per query run every `stride`-th."""
    return {
        BARE: Side(one_by_one(methods.bare_immutable)),
        OURS: Side(one_by_one(methods.ours)),
        "SIGALRM": Side(one_by_one(methods.sigalrm)),
        "thread + interrupt()": Side(one_by_one(methods.interrupt), stride),
        "func_timeout": Side(one_by_one(methods.func_timeout_kept), stride),
        "process per query": Side(one_by_one(methods.process), 20 * stride),
        SKYRL: Side(one_by_one(methods.skyrl), stride),
        BIRD: Side(one_by_one(methods.bird), stride),
    }


def batches(bird_pool: Batch, bare_pair: Batch, stride: int) -> dict[str, Side]:
    """Methods of many queries a call."""
    return {
        BARE: Side(one_by_one(methods.bare_immutable)),
        OURS: Side(methods.ours_batch),
        "two bare loops, two processes": Side(bare_pair),
        "BIRD, pool of two": Side(bird_pool, stride),
    }


def openings() -> dict[str, Side]:
    """One query on each of many databases, in this process or by a batch."""
    return {
        BARE_CONNECT: Side(one_by_one(methods.bare_connect)),
        OURS_CONNECT: Side(one_by_one(methods.ours_connect)),
        OURS: Side(methods.ours_batch),
    }


def measure(queries: Sequence[Query], found: dict[str, Side], rounds: int) -> None:
    """Runs every side in each round, in another order each time."""
    truth = one_by_one(methods.bare_connect)(queries, LIMIT_S)
    for side in found.values():  # warm, and right
        asked = queries[:: side.stride]
        for rows, expected in zip(side.run(asked, LIMIT_S), truth[:: side.stride], strict=True):
            is_set = isinstance(rows, frozenset)
            assert rows is None or (rows if is_set else list(rows)) == (set(expected) if is_set else expected)
    names = list(found)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            side = found[name]
            asked = queries[:: side.stride]
            cpu_s, started = _cpu_s(), time.perf_counter()
            side.run(asked, LIMIT_S)
            side.wall_s.append((time.perf_counter() - started) / len(asked))
            side.cpu_s.append((_cpu_s() - cpu_s) / len(asked))


def speed_table(title: str, found: dict[str, Side]) -> Table:
    """Median round of each side, with the best and the worst."""
    table = Table("method", "us a query", "best", "worst", "ratio", "us of processor", "ratio")
    table.title, table.title_justify = title, "left"
    base = next(iter(found.values()))
    for name, side in found.items():
        wall_s, cpu_s = statistics.median(side.wall_s), statistics.median(side.cpu_s)
        seconds = (wall_s, min(side.wall_s), max(side.wall_s))
        row = [f"{1e6 * value:,.1f}" for value in seconds]
        row += [f"{statistics.median(base.wall_s) / wall_s:.2f}"]
        row += [f"{1e6 * cpu_s:,.1f}", f"{statistics.median(base.cpu_s) / cpu_s:.2f}"]
        table.add_row(name, *row)
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


def _children() -> list[int]:
    """Processes that this one started; Linux."""
    found: list[int] = []
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that ended
            found += map(int, file.read_text().split())
    return found


def _cpu_s() -> float:
    """Processor time of this process and its children, ended ones included."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    living_s = 0.0
    for pid in _children():
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):
                living_s += int(task.read_text().split()[0]) / 1e9
    return time.process_time() + ended.ru_utime + ended.ru_stime + living_s


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
    cut_s = 1.5 if is_quick else 3.0
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
                "left_behind": n_never + sum(end.threads for end in ends),
            }
    return table, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    default = os.environ.get("TEXT2SQL_GRPO_SHARED_DATA") or Path(__file__).parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=Path(default) / "spider", help="Spider's folder")
    parser.add_argument("--rounds", type=int, help="11; with --quick 3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--skip-hostile", action="store_true")
    parser.add_argument("--engine", choices=list(executor_engines.LATE))
    parser.add_argument("--soak", type=int, default=0, help="queries of a soak, with --engine")
    options = parser.parse_args()
    if options.engine:
        rounds = options.rounds or 5
        executor_engines.main(options.engine, rounds=rounds, n_soak=options.soak, seed=options.seed)
        return
    rounds = options.rounds or (3 if options.quick else 11)
    stride = QUICK_STRIDE if options.quick else 1
    console = Console(width=120)
    started = time.perf_counter()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path, lookups = lookup_database(Path(folder), random.Random(options.seed))
        golds = spider_golds(options.data, Path(folder))
        many = many_databases(golds, Path(folder), 500 if options.quick else 10_000)
        if options.quick:
            lookups = lookups[:QUICK_LOOKUPS]
        chosen = golds[::QUICK_STRIDE] if options.quick else golds
        time.sleep(0.2)  # until the files count as settled
        console.print(
            f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; func_timeout: "
            f"{methods.FUNC_TIMEOUT}; SQLite {sqlite3.sqlite_version}; seed {options.seed}"
        )
        if not options.skip_hostile:  # first, as it forks
            table, figures = hostile(path, 1 if options.quick else 2, is_quick=options.quick)
            console.print(table)
        bird_pool, bare_pair = methods.BirdPool(), methods.BarePair()
        one, all_at_once = singles(stride), batches(bird_pool, bare_pair, stride)
        one_gold, all_golds = singles(1), batches(bird_pool, bare_pair, stride)
        opened = openings()
        workloads = (
            (f"{len(lookups):,} look-ups by key, single calls", lookups, one, rounds),
            (f"{len(lookups):,} look-ups by key, batch", lookups, all_at_once, rounds),
            (f"Spider dev, {len(chosen):,} golds, single calls", chosen, one_gold, rounds),
            (f"Spider dev, {len(golds):,} golds, batch", golds, all_golds, rounds),
            (f"a gold on each of {len(many):,} databases", many, opened, rounds),
        )
        for title, queries, found, n_rounds in workloads:
            measure(queries, found, n_rounds)
            console.print(speed_table(f"{title}; {n_rounds} rounds", found))
        bird_pool.close()
        bare_pair.close()
        methods.close()
    for suffix in ("", "_cpu"):
        ours = _median(one, OURS, suffix)
        figures["single_over_bare_us" + suffix] = round(1e6 * (ours - _median(one, BARE, suffix)), 1)
        figures["batch_ratio" + suffix] = _ratio(all_golds, BARE, OURS, suffix)
        figures["batch_ratio_lookup" + suffix] = _ratio(all_at_once, BARE, OURS, suffix)
        figures["single_ratio_skyrl" + suffix] = _ratio(one_gold, SKYRL, OURS, suffix)
        figures["single_ratio_bird" + suffix] = _ratio(one_gold, BIRD, OURS, suffix)
        figures["open_ratio" + suffix] = _ratio(opened, OURS_CONNECT, BARE_CONNECT, suffix)
        figures["many_databases_ratio" + suffix] = _ratio(opened, BARE_CONNECT, OURS, suffix)
    console.print(f"load {os.getloadavg()[0]:.1f}; {time.perf_counter() - started:.0f} s")
    print(json.dumps(figures))


def _median(found: dict[str, Side], name: str, suffix: str) -> float:
    return statistics.median(found[name].cpu_s if suffix else found[name].wall_s)


def _ratio(found: dict[str, Side], above: str, below: str, suffix: str) -> float:
    return round(_median(found, above, suffix) / _median(found, below, suffix), 2)


if __name__ == "__main__":
    main()
