"""A Hub of one process on 127.0.0.1 that speaks enough of the Hugging Face Hub's HTTP interface.

Enough means: what `huggingface_hub` and `from_pretrained` ask for when a model is pushed and read
back (account, create, info, preupload, LFS, commit, tree, resolve), with tokens and private repositories.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_the_right_one"
USER = "me"


@dataclass
class Repository:
    """One repository: its files at the newest commit, by path. A dataset's id begins with `datasets/`."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    num_commits: int = 0

    @property
    def sha(self) -> str:
        return hashlib.sha1(str(self.num_commits).encode()).hexdigest()


@dataclass
class Hub:
    """What the server holds and what it was asked."""

    endpoint: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)  # LFS objects by sha256
    requests: list[str] = field(default_factory=list)  # "METHOD /path"
    lock: threading.Lock = field(default_factory=threading.Lock)
    space: int = 1_000  # LFS objects that it takes; a further one is refused
    hangs_when_full: bool = False  # instead of refusing
    is_hanging: threading.Event = field(default_factory=threading.Event)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A Hub that answers on a free port of 127.0.0.1 until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output clean."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        body = self._read_body()
        if match := re.fullmatch(r"/lfs/(\w+)", path):  # as at the real Hub, the address is the permission
            assert hashlib.sha256(body).hexdigest() == match[1]
            with self.hub.lock:
                is_full = len(self.hub.stored) >= self.hub.space
                if not is_full:
                    self.hub.stored[match[1]] = body
            if is_full and self.hub.hangs_when_full:
                self.hub.is_hanging.set()
                self.rfile.read(1)  # answers never; ends when the other side is gone
                self.close_connection = True
                return None
            return self._refuse(413, message="no more space") if is_full else self._send(200)
        authorization = self.headers.get("authorization")
        if authorization not in (None, f"Bearer {TOKEN}"):
            return self._refuse(401, message="Invalid credentials in Authorization header")
        is_user = authorization is not None
        if path == "/api/whoami-v2":
            return self._send_json({"type": "user", "name": USER}) if is_user else self._refuse(401)
        if path == "/api/validate-yaml":
            return self._send_json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body)) if is_user else self._refuse(401)
        for pattern, answer, is_write in _ROUTES:
            if match := re.fullmatch(pattern, path):
                repository = self.hub.repositories.get(match["id"])
                if repository is None or (not is_user and (repository.private or is_write)):
                    return self._refuse(404 if is_user else 401, code="RepoNotFound")
                return answer(self, match, repository, body)
        return self._refuse(501, message=f"this Hub does not know {self.command} {path}")

    def _create(self, wanted: dict[str, Any]) -> None:
        owner = wanted.get("organization") or USER
        if owner != USER:
            return self._refuse(403, message=f"no rights in the namespace {owner}")
        prefix = "datasets/" if wanted.get("type") == "dataset" else ""
        repo_id = f"{prefix}{owner}/{wanted['name']}"
        existed = repo_id in self.hub.repositories
        if not existed:
            self.hub.repositories[repo_id] = Repository(private=wanted.get("visibility") == "private")
        return self._send_json({"url": f"{self.hub.endpoint}/{repo_id}"}, status=409 if existed else 200)

    def _settings(self, match: re.Match[str], repository: Repository, body: bytes) -> None:
        repository.private = json.loads(body)["visibility"] == "private"
        return self._send_json({})

    def _info(self, match: re.Match[str], repository: Repository, body: bytes) -> None:
        files = [{"rfilename": path} for path in sorted(repository.files)]
        about = {"id": match["id"], "sha": repository.sha, "private": repository.private, "siblings": files}
        return self._send_json(about | {"id": about["id"].removeprefix("datasets/")})

    def _tree(self, match: re.Match[str], repository: Repository, body: bytes) -> None:
        folder = match["folder"] + "/" if match["folder"] else ""
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in sorted(repository.files.items())
            if path.startswith(folder)
        ]
        if folder and not entries:
            return self._refuse(404, code="EntryNotFound")
        return self._send_json(entries)

    def _preupload(self, match: re.Match[str], repository: Repository, body: bytes) -> None:
        answers = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".png")) else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        return self._send_json({"files": answers})

    def _lfs_batch(self, match: re.Match[str], repository: Repository, body: bytes) -> None:
        objects = [
            wanted
            if wanted["oid"] in self.hub.stored  # as at the real Hub: nothing to do for what it has
            else {**wanted, "actions": {"upload": {"href": f"{self.hub.endpoint}/lfs/{wanted['oid']}"}}}
            for wanted in json.loads(body)["objects"]
        ]
        return self._send_json({"transfer": "basic", "objects": objects})

    def _commit(self, match: re.Match[str], repository: Repository, body: bytes) -> None:
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                repository.files[value["path"]] = self.hub.stored[value["oid"]]
            elif operation["key"] == "deletedFile":
                del repository.files[value["path"]]
        repository.num_commits += 1
        url = f"{self.hub.endpoint}/{match['id']}/commit/{repository.sha}"
        return self._send_json({"commitUrl": url, "commitOid": repository.sha})

    def _resolve(self, match: re.Match[str], repository: Repository, body: bytes) -> None:
        content = repository.files.get(match["path"])
        headers = {"X-Repo-Commit": repository.sha}
        if content is None:
            return self._refuse(404, code="EntryNotFound", headers=headers)
        headers["ETag"] = f'"{hashlib.sha256(content).hexdigest()}"'
        return self._send(200, content, headers)

    def _read_body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _refuse(
        self, status: int, *, code: str = "", message: str = "", headers: dict[str, str] | None = None
    ) -> None:
        reasons = {"X-Error-Code": code, "X-Error-Message": message}
        self._send(status, headers=(headers or {}) | {name: text for name, text in reasons.items() if text})

    def _send_json(self, content: Any, *, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


_ID = r"(?P<id>(datasets/)?[\w.-]+/[\w.-]+)"
_API = r"/api/(models/)?" + _ID
_ROUTES = (
    (rf"{_API}", _Handler._info, False),
    (rf"{_API}/revision/[\w.-]+", _Handler._info, False),
    (rf"{_API}/tree/[\w.-]+(/(?P<folder>.+))?", _Handler._tree, False),
    (rf"{_API}/settings", _Handler._settings, True),
    (rf"{_API}/preupload/main", _Handler._preupload, True),
    (rf"{_API}/commit/main", _Handler._commit, True),
    (rf"/{_ID}\.git/info/lfs/objects/batch", _Handler._lfs_batch, True),
    (rf"/{_ID}/resolve/[\w.-]+/(?P<path>.+)", _Handler._resolve, False),
)
