"""Read-only MCP server over one database: lists and describes tables and runs queries, without hidden parts.

Queries run in the executor's workers, under its limits; each leaves a line in the audit log. HTTP is
stateless. TLS and limits of connections are left to a proxy (`docs/mcp.md`).
"""

import asyncio
import hmac
import ipaddress
import json
import logging
import math
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.transport_security import TransportSecuritySettings
from mcp.types import CallToolResult, InputRequiredResult, TextContent, ToolAnnotations
from pydantic import AnyHttpUrl, BaseModel, Field, ValidationError

from text2sql_grpo import __version__
from text2sql_grpo.environment.observation import ObservationLimits, observation_text
from text2sql_grpo.environment.session import log_hidden, log_unmatched
from text2sql_grpo.errors import UNREADABLE, ConfigError, DataError
from text2sql_grpo.sql import ExecutionOutcome, SQLExecutor
from text2sql_grpo.sql.address import parse_address
from text2sql_grpo.sql.hidden import Hidden, read_hidden
from text2sql_grpo.sql.personal import PERSONAL
from text2sql_grpo.sql.schema import Schema, Table, View
from text2sql_grpo.sql.schema_text import ddl_text, relation_sql

PATH = "/mcp"
MAX_PAGE_ROWS = 1_000
MAX_SQL_CHARS = 100_000  # in the audit log
_logger = logging.getLogger(__name__)
_READ_ONLY = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)


class TableList(BaseModel):
    """Names of the tables and views, quoted where a query needs it."""

    tables: list[str] = []
    error: str | None = None


class TableDefinition(BaseModel):
    """Definition of one table or view."""

    sql: str = ""
    error: str | None = None


class Page(BaseModel):
    """Rows of a query's result from an offset on; blobs are written in hex."""

    columns: list[str] = []
    rows: list[list[Any]] = []
    next_offset: int | None = Field(None, description="Offset of the next rows; null after the last ones")
    is_truncated: bool = Field(False, description="True if the result has more rows than the server keeps")
    error: str | None = None


