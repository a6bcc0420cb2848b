"""The chat-completions protocol of OpenAI on a port of this machine: a model behind it, or a script."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import PreTrainedModel

from text2sql_grpo.rollout.chat_format import ChatFormat


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing of a client that went away: the next test may look at what is printed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@dataclass(frozen=True)
class Answer:
    """One answer of a model.

    Attributes:
        message: The assistant message.
        prompt_tokens: Tokens that were read.
        completion_tokens: Tokens that were written.
        has_ended: False if it was cut at the limit of tokens.
    """

    message: dict[str, Any]
    prompt_tokens: int
    completion_tokens: int
    has_ended: bool = True


@contextmanager
def served(
    answer: Callable[[dict[str, Any]], Answer | str],
    *,
    fails: Callable[[dict[str, Any]], bool | str] = lambda request: False,
    status: int = 500,
) -> Iterator[str]:
    """The base URL of an endpoint that answers requests, one at a time.

    Args:
        answer: A string is sent as a page of HTML.
        fails: True, or the message of an error that it answers instead; asked of several requests at once.
        status: Of that error.
    """
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if error := fails(request):
                self._send(status, "application/json", json.dumps({"error": {"message": str(error)}}))
                return
            with lock:
                said = answer(request)
            if isinstance(said, str):
                self._send(200, "text/html", said)
            else:
                self._send(200, "application/json", json.dumps(_completion(request, said)))

        def _send(self, status: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on stderr."""

    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def greedy(model: PreTrainedModel, chat: ChatFormat) -> Callable[[dict[str, Any]], Answer]:
    """The most probable answer of a model."""

    def answer(request: dict[str, Any]) -> Answer:
        prompt = chat.prompt_ids(request["messages"])
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=request["max_tokens"],
            eos_token_id=sorted(chat.eos_token_ids),
            pad_token_id=chat.tokenizer.pad_token_id,
        )
        sampled = out[0, len(prompt) :].tolist()
        return Answer(
            {"role": "assistant", "content": chat.text(sampled)},
            prompt_tokens=len(prompt),
            completion_tokens=len(sampled),
            has_ended=sampled[-1] in chat.eos_token_ids,
        )

    return answer


def _completion(request: dict[str, Any], answer: Answer) -> dict[str, Any]:
    reason = "tool_calls" if answer.message.get("tool_calls") else "stop"
    return {
        "id": "completion",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request["model"],
        "choices": [
            {
                "index": 0,
                "message": answer.message,
                "finish_reason": reason if answer.has_ended else "length",
            }
        ],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }
