"""Random content for a small variant of a database, biased towards the dependencies of one query."""

import math
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import chain, pairwise, permutations
from random import Random
from typing import TypeVar

from text2sql_grpo.grading.base_sample import DatabaseSample, Reference, TableSample
from text2sql_grpo.grading.gold_query import Aim, GoldQuery
from text2sql_grpo.grading.materialise import row_test
from text2sql_grpo.grading.near_values import (
    MIN_ALIKE,
    DateFormat,
    another_code,
    as_column_value,
    fitted,
    inside_codes,
    is_number_as_text,
    matching_texts,
    near_values,
    of_other_lengths,
    reshaped,
    secant,
    with_number,
)
from text2sql_grpo.grading.nested import draw_nested
from text2sql_grpo.grading.query_columns import ColumnRef
from text2sql_grpo.grading.regular_expressions import texts_around
from text2sql_grpo.grading.time_steps import stepped
from text2sql_grpo.sql.outcome import Cell, Row

V = TypeVar("V")
OTHER_ROWS = 5  # rows of a table that the query does not read
MAX_TABLE_ROWS = 300
MAX_POOL = 40
MAX_PLANTED = 80  # texts, and numbers, among the literals of one column in one draw
MAX_CORES = 4  # patterns of a column that one text may match together
KEY_ATTEMPTS = 6
MAX_AIMED = 6  # rows of a table in which an expression gets a value that was aimed at
MAX_STEPS = 12  # of the search for such a row
MAX_DONORS = 12  # rows of the base for a row that a CHECK refuses
MAX_JOINS = 3  # references between two rows of which a query compares dates
TURNS = ((12, 31, 22), (1, 1, 0), (6, 30, 22), (7, 1, 0))  # month, day and hour, in winter and summer
MIN_DAYS, N_BETWEEN = 60, 12  # of a range of dates, and parts of it
OUTLIER = 10  # times the largest of a column's values
MAX_SUMMED = 1e14  # so that no sum of outliers exceeds SQLite's integers
MAX_TEXT = 120  # characters of a text that was aimed at
_FRACTIONS = re.compile(r"(dec|numeric|number|real)\w*\s*\(\s*\d+\s*,\s*[1-9]|money", re.IGNORECASE)


@dataclass(frozen=True)
class Recipe:
    """Random parameters of one variant; shares are in [0, 1].

    Attributes:
        rows: Rows of a table that the query reads, before groups need more.
        change: Share of cells drawn anew in a column that the query reads.
        planted: Share of those that come from the query's literals.
        exact: Share of those that are a literal itself, not a value next to it.
        variety: Number of distinct values of a column; few make duplicates and ties. 0: no bound.
        childless: Share of rows that no row references.
        nulls: Share of NULLs in columns that may hold them.
        in_groups: True if groups get different sizes.
        ties: True if groups get about the same size, and columns that are added up one or two values.
        kept: Share of columns that keep the base's values; then rows of it that follow each other are taken.
    """

    rows: int
    change: float
    planted: float
    exact: float
    variety: int
    childless: float
    nulls: float
    in_groups: bool
    ties: bool = False
    kept: float = 0.0

    @classmethod
    def drawn(cls, rng: Random) -> "Recipe":
        """Draw a recipe."""
        return cls(
            rows=rng.choice([1, 3, 6, 10, 16, 24]),
            change=rng.choice([0.3, 0.7, 1.0]),
            planted=rng.choice([0.3, 0.6, 0.9]),
            exact=rng.choice([0.0, 0.2, 0.5, 0.8]),
            variety=rng.choice([2, 3, 5, 0, 0]),
            childless=rng.choice([0.0, 0.3, 0.6]),
            nulls=rng.choice([0.0, 0.1, 0.3]),
            in_groups=rng.random() < 0.6,
        )


def draw_rows(
    base: DatabaseSample,
    gold: GoldQuery,
    rng: Random,
    recipe: Recipe | None = None,
    *,
    known: Mapping[str, Sequence[Row]] | None = None,
) -> dict[str, list[Row]]:
    """Rows of each table, parents first, which keep keys and references (CHECKs may refuse some).

    Args:
        base: Sample of the database.
        gold: Query towards whose dependencies the rows are biased.
        rng: Random numbers.
        recipe: Parameters; None to draw some.
        known: Rows of some tables, which stay.
    """
    content = _Content(base, gold, rng, recipe or Recipe.drawn(rng))
    for name, table in base.tables.items():
        made = known[name] if known and name in known else content.table_rows(table)
        content.rows[name] = [tuple(row) for row in made]
        content.asked[name] = content.rows_asked(table, content.rows[name])
    return content.rows


