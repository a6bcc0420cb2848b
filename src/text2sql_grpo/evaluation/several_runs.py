"""Several finished runs that differ in their seed: how far their gains agree."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.answers import read_answers
from text2sql_grpo.evaluation.comparison import Comparison, Paired, compare
from text2sql_grpo.evaluation.statistics import t_quantile
from text2sql_grpo.run_folder import answers_file

ALL = "all sets"


@dataclass(frozen=True)
class SeveralRuns:
    """Answers of runs to the same held-out questions.

    Attributes:
        folders: At least two run folders.
        changes: Answers of each run before and after reinforcement learning.
    """

    folders: Sequence[Path]
    changes: Sequence[Comparison]

    @property
    def totals(self) -> dict[str, int]:
        """Number of questions by held-out set; `ALL` first, where there are several sets."""
        sets = self.changes[0].sets()
        names = sets if len(sets) == 1 else [ALL, *sets]
        return {name: self.paired(name)[0].total for name in names}

    def paired(self, name: str) -> list[Paired]:
        """Strict verdicts of each run before and after, in a held-out set or `ALL`."""
        return [one.paired() if name == ALL else one.paired(set=name) for one in self.changes]

    def shares(self, name: str) -> tuple[list[float], list[float], list[float]]:
        """Accuracy of each run before, accuracy after in [0, 1], and their difference in [-1, 1]."""
        runs = self.paired(name)
        before, after = [one.base.accuracy for one in runs], [one.trained.accuracy for one in runs]
        return before, after, [one.difference for one in runs]

    def record(self) -> dict[str, Any]:
        """Fields in `comparison.json`."""
        sets = {}
        for name, total in self.totals.items():
            shares = ([round(share, 6) for share in one] for one in self.shares(name))
            sets[name] = {"questions": total} | dict(zip(("before", "after", "change"), shares, strict=True))
        return {"runs": [str(folder) for folder in self.folders], "verdict": self.verdict(), "sets": sets}

    def verdict(self) -> str:
        """Summary in plain words: the mean change, with the wider interval of runs and of questions."""
        runs = self.paired(ALL)
        changes = [100 * one.difference for one in runs]
        mean, count = fmean(changes), len(changes)
        reach = t_quantile(count - 1) * stdev(changes) / count**0.5
        low, high, unit = mean - reach, mean + reach, "by Student's t between the runs"
        lows, highs = zip(*(one.naive_interval for one in runs), strict=True)
        if fmean(highs) - fmean(lows) > (high - low) / 100:  # runs may be alike by chance
            low, high, unit = 100 * fmean(lows), 100 * fmean(highs), "by question"
        each = ", ".join(f"{change:+.1f}" for change in changes)
        return (
            f"Training changes the share of right answers by {mean:+.1f} points in the mean of {count} runs "
            f"({low:+.1f} to {high:+.1f}, {unit}; each {each}), on the same {runs[0].total} questions."
        )


def read_runs(folders: Sequence[Path]) -> SeveralRuns:
    """Read the answers of run folders to held-out questions.

    Raises:
        DataError: A folder has no answers before and after training, is named twice, or its questions differ.
    """
    places = {folder.resolve() for folder in folders}
    if len(places) < len(folders):
        raise DataError(f"name each run folder once, got {len(folders)} names of {len(places)} folders")
    changes = [_read(folder) for folder in folders]
    asked = [
        {(one.key, one.database, one.question, one.gold_sql) for one, _ in change.pairs} for change in changes
    ]
    for folder, questions in zip(folders, asked, strict=True):
        if odd := questions ^ asked[0]:
            named = min(odd)[0]
            raise DataError(
                f"cannot compare: {folder} and {folders[0]} answered different held-out questions or gold "
                f"queries, such as {named[1]} in {named[0]}"
            )
    return SeveralRuns(folders, changes)


def _read(folder: Path) -> Comparison:
    before, after = answers_file(folder, "before"), answers_file(folder)
    for path in (before, after):
        if not path.is_file():
            raise DataError(f"no finished run with answers before and after training: {path} is missing")
    return compare(read_answers(before), read_answers(after))
