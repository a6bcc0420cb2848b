"""Names of tables and columns, quoted only if SQL needs it."""

import re
import sqlite3
from contextlib import closing
from functools import lru_cache

from text2sql_grpo.sql.schema_types import Dialect

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_LOWER_NAME = re.compile(r"[a-z_][a-z0-9_]*", re.ASCII)

# Every word that pg_get_keywords() (PostgreSQL 15) or duckdb_keywords() (DuckDB 2.0) does not list as
# unreserved, like PostgreSQL's quote_ident. A word too many costs two quotes.
_KEYWORD_TEXT = """
all analyse analyze and anti any array as asc asof asymmetric at authorization between bigint binary
bit boolean both by case cast char character check coalesce collate collation column columns
concurrently constraint create cross current_catalog current_date current_role current_schema
current_time current_timestamp current_user dec decimal default deferrable desc describe distinct do
else end except exists extract false fetch float for foreign freeze from full generated glob grant
greatest group grouping grouping_id having ilike in initially inner inout int integer intersect
interval into is isnull join lambda lateral leading least left like limit localtime localtimestamp
map national natural nchar none normalize not notnull null nullif numeric offset on only or order
out outer overlaps overlay pivot pivot_longer pivot_wider placing position positional precision
primary qualify real references returning right row select semi session_user setof show similar
smallint some struct substring summarize symmetric table tablesample then time timestamp to trailing
treat trim true try_cast tuple union unique unpack unpivot user using values varchar variadic
verbose when where window with xmlattributes xmlconcat xmlelement xmlexists xmlforest xmlnamespaces
xmlparse xmlpi xmlroot xmlserialize xmltable
"""
_KEYWORDS = frozenset(_KEYWORD_TEXT.split())


@lru_cache(maxsize=10_000)
def quote_name(name: str, dialect: Dialect = "sqlite") -> str:
    """Put a name in double quotes if SQL needs them.

    PostgreSQL folds bare names to lower case, so capitals are quoted there.

    >>> quote_name("ward"), quote_name("order"), quote_name("unit price")
    ('ward', '"order"', '"unit price"')
    >>> quote_name("Ward"), quote_name("Ward", "postgresql")
    ('Ward', '"Ward"')
    """
    if dialect == "sqlite":
        is_bare = _PLAIN_NAME.fullmatch(name) is not None and _is_allowed_bare(name)
    else:
        plain = _LOWER_NAME if dialect == "postgresql" else _PLAIN_NAME
        is_bare = plain.fullmatch(name) is not None and name.lower() not in _KEYWORDS
    return name if is_bare else '"' + name.replace('"', '""') + '"'


def dotted_name(namespace: str, name: str, dialect: Dialect) -> str:
    """Name of a table or view in a query, behind its namespace if that is not empty."""
    return ".".join(quote_name(part, dialect) for part in (namespace, name) if part or part is name)


def _is_allowed_bare(name: str) -> bool:
    """Try the name in SQLite, whose list of reserved words depends on the place and the version."""
    try:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.execute(f"CREATE TABLE {name} ({name} TEXT, x_ TEXT)")
            connection.execute(f"INSERT INTO {name} ({name}) VALUES ('a')")
            query = (
                f"SELECT {name}, {name}.{name}, max({name}) FROM {name} WHERE {name} = 'a' GROUP BY {name}"
            )
            return connection.execute(query).fetchall() == [("a", "a", "a")]
    except sqlite3.Error:
        return False
