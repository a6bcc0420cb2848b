"""Test databases of a gold query on DuckDB and PostgreSQL: searched on a SQLite mirror, copied to the engine.

The gold query is checked again on each copy, and only results of the engine decide.
"""

import sqlite3
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from itertools import chain, islice
from pathlib import Path
from threading import RLock

from sqlglot import exp

from text2sql_grpo.errors import ConfigError, needs_extra
from text2sql_grpo.grading.base_sample import sample_of
from text2sql_grpo.grading.copies import CopyEngine
from text2sql_grpo.grading.gold_query import why_unread
from text2sql_grpo.grading.gold_result import GoldResult, with_ties_decided
from text2sql_grpo.grading.materialise import materialise, reversed_copy
from text2sql_grpo.grading.mirror import Mirror, build_mirror
from text2sql_grpo.grading.search import (
    FAILED,
    NO_CANDIDATE,
    Native,
    NoCandidateError,
    SearchTime,
    Suite,
    draw_databases,
    gap_of,
    new_folder,
)
from text2sql_grpo.grading.translation import is_rough
from text2sql_grpo.sql.address import Database, Kind, parse_address
from text2sql_grpo.sql.executor import SQLExecutor, fingerprint
from text2sql_grpo.sql.lru import Lru
from text2sql_grpo.sql.outcome import ExecutionOutcome
from text2sql_grpo.sql.query import read_query
from text2sql_grpo.sql.schema import read_schema

N_CONFIRMED = 12  # databases of the mirror that refute an answer are tried on the engine
N_DRAWN = 24  # databases are tried there at least, where SQLite lacks what the queries ask for


