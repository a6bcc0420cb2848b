"""Recall of the gold's tables in prompts over one large schema: Spider's databases, taken together.

    python benchmarks/schema_choice.py [--data ../shared/data/spider] [--quick]

Tables of one name in several databases get the database's name before it. Printed is the share of
questions with all columns of their gold in the text, without a choice of tables (`cut`) and with it
(`choice`), and the share with all tables of the gold, some by name only (`+names`).
"""

import argparse
import json
import re
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from spider import SPIDER, check_spider
from sqlglot import exp

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.sql.names import quote_name
from text2sql_grpo.sql.query import read_query
from text2sql_grpo.sql.schema import Column, Schema, Table, read_schema
from text2sql_grpo.sql.schema_choice import table_choice
from text2sql_grpo.sql.schema_text import estimated_tokens, schema_text

BUDGETS = (400, 1_000, 2_000)


def union(schemas: dict[str, Schema]) -> Schema:
    """Make one schema of all tables."""
    times = Counter(table.name.lower() for schema in schemas.values() for table in schema.tables)
    tables = []
    for database, schema in schemas.items():
        names = {
            t.name.lower(): t.name if times[t.name.lower()] == 1 else f"{database}_{t.name}"
            for t in schema.tables
        }
        for table in schema.tables:
            keys = [replace(key, table=names.get(key.table.lower(), "")) for key in table.foreign_keys]
            name = names[table.name.lower()]
            tables.append(
                replace(
                    table, name=name, foreign_keys=tuple(keys), comment=f"{database}.{table.name}".lower()
                )
            )
    return Schema(tuple(tables), name="union")


@dataclass(frozen=True)
class Asked:
    """One question, its gold's tables, and the places of its gold's columns: one of each group is needed."""

    question: str
    tables: frozenset[str]
    columns: tuple[frozenset[str], ...]

    def is_answerable(self, text: str) -> bool:
        """True if a compact text holds all columns of the gold."""
        found = set(re.findall(r"[^,\s]+\.[^,\s]+|\S+", text))
        return all(not places.isdisjoint(found) for places in self.columns)


def asked(rows: list[dict[str, str]], schema: Schema) -> list[Asked]:
    """Questions whose gold can be read."""
    known = {table.comment: table for table in schema.tables}
    found = []
    for row in rows:
        tree = read_query(row["query"]).tree
        if tree is None:
            continue
        tables = [known.get(f"{row['db_id']}.{one.name}".lower()) for one in tree.find_all(exp.Table)]
        named = {column.name.lower() for column in tree.find_all(exp.Column)}
        groups = [
            {place(t, c) for t in tables if t for c in t.columns if c.name.lower() == name} for name in named
        ]
        groups += [{place(t, c) for c in t.columns} for t in tables if t]
        if all(tables):
            names = frozenset(table.name for table in tables if table)
            found.append(Asked(row["question"], names, tuple(frozenset(group) for group in groups if group)))
    return found


def place(table: Table, column: Column) -> str:
    """A column as a compact text names it."""
    return f"{quote_name(table.name)}.{quote_name(column.name)}"


def measure(schema: Schema, questions: list[Asked], max_tokens: int) -> dict[str, float]:
    """Shares and milliseconds by the names of the table's columns."""
    schema = replace(schema, tables=tuple(replace(table, comment="") for table in schema.tables))
    cut = schema_text(schema, "compact", max_tokens=max_tokens)
    choice = table_choice(schema, "compact", max_tokens=max_tokens, count_tokens=estimated_tokens)
    assert choice is not None
    started = time.process_time()
    texts = [choice.text(one.question) or "" for one in questions]
    ms = 1000 * (time.process_time() - started) / len(questions)
    assert max(map(estimated_tokens, texts)) <= max_tokens
    pairs = list(zip(questions, texts, strict=True))
    counts = {
        "cut": sum(one.is_answerable(cut) for one in questions),
        "choice": sum(one.is_answerable(text) for one, text in pairs),
        "+names": sum(all(name in text for name in one.tables) for one, text in pairs),
    }
    return {name: round(n / len(questions), 4) for name, n in counts.items()} | {"ms each": round(ms, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=SPIDER, help="Spider's folder")
    parser.add_argument("--quick", action="store_true", help="a tenth of the questions on the dev databases")
    options = parser.parse_args()
    check_spider(parser, options.data)
    databases = Databases(options.data / "database")
    dev = json.loads((options.data / "dev.json").read_text())
    train = json.loads((options.data / "train_spider.json").read_text())[::7]
    cases = [("dev databases", dev), ("all databases", dev + train)]
    if options.quick:
        cases = [("dev databases", dev[::10])]
    record: dict[str, object] = {"benchmark": "schema_choice"}
    for title, rows in cases:
        wanted = set(databases.names()) if title == "all databases" else {row["db_id"] for row in dev}
        schema = union({name: read_schema(databases.address(name)) for name in sorted(wanted)})
        questions = asked(rows, schema)
        print(f"{title}: {len(schema.tables)} tables, {len(questions)} questions")
        print("tokens      cut   choice  +names  ms each")
        for max_tokens in BUDGETS:
            found = measure(schema, questions, max_tokens)
            shares = " ".join(f"{found[name]:>8.1%}" for name in ("cut", "choice", "+names"))
            print(f"{max_tokens:>6} {shares} {found['ms each']:>8.1f}", flush=True)
            record[f"{title}, {max_tokens} tokens"] = found
    print(json.dumps(record))


if __name__ == "__main__":
    main()
