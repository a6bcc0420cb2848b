"""Configs, tokenizer and adapter for a merge, besides the base's weights."""

from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from peft import PeftConfig, PeftModelForCausalLM, PeftType
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig

from text2sql_grpo.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Quantization = Literal["auto", "none", "4bit"]


def read_adapter_config(adapter: Path) -> Any:
    """Config of a LoRA adapter in inference mode.

    Raises:
        ModelError: It cannot be read, or is of another kind.
    """
    try:
        config = PeftConfig.from_pretrained(str(adapter))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"cannot read adapter_config.json: {error} ({adapter})") from error
    if config.peft_type != PeftType.LORA:
        raise ModelError(f"the adapter must be LoRA, got {config.peft_type}: {adapter}")
    config.inference_mode = True
    return config


def read_model_config(model_path: str) -> PreTrainedConfig:
    """Config of a model, without its quantization.

    Raises:
        ModelError: It cannot be read, or its weights are quantized by an unsupported method.
    """
    try:
        config = AutoConfig.from_pretrained(model_path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"cannot read the base {model_path!r}: {error}; name a model folder or Hub id"
        ) from error
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        if quantization.get("quant_method") != "bitsandbytes" or not quantization.get("load_in_4bit"):
            raise ModelError(
                f"cannot merge into a base quantized by {quantization.get('quant_method')}, only into 4 bits"
                f" of bitsandbytes; give the original as --base: {model_path}"
            )
        del config.quantization_config
    return config


def dtype_before_rounding(
    adapter: Path, quantization: Quantization, config: PreTrainedConfig
) -> torch.dtype | None:
    """Type from which the base was rounded to 4 bits in training; None if it was not.

    Raises:
        ModelError: The `config.yaml` beside the adapter is no YAML.
    """
    run = adapter.resolve().parent / "config.yaml"
    try:
        tree: Any = yaml.safe_load(run.read_text(encoding="utf-8")) if run.is_file() else None
    except yaml.YAMLError as error:
        raise ModelError(f"cannot parse the YAML beside the adapter: {error} ({run})") from error
    model = (tree.get("model") or {}) if isinstance(tree, dict) else {}
    if quantization == "auto":
        quantization = model.get("quantization", "none")
    return DTYPES.get(str(model.get("dtype")), config.dtype) if quantization == "4bit" else None


def dtype_to_write(dtype: str, config: PreTrainedConfig) -> torch.dtype:
    """Type to write; `auto` is the stored type of the base, float32 if its config has none."""
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype] if dtype != "auto" else (config.dtype or torch.float32)


def read_generation_config(model_path: str, model: Any) -> Any:
    try:
        return GenerationConfig.from_pretrained(model_path)
    except OSError:  # It has none of its own.
        return model.generation_config


def load_tokenizer(adapter: Path, model_path: str, *, vocab_size: int) -> Any:
    """Load the tokenizer beside the adapter, else the base's; refused if the base has too few embeddings."""
    is_beside = (adapter / "tokenizer_config.json").is_file() or (adapter / "tokenizer.json").is_file()
    source = str(adapter) if is_beside else model_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot load a tokenizer from {adapter} or {model_path}: {error}") from error
    largest_id = max(tokenizer.get_vocab().values())
    if largest_id >= vocab_size:
        raise ModelError(
            f"the base needs at least {largest_id + 1} token embeddings (tokenizer of {source}), "
            f"got {vocab_size}: {model_path}"
        )
    return tokenizer


def put_adapter_on(model: Any, config: Any, adapter: Path, model_path: str) -> Any:
    """Put the adapter on the base; every weight of one must have its place in the other."""
    try:
        model = PeftModelForCausalLM(model, config)
        # PeftModel.from_pretrained makes the same two calls but drops the list of unexpected keys.
        result = model.load_adapter(str(adapter), "default")
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"the adapter does not fit {model_path}: {error} ({adapter})") from error
    misfits = [*result.missing_keys, *result.unexpected_keys]
    if misfits:
        raise ModelError(
            f"the adapter does not fit {model_path}: {len(misfits)} weights of one have no place "
            f"in the other, such as {misfits[0]} ({adapter})"
        )
    return model.eval()
