"""Verdicts on another engine beside those on SQLite: Spider's databases converted, its golds transpiled.

Queries of each gold: mutants that agree with it on the database, hard-coded answers and right rewrites. Each
is graded on SQLite and on the engine, with neighbours and refutation on both.
"""

import os
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal

import duckdb
import psycopg
import sqlglot
from grading_judge import execute, hard_coded, right_rewrites
from sqlglot import exp

from text2sql_grpo.grading.base_sample import quoted, read_sample
from text2sql_grpo.grading.bird import bird_execution_accuracy
from text2sql_grpo.grading.gold_query import read_gold
from text2sql_grpo.grading.mutants import mutants
from text2sql_grpo.grading.neighbours import Neighbours
from text2sql_grpo.grading.postgres_server import PostgresServer
from text2sql_grpo.grading.verdict import Grader
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Row
from text2sql_grpo.sql.postgres_role import restricted_role_sql
from text2sql_grpo.sql.schema import Schema, read_schema

Engine = Literal["duckdb", "postgres"]
MUTANTS, HARD_CODED, REWRITES = 2, 1, 2  # of one gold


def compare_engines(
    data: Path, golds: Sequence[tuple[str, str]], engine: Engine, folder: Path, seed: int
) -> dict[str, Any]:
    """Grade the queries of the golds on SQLite and on the engine, print each difference, and count them."""
    counts: Counter[str] = Counter()
    differences: list[str] = []
    seconds = {"sqlite": 0.0, engine: 0.0}
    processor_s = {"sqlite": 0.0, engine: 0.0}
    started = time.perf_counter()
    with ExitStack() as stack:
        executor = stack.enter_context(SQLExecutor())
        opened = EngineDatabases(engine, folder / "converted")
        known = Neighbours(executor, folder / "sqlite")
        graders = {
            "sqlite": Grader(executor, neighbours=known),
            engine: Grader(
                executor, neighbours=Neighbours(executor, folder / "engine"), neighbour_url=opened.url
            ),
        }
        for name, gold in golds:
            path = data / "database" / name / f"{name}.sqlite"
            other, schema = opened.address(path), read_schema(path)
            native = transpiled(gold, schema, engine)
            counts["golds"] += 1
            first, second = (executor.execute(db, sql) for db, sql in ((path, gold), (other, native)))
            if not second.is_ok:
                counts["golds that the engine refuses"] += 1
                differences.append(f"gold refused: {second.error}\n    {native}")
                continue
            if not bird_execution_accuracy(first, second):
                counts["golds with another result"] += 1
                differences.append(f"another result\n    {gold}\n    {native}")
                continue
            counts["golds compared"] += 1
            making = {}
            for kind, database, sql in (("sqlite", path, gold), (engine, other, native)):
                before, cpu = time.perf_counter(), processor_time()
                making[kind] = len(graders[kind].neighbours.of(database, sql))
                seconds[kind] += time.perf_counter() - before
                processor_s[kind] += processor_time() - cpu
            counts["neighbours on SQLite"] += making["sqlite"]
            counts[f"neighbours on {engine}"] += making[engine]
            for sort, sql in queries(path, gold, random.Random(f"{seed} {gold}")):
                translated = transpiled(sql, schema, engine)
                on_sqlite = graders["sqlite"].grade(path, gold, sql)
                on_engine = graders[engine].grade(other, native, translated)
                counts[sort] += 1
                if on_engine.reason == "query_failed" and on_sqlite.reason != "query_failed":
                    counts[f"{sort}, refused by the engine"] += 1
                    continue
                counts[f"{sort}, compared"] += 1
                counts[f"{sort}, accepted on SQLite"] += on_sqlite.strict
                counts[f"{sort}, accepted on {engine}"] += on_engine.strict
                counts["same official verdict"] += on_sqlite.official == on_engine.official
                counts["same verdict"] += on_sqlite.strict == on_engine.strict
                counts["verdicts"] += 1
                if (on_sqlite.strict, on_sqlite.official) != (on_engine.strict, on_engine.official):
                    reasons = f"SQLite {on_sqlite.reason}, {engine} {on_engine.reason}"
                    reasons += f" (official {on_sqlite.official}, {on_engine.official})"
                    differences.append(f"{sort}: {reasons}\n    gold {native}\n    got  {translated}")
        gaps = Counter(graders[engine].gaps.values())
    print(*differences, sep="\n")
    n_golds = max(counts["golds compared"], 1)
    return {
        "engine": engine,
        "seed": seed,
        **counts,
        "gaps": dict(gaps),
        "making_s_per_gold": {kind: round(value / n_golds, 3) for kind, value in seconds.items()},
        "making_cpu_s_per_gold": {kind: round(value / n_golds, 3) for kind, value in processor_s.items()},
        "wall_s": round(time.perf_counter() - started, 1),
    }


def processor_time() -> float:
    """Processor seconds of this process and of all processes that it started and that still run."""
    parents = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended just now
            continue
        parents[int(pid)] = (int(fields[1]), sum(map(int, fields[11:15])))
    own = {os.getpid()}
    while more := {pid for pid, (parent, _) in parents.items() if parent in own} - own:
        own |= more
    ticks = sum(parents[pid][1] for pid in own if pid in parents)
    return ticks / os.sysconf("SC_CLK_TCK")


