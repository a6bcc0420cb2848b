"""Schema of a database, and its texts for the model.

One reader for SQLite, DuckDB and PostgreSQL. Nothing is written, and the cost is bounded: rows are counted
up to `MAX_COUNTED_ROWS`, examples come from a table's first rows, and no view is run.
"""

from pathlib import Path

from text2sql_grpo.sql.address import parse_address
from text2sql_grpo.sql.names import quote_name
from text2sql_grpo.sql.schema_budget import estimated_tokens
from text2sql_grpo.sql.schema_choice import TableChoice
from text2sql_grpo.sql.schema_text import (
    SchemaText,
    commented_ddl_text,
    compact_text,
    ddl_text,
    m_schema_text,
    relation_sql,
    schema_text,
    table_choice,
)
from text2sql_grpo.sql.schema_types import READ_TIMEOUT_S, Column, ForeignKey, Schema, Table, View

__all__ = [
    "Column",
    "ForeignKey",
    "Schema",
    "SchemaText",
    "Table",
    "TableChoice",
    "View",
    "commented_ddl_text",
    "compact_text",
    "ddl_text",
    "estimated_tokens",
    "m_schema_text",
    "quote_name",
    "read_schema",
    "relation_sql",
    "schema_text",
    "table_choice",
]


def read_schema(database: Path | str, *, timeout_s: float = READ_TIMEOUT_S) -> Schema:
    """Read the tables, views, columns, keys, comments, row counts and example values of a database.

    Args:
        database: A file, or a URL such as `duckdb:///sales.duckdb` or `postgresql://reader@host/sales`.
        timeout_s: Time limit of the whole schema.

    Raises:
        DataError: The database is missing, unreadable or corrupt, or it took too long.
    """
    address = parse_address(database)
    schema: Schema = address.engine.read_schema(address.location, timeout_s)
    return schema
