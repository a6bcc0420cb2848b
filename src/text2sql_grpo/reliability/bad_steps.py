"""Steps whose gradient is not finite."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerState

from text2sql_grpo.errors import RunError
from text2sql_grpo.reliability.ranks import any_rank

PATIENCE = 10


class BadSteps(TrainerCallback):
    """Callback that skips steps without a finite gradient, and logs their share as `step/skipped`.

    A skipped step leaves weights and optimizer as they are; `PATIENCE` of them in a row end the run.
    """

    def __init__(self, trainer: Trainer, log: Callable[[dict[str, float]], None]) -> None:
        self._trainer, self._log = trainer, log
        self._skipped_in_a_row = 0

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Remove a bad gradient; optimizers skip weights without one."""
        parameters = [p for p in kwargs["model"].parameters() if p.grad is not None]
        is_bad = any_rank(not _is_finite([parameter.grad for parameter in parameters]))
        self._log({"step/skipped": float(is_bad)})
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if is_bad else 0
        if self._skipped_in_a_row >= PATIENCE:
            raise RunError(
                f"the gradient was not finite in {PATIENCE} steps in a row, the last of them step "
                f"{state.global_step + 1}: lower grpo.learning_rate, or train in bfloat16 or float32"
            )
        has_scaler = getattr(self._trainer.accelerator, "scaler", None) is not None
        if is_bad and not has_scaler:  # the scaler of float16 skips by itself
            for parameter in parameters:
                parameter.grad = None


def _is_finite(gradients: list[torch.Tensor]) -> bool:
    norm = torch.nn.utils.get_total_norm(gradients)
    if hasattr(norm, "full_tensor"):  # a DTensor of sharded weights
        norm = norm.full_tensor()
    return bool(torch.isfinite(norm))
