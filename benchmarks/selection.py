"""Episodes, tokens and processor time of GRPO to a held-out accuracy, for each way to select questions.

Two tasks, each with the real trainer, environment and grading:
- `dead`: a random Llama of 135,488 weights after SFT on made-up words for aggregates. Of 24 words it answers
  4 right nearly always, 12 never (their aggregates are in no demonstration), and 8 now and then, against a
  habit of another answer. So about two thirds of the groups are dead at the start, and 8 words can be
  learned. A question's template is its word; held-out questions ask the same words about other columns. It is
  no language model: it shows what selection does to the use of episodes, nothing about text-to-SQL. The way
  `oracle` (only if named) draws uniformly from those 8 words, as if they were known.
- `quickstart`: the real model of `make train` (a run takes some ten minutes of a core and 5 GB).

Run: OMP_NUM_THREADS=1 python benchmarks/selection.py --quick       (two ways, one seed; under a minute)
     OMP_NUM_THREADS=1 python benchmarks/selection.py --seeds 0 1 2
     OMP_NUM_THREADS=1 python benchmarks/selection.py --task quickstart --target 0.6

Other options set fields of the config (`--grpo.learning_rate 3e-4`). The last line is JSON. Evaluations and
SFT are outside the clock; a run ends when it meets `--stop`.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table
from transformers.trainer_callback import PrinterCallback, TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tests' random model

from benchmarks.stopwatch import Stopwatch
from tests.tiny_model import write_model
from text2sql_grpo.config import Config, load_config
from text2sql_grpo.evaluation.bench import Workbench, evenly_spaced, open_workbench
from text2sql_grpo.evaluation.summary import accuracy, answer_questions
from text2sql_grpo.models.loaded_policy import LoadedPolicy
from text2sql_grpo.rewards import RewardMix
from text2sql_grpo.rollout.policy import model_policy
from text2sql_grpo.run.pipeline import run_arguments, select_questions
from text2sql_grpo.run.sft_stage import started_policy
from text2sql_grpo.run_folder import ROLLOUTS, RunLog
from text2sql_grpo.training.arguments import SQLGRPOConfig
from text2sql_grpo.training.select import open_gate
from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer

METHODS = ("uniform", "learnability", "regret", "easy_to_hard")
HELD_OUT = "test_values"
TABLES = {"shop": "branch", "school": "class", "harbour": "ship", "garden": "plant"}
COLUMNS = ("area", "price", "staff", "weight", "age")
SHOWN = ("MAX({})", "MIN({})", "SUM({})", "AVG({})", "MAX({}) - MIN({})")
NEVER_SHOWN = ("SUM({}) + MIN({})", "SUM({}) - MAX({})", "MAX({}) + MIN({})")
WORDS = (
    *("balo", "cimu", "dero", "fani"),  # easy: shown right only
    *("gepo", "hilu", "jora", "kemi", "lopa", "muxe", "nari", "povo"),  # shown right at times
    *("quba", "resi", "sodu", "tafe", "umbi", "vaco", "wegi", "xilo", "yamu", "zopi", "argu", "brene"),
)
RATES = (0.04, 0.06, 0.08, 0.1, 0.12, 0.16, 0.2, 0.25)  # of right demonstrations of the second kind
HABIT = 0.6


def write_task(folder: Path, *, sft_steps: int) -> Path:
    """Databases, questions, model and config of the task `dead`; returns the config."""
    draw = random.Random(0)
    (folder / "databases").mkdir(parents=True)
    for database, table in TABLES.items():
        columns = ", ".join(f"{name} INTEGER" for name in COLUMNS)
        rows = ", ".join(str(tuple(draw.sample(range(2, 400), len(COLUMNS)))) for _ in range(9))
        text = f"CREATE TABLE {table} ({columns});\nINSERT INTO {table} VALUES {rows};\n"
        (folder / "databases" / f"{database}.sql").write_text(text, encoding="utf-8")
    places = [(database, table, column) for database, table in TABLES.items() for column in COLUMNS]
    train, test, shown = [], [], []
    for number, word in enumerate(WORDS):
        right = (SHOWN if number < 12 else NEVER_SHOWN)[number % (5 if number < 12 else 3)]
        habit = SHOWN[(number + 2) % len(SHOWN)]
        rate = 1.0 if number < 4 else RATES[number - 4] if number < 12 else 0.0
        draw.shuffle(places)
        for i, (database, table, column) in enumerate(places):
            row = {
                "id": f"{word}-{table}-{column}",
                "database": database,
                "question": f"{word} {column}?",
                "gold_sql": _query(right, table, column),
                "template": word,
                "difficulty": "easy" if number < 4 else "medium" if number < 12 else "hard",
            }
            (train if i < 14 else test).append(row)
            for copy in range(8 if i < 14 else 0):
                others = [one for one in SHOWN if one != right]
                wrong = habit if draw.random() < HABIT else draw.choice(others)
                chosen = right if draw.random() < rate else wrong
                gold = _query(chosen, table, column)
                shown.append(row | {"id": f"{row['id']}-{copy}", "gold_sql": gold, "template": None})
    draw.shuffle(shown)
    learnable = [row for row in train if row["difficulty"] == "medium"]
    for name, rows in (("train", train), ("test", test), ("shown", shown), ("learnable", learnable)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    texts = [text for row in shown for text in (row["question"], f"<answer>{row['gold_sql']}</answer>")]
    texts += [f"{table}({', '.join(COLUMNS)})" for table in TABLES.values()] * 50
    write_model(folder / "model", max_positions=256, hidden_size=64, texts=texts, vocab_size=480)
    config = {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {
            "databases": str(folder / "databases"),
            "train": str(folder / "train.jsonl"),
            "test": {HELD_OUT: str(folder / "test.jsonl")},
            "test_samples": 72,
        },
        "environment": {
            "schema_text": "compact",
            "instructions": False,
            "max_turns": 1,
            "max_turn_tokens": 32,
            "max_episode_tokens": 64,
        },
        "grading": {"neighbours": 0},
        "rewards": {"execution": 1.0},
        "sft": {
            "questions": str(folder / "shown.jsonl"),
            "max_steps": sft_steps,
            "batch_size": 64,
            "learning_rate": 0.005,
        },
        "grpo": {
            "max_steps": 80,
            "per_device_train_batch_size": 64,
            "num_generations": 8,
            "learning_rate": 0.001,
            "bf16": False,
            "gradient_checkpointing": False,
        },
        "evaluation": {"batch_size": 72},
    }
    path = folder / "dead.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def _query(aggregate: str, table: str, column: str) -> str:
    return f"SELECT {aggregate.replace('{}', column)} FROM {table}"


class Curve(TrainerCallback):
    """Callback that evaluates between steps, with the clock stopped, until the target is met.

    Attributes:
        points: Step, episodes, sampled tokens, processor seconds and held-out accuracy of each evaluation.
    """

    def __init__(self, bench: Workbench, policy: LoadedPolicy, folder: Path, *, every: int, target: float):
        self.points: list[dict[str, float]] = []
        self._bench, self._model, self._every, self._target = bench, policy.model, every, target
        self._chat = bench.chat(policy.tokenizer, policy.model)
        self._examples = evenly_spaced(bench.test[HELD_OUT], bench.config.data.test_samples)
        self._watch, self._rollouts = Stopwatch(), folder / ROLLOUTS

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._evaluate(0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._watch.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._watch.__exit__()
        if state.global_step % self._every == 0 or state.global_step == state.max_steps:
            control.should_training_stop |= self._evaluate(state.global_step) >= self._target

    def _evaluate(self, step: int) -> float:
        bench, was_training = self._bench, self._model.training
        self._model.eval()
        policy = model_policy(self._model, self._chat, batch_size=bench.config.evaluation.batch_size)
        with torch.random.fork_rng():
            answers = answer_questions(
                self._examples,
                policy,
                self._chat,
                bench.environment,
                bench.grader,
                bench.budgets(self._model),
            )
        self._model.train(was_training)
        share = accuracy(answers)
        rows = list(self._episodes())
        point = {
            "step": step,
            "episodes": len(rows),
            "tokens": sum(sum(row["completion_mask"]) for row in rows),
            "cpu_s": round(self._watch.cpu_s, 1),
            "accuracy": round(share.correct / share.total, 4),
        }
        self.points.append(point)
        print(json.dumps(point), flush=True)
        return point["accuracy"]

    def _episodes(self) -> Iterator[dict[str, Any]]:
        if self._rollouts.exists():
            with self._rollouts.open(encoding="utf-8") as lines:
                yield from map(json.loads, lines)


def make_trainer(
    bench: Workbench, arguments: SQLGRPOConfig, policy: LoadedPolicy, callbacks: list[TrainerCallback]
) -> SQLGRPOTrainer:
    """The trainer of a run, which prints nothing and logs its episodes."""
    config = bench.config
    examples = bench.load(config.data.train, limit=config.data.train_samples)
    trainer = SQLGRPOTrainer(
        policy.model,
        arguments,
        examples=examples,
        environment=bench.environment,
        rewards=RewardMix(config.rewards),
        grader=bench.grader,
        processing_class=policy.tokenizer,
        callbacks=callbacks,
        run_log=RunLog(config.run.output_dir),
        select=select_questions(examples, bench, arguments),
        gate=open_gate(config.selection),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def run(config: Config, *, every: int, target: float) -> dict[str, Any]:
    """Curve of one run until the target, and its shares of zero-variance groups."""
    bench = open_workbench(config)
    arguments, folder = run_arguments(config), config.run.output_dir
    policy = started_policy(bench, arguments, Console(quiet=True))
    curve = Curve(bench, policy, folder, every=every, target=target)
    trainer = make_trainer(bench, arguments, policy, [curve])
    trainer.train()
    steps = [row for row in trainer.state.log_history if "frac_reward_zero_std" in row]
    kept, played = "frac_reward_zero_std", "selection/frac_verdict_zero_std_played"
    return {
        "points": curve.points,
        "dead_trained": round(statistics.fmean(row[kept] for row in steps), 3),
        "dead_first": round(statistics.fmean(row.get(played, row[kept]) for row in steps[:3]), 3),
    }


def ways(names: Sequence[str], folder: Path) -> dict[str, list[str]]:
    """Options of each way to select, by its name; `+1` has one further round for zero-variance groups."""
    options = {name: ["--selection.by", name] for name in METHODS}
    options |= {f"{name}+1": [*more, "--selection.resample_flat", "1"] for name, more in options.items()}
    usual = list(options)
    options["oracle"] = ["--data.train", str(folder / "learnable.jsonl")]
    return {name: options[name] for name in names or usual}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--task", choices=("dead", "quickstart"), default="dead")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="*", default=[], help="such as uniform learnability+1; default: all")
    parser.add_argument("--target", type=float, default=0.4, help="held-out accuracy")
    parser.add_argument("--stop", type=float, help="accuracy at which a run ends; default: the target")
    parser.add_argument("--every", type=int, default=4, help="steps between evaluations")
    parser.add_argument("--steps", type=int, help="at most; default: the config's")
    parser.add_argument("--out", type=Path, help="JSONL of finished runs, which are not run again")
    parser.add_argument("--quick", action="store_true", help="two ways, one seed, few steps")
    options, fields = parser.parse_known_args()
    if options.quick:
        options.seeds, options.steps, options.every = [0], 12, 4
        options.ways = options.ways or ["uniform", "learnability+1"]
    done = _read(options.out)
    with tempfile.TemporaryDirectory() as place:
        path = Path("config/quickstart.yaml")
        if options.task == "dead":
            path = write_task(Path(place) / "task", sft_steps=100 if options.quick else 250)
        for seed in options.seeds:
            for name, more in ways(options.ways, path.parent).items():
                if (name, seed) in done:
                    continue
                print(f"{name}, seed {seed}:", flush=True)
                overrides = ["--run.output_dir", f"{place}/{name}-{seed}", "--run.seed", str(seed), *more]
                overrides += ["--grpo.report_to", "none", "--grpo.save_strategy", "'no'", *fields]
                if options.task == "quickstart":
                    overrides += ["--evaluation.every", "null", "--evaluation.keep", "last"]
                if options.steps:
                    overrides += ["--grpo.max_steps", str(options.steps)]
                config = load_config(path, overrides)
                done[name, seed] = run(config, every=options.every, target=options.stop or options.target)
                if options.out:
                    with options.out.open("a", encoding="utf-8") as lines:
                        lines.write(json.dumps({"way": name, "seed": seed, **done[name, seed]}) + "\n")
    print(json.dumps({"task": options.task, "target": options.target, "ways": report(done, options)}))


def _read(path: Path | None) -> dict[tuple[str, int], dict[str, Any]]:
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(row["way"], row["seed"]): row for row in rows}


def report(done: dict[tuple[str, int], dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Print a table; return its rows: medians over seeds, None where a seed did not meet the target."""

    def first_met(points: Sequence[dict[str, float]]) -> dict[str, float] | None:
        return next((point for point in points if point["accuracy"] >= options.target), None)

    table, rows = Table(title="to the target, median over seeds"), dict[str, Any]()
    columns = ("episodes", "tokens", "cpu_s")
    for column in ("", "met", *columns, "dead at first", "dead of trained", "last accuracy"):
        table.add_column(column)
    for name in dict.fromkeys(name for name, _ in done):
        runs = [done[name, seed] for seed in options.seeds if (name, seed) in done]
        met = [point for point in map(first_met, (one["points"] for one in runs)) if point]
        row: dict[str, Any] = {"met": len(met), "seeds": len(runs)}
        for column in columns:
            is_met = len(met) == len(runs)
            row[column] = round(statistics.median(one[column] for one in met), 1) if is_met else None
        for field in ("dead_first", "dead_trained"):
            row[field] = round(statistics.fmean(one[field] for one in runs), 3)
        row["last_accuracy"] = round(statistics.fmean(one["points"][-1]["accuracy"] for one in runs), 3)
        rows[name] = row
        table.add_row(name, f"{row['met']}/{row['seeds']}", *(str(row[key]) for key in list(row)[2:]))
    Console().print(table)
    return rows


if __name__ == "__main__":
    main()
