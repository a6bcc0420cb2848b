"""Values with which a query compares columns: literals, patterns, regular expressions and steps in time."""

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from datetime import datetime

from sqlglot import exp

from text2sql_grpo.grading.near_values import like_of, literally, unescaped
from text2sql_grpo.grading.query_columns import COMPARISONS, ColumnRef, columns_among, inside
from text2sql_grpo.grading.time_steps import OF_PARTS, Step, read_step
from text2sql_grpo.sql.outcome import Cell
from text2sql_grpo.sql.query import number_value, write_query

DATE_FUNCTIONS = ("date", "time", "datetime", "julianday", "unixepoch", "strftime")
MAX_INTEGER = 2**60  # twice as much is still an integer of SQLite
MAX_EXPRESSION = 200  # characters of a regular expression that is read
_EXPRESSIONS = (
    *(exp.RegexpLike, exp.RegexpILike, exp.RegexpFullMatch, exp.RegexpExtract, exp.RegexpExtractAll),
    *(exp.RegexpReplace, exp.RegexpSplit, exp.RegexpCount, exp.RegexpInstr, exp.RegexpSubstr, exp.SimilarTo),
)
_POSIX = {
    "digit": r"\d",
    "alpha": "a-zA-Z",
    "alnum": "a-zA-Z0-9",
    "lower": "a-z",
    "upper": "A-Z",
    "space": r"\s",
}
_SEARCHED = (exp.ILike, exp.StartsWith, exp.EndsWith, exp.Contains, exp.StrPosition)
_KEEPING = (
    *(exp.Coalesce, exp.If, exp.Case, exp.AggFunc, exp.Upper, exp.Lower, exp.Abs, exp.Explode),
    *(exp.GenerateSeries, exp.ExplodingGenerateSeries, exp.Array, exp.Nullif),
)
_MODIFIER = re.compile(r"[-+]?\d{1,9}(\.\d{1,9})?\s*[a-z]{1,9}", re.IGNORECASE)  # of SQLite's date functions
_NUMBER = re.compile(r"[0-9]{1,4}")
_VALUES = (exp.Lag, exp.Lead, exp.FirstValue, exp.LastValue, exp.NthValue, exp.Sum, exp.Avg, exp.Max, exp.Min)
_YEARS = {"%Y", "year", "YEAR"}
_DISTANCES = (exp.DateDiff, exp.TsOrDsDiff, exp.Anonymous)  # `date_sub`, `age`
_PARTS = (
    *(exp.Extract, exp.DateTrunc, exp.TimestampTrunc, exp.Date, exp.TsOrDsToDate, exp.Cast, exp.TimeToStr),
    *(exp.Year, exp.Quarter, exp.Month, exp.Week, exp.WeekOfYear, exp.Day, exp.Hour, exp.Substring, exp.Left),
)


def literals_in(
    tree: exp.Query, columns_of: dict[int, ColumnRef]
) -> tuple[dict[ColumnRef, list[Cell]], set[str], list[int]]:
    """Values that columns are compared with, those of them that are patterns, and sizes of groups."""
    literals: defaultdict[ColumnRef, list[Cell]] = defaultdict(list)
    patterns: set[str] = set()
    group_sizes: list[int] = []
    for node in tree.find_all(*COMPARISONS, exp.Nullif, exp.Case):
        below = _compared(node)
        values = [value for value in map(_compared_value, below) if value is not None]
        if isinstance(node, exp.Like | exp.Glob):
            if isinstance(node.parent, exp.Escape):
                escape = node.parent.expression.name
                values = [unescaped(value, escape) for value in values if isinstance(value, str)]
            if isinstance(node, exp.Glob):
                values = [like_of(value) for value in values if isinstance(value, str)]
            patterns.update(value for value in values if isinstance(value, str))
        if any(map(_counts_rows, below)):
            group_sizes += [value for value in values if isinstance(value, int)]
            continue
        for column in columns_among(below, columns_of):
            literals[column] += values
    for spec in tree.find_all(exp.WindowSpec):
        bounds = [
            literal_value(bound)
            for name in ("start", "end")
            if isinstance(bound := spec.args.get(name), exp.Expr)
        ]
        group_sizes += [bound + 1 for bound in bounds if isinstance(bound, int)]
    for limit in tree.find_all(exp.Limit, exp.Offset, exp.Fetch):
        group_sizes += [v for v in map(literal_value, limit.find_all(exp.Literal)) if isinstance(v, int)]
    return literals, patterns, group_sizes


