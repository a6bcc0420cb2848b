"""Suspicious traits of a submitted query, for an episode's record; none of them is a verdict."""

from collections.abc import Iterable

from sqlglot import exp

from text2sql_grpo.grading.strict import parse_query
from text2sql_grpo.sql.outcome import Row

_COMMON_NUMBERS = frozenset((0.0, 1.0))  # too frequent in queries to mean anything


def reads_no_table(sql: str, dialect: str = "sqlite") -> bool:
    """True if the query reads no table or view: a hard-coded answer.

    Table-valued functions and SQLite's own tables do not count; text that sqlglot cannot read does not
    read a table if the word FROM is not in it.

    >>> reads_no_table("SELECT 3"), reads_no_table("VALUES (1), (2)"), reads_no_table("SELECT a FROM t")
    (True, True, False)
    >>> reads_no_table("WITH t AS (SELECT 3 AS a) SELECT a FROM t")
    True
    """
    tree = parse_query(sql, dialect)
    if tree is None:
        return "from" not in sql.lower().split()
    own = {cte.alias.lower() for cte in tree.find_all(exp.CTE)}
    return not any(
        isinstance(table.this, exp.Identifier)
        and table.name.lower() not in own
        and not table.name.lower().startswith(("sqlite_", "pragma_", "json_", "generate_series"))
        for table in tree.find_all(exp.Table)
    )


def literals_copied_from_observations(
    sql: str, *, question: str, observed: Iterable[Row], dialect: str = "sqlite"
) -> tuple[str | float, ...]:
    """Literals of the query that are cells of observed rows and not words of the question.

    Flags sound look-ups of a value's spelling and hard-coded answers alike. 0, 1 and the numbers of LIMIT
    and OFFSET are never flagged.

    Args:
        sql: The submitted query.
        question: The question, with its evidence.
        observed: All rows that the model saw.
        dialect: Name of the SQL in sqlglot.

    >>> literals_copied_from_observations(
    ...     "SELECT name FROM t WHERE id = 17", question="Who is the eldest?", observed=[(17, "Ann")]
    ... )
    (17.0,)
    """
    tree = parse_query(sql, dialect)
    if tree is None:
        return ()
    cells = {float(c) if isinstance(c, int | float) else c for row in observed for c in row if c is not None}
    asked = question.casefold()
    copied: dict[str | float, None] = {}
    for node in tree.find_all(exp.Literal, exp.Identifier):
        if isinstance(node, exp.Identifier):  # "text in double quotes", which SQLite may take for a string
            is_text = (
                node.quoted and isinstance(node.parent, exp.Column) and not node.parent.args.get("table")
            )
        else:
            is_text = node.is_string
        if is_text and str(node.this).casefold() not in asked and node.this in cells:
            copied[str(node.this)] = None
        elif isinstance(node, exp.Literal) and not is_text and not node.find_ancestor(exp.Limit, exp.Offset):
            number = float(node.this)
            number = -number if isinstance(node.parent, exp.Neg) else number
            if number in cells and number not in _COMMON_NUMBERS and node.this not in asked.split():
                copied[number] = None
    return tuple(copied)
