"""Steps that cannot be taken: skipped and counted until they are too many, or ended with the cause."""

import os
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from tests.hostile.surroundings import living_children
from tests.scripted_policy import ask
from tests.scripted_trainer import Bench
from tests.tiny_run import json_lines
from text2sql_grpo.errors import RunError
from text2sql_grpo.reliability.bad_steps import BadSteps
from text2sql_grpo.rollout.engine import Continuations
from text2sql_grpo.run.sft_stage import train_on
from text2sql_grpo.training.sql_trainer import SQLGRPOTrainer

Change = Callable[[int, dict[str, Any], torch.Tensor], Any]


def make_trainer(folder: Path, *, engine: Any = "auto", **fields: Any) -> SQLGRPOTrainer:
    # In bfloat16 a sum would depend on what stands beside it.
    fields = {"max_turn_tokens": 6, "max_steps": 3, "learning_rate": 0.01, "bf16": False, **fields}
    return Bench(folder, [ask("Lisbon?")] * 4, engine=engine, **fields).trainer


def weights(trainer: SQLGRPOTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])


class AfterEachStep(TrainerCallback):
    """Keeps the weights after each step; whatever else is to happen then, happens."""

    def __init__(self, trainer: SQLGRPOTrainer, then: Callable[[], object] = lambda: None) -> None:
        self.weights = [weights(trainer)]
        self._trainer, self._then = trainer, then
        trainer.add_callback(self)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.weights.append(weights(self._trainer))
        self._then()


def logged(trainer: SQLGRPOTrainer, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def after_loss(patch: pytest.MonkeyPatch, change: Change) -> None:
    """Changes what TRL's loss returns; `change` gets the number of the call, the inputs and the loss."""
    compute = GRPOTrainer.compute_loss
    calls = 0

    def changed(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return change(calls, inputs, compute(self, model, inputs, *args, **kwargs))

    patch.setattr(GRPOTrainer, "compute_loss", changed)


def test_a_step_without_a_finite_gradient_is_skipped_and_counted_until_they_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, max_steps=5)
    after = AfterEachStep(trainer)

    def change(number: int, inputs: dict[str, Any], loss: torch.Tensor) -> torch.Tensor:
        decay = sum(parameter.square().sum() for parameter in trainer.model.parameters())
        return loss * float("nan") if number in (2, 4, 5) else loss + 0.1 * decay

    after_loss(monkeypatch, change)
    monkeypatch.setattr("text2sql_grpo.reliability.bad_steps.PATIENCE", 2)
    with pytest.raises(RunError, match=r"the gradient was not finite in 2 steps in a row, .* 5:"):
        trainer.train()
    assert logged(trainer, "step/skipped") == [0.0, 1.0, 0.0, 1.0]
    moved = [not torch.equal(one, other) for one, other in pairwise(after.weights)]
    assert moved == [True, False, True, False]
    assert after.weights[-1].isfinite().all()


def test_the_scaler_of_float16_skips_a_step_by_itself_and_lowers_its_scale() -> None:
    model, scaler = torch.nn.Linear(2, 1), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer, skipped = torch.optim.SGD(model.parameters(), lr=0.1), list[float]()
    trainer: Any = SimpleNamespace(accelerator=SimpleNamespace(scaler=scaler))
    callback = BadSteps(trainer, lambda metrics: skipped.append(metrics["step/skipped"]))
    weights = [model.weight.detach().clone()]
    for value in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
        scaler.unscale_(optimizer)
        callback.on_pre_optimizer_step(None, SimpleNamespace(global_step=0), None, model=model)  # type: ignore[arg-type]
        scaler.step(optimizer)
        scaler.update()
        weights.append(model.weight.detach().clone())
    assert skipped == [1.0, 0.0]
    assert scaler.get_scale() == 4.0
    assert [torch.equal(one, other) for one, other in pairwise(weights)] == [True, False]


@pytest.mark.parametrize("where", ["rollouts", "loss"])
def test_what_does_not_fit_into_memory_ends_the_run_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    trainer = make_trainer(tmp_path)
    if where == "rollouts":
        monkeypatch.setattr(trainer.rollouts, "run", out_of_memory)
    else:
        monkeypatch.setattr(GRPOTrainer, "_compute_loss", out_of_memory)
    with pytest.raises(RunError, match=r"does not fit into memory: CUDA out of memory.: lower it"):
        train_on(trainer, None, needs_less="lower it")


def test_dead_executor_workers_are_replaced(tmp_path: Path) -> None:
    before, killed = living_children(), set[int]()
    trainer = make_trainer(tmp_path, max_steps=3, max_turn_tokens=60, engine="generation")
    said = 0

    def answer(prompts: list[list[int]], **_: Any) -> Continuations:
        """Another query each time: none is answered from the cache."""
        nonlocal said
        texts = [f"<answer>SELECT code, {said + i} FROM branch</answer>" for i, _ in enumerate(prompts)]
        said += len(prompts)
        for pid in living_children() - before:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        return Continuations([trainer.rollouts.chat.turn_ids(text) for text in texts])

    trainer.rollouts.policy = lambda model: SimpleNamespace(generate=answer)  # type: ignore[method-assign]
    trainer.train()

    assert len(killed) >= 2  # those of the first step, and those that took their places
    reasons = [row["reason"] for row in json_lines(tmp_path / "run" / "rollouts.jsonl")]
    assert len(reasons) == 12
    assert set(reasons) <= {"columns", "query_failed"}
    assert reasons.count("query_failed") <= len(killed)  # the query at hand is answered by an error
