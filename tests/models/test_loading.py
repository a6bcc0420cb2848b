"""Loading a policy: what is decided for a device, adapters by family, torn weights."""

import ctypes
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.model_families import tiny
from tests.tiny_model import write_adapter, write_model
from text2sql_grpo.config import LoraSettings, ModelConfig
from text2sql_grpo.errors import ModelError
from text2sql_grpo.models import hardware
from text2sql_grpo.models.loaded_policy import load_policy, lora_config, resolved

LORA = LoraSettings()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (ModelConfig(path="m"), ("float32", "none")),
        (ModelConfig(path="m", lora=LORA), ("bfloat16", "none")),
        (ModelConfig(path="m", lora=LORA, dtype="float16"), ("float16", "none")),
        (ModelConfig(path="m", lora=LORA, quantization="4bit"), ("bfloat16", "4bit")),
        (ModelConfig(path="m", lora=LORA, quantization="auto"), ("bfloat16", "4bit")),
    ],
)
def test_what_auto_means_on_a_cpu(
    settings: ModelConfig, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr("text2sql_grpo.models.loaded_policy.has_fast_bf16", lambda: True)
    decided = resolved(settings, "cpu")
    assert (decided.dtype, decided.quantization) == expected
    assert resolved(decided, "cpu") == decided


def test_auto_trains_lora_where_weights_cannot_be_packed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DISABLE_BITSANDBYTES", "1")
    monkeypatch.setattr("text2sql_grpo.models.loaded_policy.has_fast_bf16", lambda: False)
    settings = ModelConfig(path="m", lora=LORA, quantization="auto")
    assert resolved(settings, "cpu").quantization == "none"
    assert "LoRA on float32 weights, not on 4-bit ones: DISABLE_BITSANDBYTES=1 is set" in caplog.text


@pytest.mark.parametrize(
    ("stored", "multiplies", "free", "options", "expected"),
    [
        ("bfloat16", False, 1 << 40, {}, torch.float32),
        ("float16", False, 1 << 40, {}, torch.float32),
        ("bfloat16", True, 1 << 40, {}, torch.bfloat16),
        ("bfloat16", False, 100_000, {}, torch.bfloat16),  # the memory holds 16 bits alone
        ("bfloat16", False, 1 << 40, {"dtype": "bfloat16"}, torch.bfloat16),
        ("bfloat16", False, 1 << 40, {"is_trained": True}, torch.bfloat16),
        ("float32", True, 1 << 40, {}, torch.float32),
    ],
)
def test_weights_that_the_processor_does_not_multiply_are_read_as_float32(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored: str,
    multiplies: bool,
    free: int,
    options: dict[str, Any],
    expected: torch.dtype,
) -> None:
    folder = write_model(tmp_path / "model", vocab_size=260)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, stored))
    assert 2 * model.num_parameters() < 100_000 < 8 * model.num_parameters()
    model.save_pretrained(folder)
    monkeypatch.setattr(hardware, "has_fast_bf16", lambda: multiplies)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free, total=free))
    assert load_policy(str(folder), **options).model.dtype == expected


def test_the_base_of_an_adapter_is_read_as_float32_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model", vocab_size=260)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    monkeypatch.setattr(hardware, "has_fast_bf16", lambda: False)
    adapter = write_adapter(tmp_path / "adapter", folder)
    assert {weight.dtype for weight in load_policy(str(adapter)).model.parameters()} == {torch.float32}


def test_adapters_by_family() -> None:
    settings = ModelConfig(path="m", lora=LORA)
    narrow, wide = Qwen2Config(hidden_size=896), Qwen2Config(hidden_size=3584)

    assert lora_config(ModelConfig(path="m"), narrow) is None
    made = [lora_config(settings, config) for config in (narrow, wide)]
    assert [(one.r, one.lora_alpha, one.target_modules) for one in made if one] == [
        (32, 64, "all-linear"),
        (16, 32, "all-linear"),
    ]
    own = lora_config(replace(settings, lora=LoraSettings(r=4, target_modules=["q_proj"])), wide)
    assert own is not None and (own.r, own.lora_alpha, own.target_modules) == (4, 8, {"q_proj"})


@pytest.mark.parametrize(
    ("family", "adapted"),
    [
        ("qwen3_moe", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("deepseek_v3", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),
    ],
)
def test_adapters_of_mixtures_of_experts_are_on_attention_alone(family: str, adapted: set[str]) -> None:
    model = tiny(family)
    peft_config = lora_config(ModelConfig(path="m", lora=LORA), model.config)
    assert peft_config is not None

    names = [name for name, _ in get_peft_model(model, peft_config).named_parameters() if "lora_A" in name]

    assert {name.split(".lora_A")[0].rpartition("self_attn.")[2] for name in names} == adapted


@pytest.mark.parametrize("kept_bytes", [0, 100, 10_000])
def test_torn_weights_are_said_in_one_line(tmp_path: Path, kept_bytes: int) -> None:
    folder = write_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    with pytest.raises(
        ModelError, match=r"^cannot read the model [^\n]+; name a folder, GGUF file or Hub id$"
    ) as error:
        load_policy(str(folder))
    assert str(folder) in str(error.value)


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_stats"), reason="needs glibc")
@pytest.mark.parametrize(("call", "is_one"), [("", False), ("hardware.keep_one_heap()", True)])
def test_threads_share_a_heap(call: str, *, is_one: bool) -> None:
    program = f"""
import ctypes, threading
from text2sql_grpo.models import hardware
{call}
barrier = threading.Barrier(5)
def hold():
    ctypes.CDLL(None).malloc(1000)
    barrier.wait()
threads = [threading.Thread(target=hold) for _ in range(4)]
for thread in threads: thread.start()
barrier.wait()
ctypes.CDLL(None).malloc_stats()
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (run.stderr.count("Arena ") == 1) == is_one
