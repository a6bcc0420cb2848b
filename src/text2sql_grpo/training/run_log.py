"""The run folder's logs, and the metrics of episodes in them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from text2sql_grpo.environment.episode import Episode, StopReason
from text2sql_grpo.files import append_jsonl, cut_lines
from text2sql_grpo.grading import Verdict
from text2sql_grpo.rewards import FLAGS
from text2sql_grpo.run_folder import METRICS, ROLLOUTS, SCHEDULE, TRACES


class RunLog:
    """Appender to the logs of a run folder; each line is written whole and at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def write(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records to the log of this name in `run_folder`, NaN and infinity as null."""
        append_jsonl(self.folder / name, map(_plain, records))

    def cut_back(self, step: int) -> None:
        """Remove lines that are newer than a checkpoint, and a line that a kill left half written.

        Args:
            step: Step of the checkpoint. Metrics count steps done, episodes the steps done before them.
        """
        for name in (METRICS, SCHEDULE):
            cut_lines(self.folder / name, last_step=step)
        for name in (ROLLOUTS, TRACES):
            cut_lines(self.folder / name, last_step=step - 1)


def _plain(value: Any) -> Any:
    """Replace NaN and infinity, which are not JSON, by None."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def episode_metrics(
    episode: Episode,
    verdict: Verdict,
    flags: Sequence[str] = (),
    turn_scores: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> dict[str, float]:
    """Metrics of one episode, which are averaged over a step and logged.

    `hack/rate` is the share of answers that are right by the official verdict alone, or that read no table;
    a literal copied from an observation is no hack by itself. `grading/uncovered` is the share of answers
    accepted on fewer neighbours than asked for, see `Verdict`. `turn/NAME` is the sum of a score of turns.
    """
    kinds = [action.kind for action in episode.actions]
    return {
        "accuracy/strict": float(verdict.strict),
        "accuracy/official": float(verdict.official),
        "accuracy/official_minus_strict": float(verdict.official) - float(verdict.strict),
        "hack/rate": float("official_only" in flags or "no_table" in flags),
        **{f"hack/{flag}": float(flag in flags) for flag in FLAGS},
        "grading/uncovered": float(bool(verdict.uncovered)),
        "episode/turns": float(len(kinds)),
        "episode/looks": float(episode.looks),
        "episode/malformed": float(kinds.count("malformed")),
        "episode/masked": float(episode.is_masked or verdict.reason == "gold_failed"),
        **{f"turn/{name}": sum(values) for name, values in turn_scores.items()},
        **{f"stop/{reason}": float(episode.stop_reason == reason) for reason in get_args(StopReason)},
    }


MAX_FAMILIES = 4


def looks_by_family(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Tool calls per episode and kind of question, from a line of metrics; empty for fewer than two kinds.

    Look-ups and all others where the family `lookup` is among them, else the most frequent families.
    """
    shares = {
        name.split("/")[1]: value
        for name, value in metrics.items()
        if name.startswith("family/") and name.endswith("/share") and value
    }
    looks = {family: metrics[f"family/{family}/looks"] for family in shares}
    if len(looks) < 2:
        return {}
    if "lookup" not in looks:
        most = sorted(shares, key=lambda family: (-shares[family], family))[:MAX_FAMILIES]
        return {family: looks[family] for family in most}
    rest = sum(share for family, share in shares.items() if family != "lookup")
    others = sum(shares[family] * looks[family] for family in shares if family != "lookup") / rest
    return {"look-ups": looks["lookup"], "others": others}
