"""The value head: states before turns, its bounds, and where it is saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from text2sql_grpo.training.advantages import turn_spans
from text2sql_grpo.training.value_head import ValueHead, turn_states

from tests.scripted_policy import ask
from tests.unit.test_training_trl_compat import make_trainer
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.errors import RunError
from text2sql_grpo.training.trainer import SQLGRPOTrainer


def test_a_state_is_that_of_the_token_before_the_turn(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, bf16=False, per_device_train_batch_size=2, steps_per_generation=2)
    episodes = [
        Episode(ask("q"), prompt_ids=[5, 6, 7], completion_ids=[8, 9, 10, 11], completion_mask=[1, 1, 0, 1]),
        Episode(ask("q"), prompt_ids=[5], completion_ids=[3, 4], completion_mask=[1, 1]),
        Episode(ask("q"), prompt_ids=[5, 6], completion_ids=[], completion_mask=[]),
    ]
    batch = {
        "prompt_ids": torch.tensor([[5, 6, 7], [0, 0, 5], [0, 5, 6]]),
        "prompt_mask": torch.tensor([[1, 1, 1], [0, 0, 1], [0, 1, 1]]),
        "completion_ids": torch.tensor([[8, 9, 10, 11], [3, 4, 0, 0], [2, 0, 0, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]),
    }
    states = turn_states(trainer, batch, [episode.completion_mask for episode in episodes])
    assert [len(state) for state in states] == [2, 1, 0]
    for episode, state in zip(episodes, states, strict=True):
        ids = torch.tensor([episode.prompt_ids + episode.completion_ids])
        with torch.no_grad():
            whole = trainer.model.model(ids).last_hidden_state[0]
        places = [len(episode.prompt_ids) - 1 + start for start, _ in turn_spans(episode.completion_mask)]
        torch.testing.assert_close(state, whole[places], atol=1e-5, rtol=1e-5)


def test_it_learns_which_states_end_well_and_keeps_its_bounds() -> None:
    torch.manual_seed(0)
    good, bad = torch.randn(2, 16)
    head = ValueHead(16, 0.25, 0.75)
    rows = [(1.0, [0.0] * 2), (0.0, [0.0] * 2), (None, [0.0] * 2)]
    states = [torch.stack([good, good]), torch.stack([bad, bad]), torch.stack([good, bad])]
    first = head.advantages(rows, states, scale="none", is_training=False)
    assert first[2] == []
    assert head._values(good[None]) == [0.5]
    for _ in range(60):
        head.advantages(rows, states, scale="none", is_training=True)
    assert 0.65 < head._values(good[None])[0] <= 0.75
    assert 0.25 <= head._values(bad[None])[0] < 0.35
    assert head.loss < 0.4


def gae_trainer(folder: Path, **fields: Any) -> SQLGRPOTrainer:
    trainer = make_trainer(
        folder, turn_credit="gae", learning_rate=1e-3, save_strategy="steps", save_steps=1, **fields
    )
    play = trainer._play

    def played(sessions: Any) -> Any:
        episodes = play(sessions)
        for i, episode in enumerate(episodes):
            episode.is_masked, episode.final_sql = False, "SELECT 1" if i else episode.example.gold_sql
        return episodes

    trainer._play = played  # type: ignore[method-assign]
    return trainer


def test_it_is_saved_in_checkpoints_resumed_from_and_no_part_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    trainer = gae_trainer(tmp_path / "one", max_steps=2)
    trainer.train()
    losses = [row["value/loss"] for row in trainer.state.log_history if "value/loss" in row]
    assert losses[0] == pytest.approx(0.693, abs=1e-3)
    assert max(row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row) > 0
    first, last = (tmp_path / "one" / "run" / f"checkpoint-{step}" for step in (1, 2))
    with safe_open(last / "model.safetensors", framework="pt") as stored:
        names = list(stored.keys())
    assert names == [name for name in names if name.startswith(("model.", "lm_head."))]
    resumed = gae_trainer(tmp_path / "two", max_steps=2)
    resumed.train(resume_from_checkpoint=str(first))
    for one, two in zip(
        trainer._value_head._head.parameters(), resumed._value_head._head.parameters(), strict=True
    ):
        assert one.abs().max() > 0
        assert torch.equal(one, two)
    (first / "value_head.pt").unlink()
    with pytest.raises(RunError, match="the checkpoint has no value head"):
        resumed._value_head.load(first)
