"""Similarity of two queries, in [0, 1]: of their results by QATCH's measures, and of their texts.

QATCH's measures are 0 if either query failed or nothing was submitted, and use cut rows as they are.
"""

import re
from itertools import chain, pairwise

from sqlglot import exp

from text2sql_grpo.sql.outcome import ExecutionOutcome
from text2sql_grpo.sql.query import read_query

_WORD = re.compile(r"'(?:[^']|'')*'|\w+|[^\w\s]")


def cell_precision(gold: ExecutionOutcome, predicted: ExecutionOutcome | None) -> float:
    """Share of predicted cells that are found anywhere in the gold's result."""
    return _share_found(predicted, gold)


def cell_recall(gold: ExecutionOutcome, predicted: ExecutionOutcome | None) -> float:
    """Share of the gold's cells that are found anywhere in the predicted result."""
    return _share_found(gold, predicted)


def tuple_cardinality(gold: ExecutionOutcome, predicted: ExecutionOutcome | None) -> float:
    """Smaller number of rows over the larger one."""
    if predicted is None or not (gold.is_ok and predicted.is_ok):
        return 0.0
    fewer, more = sorted((len(gold.rows), len(predicted.rows)))
    return fewer / more if more else 1.0


def _share_found(cells_of: ExecutionOutcome | None, within: ExecutionOutcome | None) -> float:
    """Share of cells found in the other result; 1 for two empty results, 0 for one."""
    if not (cells_of and cells_of.is_ok and within and within.is_ok):
        return 0.0
    cells = list(chain.from_iterable(cells_of.rows))
    known = set(chain.from_iterable(within.rows))
    if not cells or not known:
        return float(not cells and not known)
    return sum(cell in known for cell in cells) / len(cells)


def schema_similarity(gold_sql: str, predicted_sql: str, dialect: str = "sqlite") -> float:
    """Jaccard index of the tables and columns that two queries name.

    0 if either query cannot be parsed or names nothing.
    """
    return _jaccard(schema_items(gold_sql, dialect), schema_items(predicted_sql, dialect))


def ngram_similarity(gold_sql: str, predicted_sql: str) -> float:
    """Jaccard index of the pairs of adjacent words of two queries.

    Words, numbers, quoted values and punctuation marks count one each, comments too; case matters only
    inside quotes.

    >>> ngram_similarity("SELECT a FROM t", "select a from u")
    0.5
    """
    return _jaccard(_pairs(gold_sql), _pairs(predicted_sql))


def _pairs(sql: str) -> set[tuple[str, str]]:
    words = [word if word.startswith("'") else word.lower() for word in _WORD.findall(sql.rstrip("; \n"))]
    return set(pairwise(words))


def _jaccard(left: set[tuple[str, str]], right: set[tuple[str, str]]) -> float:
    return len(left & right) / max(len(left | right), 1)


def schema_items(sql: str, dialect: str = "sqlite") -> set[tuple[str, str]]:
    """Pairs of `table` or `column` and its lower-cased name; empty if the text cannot be parsed.

    Columns go by their bare name. Names that the query makes itself (CTEs, aliases) are left out.

    >>> sorted(schema_items("SELECT count(*) AS n FROM Staff AS s WHERE s.Age > 3 ORDER BY n"))
    [('column', 'age'), ('table', 'staff')]
    """
    query = read_query(sql, dialect).tree
    if query is None:
        return set()
    ctes = {cte.alias.lower() for cte in query.find_all(exp.CTE)}
    aliases = {
        alias.alias.lower()
        for alias in query.find_all(exp.Alias)
        if alias.alias.lower() not in {column.name.lower() for column in alias.find_all(exp.Column)}
    }
    tables = {
        ("table", table.name.lower()) for table in query.find_all(exp.Table) if table.name.lower() not in ctes
    }
    columns = {
        ("column", column.name.lower())
        for column in query.find_all(exp.Column)
        if column.name.lower() not in aliases and not isinstance(column.this, exp.Star)
    }
    return tables | columns
