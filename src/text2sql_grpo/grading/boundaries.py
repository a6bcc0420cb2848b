"""Rows in which amounts that a query compares are equal: a sum and its bound, or the sums of two groups.

What one row of one table decides is aimed at while rows are drawn. The two sides of `HAVING sum(paid) > owed`
depend on several rows, so they are computed on a small database, where one cell is changed until they meet.
"""

import math
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, chain, islice
from random import Random
from typing import TypeGuard

from sqlglot import exp

from text2sql_grpo.grading.base_sample import DatabaseSample, quoted
from text2sql_grpo.grading.gold_query import GoldQuery
from text2sql_grpo.grading.materialise import Content, SmallDatabase, materialise, run_gold
from text2sql_grpo.grading.near_values import DateFormat, secant
from text2sql_grpo.grading.query_columns import ColumnRef
from text2sql_grpo.sql.outcome import Cell, Row

MAX_PROBES = 6  # of a gold query
MAX_MET = 3  # rows changed for one comparison, one after the other
MAX_TRIED = 12  # of which many do not matter to it
MAX_STEPS = 4  # of the secant method, for a cell
MAX_INSTRUCTIONS = 100_000  # of a probe, which runs a hundred times: a slower one has no rows
MAX_LEFT_OUT = 40  # rows of a table that are tried
MAX_DAYS = 2_000
MAX_FACTOR = 10  # of the largest of a column's values
NEAR = 1e-9
_RANKS = (exp.RowNumber, exp.Rank, exp.DenseRank, exp.Ntile)
_COMPARISONS = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE)


@dataclass(frozen=True)
class Probe:
    """Amounts that a query compares, each of which depends on several rows.

    Attributes:
        sql: Query with the amounts in its last column, by group or joined row.
        columns: Columns on which they depend.
        is_ranked: True if they are compared with each other, False if with 0: a left side less its right one.
        is_counted: True if they count rows.
        tables: Tables whose rows they depend on.
    """

    sql: str
    columns: tuple[ColumnRef, ...]
    is_ranked: bool = False
    is_counted: bool = False
    tables: tuple[str, ...] = ()


def probes(gold: GoldQuery) -> list[Probe]:
    """Compared aggregates, subqueries and columns of several tables, and groups' amounts that are ranked.

    Of a gold query alone: an answer, which a model wrote, runs in workers only.
    """
    found = (probe for probe in chain(_compared(gold), _ranked(gold)) if probe.columns)
    return list(islice(dict.fromkeys(found), MAX_PROBES))


def _compared(query: GoldQuery) -> Iterator[Probe]:
    for node in query.tree.find_all(*_COMPARISONS, exp.Between):
        select = node.parent_select
        if not isinstance(select, exp.Select) or not node.find_ancestor(exp.Where, exp.Having, exp.Join):
            continue
        bounds = [node.args.get(name) for name in ("expression", "low", "high")]
        for bound in (bound for bound in bounds if isinstance(bound, exp.Expr)):
            sides = [node.this, bound]
            if _depends_on_rows(sides, query):
                difference = exp.Sub(this=exp.paren(node.this.copy()), expression=exp.paren(bound.copy()))
                columns = dict.fromkeys(chain(*(_columns(side, query) for side in sides)))
                yield Probe(
                    _probing(query.tree, select, difference, without=node),
                    tuple(columns),
                    is_counted=any(side.find(exp.Count) for side in sides),
                    tables=tuple(sorted(query.tables)),
                )


def _ranked(query: GoldQuery) -> Iterator[Probe]:
    for select in query.tree.find_all(exp.Select) if query.ranks_groups else ():
        order = select.args.get("order")
        keys = [key.this for key in order.expressions] if order is not None else []
        for amount in (*select.selects, *keys) if select.args.get("group") else ():
            if amount.find(exp.Sum, exp.Avg, exp.Max, exp.Min) and not amount.find(exp.Window):
                columns = tuple(dict.fromkeys(_columns(amount, query)))
                yield Probe(_probing(query.tree, select, amount.unalias()), columns, is_ranked=True)


def with_equal_amounts(
    base: DatabaseSample, content: Content, found: Sequence[Probe], rng: Random
) -> Content:
    """Rows of tables, some changed or left out so that amounts that a query compares are equal, or almost.

    Rows that a constraint refuses are left out.
    """
    with closing(materialise(base, content)) as connection:
        for probe in rng.sample(found, min(rng.choice((1, 2)), len(found))):  # each may undo another one
            if probe.is_counted:
                _leave_out(base, connection, probe, rng)
                continue
            free = list(filter(None, (_free_cells(base, *column) for column in probe.columns)))
            if len(free) > 1 and rng.random() < 0.5:  # else no whole price makes two products equal
                _make_alike(connection, rng.choice(free), rng)
            tried = (_meet(connection, probe, rng.choice(free), rng) for _ in range(MAX_TRIED if free else 0))
            any(n_met == MAX_MET for n_met in accumulate(tried))
        return {
            name: connection.execute(
                f"SELECT {', '.join(map(quoted, table.columns))} FROM {quoted(name)}"
            ).fetchall()
            for name, table in base.tables.items()
        }