class EngineSuites:
    """Test databases and counterexamples of databases that have a mirror; thread-safe."""

    def __init__(
        self,
        executor: SQLExecutor,
        folder: Path,
        scratch: Path,
        counterexamples: Callable[..., Generator[Path]],
        *,
        size: int,
        url: str,
    ) -> None:
        """Make one; nothing is started yet.

        Args:
            executor: Runs queries.
            folder: Where mirrors and copies are kept.
            scratch: Where candidates are kept for a moment.
            counterexamples: `find_counterexamples` with the executor and its settings.
            size: Maximum number of test databases of a gold query.
            url: URL of a superuser of a PostgreSQL server, which holds the copies; empty for a private one.
        """
        self._executor = executor
        self._folder = folder
        self._scratch = scratch
        self._counterexamples = counterexamples
        self._size = size
        self._url = url
        self._lock = RLock()
        self._engines: dict[Kind, CopyEngine] = {}
        self._missing: dict[Kind, str] = {}  # why an engine's databases cannot be copied here
        self._mirrors: Lru[tuple[Database, object], Mirror] = Lru(256)

    def engine(self, database: Database) -> CopyEngine:
        """Maker of copies for a database; if it cannot be made, it is not tried again.

        Raises:
            ConfigError: Such databases cannot be copied on this machine.
        """
        kind = parse_address(database).kind
        with self._lock:
            if kind in self._missing:
                raise ConfigError(self._missing[kind])
            if kind not in self._engines:
                try:
                    self._engines[kind] = _copy_engine(kind, self._folder, self._url)
                except ConfigError as error:
                    self._missing[kind] = str(error)
                    raise
            return self._engines[kind]

    def mirror(self, database: Database) -> Mirror:
        """Mirror of a database.

        Raises:
            ConfigError: Its engine's databases cannot be copied on this machine.
        """
        key = (database, fingerprint(database))
        with self._lock:
            mirror = self._mirrors.get(key)
            if mirror is None:
                catalogue = self.engine(database).catalogue(self._executor, database)
                folder = self._folder / "mirrors"
                mirror = build_mirror(self._executor, database, catalogue, read_schema(database), folder)
                self._mirrors.put(key, mirror)
            return mirror

    def databases(
        self,
        database: Database,
        gold_sql: str,
        answer: ExecutionOutcome,
        search: Callable[[Path, str, Native], Suite],
    ) -> Suite:
        """Copies of the mirror's test databases on which the gold query is sound, and of random ones.

        Args:
            answer: The gold query's outcome on the database.
            search: Finds the test databases of a query on a SQLite file, the mirror.
        """
        mirror = self.mirror(database)
        if gap := why_unread(gold_sql, mirror.dialect):
            return Suite(gap=gap)
        if gap := mirror.gap_of(gold_sql):
            return Suite(gap=gap)
        native = Native(mirror.dialect, mirror.with_plain_values(gold_sql))
        found = Suite(gap=NO_CANDIDATE)
        query = mirror.in_sqlite(gold_sql)  # None if it would be too long
        if query is not None and self._is_alike(mirror, database, gold_sql):
            found = search(mirror.path, query, native)
        if not found.databases and found.gap not in (FAILED, NO_CANDIDATE):
            return found
        copies: list[tuple[bool, bool, str]] = []  # the best ones are the smallest
        for path in chain(map(Path, found.databases), self._drawn(mirror, native)):
            url = self._copied(path, mirror, database)
            known = GoldResult.of(self._executor, url, gold_sql)
            is_sound = self._is_sound(known, url, mirror.dialect)
            if not is_sound or not (
                path in found.databases or self._is_stable(known, path, mirror, database)
            ):
                self.drop(url)
                continue
            returns_nothing = all(cell is None for row in known.outcome.rows for cell in row)
            copies.append((returns_nothing, known.accepts(answer, gold_sql), url))
            if sum(not is_empty for is_empty, *_ in copies) == self._size:
                break
        copies.sort(key=lambda copy: copy[:2])
        self.drop(*(url for *_, url in copies[self._size :]))
        best = copies[: self._size]
        gap = gap_of([not is_same for _, is_same, _ in best], [is_empty for is_empty, *_ in best], self._size)
        return Suite(tuple(url for *_, url in best), gap)

    def drop(self, *copies: Database) -> None:
        """Remove copies that an engine made."""
        with self._lock:
            for copy in copies:
                self.engine(copy).drop(str(copy))

    def is_refuted(self, database: Database, gold_sql: str, answer_sql: str) -> bool:
        """True if an answer has another result than its gold query on a copy of a random database."""
        mirror = self.mirror(database)
        gold, answer = (mirror.in_sqlite(sql) or sql for sql in (gold_sql, answer_sql))
        native = Native(mirror.dialect, *map(mirror.with_plain_values, (gold_sql, answer_sql)))
        is_alike = self._is_alike(mirror, database, gold_sql, answer_sql)
        if gold == answer:  # SQLite may lack what makes the difference
            trees = [read_query(sql, mirror.dialect).tree for sql in (gold_sql, answer_sql)]
            is_alike = is_alike and trees[0] == trees[1]
        n_tried, time = 0, SearchTime()
        try:
            with closing(
                self._counterexamples(mirror.path, gold, answer, self._scratch, native=native)
            ) as found:
                for path in islice(found, N_CONFIRMED if is_alike else None):
                    n_tried += 1
                    if self._is_confirmed(path, mirror, database, gold_sql, answer_sql, time):
                        return True
        except NoCandidateError:
            is_alike = False
        drawn = () if is_alike else islice(self._drawn(mirror, native), max(0, N_DRAWN - n_tried))
        return any(self._is_confirmed(path, mirror, database, gold_sql, answer_sql, time) for path in drawn)

    def _is_alike(self, mirror: Mirror, database: Database, gold_sql: str, *answers: str) -> bool:
        """True if the queries return on the mirror what the gold query returns on the database.

        Else SQLite cannot run them, or means something else by them, as by a rough translation. Where the
        mirror lacks rows, they only have to agree there.
        """
        queries = (gold_sql, *answers)
        if any(is_rough(sql, mirror.dialect) for sql in queries):
            return False
        translated = [mirror.in_sqlite(sql) or sql for sql in queries]
        source, sql = (database, gold_sql) if mirror.is_whole else (mirror.path, translated[0])
        known = GoldResult.of(self._executor, source, sql)
        outcomes = [self._executor.execute(mirror.path, one) for one in translated]
        return known.is_usable and all(map(known.accepts, outcomes, translated))

    def _is_confirmed(
        self, path: Path, mirror: Mirror, database: Database, gold_sql: str, answer_sql: str, time: SearchTime
    ) -> bool:
        """True if a copy of a candidate refutes the answer on the engine; raises SlowAnswerError."""
        url = self._copied(path, mirror, database)
        try:
            gold = GoldResult.of(self._executor, url, gold_sql)
            outcome = self._executor.execute(url, answer_sql)
            is_other = gold.outcome.is_ok and not gold.accepts(outcome, answer_sql, may_find_nothing=True)
            is_sound = is_other and self._is_sound(gold, url, mirror.dialect)
            if is_sound and self._is_stable(gold, path, mirror, database):
                return True
            time.spend(gold.outcome, outcome)
            return False
        finally:
            self.drop(url)

    def _copied(self, path: Path, mirror: Mirror, database: Database) -> str:
        """URL of a copy of a test database of the mirror."""
        with self._lock:
            return self.engine(database).create(path, mirror)

    def _drawn(self, mirror: Mirror, queries: Native) -> Iterator[Path]:
        """Random databases for queries that SQLite cannot run."""
        with new_folder(self._scratch) as folder:
            for number, content in enumerate(draw_databases(mirror.path, queries, size=N_DRAWN)):
                path = folder / f"{number}.sqlite"
                materialise(sample_of(mirror.path), content, path).close()
                yield path

    def _is_sound(self, gold: GoldResult, url: str, dialect: str) -> bool:
        """False if the gold query fails on a copy, or depends on ties."""
        tree = read_query(gold.sql, dialect).tree
        if not gold.outcome.is_ok or gold.outcome.is_truncated or not isinstance(tree, exp.Query):
            return False
        others = (sql for sql in with_ties_decided(tree, dialect) if sql != tree.sql(dialect))
        run = partial(self._executor.execute, url)
        return all(gold.accepts(run(sql), sql) for sql in others)  # in turn: one worker opens the copy

    def _is_stable(self, gold: GoldResult, path: Path, mirror: Mirror, database: Database) -> bool:
        """True if a gold query returns the same on a copy with the rows in the reverse order."""
        turned = path.with_suffix(".turned.sqlite")
        with closing(sqlite3.connect(path)) as built:
            reversed_copy(sample_of(mirror.path), built, turned).close()
        url = self._copied(turned, mirror, database)
        try:
            return gold.accepts(self._executor.execute(url, gold.sql), gold.sql)
        finally:
            self.drop(url)
            turned.unlink()


def _copy_engine(kind: Kind, folder: Path, url: str) -> CopyEngine:
    if kind == "duckdb":
        with needs_extra("duckdb", "a DuckDB database"):
            from text2sql_grpo.grading.duckdb_copies import DuckDBCopies
        return DuckDBCopies(folder / "duckdb")
    with needs_extra("postgresql", "a PostgreSQL database"):
        from text2sql_grpo.grading.postgres_copies import PostgresCopies
    return PostgresCopies(folder / "postgresql", url)
