"""Neighbour databases: small variants of a database on which a wrong query has another result.

One database separates few queries: a hard-coded answer, a condition that happens to select the same rows,
an empty result all look right. A neighbour keeps the schema with its keys, foreign keys, types and
constraints, and has other rows: values beside the query's literals, duplicates, ties, missing and extra
matches. Of many random ones those are kept that kill most mutants of the gold, as in distilled test suites
(Zhong et al. 2020, arXiv:2010.02840).
"""

import ast
import hashlib
import json
import logging
import os
import shutil
import sqlite3
import tempfile
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from threading import RLock
from typing import TypeVar

from sqlglot import exp

from text2sql_grpo.errors import DataError
from text2sql_grpo.grading.base_sample import BaseSample, read_sample, with_links
from text2sql_grpo.grading.gold_query import GoldQuery, read_gold, why_unread
from text2sql_grpo.grading.mutants import mutants
from text2sql_grpo.grading.perturb import perturbed
from text2sql_grpo.grading.small_database import build, run_trusted
from text2sql_grpo.grading.stability import differs_from, is_stable, with_ties_decided
from text2sql_grpo.grading.strict import compare_strict, has_top_level_order
from text2sql_grpo.sql.address import parse_address
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits, Row
from text2sql_grpo.sql.sqlite_file import Fingerprint, fingerprint_of

MAX_NEIGHBOURS = 4
MAX_TRIES = 72  # random variants built for one gold
ENOUGH_CANDIDATES = 28
BASE_LIMITS = Limits(timeout_s=1.0, max_rows=2_000)
BATCH = 16  # mutants run together on the base
BASE_BUDGET_S = 4.0  # for all mutants on the base; those left over count as unknown
MAX_KNOWN = 65_536  # golds whose neighbours are cached

ANSWER_WEIGHT = 5.0  # the gold's answer on the base, hard-coded
NOTHING_WEIGHT = 0.5  # a variant on which the gold finds nothing
AGREEING_WEIGHT = 1.0  # a mutant that the base does not kill
OTHER_WEIGHT = 0.05
REPEATED = 0.3  # worth of killing a mutant once more

FAILED = "the gold failed when its neighbours were made"

logger = logging.getLogger(__name__)
K = TypeVar("K")
V = TypeVar("V")
Content = Mapping[str, Sequence[Row]]


@dataclass(frozen=True)
class Candidate:
    """One variant, with the indices of the mutants that it kills."""

    content: Content
    killed: frozenset[int]


@dataclass(frozen=True)
class Cover:
    """Neighbours of one gold.

    Attributes:
        paths: SQLite files.
        gap: Reason why they are fewer than asked for, or let a hard-coded answer pass; empty if neither.
    """

    paths: tuple[Path, ...] = ()
    gap: str = ""


