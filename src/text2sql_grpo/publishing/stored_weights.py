"""The weights of a model folder, read and written one tensor at a time.

Whatever the size of the model, at most one written file's worth of tensors is in memory.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE, SAFETENSORS_SINGLE_FILE
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils.hub import cached_file

from text2sql_grpo.errors import ModelError

_PACKED = ".absmax"  # stands beside a weight that bitsandbytes stored in 4 bits
_MAX_FILE_BYTES = 2 << 30


class StoredWeights:
    """Tensors of a model folder or Hub id by name; 4-bit ones of bitsandbytes are read dequantised.

    Raises:
        ModelError: No safetensors there.
    """

    def __init__(self, model_path: str) -> None:
        self._path = model_path
        files = [self._file(name) for name in self._file_names()]
        self._file_of: dict[str, Path] = {}
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                self._file_of |= dict.fromkeys(tensors.keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> torch.Tensor:
        """One tensor in its stored type, or as dequantised."""
        tensor = self._read(name)
        if name + _PACKED not in self._file_of:
            return tensor
        from bitsandbytes.functional import QuantState, dequantize_4bit

        parts = {part: self._read(part) for part in self._file_of if part.startswith(f"{name}.")}
        weight: torch.Tensor = dequantize_4bit(tensor, QuantState.from_dict(parts, torch.device("cpu")))
        return weight

    def _read(self, name: str) -> torch.Tensor:
        with safe_open(self._file_of[name], framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
        return tensor

    def _file_names(self) -> list[str]:
        index = self._file(SAFETENSORS_INDEX_FILE, is_needed=False)
        if index is None:
            return [SAFETENSORS_SINGLE_FILE]
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))

    def _file(self, name: str, *, is_needed: bool = True) -> Any:
        found = cached_file(self._path, name, _raise_exceptions_for_missing_entries=False)
        if found is None and is_needed:
            raise ModelError(f"expected weights as safetensors, got no {name}: {self._path}")
        return found and Path(found)


def to_four_bits_and_back(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight as training sees it that loads it in 4 bits (NF4, double quantisation) from `dtype`."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(weight.to(dtype), compress_statistics=True, quant_type="nf4")
    back: torch.Tensor = dequantize_4bit(packed, state)
    return back


def write_weights(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Writes named tensors as safetensors, in several files with an index if one would be over 2 GiB.

    Each file is read back.

    Raises:
        ModelError: What was read back differs.
    """
    parts: list[list[str]] = []
    waiting: dict[str, torch.Tensor] = {}
    total = 0
    for name, tensor in tensors:
        size = tensor.nbytes
        if waiting and sum(t.nbytes for t in waiting.values()) + size > _MAX_FILE_BYTES:
            parts.append(_write_part(folder, len(parts), waiting))
            waiting = {}
        waiting[name] = tensor.contiguous()
        total += size
    parts.append(_write_part(folder, len(parts), waiting))
    if len(parts) == 1:
        _part(folder, 0).rename(folder / SAFETENSORS_SINGLE_FILE)
        return
    file_of: dict[str, str] = {}
    for number, names in enumerate(parts):
        file = f"model-{number + 1:05}-of-{len(parts):05}.safetensors"
        _part(folder, number).rename(folder / file)
        file_of |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (folder / SAFETENSORS_INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number}.safetensors"


def _write_part(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> list[str]:
    file = _part(folder, number)
    save_file(tensors, file, metadata={"format": "pt"})
    with safe_open(file, framework="pt") as written:
        for name, tensor in tensors.items():
            # As bytes, so that NaN equals itself.
            if not torch.equal(_bytes(written.get_tensor(name)), _bytes(tensor)):
                raise ModelError(f"expected {name} as it was written, read something else: {file}")
    return list(tensors)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
