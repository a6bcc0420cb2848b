"""Check of a merge by answers of the merged model to held-out questions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import DataError
from text2sql_grpo.evaluation.bench import Bench, evenly_spaced
from text2sql_grpo.evaluation.statistics import Accuracy
from text2sql_grpo.evaluation.summary import accuracy
from text2sql_grpo.models.loaded_policy import load_policy
from text2sql_grpo.reporting.progress import answer_with_bar
from text2sql_grpo.rewards import Answer


@dataclass(frozen=True)
class MergeCheck:
    """The same questions, greedy, before and after a merge.

    Attributes:
        before: Strict accuracy of the adapter on its base.
        after: Strict accuracy of the merged model.
        other_sql: Number of questions with different final SQL.
        other_words: Number of questions with different sampled tokens.
    """

    before: Accuracy
    after: Accuracy
    other_sql: int
    other_words: int

    def __str__(self) -> str:
        return (
            f"  the same {self.before.total} questions, greedy: {self.other_sql} with different SQL, "
            f"{self.other_words} with different tokens; {self.before.correct} right before merging, "
            f"{self.after.correct} after"
        )

    def record(self) -> dict[str, Any]:
        """Fields of `evaluation.json`."""
        return {
            "before": self.before.record(),
            "after": self.after.record(),
            "other_sql": self.other_sql,
            "other_words": self.other_words,
        }


def check_merge(
    adapter: Path,
    merged: Path,
    bench: Bench,
    console: Console,
    *,
    num_samples: int,
    base: str,
    dtype: str,
    quantization: str,
) -> MergeCheck:
    """Compare greedy answers of the adapter on its base and of the merged model to the same questions.

    16-bit weights are rounded, so that some answers may differ though the merge is right.

    Args:
        num_samples: Number of questions, evenly spaced over all held-out sets.
        dtype: Type of the base in training, as `quantization`.

    Raises:
        RunError: A model cannot be read, or there is no held-out question.
    """
    pairs = [(name, one) for name, examples in bench.held_out().items() for one in examples]
    if not pairs:
        raise DataError("the held-out sets of data.test have no questions")
    chosen: dict[str, list[Example]] = {}
    for name, example in evenly_spaced(pairs, num_samples):
        chosen.setdefault(name, []).append(example)
    policy = load_policy(base, dtype=dtype, quantization=quantization)
    policy.model.load_adapter(str(adapter))
    before = _flat(answer_with_bar(bench, chosen, policy, console, title="Before merging"))
    del policy  # frees its memory for the merged model
    after = _flat(answer_with_bar(bench, chosen, load_policy(str(merged)), console, title="After merging"))
    both = [(one.episode, other.episode) for one, other in zip(before, after, strict=True)]
    return MergeCheck(
        accuracy(before),
        accuracy(after),
        other_sql=sum(one.final_sql != other.final_sql for one, other in both),
        other_words=sum(one.completion_ids != other.completion_ids for one, other in both),
    )


def _flat(answers: dict[str, list[Answer]]) -> list[Answer]:
    return [answer for answered in answers.values() for answer in answered]
