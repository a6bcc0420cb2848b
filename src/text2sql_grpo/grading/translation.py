"""Queries of DuckDB and PostgreSQL in SQLite's SQL, for a mirror.

What SQLite lacks is translated exactly where that is short, and else to something that mostly changes where
the original does: a median to an average, a list to a text. Only results of the engine decide.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

from sqlglot import exp, parse_one
from sqlglot.errors import SqlglotError

from text2sql_grpo.grading.time_steps import Step, read_step
from text2sql_grpo.sql.query import MAX_WRITTEN_NODES, read_query, write_query

MAX_COPIED = 24  # nodes of an argument that a translation repeats: nested ones would grow exponentially

_KIND = "kind"  # key of `Expr.meta`: "date", "moment", "time", "number", "interval", or "span" of seconds
_MOMENTS = ("date", "moment")
_COMPARISONS = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Between)
_ROUGH = (
    *(exp.Median, exp.PercentileCont, exp.PercentileDisc, exp.Quantile, exp.Mode, exp.First, exp.Last),
    *(exp.GroupConcat, exp.ArrayAgg, exp.Array, exp.ArraySize, exp.ArrayContains, exp.ArrayContainsAll),
    *(exp.ArrayOverlaps, exp.ArrayDistinct, exp.ArraySort, exp.ArrayToString, exp.ArrayPosition, exp.Explode),
    *(exp.Bracket, exp.Split, exp.StringToArray, exp.ArgMax, exp.ArgMin, exp.Initcap, exp.Translate),
    *(exp.RegexpExtract, exp.RegexpReplace, exp.RegexpLike, exp.RegexpILike, exp.StrToDate, exp.StrToTime),
    *(exp.Lateral, exp.Dayname, exp.Monthname),
)
_SIDES = ("this", "expression", "low", "high")
_OF_FIRST = (
    *(exp.Alias, exp.Paren, exp.Subquery, exp.Window, exp.Coalesce, exp.Nullif, exp.Lag, exp.Lead),
    *(exp.DateTrunc, exp.Min, exp.Max, exp.Avg, exp.Sum, exp.AnyValue, exp.FirstValue, exp.LastValue),
    exp.IgnoreNulls,
)
_INTERVALS = ("TO_YEARS", "TO_QUARTERS", "TO_MONTHS", "TO_WEEKS", "TO_HOURS", "TO_MINUTES", "TO_SECONDS")
_SPLIT = (exp.Split, exp.StringToArray)
_MATCHING = (exp.RegexpLike, exp.RegexpILike, exp.RegexpFullMatch)
_SERIES = (exp.GenerateSeries, exp.ExplodingGenerateSeries)
_KNOWN_TYPES = (*exp.DataType.NUMERIC_TYPES, *exp.DataType.TEXT_TYPES, exp.DataType.Type.BOOLEAN)
_FUNCTION_OF_KIND = {"date": "DATE", "moment": "DATETIME", "time": "TIME"}

# In templates `:this` stands for the argument of that name in sqlglot, and `:a`, `:b`, .. for those in order.
_PARTS = {
    "YEAR": "CAST(STRFTIME('%Y', :a) AS INTEGER)",
    "MONTH": "CAST(STRFTIME('%m', :a) AS INTEGER)",
    "DAY": "CAST(STRFTIME('%d', :a) AS INTEGER)",
    "HOUR": "CAST(STRFTIME('%H', :a) AS INTEGER)",
    "MINUTE": "CAST(STRFTIME('%M', :a) AS INTEGER)",
    "SECOND": "CAST(STRFTIME('%S', :a) AS INTEGER)",
    "EPOCH": "CAST(STRFTIME('%s', :a) AS REAL)",
    "DOY": "CAST(STRFTIME('%j', :a) AS INTEGER)",
    "DOW": "CAST(STRFTIME('%w', :a) AS INTEGER)",
    "ISODOW": "(STRFTIME('%w', :a) + 6) % 7 + 1",
    "WEEK": "(STRFTIME('%j', :a, '-3 days', 'weekday 4') - 1) / 7 + 1",
    "ISOYEAR": "CAST(STRFTIME('%Y', :a, '-3 days', 'weekday 4') AS INTEGER)",
    "QUARTER": "(STRFTIME('%m', :a) + 2) / 3",
    "DECADE": "STRFTIME('%Y', :a) / 10",
    "CENTURY": "(STRFTIME('%Y', :a) + 99) / 100",
}
_PARTS_OF_SPANS = {
    "EPOCH": "CAST(:a AS REAL)",
    "DAY": ":a / 86400",
    "HOUR": ":a / 3600 % 24",
    "MINUTE": ":a / 60 % 60",
    "SECOND": ":a % 60",
}
_PART_CLASSES: dict[type[exp.Expr], str] = {
    exp.Year: "YEAR",
    exp.Quarter: "QUARTER",
    exp.Hour: "HOUR",
    exp.Minute: "MINUTE",
    exp.Second: "SECOND",
    exp.DayOfWeekIso: "ISODOW",
    exp.DayOfYear: "DOY",
    exp.TimeToUnix: "EPOCH",
    **dict.fromkeys((exp.Month, exp.Monthname), "MONTH"),
    **dict.fromkeys((exp.Day, exp.DayOfMonth), "DAY"),
    **dict.fromkeys((exp.DayOfWeek, exp.Dayname), "DOW"),
    **dict.fromkeys((exp.Week, exp.WeekOfYear), "WEEK"),
}
_NUMBERS = {  # of a moment's unit among all such units
    "YEAR": "CAST(STRFTIME('%Y', :a) AS INTEGER)",
    "QUARTER": "(STRFTIME('%Y', :a) * 12 + STRFTIME('%m', :a) + 2) / 3",
    "MONTH": "STRFTIME('%Y', :a) * 12 + STRFTIME('%m', :a)",
    "WEEK": "(STRFTIME('%s', :a) / 86400 + 3) / 7",
    "DAY": "STRFTIME('%s', :a) / 86400",
    "HOUR": "STRFTIME('%s', :a) / 3600",
    "MINUTE": "STRFTIME('%s', :a) / 60",
    "SECOND": "CAST(STRFTIME('%s', :a) AS INTEGER)",
}
_WHOLE = {  # units that passed from `:b` to `:a`
    "YEAR": "(STRFTIME('%Y%m%d', :a) - STRFTIME('%Y%m%d', :b)) / 10000",
    "MONTH": "(STRFTIME('%Y', :a) - STRFTIME('%Y', :b)) * 12 + STRFTIME('%m', :a) - STRFTIME('%m', :b)"
    " - (STRFTIME('%d%H%M%S', :a) < STRFTIME('%d%H%M%S', :b))",
    "WEEK": "(STRFTIME('%s', :a) - STRFTIME('%s', :b)) / 604800",
    "DAY": "(STRFTIME('%s', :a) - STRFTIME('%s', :b)) / 86400",
    "HOUR": "(STRFTIME('%s', :a) - STRFTIME('%s', :b)) / 3600",
    "MINUTE": "(STRFTIME('%s', :a) - STRFTIME('%s', :b)) / 60",
}
_MONTHS = "STRFTIME('%Y', :a) * 12 + STRFTIME('%m', :a) + (STRFTIME('%d', :a) - 1) / 31.0"
_SPAN = "STRFTIME('%s', :a) - STRFTIME('%s', :b)"
_STARTS = {
    "YEAR": "'start of year'",
    "QUARTER": "'start of month', ((1 - STRFTIME('%m', :a)) % 3) || ' months'",
    "MONTH": "'start of month'",
    "WEEK": "'start of day', 'weekday 0', '-6 days'",
    "DAY": "'start of day'",
    "HOUR": "-STRFTIME('%M', :a) || ' minutes', -STRFTIME('%S', :a) || ' seconds'",
    "MINUTE": "-STRFTIME('%S', :a) || ' seconds'",
}
_VARIANCE = "(SUM(:this * :this) - SUM(:this) * SUM(:this) * 1.0 / COUNT(:this)) / (COUNT(:this) - {})"
_FUNCTIONS: dict[type[exp.Expr], str] = {
    exp.StartsWith: "INSTR(:this, :expression) = 1",
    exp.EndsWith: "SUBSTR(:this, -LENGTH(:expression)) = :expression",
    exp.Left: "SUBSTR(:this, 1, :expression)",
    exp.Right: "SUBSTR(:this, -:expression)",
    exp.Repeat: "REPLACE(HEX(ZEROBLOB(:times)), '00', :this)",
    exp.Translate: "REPLACE(:this, :from_, :to)",
    exp.Initcap: "LOWER(:this)",
    exp.Ascii: "UNICODE(:this)",
    exp.Cbrt: "POWER(:this, 1.0 / 3)",
    exp.LastDay: "DATE(:this, 'start of month', '+1 month', '-1 day')",
    exp.StrToDate: "DATE(:this)",
    exp.StrToTime: "DATETIME(:this)",
    exp.RegexpReplace: "REPLACE(:this, :expression, :replacement)",
    exp.First: "MIN(:this)",
    exp.ArraySize: "LENGTH(:this) - LENGTH(REPLACE(:this, ',', '')) + 1",
    exp.ArrayPosition: "INSTR(:this, :expression)",
    exp.ArrayAppend: ":this || ',' || :expression",
    exp.Variance: _VARIANCE.format(1),
    exp.VariancePop: _VARIANCE.format(0),
    exp.StddevPop: f"SQRT({_VARIANCE.format(0)})",
    **dict.fromkeys((exp.Stddev, exp.StddevSamp), f"SQRT({_VARIANCE.format(1)})"),
    **dict.fromkeys((exp.Contains, exp.ArrayContains), "INSTR(:this, :expression) > 0"),
    **dict.fromkeys((exp.Median, exp.PercentileCont, exp.PercentileDisc, exp.Quantile), "AVG(:this)"),
    **dict.fromkeys((exp.Mode, exp.Last), "MAX(:this)"),
    **dict.fromkeys((exp.ArrayDistinct, exp.ArraySort, exp.ArrayToString), ":this"),
    **dict.fromkeys((exp.Explode, exp.RegexpExtract), ":this"),
}
_NAMED_FUNCTIONS = {
    "MAKE_DATE": "PRINTF('%04d-%02d-%02d', :a, :b, :c)",
    "ISOYEAR": _PARTS["ISOYEAR"],
    "OCTET_LENGTH": "LENGTH(CAST(:a AS BLOB))",
    "CARDINALITY": "LENGTH(:a) - LENGTH(REPLACE(:a, ',', '')) + 1",
    "UNACCENT": ":a",
}
_PART_OF_TEXT = {
    "1": "CASE WHEN INSTR(:a, :b) = 0 THEN :a ELSE SUBSTR(:a, 1, INSTR(:a, :b) - 1) END",
    "rest": "CASE WHEN INSTR(:a, :b) = 0 THEN '' ELSE SUBSTR(:a, INSTR(:a, :b) + LENGTH(:b)) END",
}
_FORMS = {
    "%B": "%m",
    "%b": "%m",
    "%A": "%w",
    "%a": "%w",
    "%y": "%Y",
    "%I": "%H",
    "%u": "%w",
    "%-": "%",
    "%G": "%Y",
    "%V": "%W",
}
_PART_OF_PATTERN = re.compile(r"(\\.|\[[^\]]*\]|.)(\{\d\}|[+*?])?", re.DOTALL)
_BEYOND_GLOB = re.compile(r"[()|]|\{\d*,|\{\d\d|\[[^\]]*\\|\\[bBDWS0-9]|(?<!^)\^|\$(?!$)|\(\?")
_GLOBS = {
    ".": "?",
    r"\d": "[0-9]",
    r"\w": "[A-Za-z0-9_]",
    r"\s": " ",
    r"\*": "[*]",
    r"\?": "[?]",
    r"\[": "[[]",
}
_SERIES_OF = (
    "(WITH RECURSIVE series_(value_) AS (SELECT :a WHERE :a {0} :b UNION ALL SELECT {1} FROM series_"
    " WHERE {1} {0} :b LIMIT 10000) SELECT value_ AS {2} FROM series_)"
)


def as_sqlite(
    sql: str, dialect: str, kinds: Mapping[str, str] | None = None, *, has_regexp: bool = False
) -> str | None:
    """Query in SQLite's SQL, for the mirror; None if sqlglot cannot parse it, or SQLite's SQL is too long.

    Namespaces are dropped, and a date is its text, as is a literal of a type that SQLite lacks.

    Args:
        dialect: Name in sqlglot of its SQL.
        kinds: `date`, `moment`, `time` or `number` of columns, by their names in lower case.
        has_regexp: True where SQLite has functions for regular expressions, as when a table is made.

    >>> as_sqlite("SELECT a FROM sales.t WHERE d >= DATE '2020-01-31' AND EXTRACT(YEAR FROM d) = 2020", "duckdb")
    "SELECT a FROM t WHERE d >= '2020-01-31' AND CAST(STRFTIME('%Y', d) AS INTEGER) = 2020"
    >>> as_sqlite("SELECT a FROM t WHERE i > INTERVAL '10 hours' AND m = 'sad'::mood", "postgres")
    "SELECT a FROM t WHERE i > '10 HOURS' AND m = 'sad'"
    >>> as_sqlite("SELECT a FROM t WHERE (b = ANY (ARRAY[1, 2])) AND c <> ALL (ARRAY['x'])", "postgres")
    "SELECT a FROM t WHERE (b IN (1, 2)) AND NOT c IN ('x')"
    >>> as_sqlite("SELECT a FROM t WHERE d < DATE '2020-01-31' - INTERVAL '1 month'", "postgres")
    "SELECT a FROM t WHERE d < DATETIME('2020-01-31', '-1 MONTHS')"
    >>> as_sqlite("SELECT EXTRACT(QUARTER FROM d), last - first FROM t", "postgres", {"first": "date", "last": "date"})
    "SELECT ((STRFTIME('%m', d) + 2) / 3), CAST(JULIANDAY(last) - JULIANDAY(first) AS INTEGER) FROM t"
    """  # noqa: E501 (an example)
    tree = read_query(sql, dialect).tree
    if not isinstance(tree, exp.Query):
        return None
    for part in tree.find_all(exp.Table, exp.Column):
        part.set("db", None)
        part.set("catalog", None)
    try:
        n_left = MAX_WRITTEN_NODES
        for join in list(tree.find_all(exp.Join)):
            n_left -= _as_scalars(join, n_left) if n_left > 0 else 0
        _note_kinds(tree, dict(kinds or {}))
        for node in reversed(list(tree.walk(bfs=False))):  # arguments before their functions
            found = node if has_regexp and isinstance(node, _MATCHING) else _in_sqlite(node)
            if found is not node:
                found.meta[_KIND] = _kind(node) or _kind(found)
                node.replace(found)
        return write_query(tree)
    except (SqlglotError, ValueError, LookupError, RecursionError):
        return None


def is_rough(sql: str, dialect: str) -> bool:
    """True if the translation of a query may return something else than the query where it now does not.

    >>> is_rough("SELECT median(a) FROM t", "duckdb"), is_rough("SELECT sum(a) FROM t", "duckdb")
    (True, False)
    """
    tree = read_query(sql, dialect).tree
    return tree is not None and any(
        isinstance(node, _ROUGH)
        or (isinstance(node, exp.TimeToStr) and any(form in node.text("format") for form in _FORMS))
        or (isinstance(node, exp.AtTimeZone) and _hours_of_zone(node) != 0)
        or (isinstance(node, exp.LimitOptions) and bool(node.args.get("with_ties")))
        or (isinstance(node, exp.Except | exp.Intersect) and node.args.get("distinct") is False)
        for node in tree.walk()
    )


def _hours_of_zone(node: exp.AtTimeZone) -> float | None:
    """Hours that a time zone's standard time is ahead of UTC; None for a zone that is not known."""
    zone = node.args["zone"]
    zone = zone.this if isinstance(zone, exp.Cast) else zone
    try:
        moment = datetime(2020, 1, 1, tzinfo=ZoneInfo(zone.name))
    except (ValueError, OSError, KeyError):
        return None
    return (moment.utcoffset() or timedelta()).total_seconds() / 3600


