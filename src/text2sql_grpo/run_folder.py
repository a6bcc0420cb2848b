"""Names of the files in a run folder, their writer, and readers of those that other programs use."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from text2sql_grpo.errors import ConfigError, DataError, RunError
from text2sql_grpo.files import append_jsonl, cut_lines, parse_yaml, read_json, read_jsonl

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"  # a line per step
ROLLOUTS = "rollouts.jsonl"  # a line per episode; see `read_episodes` for its step
TRACES = "traces.jsonl"  # a line per rollout of a verifiers taskset
SCHEDULE = "evaluation_schedule.jsonl"  # a line per evaluation during training
LOGS = (METRICS, ROLLOUTS, TRACES, SCHEDULE)
SUSPECTS = "suspects.jsonl"  # a line per gold that most episodes contradict; next to it a page
EVALUATION = "evaluation.json"
COMPARISON = "comparison.json"
CURVE = "learning_curve.png"
ENERGY = "emissions.csv"  # of codecarbon, a line per training
PAGE, PAGE_DATA = "report.html", "report.json"
ASKED = ("example", "database", "family", "difficulty", "question", "gold_sql")  # fields of each episode
_SHOWN = (*ASKED, "final_sql", "messages", "strict")


class RunLog:
    """Appender to the logs of a run folder; each line is written whole and at once."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make the run folder: {error}") from error
        self.folder = folder

    def write(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records to the log of this name, NaN and infinity as null."""
        append_jsonl(self.folder / name, map(_plain, records))

    def cut_back(self, step: int) -> None:
        """Remove lines that are newer than a checkpoint, and a line that a kill left half written.

        Args:
            step: Step of the checkpoint. Metrics count steps done, episodes the steps done before them.
        """
        for name in (METRICS, SCHEDULE):
            cut_lines(self.folder / name, last_step=step)
        for name in (ROLLOUTS, TRACES):
            cut_lines(self.folder / name, last_step=step - 1)


def find_config(*models: str) -> Path | None:
    """Find `config.yaml` in the folder of a model (or of its answers), or around it; the first one found."""
    paths = [Path(model).resolve() for model in models if Path(model).exists()]
    places = [folder / CONFIG for path in paths for folder in (path, path.parent)]
    return next((place for place in places if place.is_file()), None)


def config_around(*models: str) -> Path:
    """`find_config`, with an error instead of None.

    Raises:
        ConfigError: There is no config.
    """
    found = find_config(*models)
    if found is None:
        shown = [name if Path(name).exists() else f"{name} (no such file or folder)" for name in models]
        raise ConfigError(f"no config.yaml around {' or '.join(shown)}: add --config FILE")
    return found


def read_settings(run: Path) -> dict[str, Any]:
    """Content of `config.yaml` as plain data; empty without the file.

    Raises:
        DataError: It is not a YAML mapping.
    """
    path = run / CONFIG
    if not path.is_file():
        return {}
    try:
        settings = parse_yaml(path.read_text(encoding="utf-8")) or {}
    except ValueError as error:
        raise DataError(f"cannot parse the YAML: {error} ({path})") from error
    if not isinstance(settings, dict):
        raise DataError(f"a config must be a YAML mapping, got {type(settings).__name__} ({path})")
    return settings


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl`; empty without the file."""
    return log_lines(run / METRICS, "training steps")


def read_episodes(run: Path) -> list[dict[str, Any]]:
    """Lines of `rollouts.jsonl`, with `step` as in `metrics.jsonl`; empty without the file."""
    path = run / ROLLOUTS
    return log_lines(path, "episodes", convert=lambda line: with_step(episode_record(line)))


def episode_record(line: dict[str, Any]) -> dict[str, Any]:
    """Line of an episode; KeyError if it lacks a field that the page of a run reads."""
    return _with_fields(line, (*_SHOWN, "reward", "stop_reason", "completion_ids", "completion_mask"))


def answer_record(line: dict[str, Any]) -> dict[str, Any]:
    """Line of an answer to a held-out question; KeyError as of `episode_record`."""
    return _with_fields(line, (*_SHOWN, "set"))


def _with_fields(line: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    for name in names:
        if name not in line:
            raise KeyError(name)
    return line


def with_step(episode: Mapping[str, Any]) -> dict[str, Any]:
    """Add the optimiser step, from 1, to an episode, whose line has the number of steps done before."""
    return {**episode, "step": episode["step"] + 1}


def read_schedule(run: Path) -> list[dict[str, Any]]:
    """Lines of `evaluation_schedule.jsonl`; empty without the file."""
    return log_lines(
        run / SCHEDULE, "scheduled evaluations", convert=lambda line: _with_fields(line, ("step", "accuracy"))
    )


def read_evaluation(run: Path) -> dict[str, Any]:
    """Content of `evaluation.json`; empty without the file."""
    return read_json(run / EVALUATION) if (run / EVALUATION).is_file() else {}


def answers_file(run: Path, when: str = "after") -> Path:
    """Path of the answers to the held-out questions `before` or `after` GRPO."""
    return run / ("evaluation.jsonl" if when == "after" else f"evaluation-{when}.jsonl")


def log_lines(
    path: Path, what: str, *, convert: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> list[dict[str, Any]]:
    """Lines of a log, see `read_jsonl`; empty without the file."""
    return list(read_jsonl(path, what, convert=convert)) if path.is_file() else []


def _plain(value: Any) -> Any:
    """Replace NaN and infinity, which are not JSON, by None."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
