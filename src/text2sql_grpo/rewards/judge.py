"""Judging of finished episodes: the only place that grades, scores, pays, flags and records them."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from text2sql_grpo.data.databases import cache_folder
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Action, Episode, StopReason
from text2sql_grpo.environment.observation import ObservationLimits
from text2sql_grpo.grading import Grader, Verdict
from text2sql_grpo.grading.suite import TestSuite
from text2sql_grpo.grading.verdict import Submission
from text2sql_grpo.rewards.episode_flags import FLAGS, NOT_FLAGGED, episode_flags
from text2sql_grpo.rewards.function import Results
from text2sql_grpo.rewards.mix import RewardMix
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.sql.address import Database, parse_address

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """One question, answered and judged.

    Attributes:
        published: Published metrics by name, which an evaluation adds; empty in training.
        evidence: Rows of gold query and answer, which an evaluation adds; empty in training.
        flags: See `episode_flags`; `NOT_FLAGGED` if finding them failed.
        scores: Named scores; None if the episode must not be trained on, or was judged without rewards.
        reward: Weighted sum of the scores; None without scores.
    """

    episode: Episode
    verdict: Verdict
    published: Mapping[str, float] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    scores: dict[str, float] | None = None
    reward: float | None = None

    @property
    def example(self) -> Example:
        return self.episode.example

    def record(self) -> dict[str, Any]:
        """Episode and judgement as a line of `rollouts.jsonl` and `evaluation.jsonl`."""
        episode, verdict, example = self.episode, self.verdict, self.example
        return {
            "example": example.id,
            "database": example.database,
            "family": example.family,
            "difficulty": example.difficulty,
            "question": example.question,
            "gold_sql": example.gold_sql,
            "other_golds": list(example.other_golds),
            "final_sql": episode.final_sql,
            "stop_reason": episode.stop_reason,
            "is_masked": episode.is_masked,
            "strict": verdict.strict,
            "official": verdict.official,
            "reason": verdict.reason,
            "gap": verdict.gap,
            "flags": list(self.flags),
            "scores": self.scores,
            "reward": self.reward,
            "messages": episode.messages,
            "actions": [_action_record(action) for action in episode.actions],
            "prompt_ids": episode.prompt_ids,
            "completion_ids": episode.completion_ids,
            "completion_mask": episode.completion_mask,
            "log_probs": _log_probs(episode),
            **({"evidence": self.evidence} if self.evidence else {}),
        }


@dataclass(frozen=True)
class Judge:
    """Judge of episodes.

    Attributes:
        rewards: Named scores and their weights; None for no rewards, as in evaluations.
        max_rows_shown: Maximum rows of each result that the model saw.
    """

    grader: Grader
    executor: SQLExecutor
    rewards: RewardMix | None = None
    max_rows_shown: int = ObservationLimits.max_rows

    def judge(self, episode: Episode, database: Database) -> Answer:
        """Judge a finished episode; see `judge_many`."""
        return self.judge_many([(episode, database)])[0]

    def judge_many(self, episodes: Sequence[tuple[Episode, Database]]) -> list[Answer]:
        """Judge finished episodes, each with its database; their queries run in one batch.

        Raises:
            RewardError: A reward function raised, or did not return a number in its range.
            RunError: An internal failure, such as a missing database.
        """
        verdicts = self.grader.grade_many(
            [
                Submission(database, one.example.gold_sql, one.final_sql, tuple(one.example.other_golds))
                for one, database in episodes
            ]
        )
        return [
            self._answer(episode, database, verdict)
            for (episode, database), verdict in zip(episodes, verdicts, strict=True)
        ]

    def _answer(self, episode: Episode, database: Database, verdict: Verdict) -> Answer:
        scores = reward = None
        if self.rewards is not None:
            results = Results(self.executor, database, episode)
            scores = self.rewards.score(episode, verdict, results)
            reward = None if scores is None else self.rewards.total(scores)
        dialect = parse_address(database).dialect
        try:
            flags = episode_flags(episode, verdict, max_rows_shown=self.max_rows_shown, dialect=dialect)
        except Exception as error:  # a record, never a verdict: it costs no run
            _logger.warning("no flags for an answer, an internal error: %r (%s)", error, episode.final_sql)
            flags = (NOT_FLAGGED,)
        return Answer(episode, verdict, flags=flags, scores=scores, reward=reward)


def episode_metrics(episode: Episode, verdict: Verdict, flags: Sequence[str] = ()) -> dict[str, float]:
    """Metrics of one episode, which are averaged over a step and logged.

    `hack/rate` is the share of answers that are right by the official verdict alone, or that read no table;
    a literal copied from an observation is no hack by itself. `grading/gap` is the share of answers that
    were accepted though a check did not run as configured, see `Verdict.gap`.
    """
    kinds = [action.kind for action in episode.actions]
    return {
        "accuracy/strict": float(verdict.strict),
        "accuracy/official": float(verdict.official),
        "accuracy/official_minus_strict": float(verdict.official) - float(verdict.strict),
        "hack/rate": float("official_only" in flags or "no_table" in flags),
        **{f"hack/{flag}": float(flag in flags) for flag in (*FLAGS, NOT_FLAGGED)},
        "grading/gap": float(bool(verdict.gap)),
        "episode/turns": float(len(kinds)),
        "episode/looks": float(episode.looks),
        "episode/malformed": float(kinds.count("malformed")),
        "episode/masked": float(episode.is_masked or verdict.reason == "gold_failed"),
        **{f"stop/{reason}": float(episode.stop_reason == reason) for reason in get_args(StopReason)},
    }


def open_grader(
    executor: SQLExecutor, *, test_databases: int, server_url: str | None = None, nulls: str = "observed"
) -> Grader:
    """Make a grader with a test suite in the cache folder; with 0 test databases it has none."""
    if not test_databases:
        return Grader(executor)
    folder = cache_folder("test_suites")
    suite = TestSuite(
        executor, folder, size=test_databases, url=server_url or "", declared_nulls=nulls == "declared"
    )
    return Grader(executor, suite=suite)


def _log_probs(episode: Episode) -> list[float | None] | None:
    """Log-probabilities of the sampled tokens, to five digits; None if the engine has none."""
    if not episode.log_probs:
        return None
    pairs = zip(episode.log_probs, episode.completion_mask, strict=True)
    return [round(value, 5) if math.isfinite(value) else None for value, is_sampled in pairs if is_sampled]


def _action_record(action: Action) -> dict[str, Any]:
    record: dict[str, Any] = {"kind": action.kind, "sql": action.sql}
    if action.error:
        record["error"] = action.error
    if (outcome := action.outcome) is not None:
        record["outcome"] = {
            "status": outcome.status,
            "rows": len(outcome.rows),
            "is_truncated": outcome.is_truncated,
            "error": outcome.error,
            "elapsed_s": round(outcome.elapsed_s, 6),
        }
    return record
