"""Merged models as GGUF files (llama.cpp's format), and as files for the servers that read these."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import gguf as library
import numpy as np
import torch
from gguf import quants
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from text2sql_grpo.errors import ConfigError, ModelError
from text2sql_grpo.files import draft
from text2sql_grpo.models.gguf import split_numbers
from text2sql_grpo.rollout.slots import shared_length

Quantization = Literal["q8_0", "f16", "bf16"]

_TYPES = {
    "q8_0": (library.GGMLQuantizationType.Q8_0, library.LlamaFileType.MOSTLY_Q8_0),
    "f16": (library.GGMLQuantizationType.F16, library.LlamaFileType.MOSTLY_F16),
    "bf16": (library.GGMLQuantizationType.BF16, library.LlamaFileType.MOSTLY_BF16),
}
_ARCHITECTURES = {"llama": library.MODEL_ARCH.LLAMA, "qwen2": library.MODEL_ARCH.QWEN2}
_QUERY_OR_KEY = re.compile(r"layers\.\d+\.self_attn\.([qk])_proj\.(weight|bias)")
CONVERSATION = [
    {"role": "system", "content": "Answer with <sql> or <answer>. naïve 日本 ½"},
    {"role": "user", "content": "table t.a, t.\"b c\"\n\nHow many rows of 2024 have  'Zoë'?"},
    {"role": "assistant", "content": "<sql>SELECT count(*), 12.50 FROM t\n\tWHERE id=2024 AND n >= 7</sql>"},
    {"role": "user", "content": "count(*)\n17"},
]
"""Chat whose token ids must be the same in the model and in a file made of it."""


def write_gguf(model: Path, out: Path, quantization: Quantization = "q8_0") -> None:
    """Write a merged model as a GGUF file, and check that it encodes a conversation as the model does.

    Matrices are quantized, vectors stay in float32. Nothing is left behind if anything fails.

    Args:
        model: Folder of a merged model, Llama or Qwen2.

    Raises:
        ModelError: The model cannot be read, its architecture or tokenizer is not supported, or the file
            encodes the conversation differently.
        RunError: The file cannot be written.
    """
    config, tokenizer = AutoConfig.from_pretrained(str(model)), AutoTokenizer.from_pretrained(str(model))
    architecture = _ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise ModelError(
            f"export writes GGUF files of {' and '.join(_ARCHITECTURES)}, not of {config.model_type}: use "
            f"convert_hf_to_gguf.py of llama.cpp ({model})"
        )
    logging.getLogger("gguf").setLevel(logging.ERROR)
    with draft(out) as scratch:
        writer = library.GGUFWriter(scratch, library.MODEL_ARCH_NAMES[architecture])
        stored_type, file_type = _TYPES[quantization]
        _add_shape(writer, config, model, file_type)
        _add_tokenizer(writer, model, tokenizer, config.vocab_size)
        for name, tensor in _tensors(model, config, architecture):
            is_plain = tensor.ndim == 1 or (quantization == "q8_0" and tensor.shape[-1] % 32)
            kind = library.GGMLQuantizationType.F32 if is_plain else stored_type
            writer.add_tensor(name, quants.quantize(tensor, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        check_same_tokens(scratch, tokenizer)


def _add_shape(writer: Any, config: Any, model: Path, file_type: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    if rope.get("rope_type", "default") != "default":
        raise ModelError(f"export supports no scaled rotary positions ({rope['rope_type']}, {model})")
    heads = config.num_attention_heads
    writer.add_name(model.resolve().name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_rope_dimension_count(getattr(config, "head_dim", None) or config.hidden_size // heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(file_type)
    writer.add_quantization_version(library.GGML_QUANT_VERSION)


def _add_tokenizer(writer: Any, model: Path, tokenizer: Any, size: int) -> None:
    texts = {number: text for text, number in tokenizer.get_vocab().items()}
    kinds = dict.fromkeys(texts, library.TokenType.NORMAL)
    for number, token in tokenizer.added_tokens_decoder.items():
        kinds[number] = library.TokenType.CONTROL if token.special else library.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(model))
    writer.add_token_list([texts.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types([kinds.get(number, library.TokenType.UNUSED) for number in range(size)])
    special = library.SpecialVocab(model, load_merges=True, n_vocab=size)
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    special.special_token_ids = {name: number for name, number in ids.items() if number is not None}
    begins = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    special.add_special_token = {"bos": begins}
    special.chat_template = tokenizer.chat_template
    special.add_to_gguf(writer, quiet=True)


def _pre_tokenizer(model: Path) -> str:
    """Name of llama.cpp for how a byte-level tokenizer splits text."""
    split = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["pre_tokenizer"]
    parts = split.get("pretokenizers", [split]) if split else []
    kinds = [part["type"] for part in parts]
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"]:
        return "smollm"
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Split", "ByteLevel"]:
        pattern = parts[0]["pattern"].get("Regex", "")
        if r"|\p{N}|" in pattern:
            return "qwen2"
        if r"|\p{N}{1,3}|" in pattern:
            return "llama-bpe"
    raise ModelError(f"export does not know how this tokenizer splits text ({', '.join(kinds)}; {model})")


def _tensors(model: Path, config: Any, architecture: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Weights in float32 under their GGUF names."""
    names = library.get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (no mapping)
                if name == "lm_head.weight" and config.tie_word_embeddings:
                    continue
                target = names.get_name(name, try_suffixes=(".weight", ".bias"))
                if target is None:
                    raise ModelError(f"export does not know the weight {name} ({path})")
                tensor = stored.get_tensor(name).to(torch.float32).numpy()
                if architecture is library.MODEL_ARCH.LLAMA and (found := _QUERY_OR_KEY.search(name)):
                    tensor = _interleaved(tensor, heads[found[1]])
                yield target, tensor


