"""Answers of an evaluation, one a line, to be read, compared and graded again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from text2sql_grpo.files import read_jsonl, write_jsonl
from text2sql_grpo.rewards import Answer


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
