"""Execution of one untrusted query on one database, and reading of schemas."""

from text2sql_grpo.sql.executor import SQLExecutor
from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits

__all__ = ["ExecutionOutcome", "Limits", "SQLExecutor"]
