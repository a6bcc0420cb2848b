"""Rollouts beside the update: whose weights play which batch, and what a run with them leaves behind."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from text2sql_grpo.training.overlap import current_player

from tests.tiny_run import json_lines
from tests.unit.test_training_trl_compat import make_trainer
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.training.arguments import SQLGRPOConfig, wrong_combinations
from text2sql_grpo.training.trainer import SQLGRPOTrainer

pytestmark = pytest.mark.usefixtures("rewards_with_spread")


def norms(model: torch.nn.Module) -> list[float]:
    """Sum of squares of each trained weight."""
    return [float(w.detach().square().sum()) for _, w in model.named_parameters() if w.requires_grad]


def noted(trainer: SQLGRPOTrainer, *, slow: str = "") -> tuple[list[Any], list[Any]]:
    """Lists that fill up with the weights that play each batch, and with those of each update."""
    played, updated = [], []
    play, update = trainer._play_batch, trainer._generate_and_score_completions

    def play_batch(batch: Any) -> Any:
        player = current_player()
        played.append(norms(player.model if player else trainer.model))
        time.sleep(0.3 * (slow == "play"))
        return play(batch)

    def generate(inputs: Any) -> Any:
        updated.append(norms(trainer.model))
        batch = update(inputs)
        time.sleep(0.3 * (slow == "update"))
        return batch

    trainer._play_batch, trainer._generate_and_score_completions = play_batch, generate  # type: ignore
    return played, updated


@pytest.mark.parametrize(("staleness", "lora"), [(1, False), (1, True), (2, False)])
def test_each_batch_is_played_with_weights_as_many_batches_old(
    tmp_path: Path, staleness: int, lora: bool
) -> None:
    trainer = make_trainer(tmp_path, lora=lora, staleness=staleness, max_steps=4, learning_rate=0.01)
    played, updated = noted(trainer)
    trainer.train()
    assert played == [updated[max(0, step - staleness)] for step in range(4)]
    assert len({tuple(one) for one in updated}) == 4
    assert [row["step"] for row in json_lines(tmp_path / "run" / "rollouts.jsonl")] == sorted([*range(4)] * 4)
    for row in (row for row in trainer.state.log_history if "time/step" in row):
        assert row["time/wait"] + row["time/update"] == pytest.approx(row["time/step"])
        assert row["time/decode"] > 0
        assert "clip_ratio/region_mean" in row


@pytest.mark.parametrize("slow", ["play", "update"])
def test_the_faster_thread_changes_nothing(tmp_path: Path, slow: str) -> None:
    runs = []
    for name in ("", slow):
        (tmp_path / f"run{name}").mkdir()
        trainer = make_trainer(tmp_path / f"run{name}", staleness=2, max_steps=4, learning_rate=0.01)
        noted(trainer, slow=name)
        trainer.train()
        runs.append(norms(trainer.model))
    assert runs[0] == runs[1]


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    """The batch that was played ahead is in the checkpoint: its weights are gone."""
    fields = {"staleness": 1, "max_steps": 4, "learning_rate": 0.01}
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    trainer = make_trainer(tmp_path / "one", save_strategy="steps", save_steps=2, **fields)
    trainer.train()
    resumed = make_trainer(tmp_path / "two", **fields)
    played, _ = noted(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "one" / "run" / "checkpoint-2"))
    assert len(played) == 1  # the last of the two that were left
    for one, two in zip(trainer.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_ratio_of_the_loss_is_to_the_log_probs_of_sampling(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, staleness=1, bf16=False)
    trainer.model.train()
    trainer.state.max_steps = 3
    rows = [dict(trainer.train_dataset[0]) for _ in range(4)]
    trainer._generate_and_score_completions(rows)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.mul_(1.1)
    batch = trainer._generate_and_score_completions(rows)
    assert torch.equal(batch["old_per_token_logps"], batch["sampling_per_token_logps"])
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    now = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0]
    sampled = batch["tool_mask"].bool() & batch["completion_mask"].bool()
    assert ((now - batch["old_per_token_logps"]).abs()[sampled] > 1e-3).any()
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.div_(1.1)
    before = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0]
    torch.testing.assert_close(before[sampled], batch["old_per_token_logps"][sampled], atol=1e-4, rtol=0)
    trainer.ahead.close()


def test_an_error_in_a_batch_played_ahead_ends_training(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, staleness=1, max_steps=4)
    play, calls = trainer._play_batch, []

    def failing(batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 2:
            raise OSError("the disk is gone")
        return play(batch)

    trainer._play_batch = failing  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_what_cannot_play_ahead_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with pytest.raises(ConfigError, match="staleness needs the engine slots"):
        make_trainer(tmp_path / "one", engine="generation", staleness=1)
    arguments = SQLGRPOConfig(output_dir=str(tmp_path), staleness=1, use_cpu=True, bf16=False)
    assert "sharded" in " ".join(wrong_combinations(arguments, 2, is_sharded=True))
    with pytest.raises(ConfigError, match=r"staleness compares .*: leave out top_p"):
        make_trainer(tmp_path / "two", staleness=1, top_p=0.9)
