"""The memory estimate against what the trainer's own update allocates, and how it divides."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE

from tests.model_families import tiny
from tests.scripted_trainer import Bench
from tests.tiny_model import write_model
from text2sql_grpo.config import LoraSettings, ModelConfig
from text2sql_grpo.doctor.memory import (
    LiveBytes,
    MemoryEstimate,
    Sharding,
    UntraceableError,
    Update,
    estimate_memory,
    trace_update,
)
from text2sql_grpo.errors import ModelError
from text2sql_grpo.models.loaded_policy import lora_config

ROWS, PROMPT, COMPLETION = 8, 120, 40
NO_ROLLOUTS = 0


def settings(mode: str) -> ModelConfig:
    return ModelConfig(
        path="m",
        dtype="float32",
        quantization="4bit" if mode == "qlora" else "none",
        lora=None if mode == "full" else LoraSettings(r=8),
    )


def update(*, shares_prompts: bool = True, gradient_checkpointing: bool = False) -> Update:
    return Update(
        rows=ROWS,
        num_generations=ROWS,
        prompt_tokens=PROMPT,
        completion_tokens=COMPLETION,
        sampled_tokens=COMPLETION,
        shares_prompts=shares_prompts,
        gradient_checkpointing=gradient_checkpointing,
        autocast=None,
    )


def allocated(folder: Path, mode: str, wanted: Update) -> int:
    """Bytes that the loss and its gradient add at most, in a real trainer on real tensors."""
    trainer = Bench(
        folder,
        model=folder / "model",
        adapter=lora_config(settings(mode), AutoConfig.from_pretrained(folder / "model")),
        per_device_train_batch_size=ROWS,
        num_generations=ROWS,
        bf16=False,
        shared_prefix=wanted.shares_prompts,
    ).trainer
    if wanted.gradient_checkpointing:
        trainer.model.activation_checkpointing_enable()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    torch.manual_seed(0)
    prompt = torch.randint(200, (1, PROMPT)).expand(ROWS, -1)
    completion = torch.randint(200, (ROWS, COMPLETION))
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": torch.ones_like(completion),
        "tool_mask": torch.ones_like(completion),
        "advantages": torch.randn(ROWS),
        "num_items_in_batch": torch.tensor(completion.numel()),
    }
    parameters = list(trainer.model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    with LiveBytes([*parameters, *gradients, *trainer.model.buffers()]) as live:
        trainer.compute_loss(trainer.model, inputs).backward()
    return live.peak


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("full", update()),
        ("full", update(shares_prompts=False)),
        ("lora", update(gradient_checkpointing=True)),
    ],
    ids=["full", "prompts not shared", "LoRA, checkpointing"],
)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_the_update_takes_what_was_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, wanted: Update
) -> None:
    write_model(tmp_path / "model", architecture="qwen2", hidden_size=64, max_positions=512)
    config = AutoConfig.from_pretrained(tmp_path / "model")

    estimate = estimate_memory(config, settings(mode), wanted, NO_ROLLOUTS, device="cpu")

    # TRL allocates tiles for a larger vocabulary than this, and leaves the rest of them untouched.
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", config.vocab_size)
    monkeypatch.setattr("trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE", TOKEN_CHUNK_SIZE)  # a trainer sets it
    assert estimate.update == pytest.approx(allocated(tmp_path, mode, wanted), rel=0.15)
    assert "token_tree" not in str(
        getattr(config, "_attn_implementation", None)
    )  # the caller's is left alone


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One trace for all estimates of the same update, which differ in what is kept beside it."""
    traced: dict[str, Any] = {}

    def trace(config: Any, *rest: Any) -> Any:
        if str(rest) not in traced:
            traced[str(rest)] = trace_update(config, *rest)
        return traced[str(rest)]

    monkeypatch.setattr("text2sql_grpo.doctor.memory.trace_update", trace)


@cache
def qwen(mode: str, **options: object) -> MemoryEstimate:
    """The estimate of a small Qwen2 on a GPU."""
    config = AutoConfig.for_model(
        "qwen2", vocab_size=5000, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return estimate_memory(config, settings(mode), update(), NO_ROLLOUTS, device="cuda", **options)  # type: ignore[arg-type]


def test_modes_and_optimizers(traced_once: None) -> None:
    full, lora, qlora = qwen("full"), qwen("lora"), qwen("qlora")

    assert full.weights == full.gradients == 4 * full.parameters
    assert full.optimizer == 8 * full.parameters
    assert lora.trained_parameters < 0.1 * full.parameters
    assert lora.optimizer == 8 * lora.trained_parameters
    linear = full.parameters - 2 * 5000 * 256  # all but embeddings, head (and norms, biases)
    assert qlora.weights == pytest.approx(full.weights - linear * (4 - 0.516), rel=0.05)
    assert qlora.gradients == 2 * qlora.trained_parameters
    assert qwen("full", optimizer="adamw_8bit").optimizer == 2 * full.parameters
    assert qwen("full", has_reference=True).reference == full.weights
    assert qwen("lora", has_reference=True).reference == 0


def test_divided_among_processes(traced_once: None) -> None:
    whole = qwen("full").parameters
    copies = qwen("full", sharding=Sharding(4))
    two = qwen("full", sharding=Sharding(4, 2))
    three = qwen("full", sharding=Sharding(4, 3, offloads_states=True))

    assert copies.weights == 4 * whole and copies.optimizer == 8 * whole
    assert (two.weights, two.gradients, two.optimizer) == (2 * whole, 2 * whole // 4, 12 * whole // 4)
    assert 2 * whole // 4 < three.weights < 2 * whole // 4 + 4 * 5000 * 256 + 1
    assert (three.optimizer, three.host) == (0, 12 * whole // 4)


TRACED = Update(4, 4, 40, 30, 20, gradient_checkpointing=False, autocast=None)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("lora", [None, LoraSettings()])
def test_updates_of_mixtures_of_experts_are_traced(family: str, lora: LoraSettings | None) -> None:
    settings = ModelConfig(path="m", dtype="bfloat16" if lora else "float32", lora=lora)
    dense, mixture = (
        trace_update(tiny(name).config, settings, TRACED, "cpu")[1] for name in ("llama", family)
    )
    assert 0.8 < mixture / dense < 1.5  # of like size, and each token passes two of four experts


def test_a_model_that_shares_no_prompts_is_estimated_as_if_none_were_to_be_shared() -> None:
    config = tiny("llama").config
    config.attention_dropout = 0.1
    settings = ModelConfig(path="m", dtype="float32")
    shared, whole = (replace(TRACED, rows=8, shares_prompts=shares) for shares in (True, False))
    assert (
        trace_update(config, settings, shared, "cuda")[1] == trace_update(config, settings, whole, "cuda")[1]
    )


def test_a_model_that_cannot_be_traced_is_named_so() -> None:
    settings = ModelConfig(path="m", dtype="float32")
    with pytest.raises(UntraceableError, match="memory cannot be estimated for this model: "):
        trace_update(tiny("bloom").config, settings, TRACED, "cpu")


def test_an_adapter_that_fits_no_layer_is_refused() -> None:
    settings = ModelConfig(path="m", dtype="float32", lora=LoraSettings(target_modules=["w9"]))
    with pytest.raises(ModelError, match=r"w9.*name its layers in model\.lora\.target_modules"):
        trace_update(tiny("llama").config, settings, TRACED, "cpu")
