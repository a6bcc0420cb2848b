"""Hidden tables and columns: a schema without them, and a check of queries that would read them.

The check reads a query by its parse tree. It refuses more than it must: what it cannot read, and names that
might mean a hidden column.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TypeVar

from sqlglot import exp

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.address import Database, parse_address
from text2sql_grpo.sql.engines import ENGINES
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.failure_text import short_line
from text2sql_grpo.sql.names import dotted_name, quote_name
from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits
from text2sql_grpo.sql.personal import PERSONAL, is_personal
from text2sql_grpo.sql.query import Lexeme, lexemes, quotes_alike, read_query, without_comments
from text2sql_grpo.sql.schema import Schema, Table, View, read_schema

_Relation = TypeVar("_Relation", Table, View)

MAX_NAME_BYTES = 63  # PostgreSQL cuts longer names
ROW_IDS = frozenset(("rowid", "oid", "_rowid_"))  # SQLite's other names of an integer primary key
# Functions in FROM that read no table by its name.
_TABLE_FUNCTIONS = re.compile(
    r"generate_series|range|repeat(_row)?|unnest|jsonb?_(each|array_elements)(_text)?|json_tree"
    r"|jsonb?_object_keys|regexp_split_to_table|string_to_table|regexp_matches"
)
_SOURCES = (exp.Subquery, exp.Lateral, exp.CTE, exp.UDTF, exp.Table)
_STATEMENTS = (exp.Command, exp.Describe, exp.Summarize, exp.Show, exp.Pragma)
_ALL_COLUMNS = (exp.Columns, exp.Pivot, exp.PositionalColumn)
_END = Lexeme("mark", "")
_LISTED = ("name", "column_name")  # where a list of columns holds their names
_NAME_THEM = "name the columns that you need"
_UNREAD = "the query cannot be checked for hidden columns"


@dataclass(frozen=True)
class Hidden:
    """Hidden tables and columns of one database; names are in lower case.

    Attributes:
        schema: The schema without them.
        columns: Hidden columns by table or view. Empty if nothing is hidden.
        visible: Columns that are not hidden, by table or view; none of one that is hidden as a whole.
        functions: Functions that the database defines, which may read anything: no query may call them.
        unmatched: Patterns that name no table and no column: misspelt ones, of a schema that is all there is.
    """

    schema: Schema
    columns: dict[str, frozenset[str]]
    visible: dict[str, frozenset[str]]
    functions: frozenset[str]
    unmatched: tuple[str, ...] = ()

    @property
    def dialect(self) -> str:
        """Name of the database's SQL in sqlglot."""
        return ENGINES[self.schema.dialect].dialect

    def names(self) -> list[str]:
        """Hidden tables, and hidden columns of other tables as `staff.email`, sorted."""
        columns = [(table, column) for table, of_it in self.columns.items() for column in of_it - ROW_IDS]
        return sorted({f"{table}.{column}" if self.visible[table] else table for table, column in columns})

    def refusal(self, sql: str) -> str:
        """Reason for the model why a query must not run; empty if it reads nothing hidden."""
        if not self.columns:
            return ""
        read = read_query(sql, self.dialect)
        text = without_comments(sql, self.dialect)
        if read.tree is None:
            reason = f"{_UNREAD}: {read.reason}"
        elif not quotes_alike(text, self.dialect):
            reason = f"{_UNREAD}: its quotes are ambiguous"
        else:
            reason = _refusal(self, read.tree, list(lexemes(text, self.dialect)))
        return short_line(reason)  # it may hold names of any length

    def shown(self, sql: str, outcome: ExecutionOutcome) -> ExecutionOutcome:
        """Outcome of a query that may run, without hidden names in lists of columns and in errors."""
        if outcome.error and self.columns:  # an engine suggests similar names
            written = {_folded(lexeme.value) for lexeme in lexemes(sql, self.dialect)}
            hidden = frozenset().union(*self.columns, *self.columns.values()) - self.visible.keys() - written
            words = re.split(r"(\w+)", outcome.error)
            return outcome._replace(error="".join("…" if _folded(w) in hidden else w for w in words))
        tree = read_query(sql, self.dialect).tree if self.columns else None
        hidden = self.columns.get(_folded(_described(tree) or "") if tree else "", frozenset())
        places = [i for i, name in enumerate(outcome.columns) if _folded(name) in _LISTED]
        rows = (row for row in outcome.rows if hidden.isdisjoint(_folded(str(row[i])) for i in places))
        return outcome._replace(rows=tuple(rows)) if hidden else outcome


