"""The figures of the quickstart in the README, out of a run folder.

    python docs/quickstart_figures.py [runs/quickstart]

Writes the figures of a run folder to docs/quickstart.json, and those of this file between two markers of
README.md. `tests/unit/test_docs.py` then names the sentences that still quote other figures.
"""

import sys
import textwrap
from pathlib import Path
from typing import Any

from text2sql_grpo.evaluation.statistics import Accuracy
from text2sql_grpo.files import read_json, write_json, write_text
from text2sql_grpo.run.start import LOOKUPS, OTHERS, StartFigures
from text2sql_grpo.run_folder import START, read_evaluation, read_schedule

HERE = Path(__file__).parent
FIGURES = HERE / "quickstart.json"
BEGIN = "<!-- begin: python docs/quickstart_figures.py RUN -->\n"
END = "\n<!-- end -->"


def figures(run: Path) -> dict[str, Any]:
    """Return the figures of a finished run that the docs quote."""
    evaluation, start = read_evaluation(run), run / START
    families = read_json(start)["families"] if start.is_file() else {}
    sets: dict[str, Any] = {}
    for name, after in evaluation["sets"].items():
        before = evaluation["before"]["sets"][name]
        parts = {"all": (before["overall"], after["overall"])}
        if "look-up" in after["by_need"]:
            parts |= {need: (before["by_need"][need], after["by_need"][need]) for need in after["by_need"]}
        sets[name] = {
            part: {"before": _quoted(was["strict"]), "after": _quoted(now["strict"])}
            for part, (was, now) in parts.items()
        }
    return {
        "start": {name: families[name] for name in (LOOKUPS, OTHERS) if name in families},
        "dev": [
            {"step": each["step"], "looks": each["look_share"], **_quoted(each["accuracy"])}
            for each in read_schedule(run)
        ],
        "kept_step": evaluation["step"],
        "sets": sets,
        "verdict": evaluation["change"]["verdict"],
        "seconds": {name: round(seconds) for name, seconds in evaluation["seconds"].items()},
    }


def _quoted(record: dict[str, Any]) -> dict[str, Any]:
    one = Accuracy.read(record)
    counts = {"correct": one.correct, "total": one.total}
    return {**counts, "accuracy": round(one.accuracy, 6), "intervals": one.intervals}


def lines_before(figures: dict[str, Any]) -> list[str]:
    """Lines above the table."""
    starts = [f"Start of GRPO, {name}: {StartFigures(**each)}" for name, each in figures["start"].items()]
    steps = [
        f"step {each['step']}: dev {each['correct']}/{each['total']} = {each['accuracy']:.1%} "
        f"({each['intervals']}), looks {each['looks']:.0%}"
        for each in figures["dev"]
    ]
    last = max((each["step"] for each in figures["dev"]), default=figures["kept_step"])
    return [*starts, *steps, f"Kept the weights of step {figures['kept_step']} of {last}"]


def lines_after(figures: dict[str, Any]) -> list[str]:
    """Lines below the table."""
    stages = ", ".join(f"{name} {seconds} s" for name, seconds in figures["seconds"].items())
    return [figures["verdict"], f"Time: {stages}"]


def rows(figures: dict[str, Any]) -> list[str]:
    """Rows of the table, in Markdown."""
    found = ["| held-out set (questions) | right before | right after |", "| --- | ---: | ---: |"]
    for name, parts in figures["sets"].items():
        for part, cells in parts.items():
            title = f"`{name}`" if part == "all" else part
            asked = [cells["before"], cells["after"]]
            shares = [f"{cell['accuracy']:.0%} ({cell['intervals'].split('; ')[0]})" for cell in asked]
            found.append(f"| {title} ({cells['after']['total']}) | {' | '.join(shares)} |")
    return found


def block(figures: dict[str, Any]) -> str:
    """Return the text between the markers."""
    after = [textwrap.fill(line, 118, break_on_hyphens=False) for line in lines_after(figures)]
    text = "\n".join(["```text", *lines_before(figures), "...", *after, "```"])
    return "\n".join([text, "", "Accuracy in % with 95% intervals by database:", "", *rows(figures)])


def between_markers(readme: str) -> str:
    """Return the block of a README."""
    return readme.partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    if sys.argv[1:]:
        write_json(FIGURES, figures(Path(sys.argv[1])))
    path = HERE.parent / "README.md"
    text = path.read_text(encoding="utf-8")
    shown = BEGIN + block(read_json(FIGURES)) + END
    write_text(path, text.replace(BEGIN + between_markers(text) + END, shown))
