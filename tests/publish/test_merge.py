"""Merging is exact, refuses what does not belong together, and never leaves half a folder."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3TextConfig,
    PreTrainedModel,
    SiglipVisionConfig,
)

from tests.model_families import FAST, tiny
from tests.rounding import assert_same, bound
from tests.tiny_model import exact_logits_of, logits_of, write_adapter, write_model, write_tokenizer
from text2sql_grpo.errors import ModelError
from text2sql_grpo.models.loaded_policy import load_policy
from text2sql_grpo.publishing import merging
from text2sql_grpo.publishing.merging import merge_adapter

# PEFT still asks a model of transformers 5 by the attribute's older name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(params=["llama", "qwen2"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_model(tmp_path / "base", architecture=request.param)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_model(tmp_path / "base")


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def edit_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_weights(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(path)
    edit(weights)
    save_file(weights, path, metadata={"format": "pt"})


def test_merged_folder_answers_as_the_adapter_did(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base)
    plain = AutoModelForCausalLM.from_pretrained(base)
    num_parameters, before = plain.num_parameters(), exact_logits_of(plain)
    expected = exact_logits_of(PeftModel.from_pretrained(plain, adapter))

    report = merge_adapter(adapter, tmp_path / "merged")

    merged = exact_logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert (expected - before).abs().max() > 0.1  # the adapter does something
    layers = plain.config.num_hidden_layers
    assert_same(merged, expected, layers=layers, dtype=torch.float32)
    assert 0 < report.merge_difference < bound(torch.float32, layers, expected.abs().max().item())
    assert (report.base, report.num_parameters) == (str(base), num_parameters)
    assert (report.cast_difference, report.is_four_bit) == (0.0, False)


def test_script_writes_beside_the_adapter_and_fails_with_one_line(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", llama)
    script = Path(__file__).resolve().parents[2] / "scripts" / "merge.py"
    monkeypatch.setenv("PYTHON_DOTENV_DISABLED", "1")

    def run_script(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", [str(script), *options])
        with pytest.raises(SystemExit) as exit_code:
            runpy.run_path(str(script), run_name="__main__")
        return exit_code.value.code

    capsys.readouterr()
    assert run_script("--adapter", str(adapter), "--dtype", "bfloat16") == 0
    assert f"into {tmp_path / 'merged'}" in capsys.readouterr().out
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert run_script("--adapter", str(adapter), "--base", str(tmp_path / "nowhere")) == 1
    assert capsys.readouterr().err.startswith("error: cannot read the base")


def test_merged_folder_holds_all_that_is_needed_to_chat(llama: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", llama)
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(adapter)  # wins over the base's

    merge_adapter(adapter, tmp_path / "runs" / "merged")

    assert names_in(tmp_path / "runs") == {"merged"}
    assert names_in(tmp_path / "runs" / "merged") == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    merged = AutoTokenizer.from_pretrained(tmp_path / "runs" / "merged")
    assert merged.chat_template == tokenizer.chat_template
    assert merged.decode(merged("SELECT 'é'")["input_ids"]) == "SELECT 'é'"


def test_auto_keeps_the_stored_type_and_reports_what_rounding_costs(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", architecture="qwen2", dtype=torch.bfloat16)

    report = merge_adapter(write_adapter(tmp_path / "adapter", base), tmp_path / "merged")

    written = load_file(tmp_path / "merged" / "model.safetensors")
    assert {weight.dtype for weight in written.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"
    assert 1e-3 < report.cast_difference < 1
    assert report.dtype == "bfloat16" and "bfloat16" in str(report)


def test_fully_trained_model_goes_the_same_way(base: Path, tmp_path: Path) -> None:
    report = merge_adapter(base, tmp_path / "merged", dtype="bfloat16")

    expected = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).state_dict()
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert report.base is None
    assert expected.keys() == written.keys()
    assert all(torch.equal(expected[name], written[name]) for name in expected)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 48}, "size mismatch"),
        ({"num_layers": 1}, "have no place"),
        ({"num_layers": 3}, "have no place"),
        ({"vocab_size": 250}, "at least 259 token embeddings .*got 250"),
    ],
)
def test_another_base_is_refused(llama: Path, tmp_path: Path, change: dict[str, int], reason: str) -> None:
    adapter = write_adapter(tmp_path / "adapter", llama, target_modules=["q_proj", "down_proj"])
    other = write_model(tmp_path / "other", **change)

    with pytest.raises(ModelError, match=rf"(?s){reason}"):
        merge_adapter(adapter, tmp_path / "merged", base=str(other))
    assert names_in(tmp_path) == {"base", "adapter", "other"}


def put_nan(weights: dict[str, torch.Tensor]) -> None:
    next(weights[name] for name in weights if "q_proj.lora_B" in name)[0, 0] = torch.nan


BROKEN: dict[str, Callable[[Path, Path], Any]] = {
    "c_attn": lambda _, adapter: edit_json(adapter / "adapter_config.json", target_modules=["c_attn"]),
    "cannot read the base": lambda base, _: base.rename(base.with_name("moved")),
    "up_proj": lambda base, _: edit_weights(
        base / "model.safetensors", lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight")
    ),
    "gptq": lambda base, _: edit_json(base / "config.json", quantization_config={"quant_method": "gptq"}),
    "cannot merge": lambda _, adapter: edit_weights(adapter / "adapter_model.safetensors", put_nan),
    "must be LoRA": lambda _, adapter: (adapter / "adapter_config.json").write_text('{"peft_type": "LOHA"}'),
    "nothing to merge": lambda _, adapter: (adapter / "adapter_config.json").unlink(),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_what_is_broken_is_named(llama: Path, tmp_path: Path, reason: str) -> None:
    adapter = write_adapter(tmp_path / "adapter", llama)
    BROKEN[reason](llama, adapter)

    with pytest.raises(ModelError, match=reason):
        merge_adapter(adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_options_that_cannot_be_met_are_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, run = write_adapter(tmp_path / "adapter", llama), tmp_path / "run"
    inner = write_adapter(llama / "adapter", llama)
    run.mkdir()
    (run / "metrics.jsonl").write_text("{}\n")
    checkpoint = write_model(tmp_path / "checkpoint")
    (checkpoint / "trainer_state.json").write_text("{}")

    for reason, source, out, options in (
        ("got 'int4'", llama, tmp_path / "merged", {"dtype": "int4"}),
        ("needs an adapter", llama, tmp_path / "merged", {"base": "me/model"}),
        ("other files", llama, run, {}),
        ("other files", llama, checkpoint, {}),
        ("that is read", llama, llama, {}),
        ("that is read", adapter, llama, {"base": str(llama)}),
        ("that is read", inner, llama, {"base": "me/model"}),
        ("to a file", llama, run / "metrics.jsonl", {}),
    ):
        with pytest.raises(ModelError, match=reason):
            merge_adapter(source, out, **options)
    with monkeypatch.context() as strict, pytest.raises(ModelError, match="logits differ"):
        strict.setattr(merging, "TOLERANCE", 1e-12)
        merge_adapter(adapter, tmp_path / "merged")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100_000))
    with pytest.raises(ModelError, match="too little memory"):
        merge_adapter(adapter, tmp_path / "merged")
    assert names_in(run) == {"metrics.jsonl"}
    assert names_in(tmp_path) == {"base", "adapter", "run", "checkpoint"}


def test_a_merge_without_one_layer_is_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(tmp_path / "adapter", base)
    merge = LoraModel.merge_and_unload

    def forget_a_layer(model: LoraModel, **options: Any) -> Any:
        weights = [weight for name, weight in model.named_parameters() if "lora_B" in name]
        weights[-1].data.zero_()
        return merge(model, **options)

    monkeypatch.setattr(LoraModel, "merge_and_unload", forget_a_layer)
    with pytest.raises(ModelError, match="logits differ"):
        merge_adapter(adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_failed_save_leaves_nothing_and_keeps_the_earlier_model(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, weights = write_adapter(tmp_path / "adapter", llama), tmp_path / "merged" / "model.safetensors"
    save = PreTrainedModel.save_pretrained

    def fill_the_disk(model: PreTrainedModel, folder: Path, **options: Any) -> None:
        save(model, folder, **options)
        raise OSError(28, "No space left on device")

    def merge_on_a_full_disk() -> None:
        with monkeypatch.context() as broken, pytest.raises(ModelError, match="No space left"):
            broken.setattr(PreTrainedModel, "save_pretrained", fill_the_disk)
            merge_adapter(adapter, tmp_path / "merged")

    merge_on_a_full_disk()
    assert names_in(tmp_path) == {"base", "adapter"}
    merge_adapter(adapter, tmp_path / "merged")
    earlier = weights.read_bytes()
    write_adapter(adapter, llama, seed=7)
    merge_on_a_full_disk()
    assert weights.read_bytes() == earlier
    merge_adapter(adapter, tmp_path / "merged")
    assert weights.read_bytes() != earlier
    assert names_in(tmp_path) == {"base", "adapter", "merged"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_spoiled_on_the_way_to_disk_are_noticed(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    save = PreTrainedModel.save_pretrained

    def spoil(model: PreTrainedModel, folder: Path, **options: Any) -> None:
        save(model, folder, **options)
        edit_weights(folder / "model.safetensors", lambda weights: weights["lm_head.weight"].add_(0.01))

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", spoil)
    with pytest.raises(ModelError, match="logits differ"):
        merge_adapter(llama, tmp_path / "merged", dtype=dtype)
    assert names_in(tmp_path) == {"base"}


@pytest.fixture
def in_four_bits(tmp_path: Path) -> tuple[Path, PreTrainedModel]:
    """A base, and the same with its linear layers in 4 bits."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    assert "cpu" in bitsandbytes.supported_torch_devices
    base = write_model(tmp_path / "base", architecture="qwen2", hidden_size=64)
    return base, load_policy(str(base), dtype="float32", quantization="4bit").model


