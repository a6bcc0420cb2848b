"""How the trainer's update forwards each distinct prompt of a micro-batch once."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from trl import GRPOTrainer

from text2sql_grpo.training import trl_compat
from text2sql_grpo.training.shared_prefix import pack_batch
from text2sql_grpo.training.shared_prefix_attention import attend_to_packed

logger = logging.getLogger(__name__)
LogProbs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class SharedPrefixUpdate:
    """Stands before TRL's log-probs and loss; lets them pass where a model or setting does not allow it.

    Args:
        trainer: Complete, its models prepared.
        is_wanted: Whether to do anything.

    Attributes:
        is_on: Whether prompts are shared.
    """

    def __init__(self, trainer: GRPOTrainer, *, is_wanted: bool) -> None:
        self._trainer = trainer
        self._is_scored: torch.Tensor | None = None
        obstacle = trl_compat.shared_prefix_obstacle(trainer) if is_wanted else None
        self.is_on = is_wanted and obstacle is None
        if obstacle is not None:
            logger.warning("The slower update, which forwards a prompt once a completion: %s", obstacle)
        if self.is_on:
            trl_compat.shrink_logit_tiles(trainer)
            for model in (trainer.model, trainer.ref_model):
                if model is not None:
                    attend_to_packed(trl_compat.causal_lm(trainer, model))

    def groups_together(self) -> AbstractContextManager[None]:
        """A generation batch is split so that groups stay together."""
        return trl_compat.groups_together() if self.is_on else nullcontext()

    @contextmanager
    def scoring(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The inputs of a loss; until it is made, `log_probs` leaves out tokens that it does not read."""
        if not self.is_on:
            yield inputs
            return
        self._is_scored = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        # A token without a log-prob could have a ratio beyond all numbers, which no mask takes out.
        known = ("old_per_token_logps", "ref_per_token_logps")
        try:
            yield inputs | {name: inputs[name] * self._is_scored for name in known if name in inputs}
        finally:
            self._is_scored = None

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
            return plain(model, input_ids, attention_mask, logits_to_keep, batch_size, **options)
        is_scored = attention_mask[:, -logits_to_keep:] if self._is_scored is None else self._is_scored
        parts = (
            tensor.split(batch_size or len(input_ids)) for tensor in (input_ids, attention_mask, is_scored)
        )
        chunks = [
            trl_compat.packed_log_probs(self._trainer, model, pack_batch(*rows))
            for rows in zip(*parts, strict=True)
        ]
        log_probs, entropies = zip(*chunks, strict=True)
        has_entropies = options.get("compute_entropy", False)
        return torch.cat(log_probs), torch.cat(entropies) if has_entropies else None, None
