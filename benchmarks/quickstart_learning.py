"""What GRPO adds in the quickstart, and what it does not: three seeds beside their controls.

For each seed, from one and the same warm start:
- the main job: accuracy before and after GRPO, with the look forced before GRPO, and the blind cap;
- the control that is allowed one turn only, so that it cannot look;
- for the other families, supervised training on the questions of GRPO for the same CPU time.

Run: OMP_NUM_THREADS=1 python benchmarks/quickstart_learning.py --seeds 0 1 2 --out runs/learning

What is finished in `--out` is not run again, so seeds can also be run one by one, or side by side, before the
command above prints them all.
"""

import argparse
import json
import random
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from text2sql_grpo.config import Config, load_config
from text2sql_grpo.evaluation.evaluate import answer_questions, summary
from text2sql_grpo.jobs.setup import evenly_spaced, open_workbench
from text2sql_grpo.jobs.train import train
from text2sql_grpo.rollout.policy import model_policy
from text2sql_grpo.training.demonstrations import looking_turns, play
from text2sql_grpo.training.policy import load_policy
from text2sql_grpo.training.shared_prefix_attention import attend_to_packed
from text2sql_grpo.training.warm_start import shared_prefix_loss

ROWS, PER_ROW, LEARNING_RATE = 5, 8, 1e-4


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


def supervised_control(config: Config, warm_start: str, cpu_s: float) -> dict[str, Any]:
    """Held-out summaries after supervised training on the golds of GRPO's questions."""
    bench = open_workbench(config)
    policy = load_policy(warm_start)
    model = policy.model
    chat = bench.chat(policy.tokenizer, model)
    by_database = defaultdict(list)
    for example in bench.load(config.data.train, limit=config.data.train_samples):
        by_database[example.database].append(play(example, looking_turns(example), bench.environment, chat))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    rng = random.Random(config.run.seed)
    attend_to_packed(model)
    model.train()
    started = time.process_time()
    while time.process_time() - started < cpu_s:
        databases = rng.choices(sorted(by_database), k=ROWS)
        rows = [rng.choices(by_database[database], k=PER_ROW) for database in databases]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = shared_prefix_loss(model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()
    speaker = model_policy(model, chat, batch_size=config.evaluation.batch_size)
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
        control = supervised_control(config, main["started_from"], main["cpu_seconds"]["GRPO"])
        written.write_text(json.dumps(control))
    supervised = json.loads(written.read_text())
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
            "others, before": counts(main["before"]["sets"], name, lookup=False),
            "others, after GRPO": counts(main["sets"], name, lookup=False),
            "others, supervised, same CPU time": counts(supervised, name, lookup=False),
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