@dataclass
class _Content:
    """Content of a small database while it is drawn.

    Attributes:
        rows: Rows made so far, parents first.
        asked: Those of them that hold a literal of the query, or refer to such a row.
        fresh: Number of new values by table and position of the column.
    """

    base: DatabaseSample
    gold: GoldQuery
    rng: Random
    recipe: Recipe
    rows: dict[str, list[Row]] = field(default_factory=dict)
    asked: dict[str, list[Row]] = field(default_factory=dict)
    fresh: dict[tuple[str, int], int] = field(default_factory=dict)

    def table_rows(self, table: TableSample) -> list[list[Cell]]:
        rows = self._start(table)
        single_keys = {key[0] for key in table.keys if len(key) == 1}
        is_read = table.name in self.gold.tables
        for position, column in enumerate(table.columns):
            if position in table.referring:
                continue
            if position in single_keys:
                self._rekey(table, position, rows)
            elif self.recipe.kept and self.rng.random() < self.recipe.kept:
                continue
            elif (table.name, column) in self.gold.columns or (is_read and self.rng.random() < 0.3):
                self._redraw(table, position, rows)
        for reference in table.references:
            rows = self._refer(table, reference, rows)
        if self.gold.is_recursive:
            self._deepen(table, rows)
        if is_read:
            self._aim(table, rows)
        self._step(table, rows)
        self._order(table, rows)
        self._move_apart(table, rows)
        for position in sorted(table.nullable - table.in_keys):
            names = self.base.empty_together.get((table.name, table.columns[position].lower()), ())
            others = [p for p in table.nullable if table.columns[p].lower() in names]
            is_asked = (table.name, table.columns[position]) in self.gold.missing
            share = max(self.recipe.nulls, self.recipe.planted / 6 if is_asked else 0)
            for row in rows:
                if self.rng.random() < share:
                    for place in (position, *others):
                        row[place] = None
        for position, digits in table.digits.items():
            for row in rows:
                cell = row[position]
                row[position] = round(cell, digits) if isinstance(cell, float) else cell
        if table.rows and table.name in self.base.checked:
            self._meet_checks(table, rows)
        for key in table.keys:
            rows = list(self._without_duplicates(table, key, rows))
        return rows

    def _start(self, table: TableSample) -> list[list[Cell]]:
        """Rows of the base, some of them several times; made-up ones if the base has none."""
        n_rows = self._n_rows(table)
        if table.rows:
            known = self.rng.sample(table.rows, min(n_rows, len(table.rows)))
            if self.recipe.kept:
                first = self.rng.randrange(len(table.rows) - len(known) + 1)
                known = list(table.rows[first : first + len(known)])
            known += self.rng.choices(table.rows, k=n_rows - len(known))
            return [list(row) for row in known]
        pools = [_alike(table, position) for position in range(len(table.columns))]
        return [[self.rng.choice(pool) for pool in pools] for _ in range(n_rows)]

    def _n_rows(self, table: TableSample, below: frozenset[str] = frozenset()) -> int:
        """Number of rows to draw; enough for the tables that refer to each row once, those `below` aside."""
        n_rows = min(OTHER_ROWS, len(table.rows))
        is_read = table.name in self.gold.tables
        if is_read:
            n_rows = self.recipe.rows
            size = max((0, *self.gold.group_sizes))
            grouped = {column for name, column in self.gold.grouped if name == table.name}
            has_groups = grouped and not any({table.columns[p] for p in key} <= grouped for key in table.keys)
            if table.references or has_groups or size > n_rows:
                n_rows = max(2 * n_rows, 3 * size + 4)
        for child, reference in self.base.children.get(table.name, ()):
            if child.name in self.gold.tables and not is_read:
                n_rows = max(n_rows, min(self.recipe.rows, 8))
            if child.refers_once(reference) and child.name not in below:
                n_rows = max(n_rows, self._n_rows(child, below | {table.name}))
        return min(n_rows, MAX_TABLE_ROWS)

    def _planted(self, table: TableSample, position: int) -> tuple[list[Cell], list[Cell]]:
        """Values equal to the literals that the column is compared with, and values next to them."""
        if position in table.booleans:
            return [], []
        column = (table.name, table.columns[position])
        columns = self._referring(table, position)
        for left, right in self.gold.links:
            columns |= {left, right} if column in (left, right) else set()
        literals = self._some([value for c in sorted(columns) for value in self.gold.literals.get(c, ())])
        alike = _alike(table, position)
        if _FRACTIONS.search(table.types[position]) and all(type(value) is int for value in alike):
            alike = [*alike, 0.5]  # whole amounts by chance
        dates = table.dates.get(position)
        exact: list[Cell] = []
        near: list[Cell] = []
        cores: list[str] = []
        is_code = len(table.shapes[position]) == 1
        for literal in literals * 2 if dates and len(literals) > 1 else literals:
            if dates and literal in alike and not dates.read(literal):  # it stands for no date
                exact.append(literal)
                continue
            if dates:  # an hour of a year is asked for by two literals
                known = [
                    *self.rng.sample(exact, min(2, len(exact))),
                    *self.rng.sample(alike, min(3, len(alike))),
                ]
                met, beside = dates.around(literal, known)
                exact += met
                near += beside
                continue
            if literal in self.gold.patterns and isinstance(literal, str):
                if any(isinstance(value, str) for value in alike):
                    texts = matching_texts(literal)
                    exact += texts[:4]
                    near += texts[4:] + inside_codes(literal, alike)
                    cores.append(str(texts[0]))
                continue
            value = as_column_value(literal, alike)
            exact += [] if value is None else [value]
            near += near_values(literal, alike, is_code=is_code)
            if value is None and column in self.gold.cut:
                texts = with_number(literal, alike)
                exact, near = exact + texts[:1], near + texts[1:]
        near += _between(dates, exact) if dates else []
        for expression in self.gold.expressions.get(column, ()):
            matching, beside = texts_around(expression, table.values[position], self.rng)
            exact, near = exact + matching, near + beside
        if column in self.gold.divided:  # a remainder is no value of its column
            near = _keeping_sign(near, alike)
        doubtful = {*exact, *near} - {*_keeping_sign([*exact, *near], alike)}
        refused = self._refused(table, position, doubtful)
        exact, near = ([value for value in some if value not in refused] for some in (exact, near))
        fractions = sorted({value for value in exact if isinstance(value, float)})
        exact += [(low + high) / 2 for low, high in pairwise(fractions)]  # also apart in single precision
        exact += [first + last for first, last in permutations(dict.fromkeys(cores[:MAX_CORES]), 2)]
        if column in self.gold.trimmed:
            exact += _padded(exact)
        if not dates:
            signs = self._common(table, position, with_words=False)
            runs, asked = table.shapes[position], set(literals) - self.gold.patterns
            of_asked = runs if is_code and column in self.gold.cut else ()  # a literal may be a part of it
            met = fitted([value for value in exact if value in asked], alike, signs, of_asked, self.rng)
            exact = [value for value in exact if value not in asked]
            exact = [*met, *(fitted(exact, alike, signs, runs, self.rng) or exact)]
            near = fitted(near, alike, signs, runs, self.rng)
        return exact, near

    def _some(self, literals: list[Cell]) -> list[Cell]:
        """Sample of literals: an answer may compare with thousands. Texts and numbers do not share places."""
        if len(literals) <= MAX_PLANTED:
            return literals
        texts = [value for value in literals if isinstance(value, str)]
        numbers = [value for value in literals if not isinstance(value, str)]
        return [v for some in (texts, numbers) for v in self.rng.sample(some, min(len(some), MAX_PLANTED))]

    def _refused(self, table: TableSample, position: int, values: set[Cell]) -> set[Cell]:
        """Values with which a CHECK refuses a row of the base, such as the 0 of `coalesce(paid, 0)`."""
        if not (values and table.rows and table.name in self.base.checked):
            return set()
        row = self.rng.choice(table.rows)
        with row_test(self.base, table.name) as accepts:
            return {value for value in values if not accepts([*row[:position], value, *row[position + 1 :]])}

    def _referring(self, table: TableSample, position: int) -> set[ColumnRef]:
        """A column, and those that refer to it."""
        column = table.columns[position]
        return {(table.name, column)} | {
            (child.name, child.columns[reference.columns[reference.parent_columns.index(column)]])
            for child in self.base.tables.values()
            for reference in child.references
            if reference.parent == table.name and column in reference.parent_columns
        }

    def _pool(self, table: TableSample, position: int) -> list[Cell]:
        """Candidate values of a column: its own, and those of columns it is compared with."""
        if position in table.booleans:
            return [0, 1]
        values = own = _alike(table, position)
        kinds = {type(value) for value in values}
        dates = table.dates.get(position)
        column = (table.name, table.columns[position])
        if dates and column in self.gold.weekly:
            moments = filter(None, map(dates.read, self.rng.sample(own, min(MAX_AIMED, len(own)))))
            values = values + [
                dates.written(m.replace(month=12, day=28 + self.rng.randrange(4))) for m in moments
            ]
        if dates and dates.has_time and column in self.gold.shifted:
            moments = filter(None, map(dates.read, self.rng.sample(own, min(MAX_AIMED, len(own)))))
            turned = [self._turned(dates, moment) for moment in moments]
            values = turned if self.rng.random() < 0.5 else values + turned
        values = list(dict.fromkeys((*values, *self.base.listed.get((column[0], column[1].lower()), ()))))
        for link in self.gold.links:
            if column in link:
                name, other = link[0] if link[1] == column else link[1]
                if name in self.base.tables and other in self.base.tables[name].columns:
                    sample = self.base.tables[name]
                    made = self.rows.get(name)
                    place = sample.columns.index(other)
                    found = [row[place] for row in made] if made else sample.values[place]
                    fitting = [value for value in found if type(value) in kinds]
                    values = values[:MAX_POOL] + [v for v in fitting if not dates or dates.read(v)]
        if not dates and all(type(value) is int for value in values):
            low, high = min(values), max(values)  # type: ignore[type-var]
            values = values + [self.rng.randint(low, high) for _ in range(8)]  # type: ignore[arg-type]
        if is_number_as_text(values):
            for value in self.rng.sample(values, min(3, len(values))):
                values = values + of_other_lengths(str(value))
        if column in self.gold.cut and not dates:
            others = reshaped(own, self.rng)
            values = others if others and self.rng.random() < 0.5 else others + values
        if column in self.gold.cased:
            texts = [value for value in own if isinstance(value, str)]
            values = values + [
                self._in_other_case(text) for text in self.rng.sample(texts, min(4, len(texts)))
            ]
        if column in self.gold.trimmed:
            values = values + _padded(self.rng.sample(own, min(4, len(own)))) + [" "]
        if self.rng.random() < 0.5:  # values that no row of the base holds
            some = self.rng.sample(values, min(6, len(values)))
            for value in some:
                beside = near_values(value, values, is_code=len(table.shapes[position]) == 1)
                values = values + (dates.around(value, ())[1] if dates else beside)
        values = list(dict.fromkeys(values))
        if not dates:
            common = self._common(table, position, with_words=column in self.gold.cut)
            values = fitted(values, own, common, table.shapes[position], self.rng)
        values = _keeping_sign(values, own)
        is_tied = self.recipe.ties and column in self.gold.summed
        size = self.rng.choice((1, 2)) if is_tied else self.recipe.variety or MAX_POOL
        pool = self.rng.sample(values, min(size, len(values)))
        steps = self.gold.steps.get(column, ())
        if dates and steps and len(pool) > 1 and self.rng.random() < 0.5:
            pool[-1] = stepped(dates, pool[0], steps, self.rng) or pool[-1]
        return pool

    def _turned(self, dates: DateFormat, moment: datetime) -> Cell:
        """A moment within two hours of the turn of a year or a half of it: of a quarter and a month, too."""
        month, day, hour = self.rng.choice(TURNS)
        return dates.written(moment.replace(month=month, day=day, hour=hour + self.rng.randrange(2)))

    def _common(self, table: TableSample, position: int, *, with_words: bool) -> dict[str, int]:
        """Signs, and perhaps words that the query does not ask for, that all texts of a column have."""
        literals = self.gold.literals.get((table.name, table.columns[position]), ())
        asked = {str(literal).strip("%") for literal in literals}
        parts = table.common_parts[position].items()
        return {part: n for part, n in parts if not part.isalnum() or (with_words and part not in asked)}

    def _step(self, table: TableSample, rows: list[list[Cell]]) -> None:
        """Move dates of some rows by one of the steps from a date of the same row, or of one joined to it.

        Or from that of another row with the same parents: half of the dates of one table, and all where
        the column is compared with itself.
        """
        own_parents = (reference.columns for reference in table.references)
        free = [columns for columns in own_parents if table.in_keys.isdisjoint(columns)]
        for position, column in enumerate(table.columns):
            own = table.name, column
            dates, columns = table.dates.get(position), sorted(self._referring(table, position))
            steps = [step for one in columns for step in self.gold.steps.get(one, ())]
            if not (dates and steps) or position in table.referring:
                continue
            if self.rng.random() < 0.5:  # else dates next to literals are lost
                continue
            linked = [other for link in self.gold.links if own in link for other in link if other != own]
            name, other = self.rng.choice(linked or [own])
            sample = self.base.tables.get(name)
            for row in self.rng.sample(rows, min(MAX_AIMED, len(rows))):
                near: Sequence[Cell] | None = row
                if not linked or (name == table.name and self.rng.random() < 0.5):
                    near = self.rng.choice(rows)
                    for place in (place for columns in free for place in columns):
                        row[place] = near[place]
                elif name != table.name:
                    near = self._joined(table, row, name)
                if near and sample and other in sample.columns:
                    value = near[sample.columns.index(other)]
                    row[position] = stepped(dates, value, steps, self.rng) or row[position]

    def _move_apart(self, table: TableSample, rows: list[list[Cell]]) -> None:
        """Move moments of rows of one parent by a minute and a second where they never were the same.

        Not those whose ties the gold query decides.
        """
        for columns in table.apart:
            seen, place = set[Row](), columns[-1]
            if (table.name, table.columns[place]) in self.gold.tied:
                continue
            for row in rows:
                moment = table.dates[place].read(row[place])
                while moment and tuple(row[column] for column in columns) in seen:
                    moment += timedelta(seconds=61)
                    row[place] = table.dates[place].written(moment)
                seen.add(tuple(row[column] for column in columns))

    def _order(self, table: TableSample, rows: list[list[Cell]]) -> None:
        """Move dates behind those that they were never before, unless the query asks which is later.

        Of the two, the one that the query compares with a literal or moves by a step stays.
        """
        name, columns, asked = table.name, table.columns, self.gold.opposed
        compared = self.gold.literals.keys() | self.gold.steps.keys()
        for row in rows:
            for first, second in table.spans * 2:  # a move may undo an earlier one
                one, other = (name, columns[first]), (name, columns[second])
                dates, later_dates = table.dates[first], table.dates[second]
                early, late = dates.read(row[first]), later_dates.read(row[second])
                if not early or not late or early <= late or (one, other) in asked or (other, one) in asked:
                    continue
                gap = early - late
                if not (dates.has_time and later_dates.has_time):
                    gap = timedelta(days=gap.days + 1)
                with suppress(OverflowError):
                    if other in compared and one not in compared:
                        row[first] = dates.written(late - gap)
                    else:
                        row[second] = later_dates.written(early + gap)

    def _meet_checks(self, table: TableSample, rows: list[list[Cell]]) -> None:
        """Give rows that a CHECK refuses the cells of a row of the base, but for those that it accepts.

        Of some rows of the base it is the one with most of the cells that the query compares, then reads.
        """
        own = [(table.name, column) for column in table.columns]
        read = [place for place, column in enumerate(own) if column in self.gold.columns]
        compared = [place for place in read if own[place] in self.gold.literals]
        linked = table.in_keys | table.referring
        with row_test(self.base, table.name) as accepts:
            for row in rows:
                if accepts(row):
                    continue
                wanted = list(row)
                donors = self.rng.sample(table.rows, min(MAX_DONORS, len(table.rows)))
                shared = [[_n_equal(one, wanted, each) for each in (compared, read)] for one in donors]
                donor = donors[shared.index(max(shared))]
                row[:] = donor
                places = self.rng.sample(range(len(row)), len(row))
                # Keys first, as rows refer to them.
                places.sort(key=lambda p: (p not in table.in_keys, p not in linked, p not in read))
                refused = set[int]()
                for place in places * 2:  # what is refused may be accepted behind another cell
                    if place in refused or wanted[place] == row[place]:
                        continue
                    kept, row[place] = row[place], wanted[place]
                    if accepts(row):
                        refused.clear()
                    else:
                        row[place] = kept
                        refused.add(place)
                for reference in table.references:
                    self._meet_reference(table, reference, row, rows, accepts)

    def _meet_reference(
        self,
        table: TableSample,
        reference: Reference,
        row: list[Cell],
        rows: list[list[Cell]],
        accepts: Callable[[Sequence[Cell]], bool],
    ) -> None:
        """Let a row refer to another parent, or none, where the one that it names is not there."""
        parents = self._parents(table, reference, rows)
        named = tuple(row[place] for place in reference.columns)
        if named in parents or None in named:
            return
        tried = [*self.rng.sample(parents, min(3, len(parents))), (None,) * len(named)]
        for parent in tried:
            for place, value in zip(reference.columns, parent, strict=True):
                row[place] = value
            if accepts(row):
                return

    def _joined(self, table: TableSample, row: Sequence[Cell], name: str) -> Sequence[Cell] | None:
        """Row of another table that a row is joined to by a few references; None if there is none."""
        reached, seen = [(table, row)], {table.name}
        for _ in range(MAX_JOINS):
            reached = [
                one for start in reached for one in self._neighbours(*start) if one[0].name not in seen
            ]
            seen |= {sample.name for sample, _ in reached}
            if name in seen:
                return next(found for sample, found in reached if sample.name == name)
        return None

    def _neighbours(
        self, table: TableSample, row: Sequence[Cell]
    ) -> Iterator[tuple[TableSample, Sequence[Cell]]]:
        """A row for each reference of a row, and for each reference to it."""
        keys = [
            (
                self.base.tables[reference.parent],
                reference.parent_columns,
                [row[p] for p in reference.columns],
            )
            for reference in table.references
        ]
        for child, reference in self.base.children.get(table.name, ()):
            names = tuple(child.columns[position] for position in reference.columns)
            keys.append((child, names, [row[table.columns.index(n)] for n in reference.parent_columns]))
        for sample, names, key in keys:
            places = [sample.columns.index(name) for name in names]
            made = self.rows.get(sample.name, ())
            found = next((one for one in made if [one[place] for place in places] == key), None)
            if found is not None:
                yield sample, found

    def _redraw(self, table: TableSample, position: int, rows: list[list[Cell]]) -> None:
        column = (table.name, table.columns[position])
        if nested := table.nested.get(position):
            of_others = {v for other, found in self.gold.literals.items() if other != column for v in found}
            others = [value for value in self.gold.constants if value not in of_others]
            literals = self._some([*self.gold.literals.get(column, ()), *others])
            n_values = self.recipe.variety or min(len(rows), MAX_POOL)
            json_keys = sorted(self.gold.json_keys)
            drawn = [draw_nested(nested, literals, self.rng, json_keys).written() for _ in range(n_values)]
            for row in rows:
                if self.rng.random() < self.recipe.change:
                    row[position] = self.rng.choice(drawn)
            return
        pool = self._pool(table, position)
        exact, near = self._planted(table, position)
        is_grouped = column in self.gold.grouped
        groups = self._groups(pool, len(rows)) if is_grouped and self.recipe.in_groups else []
        planted = (1 - self.recipe.planted) / 2 if column in self.gold.denied else self.recipe.planted
        if column in self.gold.mixed:
            planted = min(planted, 0.5)
        for index, row in enumerate(rows):
            if groups:
                row[position] = groups[index]
            if self.rng.random() >= self.recipe.change:
                continue
            if (exact or near) and self.rng.random() < planted:
                use_exact = exact and (not near or self.rng.random() < self.recipe.exact)
                row[position] = self.rng.choice(exact if use_exact else near)
            elif not groups:
                row[position] = pool[index % len(pool)] if not self.recipe.variety else self.rng.choice(pool)
        cells = [row[position] for row in rows]
        numbers = [cell for cell in cells if isinstance(cell, int | float) and abs(cell) < MAX_SUMMED]
        is_summed = column in self.gold.summed and not self.recipe.ties
        is_amount = is_summed and position not in table.dates.keys() | table.booleans
        if is_amount and numbers and self.rng.random() < 0.5:
            outlier = OUTLIER * max(numbers, key=abs)  # else the largest sum is that of the most rows
            self.rng.choice(rows)[position] = outlier
        if is_grouped:
            self._regroup(table, position, rows)
            self._respell(table, position, rows)

    def _regroup(self, table: TableSample, position: int, rows: list[list[Cell]]) -> None:
        """Give rows groups of a part of their texts, such as the domains of addresses, some of them new."""
        column = (table.name, table.columns[position])
        signs = sorted(part for part in table.common_parts[position] if not part.isalnum())
        is_cut = column in self.gold.cut & self.gold.grouped and position not in table.dates
        if not (is_cut and signs and self.recipe.in_groups):
            return
        sign, is_end = self.rng.choice(signs), self.rng.random() < 0.5
        known = (str(value).partition(sign)[2 if is_end else 0] for value in _alike(table, position))
        parts: list[Cell] = list(dict.fromkeys(known))
        parts = self.rng.sample([*parts, *reshaped(parts, self.rng)], len(parts))
        for row, part in zip(rows, self._groups(parts, len(rows)), strict=True):
            if isinstance(row[position], str):
                start, _, end = str(row[position]).partition(sign)
                row[position] = f"{start}{sign}{part!s}" if is_end else f"{part!s}{sign}{end}"

    def _respell(self, table: TableSample, position: int, rows: list[list[Cell]]) -> None:
        """Give some texts the other case, or a blank, where the query takes them as the same."""
        column = (table.name, table.columns[position])
        for row in self.rng.sample(rows, len(rows) // 4):
            value = row[position]
            if isinstance(value, str) and column in self.gold.cased:
                row[position] = self._in_other_case(value)
            elif column in self.gold.trimmed:
                row[position] = self.rng.choice([value, *_padded([value])])

    def _in_other_case(self, text: str) -> str:
        """Text, or one of its words, in the other case: a CHECK may ask for the case of a part of it."""
        parts = re.split(r"(\W+)", text)
        if len(parts) > 1 and self.rng.random() < 0.5:
            place = self.rng.randrange(0, len(parts), 2)
            parts[place] = parts[place].swapcase()
            return "".join(parts)
        return text.swapcase()

    def _groups(self, values: Sequence[V], n_rows: int) -> list[V]:
        """`n_rows` shuffled values, the first ones with counts near the query's group sizes."""
        if self.recipe.ties:
            size = self.rng.choice([1, 3, *self.gold.group_sizes]) + self.rng.random()
            used = self.rng.sample(values, min(len(values), max(2, round(n_rows / size))))
            return [used[index % len(used)] for index in range(n_rows)]
        factor = self.rng.choice((1, 1, 2))  # a condition may leave out some of a group
        sizes = [factor * (size + step) for size in self.gold.group_sizes for step in (0, 1, -1)]
        self.rng.shuffle(sizes)
        sizes += self.rng.sample(range(1, 8), 7)
        drawn: list[V] = []
        for value, size in zip(self.rng.sample(values, len(values)), sizes, strict=False):
            drawn += [value] * min(max(size, 0), n_rows)
        drawn = drawn[:n_rows] or list(values[:1])
        drawn += drawn[-1:] * (n_rows - len(drawn))  # one large group; the others keep their sizes
        self.rng.shuffle(drawn)
        return drawn

    def _rekey(self, table: TableSample, position: int, rows: list[list[Cell]]) -> None:
        """Shuffle the values of a key among the rows and plant literals; duplicates are fixed later."""
        planted = list(chain(*self._planted(table, position)))
        planted = _keeping_sign(planted, _alike(table, position))  # -1 in `coalesce(parent, -1)` is no key
        if not planted and (table.name, table.columns[position]) not in self.gold.columns:
            return
        if self.rng.random() < 0.5:
            values = [row[position] for row in rows]
            self.rng.shuffle(values)
            for row, value in zip(rows, values, strict=True):
                row[position] = value
        for value, row in zip(planted, self.rng.sample(rows, len(rows)), strict=False):
            row[position] = value
        self._regroup(table, position, rows)
        self._respell(table, position, rows)

    def _refer(self, table: TableSample, reference: Reference, rows: list[list[Cell]]) -> list[list[Cell]]:
        """Rows with a parent each; for a unique reference, each parent once."""
        if reference.parent not in (*self.rows, table.name):  # a cycle: orphans are deleted later
            return rows
        parents = self._parents(table, reference, rows)
        if not parents or not rows:
            return []
        if table.refers_once(reference):
            parents = self.rng.sample(parents, len(parents))[: len(rows)]
            chosen = parents[: math.ceil(len(parents) * (1 - self.recipe.childless / 2))]
            rows = rows[: len(chosen)]
        else:
            kept = max(1, math.ceil(len(parents) * (1 - self.recipe.childless)))
            used = self.rng.sample(parents, kept)
            if self.recipe.in_groups:
                chosen = self._groups(used, len(rows))
            else:
                chosen = self.rng.choices(used, k=len(rows))
            favoured = self._asked(reference)
            asked = [] if self.recipe.ties else [parent for parent in parents if parent in favoured]
            if asked:
                share = self.recipe.planted / 2
                chosen = [self.rng.choice(asked) if self.rng.random() < share else one for one in chosen]
        for row, parent in zip(rows, chosen, strict=True):
            for position, value in zip(reference.columns, parent, strict=True):
                row[position] = value
        return rows

    def _asked(self, reference: Reference) -> set[Row]:
        """Keys of the parents that hold a literal of the query, or refer to a row that does."""
        sample = self.base.tables[reference.parent]
        places = [sample.columns.index(name) for name in reference.parent_columns]
        return {tuple(row[place] for place in places) for row in self.asked.get(reference.parent, ())}

    def rows_asked(self, table: TableSample, rows: Sequence[Row]) -> list[Row]:
        """Rows that hold a literal of the query, or refer to a row that does."""
        literals = [
            (place, self.gold.literals[table.name, column])
            for place, column in enumerate(table.columns)
            if (table.name, column) in self.gold.literals.keys() - self.gold.denied
        ]
        keys = [(reference.columns, self._asked(reference)) for reference in table.references]
        return [
            row
            for row in rows
            if any(row[place] in values for place, values in literals)
            or any(tuple(row[place] for place in columns) in parents for columns, parents in keys)
        ]

    def _deepen(self, table: TableSample, rows: list[list[Cell]]) -> None:
        """Order rows and references into a tree, or a chain, that has no cycle and any depth.

        Two references of a table to one parent are the edges of a graph: each leads to a later row.
        """
        is_chain = self.rng.random() < 0.5
        own = [r for r in table.references if r.parent == table.name and len(r.columns) == 1]
        for reference in own:
            (position,), key = reference.columns, table.columns.index(reference.parent_columns[0])
            root = None if position in table.nullable else rows[0][key] if rows else None
            for index, row in enumerate(rows):
                earlier = rows[index - 1] if is_chain else self.rng.choice(rows[:index] or rows)
                row[position] = earlier[key] if index else root
        pairs = [r for r in table.references if r.parent != table.name and len(r.columns) == 1]
        for first, second in pairwise(pairs):
            if (first.parent, first.parent_columns) != (second.parent, second.parent_columns):
                continue
            keys = [key for (key,) in self._parents(table, first, rows)]
            if len(keys) < 2:
                continue
            if is_chain:
                del rows[len(keys) - 1 :]
            for index, row in enumerate(rows):
                low = index if is_chain else self.rng.randrange(len(keys) - 1)
                high = low + 1 if is_chain else self.rng.randrange(low + 1, len(keys))
                row[first.columns[0]], row[second.columns[0]] = keys[low], keys[high]

    def _aim(self, table: TableSample, rows: list[list[Cell]]) -> None:
        """Change rows so that expressions meet, miss and lie between the numbers they are compared with."""
        aims: dict[str, list[Aim]] = {}
        for aim in self.gold.aims:
            if aim.table == table.name and set(aim.columns) <= set(table.columns):
                aims.setdefault(aim.sql, []).append(aim)
        if not aims or not rows:
            return
        fixed = table.booleans | table.nested.keys() | table.in_keys | table.referring
        with closing(sqlite3.connect(":memory:")) as connection:
            for sql, own in aims.items():
                values = sorted({aim.value for aim in own})
                between = [(low + high) / 2 for low, high in pairwise(values)]
                step = min([b - a for a, b in pairwise(values)] or [max(abs(values[0]), 1.0) * 0.01])
                beside = [value + d for value in values for d in (-step / 4, step / 4)]
                beside += [value + d for value in values if value.is_integer() for d in (-1, 1)]
                targets = values + between + between + beside
                places = [table.columns.index(column) for column in own[0].columns]
                free = [place for place in places if place not in fixed]
                for row in self.rng.sample(rows, min(MAX_AIMED, len(rows))) if free else ():
                    place = self.rng.choice(free)
                    self._hit(connection, sql, row, places, place, self.rng.choice(targets), table)

    def _hit(
        self,
        connection: sqlite3.Connection,
        sql: str,
        row: list[Cell],
        places: Sequence[int],
        place: int,
        target: float,
        table: TableSample,
    ) -> None:
        """Change one cell of a row so that an expression comes near a target, by the secant method."""
        known = _alike(table, place)
        start = row[place] if row[place] is not None else known[0]
        dates = table.dates.get(place)
        moment = dates.read(start) if dates else None
        is_length = "LENGTH(" in sql.upper()
        is_number = isinstance(start, str) and is_number_as_text(known) and not is_length

        def cell(t: float) -> Cell:
            if dates and moment:
                return dates.written(moment + timedelta(days=max(-300_000, min(round(t), 300_000))))
            if isinstance(start, str) and is_number:
                return str(round(t))
            if isinstance(start, str):
                length = max(0, min(round(t), MAX_TEXT))
                return start[:length] + "x" * (length - len(start))
            return t if isinstance(start, float) else max(-(2**60), min(round(t), 2**60))

        def value(t: float) -> float | None:
            found = {f"c{index}": row[other] for index, other in enumerate(places)}
            found[f"c{places.index(place)}"] = cell(t)
            (result,) = connection.execute(f"SELECT {sql}", found).fetchone()
            return float(result) - target if isinstance(result, int | float) else None

        is_other_text = isinstance(start, str) and not (is_number or is_length or moment)
        if isinstance(start, bytes) or (dates and not moment) or is_other_text:
            return
        measured = len(start) if isinstance(start, str) and not is_number else start
        try:
            first = 0.0 if moment else float(measured or 0)
            missed = value(first)
            t, rest = secant(value, first, MAX_STEPS)
            # Else the steps led away from the target.
            is_near = rest is not None and (missed is None or abs(rest) <= abs(missed) / 2)
            if is_near and math.isfinite(t) and _keeping_sign([cell(t)], known):
                row[place] = cell(t)
        except (sqlite3.Error, OverflowError, ValueError):  # no number, or out of a range
            return

    def _parents(self, table: TableSample, reference: Reference, rows: list[list[Cell]]) -> list[Row]:
        sample = self.base.tables[reference.parent]
        places = [sample.columns.index(name) for name in reference.parent_columns]
        made = rows if reference.parent == table.name else self.rows.get(reference.parent, [])
        keys = dict.fromkeys(tuple(row[place] for place in places) for row in made)
        return [key for key in keys if None not in key]

    def _without_duplicates(
        self, table: TableSample, key: tuple[int, ...], rows: list[list[Cell]]
    ) -> Iterator[list[Cell]]:
        """Rows with taken keys changed; a row is dropped if no free key is found."""
        seen: set[Row] = set()
        referring = {position: r for r in table.references for position in r.columns}
        for row in rows:
            for _ in range(KEY_ATTEMPTS):
                if tuple(row[position] for position in key) not in seen:
                    break
                position = self.rng.choice(key)
                reference = referring.get(position)
                if reference is None:
                    row[position] = self._fresh_value(table, position)
                    continue
                parents = self._parents(table, reference, rows)
                for place, value in zip(reference.columns, self.rng.choice(parents or [()]), strict=False):
                    row[place] = value
            values = tuple(row[position] for position in key)
            if values not in seen:
                seen.add(values)
                yield row

    def _fresh_value(self, table: TableSample, position: int) -> Cell:
        """Value that neither the sampled rows nor this variant hold."""
        values = _alike(table, position)
        count = self.fresh[table.name, position] = self.fresh.get((table.name, position), 0) + 1
        dates = table.dates.get(position)
        if dates:
            return dates.written(max(filter(None, map(dates.read, values))) + timedelta(days=count))
        blobs = [value for value in values if isinstance(value, bytes)]
        if blobs:
            return blobs[0] + count.to_bytes(4, "big")
        numbers = [value for value in values if isinstance(value, int | float)]
        if numbers:
            return type(numbers[0])(max(numbers) + count + 2)
        texts = [value for value in values if isinstance(value, str)]
        if texts and all(text.isdigit() for text in texts):
            return str(max(map(int, texts)) + count + 2).zfill(len(texts[0]))
        if len(texts) >= MIN_ALIKE and len(set(map(len, texts))) == 1:
            return another_code(texts, self.rng)
        return f"{self.rng.choice(texts or ['a'])}{count}"


def _keeping_sign(values: Sequence[Cell], known: Sequence[Cell]) -> list[Cell]:
    """Values but numbers below 0 where none is known, and 0 where all are above: a divisor, say."""
    lowest = min((value for value in known if isinstance(value, int | float)), default=-1)
    return [
        value
        for value in values
        if not isinstance(value, int | float) or lowest < 0 or value > 0 or value == lowest == 0
    ]


def _between(dates: DateFormat, values: Sequence[Cell]) -> list[Cell]:
    """Dates all over a range of months, which has months that no row of the base is of."""
    moments = sorted(moment for moment in map(dates.read, values) if moment)
    length = moments[-1] - moments[0] if moments else timedelta()
    if length.days < MIN_DAYS:
        return []
    return [dates.written(moments[0] + length * part / N_BETWEEN) for part in range(1, N_BETWEEN)]


def _n_equal(row: Sequence[Cell], other: Sequence[Cell], places: Sequence[int]) -> int:
    return sum(row[place] == other[place] for place in places)


def _padded(values: Sequence[Cell]) -> list[Cell]:
    """Texts with a blank at one end."""
    texts = [value for value in values if isinstance(value, str)]
    return [padded for text in texts for padded in (f" {text}", f"{text} ")]


def _alike(table: TableSample, position: int) -> list[Cell]:
    """Values of a column; made-up ones by SQLite's type affinity if it has none."""
    if known := table.values[position]:
        return known
    upper = table.types[position].upper()
    if "DATE" in upper or "TIME" in upper:
        time = " 12:00:00" if "TIME" in upper else ""
        return [
            f"20{year}-0{month}-15{time}" for year, month in ((18, 3), (19, 1), (19, 7), (20, 2), (21, 9))
        ]
    if "BLOB" in upper:
        return [bytes([number]) for number in range(1, 7)]
    if any(part in upper for part in ("CHAR", "CLOB", "TEXT")) or not upper:
        return ["a", "b", "c", "d", "e", "f"]
    if any(part in upper for part in ("REAL", "FLOA", "DOUB")):
        return [1.5, 2.5, 3.5, 4.5]
    return [1, 2, 3, 4, 5, 6]
