"""Columns of tables, and expressions of them, that the columns of a query stand for."""

from collections.abc import Iterable, Iterator, Mapping

from sqlglot import exp
from sqlglot.optimizer.scope import Scope, traverse_scope

from text2sql_grpo.sql.query import read_query
from text2sql_grpo.sql.schema import Schema

ColumnRef = tuple[str, str]  # table and column, as declared
Declared = dict[str, tuple[str, dict[str, str]]]  # table and columns by names in lower case
Resolved = dict[tuple[int, str], ColumnRef | None]  # by `id` of a scope, and name
COMPARISONS = (
    *(exp.EQ, exp.NEQ, exp.Is, exp.NullSafeEQ, exp.NullSafeNEQ),
    *(exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Like, exp.Glob, exp.Between, exp.In),
)
MAX_SCALAR = 40  # nodes of an expression whose values are aimed at
_EXPANDED = (*COMPARISONS, exp.Group, exp.Window, exp.AggFunc)


def inside(node: exp.Expr) -> Iterator[exp.Expr]:
    """Nodes below a comparison, without those of subqueries."""
    return node.walk(prune=lambda child: isinstance(child, exp.Query))


def columns_among(nodes: Iterable[object], columns_of: Mapping[int, ColumnRef]) -> list[ColumnRef]:
    """Column of a table for each of some nodes that stands for one."""
    return [columns_of[id(node)] for node in nodes if id(node) in columns_of]


def with_views(tree: exp.Query, views: Mapping[str, str]) -> exp.Query:
    """Replace views, views of views, and tables with generated columns, by their queries."""
    queries = {name: read_query(query).tree for name, query in views.items()}
    found = {name: query for name, query in queries.items() if isinstance(query, exp.Query)}
    computed = {
        name: query
        for name, query in found.items()
        if any(table.name.lower() == name for table in query.find_all(exp.Table))
    }
    found = {name: query for name, query in found.items() if name not in computed}
    expanded = exp.expand(tree, dict(found), dialect="sqlite", copy=False) if found else tree
    assert isinstance(expanded, exp.Query)
    if not computed:
        return expanded
    joins = list(expanded.find_all(exp.Join))
    has_star = any(each.is_star for each in expanded.find_all(exp.Select))
    is_natural = any(join.method == "NATURAL" for join in joins)
    named = [
        *expanded.find_all(exp.Column),
        *(name for join in joins for name in join.args.get("using") or ()),
    ]
    asked = None if has_star or is_natural else {each.name.lower() for each in named}

    def with_expressions(node: exp.Expr) -> exp.Expr:
        query = computed.get(node.name.lower()) if isinstance(node, exp.Table) else None
        if query is None:
            return node
        query = query.copy()
        shown = [each for each in query.selects if asked is None or each.alias_or_name.lower() in asked]
        query.set("expressions", shown or query.selects[:1])
        return query.subquery(exp.to_identifier(node.alias_or_name, quoted=True), copy=False)

    result = expanded.transform(with_expressions)
    assert isinstance(result, exp.Query)
    return result


def with_strings(tree: exp.Query, schema: Schema) -> exp.Query:
    """Take a text in double quotes for a string where no column has its name, as SQLite does."""
    names = {column.name.lower() for table in schema.tables for column in table.columns}
    names |= {"rowid", "oid", "_rowid_"} | {alias.alias.lower() for alias in tree.find_all(exp.Alias)}

    def as_string(node: exp.Expr) -> exp.Expr:
        is_quoted = (
            isinstance(node, exp.Column) and isinstance(node.this, exp.Identifier) and node.this.quoted
        )
        if is_quoted and not node.args.get("table") and node.name.lower() not in names:
            return exp.Literal.string(node.name)
        return node

    result = tree.transform(as_string)
    assert isinstance(result, exp.Query)
    return result


def columns_in_scopes(scopes: Iterable[Scope], declared: Declared) -> dict[int, ColumnRef]:
    """Column of a table that each `exp.Column` stands for, by `id` of the node.

    Args:
        scopes: All scopes of a query, inner ones first.
    """
    columns_of: dict[int, ColumnRef] = {}
    known: Resolved = {}
    for scope in scopes:
        for column in scope.expression.find_all(exp.Column):
            found = None if id(column) in columns_of else _resolve(column, scope, declared, known)
            if found is not None:
                columns_of[id(column)] = found
    return columns_of


