"""Rows in which amounts that a query compares are equal: a sum and its bound, or the sums of two groups.

What one row of one table decides is aimed at while rows are drawn. The two sides of `HAVING sum(paid) > owed`
depend on several rows, so they are computed on a small database, where one cell is changed until they meet.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain, islice
from random import Random
from typing import TypeGuard

from sqlglot import exp

from text2sql_grpo.grading.base_sample import DatabaseSample, quoted
from text2sql_grpo.grading.gold_query import GoldQuery
from text2sql_grpo.grading.materialise import Content, SmallDatabase, materialise, run_gold
from text2sql_grpo.grading.query_columns import ColumnRef
from text2sql_grpo.sql.outcome import Cell

MAX_PROBES = 6  # of a gold query and an answer
MAX_CELLS = 4  # changed for one comparison, one after the other
MAX_STEPS = 4  # of the secant method, for a cell
MAX_FACTOR = 10  # of the largest of a column's values
NEAR = 1e-9
_COMPARISONS = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE)


@dataclass(frozen=True)
class Probe:
    """Amounts that a query compares, each of which depends on several rows.

    Attributes:
        sql: Query with the amounts in its last column, by group or joined row.
        columns: Columns on which they depend.
        is_ranked: True if they are compared with each other, False if with 0: a left side less its right one.
    """

    sql: str
    columns: tuple[ColumnRef, ...]
    is_ranked: bool = False


def probes(queries: Iterable[GoldQuery]) -> list[Probe]:
    """Compared aggregates, subqueries and columns of several tables, and groups' amounts that are ranked."""
    found = (probe for query in queries for probe in chain(_compared(query), _ranked(query)) if probe.columns)
    return list(islice(dict.fromkeys(found), MAX_PROBES))


def _compared(query: GoldQuery) -> Iterator[Probe]:
    for node in query.tree.find_all(*_COMPARISONS, exp.Between):
        select = node.parent_select
        if not isinstance(select, exp.Select) or not node.find_ancestor(exp.Where, exp.Having, exp.Join):
            continue
        bounds = [node.args.get(name) for name in ("expression", "low", "high")]
        for bound in (bound for bound in bounds if isinstance(bound, exp.Expr)):
            if _depends_on_rows([node.this, bound]):
                sides = exp.paren(node.this.copy()), exp.paren(bound.copy())
                difference = exp.Sub(this=sides[0], expression=sides[1])
                columns = dict.fromkeys(chain(_columns(node.this, query), _columns(bound, query)))
                yield Probe(_probing(query.tree, select, difference, without=node), tuple(columns))


def _ranked(query: GoldQuery) -> Iterator[Probe]:
    for select in query.tree.find_all(exp.Select) if query.ranks_groups else ():
        for amount in select.selects if select.args.get("group") else ():
            if amount.find(exp.Sum, exp.Avg, exp.Max, exp.Min) and not amount.find(exp.Window):
                columns = tuple(dict.fromkeys(_columns(amount, query)))
                yield Probe(_probing(query.tree, select, amount.unalias()), columns, is_ranked=True)


def with_equal_amounts(
    base: DatabaseSample, content: Content, found: Sequence[Probe], rng: Random
) -> Content:
    """Rows of tables, some cells changed so that amounts that a query compares are equal, or almost.

    Rows that a constraint refuses are left out.
    """
    with closing(materialise(base, content)) as connection:
        for probe in found:
            places = [place for place in probe.columns if _is_free(base, *place)]
            for _ in range(MAX_CELLS if places else 0):
                _meet(base, connection, probe, rng.choice(places), rng)
        return {
            name: connection.execute(
                f"SELECT {', '.join(map(quoted, table.columns))} FROM {quoted(name)}"
            ).fetchall()
            for name, table in base.tables.items()
        }


