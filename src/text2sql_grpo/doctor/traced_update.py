"""One update of a model with fake weights, with every allocation tracked."""

import copy
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from text2sql_grpo import trl_compat
from text2sql_grpo.config import ModelConfig
from text2sql_grpo.errors import ModelError
from text2sql_grpo.models.loaded_policy import lora_config, with_adapter
from text2sql_grpo.token_tree.attention import TreePass, attend_to_trees, obstacle
from text2sql_grpo.token_tree.scored_tree import keep_hidden_states
from text2sql_grpo.token_tree.tree import Tile, TokenTree


@dataclass(frozen=True)
class Update:
    """Shape of one forward and backward pass of a rank.

    Attributes:
        rows: Number of completions, `per_device_train_batch_size`.
        num_generations: Completions per prompt; those in the same pass share it.
        prompt_tokens: Tokens of each prompt.
        completion_tokens: Tokens of each episode after its prompt.
        sampled_tokens: Number of `completion_tokens` that the policy sampled, which get log-probs.
        shares_prompts: Forward each distinct prompt once.
        gradient_checkpointing: Recompute activations inside layers.
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


class UntraceableError(ModelError):
    """The code of a model does not run on fake tensors."""


def trace_update(
    config: PreTrainedConfig, settings: ModelConfig, update: Update, device: str
) -> tuple[Any, int]:
    """Run one update on fake tensors: the model, and the bytes added to its weights and gradients.

    Raises:
        UntraceableError: The code of the model reads the content of tensors.
        ModelError: The adapter cannot be put on the model.
    """
    model, causal_lm = _meta_model(config, settings)
    shares_prompts = update.shares_prompts and obstacle(causal_lm) is None
    try:
        return model, _traced_bytes(model, causal_lm, update, device, shares_prompts=shares_prompts)
    except (RuntimeError, TypeError, ValueError, ModelError) as error:
        if shares_prompts:  # its attention may be its own, which the config does not tell
            return trace_update(config, settings, replace(update, shares_prompts=False), device)
        reason = str(error).partition("\n")[0]
        raise UntraceableError(f"memory cannot be estimated for this model: {reason}") from error


def _traced_bytes(
    model: Any, causal_lm: PreTrainedModel, update: Update, device: str, *, shares_prompts: bool
) -> int:
    if update.gradient_checkpointing:
        causal_lm.activation_checkpointing_enable()
        if model is not causal_lm:  # with an adapter
            causal_lm.enable_input_require_grads()
    scored = torch.zeros(1, update.rows * update.sampled_tokens, dtype=torch.long)
    if shares_prompts:
        attend_to_trees(causal_lm)
    vocabulary = causal_lm.config.get_text_config().vocab_size
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        trl_compat.traceable_experts(),
        trl_compat.estimated_logit_tiles(vocabulary, is_packed=shares_prompts),
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
                keep_hidden_states(causal_lm.base_model, scored[0]) if shares_prompts else nullcontext(),
                _tree_pass(update).running(causal_lm) if shares_prompts else _plain_inputs(update) as inputs,
            ):
                if device == "cpu":
                    labels = {"shift_labels": scored} if shares_prompts else {"labels": inputs["input_ids"]}
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
    """Dispatch mode that tracks the bytes of all storages that operations allocate, but those of `known`."""

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
