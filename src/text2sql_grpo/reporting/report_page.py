"""`report.html`: a run, an evaluation or a comparison as one file without network, and as `report.json`."""

import base64
import csv
import gzip
import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from itertools import chain, dropwhile, takewhile
from pathlib import Path
from typing import Any

from jinja2 import Environment
from tokenizers import Tokenizer

from text2sql_grpo.data.databases import Databases
from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.skills import skills
from text2sql_grpo.evaluation.statistics import Accuracy, database_counts, interval_unit
from text2sql_grpo.files import read_json, read_jsonl, write_text
from text2sql_grpo.grading.verdict import REASONS
from text2sql_grpo.phrases import many
from text2sql_grpo.reporting.accuracy_tables import sample_shares
from text2sql_grpo.reporting.run_findings import findings, grouped, read_logs
from text2sql_grpo.run_folder import (
    ASKED,
    CONFIG,
    ENERGY,
    EVALUATION,
    METRICS,
    PAGE,
    PAGE_DATA,
    ROLLOUTS,
    SCHEDULE,
    SUSPECTS,
    answer_record,
    answers_file,
    find_config,
    log_lines,
    read_evaluation,
    read_settings,
)

MAX_PAGE_BYTES = 5_000_000
MAX_TEXT = 2_000
"""Characters of a query, a reply or a question."""
TOKEN_GROUPS = 40
"""Groups, the last ones whose rewards differ, whose tokens are shown one by one."""
_STEP_FIELDS = ("step", "reward", "loss", "accuracy/strict", "frac_reward_zero_std", "num_tokens")
_PACKAGES = ("text2sql-grpo", "torch", "transformers", "trl", "peft")

Record = dict[str, Any]


def write_report(run: Path) -> Path:
    """Write the page of a run folder, and its data next to it.

    Raises:
        DataError: The folder holds nothing of a run, or a file that cannot be read.
        OSError: The page cannot be written.
    """
    return write_page(run / PAGE, run_report(run))


def run_report(run: Path) -> Record:
    """Data of a run's page. Parts whose files are absent are empty, and named in `missing`.

    Raises:
        DataError: See `write_report`.
    """
    parts = {
        METRICS: "training steps",
        ROLLOUTS: "episodes",
        SCHEDULE: "evaluations during training",
        EVALUATION: "held-out answers",
    }
    missing = [text for name, text in parts.items() if not (run / name).is_file()]
    if len(missing) == len(parts):
        raise DataError(f"no run: {run} holds neither {METRICS}, {ROLLOUTS} nor {EVALUATION}")
    logs, config = read_logs(run), run / CONFIG
    tokens = [row["num_tokens"] for row in logs.steps if "num_tokens" in row]
    databases = _databases(run / CONFIG)
    report = _report(
        run.resolve().name,
        read_evaluation(run),
        databases,
        before=log_lines(answers_file(run, "before"), "answers", convert=answer_record),
        after=log_lines(answers_file(run), "answers", convert=answer_record),
        episodes=logs.episodes,
        tokenizer=run / "merged" / "tokenizer.json",
        suspects={row["id"] for row in log_lines(run / SUSPECTS, "suspects")},
    )
    return report | {
        "model": f"{run}/merged",
        "sources": _sources(databases, report["schemas"]),
        "curve": curve_of(logs.schedule),
        "steps": {name: [row.get(name) for row in logs.steps] for name in _STEP_FIELDS},
        "costs": report["costs"] | {"tokens": tokens[-1] if tokens else None, "kwh": _energy(run / ENERGY)},
        "diagnosis": [str(one) for one in findings(logs)] if logs.steps else [],
        "config": config.read_text(encoding="utf-8") if config.is_file() else "",
        "missing": missing,
    }


