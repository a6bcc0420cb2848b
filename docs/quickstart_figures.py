"""The figures of the quickstart in the README, out of a run folder.

    python docs/quickstart_figures.py runs/quickstart

Writes what the end of `make train` shows between two markers of README.md, and its figures to
docs/quickstart.json. `tests/unit/test_docs.py` then names the sentences that still quote other figures.
"""

import io
import sys
import textwrap
from pathlib import Path
from typing import Any

from rich.console import Console

from text2sql_grpo.evaluation.answers import read_answers
from text2sql_grpo.evaluation.comparison import compare
from text2sql_grpo.evaluation.statistics import Accuracy
from text2sql_grpo.files import read_json, write_json, write_text
from text2sql_grpo.reporting.comparison_tables import comparison_table
from text2sql_grpo.run.start import LOOKUPS, OTHERS, StartFigures
from text2sql_grpo.run_folder import START, answers_file, read_evaluation, read_schedule

HERE = Path(__file__).parent
FIGURES = HERE / "quickstart.json"
BEGIN = "<!-- begin: python docs/quickstart_figures.py RUN -->\n```text\n"
END = "\n```\n<!-- end -->"


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
    """Rows of the table, each as its words in order: cells with one interval, then the second intervals."""
    found = []
    for name, parts in figures["sets"].items():
        for part, cells in parts.items():
            asked = [cells.get(column) for column in ("before", "after", "forced", "blind_cap")]
            bounds = [cell["intervals"].split("; ") if cell else [] for cell in asked]
            first = [
                f"{cell['accuracy']:.0%} ({both[0]})" if cell else "-"
                for cell, both in zip(asked, bounds, strict=True)
            ]
            second = [f"({both[1]})" for both in bounds if len(both) > 1]
            title = f"{name if part == 'all' else part} ({cells['after']['total']})"
            found.append(" ".join([title, *first, *second]))
    return found


def block(run: Path) -> str:
    """Return the text between the markers."""
    found, output = figures(run), io.StringIO()
    change = compare(read_answers(answers_file(run, "before")), read_answers(answers_file(run)))
    table = comparison_table(change, sides=("before", "after"), by_kind=False)
    Console(file=output, width=80).print(table)
    table = "\n".join(line.rstrip() for line in output.getvalue().rstrip().splitlines())
    after = [textwrap.fill(line, 118, break_on_hyphens=False) for line in lines_after(found)]
    return "\n".join([*lines_before(found), table, *after])


def between_markers(readme: str) -> str:
    """Return the block of a README."""
    return readme.partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    run, path = Path(sys.argv[1]), HERE.parent / "README.md"
    text = path.read_text(encoding="utf-8")
    write_text(path, text.replace(BEGIN + between_markers(text) + END, BEGIN + block(run) + END))
    write_json(FIGURES, figures(run))
