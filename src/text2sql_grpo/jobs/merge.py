"""A merge, and whether the merged model answers as the adapter did on its base."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from text2sql_grpo.config import Config
from text2sql_grpo.data.example import Example
from text2sql_grpo.errors import DataError, ModelError
from text2sql_grpo.evaluation.evaluate import accuracy
from text2sql_grpo.evaluation.statistics import Accuracy
from text2sql_grpo.jobs.evaluate import answer_all, held_out_sets
from text2sql_grpo.jobs.setup import Workbench, evenly_spaced, open_workbench
from text2sql_grpo.models.policy import load_policy
from text2sql_grpo.publishing.merge import MergeReport, merge_adapter
from text2sql_grpo.rewards import Answer


@dataclass(frozen=True)
class MergeCheck:
    """The same questions, greedy, before and after a merge.

    Attributes:
        before: Strict accuracy of the adapter on its base.
        after: Of the merged model.
        other_sql: Questions that the two answer with another query.
        other_words: Questions in whose episodes any sampled token differs.
    """

    before: Accuracy
    after: Accuracy
    other_sql: int
    other_words: int

    def __str__(self) -> str:
        return (
            f"  the same {self.before.total} questions, greedy: {self.other_sql} answered by another query, "
            f"{self.other_words} in other words; {self.before.correct} right before merging, "
            f"{self.after.correct} after"
        )

    def record(self) -> dict[str, Any]:
        """As in `evaluation.json`."""
        return {
            "before": self.before.record(),
            "after": self.after.record(),
            "other_sql": self.other_sql,
            "other_words": self.other_words,
        }


def merge(
    adapter: Path,
    out: Path,
    *,
    console: Console,
    base: str | None = None,
    dtype: str = "auto",
    quantization: Any = "auto",
    config: Config | None = None,
    num_samples: int | None = None,
) -> MergeReport:
    """Merges, shows by how much logits moved, and, with `num_samples`, which answers did.

    Args:
        num_samples: Questions, evenly spaced over all held-out sets of `config`; None for none.

    Raises:
        RunError: See `merge_adapter` and `check_merge`.
    """
    if num_samples is not None and not (adapter / "adapter_config.json").is_file():
        raise ModelError(f"expected an adapter to compare with its merged model, got none: {adapter}")
    bench = open_workbench(config) if config is not None and num_samples is not None else None
    if bench is not None:
        held_out_sets(bench, None)  # that there are none is said before the work
    report = merge_adapter(adapter, out, base=base, dtype=dtype, quantization=quantization)
    console.print(str(report), soft_wrap=True)
    if bench is not None and num_samples is not None:
        check = check_merge(
            adapter,
            out,
            bench,
            console,
            num_samples=num_samples,
            base=str(report.base),
            dtype=bench.config.model.dtype if report.is_four_bit else "auto",
            quantization="4bit" if report.is_four_bit else "none",
        )
        console.print(str(check), soft_wrap=True)
    return report


def check_merge(
    adapter: Path,
    merged: Path,
    bench: Workbench,
    console: Console,
    *,
    num_samples: int,
    base: str,
    dtype: str,
    quantization: str,
) -> MergeCheck:
    """What the adapter on its base and the merged model answer to the same questions, greedy.

    Weights of 16 bits round what float32 does not, so some answers may differ though the merge is right.

    Args:
        num_samples: Questions, evenly spaced over all held-out sets.
        base: Folder or Hub id.
        dtype: Of the base, as in training.
        quantization: Of the base, as in training: `none` or `4bit`.

    Raises:
        RunError: A model cannot be read, or there is no held-out question.
    """
    pairs = [(name, one) for name, examples in held_out_sets(bench, None).items() for one in examples]
    if not pairs:
        raise DataError("expected questions in the held-out sets, got none (data.test)")
    chosen: dict[str, list[Example]] = {}
    for name, example in evenly_spaced(pairs, num_samples):
        chosen.setdefault(name, []).append(example)
    policy = load_policy(base, dtype=dtype, quantization=quantization)
    policy.model.load_adapter(str(adapter))
    before = _flat(answer_all(policy, bench, chosen, console, title="Before merging"))
    del policy  # or both would be in memory
    after = _flat(answer_all(load_policy(str(merged)), bench, chosen, console, title="After merging"))
    both = [(one.episode, other.episode) for one, other in zip(before, after, strict=True)]
    return MergeCheck(
        accuracy(before),
        accuracy(after),
        other_sql=sum(one.final_sql != other.final_sql for one, other in both),
        other_words=sum(one.completion_ids != other.completion_ids for one, other in both),
    )


def _flat(answers: dict[str, list[Answer]]) -> list[Answer]:
    return [answer for answered in answers.values() for answer in answered]
