"""Pictures of the README, out of stored figures.

    python docs/pictures.py

Draws docs/grading.svg out of benchmarks/results.json, and docs/quickstart.svg out of docs/quickstart.json.
"""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from text2sql_grpo.files import read_json

HERE = Path(__file__).parent
DARK, PALE = "#1f5fbf", "#9aa7b8"
STYLE = {"svg.hashsalt": "text2sql-grpo", "svg.fonttype": "none", "font.size": 10}


def grading(axes: Axes, figures: dict[str, Any]) -> None:
    """Bars: share of known wrong queries that a comparison accepts, in percent."""
    shares = {
        "BIRD's comparison": figures["wrong_accepted_bird_ex"],
        "this package's grader": figures["wrong_accepted"],
    }
    bars = axes.barh(list(shares), [100 * share for share in shares.values()], color=[PALE, DARK])
    axes.bar_label(bars, [f" {share:.2%}" for share in shares.values()])
    axes.invert_yaxis()
    axes.set_xlim(0, 33)
    axes.set_xticks([])
    axes.set_title(f"Wrong queries accepted, of {figures['wrong']:,}", loc="left", fontsize=10)


def quickstart(axes: Axes, runs: list[dict[str, Any]]) -> None:
    """Lines from before to after: right answers of each run by kind of question, in percent."""
    kinds = {"look-up": ("need an exploratory query", DARK), "others": ("do not need one", PALE)}
    for kind, (title, color) in kinds.items():
        total = runs[0][kind]["total"]
        for run in runs:
            shares = [100 * right / total for right in run[kind]["right"]]
            axes.plot(["before", "after GRPO"], shares, color=color, marker="o", alpha=0.7)
        axes.text(1.06, shares[1], f"{title} ({total})", color=color, va="center")
    axes.set_xlim(-0.1, 2.3)
    axes.set_ylim(0, 100)
    axes.set_ylabel("right, %")
    axes.set_title(f"Held-out questions, {len(runs)} seeds", loc="left", fontsize=10)


def draw(path: Path, size: tuple[float, float], drawing: Any, figures: Any) -> None:
    """Draw one panel into a file."""
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        drawing(axes, figures)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    measured = read_json(HERE.parent / "benchmarks" / "results.json")["grading"]
    draw(HERE / "grading.svg", (6, 1.3), grading, measured)
    draw(HERE / "quickstart.svg", (6, 2.8), quickstart, read_json(HERE / "quickstart.json")["seeds"])
