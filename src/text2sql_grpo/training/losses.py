"""Cross-entropy in addition to GRPO's loss on one batch, weighted by token (docs/losses.md).

Each token of a batch has an advantage in TRL's loss and a weight in the cross-entropy, as in prime-rl
(github.com/PrimeIntellect-ai/prime-rl). Both read the same log-probs, from one forward pass. A token of
weight w has the gradient of a sampled token whose advantage is w.

Shapes: B rows of the groups, E rows next to them, K completion tokens.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import torch
from trl.trainer.utils import pad

from text2sql_grpo.config import LossesConfig
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import CUT, Rollout
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.evaluation.bench import evenly_spaced
from text2sql_grpo.reliability.ranks import gather
from text2sql_grpo.rollout.demonstrations import scripted_episode
from text2sql_grpo.training.parts import Batch, Judged, Part, Row

if TYPE_CHECKING:
    from text2sql_grpo.training.trainer import RolloutGRPOTrainer

Inputs = Mapping[str, torch.Tensor]


class Teach(Part, ABC):
    """Weights of tokens in the cross-entropy in addition to GRPO's loss."""

    @abstractmethod
    def taught(self, batch: Batch, trainer: "RolloutGRPOTrainer") -> Batch:
        """Return the batch with weights on its rows, or with rows next to its groups."""


class Golds(Teach):
    """Cross-entropy on the gold's demonstration of groups without a right rollout.

    HPT (arXiv:2509.04419) and ReLIFT (arXiv:2506.07527): what is never sampled cannot be reinforced. Of more
    groups than `settings.gold_share` allows, the first ones of the batch have one.
    """

    def __init__(
        self, settings: LossesConfig, examples: Sequence[Example], environment: SQLEnvironment
    ) -> None:
        self._settings, self._examples, self._environment = settings, examples, environment

    def taught(self, batch: Batch, trainer: "RolloutGRPOTrainer") -> Batch:
        groups, own = batch.groups(), range(len(batch.judged))[batch.own]
        wrong = [place for place, group in groups.items() if is_wrong(group)]
        taken = wrong[: math.floor(self._settings.gold_share * len(groups))]
        self.figures = {
            "losses/wrong_groups": len(wrong) / len(groups),
            "losses/gold_rows": len(taken) / len(groups),
        }
        chat, rows = trainer.rollouts.chat, []
        self._environment = self._environment.counted_by(chat.count_tokens)
        for place in taken:
            if place * trainer.num_generations in own:  # the rank of a group's first row
                question = groups[place][0].question
                example = self._examples[question]
                episode = scripted_episode(
                    example, example.look_sql, example.gold_sql, self._environment, chat
                )
                rows.append(beside(episode, question, self._settings.gold))
        return batch.with_beside(rows)


def is_wrong(group: Sequence[Judged]) -> bool:
    """True without a right rollout; False where the gold query failed, which judges none."""
    is_judged = any(one.scores is not None or one.stop_reason in CUT for one in group)
    return is_judged and not any(one.verdict for one in group)


class Kept(Teach):
    """Loss on right answers of the policy before training, so that it does not forget them.

    Before the first step one rollout is sampled of evenly spaced training questions, and the right ones are
    kept. Each batch then has some of them next to its groups, in turn, those on its databases first: they
    share the schema's tokens with it.
    """

    def __init__(self, settings: LossesConfig, examples: Sequence[Example]) -> None:
        self._settings = settings
        self._databases = [example.database for example in examples]
        self._questions = evenly_spaced(range(len(examples)), settings.kept_questions)
        self._rows: list[dict[str, Any]] | None = None  # the next one first

    def taught(self, batch: Batch, trainer: "RolloutGRPOTrainer") -> Batch:
        if self._rows is None:
            self._rows = self._right(trainer)
        count = round(self._settings.kept_share * len(batch.judged))
        here = {self._databases[one.question] for one in batch.judged}
        by_place = sorted(self._rows, key=lambda row: self._databases[row["question"]] not in here)
        rows = list(islice(cycle(by_place), count))
        taken = {id(row) for row in rows}
        self._rows = sorted(self._rows, key=lambda row: id(row) in taken)
        self.figures = {"losses/kept_rows": len(rows) / len(batch.judged)}
        with trainer.accelerator.split_between_processes(rows) as own:
            return batch.with_beside(
                [beside(Rollout(**row["rollout"]), row["question"], self._settings.kept) for row in own]
            )

    def _right(self, trainer: "RolloutGRPOTrainer") -> list[dict[str, Any]]:
        """Right rollouts of the current policy, on all ranks."""
        with trainer.accelerator.split_between_processes(self._questions) as own:
            rows = trainer.play.play(own, trainer.rollouts)
        names = ("prompt_ids", "completion_ids", "completion_mask")
        right = [
            {"question": row.judged.question, "rollout": {name: getattr(row.rollout, name) for name in names}}
            for row in rows
            if row.judged.verdict
        ]
        return [row for rows_of_rank in gather(right) for row in rows_of_rank]

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rows = state["rows"]


def beside(rollout: Rollout, question: int, weight: float) -> Row:
    """Row next to the groups, with this weight on the tokens of its assistant's turns."""
    by_token = [weight * flag for flag in rollout.completion_mask]
    return Row(rollout, Judged(question, None, None, "beside"), weights=by_token)


def open_losses(
    settings: LossesConfig, examples: Sequence[Example], environment: SQLEnvironment
) -> list[Teach]:
    """Make the losses of a config."""
    parts: list[Teach] = [Golds(settings, examples, environment)] if settings.gold else []
    return [*parts, Kept(settings, examples)] if settings.kept else parts


def joined(batch: Batch, inputs: Inputs, *, pad_token_id: int) -> dict[str, torch.Tensor]:
    """Add the rows next to the groups to the inputs of GRPO's loss, and the weights of the cross-entropy.

    Args:
        inputs: Inputs of the B rows of the groups, see `RolloutGRPOTrainer.generation_batch`.

    Returns:
        `inputs` of B + E rows, the last E without an advantage and without a token that GRPO reads;
        `is_beside`, True for these, (B + E,); and `ce_weights`, (B + E, K). `inputs` itself without weights.
    """
    rows = [*batch.rows, *batch.beside]
    if not any(row.weights for row in rows):
        return dict(inputs)
    added: dict[str, list[list[int]]] = {
        "prompt_ids": [row.rollout.prompt_ids for row in batch.beside],
        "completion_ids": [row.rollout.completion_ids for row in batch.beside],
    }
    for kind in ("prompt", "completion"):
        added[f"{kind}_mask"] = [[1] * len(ids) for ids in added[f"{kind}_ids"]]
    blank = [[0] * max(map(len, added["completion_ids"]), default=0)] * len(batch.beside)
    found = dict(inputs)
    for name, value in inputs.items():
        if name in added or value.shape == inputs["completion_ids"].shape:
            more = [value.new_tensor(row) for row in added.get(name, blank)]
            padding = pad_token_id if name.endswith("_ids") else 0
            found[name] = pad([*value, *more], padding, "left" if name.startswith("prompt") else "right")
        elif value.ndim:
            found[name] = torch.cat([value, value.new_zeros(len(batch.beside), *value.shape[1:])])
    weights = torch.zeros(found["completion_ids"].shape)
    for line, row in zip(weights, rows, strict=True):
        line[: len(row.weights)] = torch.tensor(row.weights)
    device = found["prompt_ids"].device
    found["ce_weights"] = weights.to(device)
    found["is_beside"] = torch.arange(len(rows), device=device) >= len(batch.rows)
    return found
