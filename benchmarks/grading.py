"""Shares of wrong queries that the grader accepts and of right ones that it refuses, on Spider's dev golds.

Wrong queries are mutants of golds, each proved wrong by a database on which the gold's result does not
hang on the order of visits and the mutant's differs. Those databases are the benchmark's own: see
`grading_judge.py`. Two kinds of mutants are counted apart: by the operators with which the grader chooses
its test databases, and by operators held out from it. BIRD's execution accuracy (EX) stands beside.

Run: OMP_NUM_THREADS=1 python benchmarks/grading.py [--quick] [--golds 300] [--seed 0]
The last line is JSON.
"""

import argparse
import json
import random
import sqlite3
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import sqlglot
from grading_judge import (
    Original,
    execute,
    hard_coded,
    held_out_mutants,
    proved_wrong,
    right_rewrites,
    stable_result,
)
from rich.console import Console
from rich.table import Table
from spider import SPIDER, check_spider

from text2sql_grpo.audit.mutations import mutants
from text2sql_grpo.grading.gold_query import read_gold
from text2sql_grpo.grading.suite import TestSuite
from text2sql_grpo.grading.verdict import Grader
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Row
from text2sql_grpo.sql.schema import read_schema

PER_KIND = 12  # mutants of one gold and kind, at most
EXAMPLES = 12
WIDTHS = (10, 100, 300, 1_000)  # tables


@dataclass
class Count:
    """Queries of one sort, and how many of them each way of grading accepts.

    Attributes:
        agree: Those that the strict verdict accepts on the database itself.
        accepted: Those that it accepts on the test databases too.
        bird_ex: Those that BIRD's EX accepts.
    """

    queries: int = 0
    agree: int = 0
    accepted: int = 0
    bird_ex: int = 0


@dataclass
class Tally:
    wrong: defaultdict[tuple[str, str], Count] = field(default_factory=lambda: defaultdict(Count))
    hard: defaultdict[str, Count] = field(default_factory=lambda: defaultdict(Count))
    right: defaultdict[str, Count] = field(default_factory=lambda: defaultdict(Count))
    examples: list[str] = field(default_factory=list)
    not_proved: int = 0
    right_disproved: int = 0
    base_s: list[float] = field(default_factory=list)
    suite_s: list[float] = field(default_factory=list)
    n_databases: Counter[int] = field(default_factory=Counter)
    searching_s: float = 0.0


