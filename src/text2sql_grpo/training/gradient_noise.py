"""Gradient noise: cosine between the gradients of the two halves of a step's episodes."""

import logging

import torch
from trl import GRPOTrainer

from text2sql_grpo.training import trl_compat

METRIC = "grad/half_cosine"
TOO_NOISY = 0.1
_WINDOW = 5
_EVERY = 5
_CHEAP_WEIGHTS = 256_000_000
_EXACT_WEIGHTS = 32_000_000

logger = logging.getLogger(__name__)


class GradientNoise:
    """Measurement of the cosine between the gradients of a step's first and second half of micro-batches.

    The accumulated gradient is copied half-way; the rest of the final one is the second half's. It costs the
    memory of that copy, in bfloat16 for more than 32 M trained weights, and one sum over ranks. Halves of 0
    cosine share no signal: the step is noise, and more questions a step are needed.

    Args:
        trainer: Complete, its model prepared.
        every: Optimiser steps between measurements; 0 for none, None for 5 if at most 256 M weights are
            trained.

    Attributes:
        every: Optimiser steps between measurements; 0 for none.
    """

    def __init__(self, trainer: GRPOTrainer, *, every: int | None) -> None:
        self._trainer = trainer
        weights = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        reason = trl_compat.half_gradient_obstacle(trainer)
        if reason is None and every is None and weights > _CHEAP_WEIGHTS:
            reason = (
                f"a copy of the gradient of {weights / 1e6:.0f} M weights; gradient_noise_every: 5 makes it"
            )
        self.every = 0 if reason else _EVERY if every is None else every
        if reason and every != 0:
            logger.log(logging.WARNING if every else logging.DEBUG, f"{METRIC} is not measured: {reason}")
        self._dtype = torch.bfloat16 if weights > _EXACT_WEIGHTS else None
        self._done = 0
        self._half: list[torch.Tensor | None] | None = None
        self._has_warned = False

    def add_micro_batch(self) -> None:
        """Count a micro-batch whose gradient was just added; measure after the last one of a step.

        Call before gradients are clipped.
        """
        trainer = self._trainer
        if not self.every or trainer.state.global_step % self.every:
            return
        self._done += 1
        if self._done == trainer.current_gradient_accumulation_steps // 2:
            self._half = [
                None if p.grad is None else p.grad.detach().to(self._dtype or p.grad.dtype, copy=True)
                for p in self._parameters()
            ]
        if not trainer.accelerator.sync_gradients:
            return
        half, self._half, self._done = self._half, None, 0
        cosine = None if half is None else self._cosine(half)
        if cosine is not None:
            trl_compat.log_metric(trainer, METRIC, cosine)
            self._warn(cosine)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self._trainer.model.parameters() if p.requires_grad]

    def _cosine(self, half: list[torch.Tensor | None]) -> float | None:
        """Cosine of both halves; None if one has no gradient (zero-variance groups) or no finite one."""
        dots = torch.zeros(3, dtype=torch.float64)
        for parameter, first in zip(self._parameters(), half, strict=True):
            if parameter.grad is None:
                continue
            whole = parameter.grad.detach().float()
            first = torch.zeros_like(whole) if first is None else first.float()
            first = self._trainer.accelerator.reduce(first, reduction="mean")  # ranks add theirs at the end
            second = whole - first
            pairs = ((first, second), (first, first), (second, second))
            dots += torch.stack([(a * b).sum() for a, b in pairs]).double().cpu()
        between, *squares = dots.tolist()
        product = (squares[0] * squares[1]) ** 0.5
        if not 0 < product < float("inf"):
            return None
        return float(between / product)

    def _warn(self, cosine: float) -> None:
        trainer = self._trainer
        earlier = [row[METRIC] for row in trainer.state.log_history if row.get(METRIC) is not None]
        last = [*earlier, cosine][-_WINDOW:]
        mean = sum(last) / len(last)
        if self._has_warned or len(last) < _WINDOW or mean >= TOO_NOISY:
            return
        self._has_warned = True
        logger.warning(
            f"the gradient is mostly noise: the two halves of a step agree by a cosine of {mean:.2f} (mean "
            f"of {_WINDOW} measurements, below {TOO_NOISY}); take more questions a step (raise grpo."
            "gradient_accumulation_steps)"
        )
