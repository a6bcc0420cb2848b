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

from text2sql_grpo.sql.engines import ENGINES
from text2sql_grpo.sql.names import quote_name
from text2sql_grpo.sql.outcome import ExecutionOutcome
from text2sql_grpo.sql.personal import is_personal
from text2sql_grpo.sql.query import Lexeme, lexemes, quotes_alike, read_query, without_comments
from text2sql_grpo.sql.schema_choice import LIST_COLUMNS
from text2sql_grpo.sql.schema_types import Schema, Table, View

_Relation = TypeVar("_Relation", Table, View)
PERSONAL = "personal"  # in a list of patterns: the columns of `is_personal`

MAX_NAME_BYTES = 63  # PostgreSQL cuts longer names
_ROW_IDS = frozenset(("rowid", "oid", "_rowid_"))  # SQLite's other names of an integer primary key
# Functions in FROM that read no table by its name.
_TABLE_FUNCTIONS = frozenset(
    """
    generate_series range repeat repeat_row unnest json_each json_tree jsonb_each json_each_text
    jsonb_each_text json_array_elements jsonb_array_elements json_array_elements_text json_object_keys
    jsonb_array_elements_text jsonb_object_keys regexp_split_to_table string_to_table regexp_matches
    """.split()  # noqa: SIM905 (a list would take 10 lines)
)
_CATALOGUE = re.compile("(pragma|duckdb|query)_|query$|(summary|has_any_column_privilege)$")
_STATEMENTS = (exp.Command, exp.Describe, exp.Summarize, exp.Show, exp.Pragma)
_ALL_COLUMNS = (exp.Columns, exp.Pivot, exp.PositionalColumn)
_END = Lexeme("mark", "")
_NAME_THEM = "name the columns that you need"


@dataclass(frozen=True)
class Hidden:
    """Hidden tables and columns of one database, and its schema without them.

    Attributes:
        schema: The schema without them.
        columns: Hidden columns of each relation; both in lower case. Empty if nothing is hidden.
        tables: Relations that are hidden as a whole.
        functions: Functions of the database's own, which may read anything; no query may call them.
        visible: Columns of each relation that are not hidden.
    """

    schema: Schema
    columns: dict[str, frozenset[str]]
    tables: frozenset[str]
    functions: frozenset[str]
    visible: dict[str, frozenset[str]]

    def names(self) -> list[str]:
        """Hidden tables, and hidden columns of the others as `staff.email`, sorted."""
        columns = [(table, column) for table, of_it in self.columns.items() for column in of_it - _ROW_IDS]
        return sorted({table if table in self.tables else f"{table}.{column}" for table, column in columns})

    def refusal(self, sql: str) -> str:
        """Why a query must not run, for the model; empty if it reads nothing hidden."""
        if not self.columns:
            return ""
        dialect = ENGINES[self.schema.dialect].dialect
        read = read_query(sql, dialect)
        if read.tree is None:
            return f"the query cannot be checked for hidden columns: {read.reason}"
        text = without_comments(sql, dialect)
        if not quotes_alike(text, dialect):
            return "the query cannot be checked for hidden columns: its quotes are ambiguous"
        table = _described(read.tree)
        if table is not None:
            is_known = _folded(table) in self.visible and _folded(table) not in self.tables
            return "" if is_known else f"no table {table} in the schema"
        try:
            _Check(self, read.tree, list(lexemes(text, dialect)), dialect).run()
        except _Refused as refused:
            return str(refused)
        return ""

    def shown(self, sql: str, outcome: ExecutionOutcome) -> ExecutionOutcome:
        """Outcome of a query that may run, without hidden names in lists of columns and in errors."""
        if not self.columns:
            return outcome
        if outcome.error:  # an engine suggests similar names
            names = frozenset().union(*self.columns.values(), self.tables) - {
                _folded(lexeme.value) for lexeme in lexemes(sql, ENGINES[self.schema.dialect].dialect)
            }
            words = re.split(r"(\w+)", outcome.error)
            return outcome._replace(error="".join("…" if _folded(w) in names else w for w in words))
        tree = read_query(sql, ENGINES[self.schema.dialect].dialect).tree
        table = None if tree is None else _described(tree)
        if table is None:
            return outcome
        hidden = self.columns.get(_folded(table), frozenset())
        rows = [row for row in outcome.rows if not any(_folded(str(cell)) in hidden for cell in row)]
        return outcome._replace(rows=tuple(rows))


