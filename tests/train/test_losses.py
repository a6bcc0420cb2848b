"""Losses beside GRPO's: each adds the gradient of the same loss computed alone, by whole rows."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rounding import assert_same
from tests.scripted_trainer import LISBON, RIGHT, WRONG, Bench
from tests.train.test_token_trees import Sharing
from text2sql_grpo.config import LossesConfig
from text2sql_grpo.environment.episode import Rollout
from text2sql_grpo.training.losses import beside, is_wrong, joined
from text2sql_grpo.training.parts import Batch, Judged, Row

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Sharing:
    return Sharing(tmp_path_factory.mktemp("losses"), temperature=TEMPERATURE, loss_type="dapo")


def rollout(random_: random.Random, prompt: list[int]) -> Rollout:
    flags = [1] * random_.randint(1, 6) + [0] * random_.randint(1, 4) + [1] * random_.randint(1, 6)
    ids = [random_.randrange(250) for _ in flags]
    return Rollout(
        prompt_ids=prompt,
        completion_ids=ids,
        completion_mask=flags,
        log_probs=[-random_.randint(8, 12) / 4 if flag else 0.0 for flag in flags],
    )


def random_batch(seed: int) -> tuple[Batch, torch.Tensor]:
    """Four groups of two rows, and the advantages of the rows: those of two groups are 0."""
    random_ = random.Random(seed)
    prompts = [[random_.randrange(250) for _ in range(random_.randint(2, 12))] for _ in range(4)]
    rows = [
        Row(rollout(random_, prompt), Judged(place, {"r": 1.0}, 1.0, "submitted", place=place))
        for place, prompt in enumerate(prompts)
        for _ in range(2)
    ]
    advantages = torch.tensor([random_.uniform(-1, 1) * (row < 4) for row in range(8)])
    return Batch.of(rows), advantages


def inputs_of(batch: Batch, advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    inputs = batch.tensors(pad_token_id=256, multiple=None, device=torch.device("cpu"))
    return joined(batch, inputs | {"advantages": advantages}, pad_token_id=256)


def alone(trainer: Sharing, row: Row) -> torch.Tensor:
    """Cross-entropy of one row by the model itself, summed over its tokens."""
    found = row.rollout
    ids = torch.tensor([found.prompt_ids + found.completion_ids])
    logits = trainer.model(ids).logits[0, len(found.prompt_ids) - 1 : -1] / TEMPERATURE
    log_probs = logits.log_softmax(-1).gather(1, ids[0, len(found.prompt_ids) :, None])[:, 0]
    return -(torch.tensor(row.weights, dtype=log_probs.dtype) * log_probs).sum()


def gradient_of(trainer: Sharing, losses: list[torch.Tensor], divisor: float) -> torch.Tensor:
    trainer.model.zero_grad()
    (torch.stack(losses).sum() / divisor).backward()
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    return torch.cat([p.grad.flatten() for p in parameters])


def with_rows_beside(batch: Batch, seed: int) -> Batch:
    """One row with a prompt of the batch, and one with a longer prompt and completion than any."""
    random_ = random.Random(seed)
    known = beside(rollout(random_, batch.rows[5].rollout.prompt_ids), 2, 0.25)
    longer = beside(rollout(random_, list(range(20))), 9, 0.5)
    longer.rollout.completion_ids *= 2
    longer.rollout.completion_mask *= 2
    return batch.with_beside([known, beside(longer.rollout, 9, 0.5)])


@pytest.mark.parametrize("is_shared", [True, False])
def test_rows_beside_the_groups_add_the_gradient_of_their_loss(trainer: Sharing, is_shared: bool) -> None:
    batch, advantages = random_batch(1)
    taught = with_rows_beside(batch, 2)
    loss, gradient = trainer.learn(inputs_of(taught, advantages), shared=is_shared)
    expected_loss, expected = trainer.learn(inputs_of(batch, advantages), shared=False)
    tokens = float(inputs_of(batch, advantages)["num_items_in_batch"])
    with trainer.precision():
        losses = [alone(trainer, row) for row in taught.beside]
        expected = expected + gradient_of(trainer, losses, tokens)
    assert sum(losses) > 0
    assert_same(gradient, expected, layers=trainer.num_layers)
    assert_same(loss, expected_loss + sum(losses).detach() / tokens, layers=trainer.num_layers)


@pytest.mark.parametrize("is_shared", [True, False])
def test_observations_are_learned_also_in_groups_of_one_reward(trainer: Sharing, is_shared: bool) -> None:
    batch, advantages = random_batch(3)
    rows = [
        Row(
            row.rollout,
            row.judged,
            weights=[0.125 * (1 - flag) for flag in row.rollout.completion_mask],
        )
        for row in batch.rows
    ]
    inputs = inputs_of(Batch.of(rows), advantages)
    _, gradient = trainer.learn(inputs, shared=is_shared)
    _, expected = trainer.learn(inputs_of(batch, advantages), shared=False)
    with trainer.precision():
        losses = [alone(trainer, row) for row in rows]
        expected = expected + gradient_of(trainer, losses, float(inputs["num_items_in_batch"]))
    assert_same(gradient, expected, layers=trainer.num_layers)


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_split_loses_no_row_and_puts_it_with_its_prompt(trainer: Sharing, is_shared: bool) -> None:
    batch, advantages = random_batch(4)
    inputs = inputs_of(with_rows_beside(batch, 5), advantages)
    whole = trainer.learn(inputs, shared=is_shared)[1]
    trainer.args.steps_per_generation, trainer.args.gradient_accumulation_steps = 4, 4
    trainer.current_gradient_accumulation_steps, before = 4, trainer.update.is_on
    trainer.update.is_on = is_shared
    try:
        parts = trainer.update.split(inputs)
        gradients = [trainer.learn(part, shared=is_shared)[1] for part in parts]
    finally:
        trainer.args.steps_per_generation = trainer.args.gradient_accumulation_steps = 1
        trainer.current_gradient_accumulation_steps, trainer.update.is_on = 1, before
    assert [int((~part["is_beside"]).sum()) for part in parts] == [2, 2, 2, 2]
    assert sum(int(part["is_beside"].sum()) for part in parts) == 2
    for part in parts if is_shared else []:  # the first one beside is of the prompt of its part, if any is
        prompts = [ids.tolist() for ids in part["prompt_ids"]]
        assert len({str(prompt) for prompt in prompts[:2]}) == 1
        known = inputs["prompt_ids"][8].tolist()
        assert (known in prompts[2:]) == (known in prompts[:2])
    assert_same(sum(gradients), whole, layers=trainer.num_layers)


def taught(folder: Path, **losses: Any) -> Bench:
    return Bench(folder, [LISBON], losses=LossesConfig(**losses))


def test_a_group_that_is_all_wrong_gets_its_gold(tmp_path: Path) -> None:
    bench = taught(tmp_path, gold=0.25, gold_share=1.0)
    bench.say(*[[WRONG]] * 4)
    inputs = bench.batch(0)
    assert inputs["is_beside"].tolist() == [False] * 4 + [True]
    tokens = inputs["completion_ids"][4][inputs["ce_weights"][4] > 0]
    assert bench.trainer.processing_class.decode(tokens, skip_special_tokens=True) == RIGHT
    assert set(inputs["ce_weights"][4].tolist()) <= {0.0, 0.25}
    assert inputs["ce_weights"][:4].eq(0).all()
    assert inputs["tool_mask"][4].eq(0).all()


def test_a_group_with_a_right_rollout_gets_none(tmp_path: Path) -> None:
    bench = taught(tmp_path, gold=0.25, gold_share=1.0)
    bench.say([WRONG], [WRONG], [RIGHT], [WRONG])
    assert "is_beside" not in bench.batch(0)
    bench = taught(tmp_path / "none", gold=0.25, gold_share=0.5)  # half of one group is none
    bench.say(*[[WRONG]] * 4)
    assert "is_beside" not in bench.batch(0)


def test_a_failing_gold_is_not_taught(tmp_path: Path) -> None:
    failed = [Judged(0, None, None, "submitted")] * 2
    assert not is_wrong(failed)
    assert is_wrong([Judged(0, None, None, "turn_length")] * 2)
    assert is_wrong([Judged(0, {"r": 0.0}, 0.0, "submitted", verdict=False), *failed])
    assert not is_wrong([Judged(0, {"r": 1.0}, 1.0, "submitted", verdict=True), *failed])


def test_right_answers_before_training_are_kept_and_saved(tmp_path: Path) -> None:
    bench = taught(tmp_path, kept=0.5, kept_share=0.5)
    policies = []
    for script in ([[WRONG]] * 4, [[RIGHT]]):  # the group, and the question that is sampled before
        bench.say(*script)
        policies.append(bench.trainer.rollouts.policy)
    left = iter(policies)
    bench.trainer.rollouts.policy = lambda model: next(left)(model)  # type: ignore[method-assign]
    inputs = bench.batch(0)
    assert inputs["is_beside"].tolist() == [False] * 4 + [True] * 2
    assert "ce_weights" in inputs
    (part,) = bench.trainer.teach
    state = part.state_dict()
    other = taught(tmp_path / "other", kept=0.5, kept_share=0.5)
    other.trainer.teach[0].load_state_dict(state)
    other.say(*[[WRONG]] * 4)
    assert torch.equal(other.batch(0)["completion_ids"], inputs["completion_ids"])
