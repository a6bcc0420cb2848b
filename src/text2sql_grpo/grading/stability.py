"""Check that a query's result does not depend on the order of the scan."""

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache

from sqlglot import exp

from text2sql_grpo.grading.base_sample import DatabaseSample
from text2sql_grpo.grading.materialise import reversed_copy, run_gold
from text2sql_grpo.grading.rows import TieGroup
from text2sql_grpo.grading.strict import compare_strict, has_top_level_order
from text2sql_grpo.grading.ties import tie_groups, widened_query
from text2sql_grpo.sql.outcome import ExecutionOutcome


def with_ties_decided(tree: exp.Query, dialect: str = "sqlite") -> tuple[str, ...]:
    """The gold with ties of each ORDER BY and LIMIT broken by the columns, ascending and descending.

    If the two have one result, no tie matters to it.

    >>> from sqlglot import parse_one
    >>> with_ties_decided(parse_one("SELECT a FROM t ORDER BY b LIMIT 1", dialect="sqlite"))
    ('SELECT a FROM t ORDER BY b, 1 ASC LIMIT 1', 'SELECT a FROM t ORDER BY b, 1 DESC LIMIT 1')
    """
    decided = []
    for is_descending in (False, True):
        copy = tree.copy()
        for query in copy.find_all(exp.Query):
            is_cut = query.args.get("order") is not None or query.args.get("limit") is not None
            if not isinstance(query, exp.Select | exp.SetOperation) or not is_cut or query.is_star:
                continue
            order = query.args.get("order") or exp.Order(expressions=[])
            for place in range(1, len(query.selects) + 1):
                order.append(
                    "expressions",
                    exp.Ordered(
                        this=exp.Literal.number(place), desc=is_descending, nulls_first=not is_descending
                    ),
                )
            query.set("order", order)
        decided.append(copy.sql(dialect))
    return tuple(dict.fromkeys(decided))


def differs_from(
    connection: sqlite3.Connection, gold_sql: str, result: ExecutionOutcome
) -> Callable[[ExecutionOutcome], bool]:
    """Predicate that is True for outcomes on one database that the gold may not return.

    Args:
        connection: The database.
        gold_sql: The gold.
        result: Outcome of the gold on it.
    """
    ordered = has_top_level_order(gold_sql)

    @cache
    def ties() -> Sequence[TieGroup] | None:
        widened = widened_query(gold_sql, result.columns)
        return tie_groups(widened, result, run_gold(connection, widened.sql)) if widened else None

    def differs(other: ExecutionOutcome) -> bool:
        return not other.is_ok or compare_strict(result, other, ordered=ordered, ties=ties) != "equal"

    return differs


def is_stable(
    base: DatabaseSample,
    connection: sqlite3.Connection,
    gold_sql: str,
    again: Sequence[str],
    differs: Callable[[ExecutionOutcome], bool],
) -> bool:
    """True if the gold has one result in any order of the scan, except for ties of its outermost order.

    Then no bare column of a group and no inner tie decides, so that a right query with another plan agrees.

    Args:
        base: Sample of the database.
        connection: The small database.
        gold_sql: The gold.
        again: The gold with ties broken in other ways.
        differs: True for outcomes that differ from the gold's on the small database.
    """
    if any(differs(run_gold(connection, sql)) for sql in again):
        return False
    with closing(reversed_copy(base, connection)) as copy:
        return not differs(run_gold(copy, gold_sql))
