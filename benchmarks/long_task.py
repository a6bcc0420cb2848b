"""Questions that need five turns: four stored values to look up over joined tables, then the answer.

Made from the bundled databases. A question counts the rows of a table with two or more foreign keys, by four
conditions on it and on the tables that it refers to, at least two of them joined. Each names a value
as people say it; the stored form shows in one exploratory query (`SELECT DISTINCT owner FROM ship`).

    python benchmarks/long_task.py FOLDER      # databases, questions and chats to fine-tune on
"""

import json
import random
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.loading import load_examples
from text2sql_grpo.environment.session import EnvironmentSettings, SQLEnvironment
from text2sql_grpo.sft.demonstrations import action_text
from text2sql_grpo.sql import SQLExecutor

DATA = Path(__file__).parents[1] / "data" / "databases"
LOOKS = 4
SETTINGS = EnvironmentSettings(
    instructions=False,
    schema_text="compact",
    max_turns=LOOKS + 3,
    max_turn_tokens=96,
    max_episode_tokens=900,
)


def _quoted(name: str) -> str:
    return name if name.isidentifier() and name not in ("order", "group") else f'"{name}"'


def _links(connection: sqlite3.Connection) -> dict[str, list[tuple[str, str]]]:
    """Foreign keys of the tables with two or more: table to (referred table, column)."""
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    links = {
        table: [(row[2], row[3]) for row in connection.execute(f'PRAGMA foreign_key_list("{table}")')]
        for table in tables
    }
    return {table: found for table, found in links.items() if len(found) > 1}


def _questions(name: str, count: int, draw: random.Random) -> list[dict[str, Any]]:
    """Questions on one database; none if too few of its values are stored otherwise than said."""
    words = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    said = {column: forms for column, forms in words["said"].items() if words["clauses"].get(column)}
    said = {column: forms for column, forms in said.items() if isinstance(words["clauses"][column], list)}
    rows: dict[str, dict[str, Any]] = {}
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript((DATA / f"{name}.sql").read_text(encoding="utf-8"))
        links = _links(connection)
        for _ in range(40 * count):
            if not links or len(rows) == count:
                break
            hub = draw.choice(sorted(links))
            tables = {hub, *(table for table, _ in links[hub])}
            columns = [column for column in sorted(said) if column.partition(".")[0] in tables]
            chosen = draw.sample(columns, min(LOOKS, len(columns)))
            used = {column.partition(".")[0] for column in chosen} - {hub}
            if len(chosen) < LOOKS or len(used) < 2:
                continue
            joins = "".join(
                f" JOIN {_quoted(table)} ON {_quoted(hub)}.{key} = {_quoted(table)}.{key}"
                for table, key in links[hub]
                if table in used
            )
            names = [".".join(map(_quoted, column.split("."))) for column in chosen]
            query = f"SELECT {', '.join(names)} FROM {_quoted(hub)}{joins}"
            values = draw.choice(connection.execute(query).fetchall())
            if not all(value in said[column] for value, column in zip(values, chosen, strict=True)):
                continue
            conditions = [f"{column} = '{value}'" for column, value in zip(names, values, strict=True)]
            asked = [
                f"{column.replace('.', ' ')} {said[column][value]}"
                for column, value in zip(chosen, values, strict=True)
            ]
            question = f"Number of {hub}s: {', '.join(asked)}?"
            looks = [
                f"SELECT DISTINCT {name.partition('.')[2]} FROM {name.partition('.')[0]}" for name in names
            ]
            gold = f"SELECT COUNT(*) FROM {_quoted(hub)}{joins} WHERE {' AND '.join(conditions)}"
            rows[question] = {"database": name, "question": question, "gold_sql": gold, "looks": looks}
    return list(rows.values())


def make_task(folder: Path, *, names: Sequence[str], count: int, demonstrations: int, seed: int = 0) -> None:
    """Write `questions.jsonl`, `dev.jsonl` and `chats.jsonl` into a folder.

    Args:
        names: Bundled databases.
        count: Maximum number of questions of each database; a fifth of them is held out in `dev.jsonl`.
        demonstrations: Number of training questions with a chat: four looks and the answer.
    """
    draw = random.Random(seed)
    rows = [row for name in names for row in _questions(name, count, draw)]
    draw.shuffle(rows)
    for number, row in enumerate(rows):
        row |= {"id": f"long-{number:04}", "family": "long", "difficulty": "hard"}
    held_out = len(rows) // 5
    files = {"dev": rows[:held_out], "questions": rows[held_out:], "chats": rows[held_out:][:demonstrations]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in files.items():
        lines = [{key: row[key] for key in row if key != "looks"} for row in chosen]
        if name == "chats":
            environment = SQLEnvironment(Databases(DATA), SQLExecutor(), SETTINGS)
            lines = [_chat(row, environment) for row in chosen]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def _chat(row: dict[str, Any], environment: SQLEnvironment) -> dict[str, Any]:
    """Chat of a question that looks up each value in the order of the question, then answers."""
    example = Example(**{key: row[key] for key in ("id", "database", "question", "gold_sql", "family")})
    session = environment.session(example)
    session.start()
    for query in row["looks"]:
        session.step(action_text("run_sql", query, "tags"))
    session.step(action_text("submit_sql", row["gold_sql"], "tags"))
    return {
        "example": row["id"],
        "sample": 0,
        "database": row["database"],
        "messages": session.episode.messages,
    }


def check(folder: Path) -> int:
    """Number of training questions whose gold runs and counts something."""
    return len(load_examples(folder / "questions.jsonl", Databases(DATA), SQLExecutor()))


if __name__ == "__main__":
    out = Path(sys.argv[1])
    everywhere = sorted(path.stem for path in DATA.glob("*.sql"))
    make_task(out, names=everywhere, count=100, demonstrations=600)
    print(f"{check(out)} training questions in {out}")
