"""Learning curve of a run as a picture, drawn from its run folder alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, FigureBase, SubFigure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.statistics import Accuracy
from text2sql_grpo.reporting.progress import looks_by_family
from text2sql_grpo.run_folder import CURVE, EVALUATION, METRICS, read_evaluation, read_metrics, read_schedule

WIDTH_INCHES, HEIGHT_INCHES, DPI = 9.0, 4.5, 200
CURVES = ("accuracy/strict", "reward", "episode/looks", "accuracy/strict_played")

# Okabe and Ito's palette, distinguishable for colour-blind readers too.
_BLUE, _ORANGE, _GREEN, _PURPLE, _GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#777777"
_SHARES = {
    "reward": (_ORANGE, "reward"),
    "accuracy/strict_played": (_GREY, "strict accuracy, all played"),
    "accuracy/strict": (_BLUE, "strict accuracy"),
}
_DEV = "#222222"

_FAMILY_COLOURS = (_GREEN, _PURPLE, _ORANGE, _BLUE)
_BY_FAMILY = "looks of "

Points = Sequence[tuple[int, float]]
Parts = dict[str, Accuracy]


def plot_learning_curve(run: Path) -> Path:
    """Draw `learning_curve.png` into the run folder; returns its path.

    Left, by training step: strict accuracy (with `selection` that of all played episodes too) and reward,
    looks per question by family if there are several, and accuracy and looks on `data.dev` if it was
    evaluated on a schedule. Right, if the run was evaluated: accuracy on
    each held-out set before and after, separately for look-up and other questions.

    Args:
        run: Run folder with `metrics.jsonl`; `evaluation.json` and every part of it may be absent.

    Raises:
        DataError: `metrics.jsonl` is missing or holds no step, or a file has unexpected content.
    """
    curves = _read_curves(run)
    schedule = read_schedule(run)
    evaluation = read_evaluation(run)
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"Learning curve of {run.resolve().name}", fontsize=11)
    try:
        after = _parts(evaluation.get("sets"))
        before = _parts((evaluation.get("before") or {}).get("sets"))
        if after:
            left, right = cast("list[SubFigure]", figure.subfigures(1, 2, width_ratios=[1, 1.15]))
            _draw_training(left, curves, schedule)
            _draw_held_out(right.subplots(), before, after)
        else:
            _draw_training(figure, curves, schedule)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"cannot read the scored sets: {error!r} ({run / EVALUATION})") from error
    path = run / CURVE
    figure.savefig(path)
    return path


def _read_curves(run: Path) -> dict[str, Points]:
    """Points of each curve that has any; the last record of a repeated step."""
    path = run / METRICS
    if not path.is_file():
        raise DataError(f"no run folder: metrics.jsonl is missing ({path})")
    steps: dict[int, dict[str, Any]] = {}
    for row in read_metrics(run):
        if "step" in row:
            steps.setdefault(row["step"], {}).update(row)
    curves: dict[str, Points] = {
        name: [(step, steps[step][name]) for step in sorted(steps) if steps[step].get(name) is not None]
        for name in CURVES
    }
    for step in sorted(steps):
        for family, value in looks_by_family(steps[step]).items():
            cast("list[tuple[int, float]]", curves.setdefault(_BY_FAMILY + family, [])).append((step, value))
    drawn = {name: points for name, points in curves.items() if points}
    if not drawn:
        raise DataError(f"no training steps with {' or '.join(CURVES)} ({path})")
    return drawn


def _parts(sets: Mapping[str, Any] | None) -> dict[str, Parts]:
    """Strict accuracy of each set's look-up and other questions, as far as it has both."""
    parts: dict[str, Parts] = {}
    for name, scores in (sets or {}).items():
        whole = Accuracy.read(scores["overall"]["strict"])
        lookup = Accuracy(0, 0)
        if "lookup" in scores.get("by_family", {}):
            lookup = Accuracy.read(scores["by_family"]["lookup"]["strict"])
        both = {"look-up": lookup, "other": whole.without(lookup)}
        parts[name] = {key: accuracy for key, accuracy in both.items() if accuracy.total}
    return parts


