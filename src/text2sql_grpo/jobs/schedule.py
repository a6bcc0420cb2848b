"""Evaluations of `data.dev` during training, and the choice of weights by them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from transformers import Trainer

from text2sql_grpo import trl_compat
from text2sql_grpo.data.example import Example
from text2sql_grpo.evaluation.evaluate import answer_questions
from text2sql_grpo.evaluation.schedule import EvaluationSchedule, Record
from text2sql_grpo.evaluation.statistics import Accuracy
from text2sql_grpo.jobs.setup import Workbench
from text2sql_grpo.reliability import ranks
from text2sql_grpo.reliability.checkpoints import best_checkpoint, checkpoint_step
from text2sql_grpo.rewards import Answer
from text2sql_grpo.run_folder import RunLog, read_schedule


def schedule_evaluations(
    bench: Workbench, trainer: Trainer, folder: Path, console: Console, *, every: int | None
) -> None:
    """Let any trainer evaluate `data.dev` every few steps, from before training on; no-op without `every`."""
    if every is None:
        return

    def show(record: Record) -> None:
        measured = Accuracy.read(record["accuracy"])
        facts = f"dev {measured}, looks {record['look_share']:.0%}, {record['seconds']:.0f} s"
        console.print(f"step {record['step']}: {facts}", soft_wrap=True)

    trainer.add_callback(
        EvaluationSchedule(
            partial(_answer_now, bench, trainer),
            bench.dev,
            every=every,
            run_log=RunLog(folder),
            log=partial(Trainer.log, trainer),  # TRL's `log` would clear the metrics of the current step
            show=show,
        )
    )


def _answer_now(bench: Workbench, trainer: Trainer, questions: Sequence[Example]) -> list[Answer]:
    """Answer greedily with a trainer's weights, without effect on training; all answers on every rank."""
    model = trainer.model
    devices = [model.device.index] if model.device.type == "cuda" else []
    was_training = model.training
    rank, world_size = ranks.rank(), len(ranks.gather([None]))
    try:
        with torch.random.fork_rng(devices), trl_compat.unwrapped_model(trainer) as policy:
            model.eval()
            chat = bench.chat(trainer.processing_class, policy)
            own = answer_questions(
                questions[rank::world_size],
                bench.policy(policy, chat),
                chat,
                bench.environment,
                bench.grader,
                bench.budgets(policy),
            )
            shares = ranks.gather(own)
    finally:
        model.train(was_training)
    return [shares[i % world_size][i // world_size] for i in range(len(questions))]


def keep_best(bench: Workbench, trainer: Trainer, folder: Path, console: Console) -> int:
    """Load the weights that `evaluation.keep` selects; return their step."""
    # The state counts 0 if the run resumed from a checkpoint that had done all steps.
    last = int(trainer.state.global_step or trainer.args.max_steps)
    best = best_checkpoint(folder) if bench.config.evaluation.keep == "best" else None
    if best is None:
        return last
    step = checkpoint_step(best)
    known = {record["step"]: record["accuracy"]["accuracy"] for record in read_schedule(folder)}
    facts = [f"step {one} {known[one]:.1%}" for one in sorted({0, step, last}) if one in known]
    console.print(f"Kept the weights of step {step} of {last} (dev: {', '.join(facts)})", soft_wrap=True)
    if step != last:
        trl_compat.load_weights(trainer, best)
    return step
