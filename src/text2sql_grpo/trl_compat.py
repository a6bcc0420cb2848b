"""Every private name of TRL, transformers and FSDP2 that this package uses. Written for TRL 1.16.

| private name | why | public hook that would replace it |
| --- | --- | --- |
| `_metrics` | means over no token | NaN in their place |
| `_load_from_checkpoint` | weights of the best checkpoint | `load_weights(folder)` |
| `TOKEN_CHUNK_SIZE`, `_CHUNKED_LOGPROB_CHUNK_SIZE` | memory of the fused head | arguments of it |
| `_attn_implementation` (in `rollout.policy`) | the value to restore | a getter |
| `_can_use_grouped_mm` | an estimate of mixtures of experts | an operation with fake tensors of any dtype |
| `_get_fsdp_state`, `_fsdp_param_groups`, `post_forward_mesh_info` | weights that stay whole in rollouts | \
`unshard()` that outlasts forward passes |

Methods that trainers override and call by `super()`, in the order in which TRL calls them:
`_load_optimizer_and_scheduler`, `_compute_loss`, `_get_per_token_logps_and_entropies`, `_save_checkpoint`,
`_get_output_dir`. Replaced, as the trainer makes its own batches: _prepare_inputs.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, Trainer
from transformers.integrations import moe
from trl import GRPOTrainer
from trl.kernels import chunked_logprob
from trl.models import unwrap_model_for_generation
from trl.trainer import utils as trl_utils

from text2sql_grpo.models.hardware import plain_adapter_inputs
from text2sql_grpo.reliability.checkpoints import is_finished, remove_left_over, steps_done

LogProbs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


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
    amp = trainer.accelerator.native_amp
    with trainer.accelerator.autocast(), plain_adapter_inputs(model, is_autocast=amp):
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
            for module in modules:
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    stack.enter_context(patched(group, post_forward_mesh_info=None))
            yield
    finally:
        for module in modules:
            module.reshard()


def causal_lm(trainer: Trainer, model: torch.nn.Module) -> PreTrainedModel:
    """Unwrap a model from accelerate and PEFT."""
    model = trainer.accelerator.unwrap_model(model)
    return model.get_base_model() if isinstance(model, PeftModel) else model


def plain_outputs(trainer: GRPOTrainer, *inputs: Any, **options: Any) -> LogProbs:
    """TRL's log-probs, entropies and loss of a router, each row forwarded whole.

    Args:
        inputs: Model, ids, mask, number of the last columns that get log-probs, rows of one pass.
    """
    found: LogProbs = GRPOTrainer._get_per_token_logps_and_entropies(trainer, *inputs, **options)
    return found


def plain_log_probs(
    trainer: GRPOTrainer, model: torch.nn.Module, input_ids: torch.Tensor, mask: torch.Tensor, width: int
) -> torch.Tensor:
    """TRL's log-probs of the last `width` columns, each row forwarded whole."""
    return plain_outputs(trainer, model, input_ids, mask, width)[0]


def leave_out_token_means(trainer: GRPOTrainer) -> None:
    """Replace the means over tokens that the last loss logged by NaN, which no log counts."""
    for name, values in trainer._metrics["train"].items():
        if name == "entropy" or name.startswith(("kl", "clip_ratio/", "cispo_clip_ratio", "vespo/")):
            values[-1] = math.nan


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


def load_weights(trainer: Trainer, checkpoint: Path) -> None:
    """Load the weights of a checkpoint, without the rest of its state."""
    trainer._load_from_checkpoint(str(checkpoint))


def load_finished(trainer: Trainer, checkpoint: Path) -> bool:
    """Load the weights and the step of a checkpoint without a step left; False for any other."""
    if not is_finished(checkpoint, trainer.args.max_steps):
        return False
    load_weights(trainer, checkpoint)
    trainer.state.global_step = steps_done(checkpoint)
    remove_left_over(checkpoint, trainer.args)
    return True


def save_checkpoint(trainer: Trainer) -> None:
    """Save a checkpoint of the current step, on all ranks."""
    trainer._save_checkpoint(trainer.model, trial=None)
