"""Learning curve of a run as a picture for its model card, drawn from the data of its page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.statistics import database_counts, interval_unit
from text2sql_grpo.reporting.report_page import curve_of, sets_of
from text2sql_grpo.run_folder import CURVE, EVALUATION, METRICS, read_evaluation, read_metrics, read_schedule

WIDTH_INCHES, HEIGHT_INCHES, DPI = 9.0, 4.0, 200

# Okabe and Ito's palette, distinguishable for colour-blind readers too.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#777777"
_CURVES = {
    "reward": (_ORANGE, "reward"),
    "accuracy/strict": (_BLUE, "right"),
    "episode/looks": (_GREEN, "exploratory queries"),
}

Record = Mapping[str, Any]


def plot_learning_curve(run: Path) -> Path:
    """Draw `learning_curve.png` into the run folder; returns its path.

    Left: reward, share of right answers and exploratory queries of each step's episodes, and accuracy on
    `data.dev` with its 95% interval if it was evaluated. Right: accuracy on the held-out sets before and
    after, if they were evaluated.

    Args:
        run: Run folder with `metrics.jsonl`; `evaluation.json` and every part of it may be absent.

    Raises:
        DataError: `metrics.jsonl` is missing or holds no step, or a file has unexpected content.
    """
    steps = _steps(run)
    try:
        evaluation = read_evaluation(run)
        curve, sets = curve_of(read_schedule(run)), sets_of(evaluation)
        unit = interval_unit(database_counts(evaluation.get("sets", {})).values())
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"cannot read the scored sets: {error!r} ({run / EVALUATION})") from error
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(run.resolve().name, fontsize=11)
    training, *held_out = figure.subplots(1, 2 if sets else 1, squeeze=False)[0]
    _draw_training(training, steps, curve)
    for axes in held_out:
        _draw_sets(axes, sets, unit)
    figure.savefig(run / CURVE)
    return run / CURVE


def _steps(run: Path) -> list[dict[str, Any]]:
    """Last metrics of each step, in order."""
    path = run / METRICS
    if not path.is_file():
        raise DataError(f"no run folder: metrics.jsonl is missing ({path})")
    rows = [row for row in read_metrics(run) if any(row.get(name) is not None for name in _CURVES)]
    steps = {row["step"]: row for row in rows}
    if not steps:
        raise DataError(f"no training steps with {' or '.join(_CURVES)} ({path})")
    return [steps[step] for step in sorted(steps)]


def _draw_training(axes: Axes, steps: Sequence[Record], curve: Sequence[Record]) -> None:
    for name, (colour, label) in _CURVES.items():
        known = [(row["step"], row[name]) for row in steps if row.get(name) is not None]
        if known:
            axes.plot(*zip(*known, strict=True), color=colour, marker=".", linewidth=1.2, label=label)
    if curve:
        places = [point["step"] for point in curve]
        shares = [point["correct"] / point["total"] for point in curve]
        low, high = ([point[bound] for point in curve] for bound in ("low", "high"))
        axes.plot(places, shares, color="black", marker="D", markersize=4, label="right on dev, 95%")
        axes.fill_between(places, low, high, color="black", alpha=0.1)
    _style(axes, "episodes of each step")
    axes.set_xlabel("GRPO step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8, frameon=False)


def _draw_sets(axes: Axes, sets: Sequence[Record], unit: str) -> None:
    for when, colour, shift in (("before", _GREY, -0.12), ("after", _BLUE, 0.12)):
        known = [(i + shift, one[when]) for i, one in enumerate(sets) if one[when] is not None]
        for i, (place, part) in enumerate(known):
            label = when if i == 0 else None
            axes.plot(part["correct"] / part["total"], place, "o", color=colour, label=label)
            axes.hlines(place, part["low"], part["high"], color=colour)
    _style(axes, f"right on held-out sets, 95% {unit}")
    axes.set_yticks(range(len(sets)), [one["name"] for one in sets])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.legend(fontsize=8, frameon=False)


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