def _depends_on_rows(sides: Sequence[exp.Expr], query: GoldQuery) -> bool:
    """False for what rows are drawn for: expressions of one row, counts compared with numbers, and ranks."""
    parts = [part for side in sides for part in side.walk()]
    columns = [part for part in parts if isinstance(part, exp.Column)]
    computed = {column.name for column in columns if id(column) not in query.columns_of}
    made = [part for part in query.tree.find_all(exp.Alias) if part.alias in computed]
    if any(part.find(exp.Window) for part in sides) or any(part.find(*_RANKS) for part in made):
        return False
    if all(isinstance(side, exp.Count | exp.Literal) for side in sides):
        return False
    is_plain = all(isinstance(side, exp.Column) for side in sides)
    is_summed = any(isinstance(part, exp.AggFunc | exp.Query) for part in parts) or bool(made)
    return is_summed or (not is_plain and len({column.table for column in columns}) > 1)


def _columns(side: exp.Expr, query: GoldQuery) -> Iterator[ColumnRef]:
    """Columns of tables in a side, and those that a CTE or subquery computes its columns from."""
    named = list(side.find_all(exp.Column))
    known = query.columns_of
    yield from (known[id(column)] for column in named if id(column) in known)
    computed = {column.name for column in named if id(column) not in known}
    for made in query.tree.find_all(exp.Alias) if computed else ():
        if made.alias in computed:
            yield from (known[id(column)] for column in made.find_all(exp.Column) if id(column) in known)


def _probing(
    tree: exp.Query, select: exp.Select, amount: exp.Expr, *, without: exp.Expr | None = None
) -> str:
    """A SELECT of a query with an amount as its last column, and without one of its conditions."""
    copy = select.copy()
    if without is not None:
        place = next(place for place, part in enumerate(select.walk()) if part is without)
        next(part for number, part in enumerate(copy.walk()) if number == place).replace(exp.true())
    for name in ("order", "limit", "offset", "distinct"):
        copy.set(name, None)
    copy.append("expressions", exp.alias_(amount.copy(), "amount_"))
    with_ = tree.args.get("with_")
    if with_ is not None and copy.args.get("with_") is None:
        copy.set("with_", with_.copy())
    return copy.sql("sqlite")


@dataclass(frozen=True)
class _Cells:
    """A column of numbers, or all columns of dates of a table: a row's dates move together.

    None is a key, a reference or computed.

    Attributes:
        known: Numbers that the column holds; empty for dates.
        dates: Formats of the dates; empty for numbers.
    """

    table: str
    columns: tuple[str, ...]
    known: tuple[float, ...] = ()
    dates: tuple[DateFormat, ...] = ()

    def start(self, values: Row) -> float | None:
        """Number that stands for a row's values, 0 for dates; None if none does."""
        if self.dates:
            return 0.0 if any(map(DateFormat.read, self.dates, values)) else None
        return values[0] if _is_number(values[0]) else None

    def written(self, values: Row, number: float) -> Row:
        """Value that a number stands for, or the dates so many days later."""
        if not self.dates:
            return (round(number, self.n_digits) if self.n_digits else round(number),)
        moments = map(DateFormat.read, self.dates, values)
        days = timedelta(days=round(number))
        moved = zip(self.dates, values, moments, strict=True)
        return tuple(dates.written(moment + days) if moment else value for dates, value, moment in moved)

    @property
    def n_digits(self) -> int:
        """Digits behind the point."""
        digits = (len(str(one).partition(".")[2]) if isinstance(one, float) else 0 for one in self.known)
        return max(digits, default=0)

    def may_be(self, number: float) -> bool:
        if self.dates:
            return abs(number) <= MAX_DAYS
        return (number > 0 or min(self.known) < 0) and abs(number) <= MAX_FACTOR * max(map(abs, self.known))


def _free_cells(base: DatabaseSample, name: str, column: str) -> _Cells | None:
    table = base.tables.get(name)
    if table is None or column not in table.columns:
        return None
    place = table.columns.index(column)
    tied = table.in_keys | table.referring
    if place in tied | table.booleans:
        return None
    if place in table.dates:
        dates = {table.columns[p]: table.dates[p] for p in sorted(table.dates.keys() - tied)}
        return _Cells(name, tuple(dates), dates=tuple(dates.values()))
    known = tuple(value for value in table.values[place] if _is_number(value))
    return _Cells(name, (column,), known) if known and len(known) == len(table.values[place]) else None


def _make_alike(connection: SmallDatabase, cells: _Cells, rng: Random) -> None:
    """Give all rows of a table one of the column's numbers."""
    if cells.known:
        change = f"UPDATE {quoted(cells.table)} SET {quoted(cells.columns[0])} = ?"
        with suppress(sqlite3.Error):  # a constraint
            _execute(connection, change, (rng.choice(cells.known),))