class AuditLog:
    """Append-only JSONL file that several servers may share; only its owner can read it.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot write the audit log: {error} (at {path})") from error

    def write(self, *, session: str, sql: str, status: str, rows: int, elapsed_s: float) -> None:
        """Append a line in one write.

        Args:
            sql: Cut after `MAX_SQL_CHARS`; no text longer than the executor's limit is run.
            status: The outcome's status; `failed` if the database could not be read, `cancelled` if the
                request was.

        Raises:
            OSError: The disk is full: a query that cannot be logged gets no answer.
        """
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "session": session,
            "sql": sql[:MAX_SQL_CHARS],
            "status": status,
            "rows": rows,
            "elapsed_s": round(elapsed_s, 6),
        }
        data = json.dumps(line).encode() + b"\n"
        if os.write(self._file, data) != len(data):
            raise OSError(f"disk full while writing the audit log {self.path}")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def make_server(
    database: Path | str,
    executor: SQLExecutor,
    audit_log: AuditLog,
    *,
    observation: ObservationLimits,
    hide: Sequence[str] = (PERSONAL,),
    token: str | None = None,
) -> MCPServer:
    """Make a server with the tools `list_tables`, `describe_table` and `run_sql`.

    Args:
        database: A path or a URL; see `parse_address`.
        observation: Caps on the shown part of a result.
        hide: Patterns of tables and columns that no tool shows; see `hidden.hide`.
        token: Required bearer token of HTTP requests; None for none.

    Raises:
        DataError: The database is missing or unreadable, or its role may do more than read.
    """
    hidden = read_hidden(database, hide, executor)
    log_hidden(hidden)
    log_unmatched([hidden])
    if parse_address(database).engine.is_server:
        executor.execute(database, "SELECT 1")  # refuses a role that may do more than read

    async def refreshed() -> Hidden:
        nonlocal hidden  # which `run_sql` takes too: tables come and go while a server runs
        fresh = await asyncio.to_thread(read_hidden, database, hide, executor)
        if fresh.names() != hidden.names():
            log_hidden(fresh)
        hidden = fresh
        return fresh

    server = _Server(
        "text2sql-grpo",
        version=__version__,
        instructions="One SQL database, for reading only.",
        log_level="WARNING",
        token_verifier=_OneToken(token) if token else None,
        # There is no issuer: the token is shared beforehand, and no metadata is served.
        auth=AuthSettings(issuer_url=AnyHttpUrl("http://localhost"), resource_server_url=None)
        if token
        else None,
    )

    @server.tool(annotations=_READ_ONLY)
    async def list_tables() -> Annotated[CallToolResult, TableList]:
        """List the tables and views of the database."""
        try:
            schema = (await refreshed()).schema
        except DataError as error:
            return _unreadable(error, TableList)
        names = [relation_sql(relation, schema.dialect) for relation in schema.relations]
        return _answer("\n".join(names) or "(no tables)", TableList(tables=names))

    @server.tool(annotations=_READ_ONLY)
    async def describe_table(table: str) -> Annotated[CallToolResult, TableDefinition]:
        """Show the columns, types and keys of one table or view, as CREATE TABLE."""
        try:
            text = _described((await refreshed()).schema, table)
        except DataError as error:
            return _unreadable(error, TableDefinition)
        if not text:
            return _failure(f"unknown table {table[:100]!r}: list_tables shows the names", TableDefinition)
        return _answer(text, TableDefinition(sql=text))

    @server.tool(annotations=_READ_ONLY)
    async def run_sql(
        sql: str,
        context: Context,
        offset: Annotated[int, Field(ge=0, description="Number of rows to skip")] = 0,
        limit: Annotated[
            int, Field(ge=1, le=MAX_PAGE_ROWS, description="Maximum number of rows to return")
        ] = observation.max_rows,
    ) -> Annotated[CallToolResult, Page]:
        """Run one read-only SQL query on the database and see its rows or its error."""
        started, status, n_rows = time.perf_counter(), "cancelled", 0
        try:
            refusal = await asyncio.to_thread(hidden.refusal, sql)
            outcome = ExecutionOutcome("denied", error=refusal)
            if not refusal:
                outcome = hidden.shown(sql, await executor.aexecute(database, sql))
            status, n_rows = outcome.status, len(outcome.rows)
        except DataError as error:
            status = "failed"
            return _unreadable(error, Page)
        finally:
            audit_log.write(
                session=_client(context),
                sql=sql,
                status=status,
                rows=n_rows,
                elapsed_s=time.perf_counter() - started,
            )
        text = observation_text(outcome, replace(observation, max_rows=limit), offset=offset)
        return _answer(text, _page(outcome, offset, limit), is_error=not outcome.is_ok)

    return server


def open_http(
    server: MCPServer, host: str, port: int, *, token: str | None, allowed_hosts: Sequence[str] = ()
) -> tuple[uvicorn.Server, socket.socket, str]:
    """Server of streamable HTTP, the listening socket for its `run`, and its URL.

    A local host is served under local names only, so that no web page can reach it by another name (DNS
    rebinding).

    Args:
        token: The token of `make_server`.
        allowed_hosts: Further names under which it is served, such as that of a proxy, with or without port.

    Raises:
        ConfigError: Other machines could reach it and there is no token, or the address is not free.
    """
    is_local = _is_local(host)
    if token is None and not is_local:
        raise ConfigError(
            f"a server that other machines can reach needs a token (--host {host}): "
            "without one, its port gives access to the database; add --token, or take --host 127.0.0.1"
        )
    own_names = ("127.0.0.1", "localhost", "[::1]", host) if is_local else ()
    names = [*allowed_hosts, *(f"{name}:*" for name in allowed_hosts if ":" not in name)]
    names += [name for local in own_names for name in (local, f"{local}:*")]
    security = TransportSecuritySettings(
        enable_dns_rebinding_protection=bool(names),
        allowed_hosts=names,
        allowed_origins=[f"{scheme}://{name}" for scheme in ("http", "https") for name in names],
    )
    app = server.streamable_http_app(
        streamable_http_path=PATH,
        json_response=True,
        stateless_http=True,
        transport_security=security,
        host=host,
    )
    config = uvicorn.Config(
        app, log_level="warning", ws="none", timeout_graceful_shutdown=1, proxy_headers=bool(allowed_hosts)
    )
    # asyncio sends small answers at once only if the protocol is named.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen: {error} (at {host}:{port})") from error
    host, port = listener.getsockname()[:2]
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return uvicorn.Server(config), listener, f"http://{place}{PATH}"


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Server(MCPServer):
    """Server that names wrong arguments: the SDK ignores unknown ones, or shows pydantic's text."""

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        tools = {tool.name: tool for tool in await self.list_tools()}
        known = tools[name].input_schema["properties"] if name in tools else arguments
        wrong = [f"unknown argument {one[:100]!r}" for one in arguments if one not in known]
        try:
            if not wrong:
                return await super().call_tool(name, arguments, context)
        except ToolError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            wrong = [f"{one['loc'][0]}: {one['msg']}" for one in error.__cause__.errors()]
        raise ToolError(f"Error: {'; '.join(wrong)} ({name} takes {', '.join(known) or 'no arguments'})")


