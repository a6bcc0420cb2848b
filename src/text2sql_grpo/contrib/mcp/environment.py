"""Training against MCP servers: a server's tools and `submit_sql` are the model's tools."""

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic_core
from mcp import MCPError
from mcp.types import CallToolResult, TextContent, Tool

from text2sql_grpo.config import MCPConfig
from text2sql_grpo.contrib.mcp.pool import CallTimedOut, ConnectionPool, ServerDied
from text2sql_grpo.contrib.mcp.transport import Server
from text2sql_grpo.contrib.tool_calls import tool_schema
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.environment.observation import ObservationLimits
from text2sql_grpo.environment.protocols import TOOLS, Protocol
from text2sql_grpo.environment.session import EnvironmentSettings, SQLEnvironment
from text2sql_grpo.environment.tools import ToolResult
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.sql import SQLExecutor

_SUBMIT = TOOLS[-1]
_NOTE_CHARS = 200  # of a server's note below rows that it cut


class MCPEnvironment(SQLEnvironment):
    """Factory of sessions with MCP servers as tool backends. Golds and submissions run in this process.

    Sessions share connections, so a tool must not rely on state of an earlier call.

    Args:
        server: The server; connected to at once, to list its tools.

    Raises:
        ConfigError: The server has no tool that the protocol can call.
        RunError: The server cannot be reached.
    """

    def __init__(
        self, databases: Databases, executor: SQLExecutor, settings: EnvironmentSettings, *, server: MCPConfig
    ) -> None:
        super().__init__(databases, executor, settings)
        self._config = server
        self._token = _token(server.token_variable)
        self._pool = ConnectionPool(connections=server.connections, timeout_s=server.timeout_s)
        some_database = next(iter(databases.names()), "")
        offered = self._pool.list_tools(self._server(some_database))
        self.tools = [*_schemas(offered, settings.protocol), _SUBMIT]

    def backend(self, database: str) -> "MCPBackend":
        """Backend of the sessions on one database: its server."""
        server = self._server(database)
        return MCPBackend(self.tools, self._pool, server, self._config.timeout_s, self.settings.observation)

    def close(self) -> None:
        """Close the connections, and end the servers that were started for them."""
        self._pool.close()

    def _server(self, database: str) -> Server:
        def filled(text: str) -> str:
            path: Path | str = self.databases.path(database) if "{database}" in text else ""
            return text.replace("{database}", str(path)).replace("{name}", database)

        config = self._config
        return Server(
            command=tuple(filled(word) for word in shlex.split(config.command or "")),
            url=filled(config.url or ""),
            token=self._token,
            environment=((config.token_variable, self._token),) if config.token_variable else (),
        )


@dataclass(frozen=True)
class MCPBackend:
    """Tool backend of one MCP server.

    Attributes:
        tools: JSON schemas of the server's tools and of `submit_sql`.
        timeout_s: Time limit of a call, named in the error for the model.
        observation: Caps on what is shown of a result.
    """

    tools: list[dict[str, Any]]
    pool: ConnectionPool
    server: Server
    timeout_s: float
    observation: ObservationLimits

    def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        try:
            json.dumps(arguments, allow_nan=False)
            pydantic_core.to_json(arguments)
        except ValueError as error:
            return ToolResult(f"Error: the call cannot be sent: {error}"[: self.observation.max_chars])
        try:
            text = _text(self.pool.call(self.server, name, arguments))
        except ServerDied:
            return ToolResult(None)
        except CallTimedOut:
            return ToolResult(f"Error: stopped: no answer within {self.timeout_s:g} s")
        except MCPError as error:
            text = f"Error: {error.message}"
        return ToolResult(_cut(text, self.observation))


def _token(variable: str | None) -> str:
    token = os.environ.get(variable, "") if variable else ""
    if variable and not token:
        raise ConfigError(f"no token in the environment variable {variable} (environment.mcp.token_variable)")
    return token


def _schemas(offered: list[Tool], protocol: Protocol) -> list[dict[str, Any]]:
    """JSON schemas of the tools for chat templates."""
    by_name = {tool.name: tool for tool in offered}
    names = ", ".join(by_name) or "none"
    if "submit_sql" in by_name:
        raise ConfigError("the MCP server has a tool submit_sql, a name that this package adds: rename it")
    if protocol == "tags" and not ("run_sql" in by_name and _takes_a_query(by_name["run_sql"])):
        raise ConfigError(
            "the tags protocol needs a tool run_sql(sql) of the MCP server, got the tools "
            f"{names}: set environment.protocol: native to offer them all"
        )
    if not by_name:
        raise ConfigError("the MCP server has no tools")
    return [tool_schema(tool.name, tool.description, tool.input_schema) for tool in offered]


def _takes_a_query(tool: Tool) -> bool:
    schema = tool.input_schema
    return "sql" in schema.get("properties", {}) and set(schema.get("required", [])) <= {"sql"}


def _text(result: CallToolResult) -> str:
    parts = [part.text if isinstance(part, TextContent) else f"<{part.type}>" for part in result.content]
    text = "\n".join(parts) or "(no output)"
    return f"Error: {text}" if result.is_error and not text.startswith("Error") else text


def _cut(text: str, limits: ObservationLimits) -> str:
    if len(text) <= limits.max_chars + _NOTE_CHARS:
        return text
    return f"{text[: limits.max_chars]}…\n({limits.max_chars} of {len(text)} characters shown)"