class Neighbours:
    """Neighbours of databases and golds, made on demand and kept in a folder.

    The folder's entries are named by the content of the database, the gold and the code (comments and
    docstrings aside) that makes them; several processes may share it. Databases must not change while it
    lives.

    Attributes:
        seconds_making: Wall-clock seconds spent on making neighbours.
        made: Number of golds whose neighbours were made, not found in the folder.
        max_neighbours: Number asked for.
        gaps: Reason of each database and gold without the neighbours asked for, of those met so far.
    """

    def __init__(
        self,
        executor: SQLExecutor,
        cache_folder: Path,
        *,
        limits: Limits | None = None,
        max_neighbours: int = MAX_NEIGHBOURS,
    ) -> None:
        self.seconds_making = 0.0
        self.made = 0
        self.max_neighbours = max_neighbours
        self.gaps: dict[tuple[str, str], str] = {}
        self._executor = executor
        self._folder = cache_folder
        executor.grant_folder(cache_folder)
        self._limits = limits
        self._lock = RLock()
        self._known: OrderedDict[tuple[Path, Fingerprint, str], Cover] = OrderedDict()
        self._samples: OrderedDict[tuple[Path, Fingerprint], BaseSample] = OrderedDict()

    def of(self, database: Path | str, gold_sql: str) -> tuple[Path, ...]:
        """SQLite files of the neighbours, at most `max_neighbours`; see `cover`."""
        return self.cover(database, gold_sql).paths

    def cover(self, database: Path | str, gold_sql: str) -> Cover:
        """Neighbours, at most `max_neighbours`, and the reason if they are fewer.

        None for a database that is not a SQLite file, and for a gold that fails, reads no table, cannot be
        parsed, calls `random()`, or whose result on every variant depends on the order in which rows are
        visited, ties of its last order aside. An exception while they are made is a reason too.

        Raises:
            DataError: The database is missing or no database, or the folder cannot be written.
        """
        kind, location = parse_address(database)
        if kind != "sqlite":
            found = Cover(gap=f"neighbours are made of SQLite databases only, got {kind}")
        else:
            key = (Path(location), fingerprint_of(location), gold_sql)
            with self._lock:
                found = self._known.get(key) or self._find_or_make(*key)
                if found.gap != FAILED:  # it may succeed another time
                    _remember(self._known, key, found)
        if found.gap:
            self.gaps[str(database), gold_sql] = found.gap
        return found

    def sample(self, database: Path) -> BaseSample:
        """Sample of a SQLite database, cached."""
        key = (database, fingerprint_of(str(database)))
        with self._lock:
            if key not in self._samples:
                _remember(self._samples, key, read_sample(database), limit=32)
            return self._samples[key]

    def _find_or_make(self, database: Path, fingerprint: Fingerprint, gold_sql: str) -> Cover:
        parts = (_content_hash(database, fingerprint), gold_sql, _code_hash(), str(self.max_neighbours))
        name = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]
        folder = self._folder / name
        if not folder.is_dir():
            started = time.perf_counter()
            answer = self._executor.execute(database, gold_sql, limits=self._limits)
            if not answer.is_ok or answer.is_truncated:
                return Cover(gap=FAILED)
            try:
                chosen, base, record = self._choose(database, gold_sql, answer, Random(name))
            except Exception as error:  # whatever a gold is: it is graded without neighbours, and counted
                logger.warning("no neighbours of a gold, an internal error: %r (gold %s)", error, gold_sql)
                return Cover(gap=f"internal error: {type(error).__name__}: {error}"[:200])
            self.seconds_making += time.perf_counter() - started
            self.made += 1
            _write(folder, base, chosen, {"gold": gold_sql, "database": str(database), **record})
        gap = json.loads((folder / "record.json").read_text(encoding="utf-8"))["gap"]
        return Cover(tuple(sorted(folder.glob("*.sqlite"))), gap)

    def _choose(
        self,
        database: Path,
        gold_sql: str,
        answer: ExecutionOutcome,
        rng: Random,
    ) -> tuple[list[Content], BaseSample, dict[str, int | str]]:
        base = self.sample(database)
        gold = read_gold(gold_sql, base.schema, base.views)
        gap = _gap_before(gold, gold_sql, base)
        if gold is None or gap:
            return [], base, {"mutants": 0, "killed": 0, "gap": gap}
        base = with_links(base, database, gold.links)
        suspects, weights = self._suspects(database, gold, base, answer, has_top_level_order(gold_sql))
        candidates = _candidates(base, gold, gold_sql, suspects, answer, rng)
        chosen = _greedy(candidates, weights, self.max_neighbours)
        killed = frozenset[int]().union(*(candidate.killed for candidate in chosen))
        record: dict[str, int | str] = {"mutants": len(weights), "killed": len(killed)}
        record["gap"] = _gap(chosen, len(suspects), self.max_neighbours)
        return [candidate.content for candidate in chosen], base, record

    def _suspects(
        self, database: Path, gold: GoldQuery, base: BaseSample, answer: ExecutionOutcome, ordered: bool
    ) -> tuple[list[str], list[float]]:
        """Mutants and the worth of killing each.

        Two more worths follow: of killing the gold's hard-coded answer, and of an empty result.
        """
        deadline = time.monotonic() + BASE_BUDGET_S

        def run(sql: str) -> tuple[Row, ...] | None:
            if time.monotonic() > deadline:
                return None
            outcome = self._executor.execute(database, sql, limits=BASE_LIMITS)
            return outcome.rows if outcome.is_ok and not outcome.is_truncated else None

        found = list(mutants(gold, base.schema, run))
        weights = []
        for start in range(0, len(found), BATCH):
            batch = found[start : start + BATCH]
            if time.monotonic() > deadline:
                weights += [AGREEING_WEIGHT] * len(batch)
                continue
            for outcome in self._executor.execute_many(
                [(database, sql) for sql in batch], limits=BASE_LIMITS
            ):
                agrees = outcome.is_ok and compare_strict(answer, outcome, ordered=ordered) == "equal"
                weights.append(AGREEING_WEIGHT if agrees else OTHER_WEIGHT)
        return found, [*weights, ANSWER_WEIGHT, NOTHING_WEIGHT]


def _gap_before(gold: GoldQuery | None, gold_sql: str, base: BaseSample) -> str:
    """Reason why a gold gets no neighbours; empty if it may get some."""
    if gold is None:
        return why_unread(gold_sql)
    if gold.tree.find(exp.Rand):
        return "it calls random()"
    virtual = sorted(gold.tables - base.tables.keys())
    return f"it reads the virtual table {virtual[0]}" if virtual else ""


