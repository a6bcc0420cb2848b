"""Result of a gold query on one database, and all other results that it allows.

It may return the rows that tie at its LIMIT in several ways. Its result need not hold what it is sorted by.
So it is run once more without LIMIT, with its sort keys as extra columns and each row's rank under them.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import groupby
from typing import Self

from sqlglot import exp

from text2sql_grpo.grading.strict import (
    Difference,
    TieGroup,
    column_order,
    compare_strict,
    find_nothing,
    has_top_level_order,
    rows_agree,
)
from text2sql_grpo.sql.address import Database, parse_address
from text2sql_grpo.sql.engines import DIALECTS
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Cell, ExecutionOutcome, Limits, Row
from text2sql_grpo.sql.query import number_value, read_query, split_statements, write_query

KEY_TOLERANCE = 1e-12  # relative; keys this close differ by rounding alone and tie
DAY_NOISE = "0.000001"  # above the error of a difference of two `julianday()`, in minutes too
RANKS_BEYOND_LIMIT = 10  # rows whose keys may be that close to the last one shown
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d(:?\d\d)?)?)?")

# Names that no table has: a prediction that ran by itself cannot read them.
_GOLD, _PREDICTED = "gold_5d0c71e8a6", "predicted_5d0c71e8a6"

_LATER = {"DATE": "2087-06-15", "TIME": "12:00:00", "TIMESTAMP": "2087-06-15 12:00:00"}
_CLOCKS: dict[type[exp.Expr], str] = {
    exp.CurrentDate: "DATE",
    **dict.fromkeys((exp.CurrentTimestamp, exp.CurrentDatetime, exp.Localtimestamp), "TIMESTAMP"),
    **dict.fromkeys((exp.CurrentTime, exp.Localtime), "TIME"),
}
_NAMED_CLOCKS = {
    "TODAY": "DATE",
    **dict.fromkeys(("NOW", "CLOCK_TIMESTAMP", "STATEMENT_TIMESTAMP", "TRANSACTION_TIMESTAMP"), "TIMESTAMP"),
    **dict.fromkeys(("GET_CURRENT_TIMESTAMP", "CURRENT_LOCALTIMESTAMP"), "TIMESTAMP"),
}
_POSTGRES_DAYS = {
    "now": "2087-06-15",
    "today": "2087-06-15",
    "tomorrow": "2087-06-16",
    "yesterday": "2087-06-14",
}
_NO_CALLS = (exp.Binary, exp.In, exp.Case, exp.If)  # of sqlglot's functions
_OF_NOW = ("DATE", "TIME", "DATETIME", "JULIANDAY", "UNIXEPOCH")  # SQLite's functions without arguments


class GoldResult:
    """Outcome of a gold on one database, and the other results it allows.

    Attributes:
        sql: The gold.
        outcome: Outcome of the gold as written.
    """

    def __init__(self, sql: str, run: Callable[[str], ExecutionOutcome], *, dialect: str = "sqlite") -> None:
        """Run a gold.

        Args:
            sql: The gold.
            run: Runs a query on the database.
            dialect: Name of the gold's dialect in sqlglot.
        """
        self.sql = sql
        self.outcome = run(sql)
        self._run = run
        self._dialect = dialect
        self._is_ordered = has_top_level_order(sql, dialect)

    @classmethod
    def of(cls, executor: SQLExecutor, database: Database, sql: str, *, limits: Limits | None = None) -> Self:
        """Run a gold on a database of an executor."""
        run = partial(executor.execute, database, limits=limits)
        return cls(sql, run, dialect=parse_address(database).dialect)

    @cached_property
    def is_usable(self) -> bool:
        """False if nothing can be compared with it.

        It failed, or its rows were cut and the database cannot compare them, even with themselves.
        """
        if self.outcome.is_truncated:
            return self.difference(self.outcome, self.sql) == "equal"
        return self.outcome.is_ok

    def accepts(self, outcome: ExecutionOutcome, sql: str = "", *, may_find_nothing: bool = False) -> bool:
        """True if a query ran and returns what the gold may; all rows of a tie at its LIMIT are right too.

        Args:
            outcome: The query's outcome.
            sql: The query, which is run again if the rows of both were cut.
            may_find_nothing: True if it may also differ in how it shows that no row matches.
        """
        if may_find_nothing and outcome.is_ok and find_nothing(self.outcome, outcome):
            return True
        return outcome.is_ok and self.difference(outcome, sql, accepts_whole_ties=True) == "equal"

    def on_later_day(self, sql: str) -> str | None:
        """Answer as of a later day, if it reads a clock that the gold does not; None if it is wrong then."""
        later = at_later_time(sql, self._dialect)
        if later == sql or at_later_time(self.sql, self._dialect) != self.sql:
            return sql
        outcome = self._run(later)
        if not outcome.is_ok:  # sqlglot wrote another query
            return sql
        return later if self.difference(outcome, later) == "equal" else None

    def difference(
        self, predicted: ExecutionOutcome, predicted_sql: str, *, accepts_whole_ties: bool = False
    ) -> Difference:
        """Compare a prediction that ran by `compare_strict`, or by `_compare_large` if both were cut."""
        if self.outcome.is_truncated and predicted.is_truncated:
            return self._compare_large(predicted, predicted_sql)
        compare = partial(compare_strict, ordered=self._is_ordered, accepts_whole_ties=accepts_whole_ties)
        found = compare(self.outcome, predicted, ties=lambda: self._ties)
        if found not in ("values", "order") or not DIALECTS[self._dialect].has_dates:
            return found
        # Dates and moments are values there, not texts: other types and forms of one moment are equal.
        known, shown = (o._replace(rows=_with_moments(o.rows)) for o in (self.outcome, predicted))
        if (known.rows, shown.rows) == (self.outcome.rows, predicted.rows):
            return found
        tied = tuple(TieGroup(_with_moments(group.rows), group.n_taken) for group in self._ties or ())
        return compare(known, shown, ties=lambda: tied or None)

    @cached_property
    def _ties(self) -> tuple[TieGroup, ...] | None:
        widened = widened_query(self.sql, self.outcome.columns, self._dialect)
        if widened is None:
            return None
        return tie_groups(widened, self.outcome, self._run(widened.sql))

    def _compare_large(self, predicted: ExecutionOutcome, predicted_sql: str) -> Difference:
        """`equal`, or the first difference between two queries whose outcomes were both cut.

        The database compares the rows as bags, cells by its own rules. Of an order only the rows before the
        cut are compared, without ties. The result is `truncated` if the comparison fails or takes too long.
        """
        n_columns = len(self.outcome.columns)
        if n_columns != len(predicted.columns):
            return "columns"
        found: Difference = "truncated"
        for order in (tuple(range(n_columns)), column_order(self.outcome, predicted)):
            if order is None:
                continue
            outcome = self._run(_differing(self.sql, predicted_sql, order, self._dialect))
            if outcome.is_ok and not outcome.rows:
                shown = tuple(tuple(row[index] for index in order) for row in predicted.rows)
                return "order" if self._is_ordered and shown != self.outcome.rows else "equal"
            found = "values" if outcome.is_ok else found
        return found


def have_one_result(first: GoldResult, second: GoldResult) -> bool:
    """True if two queries are usable and agree, whichever of them decides on order and ties."""
    if not (first.is_usable and second.is_usable):
        return False
    found = first.difference(second.outcome, second.sql), second.difference(first.outcome, first.sql)
    return "equal" in found


@dataclass(frozen=True)
class WidenedQuery:
    """A gold without LIMIT, its columns followed by sort keys and last the rank under them.

    Attributes:
        sql: The query. Its rows are in the order of their rank.
        n_columns: Columns of the gold.
        keys: Indices of the sort keys in the widened rows; empty if the gold has no order.
        start: Rows that OFFSET skips.
        end: Rows up to the end of LIMIT; None without LIMIT.
        has_whole_ties: True for FETCH .. WITH TIES, which takes all rows that tie with the last one.
        is_distinct: True if keys were added under SELECT DISTINCT, where they may add rows.
    """

    sql: str
    n_columns: int
    keys: tuple[int, ...]
    start: int
    end: int | None
    is_distinct: bool
    has_whole_ties: bool = False


def widened_query(gold_sql: str, columns: Sequence[str], dialect: str = "sqlite") -> WidenedQuery | None:
    """Widened form of a gold; None if it has neither order nor limit, or cannot be widened.

    Args:
        columns: Names of the gold's columns, as executed.
        dialect: Name of the gold's dialect in sqlglot.

    >>> widened_query("SELECT name FROM t ORDER BY age DESC LIMIT 3", ["name"]).sql
    'WITH _gold(c0, k0) AS MATERIALIZED (SELECT name, age AS k0 FROM t) SELECT * FROM (SELECT *, rank() OVER (ORDER BY k0 DESC) AS _rank FROM _gold) AS _ranked WHERE _rank <= 13 ORDER BY _rank'
    """  # noqa: E501 (the output of an example)
    query = read_query(gold_sql, dialect).tree
    if not isinstance(query, exp.Select | exp.SetOperation):
        return None
    order, limit, offset = (query.args.get(part) for part in ("order", "limit", "offset"))
    start = _whole_number(offset.expression) if offset else 0
    end = _whole_number(limit.args.get("count") or limit.expression) if limit else None
    if not (order or limit) or start is None or (limit and end is None):
        return None
    end = None if end is None else start + end
    inner = query.copy()
    for part in ("order", "limit", "offset"):
        inner.set(part, None)
    names = [f"c{i}" for i in range(len(columns))]
    keys: list[int] = []
    terms = []
    for term in order.expressions if order else []:
        index = _output_column(term.this, query, columns)
        if index is None:
            if not isinstance(inner, exp.Select):
                return None
            index = len(names)
            names.append(f"k{index - len(columns)}")
            inner.select(exp.alias_(term.this.copy(), names[index]), copy=False)
        keys.append(index)
        ranked = term.copy()
        ranked.set("this", exp.column(names[index]))
        terms.append(write_query(ranked, dialect))
    core = write_query(inner, dialect)
    if core is None or None in terms:
        return None
    rank = f"rank() OVER (ORDER BY {', '.join(filter(None, terms))})" if terms else "1"
    bound = "" if end is None else f" WHERE _rank <= {end + RANKS_BEYOND_LIMIT}"
    sql = (
        f"WITH _gold({', '.join(names)}) AS MATERIALIZED ({core}) "
        f"SELECT * FROM (SELECT *, {rank} AS _rank FROM _gold) AS _ranked{bound} ORDER BY _rank"
    )
    is_distinct = (
        bool(query.args.get("distinct")) and isinstance(query, exp.Select) and len(names) > len(columns)
    )
    return WidenedQuery(sql, len(columns), tuple(keys), start, end, is_distinct, _has_whole_ties(limit))


def _has_whole_ties(limit: exp.Expr | None) -> bool:
    options = limit.args.get("limit_options") if limit else None
    return options is not None and bool(options.args.get("with_ties"))


def _whole_number(node: exp.Expr | None) -> int | None:
    number = number_value(node.this) if isinstance(node, exp.Literal) and not node.is_string else None
    return number if isinstance(number, int) else None


def _output_column(term: exp.Expr, query: exp.Query, columns: Sequence[str]) -> int | None:
    """Index of the gold's column that an ORDER BY term names; None for another expression."""
    place = _whole_number(term)
    if place is not None:
        return place - 1 if 1 <= place <= len(columns) else None
    projections = query.selects
    if len(projections) == len(columns) and not any(part.is_star for part in projections):
        if isinstance(term, exp.Column) and not term.table:
            aliases = [part.alias.lower() if isinstance(part, exp.Alias) else None for part in projections]
            if term.name.lower() in aliases:
                return aliases.index(term.name.lower())
        for index, part in enumerate(projections):
            if part.unalias() == term:
                return index
    names = [name.lower() for name in columns]
    if isinstance(query, exp.SetOperation) and isinstance(term, exp.Column) and term.name.lower() in names:
        return names.index(term.name.lower())
    return None


