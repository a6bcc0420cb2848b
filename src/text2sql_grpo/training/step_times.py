"""Time of a GRPO step by stage, as metrics."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOTrainer

from text2sql_grpo.rollout.stages import Stages
from text2sql_grpo.training import trl_compat

OWN_STAGES = ("wait", "update")  # of a step whose batch was played beside updates
STAGES = ("select", "prefill", "decode", "tools", "grade", "wait", "update")


class StepTimes(TrainerCallback):
    """Callback that logs `time/STAGE` in seconds, which add up to `time/step`.

    `select`, `prefill` of prompts and of replies, `decode`, `tools` (waits for replies while no row decodes),
    `grade`, and `update`, which is all the rest up to the optimiser's step. Checkpoints and evaluations
    between two steps are in none. With `rollout.staleness`, `wait` (for a batch that is still being played)
    and `update` add up to the step, and the others are those of its batch, which was played beside them.

    Attributes:
        stages: Stages of the current step.
        ahead: Seconds of each stage of a batch that was played beside updates.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self.stages = Stages(rest="update")
        self.ahead: dict[str, float] = {}

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to measure."""
        self.stages.restart()
        self.ahead = {}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the times of the step."""
        seconds = self.stages.seconds()
        for name in STAGES:
            trl_compat.log_metric(self._trainer, f"time/{name}", seconds.get(name, self.ahead.get(name, 0.0)))
        trl_compat.log_metric(self._trainer, "time/step", sum(seconds.values()))
