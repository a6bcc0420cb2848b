"""Credit of turns on a task of five turns: none, rewards, tree and gae at equal sampled tokens.

One policy is fine-tuned on chats of `long_task.py`; each mode and seed trains it by GRPO from there until it
has sampled so many tokens (the shared first turns of a tree count once). Held-out questions are answered
greedily before and after. Without `--model` the policy is a random model of `tests/` of 0.4 M weights, on one
database: this shows that the modes run and what they cost, and nothing about language models. With
`--model`, `--adapter` names a LoRA adapter that is merged into it first, and options such as
`--grpo.learning_rate 1e-5` or `--model.lora {}` set fields of the config.

    python benchmarks/credit.py [--quick] [--out runs/credit.jsonl]
    python benchmarks/credit.py --model smollm2-135m --adapter data/start --out runs/credit.jsonl

`--out` names a JSONL file of finished runs, which are not run again; beside it are task and model. The last
line is JSON.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from long_task import DATA, SETTINGS, make_task
from rich.console import Console
from rich.table import Table
from text2sql_grpo.training.advantages import turn_spans
from transformers.trainer_callback import PrinterCallback, TrainerCallback

from text2sql_grpo.config import Config, load_config
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.evaluation.evaluate import accuracy, answer_questions
from text2sql_grpo.jobs.setup import Workbench, evenly_spaced, open_workbench
from text2sql_grpo.jobs.sft import started_policy
from text2sql_grpo.jobs.train import run_arguments
from text2sql_grpo.models.loaded_policy import LoadedPolicy
from text2sql_grpo.publishing.merge import merge_adapter
from text2sql_grpo.rewards import RewardMix
from text2sql_grpo.rollout.policy import model_policy
from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tests' random model
MODES = ("none", "rewards", "tree", "gae")
SHORT = ("airline", "bakery", "bank", "harbour", "telescope")  # databases whose chats take 650 to 820 tokens
HELD_OUT = 120
LORA = {"dtype": "bfloat16", "lora": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}}


class Budget(TrainerCallback):
    """Counts sampled tokens and ends training when they are spent.

    Attributes:
        tokens: Sampled tokens so far.
        right: Share of right training episodes of each step.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens, self._most = 0, tokens
        self.right: list[float] = []

    def count(self, episodes: list[Episode], fork: int) -> list[Episode]:
        for number, episode in enumerate(episodes):
            self.tokens += sum(episode.completion_mask)
            if number % fork:
                first = turn_spans(episode.completion_mask)[:1]
                self.tokens -= sum(end - start for start, end in first)
        return episodes

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "accuracy/strict" in logs:
            self.right.append(logs["accuracy/strict"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = self.tokens >= self._most


def write_config(folder: Path, model: str | None, adapter: Path | None, *, is_quick: bool) -> Path:
    """Write task and config, and the model: the random one if none is named, or with the adapter merged."""
    names, count = (["bank"], 600) if model is None else (SHORT, 100)
    make_task(folder / "task", names=names, count=40 if is_quick else count, demonstrations=600)
    if adapter is not None:
        merged = folder / "merged"
        if not merged.exists():
            merge_adapter(adapter, merged, base=model)
        model = str(merged)
    environment = {name: getattr(SETTINGS, name) for name in ("instructions", "schema_text", "max_turns")}
    if model is None:
        from tests.tiny_model import write_model

        lines = (folder / "task" / "chats.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [turn["content"] for line in lines for turn in json.loads(line)["messages"]]
        write_model(
            folder / "model",
            texts=texts,
            vocab_size=1024,
            hidden_size=96,
            num_layers=3,
            max_positions=1024,
        )
    config = {
        "run": {"output_dir": str(folder / "run")},
        "model": {"path": str(folder / "model"), "dtype": "float32"}
        if model is None
        else LORA | {"path": model},
        "data": {
            "databases": str(DATA),
            "train": str(folder / "task" / "questions.jsonl"),
            "test": {"dev": str(folder / "task" / "dev.jsonl")},
        },
        "environment": environment
        | {"max_turn_tokens": SETTINGS.max_turn_tokens, "max_episode_tokens": SETTINGS.max_episode_tokens},
        "rewards": {"execution": 1.0},
        "sft": {
            "chats": str(folder / "task" / "chats.jsonl"),
            "max_steps": 3 if is_quick else 280 if model is None else 25,
            "batch_size": 16,
            "learning_rate": 3e-3 if model is None else 1e-3,
            "min_learning_rate_ratio": 0.5 if model is None else 0.1,
        },
        "grpo": {
            "max_steps": 1000,
            "per_device_train_batch_size": 16,
            "gradient_accumulation_steps": 4,
            "num_generations": 8,
            "learning_rate": 3e-4 if model is None else 2e-4,
            "lr_scheduler_type": "constant",
            "scale_rewards": "none",
            "loss_type": "dapo",
            "temperature": 1.0,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "bf16": model is not None,
            "gradient_checkpointing": False,
        },
        "grading": {"neighbours": 4},
    }
    path = folder / "credit.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def held_out(bench: Workbench, policy: LoadedPolicy) -> tuple[int, int]:
    """Right answers to at most `HELD_OUT` held-out questions, greedy, and the number of questions."""
    chat, was_training = bench.chat(policy.tokenizer, policy.model), policy.model.training
    policy.model.eval()
    player = model_policy(policy.model, chat, batch_size=bench.config.evaluation.batch_size)
    with torch.random.fork_rng():
        questions = evenly_spaced(bench.test["dev"], HELD_OUT)
        answers = answer_questions(
            questions, player, chat, bench.environment, bench.grader, bench.budgets(policy.model)
        )
    policy.model.train(was_training)
    share = accuracy(answers)
    return share.correct, share.total


def start_policy(start: Config) -> LoadedPolicy:
    """The policy after SFT, which is run at the first call and then taken from the cache."""
    return started_policy(open_workbench(start), run_arguments(start), Console(quiet=True))


def measure_start(start: Config) -> dict[str, Any]:
    """Held-out accuracy of the policy that every run starts from."""
    right, total = held_out(open_workbench(start), start_policy(start))
    return {"right": right, "total": total}


def train(start: Config, config: Config, tokens: int) -> dict[str, Any]:
    """Train one mode from the policy fine-tuned by `start`; counts, accuracy and processor time."""
    policy = start_policy(start)
    bench, arguments = open_workbench(config), run_arguments(config)
    budget = Budget(tokens)
    trainer = SQLGRPOTrainer(
        policy.model,
        arguments,
        examples=bench.load(config.data.train),
        environment=bench.environment,
        rewards=RewardMix(config.rewards),
        grader=bench.grader,
        processing_class=policy.tokenizer,
        callbacks=[budget],
    )
    trainer.remove_callback(PrinterCallback)
    play = trainer._play
    trainer._play = lambda sessions: budget.count(play(sessions), arguments.subtree_size)  # type: ignore
    started = time.process_time()
    trainer.train()
    seconds = time.process_time() - started
    after, _ = held_out(bench, policy)
    return {
        "after": after,
        "steps": trainer.state.global_step,
        "tokens": budget.tokens,
        "cpu_s": round(seconds, 1),
        "right_in_training": [round(share, 3) for share in budget.right],
    }


def finished(path: Path | None) -> list[dict[str, Any]]:
    """Runs of a JSONL file; none if there is no file."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Run every mode with every seed, print a table and a last line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, under a minute")
    parser.add_argument("--model", help="folder, Hub id or smollm2-135m; by default a random model")
    parser.add_argument("--adapter", type=Path, help="LoRA adapter of the model, merged before SFT")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=100_000, help="sampled tokens of each run")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--out", type=Path, help="JSONL of finished runs, which are not run again")
    options, overrides = parser.parse_known_args()
    if options.quick:
        options.seeds, options.tokens = [0], 1  # a single step
    torch.set_num_threads(1)
    runs = finished(options.out)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) if options.out is None else options.out.with_suffix("").absolute()
        path = write_config(folder, options.model, options.adapter, is_quick=options.quick)
        start = load_config(path, overrides)
        before = next((row for row in runs if row["mode"] == "start"), None)
        if before is None:
            before = {"mode": "start", **measure_start(start)}
            record(before, options.out)
        done = {(row["seed"], row["mode"]): row for row in runs if row["mode"] != "start"}
        for seed in options.seeds:
            for mode in options.modes:
                if (seed, mode) in done:
                    continue
                fields = ["--run.seed", str(seed), "--grpo.turn_credit", mode, *overrides]
                result = train(start, load_config(path, fields), options.tokens)
                gc.collect()
                done[seed, mode] = {"seed": seed, "mode": mode, **result}
                record(done[seed, mode], options.out)
    found = {
        mode: [done[seed, mode] for seed in options.seeds if (seed, mode) in done] for mode in options.modes
    }
    report(before, found)
    model = options.model or "random, of tests/"
    print(json.dumps({"model": model, "tokens": options.tokens, "before": before, "modes": found}))


def record(row: dict[str, Any], out: Path | None) -> None:
    """Print a row, and append it to the file if there is one."""
    print(json.dumps(row), flush=True)
    if out is not None:
        with out.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")


def report(before: dict[str, Any], found: dict[str, list[dict[str, Any]]]) -> None:
    """Print mean and range over seeds of each mode."""
    title = f"Held-out questions right, of {before['total']}: {before['right']} before GRPO"
    table = Table(title=title)
    for column in ("credit of turns", "after, mean", "range", "sampled tokens", "steps", "cpu s"):
        table.add_column(column)
    for mode, results in found.items():
        mean = {
            key: statistics.fmean(row[key] for row in results)
            for key in ("after", "tokens", "steps", "cpu_s")
        }
        after = [row["after"] for row in results]
        table.add_row(
            mode,
            f"{mean['after']:.1f}",
            f"{min(after)} to {max(after)}",
            f"{mean['tokens']:.0f}",
            f"{mean['steps']:.1f}",
            f"{mean['cpu_s']:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
