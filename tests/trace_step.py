"""How far apart the code of one GRPO step lies: which functions of this package it enters, in which files.

A small run as in the main job (engine `slots`, real queries, grading with test databases, update, logs)
with scripted tokens: one episode explores first, one is wrong, one is right at once, one cannot be parsed
at first. The second step is traced, from the micro-batch to the log, threads of tools included; it asks the
same question as the first, whose schema and test databases are known by then. A function is noted at its
first call. A switch is a call that is noted in another file than the one before it in its thread: what a
reader does who follows the step top to bottom.

Run: OMP_NUM_THREADS=1 python -m tests.trace_step --quick      (seconds; without --quick the list, too)
The last line is JSON.
"""

import argparse
import itertools
import json
import logging
import os
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback

import text2sql_grpo
from tests.scripted_slots import ScriptedSampling
from tests.tiny_model import write_model
from text2sql_grpo.config import Config, load_config
from text2sql_grpo.evaluation.bench import Bench
from text2sql_grpo.models.loaded_policy import load_policy
from text2sql_grpo.reporting.progress import TrainingProgress
from text2sql_grpo.rollout.policy import SlotPolicy
from text2sql_grpo.run_folder import RunLog
from text2sql_grpo.training.arguments import training_arguments
from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer

REPOSITORY = Path(__file__).parents[1]
PACKAGE = Path(text2sql_grpo.__file__).parent
NOT_FUNCTIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<module>"}
SETTINGS = {"data.test": "{}", "environment.max_turns": "2", "sft": "null"}
GRPO = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_steps": 2,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
}


def is_spine(file: str) -> bool:
    """True for files that a reader of the step must read: the other subpackages have one entrance each."""
    return file.startswith("training/") or file == "rollout/engine.py"


class Trace(TrainerCallback):
    """Functions of this package in the order in which each thread first enters them, during one step.

    Attributes:
        entered: File and qualified name of each function, by thread.
    """

    def __init__(self, step: int) -> None:
        self.entered: dict[int, list[tuple[str, str]]] = defaultdict(list)
        self._step = step
        self._seen: set[CodeType] = set()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step - 1:
            threading.setprofile(self._note)
            sys.setprofile(self._note)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self._seen or code.co_name in NOT_FUNCTIONS:
            return
        self._seen.add(code)
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE):
            name = path.relative_to(PACKAGE).as_posix()
            self.entered[threading.get_ident()].append((name, code.co_qualname))


def traced_config(folder: Path) -> Config:
    """Settings of the quickstart on a random model of two narrow layers, in a run folder `run`."""
    overrides = [part for name, value in SETTINGS.items() for part in (f"--{name}", value)]
    overrides += ["--run.output_dir", str(folder / "run")]
    overrides += ["--model.path", str(write_model(folder / "model", hidden_size=48, max_positions=1024))]
    return load_config(REPOSITORY / "config" / "quickstart.yaml", overrides)


def scripted_trainer(bench: Bench, callbacks: Sequence[TrainerCallback]) -> SQLGRPOTrainer:
    """A trainer on the question with the shortest gold query, its episodes scripted."""
    config = bench.config
    example = min(bench.load(config.data.train, limit=40), key=lambda one: len(one.gold_sql))
    policy = load_policy(config.model.path)
    run_log = RunLog(config.run.output_dir)
    progress = TrainingProgress(run_log, Console(file=open(os.devnull, "w")))  # noqa: SIM115
    trainer = SQLGRPOTrainer(
        policy.model,
        bench.environment,
        train_dataset=[example],
        reward_funcs=config.reward_mix(),
        args=training_arguments(GRPO, output_dir=str(config.run.output_dir), seed=0),
        processing_class=policy.tokenizer,
        callbacks=[progress, *callbacks],
    )
    rollouts, unscripted = trainer.rollouts, trainer.rollouts.policy

    def scripted(model: PreTrainedModel) -> SlotPolicy:
        look, right = (
            f"<sql>{example.look_sql or example.gold_sql}</sql>",
            f"<answer>{example.gold_sql}</answer>",
        )
        wrong = f"<answer>SELECT {rollouts.step} + 1</answer>"  # executed: no step before asked for it
        episodes = [[look, right], [look, wrong], [right], ["?", right]]
        said = (
            tuple(token for turn in turns for token in rollouts.chat.turn_ids(turn)) for turns in episodes
        )
        return replace(unscripted(model), sampling=ScriptedSampling(episodes=tuple(said)))

    rollouts.policy = scripted
    for printer in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(printer)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="figures alone")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    trace = Trace(step=2)
    with tempfile.TemporaryDirectory() as name:
        config = traced_config(Path(name))
        with Bench.open(config) as bench:
            scripted_trainer(bench, [trace]).train()
    threads = list(trace.entered.values())
    if not options.quick:
        for functions in threads:
            for file, group in itertools.groupby(functions, key=lambda entry: entry[0]):
                print(f"{file}: {', '.join(function for _, function in group)}")
    entered = [entry for functions in threads for entry in functions]
    figures = {
        "functions": len(entered),
        "files": len({file for file, _ in entered}),
        "file_switches": sum(a[0] != b[0] for each in threads for a, b in itertools.pairwise(each)),
        "spine": len({entry for entry in entered if is_spine(entry[0])}),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
