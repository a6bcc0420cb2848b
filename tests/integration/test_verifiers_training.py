"""Our trainer on a package that is not ours: the reward rises, and vf-replay scores the traces alike."""

import importlib.util
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.number_game import find_packages, game_model, game_tokenizer, game_trainer
from tests.tiny_run import json_lines
from tests.verifiers_commands import run_command
from text2sql_grpo.commands import main
from text2sql_grpo.errors import RunError
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.sft.demonstrations import chat_demonstration

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None,
    reason="needs verifiers (pip install text2sql-grpo[verifiers])",
)


def scores(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Rewards and metrics of traces by their id."""
    traces = [row["traces"][0] for row in rows]
    return {trace["id"]: str((trace["rewards"], trace["metrics"])) for trace in traces}


def test_reward_rises_and_saved_traces_score_alike(tmp_path: Path) -> None:
    trainer = game_trainer(tmp_path, max_steps=15)
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert len(rewards) == 15
    assert fmean(rewards[:3]) < 0.2 and fmean(rewards[-3:]) > 0.5

    rows = json_lines(tmp_path / "run" / "traces.jsonl")
    assert Counter(row["step"] for row in rows) == {step: 96 for step in range(15)}
    assert all(row["ok"] and len(row["traces"]) == 1 for row in rows)
    late = rows[-100:]  # the policy does all sorts of things by then
    lines = (tmp_path / "run" / "traces.jsonl").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "run" / "traces.jsonl").write_text("".join(lines[-100:]), "utf-8")
    run_command(tmp_path, "vf-replay", str(tmp_path / "run"), "--no-rich", "--output-dir", "replay")
    assert scores(json_lines(tmp_path / "replay" / "traces.jsonl")) == scores(late)
    assert len(set(scores(late).values())) > 3

    chats = tmp_path / "chats.correct.jsonl"
    options = ["--traces", str(tmp_path / "run"), "--out", str(tmp_path / "chats.jsonl")]
    assert main(["collect", *options, "--keep", "correct", "shortest_correct"]) == 0
    chat = ChatFormat(game_tokenizer())
    learned = {tuple(chat_demonstration(row, chat).ids) for row in json_lines(chats)}
    found = [row["traces"][0]["nodes"] for row in late if row["traces"][0]["metrics"]["found"] == 1]
    assert learned == {tuple(token for node in nodes for token in node["token_ids"]) for nodes in found}
    assert len(found) > len(learned) == len(json_lines(chats))
    assert 1 < len(json_lines(tmp_path / "chats.shortest_correct.jsonl")) < len(learned)


def test_a_resumed_run_leaves_each_rollout_once(tmp_path: Path) -> None:
    small = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    game_trainer(tmp_path, max_steps=2, **small).train()
    with pytest.raises(RunError, match="the output folder has earlier traces"):
        game_trainer(tmp_path, max_steps=2, **small).train()
    resumed = game_trainer(tmp_path, max_steps=3, **small)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    rows = json_lines(tmp_path / "run" / "traces.jsonl")
    assert [row["step"] for row in rows] == [0] * 4 + [1] * 4 + [2] * 4
    assert [row["run"]["work"]["step"] for row in rows] == [row["step"] for row in rows]
    assert len({row["traces"][0]["id"] for row in rows}) == len(rows)


def test_what_is_no_traces_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["collect", "--traces", str(tmp_path), "--out", str(tmp_path / "chats.jsonl")]
    assert main(options) == 1
    assert "--traces needs --keep" in capsys.readouterr().err
    assert main([*options, "--keep", "correct"]) == 1
    assert f"cannot read traces of verifiers: [Errno 2] No such file or directory: '{tmp_path}" in (
        capsys.readouterr().err
    )
    (tmp_path / "traces.jsonl").write_text('{"example": 1}\n', "utf-8")
    assert main([*options, "--keep", "correct"]) == 1
    assert "cannot read traces of verifiers: " in capsys.readouterr().err


def test_the_example_runs(tmp_path: Path, repo_root: Path) -> None:
    find_packages()
    tokenizer = game_tokenizer()
    game_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    found = importlib.util.spec_from_file_location("example", repo_root / "examples" / "verifiers_taskset.py")
    assert found is not None and found.loader is not None
    example = importlib.util.module_from_spec(found)
    found.loader.exec_module(example)
    options = ["--taskset", "higher-lower", "--config", '{"numbers": 4}', "--model", str(tmp_path / "model")]
    options += ["--output-dir", str(tmp_path / "run"), "--max-steps", "1", "--lora"]
    options += ["--max-turn-tokens", "2", "--max-rollout-tokens", "24", "--grpo", '{"num_generations": 4}']
    trainer = example.main(options)
    assert trainer.state.global_step == 1 and trainer.model.peft_config
    assert len(json_lines(tmp_path / "run" / "traces.jsonl")) == 8
