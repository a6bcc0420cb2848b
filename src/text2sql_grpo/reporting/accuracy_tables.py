"""Tables of accuracy with intervals, on a terminal of 80 columns."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Column, Table
from rich.text import Text

from text2sql_grpo.evaluation.statistics import Accuracy, remarks

LEAST_QUESTIONS = 10
"""Questions of a family or difficulty that has a row."""


def accuracy_table(sets: Mapping[str, Any], metrics: Sequence[str] = ()) -> Table:
    """Table of accuracy with 95% intervals, and R-VES if measured, by set, and its larger families.

    Args:
        sets: `sets` of `evaluation.json`.
        metrics: `strict`, `official`; both if neither is named.
    """
    shown = [name for name in ("strict", "official") if name in metrics] or ["strict", "official"]
    has_ves = any("r_ves" in scores for scores in sets.values())
    title = " and ".join(shown).capitalize()
    table = _empty_table(title, [*shown, "R-VES"] if has_ves else shown, sets)
    for name, scores in sets.items():
        ves = [f"{scores['r_ves']:.1f}"] if has_ves else []
        table.add_row(Text(name, style="bold"), *_cells(scores["overall"], shown), *ves)
        for group in ("by_family", "by_difficulty"):
            for part, both in scores[group].items():
                if both["strict"]["total"] < LEAST_QUESTIONS:
                    continue
                table.add_row(Text(f"  {group.removeprefix('by_')} {part}"), *_cells(both, shown))
        table.add_section()
    return table


def gap_lines(accepted: Mapping[str, int]) -> Iterator[str]:
    """Share of accepted answers that were checked less than configured, and the reasons.

    >>> list(gap_lines({"": 3, "1 test databases instead of 4": 1}))
    ['Accepted answers checked less than configured: 1 of 4 (25%)', '  1: 1 test databases instead of 4']
    """
    total, n_checked = sum(accepted.values()), accepted.get("", 0)
    if total > n_checked:
        share = (total - n_checked) / total
        yield f"Accepted answers checked less than configured: {total - n_checked} of {total} ({share:.0%})"
    for gap, n_answers in sorted(accepted.items(), key=lambda entry: -entry[1]):
        if gap:
            yield f"  {n_answers}: {gap}"


def _empty_table(title: str, columns: Sequence[str], sets: Mapping[str, Any]) -> Table:
    """Table without rows, with a remark below about the `sets` of an `evaluation.json` with few databases."""
    lines = [f"{name}: {text}" for name, text in remarks(sets).items()]
    table = Table(
        Column("held-out set", no_wrap=True),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"{title} accuracy (95% interval in %: by database, below it by question)",
        caption=Text("\n".join(lines)) if lines else None,
        caption_justify="left",
    )
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _cells(both: Mapping[str, Any], shown: Sequence[str]) -> list[str]:
    accuracies = [Accuracy.read(both[grading]) for grading in shown]
    return [f"{one.correct}/{one.total} = {one.accuracy:.1%} {_stacked_intervals(one)}" for one in accuracies]


def _stacked_intervals(accuracy: Accuracy) -> str:
    """Interval by database, and below it the one by question; only one of them for a single database."""
    return "\n".join(f"({bounds})" for bounds in accuracy.intervals.split("; "))
