"""The trainer's update, with each distinct token prefix of a micro-batch forwarded once."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from trl import GRPOTrainer

from text2sql_grpo.reliability.ranks import any_reason
from text2sql_grpo.rollout.check import disagreement
from text2sql_grpo.training import trl_compat
from text2sql_grpo.training.token_tree.attention import attend_to_trees
from text2sql_grpo.training.token_tree.batch import (
    by_length,
    by_prompt,
    rows_with_advantage,
    scored_tree,
    trimmed,
)

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


class TokenTreeUpdate:
    """Update without repeated prefixes, padding and zero-variance rows, as far as model and settings allow.

    Args:
        trainer: Complete, its models prepared.
        is_wanted: False for TRL's plain update.
        keeps_order: Keep the order of the generation batch, which decides the optimiser step of a group.
        keeps_halves: Keep each group in its half of an optimiser step.

    Attributes:
        is_on: True if prefixes are shared. The first batch may show that they cannot be.
        way: Name of the way in which updates are computed, with the reason if it is TRL's.
    """

    def __init__(
        self, trainer: GRPOTrainer, *, is_wanted: bool, keeps_order: bool = False, keeps_halves: bool = False
    ) -> None:
        self._trainer = trainer
        self._is_wanted = is_wanted
        self._keeps_order = keeps_order
        self._keeps_halves = keeps_halves
        self._is_checked = False
        self.is_on = is_wanted
        self.way = "token trees" if is_wanted else "TRL's: grpo.shared_prefix is false"
        if is_wanted:
            self._switch_off(trl_compat.tree_obstacle(trainer))
        if self.is_on:
            trl_compat.shrink_logit_tiles(trainer)
            for model in (trainer.model, trainer.ref_model):
                if model is not None:
                    attend_to_trees(trl_compat.causal_lm(trainer, model))

    def _switch_off(self, reason: str | None) -> None:
        """Fall back to TRL's update if there is a reason."""
        if reason is not None:
            self.is_on, self.way = False, f"TRL's: {reason}"
            logger.warning("shared_prefix is off, so the update is slower: %s", reason)

    def check(self, model: torch.nn.Module, input_ids: torch.Tensor, mask: torch.Tensor, width: int) -> bool:
        """Return `is_on`; at the first call, compare both ways on some rows.

        Args:
            input_ids: Prompts and completions, shape (B, P + K).
            mask: 0 for padding; same shape.
            width: K.
        """
        if self._is_checked or not self.is_on:
            return self.is_on
        self._is_checked = True
        rows = sorted({0, min(1, len(mask) - 1), len(mask) // 2, len(mask) - 1})
        # A column of padding shows whether positions count it. It replaces one: a context may be full.
        ids, mask = (functional.pad(each[rows, :-1], (1, 0)) for each in (input_ids, mask))
        width -= 1
        is_present, reason = mask[:, -width:] if width else mask[:, :0], None
        if is_present.any():
            tree = partial(trl_compat.tree_log_probs, self._trainer, model)
            reason = disagreement(
                model,
                lambda: trl_compat.plain_log_probs(self._trainer, model, ids, mask, width) * is_present,
                lambda: tree(scored_tree(ids, mask, is_present))[0],
                is_float32=trl_compat.computes_in_float32(self._trainer),
            )
        self._switch_off(any_reason(reason))
        if self.is_on:
            logger.info("shared_prefix is on: both ways of the update agree on %s rows", len(rows))
        return self.is_on

    def splitting(self) -> AbstractContextManager[None]:
        """Split a generation batch with like prompts together, or else by length where the loss allows it."""
        args, halves = self._trainer.args, 2 if self._keeps_halves else 1
        if self.is_on:
            steps = max(1, args.steps_per_generation // args.gradient_accumulation_steps)
            order = partial(by_prompt, parts=steps * halves, is_shuffled=not self._keeps_order)
            return trl_compat.rows_ordered(order)
        if self._is_wanted and trl_compat.may_sort_rows(self._trainer):
            return trl_compat.rows_ordered(partial(by_length, parts=halves))
        if self._keeps_order:
            return trl_compat.rows_ordered(lambda batch: list(range(len(batch["prompt_ids"]))))
        return nullcontext()

    def narrowed(
        self, model: torch.nn.Module, inputs: dict[str, Any]
    ) -> tuple[dict[str, Any], LossTokens | None]:
        """Return the inputs of a loss without padding, and the tokens that it reads; None for all."""
        if not self._is_wanted:
            return inputs, None
        ids, mask = (
            torch.cat([inputs[f"prompt_{kind}"], inputs[f"completion_{kind}"]], 1) for kind in ("ids", "mask")
        )
        if self.check(model, ids, mask, inputs["completion_mask"].shape[1]):
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
        compute_aux_loss: bool = False,
    ) -> LogProbs:
        """Return what TRL's `_get_per_token_logps_and_entropies` does; 0 for tokens that are not scored."""
        size = batch_size or len(input_ids)
        columns = (input_ids, attention_mask, tokens.is_scored, tokens.needs_gradient)
        chunks = zip(*(column.split(size) for column in columns), strict=True)
        parts = [self._chunk(model, *rows, compute_aux_loss=compute_aux_loss) for rows in chunks]
        log_probs, entropies, aux_losses = zip(*parts, strict=True)
        return (
            torch.cat(log_probs),
            torch.cat(entropies) if compute_entropy else None,
            torch.stack(aux_losses).mean() if compute_aux_loss else None,
        )

    def _chunk(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        is_scored: torch.Tensor,
        needs_gradient: torch.Tensor,
        *,
        compute_aux_loss: bool,
    ) -> LogProbs:
        """Log-probs, entropies and the router's loss, with a gradient only where it is needed."""
        batch = scored_tree(input_ids, attention_mask, is_scored * needs_gradient, is_whole=compute_aux_loss)
        log_probs, entropies, aux_loss = trl_compat.tree_log_probs(
            self._trainer, model, batch, compute_aux_loss=compute_aux_loss
        )
        if (is_scored * ~needs_gradient).any():
            batch = scored_tree(input_ids, attention_mask, is_scored * ~needs_gradient)
            # Without the wrapper of distributed training, which would wait for the same pass on other ranks.
            model = self._trainer.accelerator.unwrap_model(model)
            with torch.no_grad():
                other_log_probs, other_entropies, _ = trl_compat.tree_log_probs(self._trainer, model, batch)
            log_probs = torch.where(needs_gradient, log_probs, other_log_probs)
            if entropies is not None and other_entropies is not None:
                entropies = torch.where(needs_gradient, entropies, other_entropies)
        return log_probs, entropies, aux_loss