def tie_groups(
    widened: WidenedQuery, gold: ExecutionOutcome, outcome: ExecutionOutcome
) -> tuple[TieGroup, ...] | None:
    """Groups of rows that the gold may return, in order, from its outcome and that of the widened query.

    Returns:
        None if the widened query failed, was cut, or does not explain the gold's rows.
    """
    if not outcome.is_ok or outcome.is_truncated:
        return None
    merged: list[list[Row]] = []
    last_key: Row = ()
    for _, tied in groupby(outcome.rows, key=lambda row: row[-1]):
        rows = list(tied)
        key = tuple(rows[0][index] for index in widened.keys)
        if merged and all(map(_keys_tie, last_key, key)):
            merged[-1] += rows
        else:
            merged.append(rows)
        last_key = key
    groups = []
    position = 0
    for rows in merged:
        first, last = max(position, widened.start), position + len(rows)
        if widened.end is not None and not (widened.has_whole_ties and position < widened.end):
            last = min(last, widened.end)
        position += len(rows)
        if last > first:
            groups.append(TieGroup(tuple(row[: widened.n_columns] for row in rows), last - first))
    return tuple(groups) if _explains(groups, gold.rows, widened) else None


def _keys_tie(left: Cell, right: Cell) -> bool:
    if isinstance(left, float) and isinstance(right, int | float):
        return math.isclose(left, right, rel_tol=KEY_TOLERANCE)
    return left == right


