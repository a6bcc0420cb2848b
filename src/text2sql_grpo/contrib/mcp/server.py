"""Read-only MCP server over one database: lists tables, describes them and runs queries.

Queries run in the executor's workers, under its limits; each leaves a line in the audit log.
"""

import asyncio
import hmac
import ipaddress
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import uvicorn
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import Context, MCPServer
from mcp.types import CallToolResult, TextContent, ToolAnnotations
from pydantic import AnyHttpUrl

from text2sql_grpo.contrib.mcp.audit_log import AuditLog
from text2sql_grpo.environment.observation import ObservationLimits, observation_text
from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.sql.address import parse_address
from text2sql_grpo.sql.schema import Schema, Table, View, ddl_text, read_schema, relation_sql

PATH = "/mcp"
_READ_ONLY = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)


def make_server(
    database: Path | str,
    executor: SQLExecutor,
    audit_log: AuditLog,
    *,
    observation: ObservationLimits,
    token: str | None = None,
) -> MCPServer:
    """Make a server with the tools `list_tables`, `describe_table` and `run_sql`.

    Args:
        database: A path or a URL; see `parse_address`.
        observation: Caps on the shown part of a result.
        token: Required bearer token of HTTP requests; None for none.

    Raises:
        DataError: The database is missing or unreadable, or its role may do more than read.
    """
    read_schema(database)
    if parse_address(database).kind == "postgresql":
        executor.execute(database, "SELECT 1")  # refuses a role that may do more than read
    server = MCPServer(
        "text2sql-grpo",
        instructions="One SQL database, for reading only.",
        log_level="WARNING",
        token_verifier=_OneToken(token) if token else None,
        # There is no issuer: the token is shared beforehand, and no metadata is served.
        auth=AuthSettings(issuer_url=AnyHttpUrl("http://localhost"), resource_server_url=None)
        if token
        else None,
    )

    @server.tool(annotations=_READ_ONLY)
    async def list_tables() -> CallToolResult:
        """List the tables and views of the database."""
        return await _from_schema(database, _table_list)

    @server.tool(annotations=_READ_ONLY)
    async def describe_table(table: str) -> CallToolResult:
        """Show the columns, types and keys of one table or view, as CREATE TABLE."""
        return await _from_schema(database, lambda schema: _described(schema, table))

    @server.tool(annotations=_READ_ONLY)
    async def run_sql(sql: str, context: Context) -> CallToolResult:
        """Run one read-only SQL query on the database and see its rows or its error."""
        started, status, n_rows = time.perf_counter(), "cancelled", 0
        try:
            outcome = await executor.aexecute(database, sql)
            status, n_rows = outcome.status, len(outcome.rows)
        except DataError as error:
            status = "failed"
            return _answer(f"Error: {error}", is_error=True)
        finally:
            audit_log.write(
                session=_session(context),
                sql=sql,
                status=status,
                rows=n_rows,
                elapsed_s=time.perf_counter() - started,
            )
        return _answer(observation_text(outcome, observation), is_error=not outcome.is_ok)

    return server


def listen(host: str, port: int, *, token: str | None) -> socket.socket:
    """Open the listening socket of an HTTP server.

    Args:
        port: 0 for any free one.
        token: Required bearer token; None for none.

    Raises:
        ConfigError: Other machines could reach it and there is no token, or the address is not free.
    """
    if token is None and not _is_local(host):
        raise ConfigError(
            f"a server that other machines can reach needs a token (--host {host}): "
            "without one, its port gives access to the database; add --token, or take --host 127.0.0.1"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small answers at once only if the protocol is named.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen: {error} (at {host}:{port})") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """URL of the server behind a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}{PATH}" if ":" in host else f"http://{host}:{port}{PATH}"


def http_server(server: MCPServer, host: str) -> uvicorn.Server:
    """Server of streamable HTTP: `run(sockets=[listen(..)])`.

    Args:
        host: The host of `listen`; a local one is served under local names only, so that no web page can
            reach it by another name (DNS rebinding).
    """
    app = server.streamable_http_app(streamable_http_path=PATH, json_response=True, host=host)
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=1))


def _is_local(host: str) -> bool:
    """True if only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _OneToken:
    """Verifier of a single bearer token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def verify_token(self, token: str) -> AccessToken | None:
        """Access of a token, or None for a wrong one, compared in constant time."""
        if not hmac.compare_digest(token.encode(errors="replace"), self._token):
            return None
        return AccessToken(token=token, client_id="bearer", scopes=[])


def _session(context: Context) -> str:
    """Name of the client: the process behind standard input, the MCP session, or the network address."""
    request = context.request_context.request
    if request is None:
        return f"stdio:{os.getpid()}"
    peer = request.client
    address = f"{peer.host}:{peer.port}" if peer else "unknown"
    return f"http:{request.headers.get('mcp-session-id', address)}"


async def _from_schema(database: Path | str, text_of: Callable[[Schema], str]) -> CallToolResult:
    try:
        return _answer(text_of(await asyncio.to_thread(read_schema, database)))
    except DataError as error:
        return _answer(f"Error: {error}", is_error=True)


def _answer(text: str, *, is_error: bool = False) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=is_error)


def _table_list(schema: Schema) -> str:
    return "\n".join(relation_sql(relation, schema.dialect) for relation in schema.relations) or "(no tables)"


def _described(schema: Schema, table: str) -> str:
    """DDL of the tables and views with this name, in any case, quoted as in a query or bare.

    Raises:
        DataError: There is none.
    """
    wanted = table.strip().lower()
    found = [
        relation
        for relation in schema.relations
        if wanted in (relation.name.lower(), relation_sql(relation, schema.dialect).lower())
    ]
    if not found:
        raise DataError(f"unknown table {table[:100]!r}: list_tables shows the names")
    tables = tuple(relation for relation in found if isinstance(relation, Table))
    views = tuple(relation for relation in found if isinstance(relation, View))
    return ddl_text(replace(schema, tables=tables, views=views))
