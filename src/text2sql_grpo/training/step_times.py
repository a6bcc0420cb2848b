"""Time of a GRPO step by stage, as metrics."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOTrainer

from text2sql_grpo.rollout.stages import Stages
from text2sql_grpo.training import trl_compat

STAGES = ("select", "prefill", "decode", "tools", "grade", "update")


class StepTimes(TrainerCallback):
    """Callback that logs `time/STAGE` in seconds, which add up to `time/step`.

    `select`, `prefill` of prompts and of replies, `decode`, `tools` (waits for replies while no row decodes),
    `grade`, and `update`, which is all the rest up to the optimiser's step. Checkpoints and evaluations
    between two steps are in none.

    Attributes:
        stages: Stages of the current step.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self.stages = Stages(rest="update")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to measure."""
        self.stages.restart()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the times of the step."""
        seconds = self.stages.seconds()
        for name in STAGES:
            trl_compat.log_metric(self._trainer, f"time/{name}", seconds.get(name, 0.0))
        trl_compat.log_metric(self._trainer, "time/step", sum(seconds.values()))
