"""Published metrics of one prediction, Spider's and BIRD's, run through the hardened executor: reports, not rewards.

Where safe execution must differ from the official evaluators, which run any text on a writable file:

| name | official | here |
| --- | --- | --- |
| `write` | INSERT, UPDATE, DELETE or DDL runs and returns no rows, which equals an empty gold; BIRD runs the prediction before the gold on one connection, so DELETE empties the gold as well | refused, wrong |
| `empty_statement` | nothing, or a bare comment, returns no rows and equals an empty gold (BIRD; Spider with DISTINCT kept) | an error, wrong |
| `transaction` | BEGIN or SAVEPOINT returns no rows and equals an empty gold | refused, wrong |
| `pragma` | a PRAGMA statement runs; one that returns no rows equals an empty gold | refused, wrong |
| `attach` | ATTACH, DETACH and VACUUM run, return no rows and equal an empty gold | refused, wrong |
| `limits` | rows without limit; 30 s (BIRD) or 60 s (Spider) | `Limits`: cut rows or a time-out are wrong |
| `not_utf8` | bytes that are not UTF-8 are dropped (Spider) or an error (BIRD) | kept, so that they must be equal |
"""  # noqa: E501 (a table)

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

from text2sql_grpo.errors import RunError
from text2sql_grpo.evaluation.spider import spider_execution_accuracy, spider_order_matters, spider_text
from text2sql_grpo.grading.strict import bird_execution_accuracy
from text2sql_grpo.rewards import Answer
from text2sql_grpo.sql.address import Database
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import ExecutionOutcome, Row

VES_REPEATS = 100


@dataclass(frozen=True)
class PublishedVerdicts:
    """Verdicts of the published evaluators on one prediction.

    Attributes:
        spider_exec: Spider's test-suite comparison on this one database, DISTINCT kept.
        spider_exec_default: The same in the leaderboard's mode: DISTINCT removed from both queries.
        bird_ex: BIRD's execution accuracy.
        bird_f1: BIRD's soft F1, in [0, 1].
    """

    spider_exec: bool = False
    spider_exec_default: bool = False
    bird_ex: bool = False
    bird_f1: float = 0.0


def published_verdicts(
    executor: SQLExecutor,
    database: Database,
    gold_sql: str,
    predicted_sql: str,
) -> PublishedVerdicts:
    """Verdicts of the published evaluators; texts that they rewrite alike run once."""
    kept = spider_text(gold_sql, keep_distinct=True), spider_text(predicted_sql, keep_distinct=True)
    default = spider_text(gold_sql, keep_distinct=False), spider_text(predicted_sql, keep_distinct=False)
    texts = list(dict.fromkeys((gold_sql, predicted_sql, *kept, *default)))
    results = executor.execute_many([(database, text) for text in texts])
    outcomes = dict(zip(texts, results, strict=True))
    spider_exec, spider_exec_default = (
        spider_execution_accuracy(
            outcomes[gold], outcomes[predicted], order_matters=spider_order_matters(gold)
        )
        for gold, predicted in (kept, default)
    )
    gold, predicted = outcomes[gold_sql], outcomes[predicted_sql]
    return PublishedVerdicts(
        spider_exec=spider_exec,
        spider_exec_default=spider_exec_default,
        bird_ex=bird_execution_accuracy(gold, predicted),
        bird_f1=bird_soft_f1(gold, predicted),
    )


def with_published(answer: Answer, executor: SQLExecutor, database: Database) -> Answer:
    """The answer with its published metrics; they are 0 if nothing was submitted."""
    verdicts, sql = PublishedVerdicts(), answer.episode.final_sql
    if sql is not None:
        verdicts = published_verdicts(executor, database, answer.example.gold_sql, sql)
    return replace(answer, published={name: float(value) for name, value in vars(verdicts).items()})


def measure_ves_reward(
    executor: SQLExecutor,
    database: Database,
    gold_sql: str,
    predicted_sql: str,
    *,
    repeats: int = VES_REPEATS,
) -> float:
    """Measure one question's reward for BIRD's R-VES by running both queries `repeats` times in turn.

    Times are the executor's `elapsed_s`, on an open connection; the official code opens one each time.

    Args:
        executor: Executor without a cache (`cache_entries=0`), best an idle one.
        repeats: Runs of each, >= 1.

    Returns:
        0 if the prediction is wrong by execution accuracy; else see `bird_ves_reward`.

    Raises:
        RunError: The executor caches results.
    """

    def time(sql: str) -> float:
        outcome = executor.execute(database, sql)
        if outcome.from_cache:
            raise RunError(
                f"cannot time {sql!r} on {database}: its result came from the cache;"
                " use an executor with cache_entries=0"
            )
        return outcome.elapsed_s

    gold, predicted = executor.execute_many([(database, gold_sql), (database, predicted_sql)])
    if not bird_execution_accuracy(gold, predicted):
        return 0.0
    ratio = bird_time_ratio(lambda: time(gold_sql), lambda: time(predicted_sql), repeats=repeats)
    return bird_ves_reward(ratio)


