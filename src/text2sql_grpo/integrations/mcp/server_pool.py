"""Connection pool to MCP servers, shared by all sessions of a process.

A thread with an event loop owns the connections. A connection is opened on demand, used by many calls at the
same time, and reopened after its server died. Only requests that cannot have reached a tool are retried:
opening, and HTTP requests without a connection or with a refusal. A call under way may have had any effect,
such as killing its server, so it is not retried.
"""

import asyncio
import logging
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import httpx2
from mcp import Client, MCPError
from mcp.types import INVALID_PARAMS, REQUEST_TIMEOUT, CallToolResult, Tool

from text2sql_grpo.errors import RunError
from text2sql_grpo.integrations.mcp import transport
from text2sql_grpo.integrations.mcp.private_copy import PrivateCopy
from text2sql_grpo.integrations.mcp.transport import OPEN_TIMEOUT_S, Server, open_transport

_ALIVE_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 5.0
_STDERR_CHARS = 500
_CALLS_EACH = 64  # running calls of a connection; a server may refuse more, as `server.WAITING_EACH` does
_PROTOCOL_CODES = range(-32768, -31999)  # reserved by JSON-RPC; others are the tool's
_FAILURES = (
    *(MCPError, OSError, ExceptionGroup, httpx2.HTTPError),
    *(anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream),
)
# HTTP requests were retried already.
_NO_RETRY = (FileNotFoundError, PermissionError, httpx2.ConnectError, httpx2.HTTPStatusError)
T = TypeVar("T")
_logger = logging.getLogger(__name__)


class ServerDied(Exception):
    """A server died during a call, whose effect is unknown."""


class CallTimedOut(Exception):
    """A call timed out, and its server still responds."""