def hide(schema: Schema, patterns: Sequence[str], *, functions: Collection[str] = ()) -> Hidden:
    """Hide tables and columns of a schema.

    A column of a view is hidden if it is made of a hidden one. A view whose columns cannot be told apart is
    hidden as a whole, if its query reads anything hidden.

    Args:
        patterns: `table`, `table.column` (either may begin with its namespace and a dot) with `*`, `?` and
            `[..]`, in any case; or `personal` for the columns of `is_personal`.
        functions: Names of functions that the database defines.
    """
    names: dict[str, set[str]] = defaultdict(set)
    hidden: dict[str, set[str]] = defaultdict(set)
    for relation in schema.relations:
        table = _folded(relation.name)
        names[table] |= {_folded(column.name) for column in relation.columns}
        hidden[table] |= _matching(relation, patterns, schema.dialect)
    found = _hidden(schema, names, hidden, functions)
    while found.columns:
        before = found.columns
        for view in schema.views:
            hidden[_folded(view.name)] |= _derived(view, found)
        found = _hidden(schema, names, hidden, functions)
        if found.columns == before:
            break
    return found


def _hidden(
    schema: Schema, names: dict[str, set[str]], hidden: dict[str, set[str]], functions: Collection[str]
) -> Hidden:
    columns = {table: frozenset(of_it) for table, of_it in hidden.items() if of_it}
    tables = frozenset(table for table, of_it in columns.items() if names[table] <= of_it)
    relations: dict[str, list[frozenset[str]]] = defaultdict(list)
    for relation in schema.relations:  # of equal names, only columns of both are known to be visible
        relations[_folded(relation.name)].append(
            frozenset(_folded(column.name) for column in relation.columns)
        )
    visible = {
        table: frozenset.intersection(*each) - columns.get(table, frozenset())
        for table, each in relations.items()
    }
    own = frozenset(map(_folded, functions))
    return Hidden(_pruned(schema, columns, tables), columns, tables, own, visible)


def _folded(name: str) -> str:
    return name.encode(errors="replace")[:MAX_NAME_BYTES].decode(errors="ignore").lower()


def _matching(relation: Table | View, patterns: Sequence[str], dialect: str) -> set[str]:
    """Columns that patterns name."""
    table = relation.name.lower()
    tables = [table, f"{relation.namespace}.{table}".lower()]
    found = set()
    for column in relation.columns:
        places = [*tables, *(f"{place}.{column.name.lower()}" for place in tables)]
        is_named = any(fnmatchcase(place, p.lower()) for p in patterns for place in places if p != PERSONAL)
        if is_named or (PERSONAL in patterns and is_personal(column)):
            found.add(_folded(column.name))
            if dialect == "sqlite" and column.is_primary_key and "int" in column.type.lower():
                found |= _ROW_IDS
    return found


def _pruned(schema: Schema, columns: dict[str, frozenset[str]], tables: frozenset[str]) -> Schema:
    def is_shown(table: str, names: Collection[str]) -> bool:
        return columns.get(_folded(table), frozenset()).isdisjoint(map(_folded, names))

    def without(relation: _Relation) -> _Relation:
        return replace(
            relation, columns=tuple(c for c in relation.columns if is_shown(relation.name, [c.name]))
        )

    if not columns:
        return schema
    kept = tuple(
        replace(
            without(table),
            foreign_keys=tuple(
                key
                for key in table.foreign_keys
                if is_shown(table.name, key.columns)
                and is_shown(key.table, key.references)
                and _folded(key.table) not in tables
            ),
            keys=tuple(key for key in table.keys if is_shown(table.name, key)),
        )
        for table in schema.tables
        if _folded(table.name) not in tables
    )
    views = tuple(without(view) for view in schema.views if _folded(view.name) not in tables)
    return replace(schema, tables=kept, views=views)


def _derived(view: View, hidden: Hidden) -> set[str]:
    """Columns of a view that are made of hidden ones."""
    names = [_folded(column.name) for column in view.columns]
    dialect = ENGINES[hidden.schema.dialect].dialect
    tree = read_query(view.sql, dialect).tree
    created = tree.expression if isinstance(tree, exp.Create) else tree
    if not isinstance(created, exp.Query):
        return set(names)
    if not _Check(hidden, created, [], dialect).refused():
        return set()
    if not isinstance(created, exp.Select) or len(created.expressions) != len(names):
        return set(names)
    found = set()
    for name, made_of in zip(names, created.expressions, strict=True):
        one = created.copy()
        one.set("expressions", [made_of.copy()])
        for part in ("where", "group", "having", "order", "qualify", "windows"):
            one.set(part, None)
        for join in one.args.get("joins") or ():
            join.set("on", None)
        if _Check(hidden, one, [], dialect).refused():
            found.add(name)
    return found


