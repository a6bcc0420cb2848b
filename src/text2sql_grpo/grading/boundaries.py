"""Rows in which the two sides of a comparison are equal: of a sum and its bound, say.

What one row of one table decides is aimed at while rows are drawn. The two sides of `HAVING sum(paid) > owed`
depend on several rows, so they are computed on a small database, where one cell is changed until they meet.
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from random import Random
from typing import TypeGuard

from sqlglot import exp

from text2sql_grpo.grading.base_sample import DatabaseSample, quoted
from text2sql_grpo.grading.gold_query import GoldQuery
from text2sql_grpo.grading.materialise import Content, SmallDatabase, materialise, run_gold
from text2sql_grpo.grading.query_columns import ColumnRef
from text2sql_grpo.sql.outcome import Cell

MAX_PROBES = 6  # of a query
MAX_CELLS = 4  # changed for one comparison, one after the other
MAX_STEPS = 4  # of the secant method, for a cell
MAX_FACTOR = 10  # of the largest of a column's values
NEAR = 1e-9
_COMPARISONS = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE)


@dataclass(frozen=True)
class Probe:
    """A comparison whose two sides depend on several rows.

    Attributes:
        sql: Query whose last column is the left side less the right one, by group or joined row.
        columns: Columns on which they depend.
    """

    sql: str
    columns: tuple[ColumnRef, ...]


def probes(query: GoldQuery) -> Iterator[Probe]:
    """Comparisons of aggregates, of subqueries and of columns of several tables."""
    for node in query.tree.find_all(*_COMPARISONS, exp.Between):
        select = node.parent_select
        if not isinstance(select, exp.Select) or not node.find_ancestor(exp.Where, exp.Having, exp.Join):
            continue
        bounds = [node.args.get(name) for name in ("expression", "low", "high")]
        for bound in (bound for bound in bounds if isinstance(bound, exp.Expr)):
            if _depends_on_rows([node.this, bound]):
                used = [*_columns(select, node.this, query), *_columns(select, bound, query)]
                if used:
                    yield Probe(_difference(query.tree, select, node, bound), tuple(dict.fromkeys(used)))


def with_equal_sides(base: DatabaseSample, content: Content, found: Sequence[Probe], rng: Random) -> Content:
    """Rows of tables, some cells changed so that the two sides of comparisons are equal.

    Rows that a constraint refuses are left out.
    """
    with closing(materialise(base, content)) as connection:
        for probe in found:
            places = [
                (name, column)
                for name, column in probe.columns
                if name in base.tables and _is_free(base, name, column)
            ]
            for _ in range(MAX_CELLS if places else 0):
                _meet(base, connection, probe.sql, *rng.choice(places), rng)
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


def _columns(select: exp.Select, side: exp.Expr, query: GoldQuery) -> Iterator[ColumnRef]:
    """Columns of tables in a side, and those of which a CTE or derived table computes its columns."""
    named = list(side.find_all(exp.Column))
    known = query.columns_of
    yield from (known[id(column)] for column in named if id(column) in known)
    computed = {column.name for column in named if id(column) not in known}
    for made in query.tree.find_all(exp.Alias) if computed else ():
        if made.alias in computed:
            yield from (known[id(column)] for column in made.find_all(exp.Column) if id(column) in known)


def _difference(tree: exp.Query, select: exp.Select, node: exp.Expr, bound: exp.Expr) -> str:
    """The query in which a comparison stands, without it, and with the difference of its sides."""
    place = next(place for place, part in enumerate(select.walk()) if part is node)
    copy = select.copy()
    next(part for number, part in enumerate(copy.walk()) if number == place).replace(exp.true())
    for name in ("order", "limit", "offset", "distinct"):
        copy.set(name, None)
    sides = exp.paren(node.this.copy()), exp.paren(bound.copy())
    copy.append("expressions", exp.alias_(exp.Sub(this=sides[0], expression=sides[1]), "d_"))
    with_ = tree.args.get("with_")
    if with_ is not None and copy.args.get("with_") is None:
        copy.set("with_", with_.copy())
    return copy.sql("sqlite")


def _is_free(base: DatabaseSample, name: str, column: str) -> bool:
    """True for columns of numbers that are no key, no reference and not computed."""
    table = base.tables[name]
    if column not in table.columns:
        return False
    place = table.columns.index(column)
    tied = {p for key in table.keys for p in key} | {p for r in table.references for p in r.columns}
    values = table.values[place]
    is_number = bool(values) and all(isinstance(value, int | float) for value in values)
    return is_number and place not in tied | table.booleans


def _meet(
    base: DatabaseSample, connection: SmallDatabase, probe: str, name: str, column: str, rng: Random
) -> None:
    """Change a cell of a random row so that a difference becomes 0; leave it as it is if none does."""
    values = base.tables[name].values[base.tables[name].columns.index(column)]
    known = [value for value in values if isinstance(value, int | float)]
    n_digits = max(len(str(value).partition(".")[2]) if isinstance(value, float) else 0 for value in known)
    found = connection.execute(f"SELECT rowid, {quoted(column)} FROM {quoted(name)}")
    cells = [(key, value) for key, value in found if isinstance(value, int | float)]
    if not cells:
        return
    key, start = rng.choice(cells)

    def differences(value: float) -> list[Cell]:
        cell = round(value, n_digits) if n_digits else round(value)
        connection.execute(f"UPDATE {quoted(name)} SET {quoted(column)} = ? WHERE rowid = ?", (cell, key))
        return [row[-1] for row in run_gold(connection, probe).rows]

    met = False
    connection.execute("SAVEPOINT cell_")
    with suppress(sqlite3.Error, OverflowError, ValueError):  # a constraint, or out of range
        value = _solved(differences, start, rng)
        lowest, highest = min(known), max(map(abs, known)) * MAX_FACTOR
        met = value is not None and (value > 0 or lowest < 0) and abs(value) <= highest
    if not met:
        connection.execute("ROLLBACK TO cell_")
    connection.execute("RELEASE cell_")


def _solved(differences: Callable[[float], list[Cell]], start: float, rng: Random) -> float | None:
    """Value at which one of some differences is 0, by the secant method; None if none is found."""
    before, after = differences(start), differences(start + 1)
    changed = [
        place
        for place, (one, other) in enumerate(zip(before, after, strict=False))
        if _is_number(one) and _is_number(other) and one != other
    ]
    if len(before) != len(after) or not changed:
        return None
    place = rng.choice(changed)
    last, value = start, start + 1
    low, high = before[place], after[place]
    for _ in range(MAX_STEPS):
        if not _is_number(low) or not _is_number(high) or high in (0, low):
            break
        last, value, low = value, value - high * (value - last) / (high - low), high
        high = dict(enumerate(differences(value))).get(place)
    return value if _is_number(high) and abs(high) < NEAR else None


def _is_number(value: Cell) -> TypeGuard[float]:
    return isinstance(value, int | float)