def queries(path: Path, gold: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Sort and text of queries of one gold, in SQLite's SQL."""
    read = read_gold(gold, read_schema(path))
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as base:
        answer = execute(base, gold)
        found = list(mutants(read, read_schema(path))) if read is not None else []
        rng.shuffle(found)
        agreeing = (sql for sql in found if bird_execution_accuracy(answer, execute(base, sql)))
        yield from (("mutant", sql) for sql, _ in zip(agreeing, range(MUTANTS), strict=False))
    tables = [table.name for table in sqlglot.parse_one(gold, dialect="sqlite").find_all(exp.Table)]
    hard = [sql for _, sql in hard_coded(answer, tables)]
    yield from (("hard-coded", sql) for sql in rng.sample(hard, min(HARD_CODED, len(hard))))
    right = [sql for _, sql in right_rewrites(gold)]
    yield from (("rewrite", sql) for sql in rng.sample(right, min(REWRITES, len(right))))


def transpiled(sql: str, schema: Schema, engine: Engine) -> str:
    """Query in the engine's SQL, with names in lower case and SQLite's "text" in single quotes."""
    read = read_gold(sql, schema)
    tree = sqlglot.parse_one(sql, dialect="sqlite") if read is None else read.tree.copy()
    for name in tree.find_all(exp.Identifier):
        name.set("this", name.name.lower())
    for like in list(tree.find_all(exp.Like)):  # SQLite's LIKE does not see case
        like.replace(exp.ILike(this=like.this.copy(), expression=like.expression.copy()))
    return tree.sql(engine, identify=True, comments=False)


class EngineDatabases:
    """Databases converted from SQLite, on a DuckDB file each or on one PostgreSQL server."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        self._server = PostgresServer(folder) if engine == "postgres" else None
        self.url = self._server.url if self._server else ""
        self._made: dict[Path, str] = {}

    def address(self, path: Path) -> str:
        """URL of the converted database."""
        if path not in self._made:
            self._made[path] = self._convert(path)
        return self._made[path]

    def _convert(self, path: Path) -> str:
        if self._server is None:
            file = self._folder / f"{path.stem}.duckdb"
            with duckdb.connect(str(file)) as connection:

                def insert(table: str, kinds: Sequence[str], rows: Sequence[Row]) -> None:
                    values = ", ".join(f"CAST(unnest(?::VARCHAR[]) AS {kind})" for kind in kinds)
                    columns = [list(column) for column in zip(*rows, strict=True)]
                    connection.execute(f"INSERT INTO {table} SELECT {values}", columns)

                convert(path, connection.execute, insert)
            return f"duckdb:///{file}"
        name = f"db_{path.stem.lower()}"
        with psycopg.connect(self.url, autocommit=True) as admin:
            admin.execute(f"CREATE DATABASE {name}")
        url = self.url.replace("/postgres?", f"/{name}?")
        with psycopg.connect(url) as own:

            def write(table: str, _: Sequence[str], rows: Sequence[Row]) -> None:
                with own.cursor().copy(f"COPY {table} FROM STDIN") as stream:
                    for row in rows:
                        stream.write_row(row)

            convert(path, own.execute, write)
            own.execute(restricted_role_sql(f"reader_{name}", "secret", name))
        return f"postgresql://reader_{name}:secret@{url.rpartition('@')[2]}"


def convert(path: Path, run: Callable[[str], object], insert: Callable[..., None]) -> None:
    """Copy all rows into tables with the types of their values, and the keys and references that hold."""
    base = read_sample(path)
    kinds: dict[tuple[str, str], str] = {}
    unique: dict[str, list[tuple[str, ...]]] = {}
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as original:
        original.text_factory = lambda raw: raw.decode("utf-8", "replace").replace("\0", "")
        for table in base.tables.values():
            listed = ", ".join(map(quoted, table.columns))
            rows = original.execute(f"SELECT {listed} FROM {quoted(table.name)}").fetchall()
            cells = list(zip(*rows, strict=True)) or [()] * len(table.columns)
            for column, declared, values in zip(table.columns, table.types, cells, strict=True):
                kinds[table.name, column] = kind_of(declared, values)
            parts = [f"{lower(column)} {kinds[table.name, column]}" for column in table.columns]
            unique[table.name] = []
            for key in dict.fromkeys(table.keys):
                held = [tuple(row[place] for place in key) for row in rows]
                if len(set(held)) == len(held) and all(None not in value for value in held):
                    names = tuple(table.columns[place] for place in key)
                    word = "UNIQUE" if unique[table.name] else "PRIMARY KEY"
                    unique[table.name].append(names)
                    parts.append(f"{word} ({', '.join(map(lower, names))})")
            for reference in table.references:
                own = tuple(table.columns[place] for place in reference.columns)
                pairs = zip(own, reference.parent_columns, strict=True)
                is_typed = all(kinds[table.name, a] == kinds.get((reference.parent, b)) for a, b in pairs)
                is_key = reference.parent_columns in unique.get(reference.parent, ())
                if is_typed and is_key and reference.parent != table.name:
                    names, others = (", ".join(map(lower, n)) for n in (own, reference.parent_columns))
                    parts.append(f"FOREIGN KEY ({names}) REFERENCES {lower(reference.parent)} ({others})")
            run(f"CREATE TABLE {lower(table.name)} ({', '.join(parts)})")
            own_kinds = [kinds[table.name, column] for column in table.columns]
            texts = [tuple(None if cell is None else str(cell) for cell in row) for row in rows]
            if rows:
                insert(lower(table.name), own_kinds, texts)


def lower(name: str) -> str:
    """Name in lower case, quoted."""
    return quoted(name.lower())


def kind_of(declared: str, cells: Sequence[object]) -> str:
    """Type of a column by its values; by its declaration if it has none."""
    types = {type(cell) for cell in cells if cell is not None}
    if not types:
        types = {int} if "INT" in declared.upper() else {str}
    return "BIGINT" if types == {int} else "DOUBLE PRECISION" if types <= {int, float} else "VARCHAR"
