"""Test suite of a gold query: small databases on which a wrong answer has another result.

One database separates few queries: a hard-coded answer, a condition that happens to select the same rows, an
empty result all look right. A test database keeps the schema with its keys, foreign keys, types and
constraints, and has other rows: values next to the query's literals, duplicates, ties, missing and extra
matches. See `search` for how they are chosen.

The search runs on SQLite: on the database itself, or on the mirror of a DuckDB or PostgreSQL database. There
the databases that it finds are copied to the engine, the gold query is checked again, and only results of the
engine decide.
"""

import logging
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from threading import RLock

from sqlglot import exp

from text2sql_grpo.errors import ConfigError, RunError, needs_extra
from text2sql_grpo.grading.base_sample import DatabaseSample, read_sample
from text2sql_grpo.grading.copies import CopyEngine
from text2sql_grpo.grading.expression_time import SlowExpressionsError
from text2sql_grpo.grading.gold_query import why_unread
from text2sql_grpo.grading.gold_result import GoldResult, with_ties_decided
from text2sql_grpo.grading.materialise import materialise
from text2sql_grpo.grading.mirror import Mirror, build_mirror
from text2sql_grpo.grading.search import (
    NO_CANDIDATE,
    Native,
    NoCandidateError,
    draw_databases,
    find_counterexamples,
    find_test_databases,
    gap_of,
)
from text2sql_grpo.grading.strict import compare_strict
from text2sql_grpo.grading.suite_folder import Suite, entry_of, read_entry, write_entry
from text2sql_grpo.sql.address import Database, Kind, parse_address
from text2sql_grpo.sql.executor import SQLExecutor, fingerprint
from text2sql_grpo.sql.lru import Lru
from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits
from text2sql_grpo.sql.query import read_query
from text2sql_grpo.sql.schema import read_schema

MAX_DATABASES = 4
MAX_SUITES = 65_536  # of golds, in memory
MAX_TRIALS = 16_384  # of gold queries and answers, in memory
N_CONFIRMED = 4  # databases of the mirror that refute an answer are tried on the engine
RERUNS = 4  # of a gold query that the engine reports as volatile
N_DRAWN = 24  # databases are drawn where SQLite cannot run the gold query

FAILED = "the gold query failed when its test databases were made"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """Result of the search for a counterexample.

    Attributes:
        is_refuted: True if there is one.
        gap: Why the search may have missed one; empty if it ran as it should.
    """

    is_refuted: bool = False
    gap: str = ""


