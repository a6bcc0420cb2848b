"""Credit by generalised advantage estimation over turns, with a value head on the policy's hidden states."""

import operator
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from text2sql_grpo import trl_compat
from text2sql_grpo.reliability.ranks import gather
from text2sql_grpo.training.credit import EPSILON, token_advantages
from text2sql_grpo.training.parts import Batch, Credit, turn_spans

if TYPE_CHECKING:
    from text2sql_grpo.training.trainer import RolloutGRPOTrainer

GAE_LAMBDA = 0.95
_PASSES = 8  # over the turns of a generation batch
_LEARNING_RATE = 1e-3


class GAECredit(Credit):
    """Whitened advantages of turns by a linear value head, which has its own optimiser.

    The value is between the highest reward of a wrong answer and the lowest of a right one: the estimated
    chance of a right answer, scaled. The policy gets no gradient of the head, which is no part of the model.
    It is equal on all ranks, since each trains it on the turns of all. Its metric `value/loss` is the
    cross-entropy of a batch before it is trained on, in nats.

    Args:
        width: Size of a hidden state.
        low: Highest reward of a wrong answer.
        high: Lowest reward of a right answer.
        scale: See `whitened`.
    """

    def __init__(self, width: int, low: float, high: float, *, scale: str) -> None:
        self._low, self._high, self._scale = low, high, scale
        self._head = torch.nn.Sequential(
            torch.nn.LayerNorm(width, elementwise_affine=False),
            torch.nn.utils.skip_init(torch.nn.Linear, width, 1),  # draws nothing, as the run without it
        )
        for parameter in self._head.parameters():
            torch.nn.init.zeros_(parameter)
        self._optimizer = torch.optim.AdamW(self._head.parameters(), lr=_LEARNING_RATE)

    def advantages(
        self, batch: Batch, inputs: Mapping[str, torch.Tensor], trainer: "RolloutGRPOTrainer"
    ) -> torch.Tensor:
        states = [row for rank in gather(turn_states(trainer, batch, inputs)) for row in rank]
        by_turn = self.estimate([one.reward for one in batch.judged], states)
        return token_advantages(by_turn[batch.own], batch, inputs["completion_ids"])

    def estimate(self, rewards: Sequence[float | None], states: Sequence[torch.Tensor]) -> list[list[float]]:
        """Whitened advantages of the turns of each rollout, empty for masked ones; then train the head.

        Args:
            rewards: Reward of each rollout of all ranks, None if masked.
            states: States in which its turns start; float32 on the CPU, shape (turns, width).
        """
        advantages, targets = list[list[float]](), list[float]()
        for reward, state in zip(rewards, states, strict=True):
            values = self._values(state)
            advantages.append([] if reward is None else gae(reward, values))
            targets += map(operator.add, advantages[-1], values)
        counted = [state for reward, state in zip(rewards, states, strict=True) if reward is not None]
        if targets:
            self._fit(torch.cat(counted), targets)
        return whitened(advantages, scale=self._scale)

    @torch.no_grad()
    def _values(self, states: torch.Tensor) -> list[float]:
        chance = self._head(states)[:, 0].sigmoid()
        values: list[float] = (self._low + (self._high - self._low) * chance).tolist()
        return values

    def _fit(self, states: torch.Tensor, targets: Sequence[float]) -> None:
        wanted = (torch.tensor(targets) - self._low) / (self._high - self._low)
        losses = []
        for _ in range(_PASSES):
            loss = functional.binary_cross_entropy_with_logits(self._head(states)[:, 0], wanted.clamp(0, 1))
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            losses.append(loss.item())
        self.figures = {"value/loss": losses[0]}

    def state_dict(self) -> dict[str, Any]:
        return {"head": self._head.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])


@torch.no_grad()
def turn_states(
    trainer: "RolloutGRPOTrainer", batch: Batch, inputs: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Last hidden state of the token before each turn of each rollout, float32 on the CPU.

    One forward pass over the batch, in parts of `per_device_train_batch_size` rows.
    """
    backbone = trl_compat.causal_lm(trainer, trainer.model).base_model
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    present = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    before, size = inputs["prompt_ids"].shape[1] - 1, trainer.args.per_device_train_batch_size
    states: list[torch.Tensor] = []
    for rows in torch.arange(len(ids)).split(size):
        with trl_compat.autocast(trainer, trainer.model):
            output = backbone(input_ids=ids[rows], attention_mask=present[rows], use_cache=False)
        for hidden, row in zip(output.last_hidden_state, rows.tolist(), strict=True):
            spans = turn_spans(batch.rows[row].rollout.completion_mask)
            states.append(hidden[[before + start for start, _ in spans]].float().cpu())
    return states


def gae(reward: float, values: Sequence[float]) -> list[float]:
    """Generalised advantage estimates of the turns of one rollout, with gamma 1.

    Schulman et al. 2016 (arXiv:1506.02438), over turns in place of time steps. If values are between the
    highest reward of a wrong rollout and the lowest of a right one, and `GAE_LAMBDA ** (turns - 1)` is above
    1/2, a turn of a right rollout has a higher advantage than one of a wrong rollout from a state of the same
    value.

    Args:
        reward: Reward at the end of the last turn.
        values: Value of the state in which each turn starts.

    >>> gae(1.0, [0.5])
    [0.5]
    """
    advantages: list[float] = []
    after, advantage = reward, 0.0
    for value in reversed(values):
        advantage = after - value + GAE_LAMBDA * advantage
        advantages.append(advantage)
        after = value
    return advantages[::-1]


def whitened(advantages: Sequence[Sequence[float]], *, scale: str) -> list[list[float]]:
    """Shift the advantages of all turns to mean 0, and to deviation 1 unless `scale` is `none`.

    Args:
        advantages: Advantages of the turns of each rollout; empty for masked ones.
    """
    values = [value for row in advantages for value in row]
    if not values:
        return [list(row) for row in advantages]
    mean, divisor = statistics.fmean(values), 1.0
    if scale != "none":
        divisor = statistics.pstdev(values) + EPSILON
    return [[(value - mean) / divisor for value in row] for row in advantages]
