"""Test suite of a gold query: small databases on which a wrong answer has another result.

One database separates few queries: a hard-coded answer, a condition that happens to select the same rows, an
empty result all look right. A test database keeps the schema with its keys, foreign keys, types and
constraints, and has other rows: values next to the query's literals, duplicates, ties, missing and extra
matches. See `search` for how they are chosen.

The search runs on SQLite; see `engine_suites` for databases of other engines. The test databases of a SQLite
file are kept in a folder, one subfolder per content of the file and gold query, shared by processes and runs.
"""

import hashlib
import json
import logging
import os
import shutil
import sqlite3
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from threading import RLock

from text2sql_grpo.errors import ConfigError, DataError, RunError
from text2sql_grpo.files import prune_once, sha256
from text2sql_grpo.grading.base_sample import DatabaseSample, SlowExpressionsError
from text2sql_grpo.grading.engine_suites import EngineSuites
from text2sql_grpo.grading.gold_query import why_unread
from text2sql_grpo.grading.materialise import Content, materialise
from text2sql_grpo.grading.search import (
    FAILED,
    Native,
    NoCandidateError,
    SlowAnswerError,
    Suite,
    find_counterexamples,
    find_test_databases,
)
from text2sql_grpo.grading.strict import compare_strict
from text2sql_grpo.sql.address import Database, Kind, parse_address
from text2sql_grpo.sql.executor import SQLExecutor, fingerprint
from text2sql_grpo.sql.lru import Lru
from text2sql_grpo.sql.sqlite_file import Fingerprint, fingerprint_of

MAX_DATABASES = 4
MAX_TRIALS = 16_384  # of gold queries and answers, in memory
MAX_SUITES: dict[Kind, int] = {  # of gold queries, in memory
    "sqlite": 65_536,
    "duckdb": 65_536,
    "postgresql": 128,  # a copy takes 8 MB, and is dropped with its suite
}
RERUNS = 4  # of a gold query that the engine reports as volatile
FORMAT = 12  # to be raised when other databases are drawn for the same gold query

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
        url: str = "",
        declared_nulls: bool = False,
    ) -> None:
        """Make a suite; nothing is searched yet.

        Args:
            executor: Runs queries.
            folder: Where test databases are kept.
            size: Maximum number of test databases of a gold query.
            url: URL of a superuser of a PostgreSQL server, which holds the copies; empty for a private one.
            declared_nulls: True to try NULLs in columns that may be NULL, and never are, in counterexamples.
        """
        self.size = size
        self.n_searched = 0
        self.n_tried = 0
        self._executor = executor
        self._folder = folder
        self._scratch = Path(tempfile.mkdtemp(prefix="text2sql-grpo-candidates-"))
        weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        for own in (folder, self._scratch):
            executor.grant_folder(own)
        self._lock = RLock()
        self._known = {kind: Lru[tuple[Database, object, str], Suite](n) for kind, n in MAX_SUITES.items()}
        self._tried: Lru[tuple[Database, object, str, str], Trial] = Lru(MAX_TRIALS)
        self._counterexamples = partial(find_counterexamples, executor, declared_nulls=declared_nulls)
        self._engines = EngineSuites(
            executor, folder, self._scratch, self._counterexamples, size=size, url=url
        )

    def check(self, database: Database) -> None:
        """Fail if no test databases of such a database can be made on this machine.

        Raises:
            ConfigError: With the reason.
        """
        if parse_address(database).engine.needs_mirror:
            self._engines.engine(database)

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
        address = parse_address(database)
        key = (database, fingerprint(database), gold_sql)
        with self._lock:
            known = self._known[address.kind]
            found = known.get(key)
            if found is None:
                found = self._made(database, gold_sql)
                if found.gap != FAILED:  # it may succeed another time
                    gone = known.put(key, found)
                    for suite in gone if address.engine.needs_mirror else ():
                        self._engines.drop(*suite.databases)
            if found.databases and address.engine.needs_mirror:
                gap = self._engines.mirror(database).gap_of(answer_sql)
                return Suite(gap=gap) if gap else found
            return found

    def counterexample(self, database: Database, gold_sql: str, answer_sql: str) -> Trial:
        """Search for a database on which an answer has another result than its gold query.

        Raises:
            DataError: A database cannot be read or made.
            RunError: A server is gone, or workers cannot be started.
        """
        key = (database, fingerprint(database), gold_sql, answer_sql)
        with self._lock:
            known = self._tried.get(key)
            self.n_tried += known is None
        if known is not None:
            return known
        try:
            found = self._trial(database, gold_sql, answer_sql)
        except (SlowExpressionsError, NoCandidateError) as error:
            found = Trial(gap=f"no counterexample was searched: {error}")
        except SlowAnswerError as error:
            found = Trial(gap=f"fewer counterexamples were searched: {error}")
        except RunError:
            raise
        except Exception as error:  # any answer: its gap is counted
            _logger.warning("no counterexamples to an answer, an internal error: %r (%s)", error, answer_sql)
            return Trial(gap=f"internal error: {type(error).__name__}: {error}"[:200])
        with self._lock:
            self._tried.put(key, found)
        return found

    def _trial(self, database: Database, gold_sql: str, answer_sql: str) -> Trial:
        address = parse_address(database)
        if address.engine.needs_mirror:
            is_refuted = self._engines.is_refuted(database, gold_sql, answer_sql)
        else:
            path = Path(address.location)
            with closing(self._counterexamples(path, gold_sql, answer_sql, self._scratch)) as found:
                is_refuted = any(True for _ in found)
        unread = why_unread(answer_sql, address.dialect)
        return Trial(is_refuted, f"the answer was searched by its tokens: {unread}" if unread else "")

    def _made(self, database: Database, gold_sql: str) -> Suite:
        """Test databases of a gold query that is met for the first time."""
        try:
            address = parse_address(database)
            if address.engine.needs_mirror:
                self._engines.mirror(database)  # which fails first where none can be made
            answer = self._executor.execute(database, gold_sql)
            if not answer.is_ok or answer.is_truncated:
                return Suite(gap=FAILED)
            if answer.is_volatile:
                again = self._executor.execute_many([(database, gold_sql)] * RERUNS)
                if any(not a.is_ok or compare_strict(answer, a, ordered=False) != "equal" for a in again):
                    return Suite(gap="the gold query returns other rows when it runs again")
            if address.engine.needs_mirror:
                return self._engines.databases(database, gold_sql, answer, self._searched)
            return self._searched(Path(address.location), gold_sql)
        except (ConfigError, SlowExpressionsError) as error:  # no copies on this machine, or in bounded time
            return Suite(gap=str(error))
        except RunError:
            raise
        except Exception as error:  # any gold query: its gap is counted
            _logger.warning("no test databases, an internal error: %r (gold query %s)", error, gold_sql)
            return Suite(gap=f"internal error: {type(error).__name__}: {error}"[:200])

    def _searched(self, database: Path, gold_sql: str, native: Native | None = None) -> Suite:
        """Test databases of a SQLite file, of the folder or new.

        Their subfolder is named by all that decides about them. Failures are not kept: another version of
        sqlglot or SQLite may not fail.
        """
        content = _content_hash(database, fingerprint_of(str(database)))
        queries = (gold_sql,) if native is None else (gold_sql, native.dialect, native.gold)
        known_by = (str(self.size), str(FORMAT), version("sqlglot"), sqlite3.sqlite_version)
        parts = (content, *queries, *known_by)
        name = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]
        folder = self._folder / "suites" / name
        known = _read_suite(folder)
        if known is not None:
            return known
        answer = self._executor.execute(database, gold_sql)
        if not answer.is_ok or answer.is_truncated:
            return Suite(gap=FAILED)
        found = find_test_databases(database, gold_sql, answer, size=self.size, native=native)
        self.n_searched += 1
        if not found.contents:
            return Suite(gap=found.gap)
        record = {"gold": gold_sql, "database": str(database), "gap": found.gap, **found.record}
        _write_suite(folder, found.base, found.contents, record)
        return _read_suite(folder) or Suite(gap=FAILED)


