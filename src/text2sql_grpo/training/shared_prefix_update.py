"""How the trainer's update forwards each distinct prompt of a micro-batch once."""

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
    shuffled_groups,
    teaching_rows,
    trimmed,
)
from text2sql_grpo.training.shared_prefix_attention import attend_to_packed

logger = logging.getLogger(__name__)
LogProbs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class LossTokens:
    """Which log-probs are read.

    Attributes:
        is_scored: Completion tokens that need one, shape (B, K).
        teaches: Rows whose log-probs need a gradient, bool of shape (B, 1).
    """

    is_scored: torch.Tensor
    teaches: torch.Tensor

    @classmethod
    def sampled(cls, completion_mask: torch.Tensor, rows: Sequence[Sequence[int]] | None) -> "LossTokens":
        """Those that the policy wrote, by the flags of each row; None for whole completions."""
        sampled = torch.ones_like(completion_mask)
        for mask, flags in zip(sampled, rows or (), strict=rows is not None):
            mask[: len(flags)] = mask.new_tensor(flags)
        return cls(completion_mask * sampled, torch.ones_like(sampled[:, :1], dtype=torch.bool))


class SharedPrefixUpdate:
    """What the update leaves out, as far as model and settings allow: repeated prompts, padding, flat rows.

    Args:
        trainer: Complete, its models prepared.
        is_wanted: Whether to do anything.
        keeps_order: Whether the order of the generation batch decides which optimiser step a group is in.
        keeps_halves: Whether no group may leave its half of the generation batch.

    Attributes:
        is_on: Whether prompts are shared.
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
            logger.warning("The slower update, which forwards a prompt once a completion: %s", obstacle)
        if self.is_on:
            trl_compat.shrink_logit_tiles(trainer)
            for model in (trainer.model, trainer.ref_model):
                if model is not None:
                    attend_to_packed(trl_compat.causal_lm(trainer, model))

    def splitting(self) -> AbstractContextManager[None]:
        """A generation batch is split so that groups stay together, or else, where it may, by length."""
        if self.is_on and not self._keeps_order:
            return trl_compat.rows_ordered(shuffled_groups)
        if not self.is_on and self._is_wanted and trl_compat.may_sort_rows(self._trainer):
            return trl_compat.rows_ordered(partial(by_length, parts=2 if self._keeps_halves else 1))
        if self._keeps_order:
            return trl_compat.rows_ordered(lambda batch: list(range(len(batch["prompt_ids"]))))
        return nullcontext()

    def narrowed(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], LossTokens | None]:
        """Inputs of a loss without what it does not read, and the tokens that it reads; None for any."""
        if not self._is_wanted:
            return inputs, None
        if self.is_on:
            inputs = trimmed(inputs)
        elif trl_compat.may_trim_completions(self._trainer):
            # Padding before a prompt stays: old log-probs were made with it, and positions may count it.
            inputs = trimmed(inputs, prompts=False)
        is_scored = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        skips = trl_compat.may_skip_flat_rows(self._trainer)
        teaches = teaching_rows(inputs) if skips else torch.ones_like(is_scored[:, :1], dtype=torch.bool)
        # A token without a log-prob could have a ratio beyond all numbers, which no mask takes out.
        known = ("old_per_token_logps", "ref_per_token_logps")
        masked = {name: inputs[name] * is_scored for name in known if name in inputs}
        return inputs | masked, LossTokens(is_scored, teaches)

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
        """As TRL's `_get_per_token_logps_and_entropies`; 0 for tokens that are not scored."""
        size = batch_size or len(input_ids)
        columns = (input_ids, attention_mask, tokens.is_scored, tokens.teaches)
        chunks = zip(*(column.split(size) for column in columns), strict=True)
        log_probs, entropies = zip(*(self._chunk(model, *rows) for rows in chunks), strict=True)
        return torch.cat(log_probs), torch.cat(entropies) if compute_entropy else None, None

    def _chunk(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        is_scored: torch.Tensor,
        teaches: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs and entropies; those of rows that do not teach without a gradient."""
        batch = pack_batch(input_ids, attention_mask, is_scored * teaches)
        log_probs, entropies = trl_compat.packed_log_probs(self._trainer, model, batch)
        if (is_scored * ~teaches).any():
            batch = pack_batch(input_ids, attention_mask, is_scored * ~teaches)
            # Without the wrapper of distributed training, which would wait for the same pass elsewhere.
            model = self._trainer.accelerator.unwrap_model(model)
            with torch.no_grad():
                watched, their_entropies = trl_compat.packed_log_probs(self._trainer, model, batch)
            log_probs = torch.where(teaches, log_probs, watched)
            if entropies is not None and their_entropies is not None:
                entropies = torch.where(teaches, entropies, their_entropies)
        return log_probs, entropies
