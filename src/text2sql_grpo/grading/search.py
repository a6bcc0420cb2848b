"""Search for test databases of a gold query, and for counterexamples to an answer, on SQLite.

Of many random small databases those are kept that kill most mutants of the gold query, as in distilled test
suites (Zhong et al. 2020, arXiv:2010.02840). For each accepted answer more are drawn, biased towards its own
literals and columns. Only the tables that the queries read, and the tables that those refer to, are made.
"""

import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any

from text2sql_grpo.grading.base_sample import DatabaseSample, sample_of, with_identifiers, with_links
from text2sql_grpo.grading.boundaries import probes, with_equal_amounts
from text2sql_grpo.grading.gold_query import GoldQuery, read_gold, why_unread
from text2sql_grpo.grading.gold_result import GoldResult, with_ties_decided
from text2sql_grpo.grading.materialise import (
    IN_MEMORY,
    Content,
    SmallDatabase,
    is_stable,
    materialise,
    reversed_copy,
    run_gold,
)
from text2sql_grpo.grading.mutants import choosing_operators, edited
from text2sql_grpo.grading.perturb import Recipe, draw_rows
from text2sql_grpo.grading.query_columns import ColumnRef
from text2sql_grpo.sql.address import Database
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.hidden import ROW_IDS
from text2sql_grpo.sql.outcome import ExecutionOutcome
from text2sql_grpo.sql.query import lexemes, literals

MAX_TRIES = 72  # databases drawn for one gold query
ENOUGH_CANDIDATES = 28

REPEATED = 0.3  # worth of killing a mutant once more
HARD_CODED = "hard-coded"  # in place of a mutant: the gold query's result on the database

N_FOR_ANSWER = 24  # candidates drawn for one answer
N_ALIKE = 6  # more of them, whose rows meet the queries' conditions and share most values
N_TIED = 10  # more of them, with groups of equal sizes and sums, for queries that rank groups
N_LARGE = 6  # more of them, with more rows than a LIMIT or a window frame takes
N_EQUAL = 10  # more of them, in which amounts of several rows that are compared are equal
N_WITH_NULLS = 4  # more of them, with NULLs wherever they are declared, if asked for
MIN_LARGE, MAX_LARGE = 4, 120  # numbers in a query that ask for them, and their rows
MAX_OF_ANSWER = 64  # size of groups that only the answer asks for, above which other candidates ignore it
N_SAMPLES = 128  # samples as queries read them that are kept: answers to one question read the same
MAX_SEARCH_S = 10.0  # in databases, for one answer; a slow one is tried on fewer candidates
N_REVERSED = 8  # candidates on which an answer is also tried with their rows in the reverse order
N_AT_ONCE = 4  # candidates on which an answer runs before that time is looked at
ROWS_FOR_ANSWER = (1, 8, 16, 24)  # of a table that a query reads, before groups need more

# Fields of a gold query to which an answer adds nothing.
OF_GOLD_ALONE = {"tree", "columns_of", "missing", "trimmed", "cased", "tied"}

NO_CANDIDATE = "no test database: in all tries the gold query failed or depended on row order"
FAILED = "the gold query failed when its test databases were made"


class NoCandidateError(Exception):
    """The gold query runs on none of the candidates drawn for an answer."""


class SlowAnswerError(Exception):
    """An answer, or its gold query, takes so long on candidates that the search for a counterexample ends."""


class SearchTime:
    """Seconds in databases that the search for a counterexample to one answer has left."""

    def __init__(self) -> None:
        self._left_s = MAX_SEARCH_S

    def spend(self, *outcomes: ExecutionOutcome) -> None:
        """Subtract the time of executions; raises SlowAnswerError if none is left."""
        self._left_s -= sum(outcome.elapsed_s for outcome in outcomes)
        if self._left_s < 0:
            raise SlowAnswerError(f"the queries took over {MAX_SEARCH_S:g} s on candidates")


@dataclass(frozen=True)
class Suite:
    """Test databases of one gold query.

    Attributes:
        databases: SQLite files, or URLs.
        gap: Why they are fewer than asked for, or let a hard-coded answer pass; empty if neither.
    """

    databases: tuple[Database, ...] = ()
    gap: str = ""


