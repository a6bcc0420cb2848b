"""Test databases on the engine of their database: one small interface, and what its engines share."""

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, Protocol
from zlib import crc32

from text2sql_grpo.grading.base_sample import orphans
from text2sql_grpo.grading.materialise import insert_rows
from text2sql_grpo.grading.mirror import Catalogue, Mirror, read_rows, table_sql
from text2sql_grpo.sql.address import Database
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Cell, Row
from text2sql_grpo.sql.schema import Column, Table

_logger = logging.getLogger(__name__)


class ScriptStep(NamedTuple):
    """Statement that makes a part of a database; `name`: the table or view that it makes, or nothing."""

    sql: str
    name: str = ""


class CopyEngine(Protocol):
    """Maker of test databases of one engine; its constructor raises ConfigError if none can be made here."""

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
    script: Sequence[ScriptStep], execute: Callable[[str], object], errors: type[Exception]
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Run a script on an empty database; return what ran, and the tables that it failed to make, why.

    A step that fails is tried again after the others, as it may need one of them: a type of types, say.
    """
    kept, left = list[str](), list(script)
    while True:
        failed = list[tuple[ScriptStep, str]]()
        for step in left:
            try:
                execute(step.sql)
                kept.append(step.sql)
            except errors as error:
                failed.append((step, " ".join(str(error).split())))
        if len(failed) in (0, len(left)):
            break
        left = [step for step, _ in failed]
    for step, reason in failed:
        _logger.debug("a copy lacks %s: %s", step.sql, reason)
    return tuple(kept), tuple((step.name, reason[:200]) for step, reason in failed if step.name)


def fill(
    path: Path,
    mirror: Mirror,
    *,
    insert: Callable[[Table, Sequence[Row]], None],
    accepts: Callable[[Column, str], bool],
    execute: Callable[[str], object],
    errors: tuple[type[Exception], ...] = (),
) -> None:
    """Copy the rows of a test database of the mirror into the tables of the engine.

    Args:
        path: A SQLite file.
        mirror: The mirror that has its tables.
        insert: Inserts some rows, all or none.
        accepts: True if the engine reads a text as a value of a column's type.
        execute: Runs one statement.
        errors: Raised by `insert` if the engine refuses one of the rows, which then is left out.
    """
    is_complete = True
    for table in mirror.tables:
        rows = _allowed(read_rows(path, table), table, mirror, accepts)
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


def _allowed(
    rows: Sequence[Row], table: Table, mirror: Mirror, accepts: Callable[[Column, str], bool]
) -> Sequence[Row]:
    """Rows in which a value that its type does not allow is replaced by one of the database."""
    changed = [list(row) for row in rows]
    for place, column in enumerate(table.columns):
        known = mirror.allowed.get((table.name, column.name))
        if known is None:
            continue
        is_read = cache(partial(accepts, column))
        for row in changed:
            cell = row[place]
            is_value = cell is None or cell in known
            if not is_value and not (isinstance(cell, str) and not column.labels and is_read(cell)):
                row[place] = known[crc32(repr(cell).encode()) % len(known)] if known else None
    return [tuple(row) for row in changed]


def as_text(cell: Cell) -> str | None:
    """Text of a cell that the engine casts to the column's type."""
    return cell if cell is None or isinstance(cell, str) else repr(cell)
