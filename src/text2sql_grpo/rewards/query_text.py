"""Similarity of two queries' texts: names of the schema, and n-grams of words."""

import re
from functools import lru_cache

from sqlglot import exp

from text2sql_grpo.sql.query import read_query

_WORD = re.compile(r"'(?:[^']|'')*'|\w+|[^\w\s]")


def schema_similarity(gold_sql: str, predicted_sql: str, dialect: str = "sqlite") -> float:
    """Jaccard index of the tables and columns that two queries name, in [0, 1].

    0 if either query cannot be parsed or names nothing.
    """
    return _jaccard(schema_items(gold_sql, dialect), schema_items(predicted_sql, dialect))


def ngram_similarity(gold_sql: str, predicted_sql: str, *, n: int = 2) -> float:
    """Jaccard index of the n-grams of words of two queries, in [0, 1].

    Words, numbers, quoted values and punctuation marks count one each, comments too; case matters only
    inside quotes.

    >>> ngram_similarity("SELECT a FROM t", "select a from u")
    0.5
    """
    return _jaccard(_ngrams(gold_sql, n), _ngrams(predicted_sql, n))


def _jaccard(left: frozenset[tuple[str, ...]], right: frozenset[tuple[str, ...]]) -> float:
    return len(left & right) / max(len(left | right), 1)


def _ngrams(sql: str, n: int) -> frozenset[tuple[str, ...]]:
    words = [word if word.startswith("'") else word.lower() for word in _WORD.findall(sql.rstrip("; \n"))]
    return frozenset(tuple(words[i : i + n]) for i in range(max(len(words) - n + 1, 0)))


@lru_cache(maxsize=8192)
def schema_items(sql: str, dialect: str = "sqlite") -> frozenset[tuple[str, ...]]:
    """Pairs of `table` or `column` and its lower-cased name; empty if the text cannot be parsed.

    Columns go by their bare name. Names that the query makes itself (CTEs, aliases) are left out.

    >>> sorted(schema_items("SELECT count(*) AS n FROM Staff AS s WHERE s.Age > 3 ORDER BY n"))
    [('column', 'age'), ('table', 'staff')]
    """
    query = read_query(sql, dialect).tree
    if query is None:
        return frozenset()
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
    return frozenset(tables | columns)
