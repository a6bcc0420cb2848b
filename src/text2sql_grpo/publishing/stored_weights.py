"""Weights of a model folder, read and written one tensor at a time.

At most one written file's worth of tensors is in memory, whatever the size of the model.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE, SAFETENSORS_SINGLE_FILE
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
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

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

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

    def outline(self, name: str) -> torch.Tensor:
        """Return a tensor on `meta` of the stored shape."""
        with safe_open(self._file_of[name], framework="pt") as tensors:
            return torch.empty(tensors.get_slice(name).get_shape(), device="meta")

    def _read(self, name: str) -> torch.Tensor:
        with safe_open(self._file_of[name], framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
        return tensor

    def _file(self, name: str, *, is_needed: bool = True) -> Any:
        found = cached_file(self._path, name, _raise_exceptions_for_missing_entries=False)
        if found is None and is_needed:
            raise ModelError(f"no weights as safetensors: {name} is missing ({self._path})")
        return found and Path(found)


@dataclass(frozen=True)
class _Group:
    """Stored tensors that transformers converts together.

    Attributes:
        name: Name of the first weight that they become in the model.
        converter: Makes weights of the model from them; None if there is one, perhaps under another name.
        stored: Stored names, each with the pattern of the converter that it matched.
        names: Names of all weights that they become.
    """

    name: str
    converter: WeightConverter | None
    stored: list[tuple[str, str | None]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


class ModelWeights:
    """Weights of a model folder by their names in the model.

    transformers stores some models otherwise than it runs them: experts one by one that are fused in the
    model, or language models beside others under names of their own. Its conversions are applied to a few
    tensors at a time.

    Args:
        model: Model of the folder's config; its weights are not read.
        path: Folder or Hub id.

    Raises:
        ModelError: Weights of the model are missing there.
    """

    def __init__(self, model: PreTrainedModel, path: str) -> None:
        self._model, self._stored = model, StoredWeights(path)
        self._last: tuple[_Group | None, dict[str, torch.Tensor]] = (None, {})
        known, tied = model.state_dict(), model.all_tied_weights_keys
        conversions = get_model_conversion_mapping(model)
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        groups: dict[str, _Group] = {}
        for key in sorted(self._stored, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
            if name not in known and key in known:
                name, pattern = key, None
            if name in known and name not in tied:
                converter = None if pattern is None else by_pattern[pattern]
                groups.setdefault(name, _Group(name, converter)).stored.append((key, pattern))
        # Read by `revert_weight_conversion`; set here as transformers does when it loads a model.
        model._weight_conversions = [each for each in conversions if each.was_used()]
        for group in groups.values():
            group.names.extend(self._converted(group, self._stored.outline))
        self._group_of = {name: group for group in groups.values() for name in group.names}
        self._group_of_stored = {key: group for group in groups.values() for key, _ in group.stored}
        if missing := sorted(known.keys() - tied.keys() - self._group_of.keys()):
            raise ModelError(f"weights are missing: {missing[:3]} ({path})")

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read one weight of the model in its stored type, or dequantised."""
        group = self._group_of[name]
        if group.converter is None:
            return self._stored[group.stored[0][0]]
        if self._last[0] is not group:  # kept, as its other weights are asked for next
            self._last = group, self._converted(group, self._stored.__getitem__)
        return self._last[1][name]

    def outlines(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return tensors on `meta` of the model's weights, by the names to store them under."""
        shapes = {name: each.shape for name, each in self._model.state_dict().items()}
        fetch = self.stored_by(lambda name: torch.empty(shapes[name], dtype=dtype, device="meta"))
        return {key: fetch(key) for key in self._group_of_stored}

    def stored_by(self, fetch: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
        """Return a function of a stored name, for one of a name in the model."""
        last: tuple[_Group | None, dict[str, torch.Tensor]] = (None, {})

        def stored(key: str) -> torch.Tensor:
            nonlocal last
            group = self._group_of_stored[key]
            if group.names == [key]:
                return fetch(key)
            if last[0] is not group:
                weights = {name: fetch(name) for name in group.names}
                last = group, revert_weight_conversion(self._model, weights)
            if key not in last[1]:
                raise ModelError(f"transformers cannot store {group.names[0]} as {key}, which was read")
            return last[1][key]

        return stored

    def _converted(self, group: _Group, fetch: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weights of the model by name, converted from the stored tensors that `fetch` returns."""
        if group.converter is None:
            return {group.name: fetch(group.stored[0][0])}
        converter = deepcopy(group.converter)
        for key, pattern in group.stored:
            converter.add_tensor(group.name, key, pattern, fetch(key))
        found = converter.convert(group.name, model=self._model, config=self._model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in found.items()}


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
