"""How the grader takes plausible wrong answers and right rewrites that it was not built on.

The answers are `answer_classes.yaml`, one of each class, on Spider's dev databases; with --rollouts also the
answers of a policy that agree with their gold on the database (`rollouts.jsonl` or `evaluation.jsonl` of a
run on Spider). A judge labels them: it makes random databases in another way than the grader (see
`grading_judge.py`), and an answer that differs from its gold on one of them is wrong. Listed as right, an
answer that the judge disproves is counted apart; listed as wrong, one that it cannot disprove is too.

Run: OMP_NUM_THREADS=1 python benchmarks/grading_answers.py [--quick] [--rollouts FILE ...]
The last line is JSON. With --quick the recorded verdicts of the official evaluators are a sample of 300.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from grading_judge import Original, proved_wrong

from text2sql_grpo.grading.neighbours import Neighbours
from text2sql_grpo.grading.official import official_verdicts
from text2sql_grpo.grading.verdict import Grader
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Limits

TRIES = 24  # judge databases for each gold


@dataclass(frozen=True)
class Answer:
    """An answer to one gold; `listed` is `wrong` or `right`, or `model` for one without a label."""

    database: str
    gold: str
    listed: str
    name: str
    sql: str


def written_answers() -> Iterator[Answer]:
    """The answers beside this file."""
    path = Path(__file__).with_name("answer_classes.yaml")
    for case in yaml.safe_load(path.read_text(encoding="utf-8")):
        for listed in ("wrong", "right"):
            for name, sql in case[listed].items():
                yield Answer(case["database"], case["gold"], listed, name, sql)


def policy_answers(path: Path) -> Iterator[Answer]:
    """Answers of a policy that agree with their gold on the database, in other words, each once."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    agreeing = [line for line in lines if line["reason"] in ("equal", "neighbour")]
    pairs = {(line["database"], line["gold_sql"], line["final_sql"]) for line in agreeing}
    for database, gold, sql in sorted(pairs):
        if gold.lower().split() != sql.lower().split():
            yield Answer(database, gold, "model", "policy", sql)


def labelled(answers: list[Answer], data: Path, seed: int) -> dict[Answer, bool]:
    """True for each answer that the judge proves wrong."""
    by_gold: dict[tuple[str, str], list[Answer]] = {}
    for answer in answers:
        by_gold.setdefault((answer.database, answer.gold), []).append(answer)
    originals: dict[str, Original] = {}
    found = {}
    for (database, gold), group in by_gold.items():
        if database not in originals:
            originals[database] = Original(data / database / f"{database}.sqlite")
        rng = random.Random(f"{seed} {gold}")
        wrong = proved_wrong(originals[database], gold, [answer.sql for answer in group], rng, TRIES)
        found |= {answer: answer.sql in wrong for answer in group}
    return found


def equal_official(executor: SQLExecutor, shared: Path, empty: Path, limit: int | None) -> tuple[int, int]:
    """Recorded pairs, and those on which all official verdicts are equal."""
    text = (shared / "evaluator_verdicts" / "verdicts.jsonl").read_text(encoding="utf-8")
    pairs = [json.loads(line) for line in text.splitlines()]
    pairs = random.Random(0).sample([p for p in pairs if "baseball_1" not in p["db_path"]], limit or 2_540)
    equal = 0
    for pair in pairs:
        database = empty if pair["source"] == "values" else shared / pair["db_path"]
        ours = official_verdicts(executor, database, pair["gold"], pair["pred"])
        known = (pair["spider_exec"], pair["spider_exec_default"], bool(pair["bird_ex"]))
        same = known == (ours.spider_exec, ours.spider_exec_default, ours.bird_ex)
        equal += same and abs(ours.bird_f1 - pair["bird_f1"]) < 1e-12
    return len(pairs), equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    default = os.environ.get("TEXT2SQL_GRPO_SHARED_DATA") or Path(__file__).parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=Path(default), help="folder of Spider and verdicts")
    parser.add_argument("--rollouts", type=Path, nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    options = parser.parse_args()
    started = time.perf_counter()
    databases = options.data / "spider" / "database"
    counts: Counter[str] = Counter()
    answers = [*written_answers(), *(a for path in options.rollouts for a in policy_answers(path))]
    proved = labelled(answers, databases, options.seed)
    times: list[float] = []
    limits = Limits(timeout_s=60, max_rows=1_000_000, max_bytes=1_000_000_000)
    with tempfile.TemporaryDirectory() as folder, SQLExecutor(limits) as executor:
        plain = Grader(executor)
        grader = Grader(executor, neighbours=Neighbours(executor, Path(folder)))
        for answer in answers:
            database = databases / answer.database / f"{answer.database}.sqlite"
            on_database = plain.grade(database, answer.gold, answer.sql)
            grader.grade(database, answer.gold, answer.gold)  # makes the neighbours
            before = time.perf_counter()
            is_accepted = grader.grade(database, answer.gold, answer.sql).strict
            times += [time.perf_counter() - before] if on_database.strict else []
            label = "wrong" if proved[answer] else "right"
            if answer.listed not in ("model", label):
                label = "disproved" if proved[answer] else "not_proved"
            counts[f"{answer.listed} {label}"] += 1
            counts[f"{answer.listed} {label} agree"] += on_database.strict
            counts[f"{answer.listed} {label} ex"] += on_database.official
            counts[f"{answer.listed} {label} accepted"] += is_accepted
            if is_accepted == proved[answer] or label in ("disproved", "not_proved"):
                what = "accepted" if is_accepted else "refused"
                print(f"{what}, {answer.listed} ({label}): {answer.name}: {answer.sql}")
        empty = databases / "concert_singer" / "concert_singer.sqlite"  # pairs of VALUES read no table
        n_pairs, n_equal = equal_official(executor, options.data, empty, 300 if options.quick else None)
    summary = {**dict(sorted(counts.items())), "official_pairs": n_pairs, "official_equal": n_equal}
    for kind in ("wrong", "model"):
        agreeing = counts[f"{kind} wrong agree"]
        accepted = counts[f"{kind} wrong accepted"]
        summary[f"{kind}_accepted_of_those_right_on_the_database"] = round(accepted / max(agreeing, 1), 4)
    summary["right_refused"] = counts["right right"] - counts["right right accepted"]
    summary["grade_ms"] = round(1000 * sum(times) / max(len(times), 1), 1)
    summary["wall_s"] = round(time.perf_counter() - started, 1)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