def _at_time_zone(node: exp.AtTimeZone) -> exp.Expr | None:
    """Moment in a time zone's standard time."""
    hours = _hours_of_zone(node)
    if not hours:
        return node.this if hours == 0 else None
    return exp.Anonymous(this="DATETIME", expressions=[node.this, exp.Literal.string(f"{hours:+g} hours")])


def plain_value(node: exp.Expr) -> exp.Expr:
    """Literal of a type that SQLite lacks, as its text."""
    if not isinstance(node.this, exp.Literal):
        return node
    if isinstance(node, exp.Cast) and node.to.this in (exp.DataType.Type.DATE, *exp.DataType.TEMPORAL_TYPES):
        return node.this
    if isinstance(node.parent, exp.Predicate):
        if isinstance(node, exp.Interval):
            return exp.Literal.string(f"{node.name} {node.text('unit')}")
        if isinstance(node, exp.Cast) and not node.is_type(*_KNOWN_TYPES):
            return exp.Literal.string(node.name)
    return node


def _note_kinds(tree: exp.Expr, columns: dict[str, str]) -> None:
    """Note what each expression returns, as far as it is known."""
    for _ in range(2):  # a column may be computed further on
        for node in reversed(list(tree.walk(bfs=False))):
            kind = columns.get(node.name.lower()) if isinstance(node, exp.Column) else _kind_of(node)
            node.meta[_KIND] = kind
            if isinstance(node, exp.Alias) and kind:
                columns.setdefault(node.alias.lower(), kind)