def _compared(node: exp.Expr) -> list[exp.Expr]:
    """Parts of the sides of a comparison; of `CASE x WHEN y` x and y, of another CASE nothing."""
    if not isinstance(node, exp.Case):
        return list(inside(node))
    sides = [node.this, *(each.this for each in node.args["ifs"])] if node.this else []
    return [part for side in sides for part in inside(side)]


def _counts_rows(node: exp.Expr) -> bool:
    is_value = isinstance(node, exp.Window) and isinstance(node.this, _VALUES)
    return isinstance(node, exp.Count) or (isinstance(node, exp.Window) and not is_value)


def literal_value(node: exp.Expr) -> Cell:
    """Value of a literal, with its minus sign; None for any other node, and beyond SQLite's integers."""
    if not isinstance(node, exp.Literal):
        return None
    if node.is_string:
        return str(node.this)
    number = number_value(node.this)
    if number is None or abs(number) >= MAX_INTEGER:
        return None
    number = -number if isinstance(node.parent, exp.Neg) else number
    return int(number) if number % 1 == 0 and "." not in node.this else number


def _compared_value(node: exp.Expr) -> Cell:
    """Value that stands in a comparison: a literal, or a function of literals such as date('now').

    None for an argument of another function, as formats, modifiers and positions are no values of a column,
    and for a factor of one.
    """
    if isinstance(node.find_ancestor(exp.Func, *COMPARISONS), exp.Func) and not _keeps_values(node.parent):
        return None
    if isinstance(node.parent, exp.Mul | exp.Div | exp.Mod) and node.parent.find(exp.Column):
        return None
    if isinstance(node, exp.Func) and not isinstance(node, (*COMPARISONS, exp.Connector)):
        if node.find(exp.Column, exp.Query, exp.AggFunc) or not node.find(exp.Literal):
            return None
        with closing(sqlite3.connect(":memory:")) as connection, suppress(sqlite3.Error, ValueError):
            connection.set_authorizer(_allow_dates)
            value: Cell = connection.execute(f"SELECT {write_query(node)}").fetchone()[0]
            return value
    return literal_value(node)


def _allow_dates(action: int, _: str | None, name: str | None, *__: str | None) -> int:
    """Authorizer that allows date functions of literals, since the text may be a model's."""
    is_allowed = action == sqlite3.SQLITE_SELECT or (
        action == sqlite3.SQLITE_FUNCTION and name in DATE_FUNCTIONS
    )
    return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY


def _keeps_values(node: exp.Expr | None) -> bool:
    """True for functions whose arguments are values of the result."""
    while isinstance(node, exp.Neg | exp.Paren | exp.Binary):
        node = node.parent
    return isinstance(node, _KEEPING)


def searches_in(
    tree: exp.Query, columns_of: Mapping[int, ColumnRef]
) -> Iterator[tuple[list[ColumnRef], str]]:
    """Columns in whose texts a query searches, and what for, as a LIKE pattern; LIKE and GLOB aside."""
    for node in tree.find_all(*_SEARCHED):
        sought = node.args.get("substr") or node.args.get("expression")
        is_cut = isinstance(node, exp.StrPosition) and not isinstance(node.parent, COMPARISONS)
        if is_cut or not isinstance(sought, exp.Literal) or not sought.is_string:
            continue
        text = sought.name if isinstance(node, exp.ILike) else f"%{literally(sought.name)}%"
        yield columns_among(node.this.walk(), columns_of), text


