"""Merge a LoRA adapter into its base, check that the answers stay the same, write a plain model folder.

Everything is computed in float32 on the CPU and cast only when written: merging in bfloat16 moves the
logits by about 6e-3, merging in float32 by less than 1e-6. Nothing appears at the target path before the
written folder was loaded again and agreed.
"""

import gc
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModelForCausalLM, PeftType
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from text2sql_grpo.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PROBE_TEXT = "SELECT name, café FROM t WHERE x >= 1.5 AND y = 'O''Brien';\n"


@dataclass(frozen=True)
class MergeReport:
    """What was merged, and by how much the largest logit moved at each step.

    Attributes:
        source: The adapter folder, or the folder of a fully trained model.
        base: Where the base was loaded from; None for a fully trained model.
        out: The folder written.
        dtype: Type of the written weights.
        num_parameters: Weights in the merged model.
        merge_difference: Adapter on its base against the merged model, both float32.
        cast_difference: Merged float32 weights against the same weights rounded to `dtype`.
        reload_difference: Rounded weights in memory against the written folder, loaded again.
    """

    source: Path
    base: str | None
    out: Path
    dtype: str
    num_parameters: int
    merge_difference: float
    cast_difference: float
    reload_difference: float

    def __str__(self) -> str:
        origin = f"{self.source} on {self.base}" if self.base else f"{self.source} (a full model)"
        return (
            f"merged {origin}\n  into {self.out}: {self.num_parameters:,} parameters, {self.dtype}\n"
            f"  largest change of a logit: merging {self.merge_difference:.1e}, "
            f"casting {self.cast_difference:.1e}, writing and reloading {self.reload_difference:.1e}"
        )


def merge_adapter(
    adapter: Path, out: Path, *, base: str | None = None, dtype: str = "auto", tolerance: float = 1e-4
) -> MergeReport:
    """Report of one merge; `out` then holds weights, tokenizer, chat template and generation config.

    A folder that holds a full model instead of an adapter takes the same way: cast, written, reloaded.
    An earlier merged model at `out` is replaced, but only once the new one is complete.

    Args:
        adapter: Folder with `adapter_config.json`, or with the `config.json` of a full model.
        out: Folder to write; any missing parent is made.
        base: Folder or Hub id of the base; None takes the one named by the adapter.
        dtype: `float32`, `bfloat16`, `float16`, or `auto` for the type the base is stored in.
        tolerance: Largest change of a logit that passes; scaled by the largest logit where that is over 1.

    Raises:
        ModelError: Adapter or base missing, broken, or not made for each other; the merged or the
            reloaded model answers differently; `out` holds something else or cannot be written.
    """
    is_adapter = (adapter / "adapter_config.json").is_file()
    if not is_adapter and not (adapter / "config.json").is_file():
        raise ModelError(
            f"expected adapter_config.json or a full model's config.json, got neither: {adapter}"
        )
    if not is_adapter and base is not None:
        raise ModelError(f"expected an adapter to put on base {base}, got a full model: {adapter}")
    _check_out(out, adapter)

    peft_config = _read_adapter_config(adapter) if is_adapter else None
    model_path = base or (peft_config.base_model_name_or_path if peft_config else str(adapter))
    if not model_path:
        raise ModelError(f"expected the adapter to name its base, got none; give --base: {adapter}")
    target_dtype = _target_dtype(dtype, model_path)
    model = _load_float32(model_path)
    tokenizer = _load_tokenizer(adapter, model_path, vocab_size=_vocab_size(model))
    token_ids = torch.randint(_vocab_size(model), (2, 16), generator=torch.Generator().manual_seed(0))

    if peft_config:
        model = _put_adapter_on(model, peft_config, adapter, model_path)
        expected = _logits(model, token_ids)
        try:
            model = model.merge_and_unload(safe_merge=True)
        except ValueError as error:
            raise ModelError(f"expected finite adapter weights: {error} ({adapter})") from error
        logits = _logits(model, token_ids)
        merge_difference = _checked_difference(expected, logits, tolerance, f"merged model of {adapter}")
    else:
        logits = _logits(model, token_ids)
        merge_difference = 0.0

    with _complete_folder(out) as folder:
        _round_parameters(model, target_dtype)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _round_parameters(model, torch.float32)
        rounded = _logits(model, token_ids)
        num_parameters = model.num_parameters()
        del model
        gc.collect()
        reloaded = _logits(_load_float32(str(folder)), token_ids)
        reload_difference = _checked_difference(rounded, reloaded, tolerance, f"model reloaded from {out}")
        _check_same_tokenizer(tokenizer, folder)
    return MergeReport(
        source=adapter,
        base=model_path if is_adapter else None,
        out=out,
        dtype=str(target_dtype).removeprefix("torch."),
        num_parameters=num_parameters,
        merge_difference=merge_difference,
        cast_difference=(logits - rounded).abs().max().item(),
        reload_difference=reload_difference,
    )


