"""Test databases on the engine of their database: one small interface, and what its engines share."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol
from zlib import crc32

from text2sql_grpo.grading.base_sample import orphans
from text2sql_grpo.grading.materialise import insert_rows
from text2sql_grpo.grading.mirror import Catalogue, Mirror, Step, read_rows, table_sql
from text2sql_grpo.sql.address import Database
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Cell, Row
from text2sql_grpo.sql.schema import Table

_logger = logging.getLogger(__name__)


class CopyEngine(Protocol):
    """Maker of test databases of one engine.

    Attributes:
        max_suites: Number of gold queries whose test databases are kept at the same time.
    """

    max_suites: int

    def check(self) -> None:
        """Fail if no database can be made here.

        Raises:
            ConfigError: With the reason.
        """

    def catalogue(self, executor: SQLExecutor, database: Database) -> Catalogue:
        """Read how a database is made."""

    def create(self, path: Path, mirror: Mirror) -> str:
        """Copy a test database of the mirror into a database of the engine, and return its URL.

        Rows that the engine refuses are left out, and so are rows that then lack their parent.

        Raises:
            DataError: The copy cannot be made.
        """

    def drop(self, url: str) -> None:
        """Remove a copy."""


def run_script(
    script: Sequence[Step], execute: Callable[[str], object], errors: type[Exception]
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Run a script on an empty database; return what ran, and the tables that it failed to make, why."""
    kept, gaps = [], []
    for step in script:
        try:
            execute(step.sql)
            kept.append(step.sql)
        except errors as error:
            reason = " ".join(str(error).split())
            _logger.debug("a copy lacks %s: %s", step.sql, reason)
            gaps += [(step.name, reason[:200])] if step.name else []
    return tuple(kept), tuple(gaps)


def fill(
    path: Path,
    mirror: Mirror,
    *,
    insert: Callable[[Table, Sequence[Row]], None],
    execute: Callable[[str], object],
    errors: tuple[type[Exception], ...] = (),
) -> None:
    """Copy the rows of a test database of the mirror into the tables of the engine.

    Args:
        path: A SQLite file.
        mirror: The mirror that has its tables.
        insert: Inserts some rows, all or none.
        execute: Runs one statement.
        errors: Raised by `insert` if the engine refuses one of the rows, which then is left out.
    """
    is_complete = True
    for table in mirror.tables:
        rows = _allowed(read_rows(path, table), table, mirror)
        is_complete &= insert_rows(partial(insert, table), rows, errors)
    if is_complete:
        return
    names = {(table.namespace, table.name): table_sql(table) for table in mirror.tables}
    for _ in names:  # a row without its parent may be a parent
        for child in mirror.schema.tables:
            own = names.get((child.namespace, child.name))
            for key in child.foreign_keys:
                parent = names.get((key.namespace, key.table))
                if own and parent and key.references:
                    execute("DELETE " + orphans(own, key.columns, parent, key.references))


def _allowed(rows: Sequence[Row], table: Table, mirror: Mirror) -> Sequence[Row]:
    """Rows in which a value that its type may not allow is replaced by one of the database."""
    changed = [list(row) for row in rows]
    for place, column in enumerate(table.columns):
        known = mirror.allowed.get((table.name, column.name))
        if known is None:
            continue
        for row in changed:
            if row[place] is not None and row[place] not in known:
                row[place] = known[crc32(repr(row[place]).encode()) % len(known)] if known else None
    return [tuple(row) for row in changed]


def as_text(cell: Cell) -> str | None:
    """Text of a cell that the engine casts to the column's type."""
    return cell if cell is None or isinstance(cell, str) else repr(cell)
