"""Questions whose sampled answers contradict the gold, found while training."""

from collections.abc import Sequence
from typing import Any

from text2sql_grpo.audit.suspects import find_suspects
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.grading import Grader
from text2sql_grpo.reliability import ranks
from text2sql_grpo.rewards import Answer


def contradicted(
    batch: Sequence[int], answers: Sequence[Answer], environment: SQLEnvironment, grader: Grader
) -> list[int]:
    """Indices of the questions without a right answer in this round whose answers contradict the gold.

    Rank 0 compares the answers of all ranks (see `audit.suspects.find_suspects`); each returns the same.

    Args:
        batch: Index of the question of each answer.
    """
    rows = [
        (number, answer.example, {"final_sql": answer.episode.final_sql, "is_right": answer.verdict.strict})
        for number, answer in zip(batch, answers, strict=True)
        if not answer.episode.is_masked
    ]
    examples: dict[int, Example] = {}
    samples: dict[str, list[dict[str, Any]]] = {}
    for number, example, sample in (row for gathered in ranks.gather(rows) for row in gathered):
        examples[number] = example
        samples.setdefault(example.id, []).append(sample)
    found: list[str] = []
    if ranks.is_main():
        asked = [one for one in examples.values() if not any(row["is_right"] for row in samples[one.id])]
        suspects = find_suspects(asked, samples, environment.databases, environment.executor, grader)
        found = [suspect["id"] for suspect in suspects]
    (found, *_) = ranks.gather(found)
    return [number for number, example in examples.items() if example.id in found]
