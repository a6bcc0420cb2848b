"""Every private name of TRL that this project uses, in one place. Written for TRL 1.16."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, Trainer
from trl import GRPOTrainer
from trl.kernels import chunked_logprob
from trl.models import unwrap_model_for_generation
from trl.trainer import grpo_trainer

from text2sql_grpo.environment.episode import Rollout
from text2sql_grpo.models.cpu import plain_adapter_inputs
from text2sql_grpo.rollout.engine import Continuations
from text2sql_grpo.rollout.policy import ROPE_TYPES, obstacle
from text2sql_grpo.rollout.sampling import Sampling
from text2sql_grpo.training.processes import are_several, gathered, whole_weights
from text2sql_grpo.training.shared_prefix import PackedBatch, keep_hidden_states


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


@contextmanager
def generating(trainer: GRPOTrainer) -> Iterator[None]:
    """Rollouts by `generate`; no process waits for ever where another one's take more turns."""
    with nullcontext() if trainer.use_vllm else whole_weights(trainer.model_wrapped):
        yield
        while _generate(trainer, [], 1) is not None:
            pass


def generate(trainer: GRPOTrainer, prompts: list[list[int]], *, max_new_tokens: int) -> Continuations:
    """One continuation per prompt by TRL's own generation (transformers, paged or vLLM)."""
    return _generate(trainer, prompts, max_new_tokens) or Continuations([])


def _generate(trainer: GRPOTrainer, prompts: list[list[int]], max_new_tokens: int) -> Continuations | None:
    """None where no process has a prompt left.

    In a call of all processes, TRL wants as many prompts of each: those that have fewer ask for nothing.
    """
    count = most = len(prompts)
    if _generates_together(trainer):
        wanted = [facts for (facts,) in gathered([(count, max_new_tokens)])]
        most, max_new_tokens = (max(column) for column in zip(*wanted, strict=True))
    if most == 0:
        return None
    prompts = prompts + [[trainer.eos_token_ids[0]]] * (most - count)
    with _new_tokens(trainer, max_new_tokens):
        completion_ids, log_probs = trainer._generate_single_turn(prompts, None, {}, 1)
    if log_probs is not None:
        log_probs = [[math.nan if value is None else value for value in row] for row in log_probs[:count]]
    return Continuations([list(ids) for ids in completion_ids[:count]], log_probs)


def _generates_together(trainer: GRPOTrainer) -> bool:
    """Whether TRL generates in one call of all processes.

    vLLM does so as a server, and where several processes share one; transformers where weights are divided.
    """
    if not trainer.use_vllm:
        return are_several() and (trainer._dist.is_zero3 or trainer.is_fsdp_enabled)
    return are_several() and (trainer.vllm_mode == "server" or trainer.args.vllm_tensor_parallel_size > 1)


def sampling_log_probs(trainer: GRPOTrainer, episodes: Sequence[Rollout]) -> list[list[float]] | None:
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
        whole_weights(model),
        autocast(trainer, model),
    ):
        yield model


@contextmanager
def autocast(trainer: Trainer, model: torch.nn.Module) -> Iterator[None]:
    """Autocast of training."""
    with trainer.accelerator.autocast(), plain_adapter_inputs(model):
        yield


def shared_prefix_obstacle(trainer: Trainer) -> str | None:
    """Why a trainer cannot forward each prompt once for all its completions; None if it can."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.args.use_liger_kernel or trainer.args.torch_compile:
        return "use_liger_kernel or torch_compile is set"
    config = model.config.get_text_config()
    if getattr(config, "attention_dropout", 0.0):
        return "its attention drops out"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"its attention is {config._attn_implementation}, not sdpa"
    return obstacle(model)


def causal_lm(trainer: Trainer, model: torch.nn.Module) -> PreTrainedModel:
    """The model below what accelerate and PEFT wrap around it."""
    model = trainer.accelerator.unwrap_model(model)
    return model.get_base_model() if isinstance(model, PeftModel) else model


def packed_log_probs(
    trainer: GRPOTrainer, model: torch.nn.Module, batch: PackedBatch
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of scored tokens by TRL's fused head, and entropies unless of a reference; shape (B, K)."""
    backbone = causal_lm(trainer, model).base_model
    with autocast(trainer, model), keep_hidden_states(backbone, batch.sources):
        output = model(**batch.tokens.inputs, shift_labels=batch.targets[None], fused_lm_head=True)
    entropy = None if output.entropy is None else batch.unpack(output.entropy[0])
    return batch.unpack(output.log_probs[0]), entropy


