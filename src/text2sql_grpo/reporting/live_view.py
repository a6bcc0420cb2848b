"""Pages of runs, live on this machine: the server of `view --port`."""

import json
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from text2sql_grpo.errors import ConfigError, DataError
from text2sql_grpo.reporting.report_page import page_text, run_report

_HEADERS = {
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}


def live_app(runs: Sequence[Path], token: str) -> Starlette:
    """Application with the page of some runs at `/TOKEN/`, and its data at `/TOKEN/data`.

    The data is read again for each request. A request for another host is refused, so that no page of another
    site reads it.
    """

    def answer(request: Request) -> Response:
        try:
            reports = [run_report(run) for run in runs]
        except DataError as error:  # a line that is being written
            return JSONResponse({"error": str(error)}, 503, headers=_HEADERS | {"Refresh": "2"})
        if request.url.path.endswith("/data"):
            text = json.dumps(reports, ensure_ascii=True)  # a run may hold half a letter
            return Response(text, headers=_HEADERS, media_type="application/json")
        return HTMLResponse(page_text(reports, is_live=True), headers=_HEADERS)

    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    return Starlette(routes=[Route(f"/{token}/{name}", answer) for name in ("", "data")], middleware=[hosts])


def open_live(runs: Sequence[Path], port: int) -> tuple[uvicorn.Server, socket.socket, str]:
    """Server of some runs, its socket on 127.0.0.1, and the address of its page.

    Raises:
        ConfigError: The port is in use.
    """
    try:
        listener = socket.create_server(("127.0.0.1", port))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does not set it here
    except OSError as error:
        raise ConfigError(f"cannot listen on 127.0.0.1:{port}: {error}; leave --port out") from error
    token = secrets.token_urlsafe(24)
    config = uvicorn.Config(live_app(runs, token), log_level="warning", access_log=False)
    return uvicorn.Server(config), listener, f"http://127.0.0.1:{listener.getsockname()[1]}/{token}/"
