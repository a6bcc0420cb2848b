"""Connection pool to MCP servers, shared by all sessions of a process.

A connection is a command's standard input and output, or streamable HTTP. It is opened on demand, used by
many calls at the same time, and replaced after its server died. Only requests that cannot have reached a tool
are retried: opening, and HTTP requests without a connection or with a refusal. A call under way may have had
any effect, such as killing its server, so it is not retried.
"""

import asyncio
import atexit
import logging
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx2
from anyio.from_thread import start_blocking_portal
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import INVALID_PARAMS, REQUEST_TIMEOUT, CallToolResult, Tool

from text2sql_grpo.errors import RunError
from text2sql_grpo.integrations.mcp.private_copy import PrivateCopy

OPEN_TIMEOUT_S = 60.0
ALIVE_TIMEOUT_S = 5.0
BACK_OFF_S = (0.2, 1.0, 3.0)
_CLOSE_TIMEOUT_S = 5.0
_STDERR_CHARS = 500
_BUSY = (429, 503)
_UNAUTHORIZED = (401, 403)
_PROTOCOL_CODES = range(-32768, -31999)  # reserved by JSON-RPC; others are the tool's
_FAILURES = (
    *(MCPError, OSError, ExceptionGroup, httpx2.HTTPError),
    *(anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream),
)
# HTTP requests were retried already.
_NO_RETRY = (FileNotFoundError, PermissionError, httpx2.ConnectError, httpx2.HTTPStatusError)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Server:
    """Address of a server: the words of a command, or a URL.

    Attributes:
        database: Database of which each process of the command gets a private copy, whose path replaces
            `{database}`; None for none.
        token: Bearer token for the URL; empty for none.
        environment: Additional environment variables of the command.
    """

    command: tuple[str, ...] = ()
    database: Path | None = None
    url: str = ""
    token: str = field(default="", repr=False)
    environment: dict[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return self.url or " ".join(self.command)


class ServerDied(Exception):
    """A server died during a call, whose effect is unknown."""


class CallTimedOut(Exception):
    """A call timed out, and its server still responds."""


@dataclass(eq=False)
class _Connection:
    """One connection.

    Attributes:
        ready: The open client, or the error of opening it.
        copy: Private copy of the database; None if the server has none.
        calls: Number of running calls, those included that wait for the client.
    """

    server: Server
    ready: "asyncio.Future[Client]"
    copy: PrivateCopy | None = None
    calls: int = 0
    closing: asyncio.Event = field(default_factory=asyncio.Event)


class ConnectionPool:
    """Thread-safe pool. Async methods run in the portal's event loop, and so does all that changes its state.

    Args:
        connections: Maximum number open at the same time, over all servers.
        timeout_s: Time limit of a call in seconds.
    """

    def __init__(self, *, connections: int, timeout_s: float) -> None:
        self._most, self._timeout_s = connections, timeout_s
        self._writers: set[str] = set()  # tools that a warning was logged of
        self._open: list[_Connection] = []  # the last used last
        self._owners: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._thread = ExitStack()
        self._portal = self._thread.enter_context(start_blocking_portal(name="mcp"))
        atexit.register(self.close)

    def list_tools(self, server: Server) -> list[Tool]:
        """List the tools of a server.

        Raises:
            RunError: It cannot be reached, or died.
        """
        try:
            return self._portal.call(self._list_tools, server)
        except (ServerDied, CallTimedOut, MCPError) as error:
            raise RunError(f"cannot list the tools of the MCP server: {error} ({server})") from error

    def call(self, server: Server, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool; its result may be an error of the tool.

        Raises:
            ServerDied: During this call or before it; the next call opens a new connection.
            CallTimedOut: The server still answers other calls.
            MCPError: The server refused the call.
            RunError: No connection could be opened, after all retries.
        """
        result: CallToolResult = self._portal.call(self._call, server, name, arguments)
        return result

    def close(self) -> None:
        """End the started servers; a later call raises."""
        atexit.unregister(self.close)
        with self._thread, suppress(RuntimeError):  # closed already
            self._portal.call(self._close)

    async def _list_tools(self, server: Server) -> list[Tool]:
        async with self._taken(server) as (client, _):
            tools, cursor = [], None
            while True:
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                cursor = page.next_cursor
                if not cursor:
                    return tools

    async def _call(self, server: Server, name: str, arguments: dict[str, Any]) -> CallToolResult:
        async with self._taken(server) as (client, connection):
            try:
                return await client.call_tool(name, arguments, read_timeout_seconds=self._timeout_s)
            finally:
                self._replace_if_changed(connection, name)

    async def _close(self) -> None:
        for connection in self._open:
            connection.closing.set()
        if self._owners:
            await asyncio.wait(self._owners, timeout=_CLOSE_TIMEOUT_S)

    @asynccontextmanager
    async def _taken(self, server: Server) -> AsyncIterator[tuple[Client, _Connection]]:
        """Client for one call, its connection dropped unless a failure is the call's own."""
        connection = await self._take(server)
        try:
            client = await asyncio.shield(connection.ready)
            yield client, connection
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT and await _is_alive(client):
                raise CallTimedOut(str(error)) from error
            if error.code == INVALID_PARAMS or error.code not in _PROTOCOL_CODES:
                raise
            self._drop(connection, error)
            raise ServerDied(str(error)) from error
        except _FAILURES as error:
            self._drop(connection, error)
            raise ServerDied(str(error)) from error
        finally:
            connection.calls -= 1
            if connection.calls == 0 and connection not in self._open:
                connection.closing.set()
            async with self._changed:
                self._changed.notify_all()

    async def _take(self, server: Server) -> _Connection:
        """Choose an idle connection, a new one, or the least busy one, in this order."""
        async with self._changed:
            while True:
                own = [connection for connection in self._open if connection.server == server]
                if any(connection.calls == 0 for connection in own) or (own and self._is_full):
                    chosen = min(own, key=lambda connection: connection.calls)
                    self._open.remove(chosen)
                    break
                if not self._is_full:
                    chosen = self._new(server)
                    break
                idle = [connection for connection in self._open if connection.calls == 0]
                if idle:
                    self._end(idle[0])
                else:
                    await self._changed.wait()
            self._open.append(chosen)
            chosen.calls += 1
            return chosen

    @property
    def _is_full(self) -> bool:
        return len(self._open) >= self._most

    def _new(self, server: Server) -> _Connection:
        """Connection that a task of its own opens."""
        connection = _Connection(server, asyncio.get_running_loop().create_future())
        owner = asyncio.create_task(self._open_with_retries(connection))
        self._owners.add(owner)
        owner.add_done_callback(self._owners.discard)
        return connection

    async def _open_with_retries(self, connection: _Connection) -> None:
        """Open a connection, wait for its end and close it: one task must do all of it."""
        for pause_s in (*BACK_OFF_S, None):
            try:
                return await self._open_once(connection)
            except _FAILURES as error:
                cause = _first(error)
                if connection.ready.done():
                    return self._drop(connection, cause)
                is_slow = isinstance(cause, MCPError) and cause.code == REQUEST_TIMEOUT
                if pause_s is None or is_slow or isinstance(cause, _NO_RETRY):
                    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", []))
                    failure = RunError(
                        f"cannot connect to the MCP server: {type(cause).__name__}: {cause}{notes}"
                        f" ({connection.server})"
                    )
                    self._end(connection)
                    connection.ready.set_exception(failure)
                    return
            await asyncio.sleep(pause_s)

    async def _open_once(self, connection: _Connection) -> None:
        """Open a connection and keep it open until its end."""
        server = connection.server
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
            try:
                async with AsyncExitStack() as stack:
                    streams: Any
                    if server.url:
                        http = await stack.enter_async_context(_http_client(server.token))
                        streams = streamable_http_client(server.url, http_client=http)
                    else:
                        if server.database is not None:
                            connection.copy = await asyncio.to_thread(PrivateCopy, server.database)
                            stack.callback(connection.copy.remove)
                        streams = stdio_client(_command(server, connection.copy), errlog=stderr)
                    client = await stack.enter_async_context(
                        Client(streams, read_timeout_seconds=OPEN_TIMEOUT_S)
                    )
                    connection.ready.set_result(client)
                    await connection.closing.wait()
            except _FAILURES as error:
                stderr.seek(0)
                if text := stderr.read().strip():
                    error.add_note(f"its stderr: {text[-_STDERR_CHARS:]}")
                raise

    def _replace_if_changed(self, connection: _Connection, tool: str) -> None:
        """Let later calls open a new server with a fresh copy; this one ends with its last running call."""
        if connection.copy is None or connection not in self._open or not connection.copy.is_changed():
            return
        if tool not in self._writers:
            _logger.warning(
                "The tool %s of an MCP server wrote to its private copy of the database, which is replaced: "
                "leave it out of environment.mcp.tools (%s)",
                *(tool, connection.server),
            )
        self._writers.add(tool)
        self._open.remove(connection)

    def _drop(self, connection: _Connection, error: BaseException) -> None:
        if connection in self._open:  # log only the first of its failed calls
            _logger.warning("Lost an MCP server: %s (%s)", _first(error), connection.server)
            self._end(connection)

    def _end(self, connection: _Connection) -> None:
        self._open.remove(connection)
        connection.closing.set()


async def _is_alive(client: Client) -> bool:
    try:
        async with asyncio.timeout(ALIVE_TIMEOUT_S):
            await client.list_tools(cache_mode="bypass")
    except (TimeoutError, *_FAILURES):
        return False
    return True


def _first(error: BaseException) -> BaseException:
    """First error inside the exception groups of task groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _command(server: Server, copy: PrivateCopy | None) -> StdioServerParameters:
    path = str(copy.path) if copy else ""
    program, *arguments = (word.replace("{database}", path) for word in server.command)
    return StdioServerParameters(command=program, args=arguments, env=server.environment)


def _http_client(token: str) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        headers={"Authorization": f"Bearer {token}"} if token else None,
        timeout=httpx2.Timeout(OPEN_TIMEOUT_S, read=None),  # each call has its own limit
        transport=_RetryingTransport(),
        event_hooks={"response": [_refuse_unauthorized]},
        follow_redirects=True,
    )


class _RetryingTransport(httpx2.AsyncHTTPTransport):
    """Transport that retries requests which no server can have handled."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        for pause_s in BACK_OFF_S:
            with suppress(httpx2.ConnectError, httpx2.ConnectTimeout):
                response = await super().handle_async_request(request)
                if response.status_code not in _BUSY:
                    return response
                await response.aclose()
            await asyncio.sleep(pause_s)
        return await super().handle_async_request(request)


async def _refuse_unauthorized(response: httpx2.Response) -> None:
    if response.status_code in _UNAUTHORIZED:
        status = f"{response.status_code} {response.reason_phrase}"
        raise httpx2.HTTPStatusError(status, request=response.request, response=response)
