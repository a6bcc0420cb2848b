"""Estimate of a run's memory from the shapes of its model, before anything is loaded.

Weights, gradients and optimiser states are counted. For activations, the update itself (the model's own code,
adapter, checkpointing, autocast, TRL's fused head) runs once on fake tensors, and every allocation is
tracked. `benchmarks/memory_estimate.py` compares the estimate with measured peaks.
"""

import copy
import math
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert
from trl.trainer.utils import add_fused_lm_head

from text2sql_grpo import trl_compat
from text2sql_grpo.config import ModelConfig
from text2sql_grpo.errors import ModelError
from text2sql_grpo.models.loaded_policy import lora_config, with_adapter
from text2sql_grpo.rollout.policy import cached_numbers
from text2sql_grpo.token_tree.attention import TreePass, attend_to_trees, obstacle
from text2sql_grpo.token_tree.tree import Tile, TokenTree
from text2sql_grpo.token_tree.update import keep_hidden_states

_FOUR_BIT_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # NF4 in blocks of 64, their 8-bit scales in blocks of 256
# On a GPU kernels, workspaces, fragments: a reserve, not measured; on a CPU the program with its libraries.
_CONTEXT_BYTES = {"cuda": 1 << 30, "cpu": 1 << 29}


@dataclass(frozen=True)
class Sharding:
    """Sharding of a model among ranks.

    Attributes:
        processes: Number of ranks.
        stage: ZeRO's stage: 0 for copies (DDP if `processes` > 1), 2 for sharded gradients and optimiser
            states, 3 for sharded weights too (FSDP2).
        offloads_states: True if optimiser states are in host memory.
        offloads_weights: True if weights are in host memory.
        variables: Environment variables by which accelerate asks for this.
    """

    processes: int = 1
    stage: int = 0
    offloads_states: bool = False
    offloads_weights: bool = False
    variables: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Update:
    """Shape of one forward and backward pass of a rank.

    Attributes:
        rows: Number of completions, `per_device_train_batch_size`.
        num_generations: Completions per prompt; those in the same pass share it.
        completion_tokens: Tokens of each episode after its prompt.
        sampled_tokens: Number of `completion_tokens` that the policy sampled, which get log-probs.
        shares_prompts: Forward each distinct prompt once.
        autocast: dtype of the passes; None for that of the weights.
    """

    rows: int
    num_generations: int
    prompt_tokens: int
    completion_tokens: int
    sampled_tokens: int
    shares_prompts: bool = True
    gradient_checkpointing: bool = True
    autocast: torch.dtype | None = torch.bfloat16


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated bytes of one rank on its device, but for `host`.

    Attributes:
        weights: All weights, with the adapter.
        reference: Second copy of the weights for the KL term.
        update: Activations and temporaries of the update.
        rollouts: Cache and temporaries of rollouts, freed before the update.
        engine: Memory that vLLM reserves on the same device.
        context: Reserve for memory outside of tensors.
        host: Host memory for offloading.
        trained_parameters: Number of trained weights, not bytes; `parameters` counts all.
    """

    weights: int
    reference: int
    gradients: int
    optimizer: int
    update: int
    rollouts: int
    engine: int
    context: int
    host: int
    trained_parameters: int
    parameters: int

    @property
    def peak(self) -> int:
        """Bytes of the larger phase, update or rollouts."""
        both = self.weights + self.reference + self.optimizer + self.engine + self.context
        return both + max(self.gradients + self.update, self.rollouts)


def estimate_memory(
    model_config: PreTrainedConfig,
    settings: ModelConfig,
    update: Update,
    sessions: int,
    *,
    device: str,
    optimizer: str = "adamw_torch_fused",
    has_reference: bool = False,
    sharding: Sharding = Sharding(),
    engine_bytes: int = 0,
) -> MemoryEstimate:
    """Estimate the peak memory of each rank of a run.

    Args:
        model_config: Config of the base model.
        settings: Model settings with dtype and quantization `resolved`.
        sessions: Concurrent episodes of a rollout on one rank, as long as those of `update`; 0 for vLLM's.
        device: Device type, such as `cuda`.
        optimizer: `TrainingArguments.optim`.
        has_reference: True if there is a KL term, which needs a copy of the model unless LoRA is trained.
        engine_bytes: Memory that vLLM reserves on the same device.
    """
    cache_dtype = update.autocast or getattr(torch, settings.dtype)
    is_sharded = sharding.stage >= 2
    if is_sharded:  # weights and gradients take 2 bytes each; the states include a master copy
        settings = replace(settings, dtype="bfloat16")
        update = replace(update, shares_prompts=False, autocast=None)
    model, passes = trace_update(model_config, settings, update, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    weights, dequantised = sum(p.nbytes for p in model.parameters()), 0
    if settings.quantization == "4bit":
        linear = _linear_weights(model)
        weights += round(sum(w.numel() * _FOUR_BIT_BYTES - w.nbytes for w in linear))
        dequantised = max(w.nbytes for w in linear)  # layers are dequantised one at a time
    reference = weights if has_reference and settings.lora is None else 0
    gradients = sum(p.nbytes for p in trained)
    count = sum(p.numel() for p in trained)
    states = _state_bytes(optimizer, trained)
    host = 0
    if is_sharded:
        gradients, states = gradients // sharding.processes, (2 * 4 + 4) * count // sharding.processes
    elif sharding.processes > 1:
        gradients *= 2  # DDP's buckets
    if sharding.stage == 3:
        gathered = 2 * _largest_layer(model) * 2  # the current layer and the prefetched one, in 2 bytes
        weights, reference = weights // sharding.processes, reference // sharding.processes
        if sharding.offloads_weights:
            host, weights = host + weights, 0
        weights += gathered
    if sharding.offloads_states:
        host, states = host + states, 0
    return MemoryEstimate(
        weights=weights,
        reference=reference,
        gradients=gradients,
        optimizer=states,
        update=passes + dequantised,
        rollouts=_rollout_bytes(model, update, sessions, cache_dtype) if sessions else 0,
        engine=engine_bytes,
        context=_CONTEXT_BYTES.get(device, 0),
        host=host,
        trained_parameters=count,
        parameters=sum(p.numel() for p in model.parameters()),
    )


def _linear_weights(model: PreTrainedModel) -> list[torch.Tensor]:
    """Weights that 4-bit loading quantises: those of linear layers, but for the head and the adapter."""
    excluded = get_keys_to_not_convert(model)
    return [
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and "lora_" not in name
        and not any(key in name for key in excluded)
    ]


def _largest_layer(model: PreTrainedModel) -> int:
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.base_model.layers]
    return int(max(*layers, model.get_input_embeddings().weight.numel()))


def _state_bytes(optimizer: str, trained: list[torch.Tensor]) -> int:
    """Bytes of optimiser states: AdamW's two values a weight, in the weight's dtype or in 8 bits (`8bit`)."""
    for name, size in (("8bit", 2), ("sgd", 0), ("adafactor", 0)):
        if name in optimizer:
            return size * sum(p.numel() for p in trained)
    return 2 * sum(p.nbytes for p in trained)


def _rollout_bytes(model: PreTrainedModel, update: Update, sessions: int, cache_dtype: torch.dtype) -> int:
    """Bytes of keys and values, of temporaries of their forward passes, and of weights cast by autocast."""
    config = model.config.get_text_config()
    size, autocast = cache_dtype.itemsize, update.autocast
    per_token = cached_numbers(config) * size
    prompts = math.ceil(sessions / update.num_generations)
    stored = prompts * update.prompt_tokens + sessions * update.completion_tokens
    seen = update.prompt_tokens + update.completion_tokens
    scores = sessions * config.num_attention_heads * seen * (size + 4)
    logits = 3 * 4 * sessions * config.vocab_size
    cast = 0
    if autocast is not None and autocast.itemsize < model.dtype.itemsize:
        cast = autocast.itemsize * sum(p.numel() for p in model.parameters())
    # The cache grows by an eighth more than it needs, one layer after another.
    spare = 1 / 8 + 1 / config.num_hidden_layers
    return int((1 + spare) * per_token * stored + scores + logits + cast)


class UntraceableError(ModelError):
    """The code of a model does not run on fake tensors."""


def trace_update(
    config: PreTrainedConfig, settings: ModelConfig, update: Update, device: str
) -> tuple[PreTrainedModel, int]:
    """Run one update on fake tensors: the model, without PEFT around it, and the bytes added to its weights.

    Raises:
        UntraceableError: The code of the model reads the content of tensors.
        ModelError: The adapter cannot be put on the model.
    """
    model, causal_lm = _meta_model(config, settings)
    update = replace(update, shares_prompts=update.shares_prompts and obstacle(causal_lm) is None)
    try:
        return causal_lm, _traced_bytes(model, causal_lm, update, device)
    except (RuntimeError, TypeError, ValueError, ModelError) as error:
        if update.shares_prompts:  # its attention may be its own, which the config does not tell
            return trace_update(config, settings, replace(update, shares_prompts=False), device)
        reason = str(error).partition("\n")[0]
        raise UntraceableError(f"memory cannot be estimated for this model: {reason}") from error


def _traced_bytes(model: Any, causal_lm: PreTrainedModel, update: Update, device: str) -> int:
    if update.gradient_checkpointing:
        causal_lm.activation_checkpointing_enable()
        if model is not causal_lm:  # with an adapter
            causal_lm.enable_input_require_grads()
    scored = torch.zeros(1, update.rows * update.sampled_tokens, dtype=torch.long)
    is_packed = update.shares_prompts
    if is_packed:
        attend_to_trees(causal_lm)
    vocabulary = causal_lm.config.get_text_config().vocab_size
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        trl_compat.traceable_experts(),
        trl_compat.estimated_logit_tiles(vocabulary, is_packed=is_packed),
    ):
        model.to_empty(device="cpu")  # fake tensors in the place of those on `meta`
        causal_lm.tie_weights()
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        live = LiveBytes([*parameters, *model.buffers(), *(p.grad for p in parameters if p.grad is not None)])
        with live:
            with (
                torch.autocast("cpu", update.autocast) if update.autocast else nullcontext(),
                keep_hidden_states(causal_lm.base_model, scored[0]) if is_packed else nullcontext(),
                _tree_pass(update).running(causal_lm) if is_packed else _plain_inputs(update) as inputs,
            ):
                if device == "cpu":
                    labels = {"shift_labels": scored} if is_packed else {"labels": inputs["input_ids"]}
                    output = model(**inputs, **labels, fused_lm_head=True).log_probs
                else:
                    output = causal_lm.base_model(**inputs, use_cache=False).last_hidden_state
            after_forward = live.now
            output.sum().backward()
    head = 0 if device == "cpu" else _head_bytes(causal_lm, update)
    return max(live.peak, after_forward + head)


def _meta_model(config: PreTrainedConfig, settings: ModelConfig) -> tuple[Any, PreTrainedModel]:
    """The model on the device `meta`: with its adapter, and unwrapped from PEFT."""
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=getattr(torch, settings.dtype)
        )
        add_fused_lm_head(causal_lm, outputs=("log_probs", "entropy"))
        adapter = lora_config(settings, config)
        model = with_adapter(causal_lm, adapter) if adapter else causal_lm
    if settings.quantization == "4bit":
        for parameter in model.parameters():
            if parameter.requires_grad:  # TRL trains adapters of 4-bit models in this dtype
                parameter.data = parameter.data.to(torch.bfloat16)
    model.train()
    return model, causal_lm


class _LargestTile(TreePass):
    """Pass over a tree that attends by its largest tile: tiles run one after another, with one peak."""

    def tiles(self, window: int | None) -> list[Tile]:
        return [max(super().tiles(window), key=lambda tile: tile.scores)]


def _tree_pass(update: Update) -> TreePass:
    """Pass over prompts with different completions, each prompt once."""
    rows = np.zeros((update.rows, update.prompt_tokens + update.completion_tokens), np.int64)
    rows[:, 0] = np.arange(update.rows) // update.num_generations
    rows[:, update.prompt_tokens] = np.arange(update.rows)
    return _LargestTile(TokenTree.of(list(rows)), torch.device("cpu"))


def _plain_inputs(update: Update) -> AbstractContextManager[dict[str, Any]]:
    """Inputs of padded rows, as in TRL."""
    shape = (update.rows, update.prompt_tokens + update.completion_tokens)
    inputs = {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "position_ids": torch.zeros(shape, dtype=torch.long),
        # transformers expands a padding mask to this
        "attention_mask": torch.ones(shape[0], 1, shape[1], shape[1], dtype=torch.bool),
    }
    return nullcontext(inputs)


def _head_bytes(model: PreTrainedModel, update: Update) -> int:
    """Bytes of TRL's fused head on a GPU: a tile of logits, gradients in float32."""
    head = model.get_output_embeddings().weight
    scored = update.rows * (update.sampled_tokens if update.shares_prompts else update.completion_tokens)
    size = (update.autocast or head.dtype).itemsize
    tile = trl_compat.logit_tile_size(scored) * size
    return int(tile + 4 * scored * head.shape[1] + (4 * head.numel() if head.requires_grad else 0))


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that tracks the bytes of the storages that operations allocate, except of `known`."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: Any = WeakIdKeyDictionary()
        for tensor in known:
            self._seen[tensor.untyped_storage()] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage not in self._seen:
                    self._seen[storage] = True
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._forget, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _forget(self, size: int) -> None:
        self.now -= size
