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
class FinishedRun:
    """Held-out accuracy of one run.

    Attributes:
        folder: Its run folder.
        before: Strict accuracy before reinforcement learning, by held-out set; `ALL` is all of them.
        after: The same after it.
    """

    folder: Path
    before: dict[str, Accuracy]
    after: dict[str, Accuracy]


@dataclass(frozen=True)
class SeveralRuns:
    """Runs that answered the same held-out sets.

    Attributes:
        runs: At least two.
    """

    runs: Sequence[FinishedRun]

    def sets(self) -> list[str]:
        """Names of the held-out sets, and `ALL` first where there are several."""
        names = list(self.runs[0].after)
        return names if len(names) > 2 else names[1:]

    def changes(self, name: str) -> list[float]:
        """Accuracy after minus accuracy before of each run, in [-1, 1]."""
        return [run.after[name].accuracy - run.before[name].accuracy for run in self.runs]

    def record(self) -> dict[str, Any]:
        """Fields in `comparison.json`."""
        return {
            "runs": [str(run.folder) for run in self.runs],
            "verdict": self.verdict(),
            "sets": {
                name: {
                    "questions": self.runs[0].after[name].total,
                    "before": [round(run.before[name].accuracy, 6) for run in self.runs],
                    "after": [round(run.after[name].accuracy, 6) for run in self.runs],
                    "change": [round(change, 6) for change in self.changes(name)],
                }
                for name in self.sets()
            },
        }

    def verdict(self) -> str:
        """Summary in plain words: the mean change and its spread between the runs."""
        changes = [100 * change for change in self.changes(ALL)]
        mean, spread, count = fmean(changes), stdev(changes), len(changes)
        reach = t_quantile(count - 1) * spread / count**0.5
        each = ", ".join(f"{change:+.1f}" for change in changes)
        return (
            f"Training changes the share of right answers by {mean:+.1f} points in the mean of {count} runs "
            f"({mean - reach:+.1f} to {mean + reach:+.1f}, by Student's t between the runs; each {each}), on "
            f"the same {self.runs[0].after[ALL].total} questions."
        )


def read_runs(folders: Sequence[Path]) -> SeveralRuns:
    """Read the held-out accuracies of run folders.

    Raises:
        DataError: A folder holds no finished run with figures before and after, or the runs answered others.
    """
    runs = [_read(folder) for folder in folders]
    asked = {run.folder: {name: one.total for name, one in run.after.items()} for run in runs}
    for folder, counts in asked.items():
        if counts != asked[runs[0].folder]:
            raise DataError(
                f"cannot compare: {folder} answered other held-out sets than {runs[0].folder} "
                f"({counts} and {asked[runs[0].folder]})"
            )
    return SeveralRuns(runs)


def _read(folder: Path) -> FinishedRun:
    record = read_evaluation(folder)
    parts = [record.get("before", {}).get("sets", {}), record.get("sets", {})]
    if not all(parts):
        raise DataError(
            f"no finished run with accuracies before and after training: {folder} "
            f"(its {EVALUATION} is missing or incomplete)"
        )
    before, after = (
        {name: Accuracy.read(scores["overall"]["strict"]) for name, scores in part.items()} for part in parts
    )
    return FinishedRun(
        folder,
        {ALL: Accuracy.joined(before.values()), **before},
        {ALL: Accuracy.joined(after.values()), **after},
    )
