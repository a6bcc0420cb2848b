"""Skills that a gold query asks for, read from its tree."""

import re
from collections.abc import Callable

from sqlglot import exp

from text2sql_grpo.data.example import Example
from text2sql_grpo.sql.query import read_query

_DATE = re.compile(r"\d{4}-\d\d(-\d\d)?([ T].*)?")
_DATE_FUNCTIONS = {"strftime", "date", "datetime", "julianday", "date_part", "date_trunc", "to_char", "age"}
_Tree = exp.Expr


def _has_order(tree: _Tree) -> bool:
    return any(not isinstance(order.parent, exp.Window) for order in tree.find_all(exp.Order))


def _is_nested(tree: _Tree) -> bool:
    has_query = any("query" in part.args for part in tree.find_all(exp.In))
    return has_query or tree.find(exp.Subquery, exp.CTE, exp.Exists) is not None


def _has_date(tree: _Tree) -> bool:
    dates = (exp.Extract, exp.TimestampTrunc, exp.DateTrunc, exp.TsOrDsToDate, exp.TimeToStr, exp.CurrentDate)
    if tree.find(*dates) is not None:
        return True
    calls = {str(call.name).lower() for call in tree.find_all(exp.Anonymous)}
    texts = (text.name for text in tree.find_all(exp.Literal) if text.is_string)
    return bool(calls & _DATE_FUNCTIONS) or any(_DATE.fullmatch(text) for text in texts)


_SKILLS: dict[str, Callable[[_Tree], bool]] = {
    "join": lambda tree: tree.find(exp.Join) is not None,
    "nesting": _is_nested,
    "grouping": lambda tree: tree.find(exp.Group) is not None,
    "set operation": lambda tree: tree.find(exp.SetOperation) is not None,
    "window": lambda tree: tree.find(exp.Window) is not None,
    "order": _has_order,
    "dates": _has_date,
    "string match": lambda tree: tree.find(exp.Like, exp.ILike, exp.Glob, exp.RegexpLike) is not None,
}


def skills(example: Example, dialect: str = "sqlite") -> list[str]:
    """Skills that a question's gold query asks for; `plain` if it asks for none.

    `look-up` is a text that the query compares with and the question does not hold in this form, so that it
    has to be looked up.

    >>> skills(Example("1", "shop", "Orders from Lisbon?", "SELECT count(*) FROM o WHERE c = 'LSB'"))
    ['look-up']
    """
    tree = read_query(example.gold_sql, dialect).tree
    if tree is None:
        return ["unread"]
    found = [name for name, has in _SKILLS.items() if has(tree)]
    question = example.question.casefold()
    compared = [
        text.name
        for text in tree.find_all(exp.Literal)
        if text.is_string and isinstance(text.parent, exp.EQ | exp.NEQ | exp.In)
    ]
    if any(text.casefold() not in question and not _DATE.fullmatch(text) for text in compared):
        found.append("look-up")
    return found or ["plain"]