def _described(tree: exp.Expr) -> str | None:
    """Table whose columns a statement lists, and nothing else; None for another statement."""
    if isinstance(tree, exp.Describe):
        return tree.this.name if isinstance(tree.this, exp.Table) else None
    if isinstance(tree, exp.Pragma):
        call = tree.this
        is_listed = isinstance(call, exp.EQ) and call.this.name.lower() in ("table_info", "table_xinfo")
        return call.expression.name if is_listed else None
    tables, where = list(tree.find_all(exp.Table)), tree.args.get("where")
    if len(tables) != 1 or [part.name.lower() for part in tables[0].parts] != [
        "information_schema",
        "columns",
    ]:
        return None
    is_plain = isinstance(tree, exp.Select) and all(
        isinstance(one, exp.Column | exp.Star) for one in tree.expressions
    )
    if where is None or not is_plain or len(list(tree.find_all(exp.Select))) > 1:
        return None
    for part in where.this.flatten() if isinstance(where.this, exp.And) else [where.this]:
        if isinstance(part, exp.EQ) and part.this.name.lower() == "table_name" and part.expression.is_string:
            return str(part.expression.name)
    return None


class _Refused(Exception):
    """The query reads something hidden, or might."""


class _Check:
    """Check of one query."""

    def __init__(self, hidden: Hidden, tree: exp.Expr, words: list[Lexeme], dialect: str) -> None:
        self._hidden, self._tree, self._dialect = hidden, tree, dialect
        self._words = [word for word in words if word.kind != "text"]
        self._ctes = {_folded(cte.alias) for cte in tree.find_all(exp.CTE)}
        self._sources: dict[int, list[exp.Table]] = defaultdict(list)
        self._names: frozenset[str] = frozenset()  # hidden columns of the tables of the query
        self._rows: dict[str, frozenset[str]] = {}  # hidden columns by name or alias of a table
        self._others = {
            _folded(node.alias)
            for node in tree.find_all(exp.Subquery, exp.Lateral, exp.CTE, exp.UDTF, exp.Table)
        }  # names of anything else
        self._known: frozenset[str] = frozenset()  # columns of the tables that are not hidden

    def refused(self) -> bool:
        try:
            self.run()
        except _Refused:
            return True
        return False

    def run(self) -> None:
        """Raise `_Refused` if the query might read something hidden."""
        hidden, tree = self._hidden, self._tree
        if not isinstance(tree, exp.Query | exp.Values) or tree.find(*_STATEMENTS):
            raise _Refused(f"only SELECT and {LIST_COLUMNS[hidden.schema.dialect]} are allowed")
        self._check_functions()
        for table in tree.find_all(exp.Table):
            self._check_table(table)
        if self._dialect == "sqlite":
            for name in (one.args["field"].name for one in tree.find_all(exp.In) if one.args.get("field")):
                self._check_name(name)  # of `x IN table`
                if _folded(name) in hidden.columns:
                    raise _Refused(f"{name} has hidden columns: {_NAME_THEM}")
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
        for name in tree.find_all(exp.Identifier, exp.Var):
            if _folded(name.name) in self._names | self._rows.keys():
                self._check_mention(name)
        for column in tree.find_all(exp.Column, exp.Dot):
            self._check_form(column)

    def _check_functions(self) -> None:
        for node in self._tree.find_all(exp.Anonymous):
            if _CATALOGUE.match(node.name.lower()):
                raise _Refused(f"{node.name} is not allowed where columns are hidden")
        columns = frozenset().union(*self._hidden.visible.values())
        for word, after in pairwise([*self._words, _END]):
            name = _folded(word.value)
            if name in self._hidden.functions and (after.value == "(" or name not in columns):
                raise _Refused(f"the function {name} might read hidden columns")

    def _check_name(self, name: str) -> None:
        if _folded(name) in self._hidden.tables:
            raise _Refused(f"table {name} is hidden")
        if _folded(name) not in self._hidden.visible and _folded(name) not in self._ctes:
            raise _Refused(f"no table {name} in the schema")

    def _check_table(self, table: exp.Table) -> None:
        if not isinstance(table.this, exp.Identifier):
            if isinstance(table.this, exp.Anonymous) and table.this.name.lower() not in _TABLE_FUNCTIONS:
                raise _Refused(f"no table {table.this.name} in the schema")
            return
        name, select = _folded(table.name), table.find_ancestor(exp.Select)
        self._check_name(name)
        self._sources[id(select)].append(table)
        self._known |= self._hidden.visible.get(name, frozenset())
        hidden = self._hidden.columns.get(name)
        if hidden is None:
            self._others |= {name, _folded(table.alias_or_name)}
            return
        self._names |= hidden
        for node in _joined(table):
            alias = node.args.get("alias")
            if isinstance(alias, exp.TableAlias) and alias.columns:
                raise _Refused(f"{name} has hidden columns: give its columns no other names")
        for row in (name, *_row_names(table)):
            self._rows[row] = self._rows.get(row, frozenset()) | hidden

    def _check_words(self) -> None:
        """Check that the tree holds every mention of a hidden thing that the text holds."""
        seen = Counter(_folded(name.name) for name in self._tree.find_all(exp.Identifier, exp.Var))
        written = Counter(
            (_folded(word.value), word.kind)
            for word, after in pairwise([*self._words, _END])
            if after.value != "("
        )
        for name in self._hidden.columns.keys() | self._names | self._rows.keys():
            is_bare = quote_name(name, self._hidden.schema.dialect) == name  # no keyword
            if written[name, "name"] + is_bare * written[name, "word"] > seen[name]:
                raise _Refused(
                    f"the query cannot be checked for hidden columns: {name} is in an unusual place"
                )

    def _check_star(self, star: exp.Star) -> None:
        parent, select = star.parent, star.find_ancestor(exp.Select)
        if isinstance(parent, exp.Column):
            names = [_folded(parent.table)]
        elif isinstance(parent, exp.Count) or (
            select and select is parent and isinstance(select.parent, exp.Exists)
        ):
            names = []
        else:
            names = [_folded(table.name) for table in self._sources[id(select)]]
        for name in names:
            if name in self._rows:
                raise _Refused(f"{name} has hidden columns: {_NAME_THEM}, not *")

    def _check_mention(self, node: exp.Expr) -> None:
        """Check a name that is that of a hidden column, or of a table whose rows might be taken whole."""
        name, parent = _folded(node.name), node.parent
        if isinstance(parent, exp.Table | exp.TableAlias) and node.arg_key != "columns":
            return
        if not isinstance(parent, exp.Column):
            raise _Refused(f"{name} is the name of a hidden column or of its table: {_NAME_THEM}")
        if node.arg_key == "this":
            self._check_column(parent, name)
        elif name in self._names and (
            self._dialect == "duckdb" or name not in self._rows.keys() | self._others
        ):
            raise _Refused(f"column {name} is hidden; {_NAME_THEM}")  # a part of a struct

    def _check_column(self, column: exp.Column, name: str) -> None:
        table = _folded(column.table)
        if table in self._rows:
            if name in self._rows[table]:
                raise _Refused(f"column {table}.{name} is hidden; {_NAME_THEM}")
            return
        if table:
            if table not in self._others:
                raise _Refused(f"{table}.{name} might be hidden; {_NAME_THEM}")
            return
        select = column.find_ancestor(exp.Select)
        while select is not None:
            sources = self._sources[id(select)]
            for source in sources:
                if name in self._hidden.columns.get(_folded(source.name), ()):
                    raise _Refused(f"column {_folded(source.name)}.{name} is hidden; {_NAME_THEM}")
            if any(name in self._columns_of(source) for source in sources):
                return
            if any(name in _row_names(one) for one in sources if _folded(one.name) in self._hidden.columns):
                raise _Refused(f"{name} has hidden columns: {_NAME_THEM}")
            select = select.find_ancestor(exp.Select)
        if column.find_ancestor(exp.Select) is None:
            raise _Refused(f"column {name} is hidden; {_NAME_THEM}")

    def _columns_of(self, source: exp.Table) -> frozenset[str]:
        """Columns by which a name is surely meant in the scope of this table."""
        alias = source.args.get("alias")
        is_certain = _folded(source.name) not in self._ctes and not (alias and alias.columns)
        return self._hidden.visible[_folded(source.name)] if is_certain else frozenset()

    def _check_form(self, node: exp.Expr) -> None:
        """Check that a column is written as a name, and is no function of a row: PostgreSQL's `s.to_json`."""
        last = node.this if isinstance(node, exp.Column) else node.expression
        if not isinstance(last, exp.Identifier | exp.Star | exp.Func):
            raise _Refused(
                f"the query cannot be checked for hidden columns: write {last.name} without quotes"
            )
        table = _folded(node.table) if isinstance(node, exp.Column) else ""
        is_known = isinstance(last, exp.Star) or _folded(last.name) in self._known
        if self._dialect == "postgres" and table in self._rows and not is_known:
            raise _Refused(f"no column {last.name} in {table}")


def _joined(table: exp.Table) -> Iterator[exp.Expr]:
    """A table, and the joins in parentheses that it is a part of."""
    node: exp.Expr | None = table
    while node is not None and not isinstance(node, exp.Select):
        yield node
        node = node.parent


def _row_names(table: exp.Table) -> set[str]:
    """Names of rows that hold those of a table."""
    return {_folded(node.alias_or_name) for node in _joined(table)} - {""}