def _depends_on_rows(sides: Sequence[exp.Expr]) -> bool:
    parts = [part for side in sides for part in side.walk()]
    columns = [part for part in parts if isinstance(part, exp.Column)]
    is_plain = all(isinstance(side, exp.Column) for side in sides)
    is_counted = any(isinstance(part, exp.Count | exp.Window) for part in parts)
    is_summed = any(isinstance(part, exp.AggFunc | exp.Query) for part in parts)
    return not is_counted and (is_summed or (not is_plain and len({column.table for column in columns}) > 1))


def _columns(side: exp.Expr, query: GoldQuery) -> Iterator[ColumnRef]:
    """Columns of tables in a side, and those of which a CTE or derived table computes its columns."""
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


def _is_free(base: DatabaseSample, name: str, column: str) -> bool:
    """True for columns of numbers that are no key, no reference and not computed."""
    table = base.tables.get(name)
    if table is None or column not in table.columns:
        return False
    place = table.columns.index(column)
    tied = {p for key in table.keys for p in key} | {p for r in table.references for p in r.columns}
    values = table.values[place]
    is_number = bool(values) and all(isinstance(value, int | float) for value in values)
    return is_number and place not in tied | table.booleans


def _meet(
    base: DatabaseSample, connection: SmallDatabase, probe: Probe, cell: ColumnRef, rng: Random
) -> None:
    """Change a cell of a random row so that two amounts are equal, or next to it; leave it if none are."""
    name, column = cell
    values = base.tables[name].values[base.tables[name].columns.index(column)]
    known = [value for value in values if _is_number(value)]
    n_digits = max(len(str(value).partition(".")[2]) if isinstance(value, float) else 0 for value in known)
    met = False
    connection.execute("SAVEPOINT cell_")
    with suppress(sqlite3.Error, OverflowError, ValueError):  # a constraint, no rowid, or out of range
        found = connection.execute(f"SELECT rowid, {quoted(column)} FROM {quoted(name)}").fetchall()
        key, start = rng.choice([row for row in found if _is_number(row[1])] or [(None, 0)])
        n_amounts = len(run_gold(connection, probe.sql).rows)
        rival = rng.randrange(n_amounts) if probe.is_ranked and n_amounts else None

        def differences(value: float) -> list[float | None]:
            written = round(value, n_digits) if n_digits else round(value)
            connection.execute(
                f"UPDATE {quoted(name)} SET {quoted(column)} = ? WHERE rowid = ?", (written, key)
            )
            amounts = [row[-1] for row in run_gold(connection, probe.sql).rows]
            zero = 0 if rival is None else amounts[rival] if rival < len(amounts) else None
            return [one - zero if _is_number(one) and _is_number(zero) else None for one in amounts]

        value = _solved(differences, start, rng)
        lowest, highest = min(known), max(map(abs, known)) * MAX_FACTOR
        if value is not None and (value > 0 or lowest < 0) and abs(value) <= highest:
            differences(value + rng.choice((0, 0, -1, 1)) * 10**-n_digits)
            met = True
    if not met:
        connection.execute("ROLLBACK TO cell_")
    connection.execute("RELEASE cell_")


def _solved(
    differences: Callable[[float], Sequence[float | None]], start: float, rng: Random
) -> float | None:
    """Value at which one of some differences is 0, by the secant method; None if none is found."""
    before, after = differences(start), differences(start + 1)
    pairs = enumerate(zip(before, after, strict=False))
    changed = [place for place, (one, other) in pairs if None not in (one, other) and one != other]
    if len(before) != len(after) or not changed:
        return None
    place = rng.choice(changed)
    last, value = start, start + 1
    low, high = before[place], after[place]
    for _ in range(MAX_STEPS):
        if low is None or high is None or high in (0, low):
            break
        last, value, low = value, value - high * (value - last) / (high - low), high
        high = dict(enumerate(differences(value))).get(place)
    return value if high is not None and abs(high) < NEAR else None


def _is_number(value: Cell) -> TypeGuard[float]:
    return isinstance(value, int | float)
