"""Every private name of TRL that this project uses, in one place. Written for TRL 1.16."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.rollout.engine import Continuations
from text2sql_grpo.rollout.sampling import Sampling


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


def generate(trainer: GRPOTrainer, prompts: list[list[int]], *, max_new_tokens: int) -> Continuations:
    """One continuation per prompt by TRL's own generation (transformers, paged or vLLM)."""
    with _new_tokens(trainer, max_new_tokens):
        completion_ids, log_probs = trainer._generate_single_turn(prompts, None, {}, 1)
    if log_probs is not None:
        log_probs = [[math.nan if value is None else value for value in row] for row in log_probs]
    return Continuations([list(ids) for ids in completion_ids], log_probs)


def sampling_log_probs(trainer: GRPOTrainer, episodes: Sequence[Episode]) -> list[list[float]] | None:
    """What TRL is handed as `logprobs`; None where it has no use for them, or a wrong one.

    TRL needs them to correct what vLLM samples otherwise than it trains. Without vLLM it reads them for the
    off-policy mask alone, and compares them with log-probs of the whole vocabulary: right unless top-p,
    top-k or min-p took tokens out.
    """
    is_unfiltered = sampling(trainer) == Sampling(trainer.temperature)
    is_compared = trainer.off_policy_mask_threshold is not None and is_unfiltered
    is_known = all(len(episode.log_probs) == len(episode.completion_ids) for episode in episodes)
    if not is_known or not (trainer.use_vllm or is_compared):
        return None
    return [episode.log_probs or [0.0] for episode in episodes]  # TRL cannot take an empty completion


def slots_obstacle(trainer: GRPOTrainer) -> str | None:
    """What in a trainer's settings only TRL's own generation can do; None for nothing."""
    if trainer.use_vllm:
        return "vLLM generates"
    if trainer.use_transformers_continuous_batching:
        return "transformers' continuous batching generates"
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return "its weights are sharded"
    if trainer.repetition_penalty != 1.0 or trainer.args.generation_kwargs:
        return "repetition_penalty or generation_kwargs are set"
    return None


def sampling(trainer: GRPOTrainer) -> Sampling:
    """How the trainer draws tokens."""
    return Sampling(trainer.temperature, trainer.top_p, trainer.top_k, trainer.min_p)


@contextmanager
def unwrapped_model(trainer: GRPOTrainer) -> Iterator[PreTrainedModel]:
    """The policy as TRL generates with it: without gradient checkpointing, in the dtype of training.

    One autocast around all passes, so that weights are cast once.
    """
    with (
        unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        ) as model,
        trainer.accelerator.autocast(),
    ):
        yield model


class _WithoutMaskedSamples(logging.Filter):
    """TRL prints a paragraph for each sample without a reward; ours are masked on purpose and counted."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "All reward functions returned None" not in record.getMessage()


def silence_masked_samples() -> None:
    """Drops TRL's warning about samples without a reward; `episode/masked` counts them."""
    logger = logging.getLogger("trl.trainer.grpo_trainer")
    if not any(isinstance(present, _WithoutMaskedSamples) for present in logger.filters):
        logger.addFilter(_WithoutMaskedSamples())
