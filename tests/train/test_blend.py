"""Blend of weights, of adapters that begin as zero and in a run, and layers that are left as they are."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_model
from tests.tiny_run import write_config
from text2sql_grpo.commands import main
from text2sql_grpo.training.blend import blend, trained_weights


def test_weights_go_a_share_of_the_way() -> None:
    model = torch.nn.Linear(2, 2)
    start = trained_weights(model)
    with torch.no_grad():
        model.weight += 1.0
        model.bias -= 2.0
    blend(model, start, 0.75)
    torch.testing.assert_close(model.weight, start["weight"] + 0.75)
    torch.testing.assert_close(model.bias, start["bias"] - 1.5)


@pytest.mark.parametrize("begins_as_zero", [True, False])
def test_an_adapter_that_begins_as_zero_is_scaled(tmp_path: Path, begins_as_zero: bool) -> None:
    base = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "model"))
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=begins_as_zero)
    model = get_peft_model(base, config)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    start, before = trained_weights(model), layer.get_delta_weight("default").clone()
    with torch.no_grad():
        for weight in (layer.lora_A["default"].weight, layer.lora_B["default"].weight):
            weight += torch.randn_like(weight)
    after = layer.get_delta_weight("default").clone()
    blend(model, start, 0.5)
    if begins_as_zero:
        torch.testing.assert_close(layer.get_delta_weight("default"), 0.5 * after)
    else:
        assert (layer.get_delta_weight("default") - before).norm() < (after - before).norm()


@pytest.mark.thorough
def test_a_run_merges_the_blend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merged = {}
    for share in (1.0, 0.5):
        folder = tmp_path / str(share)
        folder.mkdir()
        config = write_config(folder, sft=None, losses={"gold": 1.0, "gold_share": 1.0})
        assert (
            main(["train", "--config", str(config), "--data.test", "{}", "--evaluation.blend", str(share)])
            == 0
        )
        merged[share] = load_file(folder / "run" / "merged" / "model.safetensors")
    start = load_file(folder / "model" / "model.safetensors")
    assert "Blend: 50% of the way" in capsys.readouterr().out
    assert any(not torch.equal(weight, merged[1.0][name]) for name, weight in start.items())
    for name, weight in start.items():
        torch.testing.assert_close(merged[0.5][name], (weight + merged[1.0][name]) / 2, atol=1e-6, rtol=1e-5)


def test_a_run_leaves_the_first_layers_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, sft=None, losses={"gold": 1.0, "gold_share": 1.0})
    command = ["train", "--config", str(config), "--data.test", "{}", "--model.frozen_layers"]
    assert main([*command, "2"]) == 1
    assert "of 2 layers one must be left" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "1", "--model.lora", "{r: 2}", "--grpo.beta", "0.1"]) == 1
    assert "needs grpo.beta: 0" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "1"]) == 0
    start = load_file(tmp_path / "model" / "model.safetensors")
    merged = load_file(tmp_path / "run" / "merged" / "model.safetensors")
    changed = {name for name, weight in start.items() if not torch.equal(weight, merged[name])}
    assert any(".layers.1." in name for name in changed)
    assert not any(".layers.0." in name for name in changed)
