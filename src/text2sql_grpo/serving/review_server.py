"""Local page of a review: an HTTP server of the standard library, on 127.0.0.1 alone.

Every address begins with a random token, and requests whose Host or Origin is not the server's are refused,
so that no page of another site can read questions or save verdicts.
"""

import hmac
import json
import secrets
import sys
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.serving.question_review import InvalidVerdictError, Review

MAX_BODY_BYTES = 1_000_000
IDLE_TIMEOUT_S = 30
_FILES = {
    "": ("review.html", "text/html"),
    "review.css": ("review.css", "text/css"),
    "review.js": ("review.js", "text/javascript"),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class ReviewServer(ThreadingHTTPServer):
    """Server of one review, with a token of its own.

    Attributes:
        url: Address of the page.
    """

    daemon_threads = True
    allow_reuse_address = False

    def __init__(self, review: Review, *, port: int = 0) -> None:
        """Listen; 0 chooses a free port.

        Raises:
            ConfigError: The port is in use.
        """
        self.review, self.token = review, secrets.token_urlsafe(24)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise ConfigError(f"cannot listen on 127.0.0.1:{port}: {error}; leave --port out") from error
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}
        self.url = f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors of a request, but not of a page that was closed while it waited."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: ReviewServer
    timeout = IDLE_TIMEOUT_S

    def do_GET(self) -> None:
        path = self._path()
        if path is None:
            return
        review, query = self.server.review, parse_qs(urlsplit(self.path).query)
        [id] = query.get("id", [""])[:1]
        if path in _FILES:
            name, kind = _FILES[path]
            self._send(HTTPStatus.OK, (files(__package__) / name).read_bytes(), kind)
        elif path == "state":
            self._answer(review.state)
        elif path in ("question", "evidence"):
            self._answer(lambda: review.shown(id) if path == "question" else review.evidence(id))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "no such page")

    def do_POST(self) -> None:
        path = self._path()
        if path is None:
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {MAX_BODY_BYTES} bytes")
            return
        try:
            asked = json.loads(self.rfile.read(int(length)))
            # No half of a surrogate pair, which no question file may hold.
            json.dumps(asked, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            asked = None
        is_json = self.headers.get_content_type() == "application/json"
        if path != "verdict" or not is_json or not isinstance(asked, dict):
            self._refuse(HTTPStatus.BAD_REQUEST, "a verdict must be a JSON object")
            return
        self._answer(lambda: self.server.review.save(asked))

    def _path(self) -> str | None:
        """Path behind the token; None if the request was refused."""
        hosts, origin = self.server.hosts, self.headers.get("Origin")
        token, _, path = urlsplit(self.path).path.lstrip("/").partition("/")
        origins = {f"http://{host}" for host in hosts} | ({None} if self.command == "GET" else set())
        if self.headers.get("Host") not in hosts or origin not in origins:
            self._refuse(HTTPStatus.FORBIDDEN, "a request from another site")
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.NOT_FOUND, "no such page: use the address that the terminal shows")
        else:
            return path
        return None

    def _answer(self, make: Callable[[], Mapping[str, Any]]) -> None:
        try:
            self._send(HTTPStatus.OK, json.dumps(make()).encode(), "application/json")
        except InvalidVerdictError as error:
            self._refuse(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        except RunError as error:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        self._send(status, json.dumps({"error": message}).encode(), "application/json")

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: addresses hold the token."""
