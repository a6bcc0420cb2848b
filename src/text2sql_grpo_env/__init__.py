"""Plug-in of verifiers with the id `text2sql-grpo-env`.

verifiers has no entry points: it imports a top-level module by its id and opens every name in `__all__`. This
module of its own loads neither torch nor the rest of the API.
"""

from text2sql_grpo.integrations.verifiers import SQLEnv, SQLHarness, SQLTaskset

__all__ = ["SQLEnv", "SQLHarness", "SQLTaskset"]
