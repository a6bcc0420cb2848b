"""Mutants of a gold query: one small edit each, like the mistakes of people and models.

Some are equivalent to the gold, and no variant of the database kills those. Variants are chosen by the
mutants that they kill.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from sqlglot import exp

from text2sql_grpo.grading.gold_query import COMPARISONS, GoldQuery, literal_value
from text2sql_grpo.sql.outcome import Cell, Row
from text2sql_grpo.sql.schema import Schema

Change = Callable[[exp.Expr], Iterable[exp.Expr | None]]  # None removes the node
Run = Callable[[str], Sequence[Row] | None]  # the rows of a query on the base; None if it fails

MAX_PER_OPERATOR = 24
MAX_CONSTANTS = 50
OTHER_COLUMNS = 3

_COMPARED_INSTEAD: dict[type[exp.Expr], tuple[type[exp.Expr], ...]] = {
    exp.EQ: (exp.NEQ, exp.GTE, exp.LTE),
    exp.NEQ: (exp.EQ, exp.GT, exp.LT),
    exp.GT: (exp.GTE, exp.LT, exp.EQ),
    exp.GTE: (exp.GT, exp.LTE, exp.EQ),
    exp.LT: (exp.LTE, exp.GT, exp.EQ),
    exp.LTE: (exp.LT, exp.GTE, exp.EQ),
}
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
        run: Runs a query on the base database, for mutants with constants read there.
    """
    found: dict[str, str] = {}
    original = gold.tree.sql("sqlite")
    for operator, kinds, change in _operators(gold, schema):
        for sql in islice(_edited(gold.tree, kinds, change), MAX_PER_OPERATOR):
            if sql != original:
                found.setdefault(sql, operator)
    for sql in _constants(gold, schema, run) if run else ():
        found.setdefault(sql, "constants")
    return found


def _operators(gold: GoldQuery, schema: Schema) -> Iterator[tuple[str, tuple[type[exp.Expr], ...], Change]]:
    swaps = _column_swaps(gold, schema)
    yield "comparison", tuple(_COMPARED_INSTEAD), _comparison
    yield "comparison", (exp.Between, exp.Like, exp.In, exp.Not), _predicate
    yield "literal", (exp.Literal,), _literal
    yield "connector", (exp.And, exp.Or), _connector
    yield "condition_dropped", (exp.Where, exp.Having), lambda node: [None]
    yield "distinct", (exp.Select,), _distinct
    yield "aggregate", (exp.Count, *_AGGREGATES), lambda node: _aggregate(node, gold)
    yield "join", (exp.Join,), _join
    yield "join_dropped", (exp.Select,), _join_dropped
    yield "set_operation", (exp.SetOperation,), _set_operation
    yield "order", (exp.Ordered,), lambda node: [_turned(node)]
    yield "order", (exp.Order, exp.Limit), lambda node: [None]
    yield "limit", (exp.Select,), _limit
    yield "group", (exp.Group,), _group
    yield "column", (exp.Column,), lambda node: swaps(node)
    yield "condition_added", (exp.Select,), lambda node: _condition_added(node, gold)


def _edited(tree: exp.Query, kinds: tuple[type[exp.Expr], ...], change: Change) -> Iterator[str]:
    """SQL of the tree with one node changed at a time."""
    for index, node in enumerate(tree.find_all(*kinds)):
        for replacement in change(node):
            copy = tree.copy()
            target = next(islice(copy.find_all(*kinds), index, None))
            if target is copy:
                if isinstance(replacement, exp.Query):
                    yield replacement.sql("sqlite")
            elif replacement is None:
                target.pop()
                yield copy.sql("sqlite")
            else:
                target.replace(replacement)
                yield copy.sql("sqlite")


def _with(node: exp.Expr, **args: object) -> exp.Expr:
    copy = node.copy()
    for name, value in args.items():
        copy.set(name, value)
    return copy


def _turned(node: exp.Expr) -> exp.Expr:
    is_descending = not node.args.get("desc")
    return _with(node, desc=is_descending, nulls_first=not is_descending)


def _comparison(node: exp.Expr) -> list[exp.Expr | None]:
    left, right = node.this, node.expression
    changed: list[exp.Expr | None] = [
        kind(this=left.copy(), expression=right.copy()) for kind in _COMPARED_INSTEAD[type(node)]
    ]
    if isinstance(node, exp.EQ) and isinstance(right, exp.Literal) and right.is_string:
        for pattern in (f"%{right.this}%", right.this):
            changed.append(exp.Like(this=left.copy(), expression=exp.Literal.string(pattern)))
    if isinstance(node.parent, exp.Join):
        changed.append(exp.true())
    return changed


