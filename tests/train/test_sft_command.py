"""Supervised fine-tuning as a command and as a stage: what is learned, resumed, kept and refused."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.processes import ended, fork, needs_fork
from tests.rounding import assert_same
from tests.tiny_model import exact_logits_of, logits_of, write_adapter
from tests.tiny_run import QUESTIONS, json_lines, write_config, write_questions
from text2sql_grpo.commands import main
from text2sql_grpo.config import Config, LoraSettings, load_config
from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.bench import Bench
from text2sql_grpo.models.loaded_policy import LoadedPolicy
from text2sql_grpo.reliability.checkpoints import find_damage, saved_checkpoints
from text2sql_grpo.run import sft_stage as job
from text2sql_grpo.run.pipeline import run_arguments
from text2sql_grpo.run.sft_stage import stage_folder, started_policy

CHAT = [
    {"role": "user", "content": "branch(code)\nStaff?"},
    {"role": "assistant", "content": "<sql>SELECT 1</sql>"},
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "<answer>SELECT 2</answer>"},
]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TEXT2SQL_GRPO_CACHE", str(tmp_path / "cache"))
    return write_config(tmp_path)


def fine_tune(config: Path, *options: str, steps: int = 12) -> Path:
    """The folder that the command wrote."""
    out = Path("out")
    argv = ["sft", "--config", str(config), "--out", str(out), "--sft.max_steps", str(steps), *options]
    assert main(argv) == 0
    return out


def write_chats(chats: list[Any]) -> Path:
    Path("chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), "utf-8")
    return Path("chats.jsonl")


@pytest.mark.parametrize(("lora", "trained"), [("null", "model"), ("{r: 4}", "adapter")])
def test_golds_are_learned_and_merged(
    config: Path, capsys: pytest.CaptureFixture[str], lora: str, trained: str
) -> None:
    options = ["--sft.learning_rate", "0.02", "--grpo.gradient_checkpointing", "true"]
    out = fine_tune(config, "--model.lora", lora, *options)
    rows = json_lines(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    assert rows[0]["learning_rate"] == 0.02 and rows[-1]["learning_rate"] == pytest.approx(0.002, rel=0.3)
    assert rows[-1]["tokens"] > rows[0]["tokens"] > 100
    assert (out / trained / "tokenizer_config.json").is_file()
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in ("model", out / "merged"))
    assert (logits_of(before) - logits_of(after)).abs().max() > 1e-2
    assert load_config(out / "config.yaml").sft == replace(
        load_config(config).sft, max_steps=12, learning_rate=0.02
    )
    printed = capsys.readouterr()
    assert "Its accuracy: text2sql-grpo evaluate --model_path out/merged" in printed.out
    assert printed.err == ""


def test_chats_alone_and_beside_golds(config: Path) -> None:
    chats = str(write_chats([{"messages": CHAT, "database": "shop"}] * 2))
    alone = json_lines(fine_tune(config, "--chats", chats, steps=1) / "metrics.jsonl")
    questions = str(config.with_name("questions.jsonl"))
    both = fine_tune(config, "--chats", chats, "--questions", questions, "--sft.batch_size", "6", steps=1)
    assert json_lines(both / "metrics.jsonl")[0]["tokens"] > 2 * alone[0]["tokens"] / 4


@pytest.mark.parametrize(
    ("chats", "message"),
    [
        (
            [{"messages": CHAT}, {"prompt": "?"}],
            "the chat has no list of messages, only prompt (chats.jsonl, line 2)",
        ),
        ([{"messages": CHAT[:1]}], "must end with an assistant"),
        ([{"messages": [CHAT[0], {"role": "assistant", "content": None}]}], "a role and content (text), got"),
        ([{"messages": [{"role": "user", "content": "?" * 3000}, CHAT[1]]}], "no chat of at most 512 tokens"),
        ([], "among 0 (chats.jsonl)"),
    ],
)
def test_unusable_chats_are_refused(
    config: Path, chats: list[Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["sft", "--config", str(config), "--chats", str(write_chats(chats)), "--out", "out"]
    assert main(argv) == 1
    assert message in capsys.readouterr().err
    assert not Path("out/config.yaml").exists()


def test_a_chat_has_its_own_tools_in_its_prompt(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    make = job.chat_demonstration
    monkeypatch.setattr(
        job, "chat_demonstration", lambda row, chat: seen.append(chat.tools) or make(row, chat)
    )
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    chats = write_chats([{"messages": CHAT, "tools": [tool]}, {"messages": CHAT}])
    fine_tune(config, "--chats", str(chats), steps=1)
    assert seen == [[tool], None]


@pytest.mark.thorough
@needs_fork
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_killed_stage_resumes_bit_for_bit(config: Path) -> None:
    def run(out: str, *options: str) -> int:
        argv = ["sft", "--config", str(config), "--out", out, "--sft.max_steps", "20"]
        return main([*argv, "--sft.save_steps", "2", *options])

    assert run("whole") == 0
    pid = fork(Path("killed_run"), lambda: run("killed"))
    while len(saved_checkpoints(Path("killed"))) < 2:
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    assert ended([pid]) == [-signal.SIGKILL]
    assert run("killed", "--resume", "auto") == 0

    one, other = (saved_checkpoints(Path(folder))[-1] for folder in ("whole", "killed"))
    assert one.name == other.name == "checkpoint-20" and find_damage(other) is None
    weights = [load_file(path / "model.safetensors") for path in (one, other)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    rows = [
        [
            {k: v for k, v in row.items() if k != "elapsed_s"}
            for row in json_lines(Path(name, "metrics.jsonl"))
        ]
        for name in ("whole", "killed")
    ]
    assert rows[0] == rows[1]


def start(config: Config) -> LoadedPolicy:
    return started_policy(Bench.open(config), run_arguments(config), Console(quiet=True))


def changed(config: Config, **fields: Any) -> Config:
    assert config.sft is not None
    return replace(config, sft=replace(config.sft, **fields))


def test_the_stage_is_kept_and_lora_continues_on_its_adapter(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = changed(load_config(config), max_steps=3)
    lora = replace(full, model=replace(full.model, lora=LoraSettings(r=4)))
    made = {name: start(one) for name, one in {"full": full, "lora": lora}.items()}
    assert made["full"].folder.endswith("model") and made["lora"].folder == str(config.with_name("model"))
    assert isinstance(made["lora"].model, PeftModel)
    assert all(p.requires_grad for name, p in made["lora"].model.named_parameters() if "lora_" in name)
    monkeypatch.setattr(job, "_run_stage", lambda *_: pytest.fail("trained again"))
    for name, one in {"full": full, "lora": lora}.items():
        torch.testing.assert_close(logits_of(start(one).model), logits_of(made[name].model), rtol=0, atol=0)
    assert not list(Path("cache/sft").glob("*.unfinished"))


def rewrite_question(config: Config) -> Config:
    rows = [{**QUESTIONS[0], "question": "Staff in Lisbon?"}, *QUESTIONS[1:]]
    return replace(config, data=replace(config.data, train=write_questions(Path("other.jsonl"), rows)))


@pytest.mark.parametrize(
    "change",
    [
        lambda config: changed(config, look_share=0.25),
        lambda config: replace(config, run=replace(config.run, seed=1)),
        lambda config: replace(config, grpo=config.grpo | {"optim": "sgd"}),
        lambda config: replace(config, grpo=config.grpo | {"bf16": not run_arguments(config).bf16}),
        lambda config: replace(config, model=replace(config.model, lora=LoraSettings(r=2))),
        lambda config: replace(config, environment=replace(config.environment, schema_text="ddl")),
        lambda config: replace(config, data=replace(config.data, hide=["branch.nothing"])),
        rewrite_question,
    ],
)
def test_what_makes_another_stage(config: Path, change: Callable[[Config], Config]) -> None:
    one = load_config(config)
    same = changed(one, save_steps=7, evaluate_every=3)
    same = replace(same, grpo=one.grpo | {"learning_rate": 1e-5, "max_steps": 9})
    same = replace(same, model=replace(one.model, frozen_layers=1))
    folders = {stage_folder(Bench.open(each), run_arguments(each)) for each in (one, change(one), same)}
    assert len(folders) == 2


@pytest.mark.parametrize("lora", [None, LoraSettings()])
def test_a_shipped_adapter_takes_the_place_of_training(config: Path, lora: Any) -> None:
    adapter = write_adapter(Path("adapter"), config.with_name("model"))
    one = changed(load_config(config), adapter=adapter)
    policy = start(replace(one, model=replace(one.model, lora=lora)))
    base = AutoModelForCausalLM.from_pretrained("model")
    expected = exact_logits_of(PeftModel.from_pretrained(base, adapter))
    found = exact_logits_of(policy.model)
    assert_same(found, expected, layers=base.config.num_hidden_layers, dtype=torch.float32)
    assert isinstance(policy.model, PeftModel) == (lora is not None)


def test_a_folder_without_an_adapter_is_named(config: Path) -> None:
    with pytest.raises(
        job.ConfigError, match=r"sft\.adapter holds no LoRA adapter: no adapter_config\.json in x"
    ):
        start(changed(load_config(config), adapter=Path("x")))


def test_more_processes_than_a_batch_can_be_divided_by(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = changed(load_config(config), batch_size=3)
    arguments = run_arguments(one)
    monkeypatch.setattr(type(arguments), "world_size", 2)
    monkeypatch.setattr(job, "base_policy", lambda _: pytest.fail("loaded the model"))
    with pytest.raises(job.ConfigError, match=r"sft\.batch_size must be a multiple .* \(2\), got 3"):
        job.sft(one, Path("out"), arguments, console=Console(quiet=True))


def test_no_questions_and_no_chats_fit(config: Path) -> None:
    one = load_config(config)
    with pytest.raises(DataError, match="no demonstration has at most"):
        long = [{**row, "question": "?" * 9000} for row in QUESTIONS]
        start(changed(one, questions=write_questions(Path("long.jsonl"), long)))


def test_a_batch_that_is_too_long_counts_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_questions(Path("questions.jsonl"), [QUESTIONS[0], {**QUESTIONS[1], "question": "?" * 9000}])
    out = fine_tune(config, "--sft.batch_size", "1", steps=2)
    assert sorted(row["loss"] > 0 for row in json_lines(out / "metrics.jsonl")) == [False, True]
    assert "left out 1 question longer than the model's context" in capsys.readouterr().out


def test_evaluations_of_the_stage_are_scheduled(config: Path) -> None:
    out = fine_tune(config, "--data.dev", "questions.jsonl", "--evaluation.every", "2", steps=3)
    assert [line["step"] for line in json_lines(out / "evaluation_schedule.jsonl")] == [0, 2, 3]
    assert len(json_lines(out / "metrics.jsonl")) == 6  # three steps and three evaluations