def shrink_logit_tiles(trainer: GRPOTrainer) -> None:
    """On a CPU, TRL's fused head takes fewer tokens at once, so that their logits fit into its caches.

    An update on episodes of the quickstart took 1.4 s instead of 1.9 s.
    """
    if trainer.accelerator.device.type == "cpu":
        chunked_logprob.TOKEN_CHUNK_SIZE = LOGIT_TILE


LOGIT_TILE = 256


@contextmanager
def rows_ordered(order: Callable[[dict[str, Any]], list[int]]) -> Iterator[None]:
    """Says how the rows of a generation batch stand before TRL splits it, which else shuffles them."""

    def ordered(batch: dict[str, Any]) -> dict[str, Any]:
        rows = order(batch)
        placed = batch.copy()
        for name, value in batch.items():
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                placed[name] = value[rows]
            elif isinstance(value, list):
                placed[name] = [value[row] for row in rows]
        return placed

    before = grpo_trainer.shuffle_sequence_dict
    grpo_trainer.shuffle_sequence_dict = ordered
    try:
        yield
    finally:
        grpo_trainer.shuffle_sequence_dict = before


def may_skip_flat_rows(trainer: GRPOTrainer) -> bool:
    """Whether rows without an advantage have no gradient, and may have a pass of their own.

    Where weights are divided, each pass waits for the same one of the other processes.
    """
    has_no_gradient = trainer.beta == 0.0 and not trainer._entropy_bonus_enabled
    return bool(has_no_gradient and not trainer.is_fsdp_enabled and not trainer._dist.is_zero3)


def may_trim_completions(trainer: GRPOTrainer) -> bool:
    """Whether padding behind the last token of all rows changes no log-prob before it.

    Not where rotary positions turn by the length of the batch, or the loss of a router counts padding.
    """
    config = trainer.accelerator.unwrap_model(trainer.model).config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # one for each kind of layer
    is_static = all(kind.get("rope_type", "default") in ROPE_TYPES for kind in kinds)
    return is_static and not trainer.aux_loss_enabled


def may_sort_rows(trainer: GRPOTrainer) -> bool:
    """Whether loss and gradient of a step are the same, in whichever of its micro-batches a row is."""
    return bool(
        trainer.args.steps_per_generation == trainer.args.gradient_accumulation_steps
        and trainer.loss_type != "bnpo"
        and trainer.top_entropy_quantile == 1.0
        and not trainer._entropy_bonus_enabled
    )


class _WithoutMaskedSamples(logging.Filter):
    """TRL prints a paragraph for each sample without a reward; ours are masked on purpose and counted."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "All reward functions returned None" not in record.getMessage()


def silence_masked_samples() -> None:
    """Drops TRL's warning about samples without a reward; `episode/masked` counts them."""
    logger = logging.getLogger("trl.trainer.grpo_trainer")
    if not any(isinstance(present, _WithoutMaskedSamples) for present in logger.filters):
        logger.addFilter(_WithoutMaskedSamples())


def loop_state(trainer: GRPOTrainer) -> dict[str, Any]:
    """What TRL and transformers keep between two steps and no checkpoint of theirs holds.

    Episodes that later steps are still to learn from, where several steps share one generation; and the sums
    of what is logged every few steps.
    """
    _, *counts = _batch_shape(trainer)
    is_used_up = trainer._step % math.prod(counts) == 0
    return {
        "batch": _batch_shape(trainer),
        "step": trainer._step,
        "episodes": None if is_used_up else trainer._buffered_inputs,
        "metrics": {name: list(values) for name, values in trainer._metrics["train"].items()},
        "loss": trainer._tr_loss.item(),
        "logged_step": trainer._globalstep_last_logged,
    }


