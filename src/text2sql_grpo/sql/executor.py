"""Runs untrusted SQL on SQLite files, in this process, and returns typed outcomes."""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits
from text2sql_grpo.sql.sqlite import HardenedDatabase, fingerprint_of

MAX_OPEN_DATABASES = 64


class SQLExecutor:
    """Runs untrusted SQL on SQLite files that it never writes; one query at a time, from any thread.

    Attributes:
        limits: Bounds of each execution, unless a call gives its own.
        queries: Queries run so far.
        seconds_in_sql: Wall-clock seconds spent on them.
    """

    def __init__(self, limits: Limits = Limits()) -> None:  # noqa: B008 (frozen)
        self.limits = limits
        self.queries = 0
        self.seconds_in_sql = 0.0
        self._lock = threading.Lock()
        self._open: OrderedDict[str, HardenedDatabase] = OrderedDict()

    def execute(self, database: Path | str, sql: str, *, limits: Limits | None = None) -> ExecutionOutcome:
        """What the query returned, or why it did not.

        Args:
            database: A SQLite file. It may be replaced between two calls.
            sql: One statement, as the model wrote it.
            limits: Bounds of this execution; None for the executor's own.

        Raises:
            DataError: The file is missing, unreadable, corrupt or no database: not the model's fault.
        """
        limits = limits or self.limits
        with self._lock:
            started = time.perf_counter()
            opened = self._database(os.fspath(database))
            outcome = self._run(opened, sql, limits)
            elapsed_s = time.perf_counter() - started
            self.queries += 1
            self.seconds_in_sql += elapsed_s
        return ExecutionOutcome(
            outcome.status, outcome.columns, outcome.rows, outcome.is_truncated, outcome.error, elapsed_s
        )

    def execute_many(
        self, database_and_sql: Sequence[tuple[Path | str, str]], *, limits: Limits | None = None
    ) -> list[ExecutionOutcome]:
        """One outcome per pair of database and query, in order; see `execute`."""
        return [self.execute(database, sql, limits=limits) for database, sql in database_and_sql]

    def close(self) -> None:
        """Closes every open file; a later `execute` opens it again."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _database(self, path: str) -> HardenedDatabase:
        fingerprint = fingerprint_of(path)
        known = self._open.get(path)
        if known is not None and known.fingerprint == fingerprint:
            self._open.move_to_end(path)
            return known
        self._drop(path)
        opened = self._open[path] = HardenedDatabase(path, fingerprint)
        if len(self._open) > MAX_OPEN_DATABASES:
            self._open.popitem(last=False)[1].connection.close()
        return opened

    def _drop(self, path: str) -> None:
        known = self._open.pop(path, None)
        if known is not None:
            known.connection.close()

    def _run(self, opened: HardenedDatabase, sql: str, limits: Limits) -> ExecutionOutcome:
        try:
            outcome = opened.run(sql, limits)
        except BaseException:
            self._drop(opened.path)
            raise
        if outcome.status == "memory":
            self._drop(opened.path)  # a connection that ran out of memory is not trusted again
        return outcome
