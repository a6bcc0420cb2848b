"""The device that a run uses: its memory, and types of numbers that it multiplies fast."""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from text2sql_grpo.errors import ConfigError, ModelError
from text2sql_grpo.rollout.policy import machine_memory

GIB = 1 << 30
_M_ARENA_MAX = -8  # of glibc's malloc.h


def device_type() -> str:
    """Device to train and evaluate on: `$DEVICE_TYPE`; by default an accelerator, if there is one.

    Raises:
        ConfigError: The device named there is absent.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    here = found.type if found else "cpu"
    wanted = os.environ.get("DEVICE_TYPE") or "auto"
    if wanted not in ("auto", "cpu", here):
        raise ConfigError(f"DEVICE_TYPE must be auto, cpu or {here} on this machine, got {wanted!r}")
    return here if wanted == "auto" else wanted


def hardware() -> dict[str, Any]:
    """The device that a run would use, its memory, and the CPU cores."""
    kind = device_type()
    facts: dict[str, Any] = {"type": kind, "cpu_cores": os.cpu_count(), "memory_bytes": device_memory(kind)}
    if kind == "cpu":
        facts["bfloat16"], facts["threads"] = has_fast_bf16(), torch.get_num_threads()
    if kind == "cuda":
        facts["name"], facts["devices"] = torch.cuda.get_device_name(), torch.cuda.device_count()
        facts["bfloat16"] = torch.cuda.is_bf16_supported(including_emulation=False)
    return facts


def device_memory(kind: str) -> int:
    """Bytes of a device's memory; that of this machine for a CPU."""
    if kind == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return machine_memory()


def keep_one_heap() -> None:
    """Have glibc serve all threads from one heap: each thread's own would keep its freed blocks.

    It saves a fifth of the memory of a run of a 0.5 B model on a CPU (EXPERIMENTS.md).
    """
    _glibc("mallopt", _M_ARENA_MAX, 1)


def release_memory() -> None:
    """Give memory that nothing refers to back to the system: glibc keeps freed blocks of a process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _glibc("malloc_trim", 0)


def _glibc(name: str, *arguments: int) -> None:
    """Call a function of the C library, where it has it."""
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function(*arguments)


def check_fits(path: str, config: PreTrainedConfig, *, dtype: str, device: str, copies: int = 1) -> None:
    """Refuse weights that are larger than the free memory of a run on the CPU, before they are read.

    Args:
        dtype: Type of the loaded weights; `auto` for the stored one.
        device: Kind of device; an accelerator's memory is not checked here.
        copies: Number of tensors as large as the weights: 4 if AdamW trains all of them.

    Raises:
        ModelError: They are larger.
        ValueError: transformers has no such architecture.
    """
    if device != "cpu" or getattr(config, "quantization_config", None) is not None:
        return
    chosen = getattr(torch, dtype) if dtype != "auto" else (config.dtype or torch.float32)
    size = copies * chosen.itemsize * _num_weights(config)
    free = machine_memory(is_free=True)
    if size > free:
        trained = " with gradients and optimiser states" if copies > 1 else ""
        name = str(chosen).removeprefix("torch.")
        raise ModelError(
            f"too little memory for the model: its {name} weights{trained} take {size / GIB:.1f} GiB, "
            f"{free / GIB:.1f} are free ({path}); take a smaller model, model.lora, or end other programs"
        )


def inference_dtype(config: PreTrainedConfig, *, device: str) -> Literal["auto", "float32"]:
    """Choose float32 for 16-bit weights that the processor does not multiply, where memory has room for it.

    Without AVX512-BF16 and AMX, two cores prefill SmolLM2-135M six times faster in float32, and they
    decode 32 rows three times faster (one row takes twice as long).
    """
    is_stored_slow = config.dtype in (torch.bfloat16, torch.float16) and not has_fast_bf16()
    if device != "cpu" or not is_stored_slow or getattr(config, "quantization_config", None) is not None:
        return "auto"
    size = torch.float32.itemsize * _num_weights(config)
    return "float32" if 2 * size <= machine_memory(is_free=True) else "auto"


def _num_weights(config: PreTrainedConfig) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


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
def plain_adapter_inputs(model: torch.nn.Module, *, is_autocast: bool = True) -> Iterator[None]:
    """Skip PEFT's cast of adapter inputs in passes under autocast; a no-op for other passes.

    PEFT casts them to the adapter's float32, and autocast casts them back: a quarter of an update on a CPU.
    """
    from peft.helpers import disable_input_dtype_casting  # slow to import, which few verbs need

    with disable_input_dtype_casting(model, active=is_autocast):
        yield
