"""Merge of a LoRA adapter into its base by PEFT, with a check of the logits, into a plain model folder.

The base is merged in float32. That moves the logits of a small model by less than 1e-6 of the largest, and
the logits of Qwen2.5-0.5B after a long training by 2e-4 (in bfloat16 by about 6e-3). An adapter that was
trained on 4-bit weights is merged into those, dequantised, not into the original weights. Nothing appears
at the target path before it was checked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftConfig, PeftType
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedConfig

from text2sql_grpo.errors import ModelError
from text2sql_grpo.files import draft
from text2sql_grpo.models.hardware import check_fits
from text2sql_grpo.models.loaded_policy import (
    base_of,
    check_saved_tokenizer,
    four_bit_obstacle,
    with_saved_adapter,
)
from text2sql_grpo.models.sources import model_folder
from text2sql_grpo.run_folder import read_settings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Quantization = Literal["auto", "none", "4bit"]
TOLERANCE = 1e-3  # largest change of a logit; times the largest logit if that is over 1
_OF_A_CHECKPOINT = ("trainer_state.json", "manifest.json")


@dataclass(frozen=True)
class MergeReport:
    """Summary of a merge, with the largest change of a logit at each step.

    Attributes:
        source: The adapter folder, or the folder of a fully trained model.
        base: Path of the base; None for a fully trained model.
        dtype: Type of the written weights.
        is_four_bit: True if the adapter was merged into dequantised 4-bit weights.
        merge_difference: Adapter on its base against the merged model, both float32.
        cast_difference: Merged float32 weights against the written ones, read again.
    """

    source: Path
    base: str | None
    out: Path
    dtype: str
    num_parameters: int
    is_four_bit: bool
    merge_difference: float
    cast_difference: float

    def __str__(self) -> str:
        how = " in 4 bits, dequantised" if self.is_four_bit else ""
        origin = f"{self.source} on {self.base}{how}" if self.base else f"{self.source} (a full model)"
        return (
            f"merged {origin}\n  into {self.out}: {self.num_parameters:,} parameters, {self.dtype}\n"
            f"  largest change of a logit: merging {self.merge_difference:.1e}, "
            f"casting and reading again {self.cast_difference:.1e}"
        )


def merge_adapter(
    adapter: Path,
    out: Path,
    *,
    base: str | None = None,
    dtype: str = "auto",
    quantization: Quantization = "auto",
) -> MergeReport:
    """Merge an adapter; `out` then holds weights, tokenizer, chat template and generation config.

    A folder with a full model instead of an adapter is cast, written and read again. An earlier merged model
    at `out` is replaced once the new one is complete. The model must fit into main memory in float32.

    Args:
        out: Folder to write; missing parents are made.
        base: Folder or Hub id of the base; None takes the one named by the adapter.
        dtype: `float32`, `bfloat16`, `float16`, or `auto` for the stored type of the base.
        quantization: Quantization of the base in training; `auto` reads it from the `config.yaml` next to the
            adapter, and is `none` without one.

    Raises:
        ModelError: Adapter or base missing, broken, larger than the free memory, or not made for each other;
            the merged or the written model answers differently; `out` holds something else or is read-only.
        DataError: The `config.yaml` next to the adapter is not a YAML mapping.
    """
    is_adapter = (adapter / "adapter_config.json").is_file()
    if not is_adapter and not (adapter / "config.json").is_file():
        raise ModelError(
            f"nothing to merge: neither adapter_config.json nor a full model's config.json in {adapter}"
        )
    if not is_adapter and base is not None:
        raise ModelError(f"a base ({base}) needs an adapter, got a full model: {adapter}")
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    _check_out(out, adapter)
    lora = _adapter_config(adapter) if is_adapter else None
    named = base or (base_of(lora.to_dict()) if lora else str(adapter))
    if not named:
        raise ModelError(f"the adapter does not name its base; give --base: {adapter}")
    model_path = model_folder(named)
    _check_out(out, Path(model_path))
    config = _model_config(model_path)
    target_dtype = DTYPES[dtype] if dtype != "auto" else (config.dtype or torch.float32)
    rounded_from = _dtype_before_rounding(adapter, quantization, config) if is_adapter else None

    model = _read_model(model_path, config, rounded_from)
    vocab_size = model.get_input_embeddings().num_embeddings
    tokenizer = _load_tokenizer(adapter, model_path, vocab_size)
    token_ids = torch.randint(vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    adapted_logits = None
    if lora:
        with _model_error(f"the adapter {adapter} does not fit {model_path}"):
            adapted: Any = with_saved_adapter(model, adapter, model_path).eval()
        adapted_logits = _logits(adapted, token_ids)
        with _model_error(f"cannot merge the adapter weights of {adapter}"):
            model = adapted.merge_and_unload(safe_merge=True)
        del adapted
    merged, num_parameters = _logits(model, token_ids), model.num_parameters()
    merge_difference = 0.0
    if adapted_logits is not None:
        what = f"merged model of {adapter}"
        merge_difference = _checked_difference(adapted_logits, merged, what)

    with _model_error(f"cannot write the merged model to {out}, no part is left"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with draft(out) as folder:
            _cast(model, target_dtype)
            # transformers cannot pack weights again: those of a packed base keep their names in the model.
            is_packed = getattr(config, "quantization_config", None) is not None
            model.save_pretrained(folder, max_shard_size="5GB", save_original_format=not is_packed)
            tokenizer.save_pretrained(folder)
            _cast(model, torch.float32)
            cast = _logits(model, token_ids)
            del model  # frees its memory for the written one
            written = _logits(_read_model(str(folder), _model_config(str(folder)), None), token_ids)
            _checked_difference(cast, written, f"model written to {out}")
            check_saved_tokenizer(tokenizer, folder, tokenizer.name_or_path)
    return MergeReport(
        source=adapter,
        base=named if is_adapter else None,
        out=out,
        dtype=str(target_dtype).removeprefix("torch."),
        num_parameters=num_parameters,
        is_four_bit=rounded_from is not None,
        merge_difference=merge_difference,
        cast_difference=(merged - written).abs().max().item(),
    )


@contextmanager
def _model_error(failure: str) -> Iterator[None]:
    """Turn an error of transformers, PEFT or the disk into a ModelError that begins with `failure`."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{failure}: {error}") from error


