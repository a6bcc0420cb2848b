"""What GRPO adds in the quickstart, and what it does not: three seeds beside their controls.

For each seed, from one and the same SFT stage:
- the main job: accuracy before and after GRPO, with the look forced before GRPO, and the blind cap;
- the control that is allowed one turn only, so that it cannot look;
- more supervised training on the stage's own log, for the processor time of GRPO;
- the policy before GRPO, voting over eight samples.

Run: OMP_NUM_THREADS=1 python benchmarks/quickstart_learning.py --seeds 0 1 2 --out runs/learning

What is finished in `--out` is not run again, so seeds can also be run one by one, or side by side, before the
command above prints them all.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback

from text2sql_grpo.config import Config, SFTSettings, load_config
from text2sql_grpo.evaluation.evaluate import Answer, answer_questions, summary
from text2sql_grpo.jobs.evaluate import answer_all
from text2sql_grpo.jobs.setup import Workbench, evenly_spaced, open_workbench
from text2sql_grpo.jobs.sft import stage_trainer, started_policy
from text2sql_grpo.jobs.train import run_arguments, train
from text2sql_grpo.models.cpu import inference_autocast
from text2sql_grpo.rollout.policy import model_policy


def run_job(
    config_path: Path, run: Path, seed: int, overrides: list[str], console: Console
) -> dict[str, Any]:
    """The evaluation record of a whole main job, run unless its folder holds one."""
    written = run / "evaluation.json"
    if not written.exists():
        config = load_config(config_path, [*overrides, "--run.output_dir", str(run), "--run.seed", str(seed)])
        train(config, console=console)
    record: dict[str, Any] = json.loads(written.read_text())
    return record


class StopAfter(TrainerCallback):
    """Ends training after so many processor seconds."""

    def __init__(self, cpu_s: float) -> None:
        self._end = time.process_time() + cpu_s

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = time.process_time() > self._end


def supervised_control(config: Config, cpu_s: float) -> dict[str, Any]:
    """Held-out summaries after more supervised training on the log that the stage was trained on."""
    arguments, console = run_arguments(config), Console(quiet=True)
    policy = started_policy(open_workbench(config), arguments, console)
    sft = replace(config.sft or SFTSettings(), stop=None, max_steps=100_000, save_steps=100_000)
    # At a third of the peak: the stage ended far below it, and this goes on for some minutes.
    sft = replace(sft, learning_rate=(sft.learning_rate or 6e-4) / 3, min_learning_rate_ratio=1.0)
    bench = open_workbench(replace(config, sft=sft))
    with tempfile.TemporaryDirectory() as folder:
        trainer = stage_trainer(bench, policy, Path(folder), arguments, [StopAfter(cpu_s)], console)
        trainer.train()
    model, chat = trainer.model, bench.chat(policy.tokenizer, policy.model)
    model.eval()
    speaker = model_policy(model, chat, batch_size=config.evaluation.batch_size)
    with inference_autocast(model, bf16=config.evaluation.bf16):
        return {
            name: summary(
                answer_questions(
                    evenly_spaced(examples, config.data.test_samples),
                    speaker,
                    chat,
                    bench.environment,
                    bench.grader,
                    bench.budgets(model),
                )
            )
            for name, examples in bench.test.items()
        }


def vote_control(config: Config, *, votes: int = 8) -> dict[str, list[list[int]]]:
    """Right and asked, of look-ups and of others, where the policy before GRPO votes over its samples.

    The vote goes to the result that most of the sampled answers have; ties to the one sampled first.
    """
    arguments, console = run_arguments(config), Console(quiet=True)
    bench = open_workbench(config)
    policy = started_policy(bench, arguments, console)
    figures = {}
    for name, examples in bench.test.items():
        asked = evenly_spaced(examples, config.data.test_samples)
        answers = answer_all(
            policy,
            bench,
            {name: [example for example in asked for _ in range(votes)]},
            console,
            title=name,
            temperature=arguments.temperature,
            seed=config.run.seed,
        )[name]
        counted = {True: [0, 0], False: [0, 0]}
        for first in range(0, len(answers), votes):
            group = answers[first : first + votes]
            results = [result_of(bench, answer) for answer in group]
            chosen = group[results.index(Counter(results).most_common(1)[0][0])]
            pair = counted[chosen.example.family == "lookup"]
            pair[0] += chosen.verdict.strict
            pair[1] += 1
        figures[name] = [counted[True], counted[False]]
    return figures


def result_of(bench: Workbench, answer: Answer) -> str:
    """Rows of an answer's query as text; of none or a failing one, its status."""
    if answer.episode.final_sql is None:
        return "nothing"
    database = bench.databases.path(answer.example.database)
    outcome = bench.executor.execute(database, answer.episode.final_sql)
    return repr(sorted(map(repr, outcome.rows))) if outcome.is_ok else outcome.status