def _explains(groups: Sequence[TieGroup], rows: tuple[Row, ...], widened: WidenedQuery) -> bool:
    if sum(group.n_taken for group in groups) != len(rows):
        return False
    if widened.is_distinct:
        known = [row for group in groups for row in group.rows]
        if len(set(known)) < len(known):  # a row with several keys: its place is not defined
            return False
    return rows_agree(groups, rows)


def with_ties_decided(tree: exp.Query, dialect: str = "sqlite") -> tuple[str, ...]:
    """The gold with ties of each ORDER BY and LIMIT broken by the columns, ascending and descending.

    If the two have one result, no tie matters to it.

    >>> from sqlglot import parse_one
    >>> with_ties_decided(parse_one("SELECT a FROM t ORDER BY b LIMIT 1", dialect="sqlite"))
    ('SELECT a FROM t ORDER BY b, 1 ASC LIMIT 1', 'SELECT a FROM t ORDER BY b, 1 DESC LIMIT 1')
    """
    decided = []
    for is_descending in (False, True):
        copy = tree.copy()
        for rounded in list(copy.find_all(exp.Round)):
            if any(part.name.lower() == "julianday" for part in rounded.find_all(exp.Anonymous)):
                noise = exp.Literal.number(DAY_NOISE)
                kind = exp.Sub if is_descending else exp.Add
                rounded.set("this", kind(this=exp.paren(rounded.this.copy()), expression=noise))
        for query in copy.find_all(exp.Query):
            is_cut = query.args.get("order") is not None or query.args.get("limit") is not None
            if not isinstance(query, exp.Select | exp.SetOperation) or not is_cut or query.is_star:
                continue
            if _has_whole_ties(query.args.get("limit")):
                continue
            order = query.args.get("order") or exp.Order(expressions=[])
            for place in range(1, len(query.selects) + 1):
                order.append(
                    "expressions",
                    exp.Ordered(
                        this=exp.Literal.number(place), desc=is_descending, nulls_first=not is_descending
                    ),
                )
            query.set("order", order)
        decided.append(copy.sql(dialect))
    return tuple(dict.fromkeys(decided))


