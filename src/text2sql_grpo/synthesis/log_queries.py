"""Golds from logs: read-only statements that run on the database, each once, with how often it ran."""

import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from sqlglot import exp

from text2sql_grpo.grading.gold_result import with_ties_decided
from text2sql_grpo.sql.address import parse_address
from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits
from text2sql_grpo.sql.query import read_query, without_comments, write_query
from text2sql_grpo.synthesis.candidates import stable_number
from text2sql_grpo.synthesis.log_files import Statement
from text2sql_grpo.synthesis.profile import TIMEOUT_S, Profile, Value

MAX_ROWS = 50
MAX_SHAPES = 20_000  # different statements that are kept in memory; literals do not count as a difference
N_TRIED = 5  # statements of one shape, and values of its parameters, that are tried until one has rows
N_ASKED = 5  # rows asked for where the limit is a parameter

_HIDDEN = "reads what is hidden"
_LIMITS = Limits(timeout_s=TIMEOUT_S, max_rows=MAX_ROWS + 1)
_LITERAL = re.compile(r"'(?:[^']|'')*'|\b\d+(?:\.\d+)?\b")
_QUERY_START = re.compile(r"^\s*(SELECT|WITH)\b", re.I | re.M)
_PARAMETER = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|(?P<percent>%(?:\((?P<named>\w+)\))?s\b)"""
    r"""|(?<![\w$])\$(?P<dollar>\w+)(?![\w$])|(?<!@)@(?P<at>[A-Za-z_]\w*)|(?P<mark>\?(?P<number>\d*)(?![?|&]))"""
)
_WRITES = (exp.Insert, exp.Update, exp.Delete, exp.Merge, exp.Create, exp.Drop, exp.Alter, exp.Copy)
_WRITES_OR_LOCKS = (*_WRITES, exp.TruncateTable, exp.Into, exp.Lock)


@dataclass(frozen=True)
class LoggedQuery:
    """A gold query of a log.

    Attributes:
        tree: Its tree; not to be edited.
        calls: How often statements of its shape ran.
    """

    sql: str
    tree: exp.Query
    calls: int


@dataclass
class _Shape:
    """Statements that differ in literals alone; the first few of them."""

    statements: list[Statement] = field(default_factory=list)
    n: int = 0
    calls: int = 0


class _LeftOut(Exception):
    """A statement is left out; the message is the reason."""


def log_queries(
    statements: Iterable[Statement], profile: Profile, *, seed: int = 0
) -> tuple[list[LoggedQuery], Counter[str]]:
    """Queries of a log that can serve as golds, the most frequent first.

    Kept are read-only queries of the database's tables, once for each tree without literals, that return 1 to
    `MAX_ROWS` rows in at most `TIMEOUT_S`, not only NULLs and zeros, the same each time. They read nothing
    that is hidden.

    Args:
        profile: The database, whose stored values fill parameters that the log has no values of.
        seed: Random seed of these values.

    Returns:
        The queries, and the number of all other statements by the reason why they are left out.
    """
    reasons, shapes = Counter[str](), dict[str, _Shape]()
    for statement in statements:
        if not (statement.sql.strip() or statement.reason):
            continue
        key = " ".join(_LITERAL.sub("?", statement.sql).split())
        if statement.reason or (key not in shapes and len(shapes) >= MAX_SHAPES):
            reasons[statement.reason or f"one of more than {MAX_SHAPES:,} shapes"] += 1
            continue
        shape = shapes.setdefault(key, _Shape())
        shape.n, shape.calls = shape.n + 1, shape.calls + statement.calls
        if len(shape.statements) < N_TRIED:
            shape.statements.append(statement)
    reader = _Reader(profile, seed)
    found: dict[str, LoggedQuery] = {}
    for shape in sorted(shapes.values(), key=lambda one: -one.calls):
        try:
            tree, key = reader.tree(shape.statements[0])
            if key in found:
                found[key] = replace(found[key], calls=found[key].calls + shape.calls)
                reasons["a duplicate but for literals"] += shape.n
                continue
            sql, tree = reader.gold(shape.statements)
        except _LeftOut as error:
            reasons[str(error)] += shape.n
            continue
        found[key] = LoggedQuery(sql, tree, shape.calls)
        reasons.update({"a duplicate but for literals": shape.n - 1} if shape.n > 1 else {})
    return sorted(found.values(), key=lambda one: -one.calls), reasons


class _Reader:
    """Reader of one database's statements; its methods raise `_LeftOut` for what can serve as no gold."""

    def __init__(self, profile: Profile, seed: int) -> None:
        self._profile, self._seed = profile, seed
        self._dialect = parse_address(profile.database).dialect
        self._namespaces: dict[str, list[str]] = {}
        for each in profile.schema.relations:
            self._namespaces.setdefault(each.name.lower(), []).append(each.namespace)

    def tree(self, statement: Statement) -> tuple[exp.Query, str]:
        """Tree of a read-only query with bare names of tables, and its text without literals."""
        text = _with_named_parameters(without_comments(statement.sql, self._dialect))
        starts = [found.start() for found in _QUERY_START.finditer(text)]
        # The rest of half a statement may be whole.
        texts = [text, *(text[start:] for start in starts[1:N_TRIED])]
        tree = next((tree for one in texts if (tree := read_query(one, self._dialect).tree)), None)
        if tree is None:
            raise _LeftOut("cannot be parsed, such as half a statement")
        if tree.find(*_WRITES_OR_LOCKS):
            raise _LeftOut("writes or locks")
        if not isinstance(tree, exp.Select | exp.SetOperation):
            raise _LeftOut("a command (SET, BEGIN, EXPLAIN ..)")
        named = {each.alias.lower() for each in tree.find_all(exp.CTE)}
        tables = [each for each in tree.find_all(exp.Table) if each.db or each.name.lower() not in named]
        if not tables:
            raise _LeftOut("reads no table")
        for each in tables:
            namespaces = self._namespaces.get(each.name.lower(), [])
            if not namespaces:
                is_hidden = each.name.lower() in self._profile.hidden_tables
                raise _LeftOut(_HIDDEN if is_hidden else "tables that the database lacks")
            if len(namespaces) == 1:  # as a dbt project or another server qualifies it
                each.set("catalog", None)
                each.set("db", exp.to_identifier(namespaces[0] or None))
        if self._profile.refusal(self._written(tree.transform(_without_parameter))):
            raise _LeftOut(_HIDDEN)
        return tree, self._written(_without_literals(tree))

    def gold(self, statements: list[Statement]) -> tuple[str, exp.Query]:
        """SQL and tree of the first statement, and values, with rows to show."""
        reason = ""
        for statement in statements:
            template = self.tree(statement)[0]
            has_parameters = template.find(exp.Placeholder) is not None
            for attempt in range(N_TRIED if has_parameters and not statement.values else 1):
                tree = template.copy()
                rng = random.Random(stable_number(str(self._seed), statement.sql, str(attempt)))
                self._fill(tree, statement.values, rng)
                failure = self._failure(tree)
                if not failure:
                    return self._as_typed(statement, tree), tree
                reason = reason or failure
                if failure.startswith("takes"):
                    raise _LeftOut(failure)
        raise _LeftOut(reason)

    def _failure(self, tree: exp.Query) -> str:
        """Why a query is no gold; empty if it is one. A LIMIT that cuts nothing is removed from it."""
        outcome = self._run(tree)
        if outcome.status == "timeout":
            return f"takes more than {TIMEOUT_S:g} s"
        if not outcome.is_ok:
            return "fails on the database"
        if outcome.is_volatile:
            return "its result changes (clock, random)"
        if not outcome.rows or all(cell in (None, 0) for row in outcome.rows for cell in row):
            return "no rows, or only NULLs and zeros"
        if outcome.is_truncated or len(outcome.rows) > MAX_ROWS:
            return f"more than {MAX_ROWS} rows"
        limited = [one for one in tree.find_all(exp.Query) if one.args.get("limit")]
        for query in limited:
            wanted = query.args["limit"].expression
            is_counted = query is tree and wanted and wanted.is_int and not tree.args.get("offset")
            is_whole = is_counted and len(outcome.rows) < int(wanted.name)
            if query.args.get("order") is None or is_whole:
                query.set("limit", None)
        if not limited:
            return ""
        if Counter(self._run(tree).rows) != Counter(outcome.rows):
            return "LIMIT without ORDER BY: any rows would do"
        return "LIMIT cuts rows of equal rank" if self._cuts_tie(tree, outcome) else ""

    def _cuts_tie(self, tree: exp.Query, outcome: ExecutionOutcome) -> bool:
        """True if another order of rows of equal rank changes the result, or may."""
        limit, order = tree.args.get("limit"), tree.args.get("order")
        if not (limit and order and tree.is_star):
            decided = map(self._execute, with_ties_decided(tree, self._dialect))
            return any(Counter(one.rows) != Counter(outcome.rows) for one in decided)
        keys = [one.this.copy() for one in order.expressions]
        copy = tree.select(*keys)
        copy.set("limit", exp.Limit(expression=exp.Literal.number(len(outcome.rows) + 1)))
        ranks = [row[-len(keys) :] for row in self._run(copy).rows]
        return not ranks or (len(ranks) > len(outcome.rows) and ranks[-1] == ranks[-2])

    def _as_typed(self, statement: Statement, tree: exp.Query) -> str:
        """SQL of a tree: the statement itself if it is that tree and returns the same."""
        text, written = without_comments(statement.sql, self._dialect).strip(), self._written(tree)
        is_same = read_query(text, self._dialect).tree == tree and not self._profile.refusal(text)
        return text if is_same and self._execute(text).rows == self._execute(written).rows else written

    def _written(self, tree: exp.Expr) -> str:
        sql = write_query(tree, self._dialect)
        if sql is None:
            raise _LeftOut("too long to be written again")
        return sql

    def _run(self, tree: exp.Query) -> ExecutionOutcome:
        return self._execute(self._written(tree))

    def _execute(self, sql: str) -> ExecutionOutcome:
        return self._profile.executor.execute(self._profile.database, sql, limits=_LIMITS)

    def _fill(self, tree: exp.Query, values: tuple[str | None, ...], rng: random.Random) -> None:
        """Replace parameters by values: from the log, else stored values of the column that is compared."""
        owners = tables_of(tree, self._profile.tables)
        drawn: dict[str, exp.Expr] = {}
        for place in list(tree.find_all(exp.Placeholder)):
            name = str(place.this or "")
            if name not in drawn:
                stored = self._compared(place, owners)
                number = int(name[1:]) if re.fullmatch(r"[pq]\d+", name) else 0
                if 0 < number <= len(values):
                    drawn[name] = _literal(values[number - 1], stored)
                elif isinstance(place.parent, exp.Limit | exp.Round):
                    drawn[name] = exp.Literal.number(N_ASKED if isinstance(place.parent, exp.Limit) else 2)
                elif stored:
                    drawn[name] = _literal(_drawn(place, stored, rng), stored)
                else:
                    raise _LeftOut("parameters that no column gives a value")
            place.replace(drawn[name].copy())

    def _compared(self, place: exp.Expr, owners: Mapping[str, str]) -> tuple[Value, ...]:
        """Stored values of the column that a parameter is compared with; empty for none."""
        parent = place.parent
        while isinstance(parent, exp.Cast | exp.Paren | exp.Lower | exp.Upper):
            parent = parent.parent
        if not isinstance(parent, exp.Predicate):
            return ()
        for column in parent.find_all(exp.Column):
            names = [owners.get(column.table.lower(), "")] if column.table else owners.values()
            for profile in filter(None, map(self._profile.tables.get, names)):
                for known, stored in profile.columns.items():
                    if known.lower() == column.name.lower():
                        return stored.values
        return ()


