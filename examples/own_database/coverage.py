"""Print how many questions of a folder read each table, join path and template, as Markdown.

Run: python examples/own_database/coverage.py FOLDER
"""

import json
import sys
from collections import Counter
from pathlib import Path

from sqlglot import exp, parse_one


def counted(folder: Path) -> tuple[int, dict[str, Counter[str]]]:
    """Number of questions, and how many there are of each table, join path and template."""
    counts: dict[str, Counter[str]] = {"table": Counter(), "join path": Counter(), "template": Counter()}
    rows = [
        json.loads(line)
        for file in sorted((folder / "questions").glob("*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    for row in rows:
        tables = sorted({table.name for table in parse_one(row["gold_sql"], "duckdb").find_all(exp.Table)})
        counts["table"].update(tables)
        counts["template"][row["template"]] += 1
        if len(tables) > 1:
            counts["join path"][" - ".join(tables)] += 1
    return len(rows), counts


def main(folder: str) -> None:
    total, counts = counted(Path(folder))
    print(f"{total} questions\n")
    for name, counter in counts.items():
        print(f"| {name} | questions | share |\n| --- | ---: | ---: |")
        for value, number in counter.most_common():
            print(f"| {value} | {number} | {number / total:.1%} |")
        print()


if __name__ == "__main__":
    main(sys.argv[1])
