"""Seconds of training until the quickstart's policy is so good: part of `step.py`.

GRPO of the quickstart twice from one SFT stage: ours, and with TRL's own generation and update
(`rollout.engine: generation`, `grpo.shared_prefix: false`). Environment, grading and rewards are ours on both
sides, so this is what engine and update alone change; TRL's own tool loop is not measured here. The sides
draw other episodes, so one seed says little about how many steps are needed; how long a step takes is what
differs. Every few steps the look-up questions about unseen stored values are answered greedily; that, the
SFT stage and the making of the trainer are outside the clock.
"""

import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from stopwatch import Stopwatch
from transformers.trainer_callback import PrinterCallback, TrainerCallback
from trl.kernels import chunked_logprob

from text2sql_grpo.config import Config, load_config
from text2sql_grpo.evaluation.bench import Workbench, evenly_spaced, open_workbench
from text2sql_grpo.evaluation.summary import accuracy, answer_questions
from text2sql_grpo.models.loaded_policy import LoadedPolicy
from text2sql_grpo.rewards import RewardMix
from text2sql_grpo.rollout.policy import model_policy
from text2sql_grpo.run.pipeline import run_arguments
from text2sql_grpo.run.sft_stage import started_policy
from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer

SIDES = {"trl": ["--rollout.engine", "generation", "--grpo.shared_prefix", "false"], "ours": []}
HELD_OUT, FAMILY = "test_values", "lookup"


class Learning(TrainerCallback):
    """Times each step, and evaluates between steps with the clock stopped.

    Attributes:
        points: Of each evaluation: step, seconds and processor seconds trained, right answers, questions.
    """

    def __init__(self, bench: Workbench, policy: LoadedPolicy, *, every: int) -> None:
        self.points: list[dict[str, float]] = []
        self._bench = bench
        self._model = policy.model
        self._chat = bench.chat(policy.tokenizer, policy.model)
        asked = [example for example in bench.test[HELD_OUT] if example.family == FAMILY]
        self._examples = evenly_spaced(asked, bench.config.data.test_samples)
        self._every = every
        self._watch = Stopwatch()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._evaluate(0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._watch.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._watch.__exit__()
        if state.global_step % self._every == 0 or state.global_step == state.max_steps:
            self._evaluate(state.global_step)

    def _evaluate(self, step: int) -> None:
        bench, was_training = self._bench, self._model.training
        self._model.eval()
        speaker = model_policy(self._model, self._chat, batch_size=bench.config.evaluation.batch_size)
        with torch.random.fork_rng():  # training goes on as if nobody had asked
            answers = answer_questions(
                self._examples,
                speaker,
                self._chat,
                bench.environment,
                bench.grader,
                bench.budgets(self._model),
            )
        self._model.train(was_training)
        share = accuracy(answers)
        point = {
            "step": step,
            "seconds": round(self._watch.seconds, 1),
            "cpu_s": round(self._watch.cpu_s, 1),
            "correct": share.correct,
            "total": share.total,
        }
        self.points.append(point)
        print(json.dumps(point), flush=True)


def curve(config: Config, *, every: int) -> list[dict[str, float]]:
    """The points of one run of GRPO."""
    bench = open_workbench(config)
    policy = started_policy(bench, run_arguments(config), Console(quiet=True))
    learning = Learning(bench, policy, every=every)
    trainer = SQLGRPOTrainer(
        policy.model,
        run_arguments(config),
        examples=bench.load(config.data.train, limit=config.data.train_samples),
        environment=bench.environment,
        rewards=RewardMix(config.rewards),
        grader=bench.grader,
        processing_class=policy.tokenizer,
        callbacks=[learning],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return learning.points


def reached(points: list[dict[str, float]], target: float) -> dict[str, float] | None:
    """The first point at which the target was met; None if it never was."""
    return next((point for point in points if point["correct"] >= target * point["total"]), None)


def compare(
    config_path: Path, seed: int, *, steps: int | None, every: int, target: float, logit_tile: int
) -> dict[str, Any]:
    """Both curves of one seed and how much sooner ours met the target.

    Args:
        steps: Of GRPO; None for the config's.
        target: Share of right answers, in [0, 1].
        logit_tile: Of TRL's fused head, which our update sets for the whole process.
    """
    result: dict[str, Any] = {"seed": seed, "target": target}
    for name, settings in SIDES.items():
        gc.collect()
        chunked_logprob.TOKEN_CHUNK_SIZE = logit_tile
        with tempfile.TemporaryDirectory() as folder:
            overrides = ["--run.seed", str(seed), "--run.output_dir", folder]
            overrides += ["--grpo.report_to", "none", "--grpo.save_strategy", "'no'", *settings]
            if steps is not None:
                overrides += ["--grpo.max_steps", str(steps)]
            print(f"seed {seed}, {name}:", flush=True)
            result[name] = curve(load_config(config_path, overrides), every=every)
        met = reached(result[name], target)
        result[f"{name}_s"], result[f"{name}_cpu_s"] = (met["seconds"], met["cpu_s"]) if met else (None, None)
    for unit, ratio in (("s", "ratio"), ("cpu_s", "cpu_ratio")):
        trl, ours = result[f"trl_{unit}"], result[f"ours_{unit}"]
        result[ratio] = round(trl / ours, 2) if trl is not None and ours else None
    return result


def report(result: dict[str, Any], console: Console) -> None:
    """Prints both curves of one seed side by side."""
    table = Table(title=f"seed {result['seed']}: share of {FAMILY} questions of {HELD_OUT} right")
    for column in ("step", *(f"{name} {what}" for name in SIDES for what in ("s", "cpu s", "right"))):
        table.add_column(column)
    for points in zip(*(result[name] for name in SIDES), strict=True):
        cells = [str(points[0]["step"])]
        for point in points:
            share = f"{point['correct'] / point['total']:.0%}"
            cells += [f"{point['seconds']:.1f}", f"{point['cpu_s']:.1f}", share]
        table.add_row(*cells)
    console.print(table)
    for name in SIDES:
        seconds, cpu_s = result[f"{name}_s"], result[f"{name}_cpu_s"]
        said = "not reached" if seconds is None else f"{seconds} s, {cpu_s} s of processor time"
        console.print(f"{name}: {result['target']:.0%} right after training for: {said}")