def hide(schema: Schema, patterns: Sequence[str], *, functions: Collection[str] = ()) -> Hidden:
    """Hide tables and columns of a schema.

    A generated column, or one of a view, is hidden if it is made of a hidden one. A view whose columns cannot
    be told apart is hidden as a whole, if its query reads anything hidden.

    Args:
        patterns: `table`, `table.column` (either may begin with its schema and a dot) with `*`, `?` and
            `[..]`, in any case; or `personal` for the columns of `is_personal`.
        functions: Names of functions that the database defines.
    """
    columns: dict[str, frozenset[str]] = defaultdict(frozenset)
    names: dict[str, frozenset[str]] = defaultdict(frozenset)
    for relation in schema.relations:
        names[_folded(relation.name)] |= {_folded(column.name) for column in relation.columns}
        columns[_folded(relation.name)] |= _matching(relation, patterns, schema.dialect)
    before = None
    while before != columns:
        before = dict(columns)
        found = {table: of_it for table, of_it in columns.items() if of_it}
        visible = {table: of_it - columns[table] for table, of_it in names.items()}
        hidden = Hidden(schema, found, visible, frozenset(map(_folded, functions)))
        for table in schema.tables if found else ():
            columns[_folded(table.name)] |= _computed(table, hidden)
        for view in schema.views if found else ():
            columns[_folded(view.name)] |= _derived(view, hidden)
    others = [pattern for pattern in patterns if pattern != PERSONAL]
    unmatched = (p for p in others if not any(_matching(r, [p], schema.dialect) for r in schema.relations))
    return replace(hidden, schema=_pruned(hidden), unmatched=tuple(unmatched))


def read_hidden(
    database: Database, patterns: Sequence[str], executor: SQLExecutor, *, name: str = ""
) -> Hidden:
    """Read the schema of a database, and hide tables and columns of it; see `hide`.

    Args:
        name: Name of the database in its schema; empty for its own.

    Raises:
        DataError: The schema, or the list of the database's own functions, cannot be read.
    """
    schema = read_schema(database)
    schema = replace(schema, name=name or schema.name)
    found, functions_sql = hide(schema, patterns), parse_address(database).engine.functions_sql
    if not found.columns or not functions_sql:
        return found
    answer = executor.execute(database, functions_sql, limits=Limits(timeout_s=60.0))
    if not answer.is_ok or answer.is_truncated:
        raise DataError(f"cannot list the functions of {schema.name}, for data.hide: {answer.error}")
    return hide(schema, patterns, functions=[str(name) for (name,) in answer.rows])


def _folded(name: str) -> str:
    return name.encode(errors="replace")[:MAX_NAME_BYTES].decode(errors="ignore").lower()


def _matching(relation: Table | View, patterns: Sequence[str], dialect: str) -> frozenset[str]:
    """Columns that patterns name."""
    tables = [relation.name.lower(), f"{relation.schema_name}.{relation.name}".lower()]
    found: set[str] = set()
    for column in relation.columns:
        places = [*tables, *(f"{table}.{column.name.lower()}" for table in tables)]
        is_named = any(fnmatchcase(place, p.lower()) for p in patterns for place in places if p != PERSONAL)
        if is_named or (PERSONAL in patterns and is_personal(column)):
            is_row_id = dialect == "sqlite" and column.is_primary_key and "int" in column.type.lower()
            found |= {_folded(column.name), *(ROW_IDS if is_row_id else ())}
    return frozenset(found)


def _pruned(hidden: Hidden) -> Schema:
    """Schema without the hidden parts, and without keys that name them."""

    def is_shown(table: str, names: Collection[str] = ()) -> bool:
        has_columns = bool(hidden.visible.get(_folded(table), True)) or _folded(table) not in hidden.columns
        return has_columns and hidden.columns.get(_folded(table), frozenset()).isdisjoint(map(_folded, names))

    def without(relation: _Relation) -> _Relation:
        kept = tuple(column for column in relation.columns if is_shown(relation.name, [column.name]))
        if any(column.is_primary_key and column not in kept for column in relation.columns):
            kept = tuple(replace(column, is_primary_key=False) for column in kept)  # a part is no key
        return replace(relation, columns=kept)

    def without_keys(table: Table) -> Table:
        own = [key for key in table.foreign_keys if is_shown(table.name, key.columns)]
        foreign_keys = tuple(key for key in own if is_shown(key.table, key.references))
        keys = tuple(key for key in table.keys if is_shown(table.name, key))
        return replace(without(table), foreign_keys=foreign_keys, keys=keys)

    schema = hidden.schema
    tables = tuple(without_keys(table) for table in schema.tables if is_shown(table.name))
    return replace(
        schema, tables=tables, views=tuple(without(view) for view in schema.views if is_shown(view.name))
    )