def _with_moments(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Rows whose dates and moments are in one form."""
    return tuple(tuple(map(_moment, row)) for row in rows)


def _moment(cell: Cell) -> Cell:
    """Date, or moment in UTC, in ISO's form; midnight is the date. Other cells stay.

    >>> _moment("2020-01-31 02:00:00+02"), _moment("2020-01-31T10:00:00.500"), _moment("2020-01"), _moment(5)
    ('2020-01-31', '2020-01-31 10:00:00.500000', '2020-01', 5)
    """
    if not isinstance(cell, str) or not _MOMENT.fullmatch(cell):
        return cell
    try:
        moment = datetime.fromisoformat(cell)
        moment = moment if moment.tzinfo is None else moment.astimezone(UTC).replace(tzinfo=None)
    except (ValueError, OverflowError):
        return cell
    return moment.isoformat(sep=" ").removesuffix(" 00:00:00")


def _differing(gold_sql: str, predicted_sql: str, order: Sequence[int], dialect: str) -> str:
    """Query for a row that one result has more often than the other; `order`: see `column_order`."""
    columns = ", ".join(f"c{index}" for index in range(len(order)))
    names = ", ".join(f"c{order.index(index)}" for index in range(len(order)))
    gold, predicted = ([*split_statements(sql, dialect)[0], sql][0] for sql in (gold_sql, predicted_sql))

    def counted(name: str) -> str:
        return f"SELECT {columns}, count(*) FROM {name} GROUP BY {columns}"

    return (
        f"WITH {_GOLD} ({columns}) AS (\n{gold}\n), "
        f"{_PREDICTED} ({names}) AS (\n{predicted}\n) "
        f"SELECT * FROM ({counted(_GOLD)} EXCEPT {counted(_PREDICTED)}) AS missing "
        f"UNION ALL SELECT * FROM ({counted(_PREDICTED)} EXCEPT {counted(_GOLD)}) AS added LIMIT 1"
    )


def at_later_time(sql: str, dialect: str = "sqlite") -> str:
    """Query in which each reading of the clock is a fixed moment of 2087; as it is if it reads none.

    An answer that reads the clock where its gold does not is right today: what "until today" selects, it
    selects in 2087 too. The query stays as it is if sqlglot cannot parse it, or cannot write it.

    >>> at_later_time("SELECT a FROM t WHERE d > date('now', '-3 days') OR d = CURRENT_DATE")
    "SELECT a FROM t WHERE d > DATE('2087-06-15 12:00:00', '-3 days') OR d = '2087-06-15'"
    >>> at_later_time("SELECT 'now' FROM t")
    "SELECT 'now' FROM t"
    >>> at_later_time("SELECT a FROM t WHERE d = 'today'::date", "postgres")
    "SELECT a FROM t WHERE d = CAST('2087-06-15' AS DATE)"
    """
    tree = read_query(sql, dialect).tree
    if tree is None or not any(_fixed(node, dialect) for node in tree.walk()):
        return sql
    changed = tree.transform(lambda node: _fixed(node, dialect) or node)
    return write_query(changed, dialect) or sql


def _fixed(node: exp.Expr, dialect: str) -> exp.Expr | None:
    """The fixed moment in place of a node that reads the clock; None for any other node."""
    has_dates = DIALECTS[dialect].has_dates
    kind = _CLOCKS.get(type(node), "")
    if isinstance(node, exp.Anonymous):
        name = node.name.upper()
        kind = _NAMED_CLOCKS.get(name, "")
        if name == "AGE" and len(node.expressions) == 1:
            return exp.Anonymous(this="age", expressions=[_later("TIMESTAMP", dialect), *node.expressions])
        if name in _OF_NOW and not node.expressions and not has_dates:
            return exp.Anonymous(this=node.name, expressions=[_later("TIMESTAMP", dialect)])
    elif isinstance(node, exp.Date) and not has_dates:
        kind = "DATE" if node.this is None and not node.expressions else ""
    elif dialect == "postgres" and isinstance(node, exp.Literal) and node.is_string:
        day = _POSTGRES_DAYS.get(node.name.lower())
        return exp.Literal.string(day) if day else None
    elif isinstance(node, exp.Column) and str(node) == '"now"' and not has_dates:  # a text, to SQLite
        kind = "TIMESTAMP"
    elif isinstance(node, exp.Literal) and node.is_string and node.name.lower() == "now" and not has_dates:
        is_argument = isinstance(node.parent, exp.Func)
        kind = "TIMESTAMP" if is_argument and not isinstance(node.parent, _NO_CALLS) else ""
    return _later(kind, dialect) if kind else None


def _later(kind: str, dialect: str) -> exp.Expr:
    literal = exp.Literal.string(_LATER[kind])
    return exp.cast(literal, kind) if DIALECTS[dialect].has_dates else literal
