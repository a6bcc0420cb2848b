"""Recovery from bad steps: a gradient that is not finite, a micro-batch that runs out of memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from transformers import TrainerCallback, TrainerState
from trl import GRPOTrainer

from text2sql_grpo.errors import RunError
from text2sql_grpo.reliability.ranks import any_rank
from text2sql_grpo.training import trl_compat

PATIENCE = 10


class BadSteps(TrainerCallback):
    """Callback that skips steps without a finite gradient, and splits a micro-batch in two on out-of-memory.

    The metrics `step/skipped` and `step/halved` count both. A skipped step leaves weights and optimizer as
    they are; `PATIENCE` of them in a row end the run.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self._skipped_in_a_row = 0
        self._out_of_memory: str | None = None  # message of the last attempt at a whole micro-batch
        self._is_first = self._is_mixed = False

    @contextmanager
    def attempt(self, *, is_last: bool = False) -> Iterator[None]:
        """Catch out-of-memory of a micro-batch, so that `halves` yields its halves.

        Args:
            is_last: True for a half.

        Raises:
            RunError: A half does not fit either.
        """
        if not is_last:
            self._out_of_memory = None
            self._is_first = all(parameter.grad is None for parameter in self._trainer.model.parameters())
        try:
            yield
        except torch.OutOfMemoryError as error:
            if is_last:
                raise _too_large(f"{error} (half of it does not fit either)") from error
            self._out_of_memory = str(error)  # the error itself would hold the tensors of the attempt

    def halves(
        self, inputs: dict[str, Any] | None, *, is_forwarded: bool
    ) -> Iterator[tuple[dict[str, Any], float]]:
        """Halves of a micro-batch that ran out of memory, with their weights in its loss; none otherwise.

        Args:
            inputs: Inputs of the loss; None if memory ran out before they were prepared.
            is_forwarded: True if the loss was computed, so that part of its gradient may have been added.

        Raises:
            RunError: The loss is not the sum of its halves.
        """
        if self._out_of_memory is None:
            return
        if is_forwarded and self._is_first:
            self._trainer.model.zero_grad()
        elif is_forwarded:  # part of this gradient was added to those of earlier micro-batches
            self._is_mixed = True
        halves = self._cut(inputs, self._out_of_memory)
        clear_device_cache(garbage_collection=True)
        first, second = zip(halves, trl_compat.half_weights(self._trainer, halves), strict=True)
        yield first
        trl_compat.count_micro_batch_once(self._trainer)
        yield second

    def _cut(self, inputs: dict[str, Any] | None, message: str) -> list[dict[str, Any]]:
        if inputs is None:
            raise RunError(
                f"the episodes of a step do not fit into memory: {message}: "
                "lower rollout.max_slots or environment.max_episode_tokens"
            )
        size = len(inputs["completion_ids"])
        obstacle = "it is one episode" if size < 2 else trl_compat.halving_obstacle(self._trainer)
        if obstacle is not None:
            raise _too_large(f"{message} (it cannot be halved: {obstacle})")
        return [trl_compat.rows_of(inputs, rows) for rows in (range(size // 2), range(size // 2, size))]

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Remove a bad gradient; optimizers skip weights without one."""
        parameters = [p for p in kwargs["model"].parameters() if p.grad is not None]
        is_bad = self._is_mixed or not _is_finite([parameter.grad for parameter in parameters])
        is_bad = any_rank(is_bad)  # weights must not come to differ between ranks
        self._is_mixed = False
        trl_compat.log_metric(self._trainer, "step/skipped", float(is_bad))
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
    if not gradients:
        return True
    norm = torch.nn.utils.get_total_norm(gradients)
    if hasattr(norm, "full_tensor"):  # a DTensor of sharded weights
        norm = norm.full_tensor()
    return bool(torch.isfinite(norm))


def _too_large(message: str) -> RunError:
    return RunError(
        f"a micro-batch does not fit into memory: {message}: lower "
        "grpo.per_device_train_batch_size and raise grpo.gradient_accumulation_steps by as much"
    )
