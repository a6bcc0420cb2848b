"""Neighbours of databases of every engine: those of SQLite, and copies of such ones on the other engines.

The search for neighbours, and for variants that refute an answer, runs on a SQLite likeness of the database,
with the queries in SQLite's SQL. What it finds is copied to the engine. There the gold is checked again, and
there alone an answer is judged. A gold that SQLite cannot run gets variants that are not searched for.
"""

import logging
import os
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from random import Random
from threading import RLock

from sqlglot import exp

from text2sql_grpo.errors import ConfigError, DataError, RunError, needs_extra
from text2sql_grpo.grading.base_sample import with_links
from text2sql_grpo.grading.copies import Copies
from text2sql_grpo.grading.gold_query import read_gold, why_unread
from text2sql_grpo.grading.gold_result import GoldResult
from text2sql_grpo.grading.likeness import Likeness, as_sqlite, build_likeness
from text2sql_grpo.grading.neighbours import FAILED, Candidate, Neighbours
from text2sql_grpo.grading.neighbours import _gap as gap_of  # private as well
from text2sql_grpo.grading.perturb import perturbed
from text2sql_grpo.grading.refute import Refuter
from text2sql_grpo.grading.small_database import build
from text2sql_grpo.grading.stability import with_ties_decided
from text2sql_grpo.grading.strict import parse_query
from text2sql_grpo.sql.address import Database, Kind, parse_address
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits
from text2sql_grpo.sql.schema import read_schema

N_CONFIRMED = 2  # variants on which an answer that a variant of the likeness refutes is tried
UNSEARCHED = 2  # times as many variants are made of a gold that SQLite cannot run

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Coverage:
    """Neighbours of one gold.

    Attributes:
        databases: SQLite files, or URLs.
        gap: Reason why they are fewer than asked for, or let a hard-coded answer pass; empty if neither.
    """

    databases: tuple[Database, ...] = ()
    gap: str = ""