def _without_children(base: DatabaseSample, name: str) -> str:
    """Query for the rows of a table to which none refers."""
    query = f"SELECT rowid FROM {quoted(name)} AS own_"
    for child, reference in base.children.get(name, ()):
        pairs = zip(reference.columns, reference.parent_columns, strict=True)
        is_child = " AND ".join(f"child_.{quoted(child.columns[p])} = own_.{quoted(key)}" for p, key in pairs)
        joint = "AND" if " WHERE " in query else "WHERE"
        query += f" {joint} NOT EXISTS (SELECT 1 FROM {quoted(child.name)} AS child_ WHERE {is_child})"
    return query


def _leave_out(base: DatabaseSample, connection: SmallDatabase, probe: Probe, rng: Random) -> None:
    """Delete rows that no row refers to, as long as one of the differences comes nearer to 0."""

    def nearest() -> float:
        amounts = (row[-1] for row in _rows(connection, probe))
        return min(map(abs, filter(_is_number, amounts)), default=math.inf)

    names = [name for name in probe.tables if name in base.tables]
    missed = nearest()
    with suppress(sqlite3.Error):  # no rowid
        for name in rng.sample(names, len(names)):
            keys = [key for (key,) in connection.execute(_without_children(base, name))]
            for key in rng.sample(keys, min(MAX_LEFT_OUT, len(keys))) if missed else ():
                connection.execute("SAVEPOINT row_")
                connection.execute(f"DELETE FROM {quoted(name)} WHERE rowid = ?", (key,))
                now = nearest()
                if now >= missed:
                    connection.execute("ROLLBACK TO row_")
                connection.execute("RELEASE row_")
                missed = min(now, missed)


def _execute(connection: SmallDatabase, change: str, cells: Row) -> None:
    """Run a statement; the file's CHECKs and indexes compute expressions for it."""
    with connection.time.metered(connection):
        connection.execute(change, cells)


def _rows(connection: SmallDatabase, probe: Probe) -> Sequence[Row]:
    return run_gold(connection, probe.sql, max_steps=MAX_INSTRUCTIONS).rows


def _meet(connection: SmallDatabase, probe: Probe, cells: _Cells, rng: Random) -> bool:
    """Change a random row so that two amounts are equal, or almost; False, and no change, if none are."""
    table, columns = quoted(cells.table), [quoted(column) for column in cells.columns]
    change = f"UPDATE {table} SET {', '.join(f'{column} = ?' for column in columns)} WHERE rowid = ?"
    met = False
    connection.execute("SAVEPOINT cell_")
    with suppress(sqlite3.Error, OverflowError, ValueError):  # a constraint, no rowid, or out of range
        found = connection.execute(f"SELECT rowid, {', '.join(columns)} FROM {table}").fetchall()
        usable = [(row, number) for row in found if (number := cells.start(row[1:])) is not None]
        (key, *values), start = rng.choice(usable or [((None,), 0.0)])

        def rows_at(number: float) -> Sequence[Row]:
            _execute(connection, change, (*cells.written(values, number), key))
            return _rows(connection, probe)

        before, after = rows_at(start), rows_at(start + 1)
        pairs = enumerate(zip(before, after, strict=False))
        changed = [place for place, (one, other) in pairs if one[-1] != other[-1]]
        if changed and len(before) == len(after):
            place = rng.choice(changed)
            rival = _rival(before, place, rng) if probe.is_ranked else None

            def difference(number: float) -> float | None:
                rows = rows_at(number)
                if max(place, rival or 0) >= len(rows):
                    return None
                amount, other = rows[place][-1], 0 if rival is None else rows[rival][-1]
                return amount - other if _is_number(amount) and _is_number(other) else None

            has_rival = rival is not None or not probe.is_ranked
            solved, rest = secant(difference, start, MAX_STEPS) if has_rival else (start, None)
            if rest is not None and abs(rest) < NEAR and cells.may_be(solved):
                rows_at(solved + rng.choice((0, 0, -1, 1)) * 10**-cells.n_digits)
                met = True
    if not met:
        connection.execute("ROLLBACK TO cell_")
    connection.execute("RELEASE cell_")
    return met


def _rival(rows: Sequence[Row], place: int, rng: Random) -> int | None:
    """Another group, one of the same city say if there is one, and half of the time that with the most."""
    others = [other for other, row in enumerate(rows) if other != place and _is_number(row[-1])]
    own = rows[place][:-1]
    near = [n for n in others if any(one == other for one, other in zip(rows[n], own, strict=False))]
    rivals = near or others
    if rivals and rng.random() < 0.5:
        return max(rivals, key=lambda other: float(rows[other][-1] or 0))
    return rng.choice(rivals) if rivals else None


def _is_number(value: Cell) -> TypeGuard[float]:
    return isinstance(value, int | float)