def test_an_adapter_of_a_4_bit_run_is_merged_into_the_weights_it_was_trained_on(
    in_four_bits: tuple[Path, PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, four_bit = in_four_bits
    adapter = write_adapter(tmp_path / "run" / "adapter", base)
    expected = logits_of(PeftModel.from_pretrained(four_bit, adapter))
    model = "{path: m, dtype: float32, quantization: 4bit, lora: {}}"
    (tmp_path / "run" / "config.yaml").write_text(f"model: {model}\n")

    report = merge_adapter(adapter, tmp_path / "merged")
    merge_adapter(adapter, tmp_path / "otherwise", quantization="none")

    merged = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    layers = four_bit.config.num_hidden_layers
    assert_same(merged, expected, layers=layers, dtype=torch.float32)
    assert report.is_four_bit and "in 4 bits, dequantised" in str(report)
    otherwise = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "otherwise"))
    assert (otherwise - expected).abs().max() > 0.1
    monkeypatch.setenv("DISABLE_BITSANDBYTES", "1")
    with pytest.raises(ModelError, match="DISABLE_BITSANDBYTES"):
        merge_adapter(adapter, tmp_path / "merged")


def test_a_base_stored_in_4_bits_is_dequantised(
    in_four_bits: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    base, four_bit = in_four_bits
    expected = logits_of(four_bit)
    four_bit.save_pretrained(tmp_path / "stored")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "stored")

    merge_adapter(tmp_path / "stored", tmp_path / "merged", dtype="float32")

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert getattr(merged.config, "quantization_config", None) is None
    layers = four_bit.config.num_hidden_layers
    assert_same(logits_of(merged), expected, layers=layers, dtype=torch.float32)


