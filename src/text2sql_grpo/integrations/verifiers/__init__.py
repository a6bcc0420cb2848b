"""The environment as a plug-in of `verifiers.v1`, and training on any verifiers taskset."""

from text2sql_grpo.errors import needs_extra

with needs_extra("verifiers", "this environment in verifiers"):
    from text2sql_grpo.integrations.verifiers.harness import SQLHarness
    from text2sql_grpo.integrations.verifiers.taskset import SQLEnv, SQLTask, SQLTaskset

__all__ = ["SQLEnv", "SQLHarness", "SQLTask", "SQLTaskset"]
