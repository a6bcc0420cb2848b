"""Golds with several possible results: through ties at a limit, scan order, the clock or chance."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal

from sqlglot import exp

from text2sql_grpo.grading.base_sample import read_sample
from text2sql_grpo.grading.gold_result import tie_groups, widened_query, with_ties_decided
from text2sql_grpo.grading.materialise import reversed_copy, run_gold
from text2sql_grpo.grading.strict import compare_strict
from text2sql_grpo.sql.address import Database, parse_address
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import ExecutionOutcome
from text2sql_grpo.sql.query import read_query
from text2sql_grpo.sql.sqlite_file import open_database
from text2sql_grpo.sql.sqlite_guard import MAX_VALUE_BYTES

OpenResult = Literal["time_dependent", "non_deterministic", "tie_dependent"]
MAX_BYTES_COPIED = 100_000_000
RERUNS = 4  # of a volatile gold
Gold = tuple[Database, str]


def open_results(
    golds: Sequence[Gold], outcomes: Sequence[ExecutionOutcome], executor: SQLExecutor
) -> list[tuple[OpenResult, str] | None]:
    """Kind and reason of each gold's several possible results; None for a gold with a single one.

    `time_dependent`: the engine reports it as volatile (`ExecutionOutcome.is_volatile`), as for the clock.
    `non_deterministic`: so reported, and it returns other rows when it runs again, as for random(), or it
    does on a copy without keys in reversed order (a bare column in a GROUP BY, group_concat; tried on SQLite
    files of at most 100 MB). `tie_dependent`: a limit, at the top or inside, cuts through rows that tie and
    differ.
    """
    found = [_open_result(gold, outcome, executor) for gold, outcome in zip(golds, outcomes, strict=True)]
    by_file: dict[Path, list[int]] = {}
    for index, (database, _) in enumerate(golds):
        is_settled = found[index] is None and _is_whole(outcomes[index])
        if is_settled and isinstance(database, Path) and database.stat().st_size <= MAX_BYTES_COPIED:
            by_file.setdefault(database, []).append(index)
    for file, indexes in by_file.items():
        with closing(open_database(file)) as connection:
            copy = reversed_copy(read_sample(file), connection, max_bytes=MAX_VALUE_BYTES)
        with closing(copy):
            for index in indexes:
                if _differs(outcomes[index], run_gold(copy, golds[index][1])):
                    found[index] = ("non_deterministic", "other rows when tables are read backwards")
    return found


def _open_result(
    gold: Gold, outcome: ExecutionOutcome, executor: SQLExecutor
) -> tuple[OpenResult, str] | None:
    """Kind and reason of a gold's several results, as far as its own database shows them."""
    if outcome.is_volatile:
        if any(_differs(outcome, again) for again in executor.execute_many([gold] * RERUNS)):
            return "non_deterministic", "other rows when it runs again"
        return "time_dependent", "reads the clock, or calls a function that the engine declares volatile"
    database, sql = gold
    dialect = parse_address(database).dialect
    tree = read_query(sql, dialect).tree
    if not _is_whole(outcome) or not isinstance(tree, exp.Query) or tree.find(exp.Limit) is None:
        return None
    widened = widened_query(sql, outcome.columns, dialect)
    if widened is not None and widened.end is not None:
        for group in tie_groups(widened, outcome, executor.execute(database, widened.sql)) or ():
            if len(group.rows) > group.n_taken and len(set(group.rows)) > 1:
                reason = f"the limit takes {group.n_taken} of {len(group.rows)} rows that tie"
                return "tie_dependent", reason
    if any(limit.parent is not tree for limit in tree.find_all(exp.Limit)):
        decided = [(database, query) for query in with_ties_decided(tree, dialect)]
        if any(_differs(outcome, other) for other in executor.execute_many(decided)):
            return "tie_dependent", "a limit inside cuts through rows that tie"
    return None


def _is_whole(outcome: ExecutionOutcome) -> bool:
    return outcome.is_ok and not outcome.is_truncated and bool(outcome.rows)


def _differs(outcome: ExecutionOutcome, other: ExecutionOutcome) -> bool:
    """True if the rows differ; False if the other run failed or was cut."""
    if not other.is_ok or other.is_truncated:
        return False
    return compare_strict(outcome, other, ordered=False) != "equal"