def tables_of(tree: exp.Expr, names: Iterable[str]) -> dict[str, str]:
    """Tables of a query by alias in lower case; `names` are those of all tables."""
    declared = {name.lower(): name for name in names}
    tables = (each for each in tree.find_all(exp.Table) if each.name.lower() in declared)
    return {each.alias_or_name.lower(): declared[each.name.lower()] for each in tables}


def _with_named_parameters(text: str) -> str:
    """Text with each parameter as `:name`: `:p1` for `$1`, `:q1` for the first `?` or `%s`."""
    count = iter(range(1, len(text) + 2))

    def named(found: re.Match[str]) -> str:
        if dollar := found["dollar"]:
            return f":p{dollar}" if dollar.isdigit() else f":{dollar}"
        if found["percent"] or found["mark"]:
            number = found["number"]
            return f":{found['named'] or (f'p{number}' if number else f'q{next(count)}')}"
        return f":{found['at']}" if found["at"] else found[0]

    return _PARAMETER.sub(named, text)


def _without_parameter(node: exp.Expr) -> exp.Expr:
    return exp.null() if isinstance(node, exp.Placeholder) else node


def _without_literals(tree: exp.Query) -> exp.Expr:
    """Tree with one mark for each literal, parameter and list of them, and names in lower case."""

    def plain(node: exp.Expr) -> exp.Expr:
        if isinstance(node, exp.Literal | exp.Placeholder | exp.Null | exp.Boolean):
            return exp.Placeholder()
        if isinstance(node, exp.Neg) and isinstance(node.this, exp.Literal):
            return exp.Placeholder()
        if isinstance(node, exp.In) and not node.args.get("query"):
            node.set("expressions", node.expressions[:1])
        if isinstance(node, exp.Identifier):
            return exp.to_identifier(node.name.lower(), quoted=True)
        return node

    return tree.transform(plain)