def _kind(node: exp.Expr | None) -> str:
    return (node.meta.get(_KIND) if node is not None else None) or ""


def _kind_of(node: exp.Expr) -> str:
    if isinstance(node, exp.Cast):
        if node.is_type("date"):
            return "date"
        if node.is_type("time", "timetz"):
            return "time"
        if node.is_type(*exp.DataType.NUMERIC_TYPES):
            return "number"
        return "moment" if node.is_type(*exp.DataType.TEMPORAL_TYPES) else ""
    if isinstance(node, exp.Literal):
        return "" if node.is_string else "number"
    if isinstance(node, exp.Interval | exp.ToDays):
        return "interval"
    if isinstance(node, exp.CurrentDate):
        return "date"
    if isinstance(node, exp.CurrentTimestamp | exp.TimestampTrunc | exp.AtTimeZone):
        return "moment"
    if isinstance(node, exp.Case):
        return _kind(node.args["ifs"][0].args["true"])
    if isinstance(node, exp.Anonymous):
        name = node.name.upper()
        return "interval" if name in _INTERVALS else {"AGE": "span", "MAKE_DATE": "date"}.get(name, "")
    if isinstance(node, exp.Select):
        return _kind(node.selects[0]) if len(node.selects) == 1 else ""
    if isinstance(node, _OF_FIRST):
        return _kind(node.this)
    if isinstance(node, exp.Add | exp.Sub | exp.Mul | exp.Div):
        return _kind_of_sum(node)
    return "number" if isinstance(node, exp.Count | exp.Extract | exp.RowNumber | exp.Length) else ""


