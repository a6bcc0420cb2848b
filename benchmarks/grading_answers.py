"""Wrong answers paid and right ones refused on databases that were made to test the grader, with proofs.

Authors who had not read the grader each made a database for one engine and 30 gold queries, with four wrong
answers to each that have the gold's rows on it, and two right ones. A wrong answer has a proof: statements
that change rows as the schema and the domain allow, after which its result differs (`--proofs` runs them).

Run: OMP_NUM_THREADS=1 python benchmarks/grading_answers.py [fishery|rental|orchard ..] [--url URL]
The last line is JSON.
"""

import argparse
import json
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from datetime import time as clock
from pathlib import Path
from typing import Any

from grading_classes import new_database

from text2sql_grpo.files import read_json
from text2sql_grpo.grading.suite import TestSuite
from text2sql_grpo.grading.verdict import Grader
from text2sql_grpo.sql.executor import SQLExecutor

FOLDER = Path(__file__).parent / "answers"
SETS = sorted(path.stem for path in FOLDER.glob("*.json"))
QUICK = 4  # gold queries


@dataclass(frozen=True)
class Answer:
    """An answer to a gold query.

    Attributes:
        mistake: What is wrong; empty for a right one.
        proof: Statements that make a difference.
    """

    gold: str
    sql: str
    mistake: str = ""
    proof: tuple[str, ...] = ()


def answers(name: str, limit: int | None = None) -> Iterator[Answer]:
    """Answers of a set to its first gold queries."""
    for item in read_json(FOLDER / f"{name}.json")["items"][:limit]:
        for wrong in item["wrong"]:
            yield Answer(item["gold"], wrong["sql"], wrong["mistake"], tuple(wrong["proof"]))
        for right in item["right"]:
            yield Answer(item["gold"], right)


def judged(name: str, url: str = "", limit: int | None = None) -> Counter[str]:
    """Count of wrong and right answers, of those judged wrongly, which are printed, and of gaps."""
    stored = read_json(FOLDER / f"{name}.json")
    count = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        database = new_database(stored["engine"], f"answers_{name}", stored["script"], Path(folder), url)
        executor = SQLExecutor()
        grader = Grader(executor, suite=TestSuite(executor, Path(folder) / "cache"))
        for answer in answers(name, limit):
            verdict = grader.grade(database, answer.gold, answer.sql)
            count["wrong" if answer.mistake else "right"] += 1
            count["gaps"] += bool(verdict.gap)
            if verdict.strict == bool(answer.mistake):
                count["paid" if answer.mistake else "refused"] += 1
                side = "PAID" if answer.mistake else "REFUSED"
                print(f"{side} {answer.mistake}\n  {answer.gold}\n  {answer.sql}")
    return count


def unproved(name: str) -> list[Answer]:
    """Wrong answers whose proof makes no difference, or that differ before it; of SQLite and DuckDB."""
    stored = read_json(FOLDER / f"{name}.json")
    found = []
    for answer in answers(name):
        if not answer.mistake:
            continue
        with closing(_connection(stored["engine"])) as connection:
            _run_script(connection, stored["script"])
            before = [_rows(connection, sql) for sql in (answer.gold, answer.sql)]
            _run_script(connection, ";".join(answer.proof))
            after = [_rows(connection, sql) for sql in (answer.gold, answer.sql)]
        if sorted(before[0]) != sorted(before[1]) or after[0] == after[1]:
            found.append(answer)
    return found


def _connection(engine: str) -> Any:
    if engine == "sqlite":
        connection = sqlite3.connect(":memory:")
        connection.execute("PRAGMA foreign_keys = on")
        return connection
    import duckdb

    return duckdb.connect()


def _run_script(connection: Any, sql: str) -> None:
    run = connection.executescript if isinstance(connection, sqlite3.Connection) else connection.execute
    run(sql)


def _rows(connection: Any, sql: str) -> list[str]:
    """Rows as text; a whole number and midnight are alike in all types, as they are to the grader."""
    return [repr(tuple(map(_plain, row))) for row in connection.execute(sql).fetchall()]


def _plain(cell: Any) -> Any:
    if isinstance(cell, float) and cell.is_integer():
        return int(cell)
    return cell.date() if isinstance(cell, datetime) and cell.time() == clock() else cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"default: all of {', '.join(SETS)}")
    parser.add_argument("--url", default="", help="URL of a superuser of a PostgreSQL server")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} gold queries on SQLite")
    parser.add_argument("--proofs", action="store_true", help="only run the proofs, on SQLite and DuckDB")
    options = parser.parse_args()
    if unknown := sorted(set(options.sets) - set(SETS)):
        parser.error(f"no set {', '.join(unknown)}; there are {', '.join(SETS)}")
    engines = {name: read_json(FOLDER / f"{name}.json")["engine"] for name in SETS}
    names = [name for name in options.sets or SETS if options.url or engines[name] != "postgresql"]
    if options.quick:
        names = [name for name in names if engines[name] == "sqlite"]
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        started = time.process_time()
        if options.proofs:
            found[name] = {"unproved": len(unproved(name))}
            continue
        count = judged(name, options.url, QUICK if options.quick else None)
        found[name] = dict(count) | {"trainer_s": round(time.process_time() - started, 1)}
        print(
            f"{name} ({engines[name]}): {count['paid']} of {count['wrong']} wrong answers paid, "
            f"{count['refused']} of {count['right']} right ones refused"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
