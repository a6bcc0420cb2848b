"""Thousands of GRPO steps with a very small policy: does anything grow?

The whole loop as in the main job: questions from shards on disk, episodes by the engine `slots` with real
queries, grading with neighbours, the update, the logs, a checkpoint now and then. What is sampled is forced,
so that a policy of one layer looks, fails, and is right; it is trained on it all the same. The questions are
40 of the project's own, those with the shortest queries, over and over under new ids. Every 100 steps: memory
of the process, bytes of living tensors, living caches of keys and values, threads, processes, open files.

Run: OMP_NUM_THREADS=1 python benchmarks/training_soak.py                            (2,000 steps)
     OMP_NUM_THREADS=1 python benchmarks/training_soak.py --steps 100 --questions 1000   (beside 100,000)
Linux only. The last line is JSON.
"""

import argparse
import gc
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from transformers import PreTrainedModel
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tests' random models

from tests.tiny_model import write_model
from text2sql_grpo.config import Config, load_config
from text2sql_grpo.data.example import Example
from text2sql_grpo.evaluation.bench import Workbench, open_workbench
from text2sql_grpo.models.loaded_policy import load_policy
from text2sql_grpo.reporting.progress import TrainingProgress
from text2sql_grpo.rewards import RewardMix
from text2sql_grpo.rollout.policy import SlotPolicy
from text2sql_grpo.rollout.sampling import Sampling
from text2sql_grpo.rollout.slot_cache import SlotCache
from text2sql_grpo.run_folder import RunLog
from text2sql_grpo.training.arguments import training_arguments
from text2sql_grpo.training.parts import Row
from text2sql_grpo.training.play import Rollouts, SQLPlay
from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer

REPOSITORY = Path(__file__).parents[1]
SHARDS = 10
DISTINCT = 40
WATCHED_EVERY = 100
SETTLED = 0.25  # of the steps: from then on memory may not grow
SETTINGS = {
    "data.test": "{}",
    "environment.max_turns": "2",
    "sft": "null",
}
GRPO = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "learning_rate": 1e-4,
    "save_steps": 500,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
}


def write_shards(folder: Path, count: int) -> None:
    """So many questions in ten files: some of the project's own, each time under new ids."""
    lines = (REPOSITORY / "data" / "questions" / "train.jsonl").read_text("utf-8").splitlines()
    rows = sorted(map(json.loads, lines), key=lambda row: len(row["gold_sql"]))
    rows = rows[:DISTINCT]
    for shard in range(SHARDS):
        with (folder / f"{shard}.jsonl").open("w", encoding="utf-8") as file:
            for number in range(shard, count, SHARDS):
                row = rows[number % len(rows)]
                file.write(json.dumps(row | {"id": f"{row['id']}-{number}"}) + "\n")


@dataclass(frozen=True)
class Forced(Sampling):
    """Draws given tokens, with the log-probs that the policy gives them.

    Attributes:
        episodes: Of each session, all tokens that it says.
    """

    episodes: tuple[tuple[int, ...], ...] = ()

    def uniforms(self, num_sessions: int, num_tokens: int) -> torch.Tensor:
        assert num_sessions == len(self.episodes)
        return torch.tensor([[*said, *[0] * (num_tokens - len(said))] for said in self.episodes])

    def draw(self, logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return uniforms, logits.log_softmax(-1).gather(-1, uniforms[:, None])[:, 0]


class SoakPlay(SQLPlay):
    """What changes: every second episode looks first, one in four is wrong, one in four cannot be read."""

    def play(self, questions: Sequence[int], rollouts: Rollouts) -> list[Row]:
        said = []
        for number, question in enumerate(questions):
            example = self._examples[question]
            look = f"<sql>{example.look_sql or example.gold_sql}</sql>"
            right = f"<answer>{example.gold_sql}</answer>"
            wrong = f"<answer>SELECT {rollouts.step} + 1</answer>"  # run, not taken from the cache
            turns = [[look, right], [look, wrong], [right], ["?", right]][number % 4]
            said.append(tuple(token for turn in turns for token in rollouts.chat.turn_ids(turn)))
        policy = rollouts.policy

        def forced(model: PreTrainedModel) -> SlotPolicy:
            return replace(policy(model), sampling=Forced(episodes=tuple(said)))

        with patch.object(rollouts, "policy", forced):
            return super().play(questions, rollouts)


def memory_mb() -> float:
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return resident * os.sysconf("SC_PAGE_SIZE") / 1e6


def alive() -> dict[str, int]:
    """Living tensors by the size of their storages, caches of keys and values, threads, processes, files."""
    gc.collect()
    things = gc.get_objects()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in things
        if issubclass(type(tensor), torch.Tensor)
    }
    tasks = Path("/proc/self/task")
    return {
        "tensor_bytes": sum(storages.values()),
        "kv_caches": sum(issubclass(type(thing), SlotCache) for thing in things),
        "objects": len(things),
        "threads": threading.active_count(),
        "tasks": len(list(tasks.iterdir())),
        "processes": sum(len((task / "children").read_text().split()) for task in tasks.iterdir()),
        "files": len(os.listdir("/proc/self/fd")),
    }


