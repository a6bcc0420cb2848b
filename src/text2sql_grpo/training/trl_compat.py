"""Every private name of TRL, transformers and FSDP2 that this package uses. Written for TRL 1.16.

| private name | why | public hook that would replace it |
| --- | --- | --- |
| `_generate_single_turn` | TRL's generation: transformers, paged or vLLM | `generate(prompt_ids)` |
| `_dist`, `_entropy_bonus_enabled` | parts of the update that may be skipped | properties of the trainer |
| `_metrics` | metrics of a step | `log_metric`, which reward functions have |
| `_step`, `_buffered_inputs` | episodes that later steps train on | a `state_dict` of the trainer |
| `_tr_loss`, `_globalstep_last_logged` | metrics after a resume | the same |
| `_load_from_checkpoint` | weights of the best checkpoint | `load_weights(folder)` |
| `shuffle_sequence_dict` | split of a generation batch | a method that splits it |
| `TOKEN_CHUNK_SIZE`, `_CHUNKED_LOGPROB_CHUNK_SIZE` | memory of the fused head | arguments of it |
| text of a log message | masked samples are no error | a class of warning |
| `_last_lr` | a warm-up whose first step is not 0 | `get_scheduler(.., first_step=1)` |
| `_attn_implementation` (in `rollout.policy`) | the value to restore | a getter |
| `_can_use_grouped_mm` | an estimate of mixtures of experts | an operation with fake tensors of any dtype |
| `_weight_conversions` (in `publishing.stored_weights`) | merged models stored as their base | an argument |
| `_get_fsdp_state`, `_fsdp_param_groups`, `_fsdp_param_group` (older torch), `post_forward_mesh_info` | \
weights that stay whole during rollouts | `unshard()` that outlasts forward passes |

Methods that trainers override and call by `super()`, in the order in which TRL calls them:
`_get_train_sampler`, `_load_optimizer_and_scheduler`, `_prepare_inputs`, `_generate_and_score_completions`,
`_compute_loss`, `_get_per_token_logps_and_entropies`, `_save_checkpoint`, `_get_output_dir`.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, Trainer
from transformers.integrations import moe
from trl import GRPOTrainer
from trl.kernels import chunked_logprob
from trl.models import unwrap_model_for_generation
from trl.trainer import grpo_trainer
from trl.trainer import utils as trl_utils

from text2sql_grpo.environment.episode import Rollout
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.models.cpu import plain_adapter_inputs
from text2sql_grpo.reliability.ranks import gather, is_distributed
from text2sql_grpo.rollout.engine import Continuations
from text2sql_grpo.rollout.policy import row_obstacle
from text2sql_grpo.rollout.sampling import Sampling
from text2sql_grpo.training.token_tree.attention import TreePass, obstacle
from text2sql_grpo.training.token_tree.batch import ScoredTree, keep_hidden_states


@contextmanager
def patched(holder: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object or module until the context ends."""
    before = {name: getattr(holder, name) for name in values}
    for name, value in values.items():
        setattr(holder, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


@contextmanager
def generating(trainer: GRPOTrainer) -> Iterator[None]:
    """Context of rollouts by `generate`; at its end, join the calls of ranks that still play."""
    with nullcontext() if trainer.use_vllm else whole_weights(trainer.model_wrapped):
        yield
        while generate(trainer, [], max_new_tokens=1) is not None:
            pass


def generate(trainer: GRPOTrainer, prompts: list[list[int]], *, max_new_tokens: int) -> Continuations | None:
    """Generate one continuation per prompt with TRL; None if no rank has a prompt left.

    A collective call needs the same number of prompts on each rank: ranks with fewer add fillers.
    """
    count = most = len(prompts)
    if _generates_together(trainer):
        wanted = [facts for (facts,) in gather([(count, max_new_tokens)])]
        most, max_new_tokens = (max(column) for column in zip(*wanted, strict=True))
    if most == 0:
        return None
    prompts = prompts + [[trainer.eos_token_ids[0]]] * (most - count)
    # TRL gives every turn the budget of a whole completion: set it to that of a turn.
    if trainer.use_vllm:
        limited = patched(trainer.vllm_generation, max_completion_length=max_new_tokens)
    else:
        limited = patched(trainer.generation_config, max_new_tokens=max_new_tokens)
    with limited:
        completion_ids, log_probs = trainer._generate_single_turn(prompts, None, {}, 1)
    if log_probs is not None:
        log_probs = [[math.nan if value is None else value for value in row] for row in log_probs[:count]]
    return Continuations([list(ids) for ids in completion_ids[:count]], log_probs)


def _generates_together(trainer: GRPOTrainer) -> bool:
    """True if TRL generates in one collective call.

    That is so with vLLM as a server or shared by several ranks, and with transformers if weights are sharded.
    """
    if not trainer.use_vllm:
        return is_distributed() and (trainer._dist.is_zero3 or trainer.is_fsdp_enabled)
    return is_distributed() and (trainer.vllm_mode == "server" or trainer.args.vllm_tensor_parallel_size > 1)


def sampling_log_probs(
    trainer: GRPOTrainer, episodes: Sequence[Rollout], *, is_corrected: bool = False
) -> list[list[float]] | None:
    """`logprobs` for TRL; None if TRL does not need them, or would misread them.

    TRL corrects with them for differences between vLLM and the trained model. Without vLLM it reads them for
    the off-policy mask, and for that correction inside `correcting`. It compares them with log-probs of the
    whole vocabulary, which is right unless top-p, top-k or min-p removed tokens.

    Args:
        is_corrected: True if TRL corrects with them without vLLM.
    """
    is_compared = trainer.off_policy_mask_threshold is not None and _is_unfiltered(trainer)
    is_known = all(len(episode.log_probs) == len(episode.completion_ids) for episode in episodes)
    if not is_known or not (trainer.use_vllm or is_compared or is_corrected):
        return None
    return [episode.log_probs or [0.0] for episode in episodes]  # TRL fails on an empty completion


def _is_unfiltered(trainer: GRPOTrainer) -> bool:
    return sampling(trainer) == Sampling(trainer.temperature)


def corrects_sampling(trainer: GRPOTrainer, *, knows_log_probs: bool) -> bool:
    """True if TRL's truncated importance sampling is used without vLLM; see `correct_sampling`.

    Args:
        knows_log_probs: True if the engine records log-probs of sampling.

    Raises:
        ConfigError: `correct_sampling` is set, but the log-probs are not known.
    """
    if trainer.use_vllm or not trainer.args.correct_sampling:
        return False
    if not knows_log_probs:
        raise ConfigError("grpo.correct_sampling needs the engine slots")
    return True


def correcting(trainer: GRPOTrainer, *, is_on: bool) -> AbstractContextManager[None]:
    """Context of TRL's truncated importance sampling, which TRL computes with vLLM alone."""
    return patched(trainer, use_vllm=trainer.use_vllm or is_on)


def begin_correcting(trainer: GRPOTrainer, *, is_on: bool) -> None:
    """Begin inside a context of `correcting`: before its rollouts, TRL would sync weights with vLLM."""
    trainer.use_vllm = trainer.use_vllm or is_on


def slots_obstacle(trainer: GRPOTrainer) -> str | None:
    """Setting that only TRL's own generation supports; None if there is none."""
    if trainer.use_vllm:
        return "vLLM generates"
    if trainer.use_transformers_continuous_batching:
        return "transformers' continuous batching generates"
    if trainer.repetition_penalty != 1.0 or trainer.args.generation_kwargs:
        return "repetition_penalty or generation_kwargs are set"
    return None


def sampling(trainer: GRPOTrainer) -> Sampling:
    """Sampling settings of a trainer."""
    return Sampling(trainer.temperature, trainer.top_p, trainer.top_k, trainer.min_p)


@contextmanager
def unwrapped_model(trainer: GRPOTrainer) -> Iterator[PreTrainedModel]:
    """Unwrap the policy for generation: without gradient checkpointing, in the dtype of training.

    A single autocast spans all passes, so that weights are cast once.
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


def keep_one_hook(model: torch.nn.Module) -> None:
    """Remove the hooks on a policy's embeddings whenever transformers adds new ones.

    TRL enables gradient checkpointing again after each rollout, and transformers then forgets the old hooks.
    """
    policy: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    enable = policy.enable_input_require_grads

    def enable_anew() -> None:
        policy.disable_input_require_grads()
        enable()

    policy.enable_input_require_grads = enable_anew


@contextmanager
def autocast(trainer: Trainer, model: torch.nn.Module) -> Iterator[None]:
    """Autocast of training."""
    with trainer.accelerator.autocast(), plain_adapter_inputs(model):
        yield


@contextmanager
def whole_weights(model: torch.nn.Module) -> Iterator[None]:
    """Unshard the weights of an FSDP2 model on each rank until the context ends.

    Otherwise each forward pass gathers them, layer by layer, and a rank with one more pass than the others
    blocks for ever. Layers keep their weights between passes, as FSDP2's root module does.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
    try:
        with ExitStack() as stack:
            for group in (group for module in modules for group in _weight_groups(module)):
                stack.enter_context(patched(group, post_forward_mesh_info=None))
            yield
    finally:
        for module in modules:
            module.reshard()


def _weight_groups(module: FSDPModule) -> list[Any]:
    """Parameter groups of a module; older versions of torch have at most one."""
    state = vars(module._get_fsdp_state())
    groups = state.get("_fsdp_param_groups", [state.get("_fsdp_param_group")])
    return [group for group in groups if group is not None]


def tree_obstacle(trainer: Trainer) -> str | None:
    """Reason why a trainer cannot forward token trees; None if none is known before it tries."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.args.use_liger_kernel or trainer.args.torch_compile:
        return "use_liger_kernel or torch_compile is set"
    return obstacle(model)


def causal_lm(trainer: Trainer, model: torch.nn.Module) -> PreTrainedModel:
    """Unwrap a model from accelerate and PEFT."""
    model = trainer.accelerator.unwrap_model(model)
    return model.get_base_model() if isinstance(model, PeftModel) else model


def tree_log_probs(
    trainer: GRPOTrainer, model: torch.nn.Module, batch: ScoredTree, *, compute_aux_loss: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Log-probs and entropies of scored tokens by TRL's fused head, shape (B, K); loss of the router.

    A reference has no entropies.
    """
    lm, tree_pass = causal_lm(trainer, model), TreePass(batch.tree, batch.targets.device)
    router = {"output_router_logits": True} if compute_aux_loss else {}
    with (
        autocast(trainer, model),
        keep_hidden_states(lm.base_model, batch.sources),
        tree_pass.running(lm) as inputs,
    ):
        output = model(**inputs, **router, shift_labels=batch.targets[None], fused_lm_head=True)
    entropy = None if output.entropy is None else batch.unpack(output.entropy[0])
    return batch.unpack(output.log_probs[0]), entropy, output.aux_loss if compute_aux_loss else None


def plain_log_probs(
    trainer: GRPOTrainer, model: torch.nn.Module, input_ids: torch.Tensor, mask: torch.Tensor, width: int
) -> torch.Tensor:
    """TRL's log-probs of the last `width` columns, each row forwarded whole."""
    inputs = (model, input_ids, mask, width)
    log_probs: torch.Tensor = GRPOTrainer._get_per_token_logps_and_entropies(trainer, *inputs)[0]
    return log_probs


def computes_in_float32(trainer: Trainer) -> bool:
    """True if the forward passes of training round to float32."""
    dtype = trainer.accelerator.unwrap_model(trainer.model).dtype
    return bool(trainer.accelerator.mixed_precision == "no" and dtype == torch.float32)


def shrink_logit_tiles(trainer: GRPOTrainer) -> None:
    """Make TRL's fused head take fewer tokens at once on a CPU, so that their logits fit into its caches.

    An update on episodes of the quickstart took 1.4 s instead of 1.9 s.
    """
    if trainer.accelerator.device.type == "cpu":
        chunked_logprob.TOKEN_CHUNK_SIZE = _LOGIT_TILE


_LOGIT_TILE = 256
_TRL_LOGIT_TILE = chunked_logprob.TOKEN_CHUNK_SIZE  # before it is shrunk


@contextmanager
def estimated_logit_tiles(vocabulary: int, *, is_packed: bool) -> Iterator[None]:
    """Give tiles of logits the size that they take in an update on a CPU.

    TRL allocates tiles wider than a small vocabulary; on a CPU, the unused part takes no memory.
    """
    width = min(trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE, vocabulary)
    tokens = _LOGIT_TILE if is_packed else _TRL_LOGIT_TILE
    with (
        patched(trl_utils, _CHUNKED_LOGPROB_CHUNK_SIZE=width),
        patched(chunked_logprob, TOKEN_CHUNK_SIZE=tokens),
    ):
        yield


def traceable_experts() -> AbstractContextManager[None]:
    """Compute experts by transformers' own product: torch's takes no fake tensors but bfloat16 ones."""
    return patched(moe, _can_use_grouped_mm=lambda *_: False)


def logit_tile_size(scored_tokens: int) -> int:
    """Number of logits in the largest tile of TRL's fused head on a GPU."""
    return int(min(scored_tokens, _TRL_LOGIT_TILE) * trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE)


def rows_ordered(order: Callable[[dict[str, Any]], list[int]]) -> AbstractContextManager[None]:
    """Order the rows of a generation batch before TRL splits it, instead of TRL's shuffle."""
    return patched(grpo_trainer, shuffle_sequence_dict=lambda batch: rows_of(batch, order(batch)))


def rows_of(batch: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Select rows of one of TRL's batches; values without a row per episode stay."""

    def placed(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim > 0:
            return value[list(rows)]
        return [value[row] for row in rows] if isinstance(value, list) else value

    return {name: placed(value) for name, value in batch.items()}


def may_skip_zero_variance(trainer: GRPOTrainer) -> bool:
    """True if rows of zero-variance groups have no gradient, and may have a forward pass of their own.

    With sharded weights, each pass waits for the same pass on the other ranks.
    """
    has_no_gradient = not (trainer.beta or trainer._entropy_bonus_enabled or trainer.aux_loss_enabled)
    return bool(has_no_gradient and not trainer.is_fsdp_enabled and not trainer._dist.is_zero3)


def may_trim_completions(trainer: GRPOTrainer) -> bool:
    """True if padding behind the last token of all rows changes no log-prob before it.

    False if rotary positions depend on the length of the batch, or the router's loss counts padding.
    """
    return (
        row_obstacle(trainer.accelerator.unwrap_model(trainer.model)) is None and not trainer.aux_loss_enabled
    )


def may_sort_rows(trainer: GRPOTrainer) -> bool:
    """True if loss and gradient of a step do not depend on which micro-batch a row is in."""
    return bool(
        trainer.args.steps_per_generation == trainer.args.gradient_accumulation_steps
        and trainer.loss_type != "bnpo"
        and trainer.top_entropy_quantile == 1.0
        and not trainer._entropy_bonus_enabled
    )


def silence_masked_samples() -> None:
    """Drop TRL's warning about samples without a reward; `episode/masked` counts them."""
    logging.getLogger("trl.trainer.grpo_trainer").addFilter(_is_not_of_masked_sample)


def _is_not_of_masked_sample(record: logging.LogRecord) -> bool:
    return "All reward functions returned None" not in record.getMessage()


def loop_state(trainer: GRPOTrainer) -> dict[str, Any]:
    """State between two steps that no checkpoint of TRL or transformers holds.

    Episodes of a generation batch that later steps still train on, and sums of metrics that are not logged
    yet.
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


def generation_batches(trainer: GRPOTrainer) -> tuple[int, int]:
    """Number of generation batches that were taken, and that the whole run takes."""
    every = math.prod(_batch_shape(trainer)[1:])
    micro_batches = trainer.state.max_steps * trainer.args.gradient_accumulation_steps
    return trainer._step // every, math.ceil(micro_batches / every)


def _batch_shape(trainer: GRPOTrainer) -> list[int]:
    """Episodes per micro-batch, micro-batches per generation batch, and iterations over it."""
    args = trainer.args
    return [args.per_device_train_batch_size, args.steps_per_generation, trainer.num_iterations]


def set_loop_state(trainer: GRPOTrainer, state: dict[str, Any]) -> bool:
    """Restore `loop_state`, after transformers has begun to train.

    Returns:
        False if the resumed run has another batch shape: its episodes are played anew.
    """
    is_same = state["batch"] == _batch_shape(trainer)
    if is_same:
        trainer._step, trainer._buffered_inputs = state["step"], state["episodes"]
    trainer._metrics["train"].update(state["metrics"])
    trainer._tr_loss += state["loss"]
    trainer._globalstep_last_logged = state["logged_step"]
    return bool(is_same)


def draw_orders(trainer: GRPOTrainer, sampler: Any) -> None:
    """Advance a fresh sampler to the epoch in which a run is resumed.

    Each epoch draws the order of its questions from one generator; transformers skips steps, not orders.
    """
    for _ in range(int(trainer.state.epoch or 0)):
        next(iter(sampler), None)


def log_metric(trainer: GRPOTrainer, name: str, value: float) -> None:
    """Add a value to a metric, which is averaged until the next log."""
    trainer._metrics["train"][name].append(value)


def count_micro_batch_once(trainer: GRPOTrainer) -> None:
    """Undo TRL's count of a half as a micro-batch: the count selects the next episodes."""
    trainer._step -= 1


def load_weights(trainer: GRPOTrainer, checkpoint: Path) -> None:
    """Load the weights of a checkpoint, without the rest of its state."""
    trainer._load_from_checkpoint(str(checkpoint))


def halving_obstacle(trainer: GRPOTrainer) -> str | None:
    """Reason why the loss of a micro-batch is not the sum of its halves' weighted losses; None if it is."""
    if trainer.accelerator.num_processes > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return "other ranks wait for one gradient of the whole micro-batch"
    if trainer._entropy_bonus_enabled:
        return "the entropy bonus is a mean over its tokens"
    if trainer.top_entropy_quantile < 1.0:
        return "top_entropy_quantile ranks its tokens"
    if trainer.aux_loss_enabled:
        return "the router's loss is a mean over its tokens"
    return None


def without_first_step(scheduler: Any) -> Any:
    """Let a schedule of transformers begin with its second step; leave other schedules as they are."""
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
    """Reason why the gradient of half a step cannot be read; None if it can."""
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return "ranks shard gradients"
    if trainer.args.gradient_accumulation_steps < 2:
        return "a step is one micro-batch; grpo.gradient_accumulation_steps: 2 or more splits it"
    return None


def half_weights(trainer: GRPOTrainer, halves: Sequence[dict[str, Any]]) -> list[float]:
    """Weight of the loss of each half in the loss of the whole micro-batch."""
    if trainer.loss_type in ("cispo", "dapo", "vespo"):  # divided by the tokens of the generation batch
        return [1.0 for _ in halves]
    if trainer.loss_type == "bnpo":  # a mean over tokens
        masks = [half["completion_mask"] * half.get("tool_mask", 1) for half in halves]
        sizes = [float(mask.sum()) for mask in masks]
    else:  # a mean over episodes
        sizes = [float(len(half["completion_ids"])) for half in halves]
    return [size / max(sum(sizes), 1.0) for size in sizes]