def counts(sets: dict[str, Any], name: str, *, lookup: bool) -> tuple[int, int]:
    """Right answers and questions of one held-out set: the look-up family, or all others."""
    correct = total = 0
    for family, entry in sets[name]["by_family"].items():
        if (family == "lookup") == lookup:
            correct += entry["strict"]["correct"]
            total += entry["strict"]["total"]
    return correct, total


def measure(
    config_path: Path, seed: int, overrides: list[str], folder: Path, console: Console
) -> dict[str, Any]:
    """All figures of one seed: held-out set -> measure -> (right, asked)."""
    main = run_job(config_path, folder / f"main-{seed}", seed, overrides, console)
    one_turn = run_job(
        config_path, folder / f"one-turn-{seed}", seed, [*overrides, "--environment.max_turns", "1"], console
    )
    config = load_config(
        config_path, [*overrides, "--run.output_dir", str(folder / f"main-{seed}"), "--run.seed", str(seed)]
    )
    written = folder / f"supervised-{seed}.json"
    if not written.exists():
        control = supervised_control(config, main["cpu_seconds"]["GRPO"])
        written.write_text(json.dumps(control))
    supervised = json.loads(written.read_text())
    written = folder / f"vote-{seed}.json"
    if not written.exists():
        written.write_text(json.dumps(vote_control(config)))
    votes = json.loads(written.read_text())
    figures: dict[str, Any] = {}
    for name in main["sets"]:
        marks = main["lookup"][name]
        figures[name] = {
            "look-up, before": counts(main["before"]["sets"], name, lookup=True),
            "look-up, after GRPO": counts(main["sets"], name, lookup=True),
            "look-up, one turn only, after GRPO": counts(one_turn["sets"], name, lookup=True),
            "look-up, blind cap (best guess)": _pair(marks["blind_cap"]["best"]),
            "look-up, blind cap (any guess)": _pair(marks["blind_cap"]["any"]),
            "look-up, look forced, before": _pair(marks["forced_look_before"]),
            "look-up, supervised, same CPU time": counts(supervised, name, lookup=True),
            "look-up, vote@8 before": tuple(votes[name][0]),
            "others, before": counts(main["before"]["sets"], name, lookup=False),
            "others, after GRPO": counts(main["sets"], name, lookup=False),
            "others, supervised, same CPU time": counts(supervised, name, lookup=False),
            "others, vote@8 before": tuple(votes[name][1]),
        }
    return {"sets": figures, "cpu_s": main["cpu_seconds"]}


def _pair(record: dict[str, Any]) -> tuple[int, int]:
    return record["correct"], record["total"]


def report(results: dict[int, dict[str, Any]], console: Console) -> dict[str, float]:
    """Prints a table per held-out set and returns the mean share of each measure."""
    means: dict[str, float] = {}
    first = next(iter(results.values()))
    for name, measures in first["sets"].items():
        table = Table(title=f"{name}: share right (right/asked)")
        for column in ("measure", *(f"seed {seed}" for seed in results), "mean"):
            table.add_column(column)
        for label in measures:
            pairs = [result["sets"][name][label] for result in results.values()]
            mean = sum(right / max(1, asked) for right, asked in pairs) / len(pairs)
            means[f"{name}: {label}"] = round(mean, 4)
            cells = [f"{right / max(1, asked):.0%} ({right}/{asked})" for right, asked in pairs]
            table.add_row(label, *cells, f"{mean:.0%}")
        console.print(table)
    return means


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
    results = {seed: measure(options.config, seed, overrides, folder, console) for seed in options.seeds}
    means = report(results, console)
    print(
        json.dumps({"seeds": options.seeds, "config": str(options.config), "means": means, "runs": results})
    )


if __name__ == "__main__":
    main()
