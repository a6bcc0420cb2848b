"""Tiny random models of many families, with the fields that each needs."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

# Set where a config has them; windows are shorter than the rows, and none has dropout.
FIELDS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "moe_intermediate_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "first_k_dense_replace"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("n_routed_experts", "mamba_n_heads", "moe_num_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "moe_topk", "n_group", "topk_group"), 2),
    **dict.fromkeys(("head_dim", "kv_channels"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout", "hidden_dropout"), 0.0),
    **dict.fromkeys(
        ("attention_dropout", "residual_dropout", "resid_dropout", "attention_probs_dropout_prob"), 0.0
    ),
    "vocab_size": 304,
    "sliding_window": 16,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONG |= {"original_max_position_embeddings": 24}
# Latent attention: heads of values are smaller than those of keys.
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
LATENT |= {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
# Heads of another size in layers without a window, and a layer that has the keys of the one before.
GEMMA4 = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", *["full_attention"] * 2]}
GEMMA4 |= {"global_head_dim": 16, "num_kv_shared_layers": 1}
GEMMA4 |= {"vocab_size_per_layer_input": 304, "hidden_size_per_layer_input": 8}
# Families that share prefixes, with fields of their own.
FAST: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen2_moe": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {"layer_types": ["full_attention", "sliding_attention"]},
    "gemma4_text": GEMMA4,
    "vaultgemma": {},
    "mistral": {},
    "ministral": {},
    "mixtral": {},
    "phi": {},
    "phi3": {},
    "smollm3": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {},
    "flex_olmo": {},
    "granite": {},
    "gpt_oss": {},
    "gpt_neox": {},
    "cohere": {},
    "cohere2": {},
    "starcoder2": {},
    "stablelm": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {"n_group": 1, "topk_group": 1},
    "helium": {},
    "exaone4": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "seed_oss": {},
    "dots1": {"n_group": 1, "topk_group": 1},
    "apertus": {},
    "arcee": {},
    "nemotron": {},
    "persimmon": {},
    "opt": {},
    "jetmoe": {},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "minicpm3": LATENT,
    "nanochat": {},
    "diffllama": {},
    "hrm_text": {},
    "laguna": {},
    "mimo_v2_flash": {},
}
# Absolute positions, ALiBi, positions by the longest row, norms behind rotation, hybrids, state spaces.
PLAIN: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt_bigcode": {},
    "bloom": {},
    "mpt": {},
    "phi3-long": {"rope_parameters": LONG},
    "hunyuan_v1_dense": {},
    "qwen3_next": {},
    "jamba": {},
    "bamba": {},
    "minimax": {},
    "falcon_h1": {},
    "recurrent_gemma": {},
    "mamba": {},
    "falcon_mamba": {},
    "rwkv": {},
}


def tiny(family: str) -> PreTrainedModel:
    """Model of a family with random weights, norms and biases too."""
    kind = family.partition("-")[0]
    known = AutoConfig.for_model(kind)
    names = dir(known.per_layer_config[0])  # the config as a whole has no value that differs between layers
    fields = {name: value for name, value in FIELDS.items() if name in names or name in known.attribute_map}
    config = AutoConfig.for_model(kind, **fields | (FAST | PLAIN)[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    shake(model)
    return model


def shake(model: torch.nn.Module) -> None:
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=draw)
