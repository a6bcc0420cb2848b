"""Training against MCP servers: a server's tools and `submit_sql` are the model's tools."""

import contextlib
import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pydantic_core
from mcp import MCPError
from mcp.types import CallToolResult, TextContent

from text2sql_grpo.config import MCPConfig
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.environment.observation import ObservationLimits
from text2sql_grpo.environment.protocols import TOOLS, Protocol
from text2sql_grpo.environment.session import EnvironmentSettings, SQLEnvironment
from text2sql_grpo.environment.tools import ToolResult
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.integrations.mcp.private_copy import Originals
from text2sql_grpo.integrations.mcp.server_pool import CallTimedOut, ConnectionPool, ServerDied
from text2sql_grpo.integrations.mcp.tool_map import MappedTool, mapped_tools
from text2sql_grpo.integrations.mcp.transport import Server
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.sql.schema import read_schema, relation_sql

_SUBMIT = TOOLS[-1]
_CREATE = "CREATE TABLE doctor_was_here (a INTEGER)"
_NOTE_CHARS = 200  # of a server's note below rows that it cut


class MCPEnvironment(SQLEnvironment):
    """Factory of sessions with MCP servers as tool backends. Golds and submissions run in this process.

    Each server process works on a private copy of the database; a change of the original stops the run.
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
        self._originals = Originals()
        if some_database:
            self._originals.check(databases.sqlite_file(some_database, "environment.mcp"))
        offered = self._pool.list_tools(self._server(some_database))
        self._tools = mapped_tools(offered, server.tools)
        _check_protocol(self._tools, settings.protocol)
        self.tools = [*(tool.schema for tool in self._tools), _SUBMIT]

    def backend(self, database: str) -> "MCPBackend":
        """Backend of the sessions on one database: its server."""
        original = self.databases.sqlite_file(database, "environment.mcp")
        self._originals.check(original)
        return MCPBackend(
            self.tools,
            {tool.name: tool for tool in self._tools},
            self._pool,
            self._server(database),
            self._config.timeout_s,
            self.settings.observation,
            lambda: self._originals.check(original),
        )

    def close(self) -> None:
        """Close the connections, and end the servers that were started for them.

        Raises:
            DataError: A database has changed since its first session.
        """
        self._pool.close()
        self._originals.check_all()

    def tools_that_write(self) -> list[str] | None:
        """Names of the tools that change a throw-away copy when all their texts are statements that write.

        None if the servers work on no private copy, so that nothing may be tried.
        """
        names = self.databases.names()
        if not names or "{database}" not in (self._config.command or ""):
            return None
        server = self._server(names[0])
        tables = read_schema(self.databases.sqlite_file(names[0], "environment.mcp")).tables
        statements = [_CREATE, *(f"DELETE FROM {relation_sql(table, 'sqlite')}" for table in tables[:1])]
        writing = []
        for tool in self._tools:
            if "string" not in {
                about.get("type") for about in tool.parameters.get("properties", {}).values()
            }:
                continue
            for statement in statements:
                arguments = tool.server_arguments(_filled(tool.parameters, statement))
                with contextlib.suppress(MCPError, ServerDied, CallTimedOut):
                    self._pool.call(server, tool.server_name, arguments)
            if tool.server_name in self._pool.writers:
                writing.append(tool.name)
        return writing

    def _server(self, database: str) -> Server:
        def named(text: str) -> str:
            return text.replace("{name}", database)

        config = self._config
        command = tuple(named(word) for word in shlex.split(config.command or ""))
        url = named(config.url or "")
        is_named = "{database}" in url or "{database}" in "".join(command)
        path = self.databases.sqlite_file(database, "environment.mcp") if is_named else None
        return Server(
            command=command,
            database=path if command else None,
            url=url.replace("{database}", str(path)),
            token=self._token,
            environment=((config.token_variable, self._token),) if config.token_variable else (),
        )


@dataclass(frozen=True)
class MCPBackend:
    """Tool backend of one MCP server.

    Attributes:
        tools: JSON schemas of the server's tools and of `submit_sql`.
        mapped: The server's tools by the names that the model calls.
        timeout_s: Time limit of a call, named in the error for the model.
        observation: Caps on what is shown of a result.
        check_original: Raises a DataError if the original database was changed.
    """

    tools: list[dict[str, Any]]
    mapped: dict[str, MappedTool]
    pool: ConnectionPool
    server: Server
    timeout_s: float
    observation: ObservationLimits
    check_original: Callable[[], None]

    def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        try:
            json.dumps(arguments, allow_nan=False)
            pydantic_core.to_json(arguments)
        except ValueError as error:
            return ToolResult(f"Error: the call cannot be sent: {error}"[: self.observation.max_chars])
        tool = self.mapped[name]
        try:
            text = _text(self.pool.call(self.server, tool.server_name, tool.server_arguments(arguments)))
        except ServerDied:
            return ToolResult(None)
        except CallTimedOut:
            return ToolResult(f"Error: stopped: no answer within {self.timeout_s:g} s")
        except MCPError as error:
            text = f"Error: {error.message}"
        finally:
            self.check_original()
        return ToolResult(_cut(text, self.observation))


def _token(variable: str | None) -> str:
    token = os.environ.get(variable, "") if variable else ""
    if variable and not token:
        raise ConfigError(f"no token in the environment variable {variable} (environment.mcp.token_variable)")
    return token


def _check_protocol(tools: list[MappedTool], protocol: Protocol) -> None:
    """Check that the model can call the tools."""
    by_name = {tool.name: tool for tool in tools}
    if "submit_sql" in by_name:
        raise ConfigError(
            "the MCP server has a tool submit_sql, a name that this package adds: give it another in"
            " environment.mcp.tools"
        )
    if protocol == "tags" and not ("run_sql" in by_name and _takes_a_query(by_name["run_sql"].parameters)):
        raise ConfigError(
            "the tags protocol needs a tool run_sql(sql) of the MCP server, got the tools "
            f"{', '.join(by_name)}: map one in environment.mcp.tools, such as [run_sql: read_query(query)], "
            "or set environment.protocol: native to offer them all"
        )


def _takes_a_query(schema: dict[str, Any]) -> bool:
    return "sql" in schema.get("properties", {}) and set(schema.get("required", [])) <= {"sql"}


def _filled(schema: dict[str, Any], text: str) -> dict[str, Any]:
    """Arguments with a text for each text, and a small value for what else is required."""
    values = {"string": text, "integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}
    return {
        name: values.get(about.get("type"), text)
        for name, about in schema["properties"].items()
        if about.get("type") == "string" or name in schema.get("required", [])
    }


def _text(result: CallToolResult) -> str:
    parts = [part.text if isinstance(part, TextContent) else f"<{part.type}>" for part in result.content]
    text = "\n".join(parts) or "(no output)"
    return f"Error: {text}" if result.is_error and not text.startswith("Error") else text


def _cut(text: str, limits: ObservationLimits) -> str:
    if len(text) <= limits.max_chars + _NOTE_CHARS:
        return text
    return f"{text[: limits.max_chars]}…\n({limits.max_chars} of {len(text)} characters shown)"
