"""Mutants of a gold query by which its test databases are chosen: one small edit each.

Some are equivalent to the gold query, and no database kills those.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from sqlglot import exp

from text2sql_grpo.grading.gold_query import GoldQuery
from text2sql_grpo.sql.schema import Schema

Change = Callable[[exp.Expr], Iterable[exp.Expr | None]]  # None removes the node
Operator = tuple[str, tuple[type[exp.Expr], ...], Change]  # its name, and the nodes that it changes

MAX_PER_OPERATOR = 24
OTHER_COLUMNS = 3

COMPARED_INSTEAD: dict[type[exp.Expr], tuple[type[exp.Expr], ...]] = {
    exp.EQ: (exp.NEQ, exp.GTE, exp.LTE),
    exp.NEQ: (exp.EQ, exp.GT, exp.LT),
    exp.GT: (exp.GTE, exp.LT, exp.EQ),
    exp.GTE: (exp.GT, exp.LTE, exp.EQ),
    exp.LT: (exp.LTE, exp.GT, exp.EQ),
    exp.LTE: (exp.LT, exp.GTE, exp.EQ),
}


def choosing_operators(gold: GoldQuery, schema: Schema) -> Iterator[Operator]:
    """Operators without which the test databases accept more wrong answers (EXPERIMENTS.md)."""
    yield "comparison", tuple(COMPARED_INSTEAD), comparison
    yield "comparison", (exp.Between, exp.Like, exp.In, exp.Not), predicate
    yield "distinct", (exp.Select,), distinct
    yield "column", (exp.Column,), lambda node: column_swaps(node, gold, schema)
    yield "condition_added", (exp.Select,), lambda node: condition_added(node, gold)


def edited(gold: GoldQuery, operators: Iterable[Operator]) -> dict[str, str]:
    """Mutants as SQL, each with the name of its operator."""
    found: dict[str, str] = {}
    original = gold.tree.sql("sqlite")
    for operator, kinds, change in operators:
        for sql in islice(_edited(gold.tree, kinds, change), MAX_PER_OPERATOR):
            if sql != original:
                found.setdefault(sql, operator)
    return found


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


def with_args(node: exp.Expr, **args: object) -> exp.Expr:
    copy = node.copy()
    for name, value in args.items():
        copy.set(name, value)
    return copy


def comparison(node: exp.Expr) -> list[exp.Expr | None]:
    left, right = node.this, node.expression
    changed: list[exp.Expr | None] = [
        kind(this=left.copy(), expression=right.copy()) for kind in COMPARED_INSTEAD[type(node)]
    ]
    if isinstance(node, exp.EQ) and isinstance(right, exp.Literal) and right.is_string:
        for pattern in (f"%{right.this}%", right.this):
            changed.append(exp.Like(this=left.copy(), expression=exp.Literal.string(pattern)))
    if isinstance(node.parent, exp.Join):
        changed.append(exp.true())
    return changed


def predicate(node: exp.Expr) -> list[exp.Expr | None]:
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
            *(
                with_args(node, expression=exp.Literal.string(p))
                for p in (f"{core}%", f"%{core}", f"%{core}%")
            ),
            exp.EQ(this=node.this.copy(), expression=exp.Literal.string(core)),
            exp.Not(this=node.copy()),
        ]
    return [] if isinstance(node.parent, exp.Not) else [exp.Not(this=node.copy())]


def distinct(node: exp.Expr) -> list[exp.Expr | None]:
    has_distinct = node.args.get("distinct") is not None
    return [with_args(node, distinct=None if has_distinct else exp.Distinct())]


def column_swaps(node: exp.Expr, gold: GoldQuery, schema: Schema) -> Iterator[exp.Expr]:
    """A column's node with another column of its table, of the same type if there is one."""
    if id(node) not in gold.columns_of:
        return
    table, name = gold.columns_of[id(node)]
    columns = next(each.columns for each in schema.tables if each.name == table)
    own_type = next(column.type for column in columns if column.name == name)
    others = [column for column in columns if column.name != name]
    others.sort(key=lambda column: column.type != own_type)
    for other in others[:OTHER_COLUMNS]:
        yield with_args(node, this=exp.to_identifier(other.name, quoted=True))


def condition_added(node: exp.Expr, gold: GoldQuery) -> Iterator[exp.Expr]:
    """The query with a condition that often all rows of the base meet."""
    own = node.walk(prune=lambda child: child is not node and isinstance(child, exp.Query))
    columns = {part.sql("sqlite"): part for part in own if id(part) in gold.columns_of}
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