def _draw_training(
    panel: FigureBase, curves: Mapping[str, Points], schedule: Sequence[Mapping[str, Any]]
) -> None:
    shares = {name: curves[name] for name in _SHARES if name in curves}
    has_both = bool(shares) and "episode/looks" in curves
    axes = list(panel.subplots(2, 1, sharex=True, height_ratios=[2.6, 1])) if has_both else [panel.subplots()]
    if shares:
        _style(axes[0], "training questions of each step")
        for name, points in shares.items():
            _draw_curve(axes[0], points, *_SHARES[name])
        if schedule:
            known = [(record["step"], Accuracy.read(record["accuracy"])) for record in schedule]
            _draw_accuracies(axes[0], known, _DEV, "D-", 0, label="dev questions, 95%")
        axes[0].set_ylabel("share right, mean reward")
        axes[0].set_ylim(min(0, axes[0].get_ylim()[0]), max(1.0, axes[0].get_ylim()[1]))
        axes[0].legend(fontsize=7.5, frameon=False, loc="best")
    if "episode/looks" in curves:
        _style(axes[-1], "")
        families = {
            name.removeprefix(_BY_FAMILY): curves[name] for name in curves if name.startswith(_BY_FAMILY)
        }
        if families:
            for (family, points), colour in zip(families.items(), _FAMILY_COLOURS, strict=False):
                _draw_curve(axes[-1], points, colour, family)
        else:
            _draw_curve(axes[-1], curves["episode/looks"], _GREEN, "looks")
        axes[-1].set_ylabel("looks per\nquestion")
        if schedule:
            steps, looked = zip(*[(record["step"], record["look_share"]) for record in schedule], strict=True)
            axes[-1].plot(steps, looked, color=_DEV, marker="D", markersize=4, label="dev: share with a look")
        if families or schedule:
            axes[-1].legend(fontsize=7, frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        axes[-1].set_ylim(bottom=0)
    axes[-1].set_xlabel("GRPO step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_curve(axes: Axes, points: Points, colour: str, label: str) -> None:
    """Draw a thin raw line and the running mean."""
    steps, values = [step for step, _ in points], [value for _, value in points]
    window = max(1, min(10, len(values) // 5))
    means = [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]
    axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.45)
    over = f", mean of {window} steps" if window > 1 else ""
    marker = "o" if len(values) == 1 else ""
    axes.plot(steps, means, color=colour, linewidth=1.8, marker=marker, label=label + over)


def _draw_held_out(axes: Axes, before: Mapping[str, Parts], after: Mapping[str, Parts]) -> None:
    _style(axes, "held-out questions (95%: bars by database, thick by question)")
    start, labels = 0, list[str]()
    for part in ("look-up", "other"):
        names = [name for name in after if part in after[name]]
        if not names:
            continue
        end = start + len(names)
        for scores, colour, marker, shift in ((before, _GREY, "o", -0.11), (after, _BLUE, "s", 0.11)):
            found = [(i, scores.get(name, {}).get(part)) for i, name in enumerate(names, start)]
            known = [(i, accuracy) for i, accuracy in found if accuracy]
            _draw_accuracies(axes, known, colour, marker, shift)
        axes.text((start + end - 1) / 2, 1.03, f"{part} questions", ha="center", fontsize=8.5)
        if start:
            axes.axvline(start - 0.5, color="black", linewidth=0.6)
        labels += [name.removeprefix("test_").replace("_", "\n") for name in names]
        start = end
    axes.set_xticks(range(start), labels, fontsize=7, rotation=20)
    axes.set_xlabel("held-out set (what is new in it)")
    axes.set_xlim(-0.5, start - 0.5)
    axes.set_ylim(0, 1.1)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.set_ylabel("strict accuracy")
    for label, colour, marker in (("before GRPO", _GREY, "o"), ("after GRPO", _BLUE, "s")):
        if label == "after GRPO" or before:
            axes.plot([], [], color=colour, marker=marker, linestyle="", markersize=5, label=label)
    axes.figure.legend(loc="outside lower center", ncols=2, fontsize=7.5, frameon=False)


def _draw_accuracies(
    axes: Axes,
    known: Sequence[tuple[int, Accuracy]],
    colour: str,
    marker: str,
    shift: float,
    *,
    label: str | None = None,
) -> None:
    if not known:
        return
    for i, accuracy in known:
        axes.vlines(i + shift, *accuracy.naive_interval, color=colour, linewidth=4, alpha=0.3)
    places, values = [i + shift for i, _ in known], [accuracy.accuracy for _, accuracy in known]
    bars = _bars([accuracy for _, accuracy in known])
    axes.errorbar(places, values, yerr=bars, fmt=marker, color=colour, markersize=5, capsize=3, label=label)


def _bars(accuracies: Sequence[Accuracy]) -> list[list[float]]:
    """Lengths of the error bars below and above, by database."""
    bounds = [(accuracy.accuracy, *accuracy.interval) for accuracy in accuracies]
    return [
        [max(0.0, value - low) for value, low, _ in bounds],
        [max(0.0, high - value) for value, _, high in bounds],
    ]


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
