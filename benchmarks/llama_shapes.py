"""Models with random weights, so that a benchmark needs no download."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {  # layers, width, heads, key-value heads
    "2M": (4, 192, 6, 6),
    "25M": (8, 512, 8, 8),
    "0.5B": (24, 896, 14, 2),  # Qwen2.5's shapes
    "1.5B": (28, 1_536, 12, 2),
}


def make_model(size: str, vocab_size: int, *, eos_token_id: int | None = None) -> LlamaForCausalLM:
    """A Llama of one of the `SIZES`; the same weights each time."""
    torch.manual_seed(0)
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