def _check_out(out: Path, source: Path) -> None:
    if out.resolve() == source.resolve():
        raise ModelError(f"expected another folder to write to than the one that is read: {out}")
    if out.exists() and not out.is_dir():
        raise ModelError(f"expected a folder to write to, got a file: {out}")
    if out.is_dir() and any(out.iterdir()) and not (out / "config.json").is_file():
        raise ModelError(f"expected a new folder or an earlier merged model, found other files: {out}")


def _read_adapter_config(adapter: Path) -> Any:
    try:
        config = PeftConfig.from_pretrained(str(adapter))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"expected a readable adapter_config.json: {error} ({adapter})") from error
    if config.peft_type != PeftType.LORA:
        raise ModelError(f"expected a LoRA adapter, got {config.peft_type}: {adapter}")
    config.inference_mode = True
    return config


def _target_dtype(dtype: str, model_path: str) -> torch.dtype:
    """The type to write; `auto` is the stored type of the base, float32 where its config is silent."""
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    try:
        config = AutoConfig.from_pretrained(model_path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"expected a model folder or Hub id as base, got {model_path!r}: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"expected a base that is not quantized; give the original as --base: {model_path}")
    return DTYPES[dtype] if dtype != "auto" else (config.dtype or torch.float32)


def _load_float32(model_path: str) -> Any:
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"expected a loadable model: {error} ({model_path})") from error
    if info["missing_keys"]:
        raise ModelError(f"expected all weights, missing {sorted(info['missing_keys'])[:3]}: {model_path}")
    return model.eval()


def _vocab_size(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _load_tokenizer(adapter: Path, model_path: str, *, vocab_size: int) -> Any:
    """The tokenizer beside the adapter, else the base's; refused if the base was not made for it."""
    is_beside = (adapter / "tokenizer_config.json").is_file() or (adapter / "tokenizer.json").is_file()
    source = str(adapter) if is_beside else model_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"expected a tokenizer in {adapter} or {model_path}: {error}") from error
    largest_id = max(tokenizer.get_vocab().values())
    if largest_id >= vocab_size:
        raise ModelError(
            f"expected a base with at least {largest_id + 1} token embeddings (tokenizer of {source}), "
            f"got {vocab_size}: {model_path}"
        )
    return tokenizer


def _put_adapter_on(model: Any, config: Any, adapter: Path, model_path: str) -> Any:
    """The base with the adapter on it; every weight of one must have its place in the other."""
    try:
        model = PeftModelForCausalLM(model, config)
        # PeftModel.from_pretrained makes the same two calls but drops the list of unexpected keys.
        result = model.load_adapter(str(adapter), "default")
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"expected an adapter made for {model_path}: {error} ({adapter})") from error
    misfits = [*result.missing_keys, *result.unexpected_keys]
    if misfits:
        raise ModelError(
            f"expected an adapter made for {model_path}: {len(misfits)} weights of one have no place "
            f"in the other, such as {misfits[0]} ({adapter})"
        )
    return model.eval()


@torch.no_grad()
def _logits(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=token_ids).logits
    return logits


def _checked_difference(expected: torch.Tensor, got: torch.Tensor, tolerance: float, what: str) -> float:
    difference = (expected - got).abs().max().item()
    limit = tolerance * max(1.0, expected.abs().max().item())
    if not difference <= limit:  # also catches NaN
        raise ModelError(f"expected equal logits within {limit:.1e}, differ by {difference:.1e}: {what}")
    return difference


def _round_parameters(model: Any, dtype: torch.dtype) -> None:
    """Cast the parameters alone: buffers such as the rotary frequencies stay float32, as after loading."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _check_same_tokenizer(tokenizer: Any, folder: Path) -> None:
    reloaded = AutoTokenizer.from_pretrained(str(folder))
    same_ids = reloaded(_PROBE_TEXT)["input_ids"] == tokenizer(_PROBE_TEXT)["input_ids"]
    if not same_ids or reloaded.chat_template != tokenizer.chat_template:
        raise ModelError(f"the written tokenizer reads otherwise than {tokenizer.name_or_path} did")


@contextmanager
def _complete_folder(out: Path) -> Iterator[Path]:
    """A scratch folder beside `out` that takes its place when the block ends well, else is removed."""
    scratch = out.parent / f".{out.name}.{os.getpid()}.partial"
    replaced = out.parent / f".{out.name}.{os.getpid()}.replaced"
    try:
        scratch.mkdir(parents=True)
        yield scratch
        if out.exists():
            out.rename(replaced)
        scratch.rename(out)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"could not write the merged model; no part is left: {error} ({out})") from error
    finally:
        if replaced.exists() and not out.exists():
            replaced.rename(out)
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
