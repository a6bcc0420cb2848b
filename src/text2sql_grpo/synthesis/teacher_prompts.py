"""Prompts for a teacher model that words questions for golds, and readers of its replies."""

import re
from collections.abc import Sequence
from random import Random
from string import ascii_lowercase, ascii_uppercase, digits

from sqlglot import exp

from text2sql_grpo.sql.address import Database, parse_address
from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Cell
from text2sql_grpo.sql.query import read_query
from text2sql_grpo.sql.schema import Schema
from text2sql_grpo.sql.schema_text import relation_sql

STYLES = {
    "plain": "plain English, one sentence.",
    "short": "as few words as possible, as in a search box.",
    "colloquial": "colloquial, as one colleague asks another.",
    "formal": "formal, as in the request for a report.",
    "intent_first": "what the answer is needed for first, then the question, all in one sentence.",
}
MAX_ROWS = 3  # of a table
MAX_TABLES = 8
MAX_CELL = 60  # characters
MAX_QUESTION = 600  # characters
MAX_SQL = 10_000  # characters
MAX_TOKENS = 4_096  # of a reply, thinking included

REASONS = {
    "gold_failed": "the gold fails, or its result is too large to compare",
    "failed": "the endpoint failed or timed out: run again to ask again",
    "refused": "the endpoint refused the request",
    "cut": f"a reply was cut at {MAX_TOKENS} tokens",
    "empty": "the reply holds no question",
    "too_long": "the reply is too long for a question",
    "markup": "the reply holds markup, JSON or control characters",
    "sql": "the reply holds SQL",
    "several": "the reply holds several lines or questions",
    "duplicated": "another gold of the database got the same question",
    "no_sql": "the answer holds no query, or several",
    "query_failed": "the answer's query fails",
    "other_result": "the answer has another result than the gold",
    "test_database": "the answer has another result than the gold on a test database",
}

Messages = list[dict[str, str]]

_QUESTION_TASK = (
    "You get the schema of a {engine} database, some rows, and a query. Write the question that the query "
    "answers, as a person who does not know SQL asks it. Name all that the query filters, groups, orders, "
    "limits and returns, and write its values as the query does. Write one question in English and nothing "
    "else: no SQL, no markup, no quotes around it."
)
_ANSWER_TASK = (
    "Answer the question about a {engine} database with one SQL query. Write the query and nothing else."
)
_FENCED = re.compile(r"```[\w+-]*\s(.*?)```", re.DOTALL)
_MARKUP = re.compile(r"```|</?[a-zA-Z][^<>]*>|\*\*|^\s*[\[{]|^#+ ")
_UNREADABLE = re.compile("[\x00-\x08\x0e-\x1f\x7f\ud800-\udfff]")
_SQL = re.compile(r"\bSELECT\b.*\bFROM\b", re.DOTALL)
_ENDS = re.compile("[?\uff1f\u061f]+")  # Latin, Chinese, Arabic
_DATE = re.compile(r"\d{4}-\d\d-\d\d(?!\d)")


def question_prompt(engine: str, schema: str, rows: str, gold_sql: str, style: str) -> Messages:
    """Prompt that asks for a question in one of the `STYLES`."""
    parts = (schema, rows, f"Query:\n{gold_sql}", f"Style: {STYLES[style]}")
    return _chat(_QUESTION_TASK.format(engine=engine), "\n\n".join(filter(None, parts)))


def answer_prompt(engine: str, schema: str, question: str) -> Messages:
    """Prompt that asks for a query, without the gold."""
    return _chat(_ANSWER_TASK.format(engine=engine), f"{schema}\n\n{question}")


def _chat(task: str, text: str) -> Messages:
    return [{"role": "system", "content": task}, {"role": "user", "content": text}]


def read_question(text: str) -> tuple[str, str]:
    """Question of a reply, and the reason to refuse it; one of the two is empty.

    >>> read_question('"How many visits?"'), read_question("Who? Where?"), read_question("<b>Who?</b>")
    (('How many visits?', ''), ('', 'several'), ('', 'markup'))
    """
    text = text.strip()
    if len(text) > MAX_QUESTION:
        return "", "too_long"
    if _MARKUP.search(text) or _UNREADABLE.search(text):
        return "", "markup"
    if _SQL.search(text):
        return "", "sql"
    if len(text.splitlines()) > 1 or len(_ENDS.findall(text)) > 1:
        return "", "several"
    question = " ".join(text.removeprefix("Question:").strip().strip('"“”').split())
    return (question, "") if any(map(str.isalpha, question)) else ("", "empty")


def read_sql(text: str) -> str:
    """Query of a reply, also of one in a fence; empty if there is none, or several.

    >>> read_sql("Here it is:\\n```sql\\nSELECT 1;\\n```")
    'SELECT 1'
    """
    fenced = _FENCED.findall(text)
    sql = (fenced[0] if fenced else text).strip().rstrip(";").strip()
    return "" if len(fenced) > 1 or len(sql) > MAX_SQL or _UNREADABLE.search(sql) else sql


def rows_text(
    executor: SQLExecutor, database: Database, schema: Schema, gold_sql: str, *, is_masked: bool
) -> str:
    """First rows of the tables that a gold names.

    Args:
        is_masked: Replace each value, except the gold's literals, by made-up letters, digits or dates; equal
            values stay equal. Test databases need this: many of their cells are copied from the database.
    """
    tree = read_query(gold_sql, parse_address(database).dialect).tree
    literals = tree.find_all(exp.Literal) if isinstance(tree, exp.Expression) else ()
    kept, known, rng = {str(one.this).casefold() for one in literals}, dict[str, str](), Random(gold_sql)

    def shown(cell: Cell) -> str:
        text = f"{len(cell)} bytes" if isinstance(cell, bytes) else "NULL" if cell is None else str(cell)
        if is_masked and isinstance(cell, str | int | float) and text.casefold() not in kept:
            text = known.setdefault(text, _made_up(text, rng))
        return " ".join(text[:MAX_CELL].split())

    named = [one for one in schema.relations if one.name.casefold() in gold_sql.casefold()]
    blocks = []
    for relation in named[:MAX_TABLES]:
        name = relation_sql(relation, schema.dialect)
        outcome = executor.execute(database, f"SELECT * FROM {name} LIMIT {MAX_ROWS}")
        lines: Sequence[str] = [" | ".join(map(shown, row)) for row in outcome.rows]
        if lines:
            blocks.append("\n".join([f"Rows of {name}: {' | '.join(outcome.columns)}", *lines]))
    return "\n\n".join(blocks)


def _made_up(text: str, rng: Random) -> str:
    """Random text with letters and digits in the places of a text, or a date for a date."""

    def other(found: re.Match[str]) -> str:
        letter = found[0]
        return rng.choice(
            digits if letter.isdigit() else ascii_lowercase if letter.islower() else ascii_uppercase
        )

    if _DATE.match(text):
        day = f"20{rng.randint(10, 29)}-0{rng.randint(1, 9)}-1{rng.randint(0, 9)}"
        return day + re.sub(r"[^\W_]", "0", text[10:MAX_CELL])
    return re.sub(r"[^\W_]", other, text[:MAX_CELL])
