"""The trainer's update, with each distinct prompt of a micro-batch forwarded once."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from trl import GRPOTrainer

from text2sql_grpo.training import trl_compat
from text2sql_grpo.training.shared_prefix import (
    by_length,
    pack_batch,
    rows_with_advantage,
    shuffled_groups,
    trimmed,
)
from text2sql_grpo.training.shared_prefix_attention import attend_to_packed

logger = logging.getLogger(__name__)
LogProbs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class LossTokens:
    """Tokens whose log-probs the loss reads.

    Attributes:
        is_scored: 1 for completion tokens that need a log-prob; shape (B, K).
        needs_gradient: True for rows whose log-probs need a gradient; bool, shape (B, 1).
    """

    is_scored: torch.Tensor
    needs_gradient: torch.Tensor

    @classmethod
    def sampled(cls, completion_mask: torch.Tensor, rows: Sequence[Sequence[int]] | None) -> "LossTokens":
        """Sampled tokens, by the flags of each row; None for whole completions."""
        sampled = torch.ones_like(completion_mask)
        for mask, flags in zip(sampled, rows or (), strict=rows is not None):
            mask[: len(flags)] = mask.new_tensor(flags)
        return cls(completion_mask * sampled, torch.ones_like(sampled[:, :1], dtype=torch.bool))


class SharedPrefixUpdate:
    """Update without repeated prompts, padding and zero-variance rows, as far as model and settings allow.

    Args:
        trainer: Complete, its models prepared.
        is_wanted: False for TRL's plain update.
        keeps_order: Keep the order of the generation batch, which decides the optimiser step of a group.
        keeps_halves: Keep each group in its half of the generation batch.

    Attributes:
        is_on: True if prompts are shared.
    """

    def __init__(
        self, trainer: GRPOTrainer, *, is_wanted: bool, keeps_order: bool = False, keeps_halves: bool = False
    ) -> None:
        self._trainer = trainer
        self._is_wanted = is_wanted
        self._keeps_order = keeps_order
        self._keeps_halves = keeps_halves
        obstacle = trl_compat.shared_prefix_obstacle(trainer) if is_wanted else None
        self.is_on = is_wanted and obstacle is None
        if obstacle is not None:
            logger.warning("shared_prefix is off, so the update is slower: %s", obstacle)
        if self.is_on:
            trl_compat.shrink_logit_tiles(trainer)
            for model in (trainer.model, trainer.ref_model):
                if model is not None:
                    attend_to_packed(trl_compat.causal_lm(trainer, model))

    def splitting(self) -> AbstractContextManager[None]:
        """Split a generation batch with groups together, or else by length where the loss allows it."""
        if self.is_on and not self._keeps_order:
            return trl_compat.rows_ordered(shuffled_groups)
        if not self.is_on and self._is_wanted and trl_compat.may_sort_rows(self._trainer):
            return trl_compat.rows_ordered(partial(by_length, parts=2 if self._keeps_halves else 1))
        if self._keeps_order:
            return trl_compat.rows_ordered(lambda batch: list(range(len(batch["prompt_ids"]))))
        return nullcontext()

    def narrowed(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], LossTokens | None]:
        """Return the inputs of a loss without padding, and the tokens that it reads; None for all."""
        if not self._is_wanted:
            return inputs, None
        if self.is_on:
            inputs = trimmed(inputs)
        elif trl_compat.may_trim_completions(self._trainer):
            # Padding before a prompt stays: old log-probs were made with it, and positions may count it.
            inputs = trimmed(inputs, prompts=False)
        is_scored = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        needs_gradient = torch.ones_like(is_scored[:, :1], dtype=torch.bool)
        if trl_compat.may_skip_zero_variance(self._trainer):
            needs_gradient = rows_with_advantage(inputs)
        # A token without a log-prob could have an infinite ratio, which survives any mask.
        known = ("old_per_token_logps", "ref_per_token_logps")
        masked = {name: inputs[name] * is_scored for name in known if name in inputs}
        return inputs | masked, LossTokens(is_scored, needs_gradient)

    def log_probs(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        tokens: LossTokens,
        *,
        batch_size: int | None = None,
        compute_entropy: bool = False,
    ) -> LogProbs:
        """Return what TRL's `_get_per_token_logps_and_entropies` does; 0 for tokens that are not scored."""
        size = batch_size or len(input_ids)
        columns = (input_ids, attention_mask, tokens.is_scored, tokens.needs_gradient)
        chunks = zip(*(column.split(size) for column in columns), strict=True)
        log_probs, entropies = zip(*(self._chunk(model, *rows) for rows in chunks), strict=True)
        return torch.cat(log_probs), torch.cat(entropies) if compute_entropy else None, None

    def _chunk(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        is_scored: torch.Tensor,
        needs_gradient: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs and entropies, with a gradient only where it is needed."""
        batch = pack_batch(input_ids, attention_mask, is_scored * needs_gradient)
        log_probs, entropies = trl_compat.packed_log_probs(self._trainer, model, batch)
        if (is_scored * ~needs_gradient).any():
            batch = pack_batch(input_ids, attention_mask, is_scored * ~needs_gradient)
            # Without the wrapper of distributed training, which would wait for the same pass on other ranks.
            model = self._trainer.accelerator.unwrap_model(model)
            with torch.no_grad():
                other_log_probs, other_entropies = trl_compat.packed_log_probs(self._trainer, model, batch)
            log_probs = torch.where(needs_gradient, log_probs, other_log_probs)
            if entropies is not None and other_entropies is not None:
                entropies = torch.where(needs_gradient, entropies, other_entropies)
        return log_probs, entropies
