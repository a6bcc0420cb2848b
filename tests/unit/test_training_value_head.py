"""Credit by the value head: states before turns, its bounds, and where it is saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.scripted_policy import ask
from tests.tiny_model import write_model
from tests.unit.test_training_bad_steps import make_trainer
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.training.credit_gae import GAECredit, turn_states
from text2sql_grpo.training.parts import Batch, Judged, Row, turn_spans
from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), architecture="qwen2", max_positions=2048)


def test_a_state_is_that_of_the_token_before_the_turn(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path, per_device_train_batch_size=2, steps_per_generation=2)
    episodes = [
        Episode(ask("q"), prompt_ids=[5, 6, 7], completion_ids=[8, 9, 10, 11], completion_mask=[1, 1, 0, 1]),
        Episode(ask("q"), prompt_ids=[5], completion_ids=[3, 4], completion_mask=[1, 1]),
        Episode(ask("q"), prompt_ids=[5, 6], completion_ids=[], completion_mask=[]),
    ]
    batch = Batch.of([Row(episode, Judged(0, {}, 1.0, "submitted", True)) for episode in episodes])
    inputs = batch.tensors(pad_token_id=0, multiple=None, device=trainer.accelerator.device)
    states = turn_states(trainer, batch, inputs)
    assert [len(state) for state in states] == [2, 1, 0]
    for episode, state in zip(episodes, states, strict=True):
        ids = torch.tensor([episode.prompt_ids + episode.completion_ids])
        with torch.no_grad():
            whole = trainer.model.model(ids.to(trainer.model.device)).last_hidden_state[0].cpu()
        places = [len(episode.prompt_ids) - 1 + start for start, _ in turn_spans(episode.completion_mask)]
        torch.testing.assert_close(state, whole[places], atol=1e-5, rtol=1e-5)


def test_it_learns_which_states_end_well_and_keeps_its_bounds() -> None:
    torch.manual_seed(0)
    good, bad = torch.randn(2, 16)
    credit = GAECredit(16, 0.25, 0.75, scale="none")
    rewards = [1.0, 0.0, None]
    states = [torch.stack([good, good]), torch.stack([bad, bad]), torch.stack([good, bad])]
    first, second, masked = credit.estimate(rewards, states)
    assert (first, masked) == ([-advantage for advantage in second], [])  # of the value 0.5 everywhere
    for _ in range(60):
        credit.estimate(rewards, states)
    # What is left to a turn at the end: the reward less the value, before both are shifted by their mean.
    ends = [turns[-1] for turns in credit.estimate([0.75, 0.25], [good[None], bad[None]])]
    assert 0.0 <= ends[0] - ends[1] < 0.2  # values of 0.65 and 0.35 at least
    assert credit.metrics()["value/loss"] < 0.4


def gae_trainer(model: Path, folder: Path) -> SQLGRPOTrainer:
    fields = {"max_steps": 2, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(model, folder, turn_credit="gae", **fields)
    run = trainer.rollouts.run

    def played(sessions: Any) -> Any:
        episodes = run(sessions)
        for i, episode in enumerate(episodes):
            episode.is_masked, episode.final_sql = False, "SELECT 1" if i else episode.example.gold_sql
        return episodes

    trainer.rollouts.run = played  # type: ignore[method-assign]
    return trainer


def test_it_is_saved_in_checkpoints_resumed_from_and_no_part_of_the_model(
    model: Path, tmp_path: Path
) -> None:
    trainer = gae_trainer(model, tmp_path / "one")
    trainer.train()
    losses = [row["value/loss"] for row in trainer.state.log_history if "value/loss" in row]
    assert losses[0] == pytest.approx(0.693, abs=1e-3)
    assert max(row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row) > 0
    first, last = (tmp_path / "one" / "run" / f"checkpoint-{step}" for step in (1, 2))
    with safe_open(last / "model.safetensors", framework="pt") as stored:
        names = list(stored.keys())
    assert names == [name for name in names if name.startswith(("model.", "lm_head."))]
    resumed = gae_trainer(model, tmp_path / "two")
    resumed.train(resume_from_checkpoint=str(first))
    one, two = (credit.state_dict() for credit in (trainer.credit, resumed.credit))
    assert all(weight.abs().max() > 0 for weight in one["head"].values())
    torch.testing.assert_close(one, two, atol=0, rtol=0)
