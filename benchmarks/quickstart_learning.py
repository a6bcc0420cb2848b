"""What GRPO adds in the quickstart, and what it does not: three seeds beside their controls.

For each seed, from one and the same SFT stage:
- the main job: accuracy before and after GRPO, with the look forced before GRPO, and the blind cap;
- the same GRPO with one turn only, in which no look is possible;
- more SFT on the stage's own data, for the processor time of GRPO;
- the policy before GRPO, voting over eight samples.

Run: OMP_NUM_THREADS=1 python benchmarks/quickstart_learning.py --seeds 0 1 2 --out runs/learning

What is finished in `--out` is not run again, so seeds can also be run one by one, or side by side, before the
command above prints them all.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from text2sql_grpo.run.evaluate_job import answer_all
from transformers import TrainerCallback

from text2sql_grpo.config import Config, SFTSettings, load_config
from text2sql_grpo.evaluation.answers import Judged, read_answers, write_answers
from text2sql_grpo.evaluation.bench import Workbench, evenly_spaced, open_workbench
from text2sql_grpo.evaluation.comparison import Comparison, compare
from text2sql_grpo.models.loaded_policy import LoadedPolicy
from text2sql_grpo.rewards import Answer
from text2sql_grpo.run.pipeline import run_arguments, train
from text2sql_grpo.run.sft_stage import stage_trainer, started_policy

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tests' random model

BEFORE, AFTER, ONE_TURN = "before", "after GRPO", "one turn only, after GRPO"
ONE_TURN_OPTIONS = [
    *("--environment.max_turns", "1", "--start", "null"),
    *("--evaluation.before_training", "false", "--evaluation.every", "null", "--evaluation.keep", "last"),
]
SUPERVISED, VOTE = "more SFT, same processor time", "vote@8 before"
ALL = "all sets"
NEEDS: dict[str, Callable[[Judged], bool]] = {
    "look-up": lambda answer: answer.family == "lookup",
    "others": lambda answer: answer.family != "lookup",
}


class StopAfter(TrainerCallback):
    """Ends training after a number of processor seconds."""

    def __init__(self, cpu_s: float) -> None:
        self._end = time.process_time() + cpu_s

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = time.process_time() > self._end


def more_sft(config: Config, cpu_s: float, out: Path) -> None:
    """Answer the held-out questions after more SFT on the data of the stage."""
    arguments, console = run_arguments(config), Console(quiet=True)
    policy = started_policy(open_workbench(config), arguments, console)
    sft = replace(config.sft or SFTSettings(), stop=None, max_steps=100_000, save_steps=100_000)
    # At a third of the peak: the stage ended far below it, and this goes on for some minutes.
    sft = replace(sft, learning_rate=(sft.learning_rate or 6e-4) / 3, min_learning_rate_ratio=1.0)
    without_schedule = replace(config.evaluation, every=None, keep="last")
    order = replace(config.run, seed=config.run.seed + 1000)  # not the stage's own first batches again
    bench = open_workbench(replace(config, sft=sft, evaluation=without_schedule, run=order))
    with tempfile.TemporaryDirectory() as folder:
        trainer = stage_trainer(bench, policy, Path(folder), arguments, console)
        trainer.add_callback(StopAfter(cpu_s))
        trainer.train()
    write_answers(out, sampled(bench, replace(policy, model=trainer.model), temperature=0.0, votes=1))


def vote(config: Config, out: Path, *, votes: int = 8) -> None:
    """Answer the held-out questions by a vote over samples of the policy before GRPO.

    The vote goes to the result that most of the sampled answers have; ties to the one sampled first.
    """
    arguments, console = run_arguments(config), Console(quiet=True)
    bench = open_workbench(config)
    policy = started_policy(bench, arguments, console)
    chosen = {}
    for name, answers in sampled(bench, policy, temperature=arguments.temperature, votes=votes).items():
        groups = [answers[first : first + votes] for first in range(0, len(answers), votes)]
        results = [[result_of(bench, answer) for answer in group] for group in groups]
        winners = [found.index(Counter(found).most_common(1)[0][0]) for found in results]
        chosen[name] = [group[winner] for group, winner in zip(groups, winners, strict=True)]
    write_answers(out, chosen)


def sampled(
    bench: Workbench, policy: LoadedPolicy, *, temperature: float, votes: int
) -> dict[str, list[Answer]]:
    """Answers to the held-out questions of the main job, `votes` of each side by side."""
    config = bench.config
    sets = {
        name: [one for one in evenly_spaced(examples, config.data.test_samples) for _ in range(votes)]
        for name, examples in bench.test.items()
    }
    return answer_all(policy, bench, sets, Console(quiet=True), temperature=temperature, seed=config.run.seed)


def result_of(bench: Workbench, answer: Answer) -> str:
    """Rows of an answer's query as text; of none or a failing one, its status."""
    if answer.episode.final_sql is None:
        return "nothing"
    database = bench.databases.address(answer.example.database)
    outcome = bench.executor.execute(database, answer.episode.final_sql)
    return repr(sorted(map(repr, outcome.rows))) if outcome.is_ok else outcome.status


