"""Supervised training on chats: what is learned, all weights or an adapter, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_model
from tests.tiny_run import json_lines, write_config
from text2sql_grpo.config import load_config
from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.jobs.warm_start import SupervisedSettings, warm_start
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.training.trajectories import supervised_tokens

CHAT = [
    {"role": "user", "content": "branch(code)\nStaff?"},
    {"role": "assistant", "content": "<sql>SELECT 1</sql>"},
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "<answer>SELECT 2</answer>"},
]
TWO_STEPS = SupervisedSettings(learning_rate=1e-2, batch_size=2, micro_batch_size=1, max_steps=2)


def write_chats(path: Path, chats: list[Any]) -> Path:
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats), "utf-8")
    return path


def train(folder: Path, chats: list[Any], settings: SupervisedSettings = TWO_STEPS, **model: Any) -> Path:
    """Trains a tiny model on chats; returns the folder."""
    base = write_model(folder / "base", max_positions=256)
    config = load_config(
        write_config(folder, warm_start=None, model={"path": str(base), "dtype": "float32"} | model)
    )
    data = write_chats(folder / "chats.jsonl", chats)
    warm_start(config, data, folder / "out", settings, seed=0, console=Console(quiet=True))
    return folder / "out"


@pytest.mark.parametrize(("lora", "trained"), [(None, "model"), ({"r": 4}, "adapter")])
def test_the_assistants_words_are_learned(tmp_path: Path, lora: Any, trained: str) -> None:
    settings = SupervisedSettings(learning_rate=1e-2, batch_size=2, micro_batch_size=1, max_steps=12)
    out = train(tmp_path, [{"messages": CHAT}] * 2, settings, lora=lora)
    losses = [row["loss"] for row in json_lines(out / "metrics.jsonl") if "loss" in row]
    assert len(losses) == 12 and losses[-1] < 0.9 * losses[0]
    assert (out / trained / "tokenizer_config.json").is_file()
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    after = AutoModelForCausalLM.from_pretrained(out / "merged")
    moved = [not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert any(moved)
    assert load_config(out / "config.yaml").model.path == str(tmp_path / "base")


def test_a_chat_has_its_own_tools_in_its_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def tokens(messages: Any, chat: ChatFormat) -> tuple[list[int], list[int]]:
        seen.append(chat.tools)
        return supervised_tokens(messages, chat)

    monkeypatch.setattr("text2sql_grpo.jobs.warm_start.supervised_tokens", tokens)
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    out = train(tmp_path, [{"messages": CHAT, "tools": [tool]}, {"messages": CHAT}])
    assert (out / "merged").is_dir() and seen == [[tool], None]


@pytest.mark.parametrize(
    ("chats", "message"),
    [
        ([{"messages": CHAT}, {"prompt": "?"}], r"expected messages, got prompt \(.*line 2\)"),
        ([{"messages": CHAT[:1]}], r"ends with an assistant, .*line 1\)"),
        ([{"messages": [CHAT[0], {"role": "assistant", "content": None}]}], "a role and text, got .*null"),
        ([{"messages": [{"role": "user", "content": "?" * 300}, CHAT[1]]}], "of at most 256 tokens"),
        ([], "got none among 0"),
    ],
)
def test_chats_that_teach_nothing_are_refused(tmp_path: Path, chats: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        train(tmp_path, chats)
    assert not (tmp_path / "out").exists()


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a multiple of 4 as batch size, got 6"):
        train(tmp_path, [{"messages": CHAT}], SupervisedSettings(batch_size=6))
    (tmp_path / "tiny").mkdir()
    config = load_config(write_config(tmp_path / "tiny"))
    with pytest.raises(ConfigError, match=r"expected model\.path, the model to train, got model\.tiny"):
        warm_start(config, Path("absent"), tmp_path / "out", TWO_STEPS, seed=0, console=Console(quiet=True))
