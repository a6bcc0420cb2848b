"""Exported files are read back: the same tokens, the same logits, and clear errors."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_model import logits_of, write_adapter, write_model
from text2sql_grpo.commands import main
from text2sql_grpo.errors import ConfigError, ModelError
from text2sql_grpo.models import gguf_export
from text2sql_grpo.models.gguf import converted
from text2sql_grpo.models.gguf_export import CONVERSATION, check_same_tokens, modelfile, write_gguf

TEXTS = ["SELECT count(*) FROM branch WHERE code = 'LIS-02'", "How many branches are there in Lisbon?"] * 20


QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def merged(folder: Path, architecture: str = "llama") -> Path:
    """A random model; of Qwen2 with Qwen's splitting of text."""
    model = write_model(
        folder / "merged",
        architecture=architecture,
        texts=TEXTS,
        vocab_size=320,
        max_positions=512,
        hidden_size=64,
    )
    if architecture == "qwen2":
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        split = {"type": "Split", "pattern": {"Regex": QWEN_SPLIT}, "behavior": "Isolated", "invert": False}
        bytes_alone = tokenizer["pre_tokenizer"] | {"use_regex": False}
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytes_alone]}
        (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    return model


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize(("quantization", "tolerance"), [("f16", 1e-3), ("bf16", 1e-3), ("q8_0", 4e-2)])
def test_an_exported_model_has_the_same_tokens_and_logits(
    tmp_path: Path, architecture: str, quantization: Any, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, out = merged(tmp_path, architecture=architecture), tmp_path / "out"
    assert (
        main(["export", str(folder), "--to", "gguf", "--out", str(out), "--quantization", quantization]) == 0
    )
    file = out / f"model-{quantization}.gguf"
    assert [path.name for path in out.iterdir()] == [file.name]
    back = converted(file)
    original = AutoModelForCausalLM.from_pretrained(folder)
    if quantization == "f16":
        original = original.half()
    expected = logits_of(original.bfloat16().float())  # a GGUF file is read back in bfloat16
    found = logits_of(AutoModelForCausalLM.from_pretrained(back).float())
    assert (expected - found).abs().max() < tolerance * expected.abs().max()
    assert (expected - found).abs().max() > 0 or quantization != "q8_0"
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (folder, back)]
    ids = [one.apply_chat_template(list(CONVERSATION))["input_ids"] for one in tokenizers]
    assert ids[0] == ids[1]


def test_ollama_s_template_writes_the_conversation_as_the_model_does(tmp_path: Path) -> None:
    folder = merged(tmp_path)
    assert main(["export", str(folder), "--to", "ollama"]) == 0
    text = (tmp_path / "merged-ollama" / "Modelfile").read_text()
    assert text.startswith("FROM ./model-q8_0.gguf\n") and 'PARAMETER stop "' in text
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = text.partition('TEMPLATE """')[2].partition('"""')[0]
    loop = re.fullmatch(r"(?s)\{\{ range \.Messages \}\}(.*)\{\{ end \}\}(.*?)", template)
    assert loop
    written = ""
    for message in CONVERSATION:  # what Go's text/template does with these actions
        turn = re.sub(
            r'(?s)\{\{ if eq \.Role "(\w+)" \}\}(.*?)\{\{ end \}\}',
            lambda found: found[2] if found[1] == message["role"] else "",  # noqa: B023
            loop[1],
        )
        written += turn.replace("{{ .Content }}", message["content"])
    expected = tokenizer.apply_chat_template(list(CONVERSATION), add_generation_prompt=True, tokenize=False)
    assert written + loop[2] == expected
    tokenizer.chat_template = "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="not a plain loop over messages"):
        modelfile("model.gguf", tokenizer)


def test_other_servers_read_the_folder_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = merged(tmp_path)
    assert main(["export", str(folder), "--to", "vllm"]) == main(["export", str(folder), "--to", "mlx"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"vllm serve {folder}", f"mlx_lm.server --model {folder}"]
    assert main(["export", str(folder), "--to", "mlx", "--out", str(tmp_path / "x")]) == 1
    assert "--out has no effect" in capsys.readouterr().err


def test_a_file_with_other_tokens_is_refused_and_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = merged(tmp_path)
    monkeypatch.setattr(gguf_export, "_pre_tokenizer", lambda model: "smollm")  # splits numbers into digits
    with pytest.raises(ModelError, match="encodes a conversation differently from token"):
        write_gguf(folder, tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]
    monkeypatch.undo()
    write_gguf(folder, tmp_path / "model.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(7)
    with pytest.raises(ModelError, match="the exported eos_token_id is"):
        check_same_tokens(tmp_path / "model.gguf", tokenizer)


def test_wrong_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = merged(tmp_path)

    def fails(model: Path, *options: str) -> str:
        assert main(["export", str(model), "--to", "gguf", *options]) == 1
        return capsys.readouterr().err

    assert "config.json is missing" in fails(tmp_path)
    assert "is an adapter: merge it first" in fails(write_adapter(tmp_path / "adapter", folder))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "is not an empty folder" in fails(folder, "--out", str(tmp_path / "full"))
    assert "cannot be written" in fails(folder, "--out", str(tmp_path / "full" / "file" / "below"))
    other = write_model(tmp_path / "other", architecture="mistral")
    assert "GGUF files of llama and qwen2, not of mistral" in fails(other)
    config = json.loads((folder / "config.json").read_text())
    scaled = config | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}
    (folder / "config.json").write_text(json.dumps(scaled))
    assert "no scaled rotary positions" in fails(folder)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {"type": "Whitespace"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "does not know how this tokenizer splits text (Whitespace" in fails(folder)
    assert not list(tmp_path.glob("merged-gguf/*"))
