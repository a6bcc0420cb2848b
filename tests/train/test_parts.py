"""The batch that passes through the parts of a step."""

from collections.abc import Sequence

import torch

from text2sql_grpo.environment.episode import Rollout
from text2sql_grpo.token_tree.update import trimmed
from text2sql_grpo.training.losses import joined
from text2sql_grpo.training.parts import Batch, Judged, Row


def row(sampled: int, weights: Sequence[float] = ()) -> Row:
    rollout = Rollout(prompt_ids=[5, 6], completion_ids=[7] * sampled, completion_mask=[1] * sampled)
    return Row(rollout, Judged(0, {"reward": 1.0}, 1.0, "submitted"), weights=weights)


def inputs_of(batch: Batch) -> dict[str, torch.Tensor]:
    inputs = batch.tensors(pad_token_id=0, multiple=None, device=torch.device("cpu"))
    return joined(batch, inputs, pad_token_id=0)


def test_weights_of_the_cross_entropy_stay_with_their_tokens() -> None:
    batch = Batch.of([row(3, [0.0, 0.5, 1.0]), row(4)])
    inputs = inputs_of(batch)
    assert inputs["ce_weights"].shape == inputs["completion_ids"].shape == (2, 4)
    assert inputs["ce_weights"][:, :3].tolist() == [[0.0, 0.5, 1.0], [0.0, 0.0, 0.0]]
    assert inputs["num_items_in_batch"] == 7
    cut = trimmed(inputs)
    assert cut["ce_weights"].shape == cut["completion_ids"].shape == (2, 4)
    assert "ce_weights" not in inputs_of(Batch.of([row(2)]))