def size_of(row: dict[str, float]) -> int:
    return sys.getsizeof(row) + sum(map(sys.getsizeof, row.values()))


class Watch(TrainerCallback):
    """Looks at the process between steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.seen: list[dict[str, Any]] = []
        self.started, self.cpu_started = time.monotonic(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.every == 0:
            ms = 1_000 * (time.process_time() - self.cpu_started) / self.every
            seen = {"step": state.global_step, "elapsed_s": round(time.monotonic() - self.started, 1)}
            seen |= {"memory_mb": round(memory_mb(), 1), "cpu_ms_per_step": round(ms), **alive()}
            # The trainer of transformers keeps every line that was logged; it goes into each checkpoint.
            seen["log_history_mb"] = round(sum(map(size_of, state.log_history)) / 1e6, 2)
            self.seen.append(seen)
            print(json.dumps(seen), flush=True)
            self.cpu_started = time.process_time()


def growth(seen: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Means of the first and the last third after the first steps."""
    settled = [row[name] for row in seen[int(SETTLED * len(seen)) :]]
    third = max(1, len(settled) // 3)
    ends = {"early": settled[:third], "late": settled[-third:]}
    return {when: round(sum(values) / third, 1) for when, values in ends.items()}


def soak_config(folder: Path, questions: int) -> Config:
    """Settings of the quickstart on so many questions and a model of one layer, in a run folder `run`."""
    (folder / "shards").mkdir()
    write_shards(folder / "shards", questions)
    overrides = [part for name, value in SETTINGS.items() for part in (f"--{name}", value)]
    overrides += ["--data.train", str(folder / "shards"), "--run.output_dir", str(folder / "run")]
    overrides += ["--data.databases", str(REPOSITORY / "data" / "databases")]
    overrides += ["--model.path", str(write_model(folder / "model", hidden_size=48, max_positions=1024))]
    return load_config(REPOSITORY / "config" / "quickstart.yaml", overrides)


def soak_trainer(
    config: Config,
    bench: Workbench,
    examples: Sequence[Example],
    *,
    steps: int,
    callbacks: Sequence[TrainerCallback],
) -> SQLGRPOTrainer:
    policy = load_policy(config.model.path)
    arguments = training_arguments(
        GRPO | {"max_steps": steps},
        output_dir=str(config.run.output_dir),
        seed=0,
        max_turn_tokens=config.environment.max_turn_tokens,
        max_completion_length=config.environment.max_episode_tokens,
    )
    run_log = RunLog(config.run.output_dir)
    progress = TrainingProgress(run_log, Console(file=open(os.devnull, "w")))  # noqa: SIM115
    trainer = SQLGRPOTrainer(
        policy.model,
        arguments,
        examples=examples,
        environment=bench.environment,
        rewards=RewardMix(config.rewards),
        grader=bench.grader,
        processing_class=policy.tokenizer,
        callbacks=[progress, *callbacks],
        run_log=run_log,
    )
    trainer.play.__class__ = SoakPlay
    for printer in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(printer)
    return trainer


def soak(folder: Path, steps: int, questions: int) -> dict[str, Any]:
    config = soak_config(folder, questions)
    bench = open_workbench(config)
    before, started = memory_mb(), time.monotonic()
    examples = bench.load(config.data.train)
    loading = {"mb": round(memory_mb() - before, 1), "s": round(time.monotonic() - started, 1)}
    watch = Watch(min(WATCHED_EVERY, max(1, steps // 8)))
    trainer = soak_trainer(config, bench, examples, steps=steps, callbacks=[watch])
    started = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - started
    log = (folder / "run" / "rollouts.jsonl").read_text("utf-8").splitlines()
    episodes = [json.loads(line) for line in log]
    bench.executor.close()
    return {
        "steps": trainer.state.global_step,
        "questions": len(examples),
        "episodes": len(episodes),
        "sql_run": sum(action["kind"] == "run_sql" for row in episodes for action in row["actions"]),
        "submitted": sum(row["stop_reason"] == "submitted" for row in episodes),
        "right": sum(row["strict"] for row in episodes),
        "load_questions": loading,
        "ms_per_step": round(1_000 * seconds / steps),
        "memory_mb_most": max(row["memory_mb"] for row in watch.seen),
        **{name: growth(watch.seen, name) for name in watch.seen[0] if name not in ("step", "elapsed_s")},
        "rollouts_jsonl_mb": round(sum(len(line) for line in log) / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--questions", type=int, default=100_000)
    parser.add_argument("--quick", action="store_true", help="100 steps, 1,000 questions: under a minute")
    options = parser.parse_args()
    steps, questions = (100, 1_000) if options.quick else (options.steps, options.questions)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        figures = soak(Path(name), steps, questions)
    print(
        json.dumps({"benchmark": "training_soak", **figures, "wall_s": round(time.monotonic() - started, 1)})
    )


if __name__ == "__main__":
    main()