def _interleaved(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in llama.cpp's order, in which rotary pairs are next to each other."""
    rows, *rest = tensor.shape
    return tensor.reshape(heads, 2, rows // heads // 2, *rest).swapaxes(1, 2).reshape(tensor.shape)


def check_same_tokens(path: Path, tokenizer: Any) -> None:
    """Compare the token ids of `CONVERSATION` by a GGUF file with a tokenizer's.

    Raises:
        ModelError: They differ, or a stop token does.
    """
    read = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    reader = library.GGUFReader(str(path))
    split_numbers(read, str(reader.get_field("tokenizer.ggml.pre").contents()), path)
    for name in ("bos_token_id", "eos_token_id"):
        if getattr(read, name) != getattr(tokenizer, name):
            raise ModelError(f"the exported {name} is {getattr(read, name)}, not {getattr(tokenizer, name)}")
    expected, found = (
        one.apply_chat_template(CONVERSATION, add_generation_prompt=True)["input_ids"]
        for one in (tokenizer, read)
    )
    if expected != found:
        at = shared_length(expected, found)
        raise ModelError(
            f"the exported file encodes a conversation differently from token {at} on: "
            f"{tokenizer.decode(expected[at : at + 5])!r} is {read.decode(found[at : at + 5])!r}"
        )


def modelfile(gguf: str, tokenizer: Any) -> str:
    """Modelfile of Ollama, whose template writes the conversation as the model's own does.

    Raises:
        ConfigError: The model's template cannot be written as a loop over messages.
    """
    eos = str(tokenizer.eos_token)
    expected = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=False)
    roles = _roles(expected, eos)
    written = "".join(roles[one["role"]] + one["content"] + eos + roles["end"] for one in CONVERSATION)
    if written + roles["assistant"] != expected:
        raise ConfigError(
            "the chat template is not a plain loop over messages, as Ollama needs it: use --to gguf, and "
            "llama-server --jinja"
        )
    turns = "".join(
        f'{{{{ if eq .Role "{role}" }}}}{roles[role]}{{{{ end }}}}'
        for role in ("system", "user", "assistant")
    )
    loop = f"{{{{ range .Messages }}}}{turns}{{{{ .Content }}}}{eos}{roles['end']}{{{{ end }}}}"
    return (
        f'FROM ./{gguf}\nTEMPLATE """{loop}{roles["assistant"]}"""\nPARAMETER stop "{eos}"\n'
        "PARAMETER temperature 0\n"
    )


def _roles(text: str, eos: str) -> dict[str, str]:
    """Text of `CONVERSATION` before each role's content, and after each end-of-turn token (`end`)."""
    roles, end = dict[str, str](), ""
    for number, message in enumerate(CONVERSATION):
        before, _, text = text.partition(message["content"])
        if number:
            _, _, before = before.partition(eos)
            end = before[: len(before) - len(before.lstrip("\n"))]
            before = before[len(end) :]
        roles[message["role"]] = before
    return roles | {"end": end}
