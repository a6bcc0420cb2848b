"""`evaluate` and its `Report`: the accuracy of a model on questions with gold queries."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from text2sql_grpo.errors import ArgumentError, check_type
from text2sql_grpo.evaluation.bench import Environment, Sampling
from text2sql_grpo.evaluation.statistics import Accuracy, Interval, interval_by_database, interval_of_shares
from text2sql_grpo.evaluation.votes import Vote, Votes, risk_coverage, votes
from text2sql_grpo.phrases import many
from text2sql_grpo.rewards import Answer

if TYPE_CHECKING:
    from text2sql_grpo.evaluation.bench import Model


_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """Answers of a model to the same number of samples of each question.

    Attributes:
        answers: All answers, those to one question next to each other.
        samples: Number of answers of each question.
        votes: Votes of each question, in the same order; empty if none were asked for.
    """

    answers: Sequence[Answer]
    samples: int = 1
    votes: Sequence[Votes] = ()

    def __post_init__(self) -> None:
        if self.samples < 1 or len(self.answers) % self.samples:
            count = f"{len(self.answers)} answers"
            raise ArgumentError(f"samples must be >= 1 and divide the {count}, got {self.samples}")
        if self.votes and len(self.votes) * self.samples != len(self.answers):
            raise ArgumentError(f"votes must be one of each question, got {len(self.votes)}")

    @property
    def accuracy(self) -> float:
        """Mean share of right answers by the strict verdict, in [0, 1]; of no answers 0."""
        return fmean(map(fmean, self._right())) if self.answers else 0.0

    @property
    def interval(self) -> Interval:
        """95% interval of the accuracy by database, in [0, 1]; of one database by question."""
        if not self.answers:
            return 0.0, 1.0
        counted = Accuracy.of((one.example.database, one.verdict.strict) for one in self.answers)
        naive = interval_of_shares([fmean(row) for row in self._right()], self.samples)
        return interval_by_database(counted.by_database.values(), naive)

    def pass_at(self, k: int) -> float:
        """Chance that at least one of k sampled answers is right, in [0, 1].

        Unbiased estimator, Chen et al. 2021 (arXiv:2107.03374, sec. 2.1).

        Raises:
            ArgumentError: k is no int from 1 to samples.
        """
        if not isinstance(k, int) or not 1 <= k <= self.samples:
            raise ArgumentError(f"k must be an int from 1 to {self.samples}, the number of samples, got {k}")
        all_wrong = [comb(row.count(0), k) / comb(self.samples, k) for row in self._right()]
        return 1 - fmean(all_wrong) if all_wrong else 0.0

    @property
    def vote(self) -> Accuracy:
        """Accuracy of the answers that a vote on the database chooses; see `Votes`."""
        return self._accuracy(self._chosen(one.plain for one in self.votes))

    @property
    def soft_vote(self) -> Accuracy:
        """Accuracy of the answers that a vote on the database and on test databases chooses."""
        return self._accuracy(self._chosen(one.soft for one in self.votes))

    @property
    def oracle(self) -> Accuracy:
        """Share of questions with at least one right answer: what a perfect choice would reach."""
        return self._accuracy([any(row) for row in self._right()])

    def record(self) -> dict[str, Any]:
        """Fields of `samples` of a set in `evaluation.json`."""
        tokens = fmean(sum(answer.episode.completion_mask) for answer in self.answers) if self.answers else 0
        return {
            "samples": self.samples,
            "mean": {"accuracy": round(self.accuracy, 6), "interval": [round(b, 6) for b in self.interval]},
            "pass_at": [round(self.pass_at(k), 6) for k in range(1, self.samples + 1)],
            "oracle": self.oracle.record(),
            "tokens_per_answer": round(tokens, 1),
            "vote": self.vote.record(),
            "soft_vote": self.soft_vote.record(),
            **self._confidence([one.soft for one in self.votes]),
            # `ask` and `serve` vote on the database.
            "sure_from": self._confidence([one.plain for one in self.votes]).get("sure_from"),
        }

    def to_pandas(self) -> Any:
        """Data frame with a row per answer: the fields of `rollouts.jsonl` without tokens."""
        import pandas  # type: ignore[import-untyped]

        left_out = {"prompt_ids", "completion_ids", "completion_mask", "log_probs", "scores", "reward"}
        rows = [answer.record() for answer in self.answers]
        return pandas.DataFrame(
            [{name: value for name, value in row.items() if name not in left_out} for row in rows]
        )

    def _right(self) -> list[list[int]]:
        """Strict verdicts as 0 or 1, a row per question."""
        flat = [int(answer.verdict.strict) for answer in self.answers]
        return [flat[i : i + self.samples] for i in range(0, len(flat), self.samples)]

    def _chosen(self, chosen: Iterable[Vote]) -> list[bool]:
        """True for each question whose chosen answer is right."""
        pairs = zip(chosen, self._right(), strict=False)  # no votes, no pairs
        return [vote.place is not None and bool(row[vote.place]) for vote, row in pairs]

    def _confidence(self, chosen: Sequence[Vote]) -> dict[str, Any]:
        return risk_coverage([vote.share for vote in chosen], self._chosen(chosen))

    def _accuracy(self, right: Sequence[bool]) -> Accuracy:
        databases = [answer.example.database for answer in self.answers[:: self.samples]]
        return Accuracy.of(zip(databases, right, strict=False))

    def __repr__(self) -> str:  # a notebook would show every answer
        low, high = self.interval
        return (
            f"{self.accuracy:.1%} right ({low:.1%} to {high:.1%}), {len(self.answers) // self.samples} "
            f"questions, {self.samples} answers each"
        )


def evaluate(
    model: "Model | str | Path",
    environment: Environment,
    questions: Any,
    *,
    samples: int = 1,
    temperature: float | None = None,
    seed: int = 0,
    on_answer: Callable[[int, Answer], None] | None = None,
    **options: Any,
) -> Report:
    """Answer questions with a model, and grade the answers.

    Args:
        model: A model folder, an adapter, a run folder or a Hub id; a loaded one; or an `Endpoint`.
        questions: See `load_examples`.
        samples: Answers of each question.
        temperature: 0 is greedy; None for 0 with one sample, and 1 with several.
        seed: Random seed of sampling.
        on_answer: See `Environment.answer`, like the other options.

    Raises:
        RunError: Anything wrong with the model, the questions or an endpoint.
    """
    samples = Sampling(samples=samples).samples
    if temperature is None:
        temperature = 0.0 if samples == 1 else 1.0
    check_type("environment", environment, Environment)
    environment.check_open()
    examples = environment.examples(questions)
    answers = environment.answer(
        examples,
        model,
        samples=samples,
        temperature=temperature,
        seed=seed,
        on_answer=on_answer,
        **options,
    )
    failed = {answer.example.id for answer in answers if answer.verdict.reason == "gold_failed"}
    if failed:
        _logger.warning(
            "%s failed, whose answers count as wrong: %s", many(len(failed), "gold"), ", ".join(failed)
        )
    return voted(answers, samples, environment)


def voted(answers: Sequence[Answer], samples: int, environment: Environment) -> Report:
    """Report with the votes of each question's answers; without votes for a single answer each."""
    if samples == 1:
        return Report(answers)
    grader, databases = environment.grader, environment.databases
    found = []
    for first in range(0, len(answers), samples):
        queries = [answer.episode.final_sql for answer in answers[first : first + samples]]
        found.append(votes(queries, databases.address(answers[first].example.database), grader))
    return Report(answers, samples, found)
