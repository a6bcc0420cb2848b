"""Weights of a model folder, read and written one tensor at a time.

At most one written file's worth of tensors is in memory, whatever the size of the model.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE, SAFETENSORS_SINGLE_FILE
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils.hub import cached_file

from text2sql_grpo.errors import ModelError, needs_extra
from text2sql_grpo.files import read_json, write_json

_PACKED = ".absmax"  # suffix of the state of a weight that bitsandbytes stored in 4 bits
_MAX_FILE_BYTES = 2 << 30


class StoredWeights:
    """Tensors of a model folder or Hub id by name; 4-bit ones of bitsandbytes are read dequantised.

    Raises:
        ModelError: No safetensors there.
    """

    def __init__(self, model_path: str) -> None:
        self._path = model_path
        index = self._file(SAFETENSORS_INDEX_FILE, is_needed=False)
        names = sorted(set(read_json(index)["weight_map"].values())) if index else [SAFETENSORS_SINGLE_FILE]
        self._file_of: dict[str, Path] = {}
        for file in map(self._file, names):
            with safe_open(file, framework="pt") as tensors:
                self._file_of |= dict.fromkeys(tensors.keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read one tensor in its stored type, or dequantised."""
        tensor = self._read(name)
        if name + _PACKED not in self._file_of:
            return tensor
        with needs_extra("bitsandbytes", "reading 4-bit weights"):
            from bitsandbytes.functional import QuantState, dequantize_4bit

        parts = {part: self._read(part) for part in self._file_of if part.startswith(f"{name}.")}
        weight: torch.Tensor = dequantize_4bit(tensor, QuantState.from_dict(parts, torch.device("cpu")))
        return weight

    def _read(self, name: str) -> torch.Tensor:
        with safe_open(self._file_of[name], framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
        return tensor

    def _file(self, name: str, *, is_needed: bool = True) -> Any:
        found = cached_file(self._path, name, _raise_exceptions_for_missing_entries=False)
        if found is None and is_needed:
            raise ModelError(f"no weights as safetensors: {name} is missing ({self._path})")
        return found and Path(found)


def to_four_bits_and_back(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round a weight like 4-bit training does (NF4, double quantisation, from `dtype`)."""
    with needs_extra("bitsandbytes", "merging into 4-bit weights"):
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(weight.to(dtype), compress_statistics=True, quant_type="nf4")
    back: torch.Tensor = dequantize_4bit(packed, state)
    return back


def write_weights(
    folder: Path, outlines: Mapping[str, torch.Tensor], weight: Callable[[str], torch.Tensor]
) -> None:
    """Write and read back safetensors, in several files with an index if one would be over 2 GiB.

    Args:
        outlines: Tensors by name, on `meta`: their shapes and the type to write.
        weight: Returns the tensor of a name; one file's worth of them is in memory.

    Raises:
        ModelError: The files differ when read back.
    """
    split = split_torch_state_dict_into_shards(dict(outlines), max_shard_size=_MAX_FILE_BYTES)
    for file, names in split.filename_to_tensors.items():
        tensors = {name: weight(name).to(outlines[name].dtype).contiguous() for name in names}
        path = folder / file
        save_file(tensors, path, metadata={"format": "pt"})
        with safe_open(path, framework="pt") as written:
            for name, tensor in tensors.items():
                # As bytes, so that NaN equals itself.
                if not torch.equal(_bytes(written.get_tensor(name)), _bytes(tensor)):
                    raise ModelError(f"{name} differs when read back: {folder / file}; check the disk")
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / SAFETENSORS_INDEX_FILE, index)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
