"""GGUF files (llama.cpp's format) converted once to checked transformers folders in the cache."""

import copy
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import torch
import transformers
from filelock import FileLock
from tokenizers import pre_tokenizers
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from text2sql_grpo.data.databases import CACHE_VARIABLE, cache_folder
from text2sql_grpo.errors import DataError, ModelError
from text2sql_grpo.files import PARTIAL, draft, read_json, sha256, write_json
from text2sql_grpo.models.hardware import GIB
from text2sql_grpo.models.loaded_policy import check_saved_tokenizer
from text2sql_grpo.rollout.policy import machine_memory

logger = logging.getLogger(__name__)

_VERSION = 2  # of the conversion; a new one makes cached folders again
_MANIFEST = "manifest.json"
_ONE_MATRIX = 0.99  # mean cosine of the rows of two quantised copies; 0.999 in Qwen's Q4_K_M files
# `tokenizer.ggml.pre` of byte-level vocabularies that split numbers into digits before GPT-2's splitting
# (llama.cpp, src/llama-vocab.cpp); transformers knows only GPT-2's for them.
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def converted(gguf: Path) -> Path:
    """Folder with bfloat16 weights, tokenizer and chat template of a GGUF file, made on first use.

    It is cached under a hash of the file. A folder with a missing or changed file is made again. Several
    processes may call this at once: one converts, the others wait.

    Raises:
        ModelError: The file cannot be read or converted, or memory or disk space is too small.
    """
    try:
        digest = sha256(gguf)
    except OSError as error:
        raise ModelError(f"cannot read the GGUF file: {error} ({gguf})") from error
    folder = cache_folder("models") / f"{gguf.stem}-{digest[:16]}-v{_VERSION}"
    try:
        with FileLock(folder.parent / f".{folder.name}.lock"):
            if not _is_whole(folder):
                logger.info(f"Converting {gguf.name} to {folder}, once ...")
                with _parsed_once():
                    _convert(gguf.resolve(), folder)
    except OSError as error:
        raise ModelError(
            f"cannot write the converted model: {error} (at {folder}; set {CACHE_VARIABLE})"
        ) from error
    return folder


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Share one reader of the file and one map of its names, which take most of the time of a conversion.

    transformers opens the file for each of config, tokenizer and weights, and makes a map for each module.
    """
    plain = {name: getattr(library, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        library.GGUFReader = cache(_Reader)
        library.get_tensor_name_map = cache(library.get_tensor_name_map)
        yield
    finally:
        for name, function in plain.items():
            setattr(library, name, function)


class _Reader(library.GGUFReader):
    """Reader of plain arrays: slices of a memory map, taken a million times, each cost several times more."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, np.asarray(value) if name == "data" else value)


def _is_whole(folder: Path) -> bool:
    """True if every file is that of the manifest: hashed where its size or time is another one."""
    try:
        files = read_json(folder / _MANIFEST)
        return all(
            _stamp(folder / name) == [size, time] or sha256(folder / name) == digest
            for name, (size, time, digest) in files.items()
        )
    except (OSError, DataError, ValueError):
        return False


def _stamp(path: Path) -> list[int]:
    """Size and time of the last change of a file."""
    return [path.stat().st_size, path.stat().st_mtime_ns]


def _convert(gguf: Path, folder: Path) -> None:
    """Write `folder` atomically; its lock is held."""
    for left_over in folder.parent.glob(f".{folder.name}.*{PARTIAL}"):  # of a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    with draft(folder) as partial:
        partial.mkdir()
        pre_tokenizer = _check_header(gguf, partial)
        model, tokenizer = _read(gguf)
        split_numbers(tokenizer, pre_tokenizer, gguf)
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        _check_written(partial, model, tokenizer, gguf)
        files = {path.name: [*_stamp(path), sha256(path)] for path in sorted(partial.iterdir())}
        write_json(partial / _MANIFEST, files)


