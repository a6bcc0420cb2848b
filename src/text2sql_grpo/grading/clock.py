"""Queries as of a later day: an answer that reads the clock where its gold query does not is right today."""

from sqlglot import exp

from text2sql_grpo.sql.engines import DIALECTS
from text2sql_grpo.sql.query import read_query, write_query

_DAY, _TIME = "2087-06-15", "12:00:00"  # later: what "until today" selects, it selects then too
_DATES: tuple[type[exp.Expr], ...] = (exp.CurrentDate,)
_MOMENTS: tuple[type[exp.Expr], ...] = (exp.CurrentTimestamp, exp.CurrentDatetime, exp.Localtimestamp)
_TIMES: tuple[type[exp.Expr], ...] = (exp.CurrentTime, exp.Localtime)
_NAMED = {
    "TODAY": "DATE",
    **dict.fromkeys(("NOW", "CLOCK_TIMESTAMP", "STATEMENT_TIMESTAMP", "TRANSACTION_TIMESTAMP"), "TIMESTAMP"),
    **dict.fromkeys(("GET_CURRENT_TIMESTAMP", "CURRENT_LOCALTIMESTAMP"), "TIMESTAMP"),
}
_IMPLICIT = ("DATE", "TIME", "DATETIME", "JULIANDAY", "UNIXEPOCH")  # of SQLite: without arguments, of now


def at_later_time(sql: str, dialect: str = "sqlite") -> str:
    """Query in which each reading of the clock is a fixed moment of 2087; as it is if it reads none.

    Also as it is if sqlglot cannot parse it, or cannot write it.

    >>> at_later_time("SELECT a FROM t WHERE d > date('now', '-3 days') OR d = CURRENT_DATE")
    "SELECT a FROM t WHERE d > DATE('2087-06-15 12:00:00', '-3 days') OR d = '2087-06-15'"
    >>> at_later_time("SELECT 'now' FROM t")
    "SELECT 'now' FROM t"
    """
    tree = read_query(sql, dialect).tree
    if tree is None or not any(_fixed(node, dialect) for node in tree.walk()):
        return sql
    changed = tree.transform(lambda node: _fixed(node, dialect) or node)
    return write_query(changed, dialect) or sql


def _fixed(node: exp.Expr, dialect: str) -> exp.Expr | None:
    """The fixed moment in place of a node that reads the clock; None for any other node."""
    kind = "DATE" if isinstance(node, _DATES) else "TIMESTAMP" if isinstance(node, _MOMENTS) else ""
    kind = kind or ("TIME" if isinstance(node, _TIMES) else "")
    if isinstance(node, exp.Anonymous):
        kind = _NAMED.get(node.name.upper(), "")
        if node.name.upper() == "AGE" and len(node.expressions) == 1:
            return exp.Anonymous(this="age", expressions=[_moment("TIMESTAMP", dialect), *node.expressions])
    if not DIALECTS[dialect].has_dates:
        is_implicit = isinstance(node, exp.Anonymous) and node.name.upper() in _IMPLICIT
        if is_implicit and not node.expressions:
            return exp.Anonymous(this=node.name, expressions=[_moment("TIMESTAMP", dialect)])
        if isinstance(node, exp.Date) and node.this is None and not node.expressions:
            return _moment("DATE", dialect)
        is_now = isinstance(node, exp.Literal) and node.is_string and node.name.lower() == "now"
        kind = "TIMESTAMP" if is_now and _is_argument(node) else kind
    return _moment(kind, dialect) if kind else None


def _is_argument(node: exp.Expr) -> bool:
    parent = node.parent
    return isinstance(parent, exp.Func) and not isinstance(parent, exp.Binary | exp.In | exp.Case | exp.If)


def _moment(kind: str, dialect: str) -> exp.Expr:
    text = {"DATE": _DAY, "TIME": _TIME, "TIMESTAMP": f"{_DAY} {_TIME}"}[kind]
    literal = exp.Literal.string(text)
    return exp.cast(literal, kind) if DIALECTS[dialect].has_dates else literal
