"""Steps that cannot be taken as they are: skipped or halved, counted, and exact where they are taken."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer

from tests.hostile.surroundings import living_children
from tests.scripted_policy import ask, shop_environment
from tests.tiny_model import write_model
from tests.tiny_run import json_lines
from text2sql_grpo.environment.session import EnvironmentSettings
from text2sql_grpo.errors import RunError
from text2sql_grpo.grading import Grader
from text2sql_grpo.rewards import RewardMix
from text2sql_grpo.rollout.engine import Continuations
from text2sql_grpo.run_folder import RunLog
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.training.arguments import training_arguments
from text2sql_grpo.training.trainer import SQLGRPOTrainer

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
Change = Callable[[int, dict[str, Any], torch.Tensor], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), max_positions=2048)


def make_trainer(
    model: Path, folder: Path, *, max_turn_tokens: int = 6, engine: str = "auto", **fields: Any
) -> SQLGRPOTrainer:
    settings = EnvironmentSettings(instructions=False, schema_text="compact", max_turns=2)
    # In bfloat16 a sum would depend on what stands beside it.
    fields = {"max_steps": 3, "learning_rate": 0.01, "save_strategy": "no", "bf16": False, **fields}
    folder.mkdir(exist_ok=True)
    return SQLGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        training_arguments(
            {"per_device_train_batch_size": 4, "num_generations": 4, "report_to": "none", **fields},
            output_dir=str(folder / "run"),
            max_turn_tokens=max_turn_tokens,
            engine=engine,
            max_completion_length=300,
            disable_tqdm=True,
        ),
        examples=[ask("Lisbon?")] * 4,
        environment=shop_environment(folder, settings),
        rewards=RewardMix({"execution": 1.0}),
        grader=Grader(SQLExecutor()),
        processing_class=AutoTokenizer.from_pretrained(model),
        run_log=RunLog(folder / "run"),
    )


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


def micro_batch(size: int = 4) -> dict[str, Any]:
    """Episodes of unequal lengths, as TRL hands them to the loss."""
    torch.manual_seed(0)
    completion_mask = (torch.arange(9) < torch.tensor([[9], [2], [5], [7]])).long()
    batch = {
        "prompt_ids": torch.randint(0, 256, (4, 5)),
        "prompt_mask": torch.ones(4, 5, dtype=torch.long),
        "completion_ids": torch.randint(0, 256, (4, 9)),
        "completion_mask": completion_mask,
        "tool_mask": (torch.arange(9) != 4).long().expand(4, 9).contiguous(),
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.7]),
        "old_per_token_logps": -4 - torch.rand(4, 9) * 3,
        "ref_per_token_logps": -4 - torch.rand(4, 9) * 3,
    }
    batch = {name: value[:size] for name, value in batch.items()}
    return batch | {"num_items_in_batch": completion_mask.sum()}


@pytest.fixture(scope="module")
def learner(model: Path, tmp_path_factory: pytest.TempPathFactory) -> SQLGRPOTrainer:
    return make_trainer(model, tmp_path_factory.mktemp("learner"), beta=0.1)


def learn(trainer: SQLGRPOTrainer, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of a micro-batch, by the way that training takes."""

    trainer.current_gradient_accumulation_steps = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOTrainer, "_prepare_inputs", lambda self, inputs: inputs)
        loss = trainer.training_step(trainer.model, batch, None)
    return loss, torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


