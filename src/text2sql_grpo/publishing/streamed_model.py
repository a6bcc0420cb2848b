"""Model whose weights are loaded when a layer runs and freed after it.

It computes logits of a model that does not fit into memory: only the largest layer must.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

Fetch = Callable[[str], torch.Tensor]


def hollow_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Model of a config, on the CPU in evaluation mode, with weights that take no memory."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, _hollow(parameter.shape))
    model.tie_weights()
    hollow: PreTrainedModel = model.eval()
    return hollow


def _hollow(shape: torch.Size) -> torch.nn.Parameter:
    """Expanded zero; unlike with a parameter on `meta`, PEFT does not move adapters."""
    parameter = torch.nn.Parameter(torch.zeros(()).expand(shape), requires_grad=False)
    setattr(parameter, _MARK, True)
    return parameter


_MARK = "is_hollow"


def _hollow_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in module.named_parameters(recurse=False) if hasattr(p, _MARK)}


@contextmanager
def filled(module: torch.nn.Module, name: str, fetch: Fetch) -> Iterator[None]:
    """Give a layer its float32 weights while the block runs."""
    hollow = _hollow_parameters(module)
    try:
        for own in hollow:
            weight = fetch(f"{name}.{own}").float()
            module.register_parameter(own, torch.nn.Parameter(weight, requires_grad=False))
        yield
    finally:
        for own, parameter in hollow.items():
            module.register_parameter(own, parameter)


@torch.no_grad()
def streamed_logits(model: torch.nn.Module, token_ids: torch.Tensor, fetch: Fetch) -> torch.Tensor:
    """Logits, shape (B, T, vocabulary), with every hollow weight from `fetch`, by its name in the base."""
    hooks: list[Any] = []
    for name, module in model.named_modules():
        if _hollow_parameters(module):
            hooks += _filling_hooks(module, base_name(name), fetch)
    try:
        logits: torch.Tensor = model(input_ids=token_ids, use_cache=False).logits
        return logits
    finally:
        for hook in hooks:
            hook.remove()


def base_name(name: str) -> str:
    """Name of a module without PEFT's wrappers."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def _filling_hooks(module: torch.nn.Module, name: str, fetch: Fetch) -> list[Any]:
    weights = ExitStack()

    def before(*_: Any) -> None:
        weights.enter_context(filled(module, name, fetch))

    def after(*_: Any) -> None:
        weights.close()

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]
