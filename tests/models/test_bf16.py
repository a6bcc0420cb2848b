"""bfloat16 on a CPU."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_model
from tests.tiny_run import write_config
from text2sql_grpo.commands import main
from text2sql_grpo.models.hardware import has_fast_bf16, inference_autocast
from text2sql_grpo.rollout.policy import SlotPolicy


def test_processors_and_builds_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    has_fast_bf16.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cpu", SimpleNamespace())
        assert not has_fast_bf16()
        has_fast_bf16.cache_clear()
        patch.setattr(torch, "cpu", SimpleNamespace(_is_amx_tile_supported=lambda: True))
        assert has_fast_bf16()
    has_fast_bf16.cache_clear()


def test_only_float32_models_on_a_cpu_are_cast(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path))
    ids = torch.arange(8)[None]
    with inference_autocast(model, bf16=True):
        assert model(ids).logits.dtype == torch.bfloat16
    with inference_autocast(model, bf16=False):
        assert model(ids).logits.dtype == torch.float32
    with inference_autocast(model.bfloat16(), bf16=True):
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("bf16", [True, False])
def test_evaluation_answers_in_bf16(bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    logits = SlotPolicy.logits

    def watched(policy: SlotPolicy, *inputs: Any) -> torch.Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return logits(policy, *inputs)

    monkeypatch.setattr(SlotPolicy, "logits", watched)
    model = str(write_model(tmp_path / "model", max_positions=2_048))
    config = str(write_config(tmp_path, model={"path": model}, evaluation={"bf16": bf16}))
    words = ["--model_path", model, "--config", config, "--out", str(tmp_path / "e.json")]
    assert main(["evaluate", *words, "--num_samples", "1"]) == 0
    assert bf16 in seen and (not bf16 or False in seen)  # the trial of the engine is exact
