"""The update of a family beside stock TRL: loss, gradient and metrics, off-policy and with KL."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from trl import GRPOTrainer
from trl.kernels import chunked_logprob
from trl.trainer.utils import split_tensor_dict

from tests.rounding import assert_same, bound, in_float64
from tests.tiny_model import write_tokenizer
from tests.unit.test_training_token_tree import Updating, batch_of
from text2sql_grpo.training.arguments import SQLGRPOConfig

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
DEFAULT = ("gemma2", "gpt_oss", "jamba")


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


Outcome = tuple[float, torch.Tensor, dict[str, float]]


def outcomes_of(trainer: GRPOTrainer, batch: dict[str, Any]) -> list[Outcome]:
    """Loss, gradient and metrics of three micro-batches: of the sampling policy, and of a changed one."""
    known, _, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
        batch["completion_ids"].shape[1],
        batch_size=4,
    )
    batch = batch | {name: known.detach() for name in ("old_per_token_logps", "ref_per_token_logps")}
    outcomes = []
    for _ in range(2):
        trainer.model.zero_grad()
        trainer._metrics["train"].clear()
        losses = []
        for micro_batch in split_tensor_dict(batch, 3):
            losses.append(trainer.compute_loss(trainer.model, micro_batch))
            losses[-1].backward()
        gradient = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
        metrics = {name: sum(each) / len(each) for name, each in trainer._metrics["train"].items()}
        outcomes.append((sum(losses).item(), torch.cat(gradient), metrics))
        shake(trainer.model)
    return outcomes


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.slow) for name in FAST | PLAIN],
)
@in_float64()
def test_the_update_of_a_family_is_that_of_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", chunked_logprob.TOKEN_CHUNK_SIZE)
    arguments = SQLGRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=4,
        gradient_accumulation_steps=3,
        use_cpu=True,
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
    )
    tokenizer = write_tokenizer(tmp_path)
    stock = GRPOTrainer(
        tiny(family).double(),
        reward_funcs=[lambda **_: []],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["?"]}),
        processing_class=tokenizer,
    )
    ours = Updating(tiny(family).double(), arguments, tokenizer)
    batch = batch_of(random.Random(2), [4, 4, 4], longest=40)
    results = []
    for trainer in (stock, ours):
        trainer.model.train()
        trainer.beta = 0.1  # later: the reference is a log-prob of the batch, not a model on disk
        trainer.current_gradient_accumulation_steps = 3
        results.append(outcomes_of(trainer, batch))
    assert ours.update.is_on == (family in FAST)
    layers = ours.model.config.num_hidden_layers
    for (loss, gradient, metrics), (found, found_gradient, found_metrics) in zip(*results, strict=True):
        assert_same(found, loss, layers=layers)
        assert_same(found_gradient, gradient, layers=layers)
        for name, metric in metrics.items():
            assert_same(found_metrics[name], metric, layers=layers)
    assert abs(results[1][0][2]["kl"]) < bound(torch.float64, layers, 1.0)
    assert results[1][0][2]["clip_ratio/region_mean"] == 0
    assert results[1][1][2]["kl"] > 1e-5