class EngineNeighbours:
    """Neighbours of databases of every engine, and refutation of answers on such variants.

    Databases must not change while it lives.

    Attributes:
        max_neighbours: Number asked for.
        gaps: Reason of each database and gold without the neighbours asked for, of those met so far.
    """

    def __init__(
        self, executor: SQLExecutor, neighbours: Neighbours, *, limits: Limits | None = None, url: str = ""
    ) -> None:
        """Make neighbours.

        Args:
            executor: Runs queries.
            neighbours: Neighbours of SQLite files.
            limits: Limits of a query; None for the executor's.
            url: URL of a superuser of a PostgreSQL server, which holds the copies; empty for a private one.
        """
        self.max_neighbours = neighbours.max_neighbours
        self.gaps: dict[tuple[str, str], str] = {}
        self._executor = executor
        self._neighbours = neighbours
        self._cache = neighbours._folder  # private, as its name is in the hash that names the entries there
        self._limits = limits
        self._url = url
        self._folder = Path(tempfile.mkdtemp(prefix="text2sql-grpo-copies-"))
        executor.grant_folder(self._folder)
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._numbers = count()
        self._lock = RLock()
        self._copies: dict[Kind, Copies] = {}
        self._missing: dict[Kind, str] = {}  # reason why an engine's copies cannot be made here
        self._likenesses: dict[Database, Likeness] = {}
        self._known: OrderedDict[tuple[Database, str], Coverage] = OrderedDict()

    def check(self, database: Database) -> None:
        """Fail if no neighbours of such a database can be made on this machine.

        Raises:
            ConfigError: With the reason.
        """
        kind = parse_address(database).kind
        if kind != "sqlite":
            self._copies_of(kind).check()

    def of(self, database: Database, gold_sql: str, predicted_sql: str = "") -> tuple[Database, ...]:
        """Neighbours, at most `max_neighbours`; see `cover`."""
        return self.cover(database, gold_sql, predicted_sql).databases

    def cover(self, database: Database, gold_sql: str, predicted_sql: str = "") -> Coverage:
        """Neighbours on which an answer may be judged, and the reason if they are fewer than asked for.

        Args:
            database: The database.
            gold_sql: The gold.
            predicted_sql: The answer; empty for any.

        Raises:
            DataError: The database cannot be read, or the cache folder cannot be written.
        """
        kind = parse_address(database).kind
        if kind == "sqlite":
            cover = self._neighbours.cover(database, gold_sql)
            found = Coverage(cover.paths, cover.gap)
        else:
            with self._lock:
                found = self._cover(kind, database, gold_sql)
                lacking = self._lacking(database, predicted_sql) if found.databases else ""
            found = Coverage(gap=f"an answer {lacking}") if lacking else found
        if found.gap:
            self.gaps[str(database), gold_sql] = found.gap
        return found

    def refutes(self, refuter: Refuter, database: Database, gold_sql: str, predicted_sql: str) -> bool:
        """True if a variant of the database refutes the answer; False after an internal error."""
        kind, location = parse_address(database)
        if kind == "sqlite":
            file = Path(location)
            return refuter.refutes(self._neighbours.sample(file), file, gold_sql, predicted_sql)

        def search() -> bool:
            likeness = self._likenesses[database]
            gold, predicted = (as_sqlite(sql, likeness.dialect) for sql in (gold_sql, predicted_sql))
            base = self._neighbours.sample(likeness.path)
            variants = refuter.refuting(base, likeness.path, gold or gold_sql, predicted or predicted_sql)
            with closing(variants):
                for variant in islice(variants, N_CONFIRMED):
                    with self._lock:
                        url = self._copies_of(kind).create(variant, likeness)
                    try:
                        known = self._sound_gold(url, likeness.dialect, gold_sql)
                        outcome = self._executor.execute(url, predicted_sql, limits=self._limits)
                        if known and not _agrees(known, outcome, predicted_sql):
                            return True
                    finally:
                        self._copies_of(kind).drop(url)
            return False

        return refuter.settled((database, gold_sql, predicted_sql), search)

    def _cover(self, kind: Kind, database: Database, gold_sql: str) -> Coverage:
        if (database, gold_sql) in self._known:
            self._known.move_to_end((database, gold_sql))
            return self._known[database, gold_sql]
        if kind in self._missing:
            return Coverage(gap=self._missing[kind])
        try:
            copies = self._copies_of(kind)
            copies.check()
        except ConfigError as error:
            self._missing[kind] = str(error)
            return Coverage(gap=str(error))
        try:
            if database not in self._likenesses:
                self._likenesses[database] = self._likeness(copies, database)
            found = self._made(copies, self._likenesses[database], database, gold_sql)
        except RunError:
            raise
        except Exception as error:  # whatever a gold is: it is graded without neighbours, and counted
            logger.warning("no neighbours of a gold, an internal error: %r (gold %s)", error, gold_sql)
            found = Coverage(gap=f"internal error: {type(error).__name__}: {error}"[:200])
        if found.gap == FAILED:  # it may succeed another time
            return found
        self._known[database, gold_sql] = found
        while len(self._known) > copies.max_golds:
            _, dropped = self._known.popitem(last=False)
            for url in dropped.databases:
                copies.drop(str(url))
        return found

    def _likeness(self, copies: Copies, database: Database) -> Likeness:
        catalogue = copies.catalogue(self._executor, database)
        folder = self._cache / "likenesses"
        return build_likeness(self._executor, database, catalogue, read_schema(database), folder)

    def _made(self, copies: Copies, likeness: Likeness, database: Database, gold_sql: str) -> Coverage:
        """Copies of the neighbours of the likeness, as far as the gold is sound on them."""
        answer = self._executor.execute(database, gold_sql, limits=self._limits)
        if not answer.is_ok or answer.is_truncated:
            return Coverage(gap=FAILED)
        query = as_sqlite(gold_sql, likeness.dialect)
        if query is None:
            return Coverage(gap=why_unread(gold_sql))
        lacking = self._lacking(database, gold_sql)
        if lacking:
            return Coverage(gap=f"it {lacking}")
        searched = self._neighbours.cover(likeness.path, query)
        variants: Iterator[Path] = iter(searched.paths)
        if not searched.paths:
            if searched.gap != FAILED:
                return Coverage(gap=searched.gap)
            variants = self._unsearched(likeness, query)
        urls: list[str] = []
        chosen: list[Candidate] = []
        for variant in variants:
            try:
                url = copies.create(variant, likeness)
            except DataError as error:
                logger.warning("%s", error)
                return Coverage(gap=str(error))
            known = self._sound_gold(url, likeness.dialect, gold_sql)
            if known is None:
                copies.drop(url)
                continue
            is_empty = all(cell is None for row in known.outcome.rows for cell in row)
            is_other = not _agrees(known, answer, gold_sql)
            chosen.append(Candidate({}, frozenset(([0] if is_other else []) + ([1] if is_empty else []))))
            urls.append(url)
            if len(urls) == self.max_neighbours:
                break
        return Coverage(tuple(urls), gap_of(chosen, 0, self.max_neighbours))

    def _unsearched(self, likeness: Likeness, query: str) -> Iterator[Path]:
        """Random variants for a gold that SQLite cannot run."""
        base = self._neighbours.sample(likeness.path)
        gold = read_gold(query, base.schema, base.views)
        if gold is None:
            return
        base = with_links(base, likeness.path, gold.links)
        rng = Random(query)
        self._folder.mkdir(exist_ok=True)
        for _ in range(UNSEARCHED * self.max_neighbours):
            path = self._folder / f"{os.getpid()}-{next(self._numbers)}.sqlite"
            build(base, perturbed(base, gold, rng), path).close()
            yield path
            path.unlink()

    def _sound_gold(self, url: str, dialect: str, gold_sql: str) -> GoldResult | None:
        """Result of the gold on a copy; None if it fails there, or hangs on ties."""
        gold = GoldResult(self._executor, url, gold_sql, limits=self._limits)
        tree = parse_query(gold_sql, dialect)
        if not gold.outcome.is_ok or gold.outcome.is_truncated or not isinstance(tree, exp.Query):
            return None
        for sql in with_ties_decided(tree, dialect):  # one after the other: one worker opens the copy
            is_other = sql != tree.sql(dialect)
            if is_other and not _agrees(gold, self._executor.execute(url, sql, limits=self._limits), sql):
                return None
        return gold

    def _lacking(self, database: Database, sql: str) -> str:
        """Part of a query that no copy has; empty if there is none."""
        likeness = self._likenesses[database]
        tree = parse_query(sql, likeness.dialect) if sql and likeness.uncovered else None
        for table in tree.find_all(exp.Table) if tree else ():
            reason = likeness.uncovered.get(table.name.lower())
            if reason:
                return f"reads the table {table.name}: {reason}"
        return ""

    def _copies_of(self, kind: Kind) -> Copies:
        if kind not in self._copies:
            self._copies[kind] = self._opened(kind)
        return self._copies[kind]

    def _opened(self, kind: Kind) -> Copies:
        if kind == "duckdb":
            with needs_extra("duckdb", "a DuckDB database"):
                from text2sql_grpo.grading.duckdb_copies import DuckDBCopies

                return DuckDBCopies(self._cache / "duckdb")
        with needs_extra("postgresql", "a PostgreSQL database"):
            from text2sql_grpo.grading.postgres_copies import PostgresCopies

            return PostgresCopies(self._cache / "postgresql", self._url)


def _agrees(gold: GoldResult, outcome: ExecutionOutcome, sql: str) -> bool:
    return outcome.is_ok and gold.difference(outcome, sql, accepts_whole_ties=True) == "equal"