def _check_header(gguf: Path, folder: Path) -> str:
    """Check that memory and disk can hold the weights in float32; return the pre-tokenizer's name."""
    try:
        reader = library.GGUFReader(str(gguf))
        field = reader.get_field("tokenizer.ggml.pre")
        pre_tokenizer = "" if field is None else str(field.contents())
        size = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    except Exception as error:  # The parser checks little, so a damaged file raises anything.
        raise ModelError(f"cannot read the GGUF file: {_first_line(error)} ({gguf})") from error
    memory, disk = machine_memory(is_free=True), shutil.disk_usage(folder).free
    for place, free in (("memory", memory), ("disk space of the cache", disk)):
        if size > free:
            raise ModelError(
                f"too little {place} to convert the GGUF file: float32 weights take {size / GIB:.1f} GiB, "
                f"{free / GIB:.1f} are free ({gguf})"
            )
    return pre_tokenizer


def _read(gguf: Path) -> tuple[Any, Any]:
    """Read model, with dequantised weights in bfloat16, and tokenizer by transformers."""
    options: dict[str, Any] = {"gguf_file": gguf.name}
    packed = getattr(transformers, "GgufConfig", None)  # Else weights stay in 4 bits where a kernel is found.
    unpacked = {} if packed is None else {"quantization_config": packed(dequantize=True)}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **options)
        read = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), dtype=torch.float32, **options, **unpacked
        )
    except Exception as error:  # See `_check_header`.
        raise ModelError(
            f"transformers cannot read this GGUF file: {_first_line(error)} ({gguf}); "
            "give a file of a Llama-like model, or a folder or Hub id with safetensors"
        ) from error
    config = copy.deepcopy(read.config)
    for name in ("quantization_config", "_model_name_or_path", "unk_token_id"):
        if hasattr(config, name):
            delattr(config, name)
    if getattr(config, "rms_norm_eps", None):
        config.rms_norm_eps = float(str(np.float32(config.rms_norm_eps)))  # 1e-05, not 9.999999747378752e-06
    weights = read.state_dict()
    if _tie(weights, gguf):
        config.tie_word_embeddings = True
    # transformers refuses to save a model that was read from GGUF.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict({name: value.bfloat16() for name, value in weights.items()}, assign=True)
    model.tie_weights()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model.generation_config = GenerationConfig(**ids)
    for name in ("is_local", "local_files_only"):  # of this call, not of the tokenizer
        tokenizer.init_kwargs.pop(name, None)
    return model, tokenizer


def _tie(weights: dict[str, torch.Tensor], gguf: Path) -> bool:
    """True if embedding and head are one matrix; both then hold the more precise of its two copies.

    llama.cpp stores a tied matrix twice, in two types, when it quantises the head less.
    """
    names = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}
    bits = {
        tensor.name: tensor.n_bytes / tensor.n_elements for tensor in library.GGUFReader(str(gguf)).tensors
    }
    if not {*names} <= {*weights} or not {*names.values()} <= {*bits}:
        return False
    embedding, head = (weights[name] for name in names)
    if embedding.shape != head.shape or functional.cosine_similarity(embedding, head).mean() < _ONE_MATRIX:
        return False
    best = max(names, key=lambda name: bits[names[name]])
    logger.info(f"token_embd and output of {gguf.name} are one matrix: tied, from {names[best]}")
    weights.update(dict.fromkeys(names, weights[best]))
    return True


def split_numbers(tokenizer: Any, pre_tokenizer: str, gguf: Path) -> None:
    """Restore the splitting of numbers into digits, which transformers drops."""
    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        return
    if pre_tokenizer in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    elif pre_tokenizer not in ("gpt-2", "default"):
        logger.warning(
            f"tokenizer.ggml.pre {pre_tokenizer!r} is unknown: text is split as by GPT-2, which may give the "
            f"model other tokens than it was trained on ({gguf})"
        )


def _check_written(folder: Path, model: Any, tokenizer: Any, gguf: Path) -> None:
    """Refuse a folder whose weights, token ids or chat template differ from the GGUF file's."""
    written = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16).state_dict()
    for name, weight in model.state_dict().items():
        if not torch.equal(written[name], weight):
            raise ModelError(f"the written weight {name} differs from the GGUF file's ({gguf})")
    check_saved_tokenizer(tokenizer, folder, gguf)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
