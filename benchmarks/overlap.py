"""Seconds of a GRPO step with `rollout.staleness` 0, 1 and 2: is it worth playing beside the update?

The quickstart's model, environment, grading and rewards; each staleness trains for the same number of steps
from the same start, one after another in one process. A step's seconds are those of the whole training by
the number of steps: the first batch, which is played while nothing else runs, counts. `--tool_s` makes each
exploratory query take so much longer, as a database or a tool far away does.

Run on idle cores: python benchmarks/overlap.py [--steps 8] [--tool_s 1.0]
                   python benchmarks/overlap.py --quick     (a random model, under a minute)
On busy ones:      python benchmarks/overlap.py --steps 6 --curve 2 --seeds 0 1 2

`--curve` answers 60 held-out questions every so many steps, greedily: what older weights cost in accuracy.
The next batch is played meanwhile, so that the seconds of such a run mean nothing. The last line is JSON.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tests' random model

from benchmarks.selection import Curve, make_trainer, write_task
from text2sql_grpo.config import load_config
from text2sql_grpo.environment.tools import ExecutorBackend
from text2sql_grpo.jobs.setup import open_workbench
from text2sql_grpo.jobs.sft import started_policy
from text2sql_grpo.jobs.train import run_arguments
from text2sql_grpo.models.cpu import use_fastest_threads


def train(path: Path, staleness: int, seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Means over the steps, and held-out accuracy if asked for."""
    steps = options.steps
    overrides = ["--run.output_dir", str(folder), "--rollout.staleness", str(staleness)]
    overrides += ["--run.seed", str(seed), "--evaluation.every", "null", "--evaluation.keep", "last"]
    overrides += ["--grpo.max_steps", str(steps), "--grpo.report_to", "none", "--grpo.save_strategy", "'no'"]
    config = load_config(path, overrides)
    bench, arguments = open_workbench(config), run_arguments(config)
    policy = started_policy(bench, arguments, Console(quiet=True))
    curve = Curve(bench, policy, folder, every=options.curve, target=1.0) if options.curve else None
    trainer = make_trainer(bench, arguments, policy, [curve] if curve else [])
    started, began = time.process_time(), time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    rows = [row for row in trainer.state.log_history if "time/step" in row]
    return {
        "staleness": staleness,
        "seed": seed,
        "step_s": seconds / steps,
        "step_cpu_s": (time.process_time() - started) / steps,
        "wait_s": statistics.mean(row["time/wait"] for row in rows),
        "update_s": statistics.mean(row["time/update"] for row in rows),
        "tokens": statistics.mean(row["completions/mean_length"] for row in rows),
        "clipped": statistics.mean(row.get("clip_ratio/region_mean", 0.0) for row in rows[1:]),
        "right_in_training": [round(row["accuracy/strict"], 3) for row in rows],
        "held_out": [point["accuracy"] for point in curve.points] if curve else [],
    }


def slow_tools(seconds: float) -> None:
    """Let each exploratory query of this process take longer by so much."""
    call = ExecutorBackend.call

    def slower(self: ExecutorBackend, name: str, arguments: dict[str, Any]) -> Any:
        time.sleep(seconds)
        return call(self, name, arguments)

    ExecutorBackend.call = slower  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--curve", type=int, default=0, help="steps between evaluations; 0 for none")
    parser.add_argument("--tool_s", type=float, default=0.0)
    parser.add_argument("--quick", action="store_true", help="a random model after a short SFT")
    options = parser.parse_args()
    print(use_fastest_threads() or f"threads: {torch.get_num_threads()}")
    if options.tool_s:
        slow_tools(options.tool_s)
    results = []
    with tempfile.TemporaryDirectory() as place:
        path = Path("config/quickstart.yaml")
        if options.quick:
            path = write_task(Path(place) / "task", sft_steps=40)
        for seed, staleness in itertools.product(options.seeds, options.staleness):
            found = train(path, staleness, seed, options, Path(place) / f"{seed}-{staleness}")
            results.append(
                {
                    name: round(value, 3) if isinstance(value, float) else value
                    for name, value in found.items()
                }
            )
            print(json.dumps(results[-1]), flush=True)
            gc.collect()
    table = Table(title="seconds of a step")
    columns = ("staleness", "seed", "step", "of it waits for rollouts", "update", "cpu", "held out")
    for column in columns:
        table.add_column(column)
    for row in results:
        names = ("staleness", "seed", "step_s", "wait_s", "update_s", "step_cpu_s", "held_out")
        table.add_row(*(str(row[name]) for name in names))
    Console().print(table)
    steps_s = {staleness: [] for staleness in options.staleness}
    for row in results:
        steps_s[row["staleness"]].append(row["step_s"])
    means = {staleness: statistics.mean(found) for staleness, found in steps_s.items()}
    first = means[options.staleness[0]]
    ratios = {f"ratio_{staleness}": round(first / mean, 3) for staleness, mean in means.items()}
    print(
        json.dumps(
            {
                "benchmark": "overlap",
                "threads": torch.get_num_threads(),
                "tool_s": options.tool_s,
                "results": results,
                **ratios,
            }
        )
    )


if __name__ == "__main__":
    main()