def with_computed(tree: exp.Query, declared: Declared) -> tuple[exp.Query, dict[int, ColumnRef]]:
    """Copy of a query in which computed columns are their expressions; and its columns.

    In comparisons, groups, windows and aggregates alone. A subquery's `COUNT(*) AS n` makes `WHERE n > 30` to
    `WHERE COUNT(*) > 30`, and `GROUP BY 1` gets the first expression: no query that runs, but its literals,
    aims and groups can be read.
    """
    tree = tree.copy()
    scopes = traverse_scope(tree)
    columns_of = columns_in_scopes(scopes, declared)
    known: dict[int, exp.Expr | None] = {}
    kept: list[exp.Expr] = []  # alive, as another node may get the id of one that is gone

    def copied(node: exp.Expr) -> exp.Expr:
        copy = node.copy()
        kept.append(copy)
        for own, column in zip(copy.find_all(exp.Column), node.find_all(exp.Column), strict=True):
            if id(column) in columns_of:
                columns_of[id(own)] = columns_of[id(column)]
        return copy

    series = _series(tree)

    def expression(column: exp.Column, scope: Scope) -> exp.Expr | None:
        if column.name in series:
            return series[column.name]
        inner, place = _projection(column, scope)
        if inner is None:
            return None
        if id(inner) not in known:
            known[id(inner)] = None  # on the way to itself: a recursive CTE
            known[id(inner)] = (
                expression(inner, place) if isinstance(inner, exp.Column) else whole(inner, place)
            )
        return known[id(inner)]

    def whole(inner: exp.Expr, place: Scope) -> exp.Expr | None:
        copy = exp.paren(copied(inner), copy=False) if isinstance(inner, exp.Binary) else copied(inner)
        for own in list(copy.find_all(exp.Column)):
            part = None if id(own) in columns_of else expression(own, place)
            if part is not None:
                own.replace(copied(part))
        return copy if sum(1 for _ in copy.walk()) <= MAX_SCALAR else None

    for scope in scopes:
        group = scope.expression.args.get("group")
        shown = scope.expression.selects if isinstance(scope.expression, exp.Select) else []
        for key in list(group.expressions) if group else ():
            number = key.name if isinstance(key, exp.Literal) and not key.is_string else ""
            if number.isdigit() and 0 < int(number) <= len(shown):
                key.replace(copied(shown[int(number) - 1].unalias()))
        for column in list(scope.expression.find_all(exp.Column)):
            is_own = column.parent_select is scope.expression and id(column) not in columns_of
            if is_own and isinstance(column.find_ancestor(*_EXPANDED, exp.Query), _EXPANDED):
                part = expression(column, scope)
                if part is not None:
                    kept.append(column)
                    column.replace(copied(part))
    return tree, columns_of


def _series(tree: exp.Query) -> dict[str, exp.Expr]:
    """Both ends of each series that is read as a table, by the name of its column."""
    found = dict[str, exp.Expr]()
    for made in tree.find_all(exp.GenerateSeries, exp.ExplodingGenerateSeries):
        alias = made.parent.args.get("alias") if isinstance(made.parent, exp.Table | exp.Unnest) else None
        ends = [end for name in ("start", "end") if (end := made.args.get(name)) is not None]
        if isinstance(alias, exp.TableAlias):
            names = [column.name for column in alias.columns] or [alias.name]
            found[names[0]] = exp.Tuple(expressions=[end.copy() for end in ends])
    return found


def _projection(column: exp.Column, scope: Scope) -> tuple[exp.Expr | None, Scope]:
    """Projection that a column of a scope stands for, of a subquery or of the scope itself; and its scope."""
    sources = [scope.sources.get(column.table)] if column.table else list(scope.sources.values())
    seen = set[int]()
    while sources:
        source = sources.pop(0)
        if not isinstance(source, Scope) or id(source) in seen:
            continue
        seen.add(id(source))
        named, place = _projections(source)
        for name, projection in named:
            if name == column.name and not projection.is_star:
                return projection.unalias(), place
            if projection.is_star:
                sources.extend(place.sources.values())
    own = scope.expression.selects if isinstance(scope.expression, exp.Select) and not column.table else []
    aliased = (each.this for each in own if isinstance(each, exp.Alias) and each.alias == column.name)
    return next(aliased, None), scope


def _resolve(column: exp.Column, scope: Scope, declared: Declared, known: Resolved) -> ColumnRef | None:
    """Column of a table that a column of a scope stands for.

    Args:
        known: Columns found so far, None on the way to one: a recursive CTE, or an alias of its own name,
            ends there. Each is searched once, or stars of stars would double the work at each level.
    """
    current: Scope | None = scope
    while current is not None:
        sources = current.sources
        for source in [sources.get(column.table)] if column.table else sources.values():
            found = _column_of(source, column.name, declared, known)
            if found is not None:
                return found
        current = current.parent
    return None


def _column_of(
    source: exp.Expr | Scope | None, name: str, declared: Declared, known: Resolved
) -> ColumnRef | None:
    if isinstance(source, exp.Table):
        table, columns = declared.get(source.name, ("", {}))
        return (table, columns[name]) if name in columns else None
    if not isinstance(source, Scope) or not isinstance(source.expression, exp.Query):
        return None
    key = (id(source), name)
    if key in known:
        return known[key]
    known[key] = None
    named, place = _projections(source)
    for known_as, projection in named:
        inner = projection.unalias()
        if known_as == name and isinstance(inner, exp.Column):
            known[key] = _resolve(inner, place, declared, known)
            break
        if projection.is_star:
            starred = (_column_of(each, name, declared, known) for each in place.sources.values())
            known[key] = next(filter(None, starred), None)
            if known[key] is not None:
                break
    return known[key]


def _projections(source: Scope) -> tuple[Iterator[tuple[str, exp.Expr]], Scope]:
    """Names and projections of a subquery, with their scope; a set operation has those of its first query."""
    names = source.outer_columns
    while source.set_operation_scopes:
        source = source.set_operation_scopes[0]
    selects = source.expression.selects if isinstance(source.expression, exp.Query) else []
    return zip(names or [each.alias_or_name for each in selects], selects, strict=False), source