def _predicate(node: exp.Expr) -> list[exp.Expr | None]:
    if isinstance(node, exp.Not):
        return [node.this.copy()]
    if isinstance(node, exp.Between):
        low, high = node.args["low"], node.args["high"]
        above = exp.GT(this=node.this.copy(), expression=low.copy())
        below = exp.LT(this=node.this.copy(), expression=high.copy())
        at_least = exp.GTE(this=node.this.copy(), expression=low.copy())
        at_most = exp.LTE(this=node.this.copy(), expression=high.copy())
        return [exp.and_(above, at_most), exp.and_(at_least, below), at_least, at_most]
    if isinstance(node, exp.Like) and isinstance(node.expression, exp.Literal):
        core = node.expression.this.strip("%")
        return [
            *(_with(node, expression=exp.Literal.string(p)) for p in (f"{core}%", f"%{core}", f"%{core}%")),
            exp.EQ(this=node.this.copy(), expression=exp.Literal.string(core)),
            exp.Not(this=node.copy()),
        ]
    return [] if isinstance(node.parent, exp.Not) else [exp.Not(this=node.copy())]


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


def _distinct(node: exp.Expr) -> list[exp.Expr | None]:
    has_distinct = node.args.get("distinct") is not None
    return [_with(node, distinct=None if has_distinct else exp.Distinct())]


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
        return [_with(node, side=None)]
    has_condition = node.args.get("on") is not None or bool(node.args.get("using"))
    return [_with(node, side="LEFT", kind=None)] if has_condition else []


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
    for comparison in list(select.find_all(*COMPARISONS)):
        if any(column.table == alias for column in comparison.find_all(exp.Column)):
            comparison.replace(exp.true())
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
        changed.append(_with(node, distinct=not node.args.get("distinct")))
    if isinstance(node, exp.Except):
        changed.append(exp.Except(this=node.right.copy(), expression=node.left.copy(), distinct=True))
    return changed


def _limit(node: exp.Expr) -> list[exp.Expr | None]:
    limit = node.args.get("limit")
    if limit is None:
        return [_with(node, limit=exp.Limit(expression=exp.Literal.number(1)))]
    value = literal_value(limit.expression)
    if not isinstance(value, int):
        return []
    return [_with(node, limit=exp.Limit(expression=exp.Literal.number(value + step))) for step in (1, 2)]


def _group(node: exp.Expr) -> list[exp.Expr | None]:
    keys = node.expressions
    return [_with(node, expressions=keys[:i] + keys[i + 1 :]) for i in range(len(keys)) if len(keys) > 1]


def _column_swaps(gold: GoldQuery, schema: Schema) -> Change:
    """Change of a column to another one of its table, of the same type if there is one."""
    columns = {table.name: table.columns for table in schema.tables}

    def swaps(node: exp.Expr) -> Iterator[exp.Expr]:
        found = gold.columns_of.get(id(node))
        if found is None:
            return
        table, name = found
        own_type = next(column.type for column in columns[table] if column.name == name)
        others = [column for column in columns[table] if column.name != name]
        others.sort(key=lambda column: column.type != own_type)
        for other in others[:OTHER_COLUMNS]:
            yield _with(node, this=exp.to_identifier(other.name, quoted=True))

    return swaps


def _condition_added(node: exp.Expr, gold: GoldQuery) -> Iterator[exp.Expr]:
    """The query with a condition that often all rows of the base meet."""
    columns = {c.sql("sqlite"): c for c in _own_columns(node) if id(c) in gold.columns_of}
    for column in list(columns.values())[:4]:
        table, name = gold.columns_of[id(column)]
        least = exp.select(exp.Min(this=exp.column(name, quoted=True))).from_(
            exp.to_identifier(table, quoted=True)
        )
        present = exp.Not(this=exp.Is(this=column.copy(), expression=exp.null()))
        above = exp.GT(this=column.copy(), expression=exp.Subquery(this=least))
        for condition in (present, above):
            copy = node.copy()
            assert isinstance(copy, exp.Select)
            yield copy.where(condition, copy=False)


def _own_columns(node: exp.Expr) -> Iterator[exp.Column]:
    for part in node.walk(prune=lambda child: child is not node and isinstance(child, exp.Query)):
        if isinstance(part, exp.Column):
            yield part


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
        if isinstance(node, exp.In):
            target.replace(exp.In(this=node.this.copy(), expressions=values))
        else:
            target.replace(values[0])
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
        listing = tree.copy()
        listing.set("expressions", [column])
        listing.set("distinct", None)
        values = _values(run(listing.sql("sqlite")))
        if values:
            answer = tree.copy()
            answer.set("where", exp.Where(this=exp.In(this=column.copy(), expressions=values)))
            yield answer.sql("sqlite")


def _values(rows: Sequence[Row] | None) -> list[exp.Expr]:
    if not rows or len(rows) > MAX_CONSTANTS:
        return []
    return [_constant(row[0]) for row in dict.fromkeys(rows) if not isinstance(row[0], bytes)]


def _constant(value: Cell) -> exp.Expr:
    return exp.convert(value)