def _gap(chosen: Sequence[Candidate], n_mutants: int, asked: int) -> str:
    """Reason why the chosen neighbours prove less than asked; empty if they do not.

    Args:
        chosen: The neighbours. They kill the hard-coded answer as index `n_mutants`; the next index marks
            an empty result.
        n_mutants: Number of mutants.
        asked: Number of neighbours asked for.
    """
    if not chosen:
        return "on every variant its result depends on the order of the scan, or it fails"
    if all(n_mutants + 1 in candidate.killed for candidate in chosen):
        return "it finds nothing on its neighbours"
    if not any(n_mutants in candidate.killed for candidate in chosen):
        return "its answer, hard-coded, agrees on its neighbours"
    return f"{len(chosen)} neighbours instead of {asked}" if len(chosen) < asked else ""


def _candidates(
    base: BaseSample,
    gold: GoldQuery,
    gold_sql: str,
    suspects: Sequence[str],
    answer: ExecutionOutcome,
    rng: Random,
) -> list[Candidate]:
    """Variants on which the gold has one result only, whatever the order of the scan."""
    again = with_ties_decided(gold.tree)
    candidates: list[Candidate] = []
    slow: set[int] = set()
    for _ in range(MAX_TRIES):
        content = perturbed(base, gold, rng)
        with closing(build(base, content)) as connection:
            result = run_trusted(connection, gold_sql)
            if not result.is_ok or result.is_truncated:
                continue
            differs = differs_from(connection, gold_sql, result)
            if not is_stable(base, connection, gold_sql, again, differs):
                continue
            killed = set()
            for index, sql in enumerate(suspects):
                outcome = ExecutionOutcome("timeout") if index in slow else run_trusted(connection, sql)
                if outcome.status == "timeout":  # a join without its condition, say: killed by any variant
                    slow.add(index)
                if differs(outcome):
                    killed.add(index)
            if differs(answer):
                killed.add(len(suspects))
        if all(cell is None for row in result.rows for cell in row):
            killed.add(len(suspects) + 1)
        candidates.append(Candidate(content, frozenset(killed)))
        if len(candidates) == ENOUGH_CANDIDATES:
            break
    return candidates


def _greedy(candidates: Sequence[Candidate], weights: Sequence[float], limit: int) -> list[Candidate]:
    """Greedy choice of candidates, each the one that adds most worth to those before it."""
    worth = list(weights)
    left = list(candidates)
    chosen: list[Candidate] = []
    while left and len(chosen) < limit:
        best = max(left, key=lambda candidate: sum(worth[index] for index in candidate.killed))
        left.remove(best)
        chosen.append(best)
        for index in best.killed:
            worth[index] *= REPEATED
    return chosen


def _write(folder: Path, base: BaseSample, contents: Sequence[Content], record: Mapping[str, object]) -> None:
    """Write an entry atomically; an entry of another process stays."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".partial-"))
    except OSError as error:
        raise DataError(f"cannot write the cache folder: {error} (at {folder})") from error
    try:
        for index, content in enumerate(contents):
            build(base, content, partial / f"{index}.sqlite").close()
        (partial / "record.json").write_text(json.dumps(record), encoding="utf-8")
        partial.chmod(0o755)
        os.rename(partial, folder)
    except (OSError, sqlite3.Error) as error:
        if not folder.is_dir():
            raise DataError(f"cannot write a neighbour database: {error} (at {folder})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@lru_cache(maxsize=1_024)
def _content_hash(database: Path, fingerprint: Fingerprint) -> str:
    """Hash of the file and its log; the fingerprint is the key of the cache."""
    digest = hashlib.sha256()
    for path in (database, Path(f"{database}-wal")):
        if path.exists():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _code_hash() -> str:
    """Hash of the modules that make neighbours, without comments and docstrings."""
    names = (
        "base_sample",
        "dates",
        "gold_query",
        "mutants",
        "near_values",
        "neighbours",
        "perturb",
        "small_database",
        "stability",
    )
    texts = (Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8") for name in names)
    return hashlib.sha256("\0".join(map(code_alone, texts)).encode()).hexdigest()


def code_alone(text: str) -> str:
    """Python source without comments, docstrings and layout.

    >>> code_alone("def f():\\n    'Docstring.'\\n    return (1)  # comment")
    'def f():\\n    return 1'
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            del node.body[0]
    return ast.unparse(tree)


def _remember(known: OrderedDict[K, V], key: K, value: V, *, limit: int = MAX_KNOWN) -> None:
    known[key] = value
    while len(known) > limit:
        known.popitem(last=False)
