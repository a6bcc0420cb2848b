"""Queries made from a gold: hard-coded answers, and equivalent rewrites."""

from collections.abc import Iterator

from sqlglot import exp
from sqlglot.optimizer.simplify import Simplifier

from text2sql_grpo.grading.strict import has_top_level_order
from text2sql_grpo.sql.outcome import ExecutionOutcome
from text2sql_grpo.sql.query import read_query

MAX_ROWS_WRITTEN = 50
_MIRRORED = Simplifier.INVERSE_COMPARISONS | {exp.EQ: exp.EQ}


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
    plain = gold_sql.rstrip().rstrip(";")
    yield "comments", f"/* the answer */ {plain} -- done"
    tree = read_query(gold_sql, dialect).tree
    if not isinstance(tree, exp.Query):
        return
    yield "formatted", tree.sql(dialect, pretty=True, normalize_functions="lower")
    if not has_top_level_order(gold_sql, dialect):
        yield "CTE", f"WITH answer AS ({plain}) SELECT * FROM answer"
        yield "subquery", f"SELECT * FROM ({plain}) AS answer"
    compared = [
        node for node in tree.find_all(*_MIRRORED) if isinstance(node.expression, exp.Literal | exp.Subquery)
    ]
    for node in compared:
        mirrored = _MIRRORED[type(node)]
        node.replace(mirrored(this=node.expression.copy(), expression=node.this.copy()))
    if compared:
        yield "sides swapped", tree.sql(dialect)