@dataclass(frozen=True)
class Native:
    """Queries as their engine has them, before their translation to SQLite: of these rows are drawn.

    Attributes:
        dialect: Name in sqlglot of their SQL.
        gold: The gold query.
        answer: The answer; empty for none.
    """

    dialect: str
    gold: str
    answer: str = ""


@dataclass(frozen=True)
class Found:
    """Test databases that were found.

    Attributes:
        contents: Their rows, of all tables.
        base: Sample with the schema of which they are made.
        gap: Why they are fewer than asked for, or let a hard-coded answer pass; empty if neither.
        record: Figures of the search.
    """

    contents: tuple[Content, ...]
    base: DatabaseSample
    gap: str
    record: Mapping[str, object]


@dataclass(frozen=True)
class Drawn:
    """Small database on which the gold query runs.

    Attributes:
        content: Its rows, before constraints refuse some.
        path: Its file, or `IN_MEMORY`.
        connection: The database.
        gold: Result of the gold query.
        is_stable: See `materialise.is_stable`.
    """

    content: Content
    path: Path
    connection: SmallDatabase
    gold: GoldResult
    is_stable: Callable[[], bool]


@dataclass(frozen=True)
class _Candidate:
    """Possible test database.

    Attributes:
        content: Its rows.
        killed: Mutants with another result than the gold query's there; `HARD_CODED` for its result on the
            database.
        returns_nothing: True if the gold query returns no rows, or NULLs, there.
    """

    content: Content
    killed: frozenset[str]
    returns_nothing: bool


def drawn_databases(
    base: DatabaseSample,
    contents: Iterable[Content],
    gold: GoldQuery,
    gold_sql: str,
    *,
    folder: Path | None = None,
    only_stable: bool = True,
) -> Iterator[Drawn]:
    """Make databases, and yield those on which the gold query runs; the caller closes them.

    Args:
        folder: Where their files are made; None for databases in memory.
        only_stable: Leave out those on which the result depends on the order of the scan; see `is_stable`.
    """
    again = with_ties_decided(gold.tree)
    for number, content in enumerate(contents):
        path = folder / f"{number}.sqlite" if folder else IN_MEMORY
        connection = materialise(base, content, path)
        result = GoldResult(gold_sql, partial(run_gold, connection))
        if result.outcome.is_ok and not result.outcome.is_truncated:
            has_one_result = partial(is_stable, base, connection, result, again)
            if not only_stable or has_one_result():
                yield Drawn(content, path, connection, result, has_one_result)
                continue
        connection.close()


def find_test_databases(
    database: Path,
    gold_sql: str,
    answer: ExecutionOutcome,
    *,
    size: int,
    native: Native | None = None,
) -> Found:
    """Find at most `size` test databases of a gold query, whose result on the database is `answer`."""
    base = sample_of(database)
    gold = read_gold(gold_sql, base.schema, base.views)
    if gold is None:
        return Found((), base, why_unread(gold_sql) or "it reads no table whose columns are known", {})
    if virtual := sorted(gold.tables - base.tables.keys()):
        return Found((), base, f"the gold query reads the virtual table {virtual[0]}", {})
    seeds = (_read(base, native.gold, native.dialect) if native else None) or gold
    base, assumed = _as_read(base, database, _named_by_any(seeds))
    read = _restricted(base, gold.tables | base.named_in(gold_sql))
    mutants = list(edited(gold, choosing_operators(gold, base.schema)))
    rng = Random(gold_sql)
    contents = (draw_rows(read, seeds, rng) for _ in range(MAX_TRIES))
    drawn = drawn_databases(read, contents, gold, gold_sql)
    chosen = _greedy(_candidates(drawn, mutants, answer), size)
    killed = frozenset[str]().union(*(candidate.killed for candidate in chosen))
    whole = [
        draw_rows(base, seeds, Random(f"{index} {gold_sql}"), known=candidate.content)
        for index, candidate in enumerate(chosen)
    ]
    kills_hard_coded = [HARD_CODED in candidate.killed for candidate in chosen]
    gap = gap_of(kills_hard_coded, [candidate.returns_nothing for candidate in chosen], size)
    record = {"mutants": len(mutants), "killed": len(killed - {HARD_CODED}), "assumed_unique": assumed}
    return Found(tuple(whole), base, gap, record)


