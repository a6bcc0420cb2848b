"""Every private name of TRL that this project uses, in one place. Written for TRL 1.16."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from trl import GRPOTrainer


@contextmanager
def _new_tokens(trainer: GRPOTrainer, max_new_tokens: int) -> Iterator[None]:
    """TRL gives every turn the budget of a whole completion; this lends it the turn's own."""
    if trainer.use_vllm:
        holder, name = trainer.vllm_generation, "max_completion_length"
    else:
        holder, name = trainer.generation_config, "max_new_tokens"
    before = getattr(holder, name)
    setattr(holder, name, max_new_tokens)
    try:
        yield
    finally:
        setattr(holder, name, before)


def generate(trainer: GRPOTrainer, prompts: list[list[int]], *, max_new_tokens: int) -> list[list[int]]:
    """One continuation per prompt by TRL's own generation (transformers, paged or vLLM)."""
    with _new_tokens(trainer, max_new_tokens):
        completion_ids, _ = trainer._generate_single_turn(prompts, None, {}, 1)
    return [list(ids) for ids in completion_ids]


class _WithoutMaskedSamples(logging.Filter):
    """TRL prints a paragraph for each sample without a reward; ours are masked on purpose and counted."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "All reward functions returned None" not in record.getMessage()


def silence_masked_samples() -> None:
    """Drops TRL's warning about samples without a reward; `episode/masked` counts them."""
    logger = logging.getLogger("trl.trainer.grpo_trainer")
    if not any(isinstance(present, _WithoutMaskedSamples) for present in logger.filters):
        logger.addFilter(_WithoutMaskedSamples())
