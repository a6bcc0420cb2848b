"""Fast passes on a CPU: bfloat16 where the processor multiplies it, without casts of adapter inputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@cache
def has_fast_bf16() -> bool:
    """True if this processor multiplies bfloat16 in hardware (AVX512-BF16 or AMX)."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # absent in some builds of torch
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


@contextmanager
def inference_autocast(model: Any, *, bf16: bool | None = None) -> Iterator[None]:
    """Autocast to bfloat16 for passes of a model with float32 weights on a CPU; elsewhere a no-op.

    On one core with AMX, SmolLM2-135M decodes 64 rows in 0.195 s instead of 0.374 s.
    """
    is_wanted = has_fast_bf16() if bf16 is None else bf16
    if model.device.type == "cpu" and is_wanted and any(p.dtype == torch.float32 for p in model.parameters()):
        with torch.autocast("cpu", torch.bfloat16), plain_adapter_inputs(model):
            yield
    else:
        yield


@contextmanager
def plain_adapter_inputs(model: torch.nn.Module) -> Iterator[None]:
    """Skip PEFT's cast of adapter inputs under autocast.

    PEFT casts them to the adapter's float32, and autocast casts them back: a quarter of an update on a CPU.
    """
    from peft.helpers import disable_input_dtype_casting  # slow to import, which few verbs need

    device = next(model.parameters()).device.type
    with disable_input_dtype_casting(model, active=torch.is_autocast_enabled(device)):
        yield