def _read(base: DatabaseSample, sql: str, dialect: str) -> GoldQuery | None:
    return read_gold(sql, base.schema, base.views, dialect=dialect)


def _as_read(
    base: DatabaseSample, database: Path, query: GoldQuery
) -> tuple[DatabaseSample, tuple[str, ...]]:
    """Sample with the links, unique texts and NULLs that a query relies on, and the texts' columns."""
    return _relied_on(base, database, query.missing, query.links, query.identifying)


def _named_by_any(gold: GoldQuery) -> GoldQuery:
    """Gold query whose test databases suit answers that name rows by any column, if another table lacks them.

    The search for a counterexample to an answer relies only on the columns that the two queries compare.
    """
    return replace(gold, identifying=gold.identifying | gold.lacking)


@lru_cache(maxsize=N_SAMPLES)
def _relied_on(
    base: DatabaseSample,
    database: Path,
    missing: frozenset[ColumnRef],
    links: tuple[tuple[ColumnRef, ColumnRef], ...],
    identifying: frozenset[ColumnRef],
) -> tuple[DatabaseSample, tuple[str, ...]]:
    return with_identifiers(with_links(base.with_nulls(missing), database, links), database, identifying)


_restricted = lru_cache(maxsize=N_SAMPLES)(DatabaseSample.restricted)


def draw_databases(database: Path, queries: Native, *, size: int) -> Iterator[Content]:
    """Rows of random databases for a gold query, and perhaps an answer, that SQLite cannot run."""
    base = sample_of(database)
    gold, answer = (_read(base, sql, queries.dialect) for sql in (queries.gold, queries.answer))
    if gold is None:
        return
    gold = _named_by_any(gold) if answer is None else _joined(gold, answer)
    base, _ = _as_read(base, database, gold)
    rng = Random(f"{queries.gold}\0{queries.answer}")
    for recipe in _recipes_for_answer(rng, gold)[:size]:
        larger = replace(recipe, rows=min(2 * recipe.rows, MAX_LARGE))  # as the databases are few
        yield draw_rows(base, gold, rng, larger)


@contextmanager
def new_folder(scratch: Path) -> Iterator[Path]:
    """Temporary folder for candidates."""
    scratch.mkdir(exist_ok=True)  # a forked process that ended has removed it
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        yield Path(folder)


def gap_of(kills_hard_coded: Sequence[bool], returns_nothing: Sequence[bool], size: int) -> str:
    """Why test databases prove less than `size` of them should; empty if they do not.

    Args:
        kills_hard_coded: True where the gold query's result differs from the result on the database.
        returns_nothing: True where the gold query returns nothing.
        size: Number asked for.
    """
    if not kills_hard_coded:
        return NO_CANDIDATE
    if all(returns_nothing):
        return "the gold query returns no rows on its test databases"
    if not any(kills_hard_coded):
        return "a hard-coded answer passes all its test databases"
    n_found = len(kills_hard_coded)
    return f"{n_found} test databases instead of {size}" if n_found < size else ""