def learn_afresh(trainer: SQLGRPOTrainer, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    trainer.model.zero_grad()
    return learn(trainer, batch)


def assert_same_gradient(one: torch.Tensor, other: torch.Tensor) -> None:
    """But for the rounding of sums."""
    assert one.abs().max() > 1e-3
    torch.testing.assert_close(one, other, atol=2e-6 * float(one.abs().max()), rtol=1e-5)


def too_large(number: int, inputs: dict[str, Any], loss: torch.Tensor) -> torch.Tensor:
    if len(inputs["completion_ids"]) > 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return loss


@pytest.mark.parametrize("name", LOSSES)
def test_two_halves_have_the_gradient_of_the_whole(
    learner: SQLGRPOTrainer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(learner, "loss_type", name)
    loss, gradient = learn_afresh(learner, micro_batch())
    after_loss(monkeypatch, too_large)

    halved_loss, halved_gradient = learn_afresh(learner, micro_batch())

    torch.testing.assert_close(halved_loss, loss, atol=1e-6, rtol=1e-5)
    assert_same_gradient(halved_gradient, gradient)


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_memory_that_ends_in_the_backward_pass(
    learner: SQLGRPOTrainer, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """Of a step's first micro-batch nothing stays behind; a later one is mixed with those before."""
    _, gradient = learn_afresh(learner, micro_batch())
    learner.model.zero_grad()
    hooks = []

    def too_large_later(number: int, inputs: dict[str, Any], loss: torch.Tensor) -> torch.Tensor:
        def out_of_memory(_: torch.Tensor) -> None:
            hooks.pop().remove()
            raise torch.OutOfMemoryError("CUDA out of memory.")

        if number == (1 if is_first else 2):
            # The embeddings come last: other gradients stand by then.
            hooks.append(learner.model.get_input_embeddings().weight.register_hook(out_of_memory))
        return loss

    after_loss(monkeypatch, too_large_later)
    if not is_first:
        learn(learner, micro_batch())
    _, halved_gradient = learn(learner, micro_batch())

    if is_first:
        assert_same_gradient(halved_gradient, gradient)
    learner._bad_steps.on_pre_optimizer_step(
        learner.args, learner.state, learner.control, model=learner.model
    )
    assert any(p.grad is not None for p in learner.model.parameters()) == is_first


@pytest.mark.parametrize(
    ("setting", "size", "message"),
    [
        (
            {"_entropy_bonus_enabled": True},
            4,
            "cannot be halved: the entropy bonus is a mean over its tokens",
        ),
        ({"top_entropy_quantile": 0.5}, 4, "cannot be halved: top_entropy_quantile ranks its tokens"),
        ({"aux_loss_enabled": True}, 4, "cannot be halved: the router's loss is a mean over its tokens"),
        ({}, 1, "cannot be halved: it is one episode"),
        ({}, 2, "half of it does not fit either"),
    ],
)
def test_what_cannot_be_halved_stops_with_the_cause(
    learner: SQLGRPOTrainer,
    monkeypatch: pytest.MonkeyPatch,
    setting: dict[str, Any],
    size: int,
    message: str,
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(GRPOTrainer, "compute_loss", never)
    for name, value in setting.items():
        monkeypatch.setattr(learner, name, value)
    expected = f"a micro-batch does not fit into memory: CUDA out of memory.*{message}"
    with pytest.raises(RunError, match=expected):
        learn_afresh(learner, micro_batch(size))


def test_a_run_out_of_memory_goes_on_in_halves_with_the_same_episodes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_loss(monkeypatch, too_large)
    trainer = make_trainer(model, tmp_path, max_steps=2)
    trainer.train()

    assert logged(trainer, "step/halved") == [1.0, 1.0]
    assert [row["step"] for row in json_lines(tmp_path / "run" / "rollouts.jsonl")] == [0] * 4 + [1] * 4


def test_episodes_that_do_not_fit_stop_with_the_cause(
    learner: SQLGRPOTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def play(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(learner, "_play", play)
    with pytest.raises(
        RunError, match=r"the episodes of a step do not fit into memory: .*lower rollout\.max_slots"
    ):
        learner.train()


def test_a_step_without_a_finite_gradient_is_skipped_and_counted_until_they_are_too_many(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(model, tmp_path, max_steps=5)
    after = AfterEachStep(trainer)

    def change(number: int, inputs: dict[str, Any], loss: torch.Tensor) -> torch.Tensor:
        decay = sum(parameter.square().sum() for parameter in trainer.model.parameters())
        return loss * float("nan") if number in (2, 4, 5) else loss + 0.1 * decay

    after_loss(monkeypatch, change)
    monkeypatch.setattr("text2sql_grpo.reliability.bad_steps.PATIENCE", 2)
    with pytest.raises(RunError, match=r"the gradient was not finite in 2 steps in a row, .* 5:"):
        trainer.train()
    assert logged(trainer, "step/skipped") == [0.0, 1.0, 0.0, 1.0]
    moved = [
        not torch.equal(one, other) for one, other in zip(after.weights, after.weights[1:], strict=False)
    ]
    assert moved == [True, False, True, False]
    assert after.weights[-1].isfinite().all()


def test_dead_executor_workers_are_replaced(model: Path, tmp_path: Path) -> None:
    before, killed = living_children(), set[int]()
    trainer = make_trainer(model, tmp_path, max_steps=3, max_turn_tokens=60, engine="generation")
    said = 0

    def answer(prompts: list[list[int]], **_: Any) -> Continuations:
        """Another query each time: none is answered from the cache."""
        nonlocal said
        texts = [f"<answer>SELECT code, {said + i} FROM branch</answer>" for i, _ in enumerate(prompts)]
        said += len(prompts)
        for pid in living_children() - before:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        return Continuations([trainer._chat.turn_ids(text) for text in texts], None)

    trainer.generate = answer  # type: ignore[method-assign]
    trainer.train()

    assert len(killed) >= 2  # those of the first step, and those that took their places
    reasons = [row["reason"] for row in json_lines(tmp_path / "run" / "rollouts.jsonl")]
    assert len(reasons) == 12
    assert set(reasons) <= {"columns", "query_failed"}
    assert reasons.count("query_failed") <= len(killed)  # the query at hand is answered by an error
