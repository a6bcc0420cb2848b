"""Recall and precision of the suspects of `audit data` on golds that were made wrong on purpose.

    python benchmarks/suspects.py --databases data/databases --answers runs/*/rollouts.jsonl

Answers are those of recorded episodes, pooled by question. Each question's gold is made wrong in one random
way (an operator of this file), which changes its result on the database or on a neighbour of the right gold.
The list is made once with every gold right and once with every gold wrong. Questions are independent of each
other, so recall and precision at a share of wrong golds follow from random draws.

With `--questions data/questions/train.jsonl --write FOLDER`, one such draw is written out to train on: the
answered questions (`right.jsonl`), the same with a tenth of the golds wrong (`wrong.jsonl`), the ids of these
(`planted.jsonl`) and the suspects listed for them (`suspects.jsonl`). `data.quarantine` reads the last two.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import sqlglot
from sqlglot import exp

from text2sql_grpo.audit.suspects import MIN_ANSWERS, find_suspects, read_samples
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.files import read_jsonl, write_jsonl
from text2sql_grpo.grading import Grader
from text2sql_grpo.rewards import open_grader
from text2sql_grpo.sql import SQLExecutor

PLANTED = 0.1  # share of wrong golds
DRAWS = 1_000

Swap = tuple[type[exp.Expr], type[exp.Expr]]
_COMPARED: list[Swap] = [
    (exp.GT, exp.LT),
    (exp.LT, exp.GT),
    (exp.GTE, exp.GT),
    (exp.LTE, exp.LT),
    (exp.EQ, exp.NEQ),
]
_AGGREGATED: list[Swap] = [(exp.Max, exp.Min), (exp.Min, exp.Max), (exp.Avg, exp.Max), (exp.Sum, exp.Avg)]


def wrong_golds(sql: str) -> Iterator[tuple[str, str]]:
    """Name and text of each query that one operator makes of a gold."""

    def changed(
        name: str, change: Callable[[exp.Expr], object], kind: type[exp.Expr]
    ) -> Iterator[tuple[str, str]]:
        for number in range(len(list(sqlglot.parse_one(sql, dialect="sqlite").find_all(kind)))):
            tree = sqlglot.parse_one(sql, dialect="sqlite")
            if change(list(tree.find_all(kind))[number]) is not False:
                yield name, tree.sql("sqlite")

    for old, new in _COMPARED:
        yield from changed("comparison", lambda node, new=new: node.replace(new(**node.args)), old)
    for old, new in _AGGREGATED:
        yield from changed("aggregate", lambda node, new=new: node.replace(new(this=node.this)), old)
    yield from changed("condition dropped", lambda node: node.replace(node.right), exp.And)
    yield from changed("conditions dropped", lambda node: node.pop(), exp.Where)
    yield from changed(
        "order reversed", lambda node: node.set("desc", not node.args.get("desc")), exp.Ordered
    )
    yield from changed("other limit", lambda node: node.set("expression", exp.Literal.number(2)), exp.Limit)
    yield from changed(
        "other number",
        lambda node: False if node.is_string else node.set("this", str(float(node.this) * 2 + 1)),
        exp.Literal,
    )
    yield from changed(
        "duplicates",
        lambda node: False if not isinstance(node.parent, exp.Count) else node.replace(node.expressions[0]),
        exp.Distinct,
    )
    yield from changed(
        "counts something else",
        lambda node: (
            False if isinstance(node.this, exp.Distinct) else node.replace(sqlglot.parse_one("MAX(rowid)"))
        ),
        exp.Count,
    )


def made_wrong(
    example: Example, databases: Databases, grader: Grader, rng: random.Random
) -> tuple[str, Example] | None:
    """Question with a wrong gold that runs and finds something; None if no operator makes one."""
    database = databases.address(example.database)
    options = list(dict.fromkeys(wrong_golds(example.gold_sql)))
    rng.shuffle(options)
    for name, sql in options:
        result = grader.gold_result(database, sql)
        finds = any(cell is not None for row in result.outcome.rows for cell in row)
        if result.is_usable and finds and not grader.grade(database, example.gold_sql, sql).strict:
            return name, replace(example, gold_sql=sql)
    return None


def write_draw(
    folder: Path,
    rows: Iterable[dict[str, object]],
    answered: set[str],
    golds: dict[str, str],
    listed: Sequence[dict[str, object]],
) -> None:
    """Write the answered questions with right golds and with wrong ones, and what to leave out of them."""
    folder.mkdir(parents=True, exist_ok=True)
    right = [row for row in rows if row["id"] in answered]
    write_jsonl(folder / "right.jsonl", right)
    write_jsonl(
        folder / "wrong.jsonl",
        [row | {"gold_sql": golds.get(str(row["id"]), row["gold_sql"])} for row in right],
    )
    write_jsonl(folder / "planted.jsonl", [{"id": id} for id in sorted(golds)])
    write_jsonl(folder / "suspects.jsonl", listed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--databases", type=Path, required=True)
    parser.add_argument("--answers", type=Path, nargs="+", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", type=Path, help="file of the answered questions, for --write")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write questions to train on")
    options = parser.parse_args()
    rng, databases = random.Random(options.seed), Databases(options.databases)
    samples: dict[str, list[dict[str, object]]] = {}
    for path in options.answers:
        for id, answers in read_samples(path).items():
            samples.setdefault(id, []).extend(answers)
    samples = {id: answers for id, answers in samples.items() if len(answers) >= MIN_ANSWERS}
    right = [
        Example(id, str(first["database"]), str(first["question"]), str(first["gold_sql"]))
        for id, (first, *_) in samples.items()
    ]
    with SQLExecutor() as executor:
        grader = open_grader(executor, neighbours=4)
        made = {e.id: found for e in right if (found := made_wrong(e, databases, grader, rng)) is not None}
        started = time.monotonic()
        false = {s["id"] for s in find_suspects(right, samples, databases, executor, Grader(executor))}
        seconds = time.monotonic() - started
        wrong = [example for _, example in made.values()]
        found = {s["id"]: s for s in find_suspects(wrong, samples, databases, executor, grader)}
    if options.write is not None:
        planted = set(rng.sample(sorted(made), round(PLANTED * len(samples))))
        golds = {id: made[id][1].gold_sql for id in planted}
        listed = [*(found[id] for id in planted & found.keys()), *({"id": id} for id in false - planted)]
        write_draw(options.write, read_jsonl(options.questions, "questions"), set(samples), golds, listed)
    by_operator: dict[str, list[bool]] = {}
    for id, (name, _) in made.items():
        by_operator.setdefault(name, []).append(id in found)
    knows = {
        id
        for id, answers in samples.items()
        if sum(map(bool, (a["strict"] for a in answers))) >= 0.7 * len(answers)
    }
    ids = sorted(made)
    hits = misses = extra = 0
    for _ in range(DRAWS):
        planted = set(rng.sample(ids, round(PLANTED * len(samples))))
        hits += len(planted & found.keys())
        misses += len(planted - found.keys())
        extra += len(false - planted)
    n_answers = sum(map(len, samples.values()))
    print(f"{len(samples)} questions, {n_answers} answers; right golds listed: {len(false)}")
    for name, caught in sorted(by_operator.items()):
        print(f"  {name:24} {sum(caught):3} of {len(caught):3} listed")
    record = {
        "questions": len(samples),
        "made_wrong": len(made),
        "found": len(found),
        "found_on_variants_alone": sum(s["on"] == "variants" for s in found.values()),
        "answered_right_by_most": len(knows & made.keys()),
        "found_of_those": len(knows & found.keys()),
        "right_golds_listed": len(false),
        "recall": round(hits / (hits + misses), 3),
        "precision": round(hits / (hits + extra), 3),
        "seconds_for_right_golds": round(seconds, 1),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
