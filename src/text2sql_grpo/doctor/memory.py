"""Estimate of a run's memory from the shapes of its model, before anything is loaded.

Weights, gradients and optimiser states are counted. For activations, the update itself (the model's own code,
adapter, checkpointing, autocast, TRL's fused head) runs once on fake tensors, and every allocation is
tracked. `benchmarks/memory_estimate.py` compares the estimate with measured peaks.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.quantizers.base import get_keys_to_not_convert

from text2sql_grpo.config import ModelConfig
from text2sql_grpo.doctor.traced_update import Update, trace_update
from text2sql_grpo.rollout.policy import cached_numbers

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
    """

    processes: int = 1
    stage: int = 0
    offloads_states: bool = False
    offloads_weights: bool = False


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated bytes of one rank on its device, but for `host`.

    Attributes:
        weights: All weights, with the adapter.
        reference: Second copy of the weights for the KL term.
        gradients: Gradients of trained weights.
        optimizer: Optimiser states.
        update: Activations and temporaries of the update.
        rollouts: Cache and temporaries of rollouts, freed before the update.
        engine: Memory that vLLM reserves on the same device.
        context: Reserve for memory outside of tensors.
        host: Host memory for offloading.
        trained_parameters: Number of trained weights.
        parameters: Number of weights.
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
        settings = dataclasses.replace(settings, dtype="bfloat16")
        update = dataclasses.replace(update, shares_prompts=False, autocast=None)
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


def _linear_weights(model: Any) -> list[torch.Tensor]:
    """Weights that 4-bit loading quantises: those of linear layers, but for the head and the adapter."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    excluded = get_keys_to_not_convert(base)
    return [
        module.weight
        for name, module in base.named_modules()
        if isinstance(module, torch.nn.Linear)
        and "lora_" not in name
        and not any(key in name for key in excluded)
    ]


def _largest_layer(model: Any) -> int:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = [sum(p.numel() for p in layer.parameters()) for layer in base.base_model.layers]
    return int(max(*layers, base.get_input_embeddings().weight.numel()))


def _state_bytes(optimizer: str, trained: list[torch.Tensor]) -> int:
    """Bytes of optimiser states: AdamW's two values a weight, in the weight's dtype or in 8 bits (`8bit`)."""
    for name, size in (("8bit", 2), ("sgd", 0), ("adafactor", 0)):
        if name in optimizer:
            return size * sum(p.numel() for p in trained)
    return 2 * sum(p.nbytes for p in trained)


def _rollout_bytes(model: Any, update: Update, sessions: int, cache_dtype: torch.dtype) -> int:
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
