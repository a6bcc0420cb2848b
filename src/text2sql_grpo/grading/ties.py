"""Rows and orders that a gold query may return, read from its sort keys by a widened query.

A gold's result need not hold what it is sorted by, and LIMIT may cut through rows that tie. So the gold
is run once more without LIMIT, with its sort keys as extra columns and each row's rank under them.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from sqlglot import exp

from text2sql_grpo.grading.rows import TieGroup
from text2sql_grpo.sql.outcome import Cell, ExecutionOutcome, Row
from text2sql_grpo.sql.query import number_value, read_query, write_query

KEY_TOLERANCE = 1e-12  # relative; keys this close differ by rounding alone and tie
RANKS_BEYOND_LIMIT = 10  # rows whose keys may be that close to the last one shown


@dataclass(frozen=True)
class WidenedQuery:
    """A gold without LIMIT, its columns followed by sort keys and last the rank under them.

    Attributes:
        sql: The query. Its rows are in the order of their rank.
        n_columns: Columns of the gold.
        keys: Indices of the sort keys in the widened rows; empty if the gold has no order.
        start: Rows that OFFSET skips.
        end: Rows up to the end of LIMIT; None without LIMIT.
        is_distinct: True if keys were added under SELECT DISTINCT, where they may add rows.
    """

    sql: str
    n_columns: int
    keys: tuple[int, ...]
    start: int
    end: int | None
    is_distinct: bool


def widened_query(gold_sql: str, columns: Sequence[str], dialect: str = "sqlite") -> WidenedQuery | None:
    """Widened form of a gold; None if it has neither order nor limit, or cannot be widened.

    Args:
        columns: Names of the gold's columns, as executed.
        dialect: Name of the gold's dialect in sqlglot.

    >>> widened_query("SELECT name FROM t ORDER BY age DESC LIMIT 3", ["name"]).sql
    'WITH _gold(c0, k0) AS MATERIALIZED (SELECT name, age AS k0 FROM t) SELECT * FROM (SELECT *, rank() OVER (ORDER BY k0 DESC) AS _rank FROM _gold) AS _ranked WHERE _rank <= 13 ORDER BY _rank'
    """  # noqa: E501 (the output of an example)
    query = read_query(gold_sql, dialect).tree
    if not isinstance(query, exp.Select | exp.SetOperation):
        return None
    order, limit, offset = (query.args.get(part) for part in ("order", "limit", "offset"))
    start = _whole_number(offset.expression) if offset else 0
    end = _whole_number(limit.expression) if limit else None
    if not (order or limit) or start is None or (limit and end is None):
        return None
    end = None if end is None else start + end
    inner = query.copy()
    for part in ("order", "limit", "offset"):
        inner.set(part, None)
    names = [f"c{i}" for i in range(len(columns))]
    keys: list[int] = []
    terms = []
    for term in order.expressions if order else []:
        index = _output_column(term.this, query, columns)
        if index is None:
            if not isinstance(inner, exp.Select):
                return None
            index = len(names)
            names.append(f"k{index - len(columns)}")
            inner.select(exp.alias_(term.this.copy(), names[index]), copy=False)
        keys.append(index)
        ranked = term.copy()
        ranked.set("this", exp.column(names[index]))
        terms.append(write_query(ranked, dialect))
    core = write_query(inner, dialect)
    if core is None or None in terms:
        return None
    rank = f"rank() OVER (ORDER BY {', '.join(filter(None, terms))})" if terms else "1"
    bound = "" if end is None else f" WHERE _rank <= {end + RANKS_BEYOND_LIMIT}"
    sql = (
        f"WITH _gold({', '.join(names)}) AS MATERIALIZED ({core}) "
        f"SELECT * FROM (SELECT *, {rank} AS _rank FROM _gold) AS _ranked{bound} ORDER BY _rank"
    )
    is_distinct = (
        bool(query.args.get("distinct")) and isinstance(query, exp.Select) and len(names) > len(columns)
    )
    return WidenedQuery(sql, len(columns), tuple(keys), start, end, is_distinct)


def _whole_number(node: exp.Expr) -> int | None:
    number = number_value(node.this) if isinstance(node, exp.Literal) and not node.is_string else None
    return number if isinstance(number, int) else None


def _output_column(term: exp.Expr, query: exp.Query, columns: Sequence[str]) -> int | None:
    """Index of the gold's column that an ORDER BY term names; None for another expression."""
    place = _whole_number(term)
    if place is not None:
        return place - 1 if 1 <= place <= len(columns) else None
    projections = query.selects
    if len(projections) == len(columns) and not any(part.is_star for part in projections):
        if isinstance(term, exp.Column) and not term.table:
            aliases = [part.alias.lower() if isinstance(part, exp.Alias) else None for part in projections]
            if term.name.lower() in aliases:
                return aliases.index(term.name.lower())
        for index, part in enumerate(projections):
            if part.unalias() == term:
                return index
    names = [name.lower() for name in columns]
    if isinstance(query, exp.SetOperation) and isinstance(term, exp.Column) and term.name.lower() in names:
        return names.index(term.name.lower())
    return None


def tie_groups(
    widened: WidenedQuery, gold: ExecutionOutcome, outcome: ExecutionOutcome
) -> tuple[TieGroup, ...] | None:
    """Groups of rows that the gold may return, in order, from its outcome and that of the widened query.

    Returns:
        None if the widened query failed, was cut, or does not explain the gold's rows.
    """
    if not outcome.is_ok or outcome.is_truncated:
        return None
    merged: list[list[Row]] = []
    last_key: Row = ()
    for _, tied in groupby(outcome.rows, key=lambda row: row[-1]):
        rows = list(tied)
        key = tuple(rows[0][index] for index in widened.keys)
        if merged and all(map(_keys_tie, last_key, key)):
            merged[-1] += rows
        else:
            merged.append(rows)
        last_key = key
    groups = []
    position = 0
    for rows in merged:
        first, last = max(position, widened.start), position + len(rows)
        last = last if widened.end is None else min(last, widened.end)
        position += len(rows)
        if last > first:
            groups.append(TieGroup(tuple(row[: widened.n_columns] for row in rows), last - first))
    return tuple(groups) if _explains(groups, gold.rows, widened) else None


def _keys_tie(left: Cell, right: Cell) -> bool:
    if isinstance(left, float) and isinstance(right, int | float):
        return math.isclose(left, right, rel_tol=KEY_TOLERANCE)
    return left == right


def _explains(groups: Sequence[TieGroup], rows: Sequence[Row], widened: WidenedQuery) -> bool:
    if sum(group.n_taken for group in groups) != len(rows):
        return False
    if widened.is_distinct:
        known = [row for group in groups for row in group.rows]
        if len(set(known)) < len(known):  # a row with several keys: its place is not defined
            return False
    start = 0
    for group in groups:
        if not Counter(rows[start : start + group.n_taken]) <= Counter(group.rows):
            return False
        start += group.n_taken
    return True


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
