"""Names of tables and columns, quoted only if SQL needs it."""

import re
from functools import lru_cache

from text2sql_grpo.sql.address import Kind

# Keywords of SQLite 3.40 that need quotes as the name of a table or a column.
_SQLITE_KEYWORDS = """
add all alter and as autoincrement between case cast check collate commit constraint create current_date
current_time current_timestamp default deferrable delete distinct drop else escape except exists foreign from
group having if in index insert intersect into is isnull join limit not nothing notnull null on or order
primary raise references returning select set table then to transaction union unique update using values when
where
"""
# Every word that pg_get_keywords() (PostgreSQL 15) or duckdb_keywords() (DuckDB 2.0) does not list as
# unreserved, like PostgreSQL's quote_ident. A word too many costs two quotes.
_KEYWORDS = """
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
# PostgreSQL folds bare names to lower case, so capitals are quoted there.
_BARE: dict[str, re.Pattern[str]] = {
    dialect: re.compile(rf"(?!(?:{'|'.join(words.split())})\Z)[a-z_][a-z0-9_]*", flags)
    for dialect, words, flags in (
        ("sqlite", _SQLITE_KEYWORDS + r"sqlite_\w*", re.IGNORECASE | re.ASCII),
        ("duckdb", _KEYWORDS, re.IGNORECASE | re.ASCII),
        ("postgresql", _KEYWORDS, re.ASCII),
    )
}


def quote_name(name: str, dialect: Kind = "sqlite") -> str:
    """Put a name in double quotes if SQL needs them.

    >>> quote_name("ward"), quote_name("order"), quote_name("unit price")
    ('ward', '"order"', '"unit price"')
    >>> quote_name("Ward"), quote_name("Ward", "postgresql")
    ('Ward', '"Ward"')
    """
    return name if _BARE[dialect].fullmatch(name) else '"' + name.replace('"', '""') + '"'


def dotted_name(namespace: str, name: str, dialect: Kind) -> str:
    """Name of a table or view in a query, behind its namespace if that is not empty."""
    return ".".join(quote_name(part, dialect) for part in (namespace, name) if part or part is name)


@lru_cache(maxsize=1024)
def plain_name(name: str) -> str:
    """Letters and digits of a name without their case: `Gold SQL` and `gold_sql` are one.

    >>> plain_name('"Allergy_Type"')
    'allergytype'
    """
    return re.sub(r"[\W_]+", "", name.casefold())
