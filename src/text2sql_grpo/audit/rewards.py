"""Audit of a reward: wrong answers it pays, right ones it refuses, and official execution accuracy."""

import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import Literal

from sqlglot import exp
from sqlglot.optimizer.simplify import Simplifier

from text2sql_grpo.audit.mutations import mutants
from text2sql_grpo.audit.probes import RIGHT, SCRIPT, WRONG
from text2sql_grpo.data.databases import Databases, cache_folder
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Action, Episode
from text2sql_grpo.grading import Grader
from text2sql_grpo.grading.base_sample import DatabaseSample, read_sample, with_links
from text2sql_grpo.grading.gold_query import GoldQuery, read_gold
from text2sql_grpo.grading.materialise import run_gold
from text2sql_grpo.grading.mirror import Translator
from text2sql_grpo.grading.perturb import draw_rows
from text2sql_grpo.grading.search import drawn_databases
from text2sql_grpo.grading.strict import has_top_level_order
from text2sql_grpo.rewards import Judge, RewardMix
from text2sql_grpo.sql.address import Database, parse_address
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import ExecutionOutcome, Row
from text2sql_grpo.sql.query import read_query, without_comments

Kind = Literal["probe", "mutant", "hard-coded", "rewrite"]

PAID_SHARE = 0.9  # of the gold's reward, from which on a wrong answer counts as accepted
REFUSED_SHARE = 0.5  # of the gold's reward, below which a right answer counts as refused
MUTANTS_PER_GOLD = 12
VARIANTS = 12  # random databases; a query that differs from the gold on one of them is wrong
FAILING = "SELECT no_such_column FROM no_such_table"
MAX_ROWS_WRITTEN = 50  # of a gold's result, in a hard-coded answer
_TURNED = Simplifier.INVERSE_COMPARISONS | {exp.EQ: exp.EQ}


@dataclass(frozen=True)
class Answer:
    """One answer that is known to be right or wrong, and its reward.

    Attributes:
        name: Name of the probe, mutation or rewrite.
        share: Share of the gold's reward, measured from a failing query's reward: 1 is paid in full.
            None if the sample is masked.
        is_official: True if right by BIRD's execution accuracy, by safe execution: writes are refused.
    """

    kind: Kind
    name: str
    database: str
    gold_sql: str
    sql: str
    is_right: bool
    share: float | None = None
    is_official: bool = False

    @property
    def is_accepted(self) -> bool:
        """Paid (nearly) as much as the gold; for a right answer: not refused."""
        return self.share is not None and self.share >= (REFUSED_SHARE if self.is_right else PAID_SHARE)

    @property
    def is_misjudged(self) -> bool:
        """Paid though wrong, or refused though right."""
        return self.is_accepted != self.is_right


class RewardAudit:
    """Audit of one reward by answers that are known to be right or wrong, graded as in training.

    Attributes:
        left_out: Number of golds that fail, cannot be parsed, or return something else in SQLite.
    """

    def __init__(self, rewards: RewardMix, grader: Grader, executor: SQLExecutor) -> None:
        self.left_out = 0
        self._judge = Judge(grader, executor, rewards)
        mirrors = cache_folder("test_suites") / "mirrors"
        self._translator = cache(lambda database: Translator(executor, database, mirrors))

    def probes(self) -> list[Answer]:
        """Judge the probes, on their own database."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "probes.sqlite"
            with closing(sqlite3.connect(path)) as connection:
                connection.executescript(SCRIPT)
            answers = (
                Answer("probe", name, "probes", gold, sql, is_right)
                for is_right, probes in ((False, WRONG), (True, RIGHT))
                for name, gold, sql in probes
            )
            return [self._judged(answer, path) for answer in answers]

    def mutations(
        self,
        examples: Sequence[Example],
        databases: Databases,
        *,
        seed: int = 0,
        on_gold: Callable[[], None] = lambda: None,
    ) -> list[Answer]:
        """Judge mutants of golds, golds' hard-coded answers, and rewrites.

        A mutant or a hard-coded answer is used if it runs and is proved wrong: its result differs on
        the database itself, or on one of a few random variants of it on which the gold has one result.
        Those databases are drawn like the grader's test databases, with another seed. For other engines than
        SQLite they are drawn on a mirror, on which the queries have the results of the database.

        Args:
            examples: Questions with the golds; those that fail, or cannot be parsed, are skipped.
        """
        answers: list[Answer] = []
        for example in examples:
            found = list(self._of_gold(example, databases.address(example.database), seed))
            self.left_out += not found
            answers += found
            on_gold()
        return answers

    def _of_gold(self, example: Example, database: Database, seed: int) -> Iterator[Answer]:
        gold_sql, executor = example.gold_sql, self._judge.executor
        translator = self._translator(database)
        path, query = translator.path, translator.in_sqlite(gold_sql)
        result = self._judge.grader.gold_result(database, gold_sql)
        base = read_sample(path)
        gold = read_gold(query, base.schema, base.views) if query else None
        if not query or not result.is_usable or gold is None:
            return
        rng = Random(f"{seed} {path.name} {gold_sql}")
        engine = parse_address(database).engine
        base = replace(with_links(base, path, gold.links), is_like_exact=engine.is_like_exact)

        def rows(sql: str) -> tuple[Row, ...] | None:
            outcome = executor.execute(path, sql)
            return outcome.rows if outcome.is_ok else None

        changed = list(mutants(gold, base.schema, rows).items())
        rng.shuffle(changed)
        suspects: list[tuple[Kind, str, str]] = [
            *(("mutant", name, sql) for sql, name in islice(changed, MUTANTS_PER_GOLD)),
            *(("hard-coded", name, sql) for name, sql in hard_coded(result.outcome)),
        ]
        running = [
            (suspect, native, outcome)
            for suspect in suspects
            if (native := translator.native(suspect[2]))
            and (outcome := executor.execute(database, native)).is_ok
            and not outcome.is_truncated
        ]
        wrong = {sql for (_, _, sql), native, found in running if result.difference(found, native) != "equal"}
        alike = [sql for (_, _, sql), _, _ in running if sql not in wrong]
        wrong |= _differing(base, gold, query, alike, rng)
        for (kind, name, sql), native, _ in running:
            if sql in wrong:
                answer = Answer(kind, name, example.database, gold_sql, native, is_right=False)
                yield self._judged(answer, database)
        for name, sql in rewrites(gold_sql, engine.dialect):
            answer = Answer("rewrite", name, example.database, gold_sql, sql, is_right=True)
            yield self._judged(answer, database)

    def _judged(self, answer: Answer, database: Database) -> Answer:
        """The answer with its share of the gold's reward, and its official verdict."""
        full, _ = self._earned(database, answer.gold_sql, answer.gold_sql)
        nothing, _ = self._earned(database, answer.gold_sql, FAILING)
        earned, is_official = self._earned(database, answer.gold_sql, answer.sql)
        share = None
        if earned is not None and full is not None and nothing is not None:
            share = (earned - nothing) / (full - nothing) if full > nothing else 1.0
        return replace(answer, share=share, is_official=is_official)

    def _earned(self, database: Database, gold_sql: str, sql: str) -> tuple[float | None, bool]:
        """Reward of an episode that submits this query at once, and its official verdict."""
        episode = Episode(
            Example(id="audit", database="audited", question="", gold_sql=gold_sql),
            messages=[{"role": "assistant", "content": f"<answer>{sql}</answer>"}],
            actions=[Action("submit_sql", sql)],
            final_sql=sql,
            stop_reason="submitted",
        )
        answer = self._judge.judge(episode, database)
        is_masked = answer.verdict.reason == "gold_failed"
        return None if is_masked else answer.reward, answer.verdict.official