def evaluation_report(path: Path, databases: Databases | None = None) -> Record:
    """Data of the page of an evaluation, whose answers lie next to it as JSONL.

    Args:
        databases: Databases of the questions; default: those in the config next to the file or its model.

    Raises:
        DataError: A file is missing or cannot be read.
    """
    evaluation = read_json(path)
    file, what = path.with_suffix(".jsonl"), "the answers of an evaluation"
    answers = list(read_jsonl(file, what, convert=answer_record))
    model = evaluation.get("model") or "MODEL"
    report = _report(
        path.stem, evaluation, databases or _databases(find_config(str(path), model)), after=answers
    )
    return report | {"model": model}


def comparison_report(name: str, record: Record, base: Sequence[Record], trained: Sequence[Record]) -> Record:
    """Data of the page of a comparison: its `comparison.json`, and the answers of both sides."""
    sets = record["sets"]
    scores, before = (
        {name: {"overall": {"strict": one["overall"]["strict"][side]}} for name, one in sets.items()}
        for side in ("trained", "base")
    )
    evaluation = {"sets": scores, "before": {"sets": before}, "change": {"verdict": record["verdict"]}}
    databases = _databases(find_config(record["trained"], record["base"]))
    report = _report(name, evaluation, databases, before=base, after=trained)
    return report | {"sides": ["base", "trained"], "model": record["trained"]}


def episodes_report(name: str, episodes: Sequence[Record], databases: Databases) -> Record:
    """Data of the page of collected episodes."""
    report = _report(name, {}, databases, episodes=[row | {"step": 0} for row in episodes])
    right = sum(bool(row.get("strict")) for row in episodes)
    return report | {"result": f"{right} of {many(len(episodes), 'episode')} right"}