@lru_cache(maxsize=1_024)
def _content_hash(database: Path, fingerprint: Fingerprint) -> str:
    """Hash of the file and its log; the fingerprint is the key of the cache."""
    found = (path for path in (database, Path(f"{database}-wal")) if path.exists())
    return "".join(map(sha256, found))


def _read_suite(folder: Path) -> Suite | None:
    """Test databases in a folder; None if there is none.

    Raises:
        DataError: It cannot be read.
    """
    try:
        gap = json.loads((folder / "record.json").read_text(encoding="utf-8"))["gap"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read a test suite: {error}; delete it (at {folder})") from error
    with suppress(OSError):  # another user's
        os.utime(folder)
    return Suite(tuple(sorted(folder.glob("*.sqlite"))), gap)


def _write_suite(
    folder: Path, base: DatabaseSample, contents: Sequence[Content], record: dict[str, object]
) -> None:
    """Write test databases into a new folder atomically; that of another process stays.

    Raises:
        DataError: It cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        prune_once(folder.parent)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".partial-"))
    except OSError as error:
        raise DataError(f"cannot write the cache folder: {error} (at {folder})") from error
    try:
        for index, content in enumerate(contents):
            materialise(base, content, unfinished / f"{index}.sqlite").close()
        (unfinished / "record.json").write_text(json.dumps(record), encoding="utf-8")
        unfinished.chmod(0o755)
        os.rename(unfinished, folder)
    except (OSError, sqlite3.Error) as error:
        if not folder.is_dir():
            raise DataError(f"cannot write a test database: {error} (at {folder})") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
