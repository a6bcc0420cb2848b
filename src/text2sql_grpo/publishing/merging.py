"""Merge of a LoRA adapter into its base, with a check of the logits, into a plain model folder.

Weights are read, merged in float32, cast and written one after another, so that a model of any size takes the
memory of its largest layer and one file. (Merging in bfloat16 would move the logits by about 6e-3, merging in
float32 moves them by less than 1e-6.) An adapter that was trained on 4-bit weights is merged into those,
dequantised, not into the original weights. Nothing appears at the target path before it was checked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from transformers import AutoTokenizer
from transformers.quantizers.base import get_keys_to_not_convert

from text2sql_grpo.errors import DataError, ModelError
from text2sql_grpo.files import draft
from text2sql_grpo.models.loaded_policy import base_of
from text2sql_grpo.models.sources import model_folder
from text2sql_grpo.publishing.merge_sources import (
    Quantization,
    dtype_before_rounding,
    dtype_to_write,
    load_tokenizer,
    put_adapter_on,
    read_adapter_config,
    read_generation_config,
    read_model_config,
)
from text2sql_grpo.publishing.stored_weights import ModelWeights, to_four_bits_and_back, write_weights
from text2sql_grpo.publishing.streamed_model import Fetch, base_name, filled, hollow_model, streamed_logits

_PROBE_TEXT = "SELECT name, café FROM t WHERE x >= 1.5 AND y = 'O''Brien';\n"


@dataclass(frozen=True)
class MergeReport:
    """Summary of a merge, with the largest change of a logit at each step.

    Attributes:
        source: The adapter folder, or the folder of a fully trained model.
        base: Path of the base; None for a fully trained model.
        out: The written folder.
        dtype: Type of the written weights.
        num_parameters: Number of weights in the merged model.
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
    tolerance: float = 1e-4,
) -> MergeReport:
    """Merge an adapter; `out` then holds weights, tokenizer, chat template and generation config.

    A folder with a full model instead of an adapter is handled alike: cast, written, read again.
    An earlier merged model at `out` is replaced once the new one is complete.

    Args:
        out: Folder to write; missing parents are made.
        base: Folder or Hub id of the base; None takes the one named by the adapter.
        dtype: `float32`, `bfloat16`, `float16`, or `auto` for the stored type of the base.
        quantization: Quantization of the base in training; `auto` reads it from the `config.yaml` beside the
            adapter, and is `none` without one.
        tolerance: Maximum change of a logit; scaled by the largest logit if that is over 1.

    Raises:
        ModelError: Adapter or base missing, broken, or not made for each other; the merged or the
            written model answers differently; `out` holds something else or cannot be written.
    """
    is_adapter = (adapter / "adapter_config.json").is_file()
    if not is_adapter and not (adapter / "config.json").is_file():
        raise ModelError(
            f"nothing to merge: neither adapter_config.json nor a full model's config.json in {adapter}"
        )
    if not is_adapter and base is not None:
        raise ModelError(f"a base ({base}) needs an adapter, got a full model: {adapter}")
    _check_out(out, adapter)

    peft_config = read_adapter_config(adapter) if is_adapter else None
    model_path = base or (base_of(peft_config.to_dict()) if peft_config else str(adapter))
    if not model_path:
        raise ModelError(f"the adapter does not name its base; give --base: {adapter}")
    named, model_path = model_path, model_folder(model_path)
    config = read_model_config(model_path)
    target_dtype = dtype_to_write(dtype, config)
    quantized_from = dtype_before_rounding(adapter, quantization, config) if is_adapter else None
    plain = hollow_model(config)
    tokenizer = load_tokenizer(adapter, model_path, vocab_size=_vocab_size(plain))
    token_ids = torch.randint(_vocab_size(plain), (2, 16), generator=torch.Generator().manual_seed(0))

    weights = _read_weights(plain, model_path)
    fetch = merged = _base_weights(plain, weights, model_path, quantized_from)
    if peft_config:
        adapted = put_adapter_on(hollow_model(config), peft_config, adapter, model_path)
        expected = streamed_logits(adapted, token_ids, fetch)
        merged = _merged_weights(adapted, fetch, adapter)
    logits = streamed_logits(plain, token_ids, merged)
    merge_difference = (
        _checked_difference(expected, logits, tolerance, f"merged model of {adapter}") if peft_config else 0.0
    )

    config.dtype = target_dtype
    config.architectures = [type(plain).__name__]
    with _complete_folder(out) as folder:
        write_weights(folder, weights.outlines(target_dtype), weights.stored_by(merged))
        config.save_pretrained(folder)
        read_generation_config(model_path, plain).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        reread = _base_weights(plain, _read_weights(plain, str(folder)), str(folder), None)
        written = streamed_logits(plain, token_ids, reread)
        if target_dtype == torch.float32:
            _checked_difference(logits, written, tolerance, f"model written to {out}")
        _check_same_tokenizer(tokenizer, folder)
    return MergeReport(
        source=adapter,
        base=named if is_adapter else None,
        out=out,
        dtype=str(target_dtype).removeprefix("torch."),
        num_parameters=plain.num_parameters(),
        is_four_bit=quantized_from is not None,
        merge_difference=merge_difference,
        cast_difference=(logits - written).abs().max().item(),
    )


