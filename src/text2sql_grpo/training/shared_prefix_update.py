"""How the trainer's update forwards each distinct prompt of a micro-batch once."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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


class SharedPrefixUpdate:
    """Stands before TRL's log-probs and loss; lets them pass where a model or setting does not allow it.

    Args:
        trainer: Complete, its models prepared.
        is_wanted: Whether to do anything.
        keeps_order: Whether the order of the generation batch decides which optimiser step a group is in.
        keeps_halves: Whether no group may leave its half of the generation batch.

    Attributes:
        is_on: Whether prompts are shared.
        sampled: Of each row of the generation batch in the making, 1 for tokens that the policy wrote.
    """

    def __init__(
        self, trainer: GRPOTrainer, *, is_wanted: bool, keeps_order: bool = False, keeps_halves: bool = False
    ) -> None:
        self._trainer = trainer
        self._is_wanted = is_wanted
        self._keeps_order = keeps_order
        self._keeps_halves = keeps_halves
        self._is_scored: torch.Tensor | None = None
        self._teaches: torch.Tensor | None = None
        self.sampled: list[list[int]] | None = None
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

    @contextmanager
    def scoring(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The inputs of a loss; until it is made, `log_probs` leaves out what it does not read."""
        if not self._is_wanted:
            yield inputs
            return
        if self.is_on:
            inputs = trimmed(inputs)
        elif trl_compat.may_trim_completions(self._trainer):
            # Padding before a prompt stays: old log-probs were made with it, and positions may count it.
            inputs = trimmed(inputs, prompts=False)
        self._is_scored = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        if trl_compat.may_skip_flat_rows(self._trainer):
            self._teaches = teaching_rows(inputs)
        # A token without a log-prob could have a ratio beyond all numbers, which no mask takes out.
        known = ("old_per_token_logps", "ref_per_token_logps")
        try:
            yield inputs | {name: inputs[name] * self._is_scored for name in known if name in inputs}
        finally:
            self._is_scored = self._teaches = None

    def log_probs(
        self,
        plain: Callable[..., LogProbs],
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **options: Any,
    ) -> LogProbs:
        """Log-probs and entropies as TRL's method `plain` gives them; 0 for tokens that are not scored."""
        if not self.is_on:
            found = plain(model, input_ids, attention_mask, logits_to_keep, batch_size, **options)
            if self._is_scored is None:
                return found
            # 0 where those are 0 that they are compared with: `scoring`.
            return found[0].where(self._is_scored.bool(), 0.0), *found[1:]
        is_scored = self._is_scored
        if is_scored is None:
            is_scored = attention_mask[:, -logits_to_keep:]
            if self.sampled is not None:
                sampled = torch.zeros_like(is_scored)
                for row, flags in zip(sampled, self.sampled, strict=True):
                    row[: len(flags)] = row.new_tensor(flags)
                is_scored = is_scored * sampled
        teaches = torch.ones_like(is_scored[:, :1]).bool() if self._teaches is None else self._teaches
        size = batch_size or len(input_ids)
        chunks = [
            self._chunk(model, *rows)
            for rows in zip(
                *(each.split(size) for each in (input_ids, attention_mask, is_scored, teaches)), strict=True
            )
        ]
        log_probs, entropies = zip(*chunks, strict=True)
        has_entropies = options.get("compute_entropy", False)
        return torch.cat(log_probs), torch.cat(entropies) if has_entropies else None, None

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
