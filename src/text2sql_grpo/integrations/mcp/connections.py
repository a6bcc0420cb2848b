"""Bounds of an HTTP server: a number of sessions, and a time for sending a request."""

import asyncio
from collections import OrderedDict
from typing import Any

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_SESSIONS = 256
SESSION_IDLE_S = 1_800.0
REQUEST_TIMEOUT_S = 10.0
_SESSION = "mcp-session-id"


class BoundedSessions:
    """ASGI application that ends the session used longest ago when there are too many.

    Its client gets the protocol's 404 for its next request, and begins a new one.
    """

    def __init__(self, app: ASGIApp, manager: StreamableHTTPSessionManager) -> None:
        self._app = app
        self._manager = manager
        self._sessions: OrderedDict[str, None] = OrderedDict()  # the last used last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            name = Headers(scope=scope).get(_SESSION)
            if name is not None and name in self._sessions:
                self._sessions.move_to_end(name)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                created = Headers(raw=message["headers"]).get(_SESSION)
                if created is not None:
                    self._sessions[created] = None
                    self._sessions.move_to_end(created)
                    self._end_oldest()
            await send(message)

        await self._app(scope, receive, noting)

    def _end_oldest(self) -> None:
        while len(self._sessions) > MAX_SESSIONS:
            name, _ = self._sessions.popitem(last=False)
            transport = self._manager._server_instances.get(name)
            if transport is not None and transport.idle_scope is not None:
                transport.idle_scope.cancel()  # as when it was idle for too long


class TimedProtocol(H11Protocol):
    """Connections that are closed when a request is not there as a whole in time."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_request()

    def on_response_complete(self) -> None:
        self._wait_for_request()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(REQUEST_TIMEOUT_S, self._close_if_waiting)

    def _close_if_waiting(self) -> None:
        cycle = self.cycle
        is_working = cycle is not None and not cycle.response_complete and not cycle.more_body
        if not is_working:
            self.transport.abort()