def _kind_of_sum(node: exp.Binary) -> str:
    sides = [_kind(node.this), _kind(node.expression)]
    if isinstance(node, exp.Mul | exp.Div):
        return "interval" if "interval" in sides else "number"
    if isinstance(node, exp.Sub) and all(side in _MOMENTS for side in sides):
        return "number" if sides == ["date", "date"] else "span"
    if any(side in _MOMENTS for side in sides):
        return "moment" if "interval" in sides else "date"
    return next((side for side in sides if side), "")


def _in_sqlite(node: exp.Expr) -> exp.Expr:
    """An expression whose arguments are translated; itself if SQLite has it."""
    plain = _seconds(node) or plain_value(node)
    if plain is not node:
        return plain
    rule = _RULES.get(type(node))
    found = rule(node) if rule else None
    if found is None and type(node) in _FUNCTIONS:
        found = _filled(_FUNCTIONS[type(node)], node.args)
    if found is None and isinstance(node, _COMPARISONS):
        found = _comparison(node)
    if found is None and (part := _PART_CLASSES.get(type(node))):
        found = _filled(_PARTS[part], {"a": node.this})
    return node if found is None else found


def _filled(template: str, parts: Mapping[str, Any]) -> exp.Expr | None:
    """A template with its parts; None if one is missing, or too long to be repeated."""
    tree = _parsed(template).copy()
    if isinstance(tree, exp.Binary):
        tree = exp.paren(tree, copy=False)
    holes = list(tree.find_all(exp.Placeholder))
    for hole in holes:
        part = parts.get(hole.name)
        if isinstance(part, list):
            part = part[0]
        if part is None:
            return None
        if len(holes) > 1 and sum(1 for _ in islice(part.walk(), MAX_COPIED + 1)) > MAX_COPIED:
            return None
        filled = part.copy()
        filled = exp.paren(filled, copy=False) if isinstance(filled, exp.Binary) else filled
        if hole is tree:
            return filled
        hole.replace(filled)
    return tree


@lru_cache
def _parsed(template: str) -> exp.Expr:
    tree = parse_one(f"SELECT {template}", read="sqlite")
    assert isinstance(tree, exp.Select)
    found: exp.Expr = tree.selects[0]
    return found.pop()


def _seconds(node: exp.Expr) -> exp.Expr | None:
    """An interval that is compared with a number of seconds."""
    if not isinstance(node, exp.Interval) or not isinstance(node.parent, exp.Predicate):
        return None
    if _kind(node.parent.this) != "span":
        return None
    step = read_step(f"{node.name} {node.text('unit')}") or Step()
    return exp.Literal.number(_in_seconds(step))


def _in_seconds(step: Step) -> int:
    return round(step.months * 30.4375 * 86_400 + step.seconds)


def _sum(node: exp.Expr) -> exp.Expr | None:
    """A moment and a step, or the distance of two moments."""
    sign = -1 if isinstance(node, exp.Sub) else 1
    first, last = node.this, node.expression
    kinds = [_kind(first), _kind(last)]
    if (modifiers := _modifiers(last, sign)) is not None:
        return exp.func("DATETIME", first, *modifiers)
    if sign == 1 and kinds[1] in _MOMENTS:
        first, last, kinds = last, first, kinds[::-1]
    if kinds[0] == "date" and kinds[1] == "number":
        return _filled(f"DATE(:a, ({'-' if sign < 0 else ''}:b) || ' days')", {"a": first, "b": last})
    if sign == -1 and kinds == ["date", "date"]:
        return _filled("CAST(JULIANDAY(:a) - JULIANDAY(:b) AS INTEGER)", {"a": first, "b": last})
    if sign == -1 and all(kind in _MOMENTS for kind in kinds):
        return _filled(_SPAN, {"a": first, "b": last})
    return None