def _check_out(out: Path, source: Path) -> None:
    if out.exists() and source.resolve().is_relative_to(out.resolve()):
        raise ModelError(f"cannot write to the folder that is read: {out}; choose another folder")
    if out.exists() and not out.is_dir():
        raise ModelError(f"cannot write to a file: {out}; choose a folder")
    is_model = (out / "config.json").is_file() and not any((out / name).exists() for name in _OF_A_CHECKPOINT)
    if out.is_dir() and any(out.iterdir()) and not is_model:
        raise ModelError(f"the folder holds other files than a merged model: {out}; choose a new folder")


def _adapter_config(adapter: Path) -> Any:
    with _model_error(f"cannot read adapter_config.json of {adapter}"):
        config = PeftConfig.from_pretrained(str(adapter))
    if config.peft_type != PeftType.LORA:
        raise ModelError(f"the adapter must be LoRA, got {config.peft_type}: {adapter}")
    return config


def _model_config(model_path: str) -> PreTrainedConfig:
    with _model_error(f"cannot read the base {model_path!r}, name a model folder or Hub id"):
        config = AutoConfig.from_pretrained(model_path)
    quantized = getattr(config, "quantization_config", None)
    if quantized and (quantized.get("quant_method") != "bitsandbytes" or not quantized.get("load_in_4bit")):
        raise ModelError(
            f"cannot merge into a base quantized by {quantized.get('quant_method')}, only into 4 bits of "
            f"bitsandbytes; give the original as --base: {model_path}"
        )
    return config


def _dtype_before_rounding(
    adapter: Path, quantization: Quantization, config: PreTrainedConfig
) -> torch.dtype | None:
    """Type from which the base was rounded to 4 bits in training; None if it was not."""
    model = read_settings(adapter.resolve().parent).get("model") or {}
    if quantization == "auto":
        quantization = model.get("quantization", "none")
    return DTYPES.get(str(model.get("dtype")), config.dtype) if quantization == "4bit" else None


def _read_model(model_path: str, config: PreTrainedConfig, rounded_from: torch.dtype | None) -> Any:
    """Model in float32 on the CPU.

    Args:
        rounded_from: Type from which linear layers are rounded to NF4, as in training; None keeps them.
    """
    is_packed = getattr(config, "quantization_config", None) is not None
    options: dict[str, Any] = {"dtype": rounded_from or torch.float32}
    if rounded_from is not None and not is_packed:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
    is_four_bit = rounded_from is not None or is_packed
    if is_four_bit and (reason := four_bit_obstacle("cpu")):
        raise ModelError(f"cannot read 4-bit weights: {reason} ({model_path})")
    with _model_error(f"cannot load the model {model_path}"):
        check_fits(model_path, config, dtype="float32", device="cpu")
        model, loaded = AutoModelForCausalLM.from_pretrained(
            model_path, output_loading_info=True, device_map="cpu", **options
        )
        if is_four_bit:
            model = model.dequantize(dtype=torch.float32).float()
    if missing := sorted(loaded["missing_keys"]):
        raise ModelError(f"weights are missing: {missing[:3]} ({model_path})")
    return model.eval()


def _load_tokenizer(adapter: Path, model_path: str, vocab_size: int) -> Any:
    """Load the tokenizer next to the adapter, else the base's; refused if the base has too few embeddings."""
    is_beside = (adapter / "tokenizer_config.json").is_file() or (adapter / "tokenizer.json").is_file()
    source = str(adapter) if is_beside else model_path
    with _model_error(f"cannot load a tokenizer from {adapter} or {model_path}"):
        tokenizer = AutoTokenizer.from_pretrained(source)
    largest_id = max(tokenizer.get_vocab().values())
    if largest_id >= vocab_size:
        raise ModelError(
            f"the base needs at least {largest_id + 1} token embeddings (tokenizer of {source}), "
            f"got {vocab_size}: {model_path}"
        )
    return tokenizer


@torch.no_grad()
def _logits(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=token_ids, use_cache=False).logits
    return logits


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights, one after another; `Module.to` would round buffers too, such as those of RoPE."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)


def _checked_difference(expected: torch.Tensor, got: torch.Tensor, what: str) -> float:
    difference = (expected - got).abs().max().item()
    limit = TOLERANCE * max(1.0, expected.abs().max().item())
    if not difference <= limit:  # also catches NaN
        raise ModelError(f"logits differ by {difference:.1e}, more than {limit:.1e}: {what}")
    return difference
