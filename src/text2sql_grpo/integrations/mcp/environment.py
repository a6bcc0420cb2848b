"""Training against MCP servers: a server's tools and `submit_sql` are the model's tools."""

import json
import os
import shlex
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pydantic_core
from mcp import MCPError
from mcp.types import CallToolResult, TextContent

from text2sql_grpo.config import MCPConfig
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.environment.protocols import TOOLS, Protocol
from text2sql_grpo.environment.session import EnvironmentSettings, SQLEnvironment
from text2sql_grpo.environment.tools import FunctionBackend, ToolResult
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.integrations.mcp.private_copy import Originals
from text2sql_grpo.integrations.mcp.server_pool import CallTimedOut, ConnectionPool, Server, ServerDied
from text2sql_grpo.integrations.mcp.tool_map import MappedTool, mapped_tools, takes_a_query
from text2sql_grpo.sql import SQLExecutor

_SUBMIT = TOOLS[-1]
_NOTE_CHARS = 200  # of a server's note below rows that it cut


class MCPEnvironment(SQLEnvironment):
    """Factory of sessions with MCP servers as tool backends. Golds and submissions run in this process.

    Each server process works on a private copy of the database; a change of the original stops the run.
    Sessions share connections, so a tool must not rely on state of an earlier call.

    Args:
        server: The server; connected to at once, to list its tools.
        options: See `SQLEnvironment`.

    Raises:
        ConfigError: The server has no tool that the protocol can call; of a session, its database holds
            something hidden.
        RunError: The server cannot be reached.
    """

    def __init__(
        self,
        databases: Databases,
        executor: SQLExecutor,
        settings: EnvironmentSettings,
        *,
        server: MCPConfig,
        **options: Any,
    ) -> None:
        super().__init__(databases, executor, settings, **options)
        self._config = server
        self._token = _token(server.token_variable)
        self._pool = ConnectionPool(connections=server.connections, timeout_s=server.timeout_s)
        self._originals = Originals()
        with ExitStack() as on_failure:
            on_failure.callback(self._pool.close)
            some_database = next(iter(databases.names()), "")
            if some_database:
                self._originals.check(databases.sqlite_file(some_database, "environment.mcp"))
            offered = self._pool.list_tools(self._server(some_database))
            self._by_name = {tool.name: tool for tool in mapped_tools(offered, server.tools)}
            _check_protocol(self._by_name, settings.protocol)
            on_failure.pop_all()
        self.tools = [*(tool.schema for tool in self._by_name.values()), _SUBMIT]

    def backend(self, database: str) -> FunctionBackend:
        """Backend of the sessions on one database: its server."""
        original = self.databases.sqlite_file(database, "environment.mcp")
        if hidden := self.hidden(database).names():
            raise ConfigError(
                f"the tools of environment.mcp would show what data.hide hides in {database}"
                f" ({', '.join(hidden[:3])}): set data.hide to [], or remove it from the database"
            )
        self._originals.check(original)
        return FunctionBackend(self.tools, partial(self._call, self._server(database), original))

    def _call(self, server: Server, original: Path, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Run a call of the model on a server; `original` is its database."""
        observation = self.settings.observation
        try:
            json.dumps(arguments, allow_nan=False)
            pydantic_core.to_json(arguments)
        except ValueError as error:
            return ToolResult(f"Error: the call cannot be sent: {error}"[: observation.max_chars])
        tool = self._by_name[name]
        try:
            text = _text(self._pool.call(server, tool.server_name, tool.server_arguments(arguments)))
        except ServerDied:
            return ToolResult(None)
        except CallTimedOut:
            return ToolResult(f"Error: stopped: no answer within {self._config.timeout_s:g} s")
        except MCPError as error:
            text = f"Error: {error.message}"
        finally:
            self._originals.check(original)
        return ToolResult(_cut(text, observation.max_chars))

    def close(self) -> None:
        """Close the connections, and end the servers that were started for them.

        Raises:
            DataError: A database has changed since its first session.
        """
        self._pool.close()
        self._originals.check_all()

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
            environment={config.token_variable: self._token} if config.token_variable else {},
        )


def _token(variable: str | None) -> str:
    token = os.environ.get(variable, "") if variable else ""
    if variable and not token:
        raise ConfigError(f"no token in the environment variable {variable} (environment.mcp.token_variable)")
    return token


def _check_protocol(by_name: dict[str, MappedTool], protocol: Protocol) -> None:
    if "submit_sql" in by_name:
        raise ConfigError(
            "the MCP server has a tool submit_sql, a name that this package adds: give it another in"
            " environment.mcp.tools"
        )
    run_sql = by_name.get("run_sql")
    if protocol == "tags" and not (run_sql and takes_a_query(run_sql.schema["function"]["parameters"])):
        raise ConfigError(
            "the tags protocol needs a tool run_sql(sql) of the MCP server, got the tools "
            f"{', '.join(by_name)}: map one in environment.mcp.tools, such as [run_sql: read_query(query)], "
            "or set environment.protocol: native to offer them all"
        )


def _text(result: CallToolResult) -> str:
    parts = [part.text if isinstance(part, TextContent) else f"<{part.type}>" for part in result.content]
    text = "\n".join(parts) or "(no output)"
    return f"Error: {text}" if result.is_error and not text.startswith("Error") else text


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars + _NOTE_CHARS:
        return text
    return f"{text[:max_chars]}…\n({max_chars} of {len(text)} characters shown)"