class ConnectionPool:
    """Thread-safe pool; opens nothing before the first call.

    Args:
        connections: Maximum number open at the same time, over all servers.
        timeout_s: Time limit of a call in seconds.
    """

    def __init__(self, *, connections: int, timeout_s: float) -> None:
        self._connections = _Connections(connections, timeout_s)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def list_tools(self, server: Server) -> list[Tool]:
        """List the tools of a server.

        Raises:
            RunError: It cannot be reached, or died.
        """
        try:
            return self._run(self._connections.list_tools(server))
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
        return self._run(self._connections.call(server, name, arguments))

    @property
    def writers(self) -> set[str]:
        """Names of tools after whose call a server's private copy of the database was found changed."""
        return set(self._connections.writers)

    def close(self) -> None:
        """End the started servers; a later call raises."""
        if self._loop is not None:
            self._finalizer()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
                thread.start()
                self._finalizer = weakref.finalize(self, _shut_down, self._connections, self._loop, thread)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _shut_down(
    connections: "_Connections", loop: asyncio.AbstractEventLoop, thread: threading.Thread
) -> None:
    asyncio.run_coroutine_threadsafe(connections.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@dataclass(eq=False)
class _Connection:
    """One open client.

    Attributes:
        copy: Private copy of the database; None if the server has none.
        calls: Number of running calls.
    """

    server: Server
    client: Client
    copy: PrivateCopy | None
    calls: int = 0
    closing: asyncio.Event = field(default_factory=asyncio.Event)


class _Connections:
    """State of the pool, in its event loop."""

    def __init__(self, most: int, timeout_s: float) -> None:
        self._most = most
        self._timeout_s = timeout_s
        self._open: list[_Connection] = []  # the last used last
        self._opening: Counter[Server] = Counter()
        self._unreachable: dict[Server, RunError] = {}
        self._owners: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self.writers: set[str] = set()

    async def list_tools(self, server: Server) -> list[Tool]:
        async with self._taken(server) as connection:
            tools, cursor = [], None
            while True:
                page = await connection.client.list_tools(cursor=cursor)
                tools += page.tools
                cursor = page.next_cursor
                if not cursor:
                    return tools

    async def call(self, server: Server, name: str, arguments: dict[str, Any]) -> CallToolResult:
        async with self._taken(server) as connection:
            try:
                return await connection.client.call_tool(
                    name, arguments, read_timeout_seconds=self._timeout_s
                )
            finally:
                self._replace_if_changed(connection, name)

    async def close(self) -> None:
        for connection in self._open:
            connection.closing.set()
        if self._owners:
            await asyncio.wait(self._owners, timeout=_CLOSE_TIMEOUT_S)

    @asynccontextmanager
    async def _taken(self, server: Server) -> AsyncIterator[_Connection]:
        """Connection for one call, dropped unless a failure is the call's own."""
        connection = await self._take(server)
        try:
            yield connection
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT and await self._is_alive(connection):
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
            await self._notify_waiting()

    async def _take(self, server: Server) -> _Connection:
        """Choose an idle connection, a new one, or the least busy one, in this order."""
        async with self._changed:
            while True:
                if server in self._unreachable:
                    raise self._unreachable[server]
                own = [connection for connection in self._open if connection.server == server]
                n_open = len(self._open) + self._opening.total()
                if any(connection.calls == 0 for connection in own) or (own and n_open >= self._most):
                    chosen = min(own, key=lambda connection: connection.calls)
                    if chosen.calls == _CALLS_EACH:
                        await self._changed.wait()
                        continue
                    self._open.remove(chosen)
                    self._open.append(chosen)
                    chosen.calls += 1
                    return chosen
                if n_open < self._most:
                    break
                idle = [connection for connection in self._open if connection.calls == 0]
                if idle and not self._opening[server]:
                    self._end(idle[0])
                else:
                    await self._changed.wait()
            self._opening[server] += 1
        try:
            chosen = await self._open_with_retries(server)
            chosen.calls += 1
            self._open.append(chosen)
            return chosen
        except RunError as error:
            self._unreachable[server] = error
            raise
        finally:
            self._opening[server] -= 1
            await self._notify_waiting()

    async def _notify_waiting(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _open_with_retries(self, server: Server) -> _Connection:
        for pause_s in (*transport.BACK_OFF_S, None):
            try:
                return await self._open_once(server)
            except _FAILURES as error:
                cause = _first(error)
                is_slow = isinstance(cause, MCPError) and cause.code == REQUEST_TIMEOUT
                is_final = is_slow or isinstance(cause, _NO_RETRY)
                if pause_s is None or is_final:
                    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", []))
                    raise RunError(
                        f"cannot connect to the MCP server: {type(cause).__name__}: {cause}{notes} ({server})"
                    ) from error
            await asyncio.sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    async def _open_once(self, server: Server) -> _Connection:
        ready: asyncio.Future[_Connection] = asyncio.get_running_loop().create_future()
        owner = asyncio.create_task(self._own(server, ready))
        self._owners.add(owner)
        owner.add_done_callback(self._owners.discard)
        futures: list[asyncio.Future[Any]] = [owner, ready]
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            owner.result()  # raises
        return ready.result()

    async def _own(self, server: Server, ready: "asyncio.Future[_Connection]") -> None:
        """Open a connection, wait for its end and close it: one task must do all of it."""
        connection: _Connection | None = None
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
            try:
                async with AsyncExitStack() as stack:
                    copy = None
                    if server.database is not None:
                        copy = await asyncio.to_thread(PrivateCopy, server.database)
                        stack.callback(copy.remove)
                    streams = await open_transport(server, copy, stack, stderr)
                    client = await stack.enter_async_context(
                        Client(streams, read_timeout_seconds=OPEN_TIMEOUT_S)
                    )
                    connection = _Connection(server, client, copy)
                    ready.set_result(connection)
                    await connection.closing.wait()
            except _FAILURES as error:
                if connection is None:
                    stderr.seek(0)
                    if text := stderr.read().strip():
                        error.add_note(f"its stderr: {text[-_STDERR_CHARS:]}")
                    raise
                self._drop(connection, error)

    async def _is_alive(self, connection: _Connection) -> bool:
        try:
            async with asyncio.timeout(_ALIVE_TIMEOUT_S):
                await connection.client.list_tools(cache_mode="bypass")
        except (TimeoutError, *_FAILURES):
            return False
        return True

    def _replace_if_changed(self, connection: _Connection, tool: str) -> None:
        """Let later calls open a new server with a fresh copy; this one ends with its last running call."""
        if connection.copy is None or connection not in self._open or not connection.copy.is_changed():
            return
        if tool not in self.writers:
            _logger.warning(
                "The tool %s of an MCP server wrote to its private copy of the database, which is replaced: "
                "leave it out of environment.mcp.tools (%s)",
                *(tool, connection.server),
            )
        self.writers.add(tool)
        self._open.remove(connection)

    def _drop(self, connection: _Connection, error: BaseException) -> None:
        if connection in self._open:  # log only the first of its failed calls
            _logger.warning("Lost an MCP server: %s (%s)", _first(error), connection.server)
            self._end(connection)

    def _end(self, connection: _Connection) -> None:
        self._open.remove(connection)
        connection.closing.set()


def _first(error: BaseException) -> BaseException:
    """First error inside the exception groups of task groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