def _computed(table: Table, hidden: Hidden) -> set[str]:
    """Generated columns of a table that are made of hidden ones."""
    source = dotted_name(table.namespace, table.name, hidden.schema.dialect)
    found = set()
    for column in table.columns if _folded(table.name) in hidden.columns else ():
        if column.is_generated:
            tree = read_query(f"SELECT {column.expression} FROM {source}", hidden.dialect).tree
            if tree is None or _refusal(hidden, tree):
                found.add(_folded(column.name))
    return found


def _derived(view: View, hidden: Hidden) -> set[str]:
    """Columns of a view that are made of hidden ones."""
    if not view.sql:  # a foreign table
        return set()
    names = [_folded(column.name) for column in view.columns]
    tree = read_query(view.sql, hidden.dialect).tree
    query = tree.expression if isinstance(tree, exp.Create) else tree
    if isinstance(query, exp.Query) and not _refusal(hidden, query):
        return set()
    if not isinstance(query, exp.Select) or len(query.expressions) != len(names):
        return set(names)
    plain = query.copy()  # conditions are the owner's choice
    for part in ("where", "group", "having", "order", "qualify", "windows"):
        plain.set(part, None)
    for join in plain.args.get("joins") or ():
        join.set("on", None)
    parts = zip(names, query.expressions, strict=True)
    return {name for name, part in parts if _refusal(hidden, plain.select(part.copy(), append=False))}


def _described(tree: exp.Expr) -> str | None:
    """Table whose columns a statement lists, with their names; None for another statement."""
    if isinstance(tree, exp.Describe):
        return tree.this.name if isinstance(tree.this, exp.Table) else None
    if isinstance(tree, exp.Pragma):
        is_listed = isinstance(tree.this, exp.EQ) and tree.this.name.lower() in ("table_info", "table_xinfo")
        return str(tree.this.expression.name) if is_listed else None
    selects, tables = list(tree.find_all(exp.Select)), list(tree.find_all(exp.Table))
    is_one = selects == [tree] and len(tables) == 1 and "where" in tree.args
    is_plain = is_one and all(isinstance(one, exp.Column | exp.Star) for one in tree.expressions)
    is_plain = is_plain and any(one.is_star or _folded(one.name) in _LISTED for one in tree.expressions)
    if not is_plain or tables[0].sql().lower() != "information_schema.columns":
        return None
    where = tree.args["where"].this
    for part in where.flatten() if isinstance(where, exp.And) else [where]:
        if isinstance(part, exp.EQ) and part.this.name.lower() == "table_name" and part.expression.is_string:
            return str(part.expression.name)
    return None


class _Refused(Exception):
    """The query reads something hidden, or might."""


def _refusal(hidden: Hidden, tree: exp.Expr, words: Sequence[Lexeme] = ()) -> str:
    try:
        _Check(hidden, tree, words).run()
    except _Refused as refused:
        return str(refused)
    return ""


