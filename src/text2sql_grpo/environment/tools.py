"""Backends of a session's tools: each runs the model's calls and returns texts for the model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from text2sql_grpo.environment.missing_names import missing_name_advice
from text2sql_grpo.environment.observation import ObservationLimits, observation_text
from text2sql_grpo.environment.protocols import TOOLS
from text2sql_grpo.sql import ExecutionOutcome, Limits, SQLExecutor
from text2sql_grpo.sql.address import Database

if TYPE_CHECKING:
    from text2sql_grpo.sql.hidden import Hidden


@dataclass(frozen=True)
class ToolResult:
    """Result of one call.

    Attributes:
        text: Text for the model, errors included; None if the backend died with the call.
        outcome: Outcome of a query that the executor ran; None for calls that another server ran.
        advice: How to correct a query that failed; empty if that is not known.
    """

    text: str | None
    outcome: ExecutionOutcome | None = None
    advice: str = ""


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
class FunctionBackend:
    """Backend that passes each call to a function."""

    tools: list[dict[str, Any]]
    call: Callable[[str, dict[str, Any]], ToolResult]


@dataclass(frozen=True)
class ExecutorBackend:
    """Backend that runs `run_sql` on one database, in the executor's worker processes.

    Attributes:
        hidden: Tables and columns that no query may read.
    """

    executor: SQLExecutor
    database: Database
    limits: Limits
    observation: ObservationLimits
    hidden: "Hidden"
    tools: ClassVar[list[dict[str, Any]]] = TOOLS

    def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        outcome, advice = self.run(arguments["sql"]), ""
        if outcome.error:
            advice = missing_name_advice(self.hidden.schema, arguments["sql"], outcome.error)
        return ToolResult(observation_text(outcome, self.observation), outcome, advice)

    def run(self, sql: str) -> ExecutionOutcome:
        """Run a query, unless it reads something hidden."""
        if refusal := self.hidden.refusal(sql):
            return ExecutionOutcome("denied", error=refusal)
        return self.hidden.shown(sql, self.executor.execute(self.database, sql, limits=self.limits))
