"""Steps that cannot be taken as they are: a gradient that is not finite, a micro-batch beyond the memory."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOTrainer

from text2sql_grpo.errors import RunError
from text2sql_grpo.training import trl_compat
from text2sql_grpo.training.processes import any_of

PATIENCE = 10


class BadSteps(TrainerCallback):
    """Skips a step whose gradient is not finite, and learns from a micro-batch in halves if it must.

    Both are counted in the metrics, as `step/skipped` and `step/halved`. A step is skipped by leaving weights
    and optimizer as they are; `PATIENCE` of them in a row end the run.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self._skipped_in_a_row = 0
        self._is_learning = False
        self._inputs: dict[str, Any] | None = None  # of the micro-batch at hand, while learning
        self._weight = 1.0
        self._is_forwarded = False
        self._is_mixed = False

    def inputs(self, prepare: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The micro-batch, or the half of it that is to be learned from."""
        if not self._is_learning:
            return prepare()
        if self._inputs is None:
            self._inputs = prepare()
        return self._inputs

    def loss(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The part that a micro-batch or half has in the loss."""
        loss = compute()
        self._is_forwarded = True
        return loss if self._weight == 1.0 else loss * self._weight

    def learn(self, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The loss of a micro-batch, its gradient added; in two halves if it does not fit into memory.

        Args:
            step: Prepares inputs, computes the loss and its gradient, by the methods above.

        Raises:
            RunError: Not even a half fits, or the loss is not the sum of its halves.
        """
        trainer = self._trainer
        parameters = list(trainer.model.parameters())
        is_first = all(parameter.grad is None for parameter in parameters)
        before = trl_compat.loop_step(trainer)
        self._is_learning, self._is_forwarded = True, False
        try:
            loss = step()
            trl_compat.log_metric(trainer, "step/halved", 0.0)
            return loss
        except torch.OutOfMemoryError as error:
            message = str(error)
        finally:
            inputs, self._inputs, self._is_learning = self._inputs, None, False
        # Out of the handler: what it held of the failed attempt is free by now.
        if self._is_forwarded and is_first:
            for parameter in parameters:
                parameter.grad = None
        elif self._is_forwarded:  # part of this gradient stands among those of earlier micro-batches
            self._is_mixed = True
        halves = self._halves(inputs, message)
        clear_device_cache(garbage_collection=True)
        losses = []
        try:
            for half, weight in zip(halves, trl_compat.half_weights(trainer, halves), strict=True):
                trl_compat.set_loop_step(trainer, before)
                self._is_learning, self._inputs, self._weight = True, half, weight
                losses.append(step())
        except torch.OutOfMemoryError as error:
            raise _too_large(f"{error} (half of it does not fit either)") from error
        finally:
            self._is_learning, self._inputs, self._weight = False, None, 1.0
        trl_compat.log_metric(trainer, "step/halved", 1.0)
        return torch.stack(losses).sum()

    def _halves(self, inputs: dict[str, Any] | None, message: str) -> list[dict[str, Any]]:
        if inputs is None:
            raise RunError(
                f"expected the episodes of a step to fit into memory, got: {message}: "
                "lower rollout.max_slots or environment.max_episode_tokens"
            )
        size = len(inputs["completion_ids"])
        obstacle = "it is one episode" if size < 2 else trl_compat.halving_obstacle(self._trainer)
        if obstacle is not None:
            raise _too_large(f"{message} (it cannot be halved: {obstacle})")
        return [_rows(inputs, slice(0, size // 2)), _rows(inputs, slice(size // 2, size))]

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes the gradient away if it is not to be used; an optimizer leaves weights without one alone."""
        parameters = [p for p in kwargs["model"].parameters() if p.grad is not None]
        is_bad = self._is_mixed or not _is_finite([parameter.grad for parameter in parameters])
        is_bad = any_of(is_bad)  # else weights would come to differ between processes
        self._is_mixed = False
        trl_compat.log_metric(self._trainer, "step/skipped", float(is_bad))
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if is_bad else 0
        if self._skipped_in_a_row >= PATIENCE:
            raise RunError(
                f"expected a finite gradient, got none in {PATIENCE} steps in a row, the last of them step "
                f"{state.global_step + 1}: lower grpo.learning_rate, or train in bfloat16 or float32"
            )
        if is_bad and trl_compat.scaler(self._trainer) is None:  # a scaler of float16 skips by itself
            for parameter in parameters:
                parameter.grad = None


def _is_finite(gradients: list[torch.Tensor]) -> bool:
    if not gradients:
        return True
    norm = torch.nn.utils.get_total_norm(gradients)
    if hasattr(norm, "full_tensor"):  # of all processes that hold a part
        norm = norm.full_tensor()
    return bool(torch.isfinite(norm))


def _rows(inputs: dict[str, Any], rows: slice) -> dict[str, Any]:
    def has_rows(value: Any) -> bool:
        return isinstance(value, list) or (isinstance(value, torch.Tensor) and value.ndim > 0)

    return {name: value[rows] if has_rows(value) else value for name, value in inputs.items()}


def _too_large(message: str) -> RunError:
    return RunError(
        f"expected a micro-batch that fits into memory, got: {message}: lower "
        "grpo.per_device_train_batch_size and raise grpo.gradient_accumulation_steps by as much"
    )
