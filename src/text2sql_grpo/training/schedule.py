"""Evaluations of `data.dev` during training, and the choice of weights by them."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

from text2sql_grpo import trl_compat
from text2sql_grpo.data.example import Example
from text2sql_grpo.evaluation.statistics import Accuracy
from text2sql_grpo.evaluation.summary import accuracy
from text2sql_grpo.models.loaded_policy import LoadedPolicy
from text2sql_grpo.reliability import ranks
from text2sql_grpo.reliability.alerts import Alerts
from text2sql_grpo.reliability.checkpoints import SCHEDULED_METRIC, best_checkpoint, checkpoint_step
from text2sql_grpo.rewards import Answer
from text2sql_grpo.run_folder import SCHEDULE, RunLog, read_schedule


@dataclass(eq=False)
class EvaluationSchedule(TrainerCallback):
    """Callback that evaluates a policy at step 0, every few optimiser steps, and at the last step.

    Each evaluation is one line of `evaluation_schedule.jsonl`; a resumed run repeats none. A step that is
    better than all before it gets a checkpoint. Every rank takes part.

    Attributes:
        answer: `answer` of a `Bench` or an `Environment`.
        questions: Held-out questions, the same each time.
        every: Optimiser steps between two evaluations.
        saves_start: Save a checkpoint of step 0 too, so that `keep_best` can select it.
        console: Where each evaluation is printed; None for nowhere.
    """

    trainer: Trainer
    answer: Callable[..., list[Answer]]
    questions: Sequence[Example]
    _: KW_ONLY
    every: int
    saves_start: bool = False
    console: Console | None = None
    _done: dict[int, float] = field(default_factory=dict, init=False)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Read earlier evaluations from rank 0's folder; evaluate step 0."""
        known = ranks.from_main(lambda: read_schedule(Path(args.output_dir)))
        self._done = {record["step"]: record["accuracy"]["accuracy"] for record in known}
        if state.global_step == 0 and 0 not in self._done:
            self._evaluate(state, control)
            if self.saves_start:
                trl_compat.save_checkpoint(self.trainer)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Evaluate if this step is due; request a checkpoint of a new best."""
        step = state.global_step
        is_due = step % self.every == 0 or step == state.max_steps
        if not is_due or step in self._done:
            return
        best = max((value for done, value in self._done.items() if done > 0), default=-1.0)
        if self._evaluate(state, control) > best:
            control.should_save = control.should_log = True

    def _evaluate(self, state: TrainerState, control: TrainerControl) -> float:
        started = time.monotonic()
        record = schedule_record(self._answers(), state.global_step)
        record["seconds"] = round(time.monotonic() - started, 1)
        if state.is_world_process_zero:
            RunLog(Path(self.trainer.args.output_dir)).write(SCHEDULE, [record])
        should_log = control.should_log  # `log` would mark the step's metrics as logged
        Trainer.log(self.trainer, figures(record))  # TRL's would clear the metrics of the current step
        control.should_log = should_log
        if self.console is not None:
            measured = Accuracy.read(record["accuracy"])
            facts = f"dev {measured}, looks {record['look_share']:.0%}, {record['seconds']:.0f} s"
            self.console.print(f"step {record['step']}: {facts}", soft_wrap=True)
        self._done[state.global_step] = record["accuracy"]["accuracy"]
        return self._done[state.global_step]

    def _answers(self) -> list[Answer]:
        """Answer greedily with the current weights, without effect on training; all answers on every rank."""
        trainer, rank, world_size = self.trainer, ranks.rank(), ranks.world_size()
        with ExitStack() as stack:
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, Alerts):
                    stack.enter_context(callback.paused())
            policy = stack.enter_context(trl_compat.unwrapped_model(trainer))
            options = getattr(trainer.args, "chat_template_kwargs", None)  # SFT's arguments have none
            loaded = LoadedPolicy(policy, trainer.processing_class, "", options)
            shares = ranks.gather(self.answer(self.questions[rank::world_size], loaded))
        return [shares[i % world_size][i // world_size] for i in range(len(self.questions))]


def schedule_record(answers: Sequence[Answer], step: int) -> dict[str, Any]:
    """Line of `evaluation_schedule.jsonl`: strict accuracy and share of answers with a tool call."""
    families = sorted({answer.example.family for answer in answers})
    groups = {name: [answer for answer in answers if answer.example.family == name] for name in families}
    by_family = {name: _measured(group) for name, group in groups.items()}
    return {"step": step, **_measured(answers), "by_family": by_family}


def _measured(answers: Sequence[Answer]) -> dict[str, Any]:
    looked = sum(answer.episode.looks > 0 for answer in answers)
    return {"accuracy": accuracy(answers).record(), "look_share": round(looked / max(1, len(answers)), 6)}


def figures(record: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of a record; trackers show them as `eval/dev/...`."""
    found = {SCHEDULED_METRIC: record["accuracy"]["accuracy"], "eval_dev/look_share": record["look_share"]}
    for name, family in record["by_family"].items():
        found[f"{SCHEDULED_METRIC}/{name}"] = family["accuracy"]["accuracy"]
        found[f"eval_dev/look_share/{name}"] = family["look_share"]
    return found


def keep_best(keep: str, trainer: Trainer, folder: Path, console: Console) -> int:
    """Load the weights that `evaluation.keep` selects; return their step.

    Step 0, the weights before training, is selected if no later step was as good. A warning is printed, also
    where the last step is kept though it is worse.
    """
    last = int(trainer.state.global_step)
    best = best_checkpoint(folder) if keep == "best" else None
    step = last if best is None else checkpoint_step(best)
    known = {record["step"]: record["accuracy"]["accuracy"] for record in read_schedule(folder)}
    if best is not None:
        facts = [f"step {one} {known[one]:.1%}" for one in sorted({0, step, last}) if one in known]
        console.print(f"Kept the weights of step {step} of {last} (dev: {', '.join(facts)})", soft_wrap=True)
        if step != last:
            trl_compat.load_weights(trainer, best)
    trained = [known[one] for one in known if one > 0 and (keep == "best" or one == last)]
    if trained and max(trained) < known.get(0, 0.0):
        remedy = "merging the weights from before it" if step == 0 else "set evaluation.keep: best"
        warning = f"{known[0]:.1%} of data.dev were right at step 0, {max(trained):.1%} after training"
        console.print(Text(f"warning: GRPO made the model worse: {warning}: {remedy}"), soft_wrap=True)
    return step
