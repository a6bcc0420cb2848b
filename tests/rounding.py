"""Comparison of two ways to compute one thing: in float64, or within what rounding can do in the dtype."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from transformers.integrations import moe

# Roundings in a layer, added up: at most 10 in float64 and 16 in float32, over all comparisons of the tests.
_ROUNDINGS = 32


def bound(dtype: torch.dtype, layers: int, scale: float) -> float:
    """Largest difference that rounding makes between two ways to compute one thing.

    Args:
        dtype: Type of the least exact step: of the computation, or of weights that were stored.
        layers: Layers between the inputs and what is compared, times optimiser steps.
        scale: Largest absolute value of what is compared, or of the terms of a sum that cancels.
    """
    return _ROUNDINGS * torch.finfo(dtype).eps * layers * scale


def assert_same(
    found: Any, expected: Any, *, layers: int, dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> None:
    """Fail if tensors or numbers differ by more than `bound` anywhere; infinities and nan must be equal.

    Args:
        scale: Least scale; that of what is expected if larger.
    """
    found, expected = (torch.as_tensor(each).detach().double() for each in (found, expected))
    finite = expected[expected.isfinite()].abs()
    scale = max(scale, finite.max().item() if len(finite) else 0.0)
    torch.testing.assert_close(
        found, expected, atol=bound(dtype, layers, scale), rtol=0, equal_nan=True, check_device=False
    )


class _Float64(TorchFunctionMode):
    """Request float64 wherever code requests float32: norms, softmax and log-probs of models do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if each is torch.float32 else each for each in args]
        kwargs = {
            name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


def _backward(node: Any, *gradients: Any) -> Any:
    """Backward of an autograd function in float64: autograd leaves the mode."""
    with _Float64():
        return _APPLY(node, *gradients)


_APPLY = BackwardCFunction.apply


@contextmanager
def in_float64() -> Iterator[None]:
    """Compute in float64 in this thread, where code requests float32 too; also a decorator.

    Models made or read before need `.double()`. Experts are multiplied by transformers' own product, as
    torch's takes no float64.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            _Float64(),
            patch.object(BackwardCFunction, "apply", _backward),
            patch.object(moe, "_can_use_grouped_mm", lambda *_: False),
        ):
            yield
    finally:
        torch.set_default_dtype(before)
