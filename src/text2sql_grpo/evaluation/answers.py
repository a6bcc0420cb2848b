"""Answers of an evaluation, one a line, to be read, compared and graded again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.files import read_jsonl, write_jsonl
from text2sql_grpo.rewards import Answer
from text2sql_grpo.run_folder import CONFIG, answers_file


@dataclass(frozen=True)
class Judged:
    """Verdicts on one answer.

    Attributes:
        set: Name of its held-out set.
        example: Id of the question.
        final_sql: The submitted query; None if nothing was submitted.
        reason: Reason of the strict verdict.
    """

    set: str
    example: str
    database: str
    family: str
    difficulty: str
    question: str
    gold_sql: str
    final_sql: str | None
    strict: bool
    official: bool
    reason: str

    @property
    def key(self) -> tuple[str, str]:
        """Set and id, to match answers of two models."""
        return self.set, self.example

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Read one line of a file of answers."""
        return cls(**{field.name: record[field.name] for field in fields(cls)})


def judged(sets: Mapping[str, Sequence[Answer]]) -> list[Judged]:
    """Verdicts on the answers of an evaluation."""
    return [Judged.of(record) for record in _records(sets)]


def write_answers(path: Path, sets: Mapping[str, Sequence[Answer]]) -> None:
    """Write whole episodes as JSONL, like `rollouts.jsonl` with the name of the set and without rewards.

    Raises:
        RunError: The file cannot be written.
    """
    write_jsonl(path, _records(sets))


def _records(sets: Mapping[str, Sequence[Answer]]) -> list[dict[str, Any]]:
    return [{"set": name} | answer.record() for name, answers in sets.items() for answer in answers]


def read_answers(path: Path) -> list[Judged]:
    """Read a file of `write_answers`.

    Raises:
        DataError: No such file, or a line that is no answer.
    """
    return list(read_jsonl(path, "the answers of an evaluation", convert=Judged.of))


def saved_answers(name: str) -> Path | None:
    """Path of the answers in a file or run folder; None for a model.

    Raises:
        DataError: A run folder has none.
    """
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file() and (path / CONFIG).is_file():
        path = answers_file(path)
        if not path.is_file():
            raise DataError(
                f"the run folder has no evaluation.jsonl ({name}): name its merged model or answers"
            )
    return path.with_suffix(".jsonl") if path.suffix in (".json", ".jsonl") else None


def answers_of_sets(path: Path, sets: Sequence[str] | None) -> list[Judged]:
    """Answers of a file to the questions of some sets; of all for None.

    Raises:
        RunError: The file or a set is missing or wrong.
    """
    answers = read_answers(path)
    known = {one.set for one in answers}
    for wanted in sets or ():
        if wanted not in known:
            raise ConfigError(f"--sets must be of {', '.join(sorted(known))}, got {wanted!r} (in {path})")
    return [one for one in answers if sets is None or one.set in sets]
