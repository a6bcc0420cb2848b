"""Models with random weights, so that a benchmark needs no download; or the model of a folder."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

SIZES = {  # layers, width, heads, key-value heads
    "tiny": (2, 32, 4, 2),
    "2M": (4, 192, 6, 6),
    "25M": (8, 512, 8, 8),
    "0.5B": (24, 896, 14, 2),  # Qwen2.5's shapes
    "1.5B": (28, 1_536, 12, 2),
}


def make_model(size: str, vocab_size: int, *, eos_token_id: int | None = None) -> Any:
    """A Llama of one of the `SIZES`, the same weights each time; or the model of a folder, in float32.

    Args:
        size: A key of `SIZES`, or a folder.
        vocab_size: Number of token ids that are used; a folder's model keeps its own, which must not be
            smaller.
        eos_token_id: Token that ends a turn; a folder's model loses its own.
    """
    torch.manual_seed(0)
    if Path(size).is_dir():
        model = AutoModelForCausalLM.from_pretrained(size, dtype=torch.float32)
        if model.config.vocab_size < vocab_size:
            raise ValueError(
                f"the vocabulary of {size} must be >= {vocab_size}, got {model.config.vocab_size}"
            )
        model.config.eos_token_id = eos_token_id
        model.generation_config = GenerationConfig(eos_token_id=eos_token_id)
        return model
    layers, width, heads, kv_heads = SIZES[size]
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=int(2.75 * width),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=16_384,
        bos_token_id=None,
        eos_token_id=eos_token_id,
    )
    return LlamaForCausalLM(config)
