"""Gate that plays other questions in place of zero-variance groups (DAPO, arXiv:2503.14476)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from text2sql_grpo.training.parts import Batch, Gate, Judged

if TYPE_CHECKING:
    from text2sql_grpo.training.trainer import RolloutGRPOTrainer


class Resample(Gate):
    """Replacement of groups whose verdicts are all equal, by groups of other questions that differ.

    Verdicts decide, not rewards: costs of turns give nearly every group a variance of rewards.

    Args:
        rounds: Further rounds of play at most, >= 1.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def passed(self, batch: Batch, trainer: "RolloutGRPOTrainer") -> Batch:
        played = list(batch.groups().values())
        tried = {group[0].question for group in played}
        for _ in range(self._rounds):
            others: dict[int, int] = {}
            for place, group in batch.groups().items():
                if is_flat(group):
                    question = trainer.select.another(group[0].question, tried)
                    if question is not None:
                        others[place] = question
                        tried.add(question)
            if not others:
                break
            again = trainer.played(others)
            played += again.groups().values()
            better = {place for place, group in again.groups().items() if not is_flat(group)}
            batch = batch.with_groups(better, again)
        rollouts = [one for group in played for one in group]
        kept = list(batch.groups().values())
        self.figures = {
            "accuracy/strict_played": sum(bool(one.verdict) for one in rollouts) / len(rollouts),
            "selection/episodes": float(len(rollouts)),
            "selection/frac_verdict_zero_std": sum(map(is_flat, kept)) / len(kept),
            "selection/frac_verdict_zero_std_played": sum(map(is_flat, played)) / len(played),
        }
        return batch


def is_flat(group: Sequence[Judged]) -> bool:
    """True if all verdicts of a group are equal; masked rollouts have none."""
    return len({one.verdict for one in group if one.verdict is not None}) < 2