def expressions_in(
    tree: exp.Query, columns_of: Mapping[int, ColumnRef]
) -> Iterator[tuple[list[ColumnRef], str]]:
    """Columns in whose texts a query searches for a regular expression, and the expression."""
    for node in tree.find_all(*_EXPRESSIONS):
        sought = node.args.get("expression")
        if not isinstance(sought, exp.Literal) or not sought.is_string:
            continue
        text = re.sub(r"\[:(\w+):\]", lambda found: _POSIX.get(found[1], found[0]), sought.name)
        if isinstance(node, exp.SimilarTo):
            text = f"^(?:{text.replace('%', '.*').replace('_', '.')})$"
        elif isinstance(node, exp.RegexpFullMatch):
            text = f"^(?:{text})$"
        if len(text) <= MAX_EXPRESSION:
            yield columns_among(node.this.walk(), columns_of), text


def steps_in(
    tree: exp.Query, columns_of: Mapping[int, ColumnRef]
) -> Iterator[tuple[list[ColumnRef], list[Step], list[str]]]:
    """Columns of each comparison with steps, the steps, and the moments next to them, moved by each.

    Then columns of which a part is taken, such as the month.
    """
    for node in tree.find_all(*COMPARISONS):
        below = list(inside(node))
        columns = columns_among(below, columns_of)
        texts = [
            f"{part.this.name} {part.text('unit')}"
            for part in below
            if isinstance(part, exp.Interval) and part.this
        ]
        literals = [part.name for part in below if isinstance(part, exp.Literal) and part.is_string]
        texts += [text for text in literals if _MODIFIER.fullmatch(text)]
        if any(isinstance(part, (exp.Add, exp.Sub, *_DISTANCES)) for part in below):
            numbers = [part.name for part in below if isinstance(part, exp.Literal) and not part.is_string]
            texts += [f"{n} {unit}" for n in numbers if _NUMBER.fullmatch(n) for unit in _units(below)]
        steps = [step for step in map(read_step, texts) if step]
        columns = columns or list(columns_of.values())  # the distance is computed elsewhere, by lag() say
        if steps:
            yield columns, steps, [moved for text in literals for moved in moved_by(text, steps)]
    for part in tree.find_all(*_PARTS):
        yield columns_among(part.find_all(exp.Column), columns_of), OF_PARTS, []


def _units(parts: Sequence[exp.Expr]) -> list[str]:
    """Units in which a comparison may measure a distance in time."""
    is_scaled = any(isinstance(part, exp.Mul) for part in parts)
    named = [part.text("unit") for part in parts if isinstance(part, exp.DateDiff | exp.TsOrDsDiff)]
    extracted = {part.name.lower() for part in parts if isinstance(part, exp.Extract)}
    is_in_seconds = "epoch" in extracted or any(
        isinstance(part, exp.TimeToUnix)
        or (
            isinstance(part, exp.Anonymous)
            and not extracted
            and (part.name.lower() != "julianday" or is_scaled)
        )
        for part in parts
    )
    is_year = (isinstance(part, exp.Year) or {part.text("format"), part.name} & _YEARS for part in parts)
    found = [*filter(None, named), *(("seconds", "minutes", "hours") if is_in_seconds else ())]
    found += [f"{unit}s" for unit in sorted(extracted - {"epoch"})]
    found += ["years"] if any(is_year) and "year" not in extracted else []
    return found or ["days"]


def moved_by(text: str, steps: Sequence[Step]) -> Iterator[str]:
    """A moment moved by each step, forwards and backwards; nothing for any other text."""
    with suppress(ValueError, OverflowError):
        moment = datetime.fromisoformat(text).replace(tzinfo=None)
        for step in steps:
            for sign in (-1, 1):
                yield str(step.from_moment(moment, sign))
