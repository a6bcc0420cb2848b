"""Backends of a session's tools: each runs the model's calls and returns texts for the model."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from text2sql_grpo.environment.observation import ObservationLimits, observation_text
from text2sql_grpo.environment.protocols import TOOLS
from text2sql_grpo.sql import ExecutionOutcome, Limits, SQLExecutor
from text2sql_grpo.sql.address import Database


@dataclass(frozen=True)
class ToolResult:
    """Result of one call.

    Attributes:
        text: Text for the model, errors included; None if the backend died with the call.
        outcome: Outcome of a query that the executor ran; None for calls that another server ran.
    """

    text: str | None
    outcome: ExecutionOutcome | None = None


class ToolBackend(Protocol):
    """Interface of a backend: runs every call of a session but the submission.

    Attributes:
        tools: JSON schemas of all tools, `submit_sql` too.
    """

    @property
    def tools(self) -> list[dict[str, Any]]: ...

    def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Run a call whose name and argument names fit `tools`.

        Raises:
            RunError: An internal failure, never the model's.
        """


@dataclass(frozen=True)
class ExecutorBackend:
    """Backend that runs `run_sql` on one database, in the executor's worker processes."""

    executor: SQLExecutor
    database: Database
    limits: Limits
    observation: ObservationLimits
    tools: ClassVar[list[dict[str, Any]]] = TOOLS

    def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        outcome = self.executor.execute(self.database, arguments["sql"], limits=self.limits)
        return ToolResult(observation_text(outcome, self.observation), outcome)