def _batch_shape(trainer: GRPOTrainer) -> list[int]:
    """Episodes of a micro-batch, micro-batches of a generation, and how often each is learned from."""
    args = trainer.args
    return [args.per_device_train_batch_size, args.steps_per_generation, trainer.num_iterations]


def set_loop_state(trainer: GRPOTrainer, state: dict[str, Any]) -> None:
    """Puts `loop_state` back, once transformers has begun to train.

    Episodes of a batch of another shape, which the settings of a resumed run may ask for, are played anew.
    """
    if state["batch"] == _batch_shape(trainer):
        trainer._step, trainer._buffered_inputs = state["step"], state["episodes"]
    trainer._metrics["train"].update(state["metrics"])
    trainer._tr_loss += state["loss"]
    trainer._globalstep_last_logged = state["logged_step"]


def draw_orders(trainer: GRPOTrainer, sampler: Any) -> None:
    """Leaves a fresh sampler as it stood when the epoch of a resumed run began.

    Each epoch draws the order of its questions from one generator; transformers skips steps, not orders.
    """
    for _ in range(int(trainer.state.epoch or 0)):
        next(iter(sampler), None)


def log_metric(trainer: GRPOTrainer, name: str, value: float) -> None:
    """Adds to what the next line of metrics averages."""
    trainer._metrics["train"][name].append(value)


def loop_step(trainer: GRPOTrainer) -> int:
    """How many micro-batches were learned from; it says which episodes come next."""
    return int(trainer._step)


def set_loop_step(trainer: GRPOTrainer, step: int) -> None:
    """Sets `loop_step`."""
    trainer._step = step


def scaler(trainer: GRPOTrainer) -> Any:
    """What scales the loss of a float16 run; None without it."""
    return getattr(trainer.accelerator, "scaler", None)


def load_weights(trainer: GRPOTrainer, checkpoint: Path) -> None:
    """Takes the weights of a checkpoint, without the rest of its state."""
    trainer._load_from_checkpoint(str(checkpoint))


def halving_obstacle(trainer: GRPOTrainer) -> str | None:
    """Why the loss of a micro-batch is not the sum of its halves' weighted losses; None if it is."""
    if trainer.accelerator.num_processes > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return "other processes wait for one gradient of the whole micro-batch"
    if trainer._entropy_bonus_enabled:
        return "the entropy bonus is a mean over its tokens"
    if trainer.top_entropy_quantile < 1.0:
        return "top_entropy_quantile ranks its tokens"
    if trainer.aux_loss_enabled:
        return "the router's loss is a mean over its tokens"
    return None


def without_first_step(scheduler: Any) -> Any:
    """A schedule of transformers that begins with its second step; others are left as they are."""
    if not isinstance(scheduler, LambdaLR):
        return scheduler

    def later(rate: Callable[[int], float]) -> Callable[[int], float]:
        return lambda step: rate(step + 1)

    scheduler.lr_lambdas = [later(rate) for rate in scheduler.lr_lambdas]
    rates = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    for group, base, rate in rates:
        group["lr"] = base * rate(0)
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
    return scheduler


def half_gradient_obstacle(trainer: GRPOTrainer) -> str | None:
    """Why the gradient of half a step cannot be read; None if it can."""
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return "ranks shard gradients"
    if trainer.args.gradient_accumulation_steps < 2:
        return "a step is one micro-batch; grpo.gradient_accumulation_steps: 2 or more splits it"
    return None


def half_weights(trainer: GRPOTrainer, halves: Sequence[dict[str, Any]]) -> list[float]:
    """By how much the loss of each half counts in the loss of the micro-batch that they make."""
    if trainer.loss_type in ("cispo", "dapo", "vespo"):  # divided by the tokens of the generation
        return [1.0 for _ in halves]
    if trainer.loss_type == "bnpo":  # a mean over tokens
        masks = [half["completion_mask"] * half.get("tool_mask", 1) for half in halves]
        sizes = [float(mask.sum()) for mask in masks]
    else:  # a mean over episodes
        sizes = [float(len(half["completion_ids"])) for half in halves]
    return [size / max(sum(sizes), 1.0) for size in sizes]
