"""The parts of a GRPO step behind one interface, and the batch that passes through them.

A step selects questions, plays and judges them, credits tokens, and records
(`RolloutGRPOTrainer.generation_batch`). Each part has one verb; the trainer logs the metrics and saves the
state of every part. The interface follows prime-rl's samplers and algorithms
(github.com/PrimeIntellect-ai/prime-rl).

Shapes: B rows of this rank, P prompt tokens, K completion tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from trl.trainer.utils import pad

from text2sql_grpo.environment.episode import Rollout
from text2sql_grpo.reliability.ranks import gather, rank

if TYPE_CHECKING:
    from text2sql_grpo.training.play import Rollouts
    from text2sql_grpo.training.trainer import RolloutGRPOTrainer


@dataclass(frozen=True)
class Judged:
    """Facts of a judged rollout, without its tokens: ranks exchange them.

    Attributes:
        question: Index of the question.
        scores: Score of each named reward; None for a rollout that must not be trained on.
        reward: Weighted sum of the scores; None without scores.
        stop_reason: Why the rollout stopped.
        verdict: Strict verdict; None for a rollout without scores, and where there are no verdicts.
        metrics: Figures that are averaged over the batch and logged.
        family: Family of the question; None where there are no families.
        place: Index of its group in the generation batch of all ranks; set by the trainer, like the rest.
        num_sampled: Number of sampled tokens.
        num_tokens: Number of tokens of the prompt and sampled ones.
        reason: Reason of the verdict, see `Verdict`; empty without one.
    """

    question: int
    scores: dict[str, float] | None
    reward: float | None
    stop_reason: str
    verdict: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    family: str | None = None
    place: int = 0
    num_sampled: int = 0
    num_tokens: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Row:
    """One rollout of this rank.

    Attributes:
        record: Its line in the log of episodes, without the step; None for none.
        weights: Weight of each completion token in the cross-entropy; empty for none.
    """

    rollout: Rollout
    judged: Judged
    record: Mapping[str, Any] | None = None
    weights: Sequence[float] = ()

    @property
    def mask(self) -> list[int]:
        """1 for each completion token that the loss reads, 0 for all of a rollout without scores."""
        mask = self.rollout.completion_mask or [0]
        return [0] * len(mask) if self.judged.scores is None else mask


@dataclass(frozen=True)
class Batch:
    """A generation batch.

    Attributes:
        rows: Rollouts of this rank, in the order of their groups' places.
        judged: Facts of the rollouts of all ranks, in order of ranks.
        beside: E rows of this rank next to its groups, for the cross-entropy.
    """

    rows: Sequence[Row]
    judged: Sequence[Judged]
    beside: Sequence[Row] = ()

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Batch":
        """Make the batch of these rows of this rank. A collective: each rank calls it."""
        judged = [one for rank in gather([row.judged for row in rows]) for one in rank]
        return cls(rows, judged)

    @property
    def own(self) -> slice:
        """Part of `judged` that is of this rank."""
        first = rank() * len(self.rows)
        return slice(first, first + len(self.rows))

    def groups(self) -> dict[int, list[Judged]]:
        """Facts of the rollouts of each group, by place."""
        groups: dict[int, list[Judged]] = {}
        for one in self.judged:
            groups.setdefault(one.place, []).append(one)
        return groups

    def with_beside(self, rows: Sequence[Row]) -> "Batch":
        """Return the batch with these further rows next to its groups."""
        return replace(self, beside=[*self.beside, *rows])

    def tensors(
        self, *, pad_token_id: int, multiple: int | None, device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Tokens and masks of the groups as TRL's loss reads them.

        Args:
            multiple: Pad to a multiple of this; None for the longest row.

        Returns:
            `prompt_ids` and `prompt_mask` (B, P), padded on the left; `completion_ids`, `completion_mask` and
            `tool_mask`, 1 for tokens that the loss reads, (B, K); and `num_items_in_batch`, their number on
            all ranks, a scalar.
        """

        def padded(values: Sequence[Sequence[float]], padding: int, side: str) -> torch.Tensor:
            rows = [torch.tensor(row) for row in values]
            tensor: torch.Tensor = pad(rows, padding, side, pad_to_multiple_of=multiple)
            return tensor.to(device)

        prompts = [row.rollout.prompt_ids for row in self.rows]
        completions = [row.rollout.completion_ids or [pad_token_id] for row in self.rows]  # never empty
        masks = [row.mask for row in self.rows]
        return {
            "prompt_ids": padded(prompts, pad_token_id, "left"),
            "prompt_mask": padded([[1] * len(row) for row in prompts], 0, "left"),
            "completion_ids": padded(completions, pad_token_id, "right"),
            "completion_mask": padded([[1] * len(row) for row in completions], 0, "right"),
            "tool_mask": padded(masks, 0, "right"),
            "num_items_in_batch": torch.tensor(sum(gather(sum(map(sum, masks)))), device=device),
        }

    def log_probs(self, like: torch.Tensor) -> torch.Tensor | None:
        """Log-probs at sampling, shape (B, K), 0 for tokens without one; None if a rollout lacks them."""
        found = torch.zeros(like.shape)
        for values, row in zip(found, self.rows, strict=True):
            known = row.rollout.log_probs
            if len(known) != len(row.rollout.completion_ids):
                return None
            values[: len(known)] = torch.tensor(known)
        return found.to(like.device)


