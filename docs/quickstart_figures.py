"""Figures of the quickstart in README.md and docs/quickstart.md, from run folders of several seeds.

    python docs/quickstart_figures.py [runs/quickstart/seed-0 runs/quickstart/seed-1 ..]

Writes the figures of the first run, and counts of all, to docs/quickstart.json. From this file it writes
the blocks between two markers of both pages. `tests/unit/test_docs.py` then names the sentences that still
quote different figures.
"""

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from text2sql_grpo.config import load_config
from text2sql_grpo.evaluation.statistics import Accuracy
from text2sql_grpo.files import read_json, read_jsonl, write_json, write_text
from text2sql_grpo.run_folder import CONFIG, answers_file, read_evaluation, read_schedule

NEEDS = ("look-up", "others")
HERE = Path(__file__).parent
FIGURES = HERE / "quickstart.json"
BEGIN = "<!-- begin: python docs/quickstart_figures.py RUN -->\n"
END = "\n<!-- end -->"


def figures(run: Path) -> dict[str, Any]:
    """Return the figures of a finished run that the docs quote."""
    evaluation = read_evaluation(run)
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
        "dev": [
            {"step": each["step"], "looks": each["look_share"], **_quoted(each["accuracy"])}
            for each in read_schedule(run)
        ],
        "kept_step": evaluation["step"],
        "sets": sets,
        "verdict": evaluation["change"]["verdict"],
        "seconds": {name: round(seconds) for name, seconds in evaluation["seconds"].items()},
    }


def seeds(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Right answers of each run before and after, by what the questions need; and `looks` of the others."""
    found = []
    for run in runs:
        evaluation = read_evaluation(run)
        sides = (evaluation["before"]["sets"], evaluation["sets"])
        unseen = [side["test_databases"]["by_need"]["look-up"]["strict"] for side in sides]
        parts = {
            need: [[scores["by_need"][need]["strict"] for scores in side.values()] for side in sides]
            for need in NEEDS
        }
        counts = {
            need: [sum(one["correct"] for one in side) for side in each] for need, each in parts.items()
        }
        totals = {need: sum(one["total"] for one in each[0]) for need, each in parts.items()}
        found.append(
            {
                "seed": int(load_config(run / CONFIG).run.seed),
                **{need: {"right": counts[need], "total": totals[need]} for need in NEEDS},
                "unseen": {"right": [one["correct"] for one in unseen], "total": unseen[0]["total"]},
                "looks": [_look_share(answers_file(run, when)) for when in ("before", "after")],
                "minutes": round(sum(evaluation["seconds"].values()) / 60, 1),
            }
        )
    return found


def changes(runs: Sequence[dict[str, Any]], kinds: Sequence[str]) -> dict[str, float]:
    """Mean, least and most change of these questions' right answers over the runs, in points."""
    each = [
        100
        * sum(run[kind]["right"][1] - run[kind]["right"][0] for kind in kinds)
        / sum(run[kind]["total"] for kind in kinds)
        for run in runs
    ]
    return {"mean": round(fmean(each), 2), "least": round(min(each), 2), "most": round(max(each), 2)}


def _look_share(answers: Path) -> float:
    """Share of answers with an exploratory query, to questions that need no look-up."""
    rows = [row for row in read_jsonl(answers, "answers") if row["family"] != "lookup"]
    looked = [any(action["kind"] == "run_sql" for action in row["actions"]) for row in rows]
    return round(fmean(looked), 4)


def seed_rows(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Rows of the table of seeds, in Markdown, with the mean change of each column in points."""
    kinds = (("look-up", "look-ups"), ("unseen", "of them on unseen databases"), ("others", "others"))
    titles = [f"{title} ({runs[0][kind]['total']})" for kind, title in kinds]
    lines = [f"| seed | {' | '.join(titles)} | others that explore |", f"| --- |{' ---: |' * 4}"]
    for run in runs:
        cells = [" -> ".join(map(str, run[kind]["right"])) for kind, _ in kinds]
        looks = " -> ".join(f"{share:.0%}" for share in run["looks"])
        lines.append(f"| {run['seed']} | {' | '.join(cells)} | {looks} |")
    points = [changes(runs, [kind]) for kind, _ in kinds]
    means = [f"{one['mean']:+.1f} points ({one['least']:+.1f} to {one['most']:+.1f})" for one in points]
    return [*lines, f"| mean | {' | '.join(means)} | |"]


def first_rows(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Rows of the README's table, in Markdown: right answers before and after, over all runs."""
    titles = {
        "look-up": "need an exploratory query",
        "unseen": "of these, on databases that are not trained on",
        "others": "do not need one",
    }
    lines = [f"| held-out questions that | number | before | after, mean of {len(runs)} seeds (range) |"]
    lines.append(f"| --- |{' ---: |' * 3}")
    for kind, title in titles.items():
        before, after = zip(*(run[kind]["right"] for run in runs), strict=True)
        cells = [runs[0][kind]["total"], _range(before), f"**{fmean(after):.1f}** ({_range(after)})"]
        lines.append(f"| {title} | {' | '.join(map(str, cells))} |")
    return lines


def _range(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return str(least) if least == most else f"{least} to {most}"


def _quoted(record: dict[str, Any]) -> dict[str, Any]:
    one = Accuracy.read(record)
    counts = {"correct": one.correct, "total": one.total}
    return {**counts, "accuracy": round(one.accuracy, 6), "intervals": one.intervals}


def lines_before(figures: dict[str, Any]) -> list[str]:
    """Lines above the table."""
    steps = [
        f"step {each['step']}: dev {each['correct']}/{each['total']} = {each['accuracy']:.1%} "
        f"({each['intervals']}), looks {each['looks']:.0%}"
        for each in figures["dev"]
    ]
    last = max((each["step"] for each in figures["dev"]), default=figures["kept_step"])
    return [*steps, f"Kept the weights of step {figures['kept_step']} of {last}"]


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
    parts = [text, "", "Accuracy in % with 95% intervals by database:", "", *rows(figures)]
    if figures.get("seeds"):
        parts += ["", "Right answers before and after, by seed:", "", *seed_rows(figures["seeds"])]
    return "\n".join(parts)


def between_markers(page: str) -> str:
    """Return the block of a page."""
    return page.partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    if sys.argv[1:]:
        runs = list(map(Path, sys.argv[1:]))
        each = seeds(runs)
        kinds = {"all": NEEDS, "unseen": ["unseen"], "others": ["others"]}
        points = {name: changes(each, parts) for name, parts in kinds.items()}
        write_json(FIGURES, figures(runs[0]) | {"seeds": each, "points": points})
    stored = read_json(FIGURES)
    blocks = {HERE.parent / "README.md": "\n".join(first_rows(stored["seeds"]))}
    for path, shown in (blocks | {HERE / "quickstart.md": block(stored)}).items():
        text = path.read_text(encoding="utf-8")
        write_text(path, text.replace(BEGIN + between_markers(text) + END, BEGIN + shown + END))
