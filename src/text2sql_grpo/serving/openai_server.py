"""OpenAI-compatible server whose model is the whole agent, and its page.

`/v1/chat/completions` answers the last message; exploratory queries are sent as reasoning, in both fields
that clients read (`reasoning` and `reasoning_content`). Databases are opened read-only, as in training.
"""

import asyncio
import hmac
import json
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any
from uuid import uuid4

from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from text2sql_grpo.environment.episode import Action
from text2sql_grpo.errors import UNREADABLE, ArgumentError, DataError, RunError
from text2sql_grpo.files import append_jsonl
from text2sql_grpo.reporting.shown import outcome_record
from text2sql_grpo.serving.agent import Agent, Exchange, Reply
from text2sql_grpo.serving.answer_text import look_text, reply_record, reply_text
from text2sql_grpo.serving.live_engine import MAX_SESSIONS
from text2sql_grpo.sql.lru import Lru

MAX_BODY_BYTES = 1_000_000
MAX_RUNNING = 64  # questions that run or wait; more get 429
MAX_LOOK_ROWS = 500  # of an exploratory query on the page
MAX_CLIENTS = 10_000  # whose rates are kept
# Parameters of a chat that would change the form of the reply, with the values that do not.
_FORMS: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logprobs": (None, False),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
}
_SIDE_TASK = "### Task:"  # Open WebUI asks its model for titles, tags and follow-ups of a chat
_FILES = {
    "": ("serving/ask.html", "text/html"),
    "ask.css": ("serving/ask.css", "text/css"),
    "ask.js": ("serving/ask.js", "text/javascript"),
    "preact.js": ("reporting/preact.js", "text/javascript"),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_Handle = Callable[[Request], Awaitable[Response]]
_logger = logging.getLogger(__name__)


@dataclass
class AgentServer:
    """Answers of HTTP requests by an agent.

    Attributes:
        token: Token that each request but those for the page's files and `/health` must bear.
        folder: Where `feedback.jsonl` and `audit.jsonl` are written.
        per_minute: Questions of one client in a minute.
    """

    agent: Agent
    token: str
    folder: Path
    per_minute: int = 120
    running: int = 0
    _times: Lru[str, deque[float]] = field(default_factory=lambda: Lru(MAX_CLIENTS))

    def app(self, allowed_hosts: Sequence[str] = ()) -> Starlette:
        """Application; requests for other hosts than this machine and `allowed_hosts` are refused."""
        with suppress(OSError):  # `_log` warns
            (self.folder / "audit.jsonl").touch(mode=0o600)
        hosts = ["127.0.0.1", "localhost", *allowed_hosts]
        routes = [Route(f"/{name}", self._file) for name in _FILES]
        routes += [
            Route("/health", self._health),
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/chat/completions", self._guarded(self._complete), methods=["POST"]),
            Route("/api/about", self._guarded(self._about)),
            Route("/api/ask", self._guarded(self._ask), methods=["POST"]),
            Route("/api/run", self._guarded(self._run), methods=["POST"]),
            Route("/api/feedback", self._guarded(self._feedback), methods=["POST"]),
        ]
        return Starlette(
            lifespan=_with_threads,
            routes=routes,
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
            exception_handlers=dict.fromkeys((HTTPException, RunError, ClientDisconnect), _failed),
        )

    def _guarded(self, handle: _Handle) -> _Handle:
        """Check token, origin and rate of a request before it is handled."""

        async def guarded(request: Request) -> Response:
            self._check(request)
            return await handle(request)

        return guarded

    def _check(self, request: Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self.token.encode()):
            reason = "missing or wrong token: send it as the API key (Authorization: Bearer TOKEN)"
            raise HTTPException(401, reason)
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            raise HTTPException(403, "a request from a page of another site")
        if request.method != "POST":
            return
        client, now = _client(request), time.monotonic()
        times = self._times.get(client) or deque(maxlen=self.per_minute)
        self._times.put(client, times)
        if len(times) == self.per_minute and now - times[0] <= 60:
            wait = {"Retry-After": str(math.ceil(60 - (now - times[0])))}
            raise HTTPException(429, f"more than {self.per_minute} requests in a minute", wait)
        times.append(now)

    async def _file(self, request: Request) -> Response:
        file, kind = _FILES[request.url.path.lstrip("/")]
        content = (files("text2sql_grpo") / file).read_bytes()
        return Response(content, media_type=kind, headers=_HEADERS)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "running": self.running})

    async def _models(self, request: Request) -> Response:
        model = {"id": self.agent.name, "object": "model", "created": 0, "owned_by": "text2sql-grpo"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _about(self, request: Request) -> Response:
        schema = await run_in_threadpool(self.agent.environment.sessions.schema_text, self.agent.database)
        return JSONResponse({"model": self.agent.name, "database": self.agent.database, "schema": schema})

    async def _complete(self, request: Request) -> Response:
        body = await _body(request)
        question, history = _question(body.get("messages"))
        head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": self.agent.name}
        reply: Reply | None = None
        for name, accepted in _FORMS.items():
            if body.get(name) not in accepted and not question.startswith(_SIDE_TASK):
                raise HTTPException(400, f"{name} must be left out here, got {body[name]!r:.80}")
        if question.startswith(_SIDE_TASK):
            text = json.dumps({"title": history[0].question[:60] if history else "Question"})
        elif body.get("stream"):
            return EventSourceResponse(self._stream(head, question, history, request, body), headers=_HEADERS)
        else:
            async with aclosing(self._events(question, history, request)) as events:
                *_, last = [event async for event in events]
            assert isinstance(last, Reply)
            reply, text = last, reply_text(last)
        message = {"role": "assistant", "content": text}
        if reply is not None:
            looks = "".join(map(look_text, filter(_is_look, reply.asked.episode.actions)))
            message |= {"reasoning": looks, "reasoning_content": looks} if looks else {}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse(
            head | {"object": "chat.completion", "choices": [choice], "usage": _usage(reply)},
            headers=_HEADERS,
        )

    async def _stream(
        self,
        head: dict[str, Any],
        question: str,
        history: Sequence[Exchange],
        request: Request,
        body: dict[str, Any],
    ) -> AsyncIterator[str]:
        def chunk(delta: dict[str, Any], finish: str | None = None) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            return json.dumps(head | {"object": "chat.completion.chunk", "choices": [choice]})

        yield chunk({"role": "assistant", "content": ""})
        reply = None
        try:
            async with aclosing(self._events(question, history, request)) as events:
                async for event in events:
                    if isinstance(event, Reply):
                        reply, text = event, reply_text(event)
                    else:
                        look = look_text(event)
                        yield chunk({"reasoning": look, "reasoning_content": look})
        except ClientDisconnect:
            return
        except (RunError, HTTPException) as error:
            text = f"There is no answer: {_reason(error)}"
        yield chunk({"content": text})
        yield chunk({}, "stop")
        if isinstance(options := body.get("stream_options"), dict) and options.get("include_usage"):
            usage = {"object": "chat.completion.chunk", "choices": [], "usage": _usage(reply)}
            yield json.dumps(head | usage)
        yield "[DONE]"

    async def _ask(self, request: Request) -> Response:
        """Events of an answer for the page, one JSON object each."""
        body = await _body(request)
        history = _last_exchange(body.get("history"))

        async def events() -> AsyncIterator[str]:
            try:
                question = str(body.get("question", ""))
                async with aclosing(self._events(question, history, request)) as found:
                    async for event in found:
                        if isinstance(event, Reply):
                            yield json.dumps({"answer": reply_record(event)})
                        else:
                            result = outcome_record(event.outcome, MAX_LOOK_ROWS, is_for_page=True)
                            look = {"sql": event.sql, "error": event.error, "result": result}
                            yield json.dumps({"look": look})
            except ClientDisconnect:
                return
            except (RunError, HTTPException) as error:
                yield json.dumps({"error": _reason(error)})

        return EventSourceResponse(events(), headers=_HEADERS)

    async def _run(self, request: Request) -> Response:
        sql = str((await _body(request)).get("sql", ""))
        outcome = await run_in_threadpool(self.agent.run, sql)
        self._log(request, question=None, sql=sql, status=outcome.status)
        record = outcome_record(outcome, is_for_page=True)
        text = json.dumps(record)  # in ASCII: cells may hold half a letter
        return Response(text, media_type="application/json", headers=_HEADERS)

    async def _feedback(self, request: Request) -> Response:
        body = await _body(request)
        question, sql, is_right = body.get("question"), body.get("sql"), body.get("right")
        if not isinstance(question, str) or not isinstance(sql, str) or not isinstance(is_right, bool):
            raise HTTPException(400, "feedback needs question and sql as texts, and right as true or false")
        await run_in_threadpool(self.agent.save_feedback, self.folder, question, sql, is_right=is_right)
        return JSONResponse({"saved": True}, headers=_HEADERS)

    async def _events(
        self, question: str, history: Sequence[Exchange], request: Request
    ) -> AsyncGenerator[Action | Reply]:
        """Turns before an answer as they are taken, then the answer; a client that leaves stops it."""
        if self.running >= MAX_RUNNING:
            raise HTTPException(429, f"{MAX_RUNNING} questions run already", {"Retry-After": "5"})
        self.running += 1
        turns: asyncio.Queue[Action] = asyncio.Queue()
        loop, is_cancelled = asyncio.get_running_loop(), Event()

        def on_action(action: Action) -> None:
            if _is_look(action):
                loop.call_soon_threadsafe(turns.put_nowait, action)

        started, status, sql = time.monotonic(), "failed", None
        asking = asyncio.to_thread(
            self.agent.ask, question, history, on_action=on_action, is_cancelled=is_cancelled
        )
        answer = asyncio.create_task(asking)
        try:
            while not (answer.done() and turns.empty()):
                try:
                    turn = await asyncio.wait_for(turns.get(), timeout=0.1)
                except TimeoutError:
                    if not answer.done() and await request.is_disconnected():
                        status = "withdrawn"
                        raise ClientDisconnect from None
                else:
                    yield turn
            reply = answer.result()
            status, sql = reply.asked.failure or "ok", reply.asked.episode.final_sql
            yield reply
        finally:
            is_cancelled.set()
            answer.cancel()  # asyncio would log an exception that is never retrieved
            self.running -= 1
            seconds = round(time.monotonic() - started, 3)
            self._log(request, question=question, sql=sql, status=status, seconds=seconds)

    def _log(self, request: Request, **fields: Any) -> None:
        record = {"time": int(time.time()), "client": _client(request), **fields}
        try:
            append_jsonl(self.folder / "audit.jsonl", [record])
        except RunError as error:
            _logger.warning("the audit log was not written: %s", error)


@asynccontextmanager
async def _with_threads(app: Starlette) -> AsyncIterator[None]:
    """Give the event loop as many threads as the engine takes sessions; by default, few cores have fewer."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MAX_SESSIONS))  # the loop ends it
    yield


async def _body(request: Request) -> dict[str, Any]:
    """JSON object of a request, which is refused once it is longer than `MAX_BODY_BYTES`."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MAX_BODY_BYTES:
            raise HTTPException(413, f"a request must be at most {MAX_BODY_BYTES} bytes")
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise HTTPException(400, "a request must be a JSON object")
    return body


def _question(messages: Any) -> tuple[str, list[Exchange]]:
    """Last message of a chat, and the questions before it with their queries."""
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise HTTPException(400, "messages must be a list of objects with role and content")
    said = [(str(one.get("role")), _text(one.get("content"))) for one in messages]
    said = [(role, text) for role, text in said if role in ("user", "assistant")]
    if not said or said[-1][0] != "user" or not said[-1][1].strip():
        raise HTTPException(400, "the last message must be a question of the user")
    history = []
    for (role, question), (answerer, answer) in pairwise(said):
        if (role, answerer) == ("user", "assistant"):
            sql = answer.partition("```sql\n")[2].partition("\n```")[0]
            history.append(Exchange(question, sql or None))
    return said[-1][1], history


def _last_exchange(history: Any) -> list[Exchange]:
    """The last question of the page's history, with its query; none of an empty one."""
    if not history:
        return []
    last = history[-1] if isinstance(history, list) else None
    question, sql = (last.get("question"), last.get("sql")) if isinstance(last, dict) else (None, None)
    if not isinstance(question, str) or not isinstance(sql, str | None):
        raise HTTPException(400, "history must be a list of objects with question and sql as texts")
    return [Exchange(question, sql)]


def _text(content: Any) -> str:
    if isinstance(content, list):
        found = [part.get("text") for part in content if isinstance(part, dict)]
        texts = [text for text in found if isinstance(text, str)]
        if len(texts) < len(content):
            raise HTTPException(400, "a message must be of text: its other parts, as images, are not read")
        return "\n".join(texts)
    return content if isinstance(content, str) else ""


def _is_look(action: Action) -> bool:
    return action.kind != "submit_sql"


def _usage(reply: Reply | None) -> dict[str, int]:
    prompt, sampled = (reply.prompt_tokens, reply.completion_tokens) if reply else (0, 0)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _client(request: Request) -> str:
    return request.client.host if request.client else ""


def _reason(error: Exception) -> str:
    if isinstance(error, DataError):  # names the path or the server of the database
        _logger.error("%s", error)
        return UNREADABLE
    return error.detail if isinstance(error, HTTPException) else str(error)


async def _failed(request: Request, error: Exception) -> Response:
    """Error in the form of OpenAI's API."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    status, headers = 400 if isinstance(error, ArgumentError) else 503, _HEADERS
    if isinstance(error, HTTPException):
        status, headers = error.status_code, {**_HEADERS, **(error.headers or {})}
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    reason = _reason(error)
    if status == 404:
        reason = f"nothing at {request.url.path}: the API has /v1/chat/completions and /v1/models"
    record = {"message": reason, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": record}, status, headers)