def placed(row: Row, place: int) -> Row:
    """Return the row as one of the group at this place, with its counts of tokens."""
    judged = replace(
        row.judged,
        place=place,
        num_sampled=sum(row.mask),
        num_tokens=len(row.rollout.prompt_ids) + sum(row.mask),
    )
    return replace(row, judged=judged)


class Part:
    """A part of a step; by default without metrics and state.

    Attributes:
        figures: Figures of the last generation batch, returned by `metrics`.
    """

    figures: Mapping[str, float] = MappingProxyType({})

    def metrics(self) -> Mapping[str, float]:
        """Figures of the last generation batch, logged under these names; equal on all ranks."""
        return self.figures

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, of tensors, numbers, texts, lists and dicts alone."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            KeyError, ValueError: It is the state of another part; a warning is logged, and this one starts
                without it.
        """


class Select(Part, ABC):
    """Selection of questions. Ranks that make the same calls must draw the same questions.

    Attributes:
        keeps_order: True if the order of a batch decides which optimiser step a group is in.
    """

    keeps_order = False

    @abstractmethod
    def draw(self, count: int) -> list[int]:
        """Draw the questions of the next generation batch, `count` for the groups of all ranks."""

    def observe(self, groups: Mapping[int, Sequence[Judged]]) -> None:
        """Note the facts of the groups that were played, by place."""


class Play(Part, ABC):
    """Play and judgement of questions.

    Attributes:
        tools: JSON schemas for the chat template; None for none.
        max_turn_tokens: Maximum number of sampled tokens in one turn.
        max_episode_tokens: Maximum number of tokens after the prompt, observations included.
    """

    tools: list[dict[str, Any]] | None = None
    max_turn_tokens: int = 512
    max_episode_tokens: int = 2_048

    @abstractmethod
    def play(self, questions: Sequence[int], rollouts: "Rollouts") -> list[Row]:
        """Play one rollout of each of these questions with the current policy, and judge it."""


class Credit(Part, ABC):
    """Advantages."""

    @abstractmethod
    def advantages(
        self, batch: Batch, inputs: Mapping[str, torch.Tensor], trainer: "RolloutGRPOTrainer"
    ) -> torch.Tensor:
        """Advantage of each row, shape (B,), or of each completion token, shape (B, K).

        Args:
            inputs: `Batch.tensors`.
        """


class Record(Part, ABC):
    """Log of what a step did."""

    @abstractmethod
    def record(self, batch: Batch, inputs: Mapping[str, torch.Tensor], step: int) -> None:
        """Take note of a batch.

        Args:
            inputs: Inputs of the loss, with `advantages`.
            step: Number of optimiser steps done.
        """
