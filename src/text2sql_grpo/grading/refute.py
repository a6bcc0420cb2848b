"""Refutation of an answer by variants of the database that are made for it.

Neighbours know the gold alone. An answer that passed them is tried on variants with its own literals, columns
and sizes: a bound, a further condition, a list or a limit that no neighbour touches.
"""

import logging
import os
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from threading import Lock

from text2sql_grpo.grading.base_sample import BaseSample, TableSample, with_links
from text2sql_grpo.grading.gold_query import GoldQuery, read_gold
from text2sql_grpo.grading.perturb import Recipe, perturbed
from text2sql_grpo.grading.small_database import build, run_trusted
from text2sql_grpo.grading.stability import differs_from, is_stable, with_ties_decided
from text2sql_grpo.grading.strict import find_nothing
from text2sql_grpo.sql.address import Database
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Limits, Row

N_VARIANTS = 12
N_REPEATING = 4  # more of them, with many rows alike
ROWS = (1, 8, 16, 24)  # of a table that a query reads, before groups need more
MAX_KNOWN = 16_384  # pairs whose verdict is cached

logger = logging.getLogger(__name__)


class Refuter:
    """Search for a variant on which an answer differs from its gold; verdicts are cached.

    Attributes:
        tried: Number of pairs that were tried, not found in the cache.
    """

    def __init__(self, executor: SQLExecutor, *, limits: Limits | None = None) -> None:
        self.tried = 0
        self._executor = executor
        self._limits = limits
        self._folder = Path(tempfile.mkdtemp(prefix="text2sql-grpo-variants-"))
        executor.grant_folder(self._folder)
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._numbers = count()
        self._known: OrderedDict[tuple[Database, str, str], bool] = OrderedDict()
        self._lock = Lock()

    def refutes(self, base: BaseSample, database: Path, gold_sql: str, predicted_sql: str) -> bool:
        """True if a variant of the database refutes the answer; False after an internal error.

        Args:
            base: Sample of the database.
            database: Its file.
            gold_sql: The gold.
            predicted_sql: The answer.
        """
        key = (database, gold_sql, predicted_sql)
        return self.settled(key, lambda: any(True for _ in self.refuting(base, *key)))

    def settled(self, key: tuple[Database, str, str], search: Callable[[], bool]) -> bool:
        """Result of a search for the variant that refutes an answer, cached; False after an internal error.

        Args:
            key: The database, the gold and the answer.
            search: Returns True if there is such a variant.
        """
        with self._lock:
            if key in self._known:
                return self._known[key]
        try:
            found = search()
        except Exception as error:  # whatever a model writes: graded by the neighbours alone
            logger.warning("no variants for an answer, an internal error: %r (%s)", error, key[2])
            found = False
        with self._lock:
            self.tried += 1
            self._known[key] = found
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return found

    def refuting(
        self, base: BaseSample, database: Path, gold_sql: str, predicted_sql: str
    ) -> Generator[Path]:
        """Variants that refute the answer, as files that are removed at the end; see `refutes`."""
        gold = read_gold(gold_sql, base.schema, base.views)
        predicted = read_gold(predicted_sql, base.schema, base.views)
        if gold is None or (predicted is not None and predicted.tree == gold.tree):
            return
        seeds = gold if predicted is None else _joined(gold, predicted)
        base = with_links(base, database, seeds.links)
        rng = Random(f"{gold_sql}\0{predicted_sql}")
        again = with_ties_decided(gold.tree)
        self._folder.mkdir(exist_ok=True)  # a forked process that ended has removed it
        with ExitStack() as stack:
            variants = []
            for index in range(N_VARIANTS + N_REPEATING):
                path = self._folder / f"{os.getpid()}-{next(self._numbers)}.sqlite"
                stack.callback(path.unlink, missing_ok=True)
                recipe = replace(Recipe.drawn(rng), rows=rng.choice(ROWS), planted=0.6, exact=0.6)
                content = perturbed(base, seeds, rng, recipe)
                if index >= N_VARIANTS:
                    for name in sorted(seeds.tables & content.keys()):
                        content[name] = _repeating(base.tables[name], content[name], rng)
                connection = stack.enter_context(closing(build(base, content, path)))
                result = run_trusted(connection, gold_sql)
                if result.is_ok and not result.is_truncated:
                    variants.append((path, connection, result))
            asked = [(path, predicted_sql) for path, _, _ in variants]
            outcomes = self._executor.execute_many(asked, limits=self._limits)
            for (path, connection, result), outcome in zip(variants, outcomes, strict=True):
                if outcome.is_ok and find_nothing(result, outcome):
                    continue
                differs = differs_from(connection, gold_sql, result)
                if differs(outcome) and is_stable(base, connection, gold_sql, again, differs):
                    yield path


def _repeating(table: TableSample, rows: Sequence[Row], rng: Random) -> list[Row]:
    """Rows that repeat a few of them, keys aside: many share their values, or all equal their mean."""
    in_keys = {position for key in table.keys for position in key}
    few = rng.sample(rows, min(rng.choice((1, 2, 4)), len(rows)))
    return [tuple(row[p] if p in in_keys else cell for p, cell in enumerate(rng.choice(few))) for row in rows]


def _joined(gold: GoldQuery, predicted: GoldQuery) -> GoldQuery:
    """The gold with the dependencies of both queries."""
    literals = dict(gold.literals)
    for column, values in predicted.literals.items():
        literals[column] = tuple(dict.fromkeys((*literals.get(column, ()), *values)))
    return replace(
        gold,
        tables=gold.tables | predicted.tables,
        columns=gold.columns | predicted.columns,
        literals=literals,
        patterns=gold.patterns | predicted.patterns,
        links=tuple(dict.fromkeys((*gold.links, *predicted.links))),
        grouped=gold.grouped | predicted.grouped,
        group_sizes=tuple(dict.fromkeys((*gold.group_sizes, *predicted.group_sizes))),
    )
