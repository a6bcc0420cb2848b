"""Collected episodes on disk, and the selection of those to train on."""

import json
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.files import append_jsonl, cut_lines, read_json, read_jsonl, write_json

Keep = Literal["correct", "best_of_n", "shortest_correct"]
Record = dict[str, Any]
_IN_MEMORY = ("example", "sample", "database", "messages", "stop_reason", "is_masked", "strict", "reward")


class EpisodeFile:
    """Episodes as JSONL, each once, so that a killed collection resumes.

    Each line is written at once; opening the file cuts off a line that a kill left half written.

    Args:
        path: The file; its settings are stored next to it, as `.settings.json`.
        settings: Settings that the episodes depend on.

    Attributes:
        records: All episodes in the file by question and sample, without tokens and actions.

    Raises:
        ConfigError: The file holds episodes of other settings.
        RunError: It cannot be read or written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _check_settings(path, json.loads(json.dumps(settings)))
            path.touch()
            cut_lines(path)
            self.records = {_key(one): one for one in read_jsonl(path, "episodes", convert=_slim)}
        except OSError as error:
            raise RunError(f"the file of episodes cannot be written: {error} ({path})") from error

    def missing(self, wanted: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """The samples that are not in the file yet."""
        return [key for key in wanted if key not in self.records]

    def add(self, record: Record) -> None:
        """Append an episode; thread-safe."""
        with self._lock:
            append_jsonl(self.path, [record])
            self.records[_key(record)] = _slim(record)


def _key(record: Record) -> tuple[str, int]:
    return record["example"], record["sample"]


def _slim(record: Record) -> Record:
    return {name: record[name] for name in _IN_MEMORY}


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    beside = path.with_suffix(".settings.json")
    if not path.exists() or not path.stat().st_size:
        write_json(beside, settings)
        return
    if not beside.exists():
        raise ConfigError(f"not a file of collected episodes: {path}: choose another --out")
    earlier = read_json(beside)
    names = sorted(earlier.keys() | settings.keys())
    if different := [name for name in names if earlier.get(name) != settings.get(name)]:
        raise ConfigError(
            f"the episodes in the file were collected with other settings: {', '.join(different)} "
            f"({path}): choose another --out"
        )


def select_chats(records: Iterable[Record], keep: Keep) -> list[Record]:
    """Select chats to train on, sorted by question and sample.

    Only episodes that submitted an answer count, and equal ones of a question once.

    Args:
        keep: `correct`: all that are strictly right. `best_of_n`: the one with the highest reward of each
            question, right or not. `shortest_correct`: the right one with the least text of each question.
    """
    by_question: dict[str, dict[tuple[str, ...], Record]] = {}
    for record in sorted(records, key=lambda record: (record["example"], record["sample"])):
        if record["stop_reason"] == "submitted" and not record["is_masked"]:
            by_question.setdefault(record["example"], {}).setdefault(_assistant_texts(record), record)
    chosen: list[Record] = []
    for episodes in by_question.values():
        right = [record for record in episodes.values() if record["strict"]]
        if keep == "correct":
            chosen += right
        elif keep == "best_of_n":
            scored = [record for record in episodes.values() if record["reward"] is not None]
            chosen += sorted(scored, key=lambda record: -record["reward"])[:1]
        else:
            chosen += sorted(right, key=lambda record: sum(map(len, _assistant_texts(record))))[:1]
    names = ("example", "sample", "database", "messages", "tools")
    return [{name: record[name] for name in names if name in record} for record in chosen]


def _assistant_texts(record: Record) -> tuple[str, ...]:
    return tuple(message["content"] for message in record["messages"] if message["role"] == "assistant")