class _Check:
    """Check of one query; each method raises `_Refused` if the query might read something hidden."""

    def __init__(self, hidden: Hidden, tree: exp.Expr, words: Sequence[Lexeme]) -> None:
        self._hidden, self._tree, self._dialect = hidden, tree, hidden.dialect
        spoken = [word for word in words if word.kind != "text"]
        self._words = [
            (_folded(word.value), word.kind, after.value) for word, after in pairwise([*spoken, _END])
        ]
        relations = Counter(_folded(relation.name) for relation in hidden.schema.relations)
        self._ctes = {_folded(cte.alias) for cte in tree.find_all(exp.CTE)}
        self._unsure = self._ctes | {name for name, n in relations.items() if n > 1}
        self._sources: dict[int, list[exp.Table]] = defaultdict(list)  # by their SELECT
        self._names: frozenset[str] = frozenset()  # hidden columns of the tables of the query
        self._rows: dict[str, frozenset[str]] = defaultdict(frozenset)  # by name or alias of their table
        self._others = {_folded(one.alias_or_name) for one in tree.find_all(*_SOURCES)}  # all that is read

    def run(self) -> None:
        hidden, tree = self._hidden, self._tree
        for name, _, after in self._words:
            is_column = name in hidden.functions and any(name in one for one in hidden.visible.values())
            if name in hidden.functions and (after == "(" or not is_column):
                raise _Refused(f"the function {name} might read hidden columns")
            # pg_get_viewdef writes the query of a view, col_description a comment.
            if name.startswith(("pg_get_", "col_description")) and after == "(":
                raise _Refused(f"the function {name} might name hidden columns")
        if (described := _described(tree)) is not None:
            return self._check_name(described)
        if not isinstance(tree, exp.Query | exp.Values) or tree.find(*_STATEMENTS):
            raise _Refused(f"only SELECT and {ENGINES[hidden.schema.dialect].columns_sql} are allowed")
        for table in tree.find_all(exp.Table):
            self._check_table(table)
        for one in tree.find_all(exp.In):
            if self._dialect == "sqlite" and (field := one.args.get("field")):  # x IN table
                self._check_name(field.name)
                self._refuse_rows(field.name, _folded(field.name) in hidden.columns)
        self._check_words()
        if not self._rows:
            return
        if tree.find(*_ALL_COLUMNS):
            raise _Refused(f"the query might read hidden columns: {_NAME_THEM}")
        for join in tree.find_all(exp.Join):
            using = {_folded(one.name) for one in join.args.get("using") or ()}
            if join.method == "NATURAL" or not using.isdisjoint(self._names):
                raise _Refused("the join might compare hidden columns: join ON columns that are not hidden")
        for star in tree.find_all(exp.Star):
            self._check_star(star)
        for column in tree.find_all(exp.Column, exp.Dot):
            self._check_form(column)
        for node in tree.find_all(exp.Identifier, exp.Var):
            if _folded(node.name) in self._names | self._rows.keys():
                self._check_mention(node, _folded(node.name))

    def _refuse_rows(self, name: str, is_refused: bool) -> None:
        if is_refused:
            raise _Refused(f"{name} has hidden columns: {_NAME_THEM}, not *")

    def _check_name(self, name: str) -> None:
        if _folded(name) not in self._hidden.visible.keys() | self._ctes:
            raise _Refused(f"no table {name} in the schema")
        if _folded(name) in self._hidden.columns and not self._hidden.visible[_folded(name)]:
            raise _Refused(f"table {name} is hidden")

    def _check_table(self, table: exp.Table) -> None:
        if table.this is None:  # ROWS FROM
            raise _Refused(f"{_UNREAD}: a table has no name")
        if not isinstance(table.this, exp.Identifier):
            name = table.this.name
            if isinstance(table.this, exp.Anonymous) and not _TABLE_FUNCTIONS.fullmatch(name.lower()):
                raise _Refused(f"no table {name} in the schema")
            return
        self._check_name(table.name)
        self._sources[id(table.find_ancestor(exp.Select))].append(table)
        hidden = self._hidden.columns.get(_folded(table.name), frozenset())
        self._names |= hidden
        for row in _row_names(table) if hidden else ():
            self._rows[row] |= hidden
        for node in _joined(table) if hidden else ():
            if node.args.get("alias") and node.args["alias"].columns:
                raise _Refused(f"{table.name} has hidden columns: give its columns no other names")

    def _check_words(self) -> None:
        """Check that the tree holds every mention of a hidden thing that the text holds."""
        seen = Counter(_folded(node.name) for node in self._tree.find_all(exp.Identifier, exp.Var))
        written = Counter((name, kind) for name, kind, after in self._words if after != "(")
        for name in self._hidden.columns.keys() | self._names | self._rows.keys():
            is_keyword = quote_name(name, self._hidden.schema.dialect) != name
            if written[name, "name"] + (not is_keyword) * written[name, "word"] > seen[name]:
                raise _Refused(f"{_UNREAD}: {name} is in an unusual place")

    def _check_star(self, star: exp.Star) -> None:
        parent, select = star.parent, star.find_ancestor(exp.Select)
        if isinstance(parent, exp.Column):
            return self._refuse_rows(parent.table, _folded(parent.table) in self._rows)
        is_exists = select is not None and select is parent and isinstance(select.parent, exp.Exists)
        for table in self._sources[id(select)] if not is_exists and not isinstance(parent, exp.Count) else ():
            self._refuse_rows(table.name, _folded(table.name) in self._rows)

    def _check_form(self, node: exp.Expr) -> None:
        """Check that a column is written as a name, and is no function of a row: PostgreSQL's `s.to_json`."""
        last = node.this if isinstance(node, exp.Column) else node.expression
        if not isinstance(last, exp.Identifier | exp.Star | exp.Func):
            raise _Refused(f"{_UNREAD}: write {last.name} without quotes")
        is_of_row = isinstance(node, exp.Column) and _folded(node.table) in self._rows
        if self._dialect == "postgres" and is_of_row and isinstance(last, exp.Identifier):
            tables = [_folded(table.name) for tables in self._sources.values() for table in tables]
            if not any(_folded(last.name) in self._hidden.visible.get(table, ()) for table in tables):
                raise _Refused(f"no column {last.name} that is not hidden")

    def _check_mention(self, node: exp.Expr, name: str) -> None:
        """Check a name that is that of a hidden column, or of a table whose rows might be taken whole."""
        parent, place = node.parent, node.arg_key
        if isinstance(parent, exp.Table | exp.TableAlias) and place != "columns":
            return
        if isinstance(parent, exp.Alias) and place == "alias" and self._has_as(name):
            return
        if not isinstance(parent, exp.Column):
            raise _Refused(f"{name} is the name of a hidden column or of its table: {_NAME_THEM}")
        table = _folded(parent.table)
        is_struct = name in self._names and (self._dialect == "duckdb" or name not in self._others)
        is_hidden = name in self._rows[table] if table in self._rows else table not in self._others
        if self._dialect == "duckdb" and name in self._rows:  # `main.staff` is a row, unless main has staff
            sources = self._tree.find_all(*_SOURCES)
            named = [source for source in sources if _folded(source.alias_or_name) == table]
            is_hidden = is_hidden or not all(name in self._columns_of(source) for source in named)
        if is_struct if place != "this" else is_hidden if table else self._is_hidden_bare(parent, name):
            raise _Refused(f"column {table + '.' if table else ''}{name} is hidden: {_NAME_THEM}")

    def _has_as(self, name: str) -> bool:
        """True if AS stands before each alias of this name, which is then nothing else."""
        n_aliases = sum(_folded(alias.alias) == name for alias in self._tree.find_all(exp.Alias))
        n_written = sum(word == "as" and _folded(after) == name for word, _, after in self._words)
        return not self._words or n_written >= n_aliases

    def _is_hidden_bare(self, column: exp.Column, name: str) -> bool:
        """True if a name without its table might be a hidden column, or a whole row that holds one."""
        select = column.find_ancestor(exp.Select)
        is_outside = select is None
        while select is not None:
            sources = self._sources[id(select)]
            if any(name in self._hidden.columns.get(_folded(source.name), ()) for source in sources):
                return True
            if any(name in self._columns_of(source) for source in sources):
                return False
            if name in self._rows and any(name in _row_names(source) for source in sources):
                return True
            select = select.find_ancestor(exp.Select)
        return is_outside

    def _columns_of(self, source: exp.Expr) -> frozenset[str]:
        """Columns that a table or sub-query surely has."""
        alias, name = source.args.get("alias"), _folded(source.name)
        if alias and alias.columns:
            return frozenset(_folded(column.name) for column in alias.columns)
        if not isinstance(source, exp.Table):
            names = source.this.named_selects if isinstance(source.this, exp.Query) else []
            return frozenset(map(_folded, names))
        if name not in self._unsure:
            return self._hidden.visible.get(name, frozenset())
        found = [self._columns_of(cte) for cte in self._tree.find_all(exp.CTE) if _folded(cte.alias) == name]
        found += [self._hidden.visible[name]] if name in self._hidden.visible else []
        return frozenset.intersection(*found) if name in self._ctes else frozenset()


def _joined(table: exp.Table) -> Iterator[exp.Expr]:
    """A table, and the joins in parentheses that it is a part of."""
    node: exp.Expr | None = table
    while node is not None and not isinstance(node, exp.Select):
        yield node
        node = node.parent


def _row_names(table: exp.Table) -> set[str]:
    """Names of rows that hold those of a table."""
    return {_folded(table.name), *(_folded(node.alias_or_name) for node in _joined(table))} - {""}