class Benchmark:
    """Grades the queries of one gold after the other."""

    def __init__(self, data: Path, cache: Path, seed: int, tries: int) -> None:
        self.data = data
        self.seed = seed
        self.tries = tries
        self.executor = SQLExecutor()
        self.suite = TestSuite(self.executor, cache)
        self.grader = Grader(self.executor, suite=self.suite)
        self.plain = Grader(self.executor)
        self.originals: dict[str, Original] = {}
        self.tally = Tally()

    def path(self, name: str) -> Path:
        return self.data / "database" / name / f"{name}.sqlite"

    def run(self, name: str, gold: str, others: list[str]) -> None:
        """Counts all queries made of one gold."""
        path = self.path(name)
        original = self.originals.setdefault(name, Original(path))
        rng = random.Random(f"{self.seed} {gold}")
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as base:
            suspects = self._mutants(gold, path, base, original, others, rng)
            tables = [t.name for t in sqlglot.parse_one(gold, dialect="sqlite").find_all(sqlglot.exp.Table)]
            hard = {sql: form for form, sql in hard_coded(execute(base, gold), tables)}
            right = {sql: form for form, sql in right_rewrites(gold)}
            wrong = proved_wrong(original, gold, [*suspects, *hard, *right], rng, self.tries)
            if stable_result(base, gold) is not None:  # what BIRD's lenient comparison refuses is wrong
                answer = set(execute(base, gold).rows)
                wrong |= {sql for sql in suspects if set(execute(base, sql).rows) != answer}
        self.tally.not_proved += len((suspects.keys() | hard.keys()) - wrong)
        started = time.perf_counter()
        self.tally.n_databases[len(self.suite.databases(path, gold).databases)] += 1
        self.tally.searching_s += time.perf_counter() - started
        for sql in suspects.keys() & wrong:
            self._grade(self.tally.wrong[suspects[sql]], path, gold, sql, " ".join(suspects[sql]))
        for sql in hard.keys() & wrong:
            self._grade(self.tally.hard[hard[sql]], path, gold, sql, "hard-coded " + hard[sql])
        for sql, form in right.items():
            if sql in wrong:
                self.tally.right_disproved += 1
                self._example(f"disproved rewrite {form}", gold, sql)
            else:
                self._grade(self.tally.right[form], path, gold, sql, form, is_right=True)

    def _mutants(
        self,
        gold: str,
        path: Path,
        base: sqlite3.Connection,
        original: Original,
        others: list[str],
        rng: random.Random,
    ) -> dict[str, tuple[str, str]]:
        """Kind and operator of each mutant; those that agree with the gold on its database first."""
        schema = read_schema(path)
        read = read_gold(gold, schema)
        assert read is not None, gold

        def rows(sql: str) -> tuple[Row, ...] | None:
            outcome = execute(base, sql)
            return outcome.rows if outcome.is_ok else None

        known = mutants(read, schema, rows)
        held_out = {sql: name for name, sql in held_out_mutants(gold, base, original, others, rng)}
        for first in rng.sample(list(known), min(6, len(known))):  # two edits
            once = read_gold(first, schema)
            twice = list(mutants(once, schema)) if once is not None else []
            held_out |= {sql: "two_edits" for sql in rng.sample(twice, min(2, len(twice)))}
        chosen: dict[str, tuple[str, str]] = {}
        for kind, found in (("known", known), ("held out", held_out)):
            fresh = [sql for sql in found if sql not in known or kind == "known"]
            rng.shuffle(fresh)
            answer = set(execute(base, gold).rows)
            fresh.sort(key=lambda sql: set(execute(base, sql).rows) != answer)
            agreeing = fresh[: PER_KIND // 2]
            rest = fresh[PER_KIND // 2 :]
            for sql in agreeing + rng.sample(rest, min(PER_KIND - len(agreeing), len(rest))):
                if execute(base, sql).is_ok:
                    chosen[sql] = (kind, found[sql])
        return chosen

    def _grade(
        self, count: Count, path: Path, gold: str, sql: str, what: str, *, is_right: bool = False
    ) -> None:
        plain = self.plain.grade(path, gold, sql)
        verdict = self.grader.grade(path, gold, sql)
        if verdict.strict:  # timed with golds known, and a text that no cache of results knows
            started = time.perf_counter()
            self.plain.grade(path, gold, "/* again */ " + sql)
            between = time.perf_counter()
            self.grader.grade(path, gold, "/* and again */ " + sql)
            self.tally.base_s.append(between - started)
            self.tally.suite_s.append(time.perf_counter() - between)
        count.queries += 1
        count.agree += plain.strict
        count.accepted += verdict.strict
        count.bird_ex += plain.official
        if verdict.strict != is_right:
            self._example(f"{'refused' if is_right else 'accepted'} ({what}, {verdict.reason})", gold, sql)

    def _example(self, what: str, gold: str, sql: str) -> None:
        self.tally.examples.append(
            f"{what}\n    gold {' '.join(gold.split())}\n    got  {' '.join(sql.split())}"
        )


def total(counts: Iterable[Count]) -> Count:
    """The sum of counts."""
    result = Count()
    for count in counts:
        result.queries += count.queries
        result.agree += count.agree
        result.accepted += count.accepted
        result.bird_ex += count.bird_ex
    return result


def share(part: int, whole: int) -> float:
    return round(part / whole, 5) if whole else 0.0


def show(console: Console, tally: Tally) -> None:
    """The tables for people."""
    table = Table(
        "sort", "queries", "BIRD EX accepts", "strict accepts", "with test suite", title="Accepted queries"
    )
    sections = [
        *((" / ".join(key), count) for key, count in sorted(tally.wrong.items())),
        *((f"hard-coded / {key}", count) for key, count in sorted(tally.hard.items())),
        *((f"right / {key}", count) for key, count in sorted(tally.right.items())),
    ]
    for name, count in sections:
        table.add_row(name, *map(str, (count.queries, count.bird_ex, count.agree, count.accepted)))
    console.print(table)
    for example in tally.examples[:EXAMPLES]:
        console.print(example, markup=False, highlight=False)


def seconds_by_tables(n_tables: int) -> dict[str, float]:
    """Processor seconds of a gold query's test databases, and of one right answer, on a wide schema."""
    where = "country = 'Norway'"
    gold = f"SELECT p.name FROM person AS p JOIN city AS c ON p.city = c.id WHERE c.{where} AND age > 40"
    answer = f"SELECT name FROM person WHERE age > 40 AND city IN (SELECT id FROM city WHERE {where})"
    with tempfile.TemporaryDirectory() as name, SQLExecutor() as executor:
        path = Path(name) / "wide.sqlite"
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("CREATE TABLE city (id INTEGER PRIMARY KEY, name TEXT, country TEXT)")
            connection.execute(
                "CREATE TABLE person (code TEXT PRIMARY KEY, name TEXT, age INTEGER, city REFERENCES city)"
            )
            cities = [(n, f"City {n}", "Italy" if n % 3 else "Norway") for n in range(30)]
            connection.executemany("INSERT INTO city VALUES (?, ?, ?)", cities)
            people = [(f"p{n}", f"Name {n % 40}", 18 + n % 60, n % 30) for n in range(300)]
            connection.executemany("INSERT INTO person VALUES (?, ?, ?, ?)", people)
            for number in range(n_tables - 2):
                connection.execute(f"CREATE TABLE t{number} (id INTEGER PRIMARY KEY, a TEXT, b REAL, c DATE)")
                rows = [(n, f"x{n}", n / 2, f"2020-01-{1 + n % 28:02d}") for n in range(50)]
                connection.executemany(f"INSERT INTO t{number} VALUES (?, ?, ?, ?)", rows)
        grader = Grader(executor, suite=TestSuite(executor, Path(name) / "cache"))
        grader.grade(path, gold, "SELECT 1")
        seconds = {}
        for key, sql in (("gold", gold), ("answer", answer)):
            started = time.process_time()
            assert grader.grade(path, gold, sql).strict
            seconds[key] = round(time.process_time() - started, 3)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=SPIDER, help="Spider's folder")
    parser.add_argument("--golds", type=int, default=300)
    parser.add_argument("--tries", type=int, default=16, help="judge databases for each gold")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="20 golds, under a minute")
    parser.add_argument(
        "--cache", type=Path, help="folder of test databases to use again; default: a new one"
    )
    options = parser.parse_args()
    check_spider(parser, options.data)
    if options.quick:
        options.golds, options.tries = 20, 10
    console = Console(width=120)
    started = time.perf_counter()
    questions = json.loads((options.data / "dev.json").read_text(encoding="utf-8"))
    golds = list({" ".join(q["query"].split()).lower(): (q["db_id"], q["query"]) for q in questions}.values())
    random.Random(options.seed).shuffle(golds)
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(options.data, options.cache or Path(folder), options.seed, options.tries)
        for name, gold in golds[: options.golds]:
            others = [query for db, query in golds if db == name and query != gold]
            benchmark.run(name, gold, others)
        sizes = [path.stat().st_size for path in (options.cache or Path(folder)).rglob("*.sqlite")]
    tally = benchmark.tally
    show(console, tally)
    wrong, hard, right = (total(d.values()) for d in (tally.wrong, tally.hard, tally.right))
    held_out = total(count for (kind, _), count in tally.wrong.items() if kind == "held out")
    searched = max(benchmark.suite.n_searched, 1)
    summary = {
        "benchmark": "grading",
        "wrong_accepted": share(wrong.accepted, wrong.queries),
        "wrong_accepted_bird_ex": share(wrong.bird_ex, wrong.queries),
        "hardcoded_accepted": share(hard.accepted, hard.queries),
        "right_refused": share(right.queries - right.accepted, right.queries),
        "wrong_accepted_strict_without_suite": share(wrong.agree, wrong.queries),
        "wrong_accepted_held_out_operators": share(held_out.accepted, held_out.queries),
        "wrong_accepted_of_those_right_on_the_database": share(wrong.accepted, wrong.agree),
        "hardcoded_accepted_bird_ex": share(hard.bird_ex, hard.queries),
        "right_refused_without_suite": share(right.queries - right.agree, right.queries),
        "golds": min(options.golds, len(golds)),
        "wrong": wrong.queries,
        "wrong_held_out": held_out.queries,
        "hardcoded": hard.queries,
        "right": right.queries,
        "mutants_not_proved_wrong": tally.not_proved,
        "rewrites_disproved": tally.right_disproved,
        "test_databases": dict(sorted(tally.n_databases.items())),
        "making_s_per_gold": round(benchmark.tally.searching_s / searched, 3),
        "bytes_per_test_database": round(sum(sizes) / max(len(sizes), 1)),
        "grade_ms": round(1000 * sum(tally.base_s) / max(len(tally.base_s), 1), 3),
        "grade_with_suite_ms": round(1000 * sum(tally.suite_s) / max(len(tally.suite_s), 1), 3),
        "cpu_s_by_tables": {n: seconds_by_tables(n) for n in ((10, 100) if options.quick else WIDTHS)},
        "seed": options.seed,
        "wall_s": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
