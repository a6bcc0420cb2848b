"""How a server is reached: a command's standard input and output, or streamable HTTP."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TextIO

import httpx2
from mcp import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

OPEN_TIMEOUT_S = 60.0
BACK_OFF_S = (0.2, 1.0, 3.0)
_TURNED_AWAY = (429, 503)
_NOT_LET_IN = (401, 403)


@dataclass(frozen=True)
class Server:
    """What to connect to: the words of a command, or a URL.

    Attributes:
        token: Sent to the URL; empty for none.
        environment: Variables of the command's own, by name.
    """

    command: tuple[str, ...] = ()
    url: str = ""
    token: str = field(default="", repr=False)
    environment: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return self.url or " ".join(self.command)


async def open_transport(server: Server, stack: AsyncExitStack, last_words: TextIO) -> Any:
    """What the SDK's client speaks through.

    Args:
        stack: Closes what the transport itself does not.
        last_words: Takes what a command writes to its standard error.
    """
    if server.url:
        client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {server.token}"} if server.token else None,
            timeout=httpx2.Timeout(OPEN_TIMEOUT_S, read=None),  # each call has its own limit
            transport=_Patient(),
            follow_redirects=True,
        )
        await stack.enter_async_context(client)
        return streamable_http_client(server.url, http_client=client)
    program, *arguments = server.command
    parameters = StdioServerParameters(command=program, args=arguments, env=dict(server.environment))
    return stdio_client(parameters, errlog=last_words)


class _Patient(httpx2.AsyncHTTPTransport):
    """Asks again, later, where nobody can have handled the request."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        for pause_s in (*BACK_OFF_S, None):
            try:
                response = await super().handle_async_request(request)
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                if pause_s is None:
                    raise
            else:
                is_turned_away = response.status_code in _TURNED_AWAY
                if response.status_code not in _NOT_LET_IN and not (is_turned_away and pause_s):
                    return response
                await response.aclose()
                if not is_turned_away:
                    status = f"{response.status_code} {response.reason_phrase}"
                    raise httpx2.HTTPStatusError(status, request=request, response=response)
            assert pause_s is not None
            await asyncio.sleep(pause_s)
        raise AssertionError("the last try returns or raises")