def measure(
    config_path: Path, seed: int, overrides: list[str], folder: Path, console: Console
) -> dict[str, Any]:
    """Answers and records of one seed; what `folder` holds is not run again."""

    def config_of(run: Path, *more: str) -> Config:
        options = ["--run.output_dir", str(run), "--run.seed", str(seed)]
        return load_config(config_path, [*overrides, *options, *more])

    main, one_turn = folder / f"main-{seed}", folder / f"one-turn-{seed}"
    if not (main / "evaluation.json").exists():
        train(config_of(main), console=console)
    if not (one_turn / "evaluation.json").exists():
        train(config_of(one_turn, *ONE_TURN_OPTIONS), console=console)
    record = json.loads((main / "evaluation.json").read_text())
    supervised, voted = folder / f"supervised-{seed}.jsonl", folder / f"vote-{seed}.jsonl"
    if not supervised.exists():
        more_sft(config_of(main), record["cpu_seconds"]["GRPO"], supervised)
    if not voted.exists():
        vote(config_of(main), voted)
    answers = {
        BEFORE: read_answers(main / "evaluation-before.jsonl"),
        AFTER: read_answers(main / "evaluation.jsonl"),
        ONE_TURN: read_answers(one_turn / "evaluation.jsonl"),
        SUPERVISED: read_answers(supervised),
        VOTE: read_answers(voted),
    }
    return {"answers": answers, "record": record}


def report(results: Mapping[int, dict[str, Any]], console: Console) -> list[dict[str, Any]]:
    """Print a table for each held-out set and kind of question; return its rows."""
    rows = []
    first = next(iter(results.values()))
    for name in [*first["record"]["sets"], ALL]:
        for need, belongs in NEEDS.items():
            table = Table(title=f"{name}, {need}: right/asked, and the change against `{BEFORE}`")
            for column in (
                "",
                *(f"seed {seed}" for seed in results),
                "mean",
                "points",
                "by database",
                "by question",
            ):
                table.add_column(column)
            for label in first["answers"]:
                row = row_of(results, name, need, belongs, label)
                cells = [f"{right}/{asked}" for right, asked in row["counts"]]
                change = row["change"]
                points = "" if change is None else f"{100 * change['difference']:+.0f}"
                ranges = [
                    "" if change is None else " to ".join(f"{100 * bound:+.0f}" for bound in change[kind])
                    for kind in ("interval", "naive_interval")
                ]
                table.add_row(label, *cells, f"{row['mean']:.0%}", points, *ranges)
                rows.append(row)
            marks = [result["record"]["lookup"].get(name, {}) for result in results.values()]
            if need == "look-up" and all(marks):
                for label, found in (
                    ("look forced, before", [mark.get("forced_look_before") for mark in marks]),
                    ("blind cap (best guess)", [mark["blind_cap"]["best"] for mark in marks]),
                    ("blind cap (any guess)", [mark["blind_cap"]["any"] for mark in marks]),
                ):
                    if all(found):
                        counts = [(one["correct"], one["total"]) for one in found]
                        rows.append(summed(name, need, label, counts, None))
                        cells = [f"{right}/{asked}" for right, asked in counts]
                        table.add_row(label, *cells, f"{rows[-1]['mean']:.0%}", "", "", "")
            console.print(table)
    return rows


def row_of(
    results: Mapping[int, dict[str, Any]],
    name: str,
    need: str,
    belongs: Callable[[Judged], bool],
    label: str,
) -> dict[str, Any]:
    """Counts of one measure in each seed; its change against the policy before GRPO, over all seeds."""
    counts, pairs = [], []
    for result in results.values():
        asked = [one for one in result["answers"][label] if name in (ALL, one.set) and belongs(one)]
        counts.append((sum(one.strict for one in asked), len(asked)))
        pairs += _pairs(result["answers"][BEFORE], asked)
    change = None if label == BEFORE or not pairs else Comparison(pairs, 0, 0).paired().record()
    return summed(name, need, label, counts, change)


def _pairs(before: Sequence[Judged], asked: Sequence[Judged]) -> list[tuple[Judged, Judged]]:
    return compare(before, asked).pairs if asked else []


def summed(
    name: str, need: str, label: str, counts: list[tuple[int, int]], change: dict[str, Any] | None
) -> dict[str, Any]:
    """A row of the report."""
    mean = sum(right / max(1, asked) for right, asked in counts) / len(counts)
    return {
        "set": name,
        "need": need,
        "measure": label,
        "counts": counts,
        "mean": round(mean, 4),
        "change": change,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--config", type=Path, default=Path("config/quickstart.yaml"))
    parser.add_argument("--out", type=Path, help="folder of the runs; default: a temporary one")
    parser.add_argument(
        "--quick", action="store_true", help="config/test.yaml, one seed, two steps: seconds, no score"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    overrides = ["--grpo.report_to", "none"]
    if options.quick:
        options.config, options.seeds = Path("config/test.yaml"), [0]
        overrides += ["--grpo.max_steps", "2"]
    console = Console()
    folder = options.out or Path(tempfile.mkdtemp(prefix="quickstart-learning-"))
    if options.quick:
        from tests.tiny_model import write_test_config_model

        write_test_config_model(folder / "model")
        overrides += ["--model.path", str(folder / "model")]
    results = {seed: measure(options.config, seed, overrides, folder, console) for seed in options.seeds}
    rows = report(results, console)
    cpu_s = {seed: result["record"]["cpu_seconds"] for seed, result in results.items()}
    print(json.dumps({"seeds": options.seeds, "config": str(options.config), "rows": rows, "cpu_s": cpu_s}))


if __name__ == "__main__":
    main()