def write_page(path: Path, *reports: Record) -> Path:
    """Write a page, and its data next to it: `report.json` in a run folder, else `NAME.report.json`.

    Where the page would be too long, the first groups and answers are left out of it.
    """
    beside = path.with_name(PAGE_DATA) if path.name == PAGE else path.with_suffix(".report.json")
    data = reports[0] if len(reports) == 1 else reports
    write_text(beside, json.dumps(data, ensure_ascii=True))
    page = page_text(reports)
    while len(page) > MAX_PAGE_BYTES and any(report["groups"] or report["answers"] for report in reports):
        for report in reports:
            part = "groups" if report["groups"] else "answers"
            report[part] = report[part][len(report[part]) // 4 + 1 :]
            report["left_out"] = (
                "To keep this page small, the first groups of episodes or answers are left out."
            )
        page = page_text(reports)
    write_text(path, page)
    return path


def _report(
    name: str,
    evaluation: Mapping[str, Any],
    databases: Databases,
    *,
    before: Sequence[Record] = (),
    after: Sequence[Record] = (),
    episodes: Sequence[Record] = (),
    tokenizer: Path | None = None,
    suspects: Collection[str] = (),
) -> Record:
    answers, sets = _answers(before, after, databases, suspects), sets_of(evaluation)
    return {
        "name": name,
        "model": "MODEL",
        "sides": ["before", "after"],
        "result": evaluation.get("change", {}).get("verdict", "") or _accuracies(sets),
        "sets": sets,
        "interval_unit": interval_unit(database_counts(evaluation.get("sets", {})).values()),
        "samples": _samples(evaluation),
        "curve": [],
        "kept_step": evaluation.get("step"),
        "steps": {},
        "costs": _costs(evaluation, episodes),
        "diagnosis": [],
        "reasons": Counter(row["after"]["reason"] for row in answers).most_common(),
        "reason_texts": REASONS,
        "gaps": {gap: count for gap, count in evaluation.get("accepted_by_gap", {}).items() if gap},
        "heat": _heat(answers),
        "answers": answers,
        "groups": _groups(episodes, databases, tokenizer),
        "schemas": _schemas(episodes, after),
        "sources": {},
        "config": "",
        "hardware": evaluation.get("hardware", {}),
        "warnings": [_cut(text) for text in evaluation.get("warnings", ())],
        "versions": {name: version(name) for name in _PACKAGES},
        "missing": [],
        "left_out": "",
    }


def _accuracy(record: Mapping[str, Any]) -> Record:
    known = Accuracy.read(record)
    low, high = known.interval
    return {"correct": known.correct, "total": known.total, "low": low, "high": high}


def _accuracies(sets: Iterable[Record]) -> str:
    """Sentence with the accuracy on each held-out set."""
    form = "{name}: {correct} of {total} right ({low:.0%} to {high:.0%})"
    return "; ".join(form.format(name=one["name"], **one["after"]) for one in sets)


def curve_of(schedule: Iterable[Mapping[str, Any]]) -> list[Record]:
    """Accuracy on dev by step."""
    return [{"step": row["step"]} | _accuracy(row["accuracy"]) for row in schedule]


def sets_of(evaluation: Mapping[str, Any]) -> list[Record]:
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


def _samples(evaluation: Mapping[str, Any]) -> list[Record]:
    """Accuracies of several answers to each question, before and after training."""
    stages = {"before": evaluation.get("before", {}).get("sets", {}), "after": evaluation.get("sets", {})}
    return [
        {
            "name": f"{name}, {stage}" if stages["before"] else name,
            "k": sets[name]["samples"]["samples"],
            "shares": {title: one["accuracy"] for title, one in sample_shares(sets[name]).items()},
        }
        for name in stages["after"]
        for stage, sets in stages.items()
        if "samples" in sets.get(name, {})
    ]


def _energy(path: Path) -> float | None:
    """Energy of GRPO in kWh, as codecarbon measured or estimated it (`grpo.report_to`); None without it."""
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", newline="") as lines:
        return sum(float(row["energy_consumed"]) for row in csv.DictReader(lines))


def _costs(evaluation: Mapping[str, Any], episodes: Sequence[Record]) -> Record:
    return {
        "seconds": evaluation.get("seconds", {}),
        "cpu_seconds": evaluation.get("cpu_seconds", {}),
        "tokens": None,
        "kwh": None,
        "episodes": len(episodes),
        "queries": sum(action["kind"] == "run_sql" for row in episodes for action in row.get("actions", ())),
    }


def _answers(
    before: Iterable[Record], after: Iterable[Record], databases: Databases, suspects: Collection[str]
) -> list[Record]:
    """Held-out questions with the answers before and after training."""
    first = {(row["set"], row["example"]): _answer(row) for row in before}
    return [
        _asked(row, databases)
        | {
            "set": row["set"],
            "is_suspect": row["example"] in suspects,
            "after": _answer(row),
            "before": first.get((row["set"], row["example"])),
        }
        for row in after
    ]


def _groups(episodes: Iterable[Record], databases: Databases, tokenizer: Path | None) -> list[Record]:
    """Episodes of one question in one step, in the order of the steps."""
    found = sorted(grouped(episodes), key=lambda rows: int(rows[0]["step"]))
    groups = [
        (
            _asked(rows[0], databases)
            | {"step": rows[0]["step"], "episodes": [_answer(row) for row in rows]},
            rows,
        )
        for rows in found
    ]
    mixed = [entry for entry in groups if len({row["reward"] for row in entry[1]}) > 1]
    if tokenizer is not None and tokenizer.is_file():
        decoder = Tokenizer.from_file(str(tokenizer))
        for group, rows in mixed[-TOKEN_GROUPS:]:
            for episode, row in zip(group["episodes"], rows, strict=True):
                episode["pieces"] = _pieces(row, decoder)
    return [group for group, _ in groups]


def _pieces(row: Record, decoder: Tokenizer) -> list[list[Any]]:
    """Text of each token after the prompt, with its log-probability; None for the environment's."""
    log_probs = iter(row.get("log_probs") or ())
    return [
        [decoder.decode([token], skip_special_tokens=False), next(log_probs, 0) if is_sampled else None]
        for token, is_sampled in zip(row["completion_ids"], row["completion_mask"], strict=True)
    ]


def _asked(row: Record, databases: Databases) -> Record:
    name = row["database"]
    example = Example(row["example"], name, row["question"], row["gold_sql"])
    dialect = databases.dialect(name) if name in databases.names() else "sqlite"
    return {field: _cut(row[field] or "") for field in ASKED} | {"skills": skills(example, dialect)}


def _answer(row: Record) -> Record:
    names = ("strict", "official", "reason", "gap", "flags", "reward", "scores", "is_masked", "stop_reason")
    outcomes = [action.get("outcome") for action in row.get("actions", ())]
    return {name: row.get(name) for name in names} | {
        "sql": _cut(row["final_sql"] or ""),
        "turns": [[one["role"], _cut(one["content"])] for one in dropwhile(_is_prompt, row["messages"])],
        "tokens": sum(row.get("completion_mask") or ()),
        "errors": [outcome["error"] for outcome in outcomes if outcome and outcome["status"] != "ok"],
        "is_late": any(outcome and outcome["status"] == "timeout" for outcome in outcomes),
        "evidence": row.get("evidence"),
    }


def _heat(answers: Iterable[Record]) -> Record:
    """Right and asked by database and skill, after training; a question counts for each of its skills."""
    cells: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for row in answers:
        for skill in row["skills"]:
            right, asked = cells[row["database"]].setdefault(skill, [0, 0])
            cells[row["database"]][skill] = [right + row["after"]["strict"], asked + 1]
    return cells


def _schemas(*parts: Iterable[Record]) -> dict[str, str]:
    """Schema text of each database: its first prompt without instructions and question."""
    found: dict[str, str] = {}
    for row in chain(*parts):
        prompt = [one["content"] for one in takewhile(_is_prompt, row["messages"])]
        if prompt and row["database"] not in found:
            schema = prompt[-1].removesuffix(row["question"])
            found[row["database"]] = _cut(schema.strip(), 8 * MAX_TEXT)
    return found


def _is_prompt(message: Mapping[str, str]) -> bool:
    return message["role"] != "assistant"


def _databases(config: Path | None) -> Databases:
    """Databases that a config names; none if they were moved or removed since."""
    try:
        settings = read_settings(config.parent) if config else {}
        return Databases((settings.get("data") or {}).get("databases", {}))
    except (AttributeError, DataError, TypeError):  # the config may be another program's
        return Databases({})


def _sources(databases: Databases, names: Iterable[str]) -> dict[str, str]:
    """File, folder or URL of each database that is found, for `ask --db`."""
    here = f"{Path.cwd()}{os.sep}"
    return {
        name: str(databases.source(name)).removeprefix(here) for name in names if name in databases.names()
    }


def _cut(text: str, length: int = MAX_TEXT) -> str:
    return text if len(text) <= length else f"{text[:length]} .. ({len(text):,} characters)"


def page_text(reports: Sequence[Record], *, is_live: bool = False) -> str:
    """The page: its scripts and styles are named by hash in its policy, its data is compressed.

    Args:
        is_live: The page asks its server for newer data, at `data`.
    """
    parts = {
        name: (files(__package__) / name).read_text("utf-8")
        for name in ("report.css", "preact.js", "report.js")
    }
    script = parts["preact.js"] + parts["report.js"]
    data = gzip.compress(json.dumps(reports, ensure_ascii=True).encode(), mtime=0)
    template = Environment(autoescape=True).from_string(
        (files(__package__) / "report.html").read_text("utf-8")
    )
    return template.render(
        name=", ".join(report["name"] for report in reports),
        is_live=is_live,
        style=parts["report.css"],
        script=script,
        style_hash=_hash(parts["report.css"]),
        script_hash=_hash(script),
        data=base64.b64encode(data).decode(),
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