def _modifiers(node: exp.Expr, sign: int) -> list[exp.Expr] | None:
    """Arguments of SQLite's `datetime` for an interval; None for anything else."""
    if isinstance(node, exp.Interval) and isinstance(node.this, exp.Literal):
        step = read_step(f"{node.name} {node.text('unit')}")
        return [exp.Literal.string(modifier) for modifier in step.modifiers(sign)] if step else None
    factor, text = node.this, f"1 {node.text('unit')}"
    if isinstance(node, exp.Mul):
        interval = node.this if isinstance(node.this, exp.Interval) else node.expression
        factor = node.expression if interval is node.this else node.this
        text = f"{interval.name} {interval.text('unit')}"
    elif isinstance(node, exp.ToDays):
        text = "1 day"
    elif isinstance(node, exp.Anonymous) and _kind(node) == "interval":
        factor, text = node.expressions[0], f"1 {node.name.removeprefix('TO_').removeprefix('to_')}"
    step = read_step(text) if _kind(node) == "interval" else None
    if step is None:
        return None
    parts = {"months": step.months, "seconds": round(step.seconds)}
    templates = [f"({sign * number} * :a) || ' {unit}'" for unit, number in parts.items() if number]
    return [made for template in templates if (made := _filled(template, {"a": factor})) is not None]


def _cast(node: exp.Expr) -> exp.Expr | None:
    """A date or time of a moment, and the rounding of numbers, which SQLite cuts."""
    if _kind(node) in _FUNCTION_OF_KIND:
        return exp.func(_FUNCTION_OF_KIND[_kind(node)], node.this)
    scale = node.args["to"].expressions[1:]
    if node.is_type("decimal") and scale:
        return exp.func("ROUND", exp.cast(node.this, "REAL"), scale[0].this)
    is_computed = isinstance(node.this, exp.Binary | exp.AggFunc | exp.Paren)
    if is_computed and node.is_type(*exp.DataType.INTEGER_TYPES):
        return exp.cast(exp.func("ROUND", node.this), "INTEGER")
    return None


def _part(node: exp.Expr) -> exp.Expr | None:
    """EXTRACT, or DATE_PART of DuckDB."""
    part, moment = node.name.upper(), node.expression
    if isinstance(moment, exp.Anonymous) and moment.name.upper() == "AGE" and part in _WHOLE:
        found = _filled(_WHOLE[part], dict(zip("ab", moment.expressions, strict=False)))
        return exp.Mod(this=found, expression=exp.Literal.number(12)) if part == "MONTH" else found
    templates = _PARTS_OF_SPANS if _kind(moment) == "span" else _PARTS
    return _filled(templates[part], {"a": moment}) if part in templates else None


def _named_function(node: exp.Expr) -> exp.Expr | None:
    """Function that sqlglot does not know."""
    name, arguments = node.name.upper(), node.expressions
    parts = dict(zip("abc", arguments, strict=False))
    if name == "ALL" or not arguments:
        return None
    if name in ("DATE_PART", "DATEPART"):
        extract = exp.Extract(this=exp.var(arguments[0].name), expression=arguments[1].copy())
        return _part(extract)
    if name in ("DATE_SUB", "DATESUB") and arguments[0].name.upper() in _WHOLE:
        return _filled(_WHOLE[arguments[0].name.upper()], {"a": arguments[2], "b": arguments[1]})
    if name == "AGE" and len(arguments) == 2 and not isinstance(node.parent, exp.Extract):
        return _filled(_SPAN, parts)
    return _filled(_NAMED_FUNCTIONS[name], parts) if name in _NAMED_FUNCTIONS else None


def _json_text(node: exp.JSONExtractScalar) -> exp.Expr:
    """Value of a key as a text, which SQLite returns as a number."""
    return exp.cast(node.copy(), "text")


def _json_key(node: exp.JSONBContainsTopKey) -> exp.Expr | None:
    """Test of whether a JSON object has a key, by the type of its value."""
    key = node.expression.this if isinstance(node.expression, exp.Cast) else node.expression
    if not (isinstance(key, exp.Literal) and key.is_string and '"' not in key.name):
        return None
    kind = exp.Anonymous(this="JSON_TYPE", expressions=[node.this, exp.Literal.string(f'$."{key.name}"')])
    return exp.paren(exp.Is(this=kind, expression=exp.Null()).not_())


def _truncated(node: exp.Expr) -> exp.Expr | None:
    start = _STARTS.get(node.text("unit").upper())
    if start is None:
        return None
    template = f"CASE WHEN LENGTH(:a) = 10 THEN DATE(:a, {start}) ELSE DATETIME(:a, {start}) END"
    return _filled(template, {"a": node.this})


def _distance(node: exp.Expr) -> exp.Expr | None:
    """Number of units that begin between two moments."""
    number = _NUMBERS.get(node.text("unit").upper())
    if number is None or not node.args.get("date_part_boundary"):
        return None
    template = f"{number} - ({number.replace(':a', ':b')})"
    return _filled(template, {"a": node.this, "b": node.expression})


def _comparison(node: exp.Expr) -> exp.Expr | None:
    """A comparison with a list of values, of moments that are written differently, or of a time."""
    other, is_unequal = node.args.get("expression"), isinstance(node, exp.NEQ)
    if isinstance(other, exp.Any | exp.All | exp.Anonymous):
        return _quantified(node, other)
    sides = [side for name in _SIDES if (side := node.args.get(name)) is not None]
    kinds = {_kind(side) for side in sides}
    function = "DATETIME" if "moment" in kinds else "TIME"
    is_written_twice = {"date", "moment"} <= kinds or any(side.is_string for side in sides)
    if not kinds & {"moment", "time"} or is_unequal or not is_written_twice:
        return None
    changed = node.copy()
    for name in _SIDES:
        if (side := changed.args.get(name)) is not None:
            side.replace(exp.func(function, side))
    return changed