def find_counterexamples(
    executor: SQLExecutor,
    database: Path,
    gold_sql: str,
    answer_sql: str,
    scratch: Path,
    *,
    declared_nulls: bool = False,
    native: Native | None = None,
) -> Generator[Path]:
    """Yield small databases on which an answer has another result than the gold query.

    Args:
        scratch: Where their files are kept until the search ends.
        declared_nulls: True to draw some with NULLs in columns that may be NULL, and never are.

    Raises:
        NoCandidateError: The gold query runs on none of the candidates.
        SlowAnswerError: The answer runs too long to be tried on all of them.
    """
    base = sample_of(database)
    gold = read_gold(gold_sql, base.schema, base.views)
    answer = read_gold(answer_sql, base.schema, base.views)
    if gold is None or (answer is not None and answer.tree == gold.tree):
        return
    seeds, known = gold, answer
    if native is not None:
        seeds = _read(base, native.gold, native.dialect) or gold
        known = _read(base, native.answer, native.dialect)
    seeds = _with_tokens(seeds, base, answer_sql) if known is None else _joined(seeds, known)
    base, _ = _as_read(base, database, seeds)
    read = _restricted(base, seeds.tables | base.named_in(gold_sql, answer_sql))
    rng = Random(f"{gold_sql}\0{answer_sql}")
    recipes = _recipes_for_answer(rng, seeds)
    largest = max((MAX_OF_ANSWER, *gold.group_sizes))
    small = replace(seeds, group_sizes=tuple(size for size in seeds.group_sizes if size <= largest))
    contents: Iterator[Content] = (
        draw_rows(read, seeds if recipe.rows > max(ROWS_FOR_ANSWER) else small, rng, recipe)
        for recipe in recipes
    )
    if compared := probes(gold):
        in_groups = (draw_rows(read, small, rng, _in_groups(rng)) for _ in range(N_EQUAL))
        contents = chain(contents, (with_equal_amounts(read, rows, compared, rng) for rows in in_groups))
    if declared_nulls:
        nulls = read.with_nulls()
        more = (replace(Recipe.drawn(rng), nulls=0.3) for _ in range(N_WITH_NULLS))
        contents = chain(contents, (draw_rows(nulls, seeds, rng, recipe) for recipe in more))
    with new_folder(scratch) as folder, ExitStack() as stack:
        candidates: list[Drawn] = []
        for drawn in drawn_databases(read, contents, gold, gold_sql, folder=folder, only_stable=False):
            stack.callback(drawn.connection.close)
            candidates.append(drawn)
        if not candidates:
            raise NoCandidateError("the gold query fails on all candidates")
        time = SearchTime()
        tries = chain(((drawn, drawn.path) for drawn in candidates), _reversed(read, candidates, answer_sql))
        while some := list(islice(tries, N_AT_ONCE)):
            outcomes = executor.execute_many([(path, answer_sql) for _, path in some])
            for (drawn, path), outcome in zip(some, outcomes, strict=True):
                is_refused = not drawn.gold.accepts(outcome, may_find_nothing=True)
                # On reversed rows a star returns row ids, too, and a name of two tables fails.
                has_its_width = len(outcome.columns) == len(drawn.gold.outcome.columns)
                if is_refused and (path == drawn.path or has_its_width) and drawn.is_stable():
                    yield path
            time.spend(*outcomes)


def _reversed(
    base: DatabaseSample, candidates: Sequence[Drawn], answer_sql: str
) -> Iterator[tuple[Drawn, Path]]:
    """The first candidates with their rows in the reverse order: an answer may rely on that of the scan."""
    row_ids = ROW_IDS & _words(answer_sql)
    for drawn in candidates[:N_REVERSED]:
        path = drawn.path.with_suffix(".reversed.sqlite")
        reversed_copy(base, drawn.connection, path, row_ids=row_ids).close()
        yield drawn, path


def _recipes_for_answer(rng: Random, query: GoldQuery) -> list[Recipe]:
    """Recipes of all kinds, in any order: the first ones alone may be used."""
    recipes = [
        replace(Recipe.drawn(rng), rows=rng.choice(ROWS_FOR_ANSWER), planted=0.6, exact=0.6)
        for _ in range(N_FOR_ANSWER)
    ]
    recipes += [_alike(rng) for _ in range(N_ALIKE)]
    recipes += [_tied(rng) for _ in range(N_TIED if query.ranks_groups else 0)]
    largest = max((0, *query.group_sizes))
    for number in range(N_LARGE if largest >= MIN_LARGE else 0):
        rows, exact = min((2 + 2 * number) * largest, MAX_LARGE), rng.choice((0.0, 0.5, 1.0))
        recipes.append(replace(_alike(rng), rows=rows, exact=exact, variety=0, kept=0.5))
    rng.shuffle(recipes)
    return recipes


def _tied(rng: Random) -> Recipe:
    recipe = Recipe.drawn(rng)
    return replace(recipe, rows=16, change=1.0, planted=0.3, variety=0, in_groups=True, ties=True)