def _differing(
    base: DatabaseSample, gold: GoldQuery, gold_sql: str, queries: Sequence[str], rng: Random
) -> set[str]:
    """Queries that differ from the gold on a random variant."""
    wrong: set[str] = set()
    contents = (draw_rows(base, gold, rng) for _ in range(VARIANTS))
    for drawn in drawn_databases(base, contents, gold, gold_sql):
        with closing(drawn.connection) as connection:
            for sql in (sql for sql in queries if sql not in wrong):
                outcome = run_gold(connection, sql)
                if outcome.is_ok and not drawn.gold.accepts(outcome):
                    wrong.add(sql)
        if len(wrong) == len(queries):
            break
    return wrong


@dataclass(frozen=True)
class Rate:
    """Numbers of answers that the reward and the official metric misjudge."""

    answers: int
    reward: int
    official: int

    def record(self) -> dict[str, float | int]:
        """Counts and shares."""
        total = max(self.answers, 1)
        shares = {"reward_share": self.reward / total, "official_share": self.official / total}
        return asdict(self) | {name: round(share, 4) for name, share in shares.items()}


def misjudged(answers: Sequence[Answer]) -> Rate:
    """Count wrong answers that are accepted and right ones that are refused."""
    n_official = sum(answer.is_official != answer.is_right for answer in answers)
    return Rate(len(answers), sum(answer.is_misjudged for answer in answers), n_official)


def hard_coded(answer: ExecutionOutcome) -> Iterator[tuple[str, str]]:
    """Name and SQL of queries that return the gold's rows without reading the database.

    >>> [sql for _, sql in hard_coded(ExecutionOutcome("ok", ("a", "b"), ((3, "x"), (4, None))))]
    ["VALUES (3, 'x'), (4, NULL)", "SELECT 3, 'x' UNION ALL SELECT 4, NULL"]
    >>> [sql for _, sql in hard_coded(ExecutionOutcome("ok", ("a", "b")))]
    ['SELECT 1, 1 WHERE 1 = 0']
    """
    if len(answer.rows) > MAX_ROWS_WRITTEN:
        return
    if not answer.rows:
        yield "no rows", f"SELECT {', '.join(['1'] * len(answer.columns))} WHERE 1 = 0"
        return
    rows = [", ".join(exp.convert(cell).sql("sqlite") for cell in row) for row in answer.rows]
    yield "VALUES", "VALUES " + ", ".join(f"({row})" for row in rows)
    yield "UNION", " UNION ALL ".join(f"SELECT {row}" for row in rows)


def rewrites(gold_sql: str, dialect: str = "sqlite") -> Iterator[tuple[str, str]]:
    """Name and SQL of queries equivalent to the gold.

    >>> dict(rewrites("SELECT a FROM t WHERE b = 3"))["sides swapped"]
    'SELECT a FROM t WHERE 3 = b'
    """
    plain = without_comments(gold_sql, dialect).rstrip("; \n")
    yield "comments", f"/* the answer */ {plain} -- done"
    tree = read_query(gold_sql, dialect).tree
    if not isinstance(tree, exp.Query):
        return
    yield "formatted", tree.sql(dialect, pretty=True, normalize_functions="lower")
    if not has_top_level_order(gold_sql, dialect):
        yield "CTE", f"WITH answer AS ({plain}) SELECT * FROM answer"
        yield "subquery", f"SELECT * FROM ({plain}) AS answer"
    compared = [
        node for node in tree.find_all(*_TURNED) if isinstance(node.expression, exp.Literal | exp.Subquery)
    ]
    for node in compared:
        turned = _TURNED[type(node)]
        node.replace(turned(this=node.expression.copy(), expression=node.this.copy()))
    if compared:
        yield "sides swapped", tree.sql(dialect)
