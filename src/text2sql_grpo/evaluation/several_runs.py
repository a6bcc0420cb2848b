"""Several finished runs that differ in their seed: how far their gains agree."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.statistics import Accuracy, t_quantile
from text2sql_grpo.run_folder import EVALUATION, read_evaluation

ALL = "all sets"


@dataclass(frozen=True)
class SeveralRuns:
    """Held-out accuracies of runs that answered the same held-out sets.

    Attributes:
        folders: At least two run folders.
        before: Strict accuracy before reinforcement learning of each, by held-out set; `ALL` is all of them.
        after: The same after it.
    """

    folders: Sequence[Path]
    before: Sequence[dict[str, Accuracy]]
    after: Sequence[dict[str, Accuracy]]

    @property
    def totals(self) -> dict[str, int]:
        """Number of questions by held-out set; `ALL` first, where there are several sets."""
        totals = {name: accuracy.total for name, accuracy in self.after[0].items()}
        if len(totals) == 2:
            del totals[ALL]
        return totals

    def shares(self, name: str) -> tuple[list[float], list[float], list[float]]:
        """Accuracy of each run before, accuracy after in [0, 1], and their difference in [-1, 1]."""
        before, after = ([one[name].accuracy for one in runs] for runs in (self.before, self.after))
        return before, after, [new - old for old, new in zip(before, after, strict=True)]

    def record(self) -> dict[str, Any]:
        """Fields in `comparison.json`."""
        sets = {}
        for name, total in self.totals.items():
            shares = ([round(share, 6) for share in one] for one in self.shares(name))
            sets[name] = {"questions": total} | dict(zip(("before", "after", "change"), shares, strict=True))
        return {"runs": [str(folder) for folder in self.folders], "verdict": self.verdict(), "sets": sets}

    def verdict(self) -> str:
        """Summary in plain words: the mean change and its spread between the runs."""
        changes = [100 * change for change in self.shares(ALL)[2]]
        mean, spread, count = fmean(changes), stdev(changes), len(changes)
        reach = t_quantile(count - 1) * spread / count**0.5
        each = ", ".join(f"{change:+.1f}" for change in changes)
        return (
            f"Training changes the share of right answers by {mean:+.1f} points in the mean of {count} runs "
            f"({mean - reach:+.1f} to {mean + reach:+.1f}, by Student's t between the runs; each {each}), on "
            f"the same {self.after[0][ALL].total} questions."
        )


def read_runs(folders: Sequence[Path]) -> SeveralRuns:
    """Read the held-out accuracies of run folders.

    Raises:
        DataError: A folder holds no finished run with figures before and after, or the runs answered others.
    """
    runs = [_read(folder) for folder in folders]
    counts = [{name: one.total for name, one in after.items()} for _, after in runs]
    for folder, asked in zip(folders, counts, strict=True):
        if asked != counts[0]:
            raise DataError(
                f"cannot compare: {folder} answered other held-out sets than {folders[0]} "
                f"({asked} and {counts[0]})"
            )
    before, after = zip(*runs, strict=True)
    return SeveralRuns(folders, before, after)


def _read(folder: Path) -> list[dict[str, Accuracy]]:
    record = read_evaluation(folder)
    stages = [record.get("before", {}).get("sets", {}), record.get("sets", {})]
    if not all(stages):
        raise DataError(
            f"no finished run with accuracies before and after training: {folder} "
            f"(its {EVALUATION} is missing or incomplete)"
        )
    found = []
    for sets in stages:
        known = {name: Accuracy.read(scores["overall"]["strict"]) for name, scores in sets.items()}
        found.append({ALL: Accuracy.joined(known.values()), **known})
    return found