def _in_groups(rng: Random) -> Recipe:
    """Recipe of rows that meet the queries' conditions, half of the time with few values to add up."""
    rows, planted, variety = rng.choice((8, 16)), rng.choice((0.5, 1.0)), rng.choice((2, 5))
    drawn = replace(_alike(rng), rows=rows, planted=planted, exact=1.0, variety=variety)
    return replace(drawn, ties=rng.random() < 0.5, kept=rng.choice((0.0, 0.5)))


def _alike(rng: Random) -> Recipe:
    return Recipe(
        rows=rng.choice((1, 3, 8)),
        change=1.0,
        planted=1.0,
        exact=rng.choice((0.5, 1.0)),  # a literal itself does not meet `>`
        variety=rng.choice((1, 2)),
        childless=0.3,
        nulls=0.0,
        in_groups=True,
    )


def _joined(gold: GoldQuery, answer: GoldQuery) -> GoldQuery:
    """The gold query with the dependencies of both; what only the answer expects of rows aside."""

    def both(name: str) -> Any:
        own, added = getattr(gold, name), getattr(answer, name)
        if isinstance(own, tuple):
            return tuple(dict.fromkeys((*own, *added)))
        if isinstance(own, Mapping):
            keys = (*own, *added)
            return {key: tuple(dict.fromkeys((*own.get(key, ()), *added.get(key, ())))) for key in keys}
        return own | added

    names = {field.name for field in fields(gold)} - OF_GOLD_ALONE
    return replace(gold, **{name: both(name) for name in names})


def _with_tokens(gold: GoldQuery, base: DatabaseSample, answer_sql: str) -> GoldQuery:
    """The gold query with all literals of an unread answer, in every column that either names."""
    words = _words(answer_sql)
    tables = gold.tables | (base.named_in(answer_sql) & base.tables.keys())
    named = {(name, c) for name in tables & base.tables.keys() for c in base.tables[name].columns}
    columns = gold.columns | {column for column in named if column[1].lower() in words}
    values = literals(answer_sql)
    return replace(
        gold,
        tables=tables,
        columns=columns,
        literals={column: (*gold.literals.get(column, ()), *values) for column in columns},
        constants=(*gold.constants, *values),
        patterns=gold.patterns | {value for value in values if isinstance(value, str) and "%" in value},
    )


def _words(sql: str) -> set[str]:
    """Words and quoted names of a query, in lower case."""
    return {lexeme.value.lower() for lexeme in lexemes(sql) if lexeme.kind in ("word", "name")}


def _candidates(found: Iterable[Drawn], mutants: Sequence[str], answer: ExecutionOutcome) -> list[_Candidate]:
    """Databases on which the gold query has one result only, whatever the order of the scan."""
    candidates: list[_Candidate] = []
    slow: set[str] = set()
    for drawn in islice(found, ENOUGH_CANDIDATES):
        killed = set() if drawn.gold.accepts(answer) else {HARD_CODED}
        with closing(drawn.connection) as connection:
            for sql in mutants:
                outcome = ExecutionOutcome("timeout") if sql in slow else run_gold(connection, sql)
                if outcome.status == "timeout":  # a join without its condition, say: killed everywhere
                    slow.add(sql)
                if not drawn.gold.accepts(outcome):
                    killed.add(sql)
        returns_nothing = all(cell is None for row in drawn.gold.outcome.rows for cell in row)
        candidates.append(_Candidate(drawn.content, frozenset(killed), returns_nothing))
    return candidates


def _greedy(candidates: list[_Candidate], limit: int) -> list[_Candidate]:
    """Choose candidates, each the one that kills most; a mutant that is killed already counts less."""
    worth: defaultdict[str, float] = defaultdict(lambda: 1.0)
    chosen: list[_Candidate] = []
    while len(chosen) < min(limit, len(candidates)):
        left = [candidate for candidate in candidates if candidate not in chosen]
        best = max(left, key=lambda candidate: math.fsum(worth[sql] for sql in candidate.killed))
        chosen.append(best)
        for sql in best.killed:
            worth[sql] *= REPEATED
    return chosen
