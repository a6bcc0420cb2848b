"""Value of the state in which a turn starts, for `turn_credit: gae`."""

import math
import operator
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional
from trl import GRPOTrainer

from text2sql_grpo.errors import RunError
from text2sql_grpo.training import trl_compat
from text2sql_grpo.training.advantages import TurnRow, gae, turn_spans, whitened

_FILE = "value_head.pt"
_PASSES = 8  # over the turns of a generation batch
_LEARNING_RATE = 1e-3


class ValueHead:
    """Linear head on hidden states, with its own optimiser; the policy gets no gradient of it.

    The value is between the highest reward of a wrong answer and the lowest of a right one: the estimated
    chance of a right answer, scaled. It is no part of the model, so that saved models do not hold it. It is
    equal on all ranks, since each trains it on the turns of all.

    Args:
        width: Size of a hidden state.
        low: Highest reward of a wrong answer.
        high: Lowest reward of a right answer.

    Attributes:
        loss: Cross-entropy of the last batch before it was trained on, in nats.
    """

    def __init__(self, width: int, low: float, high: float) -> None:
        self._low, self._high, self.loss = low, high, math.nan
        self._head = torch.nn.Sequential(
            torch.nn.LayerNorm(width, elementwise_affine=False),
            torch.nn.utils.skip_init(torch.nn.Linear, width, 1),  # draws nothing, as the run without it
        )
        for parameter in self._head.parameters():
            torch.nn.init.zeros_(parameter)
        self._optimizer = torch.optim.AdamW(self._head.parameters(), lr=_LEARNING_RATE)

    def advantages(
        self, rows: Sequence[TurnRow], states: Sequence[torch.Tensor], *, scale: str, is_training: bool
    ) -> list[list[float]]:
        """Whitened advantages of the turns of each rollout; empty for masked ones.

        Args:
            rows: Rollouts of all ranks; rewards of turns do not count.
            states: States in which their turns start; float32 on the CPU, shape (turns, width).
            scale: See `whitened`.
            is_training: Train the head on them afterwards.
        """
        advantages, targets = list[list[float]](), list[float]()
        for (reward, _), state in zip(rows, states, strict=True):
            values = self._values(state)
            advantages.append([] if reward is None else gae(reward, values))
            targets += map(operator.add, advantages[-1], values)
        counted = [state for (reward, _), state in zip(rows, states, strict=True) if reward is not None]
        if targets and is_training:
            self._fit(torch.cat(counted), targets)
        return whitened(advantages, scale=scale)

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
        self.loss = losses[0]

    def save(self, checkpoint: Path) -> None:
        """Write weights and optimiser into a checkpoint."""
        state = {"head": self._head.state_dict(), "optimizer": self._optimizer.state_dict()}
        torch.save(state, checkpoint / _FILE)

    def load(self, checkpoint: Path) -> None:
        """Read what `save` wrote.

        Raises:
            RunError: The checkpoint has no value head.
        """
        path = checkpoint / _FILE
        if not path.is_file():
            raise RunError(f"the checkpoint has no value head, which turn_credit: gae needs: no {path}")
        state = torch.load(path)
        self._head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])


@torch.no_grad()
def turn_states(
    trainer: GRPOTrainer, batch: dict[str, torch.Tensor], masks: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Last hidden state of the token before each turn of each rollout, float32 on the CPU.

    One forward pass over the batch, in parts of `per_device_train_batch_size` rows.

    Args:
        batch: TRL's inputs of the loss.
        masks: See `turn_spans`; one per rollout.
    """
    backbone = trl_compat.causal_lm(trainer, trainer.model).base_model
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    present = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    before, size = batch["prompt_ids"].shape[1] - 1, trainer.args.per_device_train_batch_size
    states: list[torch.Tensor] = []
    for rows in torch.arange(len(ids)).split(size):
        with trl_compat.autocast(trainer, trainer.model):
            output = backbone(input_ids=ids[rows], attention_mask=present[rows], use_cache=False)
        for hidden, row in zip(output.last_hidden_state, rows.tolist(), strict=True):
            starts = [before + start for start, _ in turn_spans(masks[row])]
            states.append(hidden[starts].float().cpu())
    return states