def _quantified(node: exp.Expr, other: exp.Expr) -> exp.Expr | None:
    """Comparison with `ANY` or `ALL`, of an array or a subquery."""
    is_all = isinstance(other, exp.All) or other.name.upper() == "ALL"
    inner = other.expressions[0] if isinstance(other, exp.Anonymous) and is_all else other.this
    while isinstance(inner, exp.Paren | exp.Cast | exp.Subquery):
        inner = inner.this
    is_query = isinstance(inner, exp.Query)
    if isinstance(node, exp.NEQ if is_all else exp.EQ) and (is_query or isinstance(inner, exp.Array)):
        found = exp.In(this=node.this)
        found.set(
            "query" if is_query else "expressions",
            inner.subquery(copy=False) if is_query else inner.expressions,
        )
        return exp.not_(found, copy=False) if is_all else found
    if isinstance(other, exp.Any) and isinstance(node, exp.EQ) and not is_query:
        return _filled("INSTR(:a, :b) > 0", {"a": inner, "b": node.this})
    if isinstance(node, exp.GT | exp.GTE | exp.LT | exp.LTE) and is_query:
        is_largest = is_all == isinstance(node, exp.GT | exp.GTE)
        source = _listed(inner, "some_", ["value_"])
        extreme = (exp.Max if is_largest else exp.Min)(this=exp.column("value_"))
        bound: exp.Expr = exp.select(extreme).from_(source, copy=False).subquery(copy=False)
        if is_all:  # without rows it holds for every value
            beyond = exp.Literal.number("-9e999") if is_largest else exp.HexString(this="ff")
            bound = exp.func("COALESCE", bound, beyond, copy=False)
        return type(node)(this=node.this, expression=bound)
    return None


def _listed(query: exp.Expr, name: str, columns: list[str]) -> exp.Subquery:
    """Subquery with other names of its columns."""
    named = exp.TableAlias(this=exp.to_identifier(name), columns=[exp.to_identifier(one) for one in columns])
    select = exp.select("*").from_(exp.to_table(name), copy=False)
    select.set("with_", exp.With(expressions=[exp.CTE(this=query, alias=named)]))
    return exp.Subquery(this=select, alias=exp.TableAlias(this=exp.to_identifier(name)))


def _source(node: exp.Expr) -> exp.Expr | None:
    """VALUES or a subquery with names of its columns, or a series."""
    alias = node.args.get("alias")
    columns = [column.name for column in alias.columns] if alias else []
    made = node.expressions[0] if isinstance(node, exp.Unnest) and node.expressions else node.this
    name = alias.name if alias else ""
    if isinstance(made, _SERIES):
        return _series(made, name or "series_", columns[0] if columns else name or "generate_series")
    if isinstance(made, exp.Array) and isinstance(node, exp.Unnest):
        values = exp.values([(item,) for item in made.expressions])
        return _listed(values, name or "unnest", columns[:1] or [name or "unnest"])
    if columns and isinstance(node, exp.Values | exp.Subquery):
        query = node.this if isinstance(node, exp.Subquery) else exp.Values(expressions=node.expressions)
        return _listed(query, name, columns)
    return None


def _series(made: exp.Expr, name: str, column: str) -> exp.Expr | None:
    start, end, step = (made.args.get(part) for part in ("start", "end", "step"))
    if start is None or end is None:
        return None
    value, operator = "value_ + 1", "<" if made.args.get("is_end_exclusive") else "<="
    if step is not None and _kind(step) == "interval":
        modifiers = _modifiers(step, 1) or []
        value = f"DATETIME(value_, {', '.join(one.sql('sqlite') for one in modifiers)})"
        start, end = exp.func("DATETIME", start), exp.func("DATETIME", end)
    elif step is not None:
        value = f"value_ + {step.sql('sqlite')}"
        operator = operator.replace("<", ">") if isinstance(step, exp.Neg) else operator
    template = _SERIES_OF.format(operator, value, exp.to_identifier(column).sql("sqlite"))
    query = _filled(template, {"a": start, "b": end})
    if query is not None:
        query.set("alias", exp.TableAlias(this=exp.to_identifier(name)))
    return query


def _frame(node: exp.Expr) -> exp.Expr | None:
    """Window over a range of days, or of months, such as the six days before each."""
    spec, order = node.args.get("spec"), node.args.get("order")
    bounds = [spec.args.get(name) for name in ("start", "end")] if spec else []
    steps = [bound for bound in bounds if isinstance(bound, exp.Interval)]
    if not steps or order is None or len(order.expressions) != 1:
        return None
    read = [read_step(f"{bound.name} {bound.text('unit')}") or Step() for bound in steps]
    in_months = not any(step.seconds for step in read)
    key = order.expressions[0].this
    number = _filled(_MONTHS if in_months else "JULIANDAY(:a)", {"a": key})
    if number is not None:
        key.replace(number)
        for bound, step in zip(steps, read, strict=True):
            bound.replace(exp.Literal.number(step.months if in_months else _in_seconds(step) / 86_400))
    return None


def _listing(node: exp.Expr) -> exp.Expr | None:
    """STRING_AGG or ARRAY_AGG; SQLite before 3.44 takes no order, and no separator beside DISTINCT."""
    inner = node.this.this if isinstance(node.this, exp.Order) else node.this
    separator = node.args.get("separator")
    if isinstance(inner, exp.Distinct) or separator is None:
        return exp.GroupConcat(this=inner.copy())
    return exp.GroupConcat(this=inner.copy(), separator=separator.copy())


