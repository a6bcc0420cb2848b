"""Train language models to answer questions over a SQL database, by reinforcement learning on TRL."""

from typing import Any

__version__ = "0.1.0"
# verifiers finds a package's taskset, harness and environment by these names.
__all__ = ["SQLEnv", "SQLHarness", "SQLTaskset"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from text2sql_grpo.contrib import verifiers

    return getattr(verifiers, name)
