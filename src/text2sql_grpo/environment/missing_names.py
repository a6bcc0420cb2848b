"""Advice on a query that names a table or column that is not there, or a keyword without its quotes."""

import re
from collections.abc import Collection
from difflib import get_close_matches
from itertools import chain

from text2sql_grpo.sql.engines import ENGINES
from text2sql_grpo.sql.names import plain_name, quote_name
from text2sql_grpo.sql.schema import Schema
from text2sql_grpo.sql.schema_text import relation_sql

MIN_LIKENESS = 0.5  # of two names, from 0 to 1 (difflib)
MAX_ADVISED = 2  # names
MAX_LISTED = 12  # columns of a table
MAX_READ_CHARS = 500  # of an error, which may repeat what a model wrote
MAX_COMPARED_CHARS = 64  # of a missing name
MAX_COMPARED = 2_000  # names
_NEAR = re.compile(r'near "(\w+)"')
_REFUSED_TABLE = re.compile("no table (.+) in the schema")  # where something is hidden


def missing_name_advice(schema: Schema, sql: str, error: str) -> str:
    """Correction of a query that fails for a missing name, or for a keyword without its quotes.

    Names are as a query needs them. It is empty for other errors, or if nothing is like the name.

    Args:
        schema: Schema without hidden tables and columns.
        sql: Failed query.
        error: The engine's message, or that of `hidden.Hidden.refusal`.
    """
    engine, error = ENGINES[schema.dialect], error[:MAX_READ_CHARS]
    if found := re.search(engine.missing_table, error) or _REFUSED_TABLE.fullmatch(error):
        tables = {plain_name(one.name): relation_sql(one, schema.dialect) for one in schema.relations}
        alike = _alike(_last_part(found), tables)
        return "read " + " or ".join(tables[name] for name in alike) if alike else ""
    columns_of = {
        relation_sql(one, schema.dialect): [quote_name(column.name, schema.dialect) for column in one.columns]
        for one in schema.relations
    }
    if found := _NEAR.search(error):
        if not re.search(rf'(?<!")\b{found[1]}\b(?!"|\s+by\b)', sql, re.IGNORECASE):
            return ""
        names = [*columns_of, *chain.from_iterable(columns_of.values())]
        quoted = [name for name in names if name.casefold().endswith(f'"{found[1].casefold()}"')]
        return f"write {quoted[0]} with its quotes" if quoted else ""
    if not (found := re.search(engine.missing_column, error)):
        return ""
    name, words = _last_part(found), _words(sql)
    named = {table: columns for table, columns in columns_of.items() if _words(table) <= words}
    same = [
        (table, column)
        for table, columns in columns_of.items()
        for column in columns
        if plain_name(column) == name
    ]
    if same and not any(table in named for table, _ in same):
        return "join " + " or ".join(f"{table}, which has {column}" for table, column in same[:MAX_ADVISED])
    places = {plain_name(column): (table, column) for table, columns in named.items() for column in columns}
    taken = [place for place in same if place[0] in named] or [places[one] for one in _alike(name, places)]
    if taken:
        return "take " + " or ".join(f"{column} from {table}" for table, column in taken[:MAX_ADVISED])
    lists = [f"{table} has {', '.join(columns[:MAX_LISTED])}" for table, columns in named.items()]
    return "take other columns: " + "; ".join(lists[:MAX_ADVISED]) if lists else ""


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))


def _last_part(found: re.Match[str]) -> str:
    """A missing name without its table or schema, see `plain_name`."""
    return plain_name(next(filter(None, found.groups())).rpartition(".")[2])


def _alike(name: str, names: Collection[str]) -> list[str]:
    if len(name) > MAX_COMPARED_CHARS or len(names) > MAX_COMPARED:
        return []
    return get_close_matches(name, names, MAX_ADVISED, MIN_LIKENESS)