class _OneToken:
    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def verify_token(self, token: str) -> AccessToken | None:
        """Access of a token, or None for a wrong one, compared in constant time."""
        if not hmac.compare_digest(token.encode(errors="replace"), self._token):
            return None
        return AccessToken(token=token, client_id="bearer", scopes=[])


def _client(context: Context) -> str:
    """Name of the client in the audit log: the process behind standard input, or the network address."""
    request = context.request_context.request
    if request is None:
        return f"stdio:{os.getpid()}"
    return f"http:{request.client.host}:{request.client.port}" if request.client else "http:unknown"


def _answer(text: str, content: BaseModel, *, is_error: bool = False) -> CallToolResult:
    return CallToolResult(
        content=[TextContent(type="text", text=text)],
        structured_content=content.model_dump(mode="json"),
        is_error=is_error,
    )


def _unreadable(error: DataError, kind: type[BaseModel]) -> CallToolResult:
    """Answer without the path or the server of the database, which the log has."""
    _logger.error("%s", error)
    return _failure(UNREADABLE, kind)


def _failure(text: str, kind: type[BaseModel]) -> CallToolResult:
    return _answer(f"Error: {text}", kind(error=text), is_error=True)


def _page(outcome: ExecutionOutcome, offset: int, limit: int) -> Page:
    end = offset + limit
    return Page(
        columns=[_json_cell(name) for name in outcome.columns],
        rows=[[_json_cell(cell) for cell in row] for row in outcome.rows[offset:end]],
        next_offset=end if end < len(outcome.rows) else None,
        is_truncated=outcome.is_truncated,
        error=outcome.error or None,
    )


def _json_cell(cell: Any) -> Any:
    if isinstance(cell, bytes):
        return cell.hex()
    if isinstance(cell, str):
        return cell.encode("utf-8", "replace").decode()
    return str(cell) if isinstance(cell, float) and not math.isfinite(cell) else cell


def _described(schema: Schema, table: str) -> str:
    """DDL of the tables and views with this name, in any case, quoted or bare; empty if there is none."""
    wanted = table.strip().lower()
    found = [
        relation
        for relation in schema.relations
        if wanted in (relation.name.lower(), relation_sql(relation, schema.dialect).lower())
    ]
    tables = tuple(relation for relation in found if isinstance(relation, Table))
    views = tuple(relation for relation in found if isinstance(relation, View))
    return ddl_text(replace(schema, tables=tables, views=views))
