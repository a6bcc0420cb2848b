"""Execution of one untrusted query on one database, and reading of schemas."""

from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import Cell, ExecutionOutcome, Limits, Row
from text2sql_grpo.sql.schema import Schema, SchemaText, read_schema, schema_text

__all__ = [
    "Cell",
    "ExecutionOutcome",
    "Limits",
    "Row",
    "SQLExecutor",
    "Schema",
    "SchemaText",
    "read_schema",
    "schema_text",
]
