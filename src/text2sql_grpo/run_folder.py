"""Names of the files in a run folder, and readers of those that other programs use."""

from pathlib import Path
from typing import Any

from text2sql_grpo.files import read_json, read_jsonl

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"  # a line per step
ROLLOUTS = "rollouts.jsonl"  # a line per episode
TRACES = "traces.jsonl"  # a line per rollout of a verifiers taskset
SCHEDULE = "evaluation_schedule.jsonl"  # a line per evaluation during training
START = "start.json"
EVALUATION = "evaluation.json"
COMPARISON = "comparison.json"
CURVE = "learning_curve.png"


def config_around(path: Path) -> Path | None:
    """Path of the `config.yaml` in a folder or its parent; None if neither has one."""
    path = path.resolve()
    return next((folder / CONFIG for folder in (path, path.parent) if (folder / CONFIG).is_file()), None)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl`; empty without the file."""
    return _lines(run / METRICS, "training steps")


def read_schedule(run: Path) -> list[dict[str, Any]]:
    """Lines of `evaluation_schedule.jsonl`; empty without the file."""
    return _lines(run / SCHEDULE, "scheduled evaluations")


def read_evaluation(run: Path) -> dict[str, Any]:
    """Content of `evaluation.json`; empty without the file."""
    return read_json(run / EVALUATION) if (run / EVALUATION).is_file() else {}


def answers_file(run: Path, when: str = "after") -> Path:
    """Path of the answers to the held-out questions `before` or `after` GRPO."""
    return run / ("evaluation.jsonl" if when == "after" else f"evaluation-{when}.jsonl")


def _lines(path: Path, what: str) -> list[dict[str, Any]]:
    return list(read_jsonl(path, what)) if path.is_file() else []