# Families whose files hold other weights than the model: experts one by one, or parts under other names.
CONVERTED = ("mixtral", "deepseek_v3", "gpt_oss", "gemma3")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in CONVERTED else pytest.mark.slow)
        for name in [*FAST, "qwen3_next", "bamba", "minimax", "gemma3"]
    ],
)
def test_a_family_is_merged_and_stored_as_it_was(tmp_path: Path, family: str) -> None:
    base = tmp_path / "base"
    model = gemma3() if family == "gemma3" else tiny(family)
    model.save_pretrained(base)
    write_tokenizer(base)
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    attention = {name.rpartition(".")[2] for name in linear if "attn" in name and "indexer" not in name}
    adapter = write_adapter(tmp_path / "adapter", base, target_modules=sorted(attention) or "all-linear")
    expected = exact_logits_of(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))

    merge_adapter(adapter, tmp_path / "merged")

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    layers = getattr(merged.config, "text_config", merged.config).num_hidden_layers
    assert_same(exact_logits_of(merged), expected, layers=layers, dtype=torch.float32)
    stored, written = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "merged"))
    assert {name: each.shape for name, each in written.items()} == {
        name: each.shape for name, each in stored.items()
    }


def gemma3() -> PreTrainedModel:
    """As the larger models of the family are published: with a vision tower."""
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    text = Gemma3TextConfig(**small, vocab_size=304, head_dim=8, num_key_value_heads=1)
    return AutoModelForCausalLM.from_config(
        Gemma3Config(text_config=text, vision_config=SiglipVisionConfig(**small))
    )
