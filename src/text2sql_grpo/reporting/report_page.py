"""`report.html` of a run folder: one file without network, and the same data as `report.json`."""

import base64
import gzip
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment

from text2sql_grpo.errors import DataError
from text2sql_grpo.files import read_jsonl, write_text
from text2sql_grpo.run_folder import (
    CONFIG,
    EVALUATION,
    METRICS,
    PAGE,
    PAGE_DATA,
    ROLLOUTS,
    SCHEDULE,
    answers_file,
    read_evaluation,
    read_metrics,
    read_schedule,
)

MAX_PAGE_BYTES = 5_000_000
MAX_TEXT = 2_000
"""Characters of a query, a reply or a question."""
_STEP_FIELDS = ("step", "reward", "loss", "accuracy/strict", "frac_reward_zero_std", "num_tokens")
_PACKAGES = ("text2sql-grpo", "torch", "transformers", "trl", "peft")

Record = dict[str, Any]


def write_report(run: Path) -> Path:
    """Write the page of a run folder and its data; where it would be too long, the first groups are left out.

    Raises:
        DataError: The folder holds nothing of a run, or a file that cannot be read.
        OSError: The page cannot be written.
    """
    report = report_of(run)
    page = _page(report)
    while len(page) > MAX_PAGE_BYTES and (report["groups"] or report["answers"]):
        part = "groups" if report["groups"] else "answers"
        report[part] = report[part][len(report[part]) // 4 + 1 :]
        report["left_out"] = "To keep this page small, the first groups of episodes or answers are left out."
        page = _page(report)
    write_text(run / PAGE_DATA, json.dumps(report, ensure_ascii=True))
    write_text(run / PAGE, page)
    return run / PAGE


def report_of(run: Path) -> Record:
    """Data of the page. Parts whose files are absent are empty, and named in `missing`.

    Raises:
        DataError: See `write_report`.
    """
    present = [name for name in (CONFIG, METRICS, ROLLOUTS, SCHEDULE, EVALUATION) if (run / name).is_file()]
    if not set(present) - {CONFIG}:
        raise DataError(f"no run: {run} holds neither {METRICS}, {ROLLOUTS} nor {EVALUATION}")
    evaluation, metrics = read_evaluation(run), [row for row in read_metrics(run) if "loss" in row]
    episodes = _rows(run / ROLLOUTS)
    answers = _answers(_rows(answers_file(run, "before")), _rows(answers_file(run)))
    groups = _groups(episodes)
    return {
        "name": run.resolve().name,
        "result": evaluation.get("change", {}).get("verdict", ""),
        "sets": _sets(evaluation),
        "curve": [{"step": row["step"]} | _accuracy(row["accuracy"]) for row in read_schedule(run)],
        "kept_step": evaluation.get("step"),
        "steps": {name: [row.get(name) for row in metrics] for name in _STEP_FIELDS},
        "costs": _costs(evaluation, metrics, episodes),
        "diagnosis": _diagnosis(metrics, episodes),
        "reasons": Counter(row["after"]["reason"] for row in answers if row["after"]).most_common(),
        "heat": _heat(answers),
        "answers": answers,
        "groups": groups,
        "schemas": _schemas(episodes, _rows(answers_file(run))),
        "config": (run / CONFIG).read_text(encoding="utf-8") if CONFIG in present else "",
        "hardware": evaluation.get("hardware", {}),
        "versions": {name: version(name) for name in _PACKAGES},
        "missing": [
            text
            for name, text in (
                (METRICS, "training steps"),
                (ROLLOUTS, "episodes"),
                (SCHEDULE, "evaluations during training"),
                (EVALUATION, "held-out answers"),
            )
            if name not in present
        ],
        "left_out": "",
    }


def _rows(path: Path) -> list[Record]:
    return list(read_jsonl(path, "a run's records")) if path.is_file() else []


def _accuracy(record: Mapping[str, Any]) -> Record:
    low, high = record["interval"]
    return {"correct": record["correct"], "total": record["total"], "low": low, "high": high}


def _sets(evaluation: Mapping[str, Any]) -> list[Record]:
    """Strict accuracy on each held-out set, before and after training."""
    before = evaluation.get("before", {}).get("sets", {})
    return [
        {
            "name": name,
            "after": _accuracy(scores["overall"]["strict"]),
            "before": _accuracy(before[name]["overall"]["strict"]) if name in before else None,
        }
        for name, scores in evaluation.get("sets", {}).items()
    ]


def _costs(evaluation: Mapping[str, Any], metrics: Sequence[Record], episodes: Sequence[Record]) -> Record:
    return {
        "seconds": evaluation.get("seconds", {}),
        "cpu_seconds": evaluation.get("cpu_seconds", {}),
        "tokens": next((row["num_tokens"] for row in reversed(metrics) if "num_tokens" in row), None),
        "episodes": len(episodes),
        "queries": sum(action["kind"] == "run_sql" for row in episodes for action in row.get("actions", ())),
    }


def _diagnosis(metrics: Sequence[Record], episodes: Sequence[Record]) -> str:
    """Share of episodes without a gradient, the reason of most failures, and a config field to change."""
    shares = [row["frac_reward_zero_std"] for row in metrics if "frac_reward_zero_std" in row]
    if not shares or not episodes:
        return ""
    flat = sum(shares) / len(shares)
    text = f"{flat:.0%} of the episodes were in groups whose rewards do not differ, which give no gradient."
    wrong = [row for row in episodes if not row["strict"]]
    if flat > 0.5:
        is_easy = len(wrong) * 2 < len(episodes)
        text += f" Most groups are {'all right' if is_easy else 'all wrong'}: "
        text += (
            "take harder questions or raise grpo.temperature."
            if is_easy
            else "take easier questions, or more of the section sft first."
        )
    if wrong:
        (reason, count), *_ = Counter(row["reason"] for row in wrong).most_common()
        text += f" Of {len(wrong)} wrong episodes {count} have the reason {reason}."
    masked = sum(row["is_masked"] for row in episodes)
    if masked * 10 > len(episodes):
        text += f" {masked} episodes were cut and are masked: raise environment.max_episode_tokens."
    return text


def _answers(before: Iterable[Record], after: Iterable[Record]) -> list[Record]:
    """Held-out questions with the answers before and after training."""
    first = {(row["set"], row["example"]): row for row in before}
    rows = []
    for row in after:
        earlier = first.get((row["set"], row["example"]))
        rows.append(
            _asked(row) | {"set": row["set"], "after": _answer(row), "before": earlier and _answer(earlier)}
        )
    return rows


def _groups(episodes: Iterable[Record]) -> list[Record]:
    """Episodes of one question in one step, in the order of the steps."""
    found: dict[tuple[int, str], list[Record]] = defaultdict(list)
    for row in episodes:
        found[row["step"], row["example"]].append(row)
    return [
        _asked(rows[0]) | {"step": step, "episodes": [_answer(row) for row in rows]}
        for (step, _), rows in sorted(found.items(), key=lambda item: item[0][0])
    ]


def _asked(row: Record) -> Record:
    names = ("example", "database", "family", "difficulty", "question", "gold_sql")
    return {name: _cut(row[name] or "") for name in names}


def _answer(row: Record) -> Record:
    """One episode: its turns, verdict and scores."""
    names = ("strict", "official", "reason", "gap", "flags", "reward", "scores", "is_masked", "stop_reason")
    outcomes = [action.get("outcome") for action in row.get("actions", ())]
    return {name: row.get(name) for name in names} | {
        "sql": _cut(row["final_sql"] or ""),
        "turns": [[one["role"], _cut(one["content"])] for one in row["messages"][1:]],
        "tokens": sum(row.get("completion_mask") or ()),
        "errors": [outcome["error"] for outcome in outcomes if outcome and outcome["status"] != "ok"],
        "is_late": any(outcome and outcome["status"] == "timeout" for outcome in outcomes),
    }


def _heat(answers: Iterable[Record]) -> Record:
    """Right and asked by database and family, after training."""
    cells: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for row in answers:
        right, asked = cells[row["database"]].setdefault(row["family"], [0, 0])
        cells[row["database"]][row["family"]] = [right + row["after"]["strict"], asked + 1]
    return cells


def _schemas(*parts: Iterable[Record]) -> dict[str, str]:
    """First prompt of each database, without its question."""
    found: dict[str, str] = {}
    for row in chain(*parts):
        if row["messages"] and row["database"] not in found:
            prompt = row["messages"][0]["content"].removesuffix(row["question"])
            found[row["database"]] = _cut(prompt.strip(), 8 * MAX_TEXT)
    return found


def _cut(text: str, length: int = MAX_TEXT) -> str:
    return text if len(text) <= length else f"{text[:length]} .. ({len(text):,} characters)"


def _page(report: Record) -> str:
    """The page: its scripts and styles are named by hash in its policy, its data is compressed."""
    parts = {
        name: (files(__package__) / name).read_text("utf-8")
        for name in ("report.css", "preact.js", "report.js")
    }
    script = parts["preact.js"] + parts["report.js"]
    data = gzip.compress(json.dumps(report, ensure_ascii=True).encode(), mtime=0)
    template = Environment(autoescape=True).from_string(
        (files(__package__) / "report.html").read_text("utf-8")
    )
    return template.render(
        name=report["name"],
        style=parts["report.css"],
        script=script,
        style_hash=_hash(parts["report.css"]),
        script_hash=_hash(script),
        data=base64.b64encode(data).decode(),
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
