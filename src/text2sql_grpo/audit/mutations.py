"""Mutants of a gold query, like the mistakes of people and models: those of `grading.mutants` and more."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from sqlglot import exp

from text2sql_grpo.grading.gold_query import GoldQuery
from text2sql_grpo.grading.mutants import (
    COMPARED_INSTEAD,
    Operator,
    column_swaps,
    comparison,
    condition_added,
    distinct,
    edited,
    predicate,
    with_args,
)
from text2sql_grpo.grading.query_columns import COMPARISONS
from text2sql_grpo.grading.query_values import literal_value
from text2sql_grpo.sql.outcome import Row
from text2sql_grpo.sql.schema import Schema

Run = Callable[[str], Sequence[Row] | None]  # the rows of a query on the base; None if it fails

MAX_CONSTANTS = 50

_AGGREGATES: tuple[type[exp.AggFunc], ...] = (exp.Sum, exp.Avg, exp.Min, exp.Max)
_COMBINED_INSTEAD: dict[type[exp.Expr], type[exp.Expr]] = {
    exp.Union: exp.Intersect,
    exp.Intersect: exp.Union,
    exp.Except: exp.Intersect,
}


def mutants(gold: GoldQuery, schema: Schema, run: Run | None = None) -> dict[str, str]:
    """Mutants as SQL, each with the name of its operator.

    Args:
        gold: The query to edit.
        schema: Schema of its database.
        run: Runs a query on the database, for mutants with constants read there.
    """
    found = edited(gold, _operators(gold, schema))
    for sql in _constants(gold, schema, run) if run else ():
        found.setdefault(sql, "constants")
    return found


def _operators(gold: GoldQuery, schema: Schema) -> Iterator[Operator]:
    yield "comparison", tuple(COMPARED_INSTEAD), comparison
    yield "comparison", (exp.Between, exp.Like, exp.In, exp.Not), predicate
    yield "literal", (exp.Literal,), _literal
    yield "connector", (exp.And, exp.Or), _connector
    yield "condition_dropped", (exp.Where, exp.Having), lambda node: [None]
    yield "distinct", (exp.Select,), distinct
    yield "aggregate", (exp.Count, *_AGGREGATES), lambda node: _aggregate(node, gold)
    yield "join", (exp.Join,), _join
    yield "join_dropped", (exp.Select,), _join_dropped
    yield "set_operation", (exp.SetOperation,), _set_operation
    yield "order", (exp.Ordered,), _turned
    yield "order", (exp.Order, exp.Limit), lambda node: [None]
    yield "limit", (exp.Select,), _limit
    yield "group", (exp.Group,), _group
    yield "column", (exp.Column,), lambda node: column_swaps(node, gold, schema)
    yield "condition_added", (exp.Select,), lambda node: condition_added(node, gold)


def _turned(node: exp.Expr) -> list[exp.Expr | None]:
    is_descending = not node.args.get("desc")
    return [with_args(node, desc=is_descending, nulls_first=not is_descending)]


def _literal(node: exp.Expr) -> list[exp.Expr | None]:
    value = literal_value(node)
    if isinstance(value, str):
        return [exp.Literal.string(text) for text in (value.swapcase(), value + "s", value[:-1])]
    if not isinstance(value, int | float) or isinstance(node.parent, exp.Limit | exp.Offset | exp.Neg):
        return []
    return [exp.Literal.number(number) for number in (value + 1, max(value - 1, 0), value * 2)]


def _connector(node: exp.Expr) -> list[exp.Expr | None]:
    left, right = node.this, node.expression
    other = exp.Or if isinstance(node, exp.And) else exp.And
    return [left.copy(), right.copy(), other(this=left.copy(), expression=right.copy())]


def _aggregate(node: exp.Expr, gold: GoldQuery) -> Sequence[exp.Expr]:
    if not isinstance(node, exp.Count):
        return [kind(this=node.this.copy()) for kind in _AGGREGATES if kind is not type(node)]
    inner = node.this
    if isinstance(inner, exp.Distinct):
        return [exp.Count(this=inner.expressions[0].copy()), exp.Count(this=exp.Star())]
    if not isinstance(inner, exp.Star):
        return [exp.Count(this=exp.Distinct(expressions=[inner.copy()]))]
    columns = {c.sql("sqlite"): c for c in gold.tree.find_all(exp.Column) if id(c) in gold.columns_of}
    return [exp.Count(this=exp.Distinct(expressions=[c.copy()])) for c in columns.values()][:4]


def _join(node: exp.Expr) -> list[exp.Expr | None]:
    if node.args.get("side"):
        return [with_args(node, side=None)]
    has_condition = node.args.get("on") is not None or bool(node.args.get("using"))
    return [with_args(node, side="LEFT", kind=None)] if has_condition else []


def _join_dropped(node: exp.Expr) -> Iterator[exp.Expr]:
    """The query without one of its tables, and without the conditions on it."""
    joins = node.args.get("joins") or []
    for index, join in enumerate(joins):
        copy = node.copy()
        copy.args["joins"].pop(index)
        yield _without_table(copy, join.this.alias_or_name)
    if joins and node.args.get("from_") is not None:
        copy = node.copy()
        first = copy.args["from_"].this.alias_or_name
        copy.args["from_"].set("this", copy.args["joins"].pop(0).this)
        yield _without_table(copy, first)


def _without_table(select: exp.Expr, alias: str) -> exp.Expr:
    for condition in list(select.find_all(*COMPARISONS)):
        if any(column.table == alias for column in condition.find_all(exp.Column)):
            condition.replace(exp.true())
    for column in select.find_all(exp.Column):
        if column.table == alias:
            column.set("table", None)
    return select


def _set_operation(node: exp.Expr) -> list[exp.Expr | None]:
    assert isinstance(node, exp.SetOperation)
    changed: list[exp.Expr | None] = [node.left.copy(), node.right.copy()]
    other = _COMBINED_INSTEAD[type(node)]
    changed.append(other(this=node.left.copy(), expression=node.right.copy(), distinct=True))
    if isinstance(node, exp.Union):
        changed.append(with_args(node, distinct=not node.args.get("distinct")))
    if isinstance(node, exp.Except):
        changed.append(exp.Except(this=node.right.copy(), expression=node.left.copy(), distinct=True))
    return changed


def _limit(node: exp.Expr) -> list[exp.Expr | None]:
    assert isinstance(node, exp.Select)
    limit = node.args.get("limit")
    if limit is None:
        return [node.limit(1)]
    value = literal_value(limit.expression)
    return [node.limit(value + step) for step in (1, 2)] if isinstance(value, int) else []


def _group(node: exp.Expr) -> list[exp.Expr | None]:
    keys = node.expressions
    return [with_args(node, expressions=keys[:i] + keys[i + 1 :]) for i in range(len(keys)) if len(keys) > 1]


def _constants(gold: GoldQuery, schema: Schema, run: Run) -> Iterator[str]:
    """The query with subqueries and conditions replaced by their results on the base."""
    tree = gold.tree
    for index, node in enumerate(tree.find_all(exp.Subquery, exp.In)):
        query = node.args.get("query") if isinstance(node, exp.In) else node
        query = query.this if isinstance(query, exp.Subquery) else query
        if not isinstance(query, exp.Query) or isinstance(node.parent, exp.From | exp.Join | exp.In):
            continue
        values = _values(run(query.sql("sqlite")))
        if not values:
            continue
        copy = tree.copy()
        target = next(islice(copy.find_all(exp.Subquery, exp.In), index, None))
        target.replace(node.this.isin(*values) if isinstance(node, exp.In) else values[0])
        yield copy.sql("sqlite")
    if isinstance(tree, exp.Select) and tree.args.get("group") is None and tree.args.get("from_") is not None:
        yield from _key_constants(tree, schema, run)


def _key_constants(tree: exp.Select, schema: Schema, run: Run) -> Iterator[str]:
    """`WHERE key IN (..)` with the keys of the rows that the gold selects."""
    keys = {
        table.name.lower(): [column.name for column in table.columns if column.is_primary_key]
        for table in schema.tables
    }
    for source in [tree.args["from_"].this, *(join.this for join in tree.args.get("joins") or [])]:
        key = keys.get(source.name, []) if isinstance(source, exp.Table) else []
        if len(key) != 1:
            continue
        column = exp.column(key[0], table=source.alias_or_name, quoted=True)
        listing = tree.select(column, append=False).distinct(distinct=False)
        if values := _values(run(listing.sql("sqlite"))):
            yield tree.where(column.isin(*values), append=False).sql("sqlite")


def _values(rows: Sequence[Row] | None) -> list[exp.Expr]:
    if not rows or len(rows) > MAX_CONSTANTS:
        return []
    return [exp.convert(row[0]) for row in dict.fromkeys(rows) if not isinstance(row[0], bytes)]