def _joined(texts: Sequence[exp.Expr | None]) -> exp.Expr:
    whole: exp.Expr | None = None
    for text in texts:
        whole = text if whole is None else exp.DPipe(this=whole, expression=text)
    return whole or exp.Literal.string("")


def _list(node: exp.Expr) -> exp.Expr | None:
    """ARRAY[..] that is no argument of IN or ANY, as a text."""
    items = [_filled("COALESCE(:a, '') || ','", {"a": item}) for item in node.expressions]
    around = node.parent
    while isinstance(around, exp.Paren | exp.Cast):
        around = around.parent
    readers = (exp.Unnest, exp.Any, exp.All, exp.Anonymous, exp.ArrayOverlaps, exp.ArrayContainsAll)
    return None if isinstance(around, readers) else _joined(items)


def _item(node: exp.Expr) -> exp.Expr | None:
    """The first or second part of a split text; of other lists, which are texts, all."""
    split, number = node.this.unnest(), node.expressions[0].name if node.expressions else ""
    if isinstance(split, _SPLIT) and number.isdigit():
        return _nth_part(split.this, split.expression, int(number) + 1)
    whole: exp.Expr = split.copy()
    return whole


def _split(node: exp.Expr) -> exp.Expr | None:
    """Items of a text, as the text itself, unless one of them is read."""
    around = node.parent.parent if isinstance(node.parent, exp.Paren) else node.parent
    whole: exp.Expr = node.this.copy()
    return None if isinstance(around, exp.Bracket) else whole


def _contained(node: exp.Expr) -> exp.Expr | None:
    """A list that holds the items of another; lists are texts in a mirror."""
    items = node.expression.expressions if isinstance(node.expression, exp.Array) else []
    found = [_filled("INSTR(:a, :b) > 0", {"a": node.this, "b": item}) for item in items]
    return (exp.or_ if isinstance(node, exp.ArrayOverlaps) else exp.and_)(*found) if found else None


def _count(node: exp.Expr) -> exp.Expr | None:
    """COUNT of different pairs."""
    inner = node.this
    pair = inner.expressions[0] if isinstance(inner, exp.Distinct) and len(inner.expressions) == 1 else None
    if not isinstance(pair, exp.Tuple):
        return None
    texts = [exp.func("QUOTE", one) for one in pair.expressions]
    return exp.Count(this=exp.Distinct(expressions=[_joined(texts)]))


def _joined_text(node: exp.Expr) -> exp.Expr | None:
    """CONCAT_WS, which leaves out NULLs."""
    separator, *texts = node.expressions
    if not texts:
        return None
    parts = [_filled("COALESCE(:a || :b, '')", {"a": separator, "b": text}) for text in texts]
    return exp.func("SUBSTR", _joined(parts), exp.func("LENGTH", separator) + 1)


def _concatenated(node: exp.Expr) -> exp.Expr | None:
    """CONCAT, to which a NULL is an empty text."""
    return _joined([_filled("COALESCE(:a, '')", {"a": text}) for text in node.expressions])


def _matched(node: exp.Expr) -> exp.Expr | None:
    """A regular expression of characters, classes and repetitions, as a pattern of GLOB."""
    pattern = node.expression
    if not pattern.is_string or _BEYOND_GLOB.search(pattern.name):
        return None
    text, glob = pattern.name, ""
    text = f"^{text}$" if isinstance(node, exp.RegexpFullMatch) else text
    for part, repeated in _PART_OF_PATTERN.findall(text.removeprefix("^").removesuffix("$")):
        one = _GLOBS.get(part, part.removeprefix("\\"))
        glob += one * int(repeated[1:-1]) if repeated[:1] == "{" else "*" if repeated in ("*", "?") else one
        glob += "*" if repeated == "+" else ""
    glob = f"{'' if text.startswith('^') else '*'}{glob}{'' if text.endswith('$') else '*'}"
    folds = isinstance(node, exp.RegexpILike)
    value = exp.func("LOWER", node.this) if folds else node.this.copy()
    return exp.Glob(this=value, expression=exp.Literal.string(glob.lower() if folds else glob))


def _like(node: exp.Expr) -> exp.Expr | None:
    """LIKE as GLOB: that of SQLite does not tell upper from lower case."""
    pattern = node.expression
    if not pattern.is_string or isinstance(node.parent, exp.Escape):
        return None
    glob = re.sub(r"[][*?]", r"[\g<0>]", pattern.name).replace("%", "*").replace("_", "?")
    return exp.Glob(this=node.this.copy(), expression=exp.Literal.string(glob))


def _part_of_text(node: exp.Expr) -> exp.Expr | None:
    number = node.args["part_index"].name
    return _nth_part(node.this, node.args["delimiter"], int(number)) if number.isdigit() else None


def _nth_part(text: exp.Expr, separator: exp.Expr, number: int) -> exp.Expr | None:
    """The first or second part of a text between separators; None for a later one."""
    parts = {"a": text, "b": separator}
    if number == 2 and (rest := _filled(_PART_OF_TEXT["rest"], parts)):
        parts["a"] = rest
    return _filled(_PART_OF_TEXT["1"], parts) if number in (1, 2) else None


def _of_extreme(node: exp.Expr) -> exp.Expr | None:
    """ARG_MAX or ARG_MIN, by a number before each text."""
    key, extreme = node.expression, "MAX" if isinstance(node, exp.ArgMax) else "MIN"
    if isinstance(key, exp.Tuple):
        key = key.expressions[0]
    if _kind(key) in _MOMENTS:
        key = exp.func("JULIANDAY", key)
    return _filled(f"SUBSTR({extreme}(PRINTF('%030.6f', :a) || :b), 31)", {"a": key, "b": node.this})


