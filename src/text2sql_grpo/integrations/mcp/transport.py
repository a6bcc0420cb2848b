"""Transports to a server: a command's standard input and output, or streamable HTTP."""

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import httpx2
from mcp import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from text2sql_grpo.integrations.mcp.private_copy import PrivateCopy

OPEN_TIMEOUT_S = 60.0
BACK_OFF_S = (0.2, 1.0, 3.0)
_BUSY = (429, 503)
_UNAUTHORIZED = (401, 403)


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


async def open_transport(
    server: Server, copy: PrivateCopy | None, stack: AsyncExitStack, stderr: TextIO
) -> Any:
    """Open the transport for the SDK's client; `stack` closes what the transport itself does not."""
    if server.url:
        client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {server.token}"} if server.token else None,
            timeout=httpx2.Timeout(OPEN_TIMEOUT_S, read=None),  # each call has its own limit
            transport=_RetryingTransport(),
            event_hooks={"response": [_refuse_unauthorized]},
            follow_redirects=True,
        )
        await stack.enter_async_context(client)
        return streamable_http_client(server.url, http_client=client)
    path = str(copy.path) if copy else ""
    program, *arguments = (word.replace("{database}", path) for word in server.command)
    parameters = StdioServerParameters(command=program, args=arguments, env=server.environment)
    return stdio_client(parameters, errlog=stderr)


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