def _literal(value: Value | None, stored: tuple[Value, ...]) -> exp.Expr:
    """Literal to compare with stored values: a number unless these are texts."""
    if value is None:
        return exp.null()
    is_number = not any(isinstance(one, str) for one in stored[:100])
    if is_number and re.fullmatch(r"-?\d+(\.\d+)?([eE][-+]?\d+)?", str(value)):
        return exp.Literal.number(value)
    return exp.Literal.string(str(value))


def _drawn(place: exp.Expr, values: tuple[Value, ...], rng: random.Random) -> Value:
    """A stored value; of the middle half for a bound, a word of one for LIKE."""
    parent = place.find_ancestor(exp.Predicate)
    if isinstance(parent, exp.Like | exp.ILike):
        words = [word for word in re.findall(r"[^\W\d_]{3,}", str(rng.choice(values)))]
        return f"%{words[0]}%" if words else "%"
    quarter = len(values) // 4
    if isinstance(parent, exp.Between):
        is_low = place in (parent.args.get("low"), *parent.args["low"].walk())
        return rng.choice(values[: quarter + 1] if is_low else values[-quarter - 1 :])
    if isinstance(parent, exp.GT | exp.GTE | exp.LT | exp.LTE):
        return rng.choice(values[quarter : len(values) - quarter])
    return rng.choice(values)
