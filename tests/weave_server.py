"""W&B's Weave on a port of this machine: enough for its SDK to open a project and send calls."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_ANSWERS: dict[str, dict[str, Any]] = {
    "/server_info": {"min_required_weave_python_version": "0.0.1", "trace_server_version": "99.0.0"},
    "/obj/create": {"digest": "d" * 43},
    "/file/create": {"digest": "d" * 43},
    "/graphql": {
        "data": {
            "viewer": {"username": "me", "defaultEntity": {"name": "me"}},
            "project": {"name": "text2sql-grpo"},
        }
    },
}


@dataclass
class Weave:
    """What the server was sent."""

    url: str = ""
    requests: list[tuple[str, bytes]] = field(default_factory=list)

    def calls(self) -> list[dict[str, Any]]:
        """Every finished call, in the order of its start."""
        found: list[dict[str, Any]] = []
        for path, body in self.requests:
            if path.endswith("/calls/complete"):
                found += json.loads(body)["batch"]
        return sorted(found, key=lambda call: call["started_at"])


@contextmanager
def running_weave() -> Iterator[Weave]:
    """A server that answers until the block ends."""
    weave = Weave()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            weave.requests.append((self.path, body))
            answer = json.dumps(_ANSWERS.get(self.path, {})).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    weave.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield weave
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
