"""Failures that stop a run. A failure of the model's query is an `ExecutionOutcome`, never an exception."""

from __future__ import annotations

from contextlib import contextmanager

TYPE_CHECKING = False  # see `sql.sqlite`
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


UNREADABLE = "the database cannot be read; the server's own log has the reason"
"""Text for clients of a server in the place of a `DataError`, which may name a path, a host and a user."""


class RunError(Exception):
    """Failure of this package or its user: a missing file, a broken gold, a wrong config."""


class ConfigError(RunError):
    """A config file or option is wrong, or asks for a package that is not installed."""


class ArgumentError(ConfigError, ValueError):
    """An argument that Python hands in has a wrong value."""


def check_type(name: str, value: object, kind: Any) -> None:
    """Refuse an argument that is of another type.

    Raises:
        ArgumentError: It is; names both types.
    """
    if not isinstance(value, kind):
        shown = getattr(kind, "__name__", str(kind))
        raise ArgumentError(f"{name} must be of type {shown}, got {type(value).__name__}")


class DataError(RunError):
    """A question file, database or gold query is wrong."""


class RewardError(RunError):
    """A reward function raised, or did not return a number in its range."""


class OutOfMemoryError(RunError):
    """Training does not fit into memory."""


class ServerGoneError(DataError):
    """A database server does not answer now; it may again."""


class ModelError(RunError):
    """A model folder, tokenizer, chat template or adapter is wrong."""


class HubError(RunError):
    """The Hugging Face Hub refused a request, or could not be reached."""


def install_command(*extras: str) -> str:
    """Command that installs extras of this package.

    >>> install_command("duckdb", "mcp")
    "pip install 'text2sql-grpo[duckdb,mcp]'"
    """
    return f"pip install 'text2sql-grpo[{','.join(extras)}]'"


@contextmanager
def needs_extra(extra: str, purpose: str) -> Iterator[None]:
    """Turn a failed import of an optional package into the command that installs it.

    Args:
        extra: Name in pyproject.toml's optional dependencies.
        purpose: User of the package, the first words of the message.

    Raises:
        ConfigError: An import in the block failed.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or extra).partition(".")[0]
        raise ConfigError(
            f"{purpose} needs the package {package} ({error}): {install_command(extra)}"
        ) from error