def _read_weights(model: Any, model_path: str) -> ModelWeights:
    try:
        return ModelWeights(model, model_path)
    except (OSError, DataError, KeyError, SafetensorError) as error:
        raise ModelError(f"cannot load the model: {error} ({model_path})") from error


def _base_weights(
    model: Any, stored: ModelWeights, model_path: str, quantized_from: torch.dtype | None
) -> Fetch:
    """Weights of the base by their names in the model, equal to those in training.

    Those of linear layers are rounded to 4 bits, from the type `quantized_from`, if it is given.
    """
    tied = model.all_tied_weights_keys
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    kept = get_keys_to_not_convert(model)
    rounded = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not any(name.endswith(key) for key in kept)
    }

    def fetch(name: str) -> torch.Tensor:
        weight = stored[tied.get(name, name)]
        if weight.shape != shapes[name]:
            raise ModelError(
                f"{name} must have shape {tuple(shapes[name])}, got {tuple(weight.shape)}: {model_path}"
            )
        if quantized_from is not None and name in rounded:
            weight = to_four_bits_and_back(weight, quantized_from)
        return weight.float()

    return fetch


def _merged_weights(adapted: Any, fetch: Fetch, adapter: Path) -> Fetch:
    """Weights with the adapter merged into them, by PEFT."""
    layers = {
        base_name(name): module for name, module in adapted.named_modules() if isinstance(module, LoraLayer)
    }

    def merged(name: str) -> torch.Tensor:
        module_name, _, own = name.rpartition(".")
        layer = layers.get(module_name)
        if layer is None:
            return fetch(name)
        base = layer.get_base_layer()
        with filled(base, module_name, fetch):
            try:
                layer.merge(safe_merge=True)
            except ValueError as error:
                raise ModelError(f"cannot merge the adapter weights: {error} ({adapter})") from error
            layer.merged_adapters.clear()
            weight: torch.Tensor = base.get_parameter(own).detach()
        return weight

    return merged


def _check_out(out: Path, source: Path) -> None:
    if out.resolve() == source.resolve():
        raise ModelError(f"cannot write to the folder that is read: {out}; choose another folder")
    if out.exists() and not out.is_dir():
        raise ModelError(f"cannot write to a file: {out}; choose a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / "config.json").is_file():
        raise ModelError(f"the folder holds other files than a merged model: {out}; choose a new folder")


def _vocab_size(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _checked_difference(expected: torch.Tensor, got: torch.Tensor, tolerance: float, what: str) -> float:
    difference = (expected - got).abs().max().item()
    limit = tolerance * max(1.0, expected.abs().max().item())
    if not difference <= limit:  # also catches NaN
        raise ModelError(f"logits differ by {difference:.1e}, more than {limit:.1e}: {what}")
    return difference


def _check_same_tokenizer(tokenizer: Any, folder: Path) -> None:
    reloaded = AutoTokenizer.from_pretrained(str(folder))
    same_ids = reloaded(_PROBE_TEXT)["input_ids"] == tokenizer(_PROBE_TEXT)["input_ids"]
    if not same_ids or reloaded.chat_template != tokenizer.chat_template:
        raise ModelError(
            f"the saved tokenizer encodes the probe text differently from {tokenizer.name_or_path}"
        )


@contextmanager
def _complete_folder(out: Path) -> Iterator[Path]:
    """Folder beside `out` that replaces it when the block ends, or is removed after an error."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with draft(out) as scratch:
            scratch.mkdir()
            yield scratch
    except (OSError, SafetensorError) as error:
        raise ModelError(f"could not write the merged model; no part is left: {error} ({out})") from error
