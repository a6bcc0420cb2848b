"""All published verdicts on one prediction, run through the hardened executor.

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

from dataclasses import dataclass

from text2sql_grpo.errors import RunError
from text2sql_grpo.grading.bird import (
    VES_REPEATS,
    bird_execution_accuracy,
    bird_soft_f1,
    bird_time_ratio,
    bird_ves_reward,
)
from text2sql_grpo.grading.spider import spider_execution_accuracy, spider_order_matters, spider_text
from text2sql_grpo.sql.address import Database
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Limits


@dataclass(frozen=True)
class OfficialVerdicts:
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


def official_verdicts(
    executor: SQLExecutor,
    database: Database,
    gold_sql: str,
    predicted_sql: str,
    *,
    limits: Limits | None = None,
) -> OfficialVerdicts:
    """Verdicts of the published evaluators; texts that they rewrite alike run once."""
    kept = spider_text(gold_sql, keep_distinct=True), spider_text(predicted_sql, keep_distinct=True)
    default = spider_text(gold_sql, keep_distinct=False), spider_text(predicted_sql, keep_distinct=False)
    texts = list(dict.fromkeys((gold_sql, predicted_sql, *kept, *default)))
    results = executor.execute_many([(database, text) for text in texts], limits=limits)
    outcomes = dict(zip(texts, results, strict=True))
    spider_exec, spider_exec_default = (
        spider_execution_accuracy(
            outcomes[gold], outcomes[predicted], order_matters=spider_order_matters(gold)
        )
        for gold, predicted in (kept, default)
    )
    gold, predicted = outcomes[gold_sql], outcomes[predicted_sql]
    return OfficialVerdicts(
        spider_exec=spider_exec,
        spider_exec_default=spider_exec_default,
        bird_ex=bird_execution_accuracy(gold, predicted),
        bird_f1=bird_soft_f1(gold, predicted),
    )


def measure_ves_reward(
    executor: SQLExecutor,
    database: Database,
    gold_sql: str,
    predicted_sql: str,
    *,
    repeats: int = VES_REPEATS,
    limits: Limits | None = None,
) -> float:
    """Measure one question's reward for BIRD's R-VES by running both queries `repeats` times in turn.

    Times are the executor's `elapsed_s`, on an open connection; the official code opens one each time.

    Args:
        executor: Executor without a cache (`cache_entries=0`), best an idle one.
        database: Database of both queries.
        gold_sql: The accepted query.
        predicted_sql: The query in question.
        repeats: Runs of each, >= 1.
        limits: Bounds of each run; None for the executor's.

    Returns:
        0 if the prediction is wrong by execution accuracy; else see `bird_ves_reward`.

    Raises:
        RunError: The executor caches results.
    """

    def time(sql: str) -> float:
        outcome = executor.execute(database, sql, limits=limits)
        if outcome.from_cache:
            raise RunError(
                f"cannot time {sql!r} on {database}: its result came from the cache;"
                " use an executor with cache_entries=0"
            )
        return outcome.elapsed_s

    gold, predicted = executor.execute_many([(database, gold_sql), (database, predicted_sql)], limits=limits)
    if not bird_execution_accuracy(gold, predicted):
        return 0.0
    ratio = bird_time_ratio(lambda: time(gold_sql), lambda: time(predicted_sql), repeats=repeats)
    return bird_ves_reward(ratio)
