"""Check that weights fit into memory, before they are read."""

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from text2sql_grpo.errors import ModelError
from text2sql_grpo.models.hardware import GIB


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
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    chosen = getattr(torch, dtype) if dtype != "auto" else (config.dtype or torch.float32)
    size = copies * chosen.itemsize * sum(p.numel() for p in model.parameters())
    free = psutil.virtual_memory().available
    if size > free:
        trained = " with gradients and optimiser states" if copies > 1 else ""
        name = str(chosen).removeprefix("torch.")
        raise ModelError(
            f"too little memory for the model: its {name} weights{trained} take {size / GIB:.1f} GiB, "
            f"{free / GIB:.1f} are free ({path}); take a smaller model, model.lora, or end other programs"
        )
