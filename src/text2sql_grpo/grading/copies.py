"""Copies of variants on the engine of their database: one small interface, and what its engines share."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol
from zlib import crc32

from text2sql_grpo.grading.base_sample import quoted
from text2sql_grpo.grading.likeness import Catalogue, Likeness, NativeTable, Step, read_rows
from text2sql_grpo.sql.address import Database
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Cell, Row
from text2sql_grpo.sql.schema import ForeignKey

logger = logging.getLogger(__name__)


class Copies(Protocol):
    """Copies of the variants of one engine's databases.

    Attributes:
        max_golds: Number of golds whose copies are kept at the same time.
    """

    max_golds: int

    def check(self) -> None:
        """Fail if no copy can be made here.

        Raises:
            ConfigError: With the reason.
        """

    def catalogue(self, executor: SQLExecutor, database: Database) -> Catalogue:
        """Read the tables, keys and views of a database."""

    def create(self, variant: Path, likeness: Likeness) -> str:
        """Copy a variant of the likeness into a database of the engine, and return its URL.

        Rows that the engine refuses are left out, and so are rows that then lack their parent.

        Raises:
            DataError: The copy cannot be made.
        """

    def drop(self, url: str) -> None:
        """Remove a copy."""


def tried(
    script: Sequence[Step], execute: Callable[[str], object], errors: type[Exception]
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Run a script on an empty database; return what ran, and the tables that it failed to make, why."""
    kept, unmade = [], []
    for step in script:
        try:
            execute(step.sql)
            kept.append(step.sql)
        except errors as error:
            reason = " ".join(str(error).split())
            logger.debug("a copy lacks %s: %s", step.sql, reason)
            unmade += [(step.name, f"a copy cannot be made ({reason})"[:200])] if step.name else []
    return tuple(kept), tuple(unmade)


def fill(
    variant: Path,
    likeness: Likeness,
    *,
    insert: Callable[[NativeTable, Sequence[Row]], None],
    execute: Callable[[str], object],
    errors: tuple[type[Exception], ...] = (),
) -> None:
    """Copy the rows of a variant into the tables of the engine.

    Args:
        variant: A SQLite file.
        likeness: The likeness that it varies.
        insert: Inserts some rows, all or none.
        execute: Runs one statement.
        errors: Raised by `insert` if the engine refuses one of the rows, which then is left out.
    """
    is_complete = True
    for table in likeness.tables:
        rows = _allowed(read_rows(variant, table), table, likeness)
        is_complete &= _insert(table, rows, insert, errors)
    if is_complete:
        return
    covered = {(table.namespace, table.name): table.sql for table in likeness.tables}
    for _ in covered:  # a row without its parent may be a parent
        for child in likeness.schema.tables:
            own = covered.get((child.namespace, child.name))
            for key in child.foreign_keys:
                parent = covered.get((key.namespace, key.table))
                if own and parent and key.references:
                    execute(f"DELETE FROM {own} WHERE {_is_orphan(own, key, parent)}")


def _allowed(rows: Sequence[Row], table: NativeTable, likeness: Likeness) -> Sequence[Row]:
    """Rows in which a value that its type may not allow is replaced by one of the database."""
    changed = [list(row) for row in rows]
    for place, column in enumerate(table.columns):
        known = likeness.allowed.get((table.name, column.name))
        if known is None:
            continue
        for row in changed:
            if row[place] is not None and row[place] not in known:
                row[place] = known[crc32(repr(row[place]).encode()) % len(known)] if known else None
    return [tuple(row) for row in changed]


def _insert(
    table: NativeTable,
    rows: Sequence[Row],
    insert: Callable[[NativeTable, Sequence[Row]], None],
    errors: tuple[type[Exception], ...],
) -> bool:
    """Insert all rows but those that the engine refuses; True if it refused none."""
    if not rows:
        return True
    try:
        insert(table, rows)
    except errors as error:
        if len(rows) == 1:
            logger.debug("a row of %s was refused: %s", table.name, error)
            return False
        half = len(rows) // 2
        parts = [_insert(table, part, insert, errors) for part in (rows[:half], rows[half:])]
        return all(parts)
    return True


def as_text(cell: Cell) -> str | None:
    """Text of a cell that the engine casts to the column's type."""
    return cell if cell is None or isinstance(cell, str) else repr(cell)


def _is_orphan(child: str, key: ForeignKey, parent: str) -> str:
    present = " AND ".join(f"{child}.{quoted(column)} IS NOT NULL" for column in key.columns)
    matches = " AND ".join(
        f"p_.{quoted(reference)} = {child}.{quoted(column)}"
        for reference, column in zip(key.references, key.columns, strict=True)
    )
    return f"{present} AND NOT EXISTS (SELECT 1 FROM {parent} AS p_ WHERE {matches})"
