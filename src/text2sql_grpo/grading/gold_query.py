"""Dependencies of a gold query: its tables, columns, literals, links between columns, group sizes."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from types import MappingProxyType

from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.optimizer.normalize_identifiers import normalize_identifiers
from sqlglot.optimizer.scope import traverse_scope

from text2sql_grpo.grading.query_columns import (
    COMPARISONS,
    MAX_SCALAR,
    ColumnRef,
    Declared,
    columns_among,
    columns_in_scopes,
    inside,
    with_computed,
    with_strings,
    with_views,
)
from text2sql_grpo.grading.query_values import (
    expressions_in,
    literal_value,
    literals_in,
    moved_by,
    searches_in,
    steps_in,
)
from text2sql_grpo.grading.time_steps import OF_PARTS, Step
from text2sql_grpo.sql.outcome import Cell
from text2sql_grpo.sql.query import Unread, read_query
from text2sql_grpo.sql.schema import Schema

_SCALAR = (
    *(exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Neg, exp.Paren, exp.Literal, exp.Column, exp.Identifier),
    *(exp.Length, exp.Abs, exp.Round, exp.Cast, exp.DataType, exp.DataTypeParam, exp.Coalesce),
)
_RANKS = (exp.Window, exp.Limit, exp.Fetch, exp.Max, exp.Min, exp.All)
_CUT = (
    *(exp.Substring, exp.Left, exp.Right, exp.StrPosition, exp.Split, exp.SplitPart),
    *(exp.RegexpExtract, exp.Trim, exp.Replace, exp.Cast, exp.TryCast),
)
_SHIFT = re.compile(r"[+-]?\d+(\.\d+)? (hour|minute)s?|localtime|utc", re.IGNORECASE)
_WEEKS = re.compile(r"week(?!day)|isoyear|%[GUVW]", re.IGNORECASE)
MAX_NODES = 1_000  # a longer query gets no test databases: mutating it would take too long


@dataclass(frozen=True)
class Aim:
    """Expression of the columns of one table, and a number that it, or its aggregate, is compared with.

    The difference of two expressions that are compared with each other is aimed at 0.

    Attributes:
        table: The table.
        columns: Its columns in the expression.
        sql: The expression, with `:name` for each column.
        value: The number.
    """

    table: str
    columns: tuple[str, ...]
    sql: str
    value: float


@dataclass(frozen=True)
class GoldQuery:
    """A query that reads tables, and its dependencies on the database.

    Attributes:
        tree: The query; identifiers in lower case, "text in double quotes" as the string that SQLite
            takes it for.
        columns_of: Column of each `exp.Column` of the tree, by `id` of the node.
        tables: Tables that it reads.
        columns: Columns that it reads.
        literals: Values that a column, or a function of it, is compared with, not the function's own
            arguments; a LIKE pattern as `near_values.unescaped` returns it.
        patterns: Literals that are patterns.
        constants: Values of all its literals, keys in brackets aside.
        expressions: Regular expressions that it searches a column's texts for.
        links: Pairs of columns that are compared, or paired by a set operation.
        opposed: Pairs of columns of a row of which one is asked to be the larger.
        grouped: Columns of its GROUP BYs, PARTITION BYs and COUNT(DISTINCT)s.
        ranks_groups: True if it ranks groups, or takes the first of them.
        group_sizes: Integers that a count or a rank is compared with, its LIMITs, and the sizes of its window
            frames.
        identifying: Columns by whose values it picks rows: compared with texts or with themselves, and those
            of which EXCEPT removes rows.
        lacking: All columns of the tables of which it picks the rows that another one lacks: an answer may
            name such rows by any of them.
        aims: Expressions that it compares with numbers.
        is_recursive: True if a CTE refers to itself.
        missing: Columns that it tests for NULL, the NULLs of outer joins aside.
        denied: Columns of which it leaves out rows with a literal, as `status <> 'lost'` does.
        mixed: Columns in a CASE or FILTER: it needs rows of both kinds.
        summed: Columns that it adds up or averages.
        divided: Columns whose remainders it takes.
        cut: Columns of whose texts it takes a part, and those that it casts.
        trimmed: Columns of whose texts it leaves out blanks at the ends.
        cased: Columns whose texts it brings to one case.
        weekly: Columns whose weeks it counts.
        shifted: Columns whose moments it moves by hours, or to a time zone.
        tied: Columns by which it orders rows, with another one behind them that decides ties.
        steps: Steps in time that it adds to a column, or compares its distance to another moment with.
        json_keys: Keys of JSON objects that it reads or looks for.
    """

    tree: exp.Query
    columns_of: dict[int, ColumnRef]
    tables: frozenset[str]
    columns: frozenset[ColumnRef]
    literals: dict[ColumnRef, tuple[Cell, ...]]
    patterns: frozenset[str]
    constants: tuple[Cell, ...] = ()
    expressions: Mapping[ColumnRef, tuple[str, ...]] = field(default_factory=dict)
    links: tuple[tuple[ColumnRef, ColumnRef], ...] = ()
    opposed: frozenset[tuple[ColumnRef, ColumnRef]] = frozenset()
    grouped: frozenset[ColumnRef] = frozenset()
    ranks_groups: bool = False
    group_sizes: tuple[int, ...] = ()
    identifying: frozenset[ColumnRef] = frozenset()
    lacking: frozenset[ColumnRef] = frozenset()
    aims: tuple[Aim, ...] = ()
    is_recursive: bool = False
    missing: frozenset[ColumnRef] = frozenset()
    denied: frozenset[ColumnRef] = frozenset()
    mixed: frozenset[ColumnRef] = frozenset()
    summed: frozenset[ColumnRef] = frozenset()
    divided: frozenset[ColumnRef] = frozenset()
    cut: frozenset[ColumnRef] = frozenset()
    trimmed: frozenset[ColumnRef] = frozenset()
    cased: frozenset[ColumnRef] = frozenset()
    weekly: frozenset[ColumnRef] = frozenset()
    shifted: frozenset[ColumnRef] = frozenset()
    tied: frozenset[ColumnRef] = frozenset()
    steps: Mapping[ColumnRef, tuple[Step, ...]] = field(default_factory=dict)
    json_keys: frozenset[str] = frozenset()


def read_gold(
    sql: str,
    schema: Schema,
    views: Mapping[str, str] = MappingProxyType({}),
    *,
    dialect: str = "sqlite",
) -> GoldQuery | None:
    """Parse a gold; None if it reads no table of the schema, or sqlglot cannot parse it.

    Args:
        views: Query of each view by its name in lower case, to replace the view; that of a table reads the
            table, and has the expressions of its generated columns.
        dialect: Name in sqlglot of the query's SQL.
    """
    parsed = read_query(sql, dialect).tree
    if not isinstance(parsed, exp.Query) or sum(1 for _ in parsed.walk()) > MAX_NODES:
        return None
    parsed = with_views(parsed, views) if views else parsed
    try:
        tree = normalize_identifiers(with_strings(parsed, schema), dialect="sqlite")
        scopes = traverse_scope(tree)
    except (SqlglotError, RecursionError, ValueError):
        return None
    declared = {
        table.name.lower(): (table.name, {column.name.lower(): column.name for column in table.columns})
        for table in schema.tables
    }
    columns_of = columns_in_scopes(scopes, declared)
    names = {table.name.lower() for table in tree.find_all(exp.Table)}
    tables = frozenset(declared[name][0] for name in names if name in declared)
    if not tables:
        return None
    compared, columns_compared = with_computed(tree, declared)
    literals, patterns, group_sizes = literals_in(compared, columns_compared)
    steps: defaultdict[ColumnRef, list[Step]] = defaultdict(list)
    known = {
        column: [value for value in found if isinstance(value, str)] for column, found in literals.items()
    }
    for columns, found, moved in steps_in(compared, columns_compared):
        for column in columns:
            steps[column] += found
            pair = {*columns} - {column} if len({*columns}) == 2 else ()
            others = (text for other in pair for text in known.get(other, ()))
            named = [step for step in found if step not in OF_PARTS]
            moved_of_others = (moment for text in others for moment in moved_by(text, named))
            literals[column] = [*literals.get(column, ()), *moved, *moved_of_others]
    for columns, pattern in searches_in(compared, columns_compared):
        patterns.add(pattern)
        for column in columns:
            literals[column] = [*literals.get(column, ()), pattern]
    expressions: defaultdict[ColumnRef, list[str]] = defaultdict(list)
    for columns, expression in expressions_in(compared, columns_compared):
        for column in columns:
            expressions[column].append(expression)
    grouped = [
        key
        for part in compared.find_all(exp.Group, exp.Window, exp.Distinct)
        for key in (part.args.get("partition_by") or [] if isinstance(part, exp.Window) else [part])
    ]
    outside = (node for node in tree.find_all(exp.Literal) if not isinstance(node.parent, exp.Bracket))
    before_last = [key for order in tree.find_all(exp.Order) for key in order.expressions[:-1]]
    sums = [
        node
        for node in compared.find_all(exp.Sum, exp.Avg, exp.Anonymous)
        if not isinstance(node, exp.Anonymous) or node.name.upper() == "TOTAL"
    ]
    return GoldQuery(
        tree=tree,
        columns_of=columns_of,
        tables=tables,
        columns=frozenset(columns_of.values()),
        literals={column: tuple(dict.fromkeys(values)) for column, values in literals.items() if values},
        patterns=frozenset(patterns),
        constants=tuple(value for value in dict.fromkeys(map(literal_value, outside)) if value is not None),
        expressions={column: tuple(dict.fromkeys(found)) for column, found in expressions.items()},
        links=tuple(_links(tree, columns_of)),
        opposed=frozenset(_opposed(compared, columns_compared)),
        grouped=_columns_in(grouped, columns_compared),
        ranks_groups=tree.find(exp.Group) is not None and tree.find(*_RANKS) is not None,
        group_sizes=tuple(dict.fromkeys(group_sizes)),
        identifying=frozenset(_identifying(tree, columns_of)),
        lacking=frozenset(_lacking(tree, declared)),
        aims=tuple(dict.fromkeys(_aims(compared, columns_compared))),
        is_recursive=any(part.args.get("recursive") for part in tree.find_all(exp.With)),
        missing=frozenset(_missing(tree, columns_of)),
        denied=frozenset(_denied(compared, columns_compared)),
        mixed=_columns_in(tree.find_all(exp.Case, exp.If, exp.Filter), columns_of),
        summed=_columns_in(sums, columns_compared),
        divided=_columns_in(tree.find_all(exp.Mod), columns_of),
        cut=_columns_in(tree.find_all(*_CUT), columns_of),
        trimmed=_columns_in(tree.find_all(exp.Trim), columns_of),
        cased=_columns_in(tree.find_all(exp.Lower, exp.Upper), columns_of),
        weekly=_columns_in(filter(_counts_weeks, tree.find_all(exp.Func)), columns_of),
        shifted=_columns_in(filter(_shifts_hours, tree.walk()), columns_of),
        tied=_columns_in(before_last, columns_of),
        steps={column: tuple(dict.fromkeys(found)) for column, found in steps.items()},
        json_keys=frozenset(_json_keys(tree)),
    )


def why_unread(sql: str, dialect: str = "sqlite") -> str:
    """Why a query is not read, so that its literals and columns are unknown; empty if it is.

    >>> why_unread("SELECT FROM WHERE")
    'sqlglot cannot parse it'
    """
    query = read_query(sql, dialect)
    if isinstance(query, Unread):
        return query.reason
    if not isinstance(query.tree, exp.Query):
        return "it is not a query"
    n_nodes = sum(1 for _ in query.tree.walk())
    return f"it is too long: {n_nodes} nodes, more than {MAX_NODES}" if n_nodes > MAX_NODES else ""


def _json_keys(tree: exp.Query) -> Iterator[str]:
    """Keys that a path reads, that `?` looks for, or that stand in an object behind `@>`."""
    for node in tree.find_all(exp.JSONPathKey, exp.JSONBContainsTopKey, exp.ArrayContainsAll):
        if isinstance(node, exp.JSONPathKey):
            texts = [node.name] if node.name else []  # a wildcard has none
        else:
            texts = [part.name for part in node.expression.find_all(exp.Literal)]
        if isinstance(node, exp.ArrayContainsAll):
            texts = [key for text in texts for key in re.findall(r'"([^"]+)"\s*:', text)]
        yield from texts


def _links(tree: exp.Query, columns_of: dict[int, ColumnRef]) -> Iterable[tuple[ColumnRef, ColumnRef]]:
    pairs: dict[tuple[ColumnRef, ColumnRef], None] = {}
    for node in tree.find_all(*COMPARISONS):
        sides = list(inside(node))
        for query in node.find_all(exp.Select):
            sides += [part for first in query.selects[:1] for part in first.find_all(exp.Column)]
        pairs.update(dict.fromkeys(pairwise(columns_among(sides, columns_of))))
    for operation in tree.find_all(exp.SetOperation):
        for left_side, right_side in zip(operation.left.selects, operation.right.selects, strict=False):
            found = columns_among((left_side.unalias(), right_side.unalias()), columns_of)
            pairs.update(dict.fromkeys(pairwise(found)))
    return [pair for pair in pairs if pair[0] != pair[1]]


def _opposed(tree: exp.Query, columns_of: Mapping[int, ColumnRef]) -> Iterator[tuple[ColumnRef, ColumnRef]]:
    """Columns on the two sides of a comparison, of one row: not those of a table joined with itself."""
    for node in tree.find_all(exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Between):
        sides = [node.this, *(node.args.get(name) for name in ("expression", "low", "high"))]
        first, *others = ([] if side is None else list(side.find_all(exp.Column)) for side in sides)
        for one, other in ((one, other) for side in others for one, other in product(first, side)):
            if one.table == other.table and id(one) in columns_of and id(other) in columns_of:
                yield columns_of[id(one)], columns_of[id(other)]


def _identifying(tree: exp.Query, columns_of: dict[int, ColumnRef]) -> Iterator[ColumnRef]:
    for node in tree.find_all(exp.EQ, exp.NEQ, exp.In):
        sides = [node.this, node.args.get("expression"), *node.expressions]
        query = node.args.get("query")
        query = query.this if isinstance(query, exp.Subquery) else query
        sides += query.selects[:1] if isinstance(query, exp.Query) else []
        found = columns_among(sides, columns_of)
        is_text = any(isinstance(side, exp.Literal) and side.is_string for side in sides)
        if found and (is_text or found[1:] == found[:1]):
            yield found[0]
    for operation in tree.find_all(exp.Except):
        yield from columns_among((select.unalias() for select in operation.left.selects), columns_of)


def _lacking(tree: exp.Query, declared: Declared) -> Iterator[ColumnRef]:
    for query in _anti_joins(tree):
        source = query.args.get("from_")
        table, columns = declared.get(source.this.name.lower() if source else "", ("", {}))
        yield from ((table, column) for column in columns.values())


def _anti_joins(tree: exp.Query) -> Iterator[exp.Expr]:
    """Queries that pick the rows of their first table that another one lacks."""
    yield from (operation.left for operation in tree.find_all(exp.Except))
    for negation in tree.find_all(exp.Not):
        is_query = isinstance(negation.this, exp.Exists) or negation.this.args.get("query") is not None
        if is_query and negation.parent_select is not None:
            yield negation.parent_select
    for join in tree.find_all(exp.Join):
        query, joined = join.parent, join.this.alias_or_name
        tests = query.find_all(exp.Is) if query is not None and join.side == "LEFT" else ()
        if query is not None and any(_is_null(t) and t.this.text("table") in ("", joined) for t in tests):
            yield query


def _is_null(test: exp.Is) -> bool:
    """True for `IS NULL`, False for its negation."""
    return isinstance(test.expression, exp.Null) and not isinstance(test.parent, exp.Not)


def _columns_in(nodes: Iterable[exp.Expr], columns_of: Mapping[int, ColumnRef]) -> frozenset[ColumnRef]:
    columns = (column for node in nodes for column in node.find_all(exp.Column))
    return frozenset(columns_among(columns, columns_of))


def _missing(tree: exp.Query, columns_of: dict[int, ColumnRef]) -> Iterator[ColumnRef]:
    for test in tree.find_all(exp.Is):
        select = test.parent_select
        joins = (select.args.get("joins") or []) if select is not None else []
        if _is_null(test) and id(test.this) in columns_of and not any(join.side for join in joins):
            yield columns_of[id(test.this)]


def _counts_weeks(node: exp.Expr) -> bool:
    return _WEEKS.search(f"{node.key} {node.name} {node.text('format')}") is not None


def _shifts_hours(node: exp.Expr) -> bool:
    step = node.expression if isinstance(node, exp.Add | exp.Sub) else None
    if isinstance(step, exp.Interval):
        return _SHIFT.match(f"{step.this.name if step.this else ''} {step.text('unit')}") is not None
    if isinstance(node, exp.Anonymous):
        literals = (part.name for part in node.expressions if isinstance(part, exp.Literal))
        return node.name.lower() == "timezone" or any(map(_SHIFT.fullmatch, literals))
    return isinstance(node, exp.AtTimeZone)


def _denied(tree: exp.Query, columns_of: dict[int, ColumnRef]) -> Iterator[ColumnRef]:
    denials = [node.this for node in tree.find_all(exp.Not) if not isinstance(node.this, exp.Is | exp.Exists)]
    for node in (*tree.find_all(exp.NEQ), *denials):
        if any(isinstance(part, exp.Literal) for part in inside(node)):
            yield from columns_among(inside(node), columns_of)


def _aims(tree: exp.Query, columns_of: dict[int, ColumnRef]) -> Iterator[Aim]:
    for node in tree.find_all(exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Between):
        sides = [node.this, *(node.args.get(name) for name in ("expression", "low", "high"))]
        numbers = [side.this if isinstance(side, exp.Neg) else side for side in sides if side is not None]
        values = [float(value) for value in map(literal_value, numbers) if isinstance(value, int | float)]
        for side in sides[:2]:
            inner = side.this if isinstance(side, exp.AggFunc) and not isinstance(side, exp.Count) else side
            if isinstance(inner, exp.Expr) and not (inner is side and isinstance(inner, exp.Column)):
                yield from _aims_at([inner], values, columns_of)
        is_pair = isinstance(node, exp.Binary) and not all(isinstance(side, exp.Column) for side in sides[:2])
        if is_pair and not values:
            yield from _aims_at(sides[:2], [0.0], columns_of)


def _aims_at(
    sides: Sequence[exp.Expr], values: Sequence[float], columns_of: Mapping[int, ColumnRef]
) -> Iterator[Aim]:
    """Aims of a scalar expression of one table, or of the difference of two."""
    parts = [part for side in sides for part in side.walk()]
    found = set(columns_among(parts, columns_of))
    is_scalar = all(isinstance(part, _SCALAR) or _is_day_number(part) for part in parts)
    is_known = all(id(part) in columns_of for part in parts if isinstance(part, exp.Column))
    if not (is_scalar and is_known and len({table for table, _ in found}) == 1 and len(parts) <= MAX_SCALAR):
        return
    names = tuple(sorted(column for _, column in found))
    texts = []
    for side in sides:
        copy = exp.paren(side.copy())
        columns = [columns_of[id(part)][1] for part in side.walk() if isinstance(part, exp.Column)]
        for part, column in zip(list(copy.find_all(exp.Column, bfs=True)), columns, strict=True):
            part.replace(exp.Placeholder(this=f"c{names.index(column)}"))
        texts.append(copy.sql("sqlite"))
    yield from (Aim(next(iter(found))[0], names, " - ".join(texts), value) for value in values)


def _is_day_number(node: exp.Expr) -> bool:
    return isinstance(node, exp.Anonymous) and node.name.lower() == "julianday"