def _padded(node: exp.Expr) -> exp.Expr | None:
    fill = node.args.get("fill_pattern") or exp.Literal.string(" ")
    padding = "REPLACE(SUBSTR(HEX(ZEROBLOB(:b)), 1, MAX(:b - LENGTH(:a), 0)), '0', :c)"
    whole = f"{padding} || :a" if node.args.get("is_left") else f":a || {padding}"
    return _filled(f"SUBSTR({whole}, 1, :b)", {"a": node.this, "b": node.expression, "c": fill})


def _written_moment(node: exp.Expr) -> exp.Expr | None:
    """A moment in a format; names of months and days become numbers, and numbers stay as they are."""
    form = node.args["format"]
    if form.name == "Q":
        return _filled(f"CAST({_PARTS['QUARTER']} AS TEXT)", {"a": node.this})
    if not isinstance(form, exp.Literal) or "%" not in form.name:
        number: exp.Expr = node.this.copy()
        return number
    text = form.name
    for unknown, known in _FORMS.items():
        text = text.replace(unknown, known)
    form.replace(exp.Literal.string(text))
    return None


def _in_bins(node: exp.Expr) -> exp.Expr | None:
    width = node.this
    text = f"{width.name} {width.text('unit')}" if isinstance(width, exp.Interval) else width.name
    step = read_step(text)
    if step is None:
        return None
    seconds = max(_in_seconds(step), 1)
    start = f"DATETIME(STRFTIME('%s', :a) / {seconds} * {seconds}, 'unixepoch')"
    return _filled(start, {"a": node.expression})


def _cut(node: exp.Expr) -> exp.Expr | None:
    decimals = node.args.get("decimals")
    template = "CAST(:a * POWER(10, :b) AS INTEGER) / POWER(10, :b)"
    return _filled(template, {"a": node.this, "b": decimals}) if decimals is not None else None


def _percentile(node: exp.Expr) -> exp.Expr | None:
    """PERCENTILE_CONT(..) WITHIN GROUP (ORDER BY ..), or MODE()."""
    key = node.expression.expressions[0].this
    return exp.Max(this=key.copy()) if isinstance(node.this, exp.Mode) else exp.Avg(this=key.copy())


def _grouped(node: exp.Expr) -> exp.Expr | None:
    """GROUP BY ALL."""
    if node.args.get("all") and isinstance(node.parent, exp.Select):
        keys = [n for n, made in enumerate(node.parent.selects, 1) if not made.find(exp.AggFunc)]
        node.set("all", None)
        node.set("expressions", [exp.Literal.number(key) for key in keys])
        if not keys:
            node.pop()
    return None


def _as_one(node: exp.Expr) -> exp.Expr | None:
    """INTERSECT ALL or EXCEPT ALL, without counts."""
    node.set("distinct", True)
    return None


def _as_scalars(join: exp.Join, most: int) -> int:
    """Put scalar subqueries in place of the columns of a LATERAL, as if it had one row; return their size.

    None are put there if that is more than `most` nodes.
    """
    lateral, select = join.this, join.parent
    inner = lateral.this.unnest() if isinstance(lateral, exp.Lateral) else None
    if not isinstance(inner, exp.Select) or not isinstance(select, exp.Select) or inner.args.get("group"):
        return 0
    alias = lateral.args.get("alias")
    names = [column.name for column in alias.columns] if alias else []
    made = dict(zip(names or inner.named_selects, inner.selects, strict=False))
    owners = ("", alias.name if alias else "")
    inside = set(map(id, lateral.find_all(exp.Column)))
    outside = (column for column in select.find_all(exp.Column) if id(column) not in inside)
    read = [column for column in outside if column.name in made and column.table in owners]
    n_copied = len(read) * sum(1 for _ in inner.walk())
    if n_copied <= most:
        join.pop()
    for column in read if n_copied <= most else ():
        one = inner.copy()
        one.set("expressions", [made[column.name].copy()])
        if made[column.name].find(exp.AggFunc) is None:
            one.limit(1, copy=False)
        column.replace(one.subquery(copy=False))
    return n_copied


_RULES: dict[type[exp.Expr], Callable[[Any], exp.Expr | None]] = {
    **dict.fromkeys((exp.Add, exp.Sub), _sum),
    exp.Cast: _cast,
    exp.Extract: _part,
    exp.Anonymous: _named_function,
    **dict.fromkeys((exp.TimestampTrunc, exp.DateTrunc), _truncated),
    exp.AtTimeZone: _at_time_zone,
    exp.JSONExtractScalar: _json_text,
    exp.JSONBContainsTopKey: _json_key,
    exp.DateDiff: _distance,
    exp.DateBin: _in_bins,
    exp.Window: _frame,
    **dict.fromkeys((exp.GroupConcat, exp.ArrayAgg), _listing),
    exp.Count: _count,
    exp.Concat: _concatenated,
    exp.ConcatWs: _joined_text,
    **dict.fromkeys(_MATCHING, _matched),
    exp.Like: _like,
    exp.Array: _list,
    **dict.fromkeys(_SPLIT, _split),
    exp.Bracket: _item,
    **dict.fromkeys((exp.ArgMax, exp.ArgMin), _of_extreme),
    **dict.fromkeys((exp.ArrayContainsAll, exp.ArrayOverlaps), _contained),
    exp.SplitPart: _part_of_text,
    exp.Pad: _padded,
    exp.TimeToStr: _written_moment,
    exp.Trunc: _cut,
    exp.WithinGroup: _percentile,
    exp.Group: _grouped,
    **dict.fromkeys((exp.Intersect, exp.Except), _as_one),
    **dict.fromkeys((exp.Values, exp.Subquery, exp.Unnest, exp.Table), _source),
}