class TestSuite:
    """Test databases of gold queries, and counterexamples to answers, on every engine.

    A file may be replaced meanwhile; a server's databases must keep their tables. Suites are kept in a
    folder, which several processes may share.

    Attributes:
        size: Number of test databases asked for.
        n_searched: Number of gold queries whose test databases were searched, not found in the folder.
        n_tried: Number of pairs of a gold query and an answer for which a counterexample was searched.
    """

    __test__ = False  # for pytest

    def __init__(
        self,
        executor: SQLExecutor,
        folder: Path,
        *,
        size: int = MAX_DATABASES,
        limits: Limits | None = None,
        url: str = "",
        declared_nulls: bool = False,
    ) -> None:
        """Make a suite; nothing is searched yet.

        Args:
            executor: Runs queries.
            folder: Where test databases are kept.
            size: Maximum number of test databases of a gold query.
            limits: Limits of a query; None for the executor's.
            url: URL of a superuser of a PostgreSQL server, which holds the copies; empty for a private one.
            declared_nulls: Whether counterexamples hold NULLs in columns that may hold them, and hold none.
        """
        self.size = size
        self.n_searched = 0
        self.n_tried = 0
        self._executor = executor
        self._folder = folder
        self._limits = limits
        self._url = url
        self._declared_nulls = declared_nulls
        self._scratch = Path(tempfile.mkdtemp(prefix="text2sql-grpo-candidates-"))
        weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        for own in (folder, self._scratch):
            executor.grant_folder(own)
        self._lock = RLock()
        self._engines: dict[Kind, CopyEngine] = {}
        self._missing: dict[Kind, str] = {}  # why an engine's databases cannot be copied here
        self._mirrors: Lru[tuple[Database, object], Mirror] = Lru(256)
        self._samples: Lru[tuple[Path, object], DatabaseSample] = Lru(32)
        self._known: dict[Kind, Lru[tuple[Database, object, str], Suite]] = {}
        self._tried: Lru[tuple[Database, object, str, str], Trial] = Lru(MAX_TRIALS)

    def check(self, database: Database) -> None:
        """Fail if no test databases of such a database can be made on this machine.

        Raises:
            ConfigError: With the reason.
        """
        if parse_address(database).engine.needs_mirror:
            self._engine(database)

    def databases(self, database: Database, gold_sql: str, answer_sql: str = "") -> Suite:
        """Test databases on which an answer may be judged.

        Args:
            database: The database.
            gold_sql: The gold query. It has none if it fails, reads no table, cannot be parsed, calls
                random(), or depends on the order in which rows are visited, ties of its last order aside.
            answer_sql: The answer; empty for any.

        Raises:
            DataError: The database cannot be read, or the folder cannot be written.
        """
        kind, key = parse_address(database).kind, (database, fingerprint(database), gold_sql)
        with self._lock:
            known = self._known.get(kind)
            found = known.get(key) if known is not None else None
            if found is None:
                found = self._made(database, gold_sql)
                if found.gap != FAILED:  # it may succeed another time
                    self._keep(kind, key, found)
            if found.databases and (gap := self._mirror(database).gap_of(answer_sql)):
                return Suite(gap=gap)
            return found

    def _keep(self, kind: Kind, key: tuple[Database, object, str], suite: Suite) -> None:
        """Keep a suite in memory; the copies of those that go for it are dropped."""
        engine = self._engines.get(kind)
        if kind not in self._known:
            self._known[kind] = Lru(MAX_SUITES if engine is None else engine.max_suites)
        for gone in self._known[kind].put(key, suite):
            if engine is not None:
                for copy in gone.databases:
                    engine.drop(str(copy))

    def counterexample(self, database: Database, gold_sql: str, answer_sql: str) -> Trial:
        """Search for a database on which an answer has another result than its gold query.

        Raises:
            DataError: A database cannot be read or made.
            RunError: A server is gone, or workers cannot be started.
        """
        key = (database, fingerprint(database), gold_sql, answer_sql)
        with self._lock:
            known = self._tried.get(key)
        if known is not None:
            return known
        self.n_tried += 1
        try:
            found = self._trial(database, gold_sql, answer_sql)
        except (SlowExpressionsError, NoCandidateError) as error:
            found = Trial(gap=f"no counterexample was searched: {error}")
        except RunError:
            raise
        except Exception as error:  # any answer: its gap is counted
            _logger.warning("no counterexamples to an answer, an internal error: %r (%s)", error, answer_sql)
            return Trial(gap=f"internal error: {type(error).__name__}: {error}"[:200])
        with self._lock:
            self._tried.put(key, found)
        return found

    def _trial(self, database: Database, gold_sql: str, answer_sql: str) -> Trial:
        with self._lock:
            mirror = self._mirror(database)
            base = self._sample(mirror.path)
        gold, answer = (mirror.in_sqlite(sql) or sql for sql in (gold_sql, answer_sql))
        unread = why_unread(answer_sql, mirror.dialect)
        gap = f"the answer was searched by its tokens: {unread}" if unread else ""
        search = partial(
            find_counterexamples,
            self._executor,
            mirror.path,
            base,
            gold,
            answer,
            limits=self._limits,
            declared_nulls=self._declared_nulls,
            native=_native(mirror, gold_sql, answer_sql),
        )
        with self._new_folder() as folder, closing(search(Path(folder))) as candidates:
            if mirror.is_database:
                return Trial(is_refuted=any(True for _ in candidates), gap=gap)
            paths: Iterable[Path] = self._drawn(mirror, gold_sql, answer_sql)
            if self._is_alike(mirror, database, gold_sql, gold, answer):
                with suppress(NoCandidateError):
                    paths = list(islice(candidates, N_CONFIRMED))
            for path in paths:
                if self._is_confirmed(path, mirror, database, gold_sql, answer_sql):
                    return Trial(is_refuted=True)
        return Trial(gap=gap)

    def _is_alike(self, mirror: Mirror, database: Database, gold_sql: str, *translated: str) -> bool:
        """True if translated queries return on the mirror what the gold query returns on the database.

        Else SQLite cannot run them, or means something else by them. Where the mirror lacks rows, they only
        have to agree there.
        """
        source, sql = (database, gold_sql) if mirror.is_whole else (mirror.path, translated[0])
        known = GoldResult.of(self._executor, source, sql, limits=self._limits)
        outcomes = [self._executor.execute(mirror.path, one, limits=self._limits) for one in translated]
        return known.is_usable and all(map(known.accepts, outcomes, translated))

    def _is_confirmed(
        self, path: Path, mirror: Mirror, database: Database, gold_sql: str, answer_sql: str
    ) -> bool:
        """True if a copy of a candidate refutes the answer on the engine."""
        with self._lock:
            engine = self._engine(database)
            url = engine.create(path, mirror)
        try:
            gold = GoldResult.of(self._executor, url, gold_sql, limits=self._limits)
            outcome = self._executor.execute(url, answer_sql, limits=self._limits)
            is_other = gold.outcome.is_ok and not gold.accepts(outcome, answer_sql)
            return is_other and self._sound_gold(url, mirror.dialect, gold_sql) is not None
        finally:
            engine.drop(url)

    def _made(self, database: Database, gold_sql: str) -> Suite:
        """Test databases of a gold query that is met for the first time."""
        try:
            mirror = self._mirror(database)
            answer = self._executor.execute(database, gold_sql, limits=self._limits)
            if not answer.is_ok or answer.is_truncated:
                return Suite(gap=FAILED)
            if answer.is_volatile and self._depends_on_chance(database, gold_sql, answer):
                return Suite(gap="the gold query returns other rows when it runs again")
            query = mirror.in_sqlite(gold_sql)
            if query is None:
                return Suite(gap=why_unread(gold_sql, mirror.dialect))
            if gap := mirror.gap_of(gold_sql):
                return Suite(gap=gap)
            found = Suite(gap=NO_CANDIDATE)
            if mirror.is_database or self._is_alike(mirror, database, gold_sql, query):
                found = self._searched(mirror.path, query, _native(mirror, gold_sql))
            return found if mirror.is_database else self._copied(found, mirror, database, gold_sql, answer)
        except (ConfigError, SlowExpressionsError) as error:  # no copies on this machine, or in bounded time
            return Suite(gap=str(error))
        except RunError:
            raise
        except Exception as error:  # any gold query: its gap is counted
            _logger.warning("no test databases, an internal error: %r (gold query %s)", error, gold_sql)
            return Suite(gap=f"internal error: {type(error).__name__}: {error}"[:200])

    def _depends_on_chance(self, database: Database, gold_sql: str, answer: ExecutionOutcome) -> bool:
        again = self._executor.execute_many([(database, gold_sql)] * RERUNS, limits=self._limits)
        return any(not one.is_ok or compare_strict(answer, one, ordered=False) != "equal" for one in again)

    def _searched(self, database: Path, gold_sql: str, native: Native | None) -> Suite:
        """Test databases of a SQLite file, of the folder or new."""
        folder = entry_of(self._folder / "suites", database, gold_sql, self.size)
        known = read_entry(folder)
        if known is not None:
            return known
        answer = self._executor.execute(database, gold_sql, limits=self._limits)
        if not answer.is_ok or answer.is_truncated:
            return Suite(gap=FAILED)
        base = self._sample(database)
        found = find_test_databases(database, base, gold_sql, answer, size=self.size, native=native)
        self.n_searched += 1
        if not found.contents:
            return Suite(gap=found.gap)
        record = {"gold": gold_sql, "database": str(database), "gap": found.gap, **found.record}
        write_entry(folder, found.base, found.contents, record)
        return read_entry(folder) or Suite(gap=FAILED)

    def _copied(
        self, found: Suite, mirror: Mirror, database: Database, gold_sql: str, answer: ExecutionOutcome
    ) -> Suite:
        """Copies of the mirror's test databases on the engine, as far as the gold query is sound on them."""
        engine = self._engine(database)
        copies: list[tuple[bool, bool, str]] = []  # the best ones are the smallest
        if not found.databases and found.gap not in (FAILED, NO_CANDIDATE):
            return found
        for path in chain(map(Path, found.databases), self._drawn(mirror, gold_sql)):
            url = engine.create(path, mirror)
            known = self._sound_gold(url, mirror.dialect, gold_sql)
            if known is None:
                engine.drop(url)
                continue
            returns_nothing = all(cell is None for row in known.outcome.rows for cell in row)
            copies.append((returns_nothing, known.accepts(answer, gold_sql), url))
            if sum(not is_empty for is_empty, *_ in copies) == self.size:
                break
        copies.sort(key=lambda copy: copy[:2])
        for *_, url in copies[self.size :]:
            engine.drop(url)
        best = copies[: self.size]
        gap = gap_of([not is_same for _, is_same, _ in best], [is_empty for is_empty, *_ in best], self.size)
        return Suite(tuple(url for *_, url in best), gap)

    def _drawn(self, mirror: Mirror, gold_sql: str, answer_sql: str = "") -> Iterator[Path]:
        """Random databases for queries that SQLite cannot run."""
        base = self._sample(mirror.path)
        queries = _native(mirror, gold_sql, answer_sql)
        contents = draw_databases(mirror.path, base, queries, size=N_DRAWN) if queries else ()
        with self._new_folder() as folder:
            for number, content in enumerate(contents):
                path = Path(folder) / f"{number}.sqlite"
                materialise(base, content, path).close()
                yield path

    def _sound_gold(self, url: str, dialect: str, gold_sql: str) -> GoldResult | None:
        """Result of the gold query on a copy; None if it fails there, or depends on ties."""
        gold = GoldResult.of(self._executor, url, gold_sql, limits=self._limits)
        tree = read_query(gold_sql, dialect).tree
        if not gold.outcome.is_ok or gold.outcome.is_truncated or not isinstance(tree, exp.Query):
            return None
        for sql in with_ties_decided(tree, dialect):  # one after the other: one worker opens the copy
            is_other = sql != tree.sql(dialect)
            if is_other and not gold.accepts(self._executor.execute(url, sql, limits=self._limits), sql):
                return None
        return gold

    def _mirror(self, database: Database) -> Mirror:
        """Mirror of a database.

        Raises:
            ConfigError: Its engine's databases cannot be copied on this machine.
        """
        address = parse_address(database)
        if not address.engine.needs_mirror:
            return Mirror.of_file(Path(address.location))
        key = (database, fingerprint(database))
        mirror = self._mirrors.get(key)
        if mirror is None:
            catalogue = self._engine(database).catalogue(self._executor, database)
            folder = self._folder / "mirrors"
            mirror = build_mirror(self._executor, database, catalogue, read_schema(database), folder)
            self._mirrors.put(key, mirror)
        return mirror

    def _sample(self, database: Path) -> DatabaseSample:
        """Sample of a SQLite file."""
        key = (database, fingerprint(database))
        sample = self._samples.get(key)
        if sample is None:
            sample = read_sample(database)
            self._samples.put(key, sample)
        return sample

    def _new_folder(self) -> tempfile.TemporaryDirectory[str]:
        self._scratch.mkdir(exist_ok=True)  # a forked process that ended has removed it
        return tempfile.TemporaryDirectory(dir=self._scratch)

    def _engine(self, database: Database) -> CopyEngine:
        """Maker of copies for a database; once it fails, it is not tried again.

        Raises:
            ConfigError: Such databases cannot be copied on this machine.
        """
        kind = parse_address(database).kind
        if kind in self._missing:
            raise ConfigError(self._missing[kind])
        try:
            if kind not in self._engines:
                self._engines[kind] = _copy_engine(kind, self._folder, self._url)
            self._engines[kind].check()
        except ConfigError as error:
            self._missing[kind] = str(error)
            raise
        return self._engines[kind]


def _native(mirror: Mirror, gold_sql: str, answer_sql: str = "") -> Native | None:
    """Queries of a database that has a mirror; None for a SQLite file."""
    if mirror.is_database:
        return None
    return Native(mirror.dialect, *map(mirror.with_plain_values, (gold_sql, answer_sql)))


def _copy_engine(kind: Kind, folder: Path, url: str) -> CopyEngine:
    if kind == "duckdb":
        with needs_extra("duckdb", "a DuckDB database"):
            from text2sql_grpo.grading.duckdb_copies import DuckDBCopies
        return DuckDBCopies(folder / "duckdb")
    with needs_extra("postgresql", "a PostgreSQL database"):
        from text2sql_grpo.grading.postgres_copies import PostgresCopies
    return PostgresCopies(folder / "postgresql", url)