def bird_soft_f1(gold: ExecutionOutcome, predicted: ExecutionOutcome) -> float:
    """BIRD's soft F1, in [0, 1]: share of cells that agree, row by row.

    Source: `evaluation_f1.py` of BIRD mini-dev (github.com/bird-bench/mini_dev).

    Duplicate rows are dropped and the rest paired by position. With n cells in the gold's row, a pair
    adds to tp the predicted cells found anywhere in the gold's row, over n; to fp those not found, over
    n; to fn the gold's cells not found in the predicted row, over n. A gold row without partner adds 1
    to fn, a predicted one 1 to fp. F1 is taken of the sums.

    Quirks, kept on purpose: two empty results score 1; row order matters, column order does not; a cell
    repeated in the predicted row counts each time, so tp may exceed the gold's cells; Python equality.

    Returns:
        0 if either query failed, or if rows were cut.
    """
    if not (gold.is_ok and predicted.is_ok) or gold.is_truncated or predicted.is_truncated:
        return 0.0
    if not gold.rows and not predicted.rows:
        return 1.0
    gold_rows, predicted_rows = list(dict.fromkeys(gold.rows)), list(dict.fromkeys(predicted.rows))
    pairs = [_row_scores(g, p) for g, p in zip(gold_rows, predicted_rows, strict=False)]
    tp = sum(pair[0] for pair in pairs)
    fp = sum(pair[1] for pair in pairs) + max(len(predicted_rows) - len(gold_rows), 0)
    fn = sum(pair[2] for pair in pairs) + max(len(gold_rows) - len(predicted_rows), 0)
    if tp == 0:
        return 0.0
    precision, recall = tp / (tp + fp), tp / (tp + fn)
    return 2 * precision * recall / (precision + recall)


def _row_scores(gold: Row, predicted: Row) -> tuple[float, float, float]:
    matches = sum(cell in gold for cell in predicted)
    missed = sum(cell not in predicted for cell in gold)
    return matches / len(gold), (len(predicted) - matches) / len(gold), missed / len(gold)


def bird_time_ratio(
    time_gold: Callable[[], float], time_predicted: Callable[[], float], *, repeats: int = VES_REPEATS
) -> float:
    """Speed-up of the prediction: mean ratio of gold to predicted time.

    Source: `evaluation_ves.py` of BIRD mini-dev. The two run in turn, the prediction first, `repeats`
    times; ratios outside the mean ± 3 standard deviations are dropped before the mean is taken.

    Difference: where all ratios are the same none is dropped (the official code drops all of them,
    divides by zero and scores 0; only a clock that is too coarse shows it).

    Args:
        time_gold: Runs the gold once and returns its seconds, > 0. Must not answer from a cache.
        time_predicted: The same for the prediction.
        repeats: Runs of each, >= 1.
    """
    ratios = []
    for _ in range(repeats):
        predicted_s = time_predicted()
        ratios.append(time_gold() / predicted_s)
    mean, deviation = fmean(ratios), pstdev(ratios)
    kept = [ratio for ratio in ratios if mean - 3 * deviation < ratio < mean + 3 * deviation]
    return fmean(kept or ratios)


def bird_ves_reward(time_ratio: float) -> float:
    """Reward of a right prediction that is `time_ratio` times as fast as the gold.

    >>> [bird_ves_reward(ratio) for ratio in (2.0, 1.0, 0.5, 0.25, 0.1)]
    [1.25, 1.0, 0.75, 0.5, 0.25]
    """
    for threshold, reward in ((2, 1.25), (1, 1.0), (0.5, 0.75), (0.25, 0.5)):
        if time_ratio >= threshold:
            return reward
    return 0.25


def bird_r_ves(rewards: Sequence[float]) -> float:
    """Reward-based valid efficiency score (R-VES), in [0, 111.8]: mean square root, times 100.

    Args:
        rewards: `bird_ves_reward` of every question, or 0 if the prediction is wrong by EX.

    >>> bird_r_ves([1.0, 0.25, 0.0, 1.0])
    62.5
    """
    return fmean(math.sqrt(reward) for reward in rewards) * 100
