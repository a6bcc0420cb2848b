"""Episodes of a model behind an OpenAI-compatible endpoint (vLLM, llama.cpp, MLX), several at once."""

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from text2sql_grpo.checked import AboveZero, NotNegative, Positive, checked
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.environment.tool_calls import reply_messages, turn_text
from text2sql_grpo.errors import RunError, needs_extra

if TYPE_CHECKING:  # loads torch
    from text2sql_grpo.rollout.turns import Session

_PATIENCE = 4  # failures of an endpoint in a row; at least `Endpoint.parallel`
_UNSUPPORTED = re.compile(r"unsupported|not supported|unrecognized|unknown|not permitted", re.IGNORECASE)
_Result = TypeVar("_Result")
_logger = logging.getLogger(__name__)


@checked
class Endpoint:
    """Endpoint of a served model.

    Attributes:
        base_url: URL of an OpenAI-compatible API, such as `http://localhost:8000/v1`.
        model: Name of the model there.
        key_variable: Environment variable of the key.
        parallel: Concurrent episodes.
        retries: Retries of one request after failures of connections and servers.
        timeout_s: Time limit of one request in seconds.
    """

    base_url: str
    model: str
    key_variable: str = "OPENAI_API_KEY"
    parallel: Positive = 8
    retries: NotNegative = 5
    timeout_s: AboveZero = 600.0


class EndpointFailure(Exception):
    """The endpoint failed or returned an invalid answer: no episode was recorded."""


class RequestRefused(EndpointFailure):
    """The endpoint refused this request, such as a chat longer than its context; others may succeed."""


def served_episodes(
    examples: Sequence[Example],
    environment: SQLEnvironment,
    endpoint: Endpoint,
    *,
    temperature: float,
    seed: int,
    on_end: Callable[[int, Episode], None],
) -> list[str]:
    """Roll out a served model on each question; token limits hold as far as the endpoint counts tokens.

    Args:
        seed: Random seed of sampling, one higher for each repetition of a question; not every server
            supports it.
        on_end: Called in this thread with the index of a question and its finished episode.

    Returns:
        Failures: a line for each question without an episode.

    Raises:
        RunError: The endpoint refused the key or the model, refused the first requests, or failed several
            times in a row.
    """
    failures: list[str] = []
    with closing(Client(endpoint, temperature)) as client:

        def episode(example: Example, seed: int) -> Episode:
            return served_episode(environment.session(example), environment, client, seed=seed)

        repetitions, tasks = Counter[str](), []
        for example in examples:
            tasks.append(partial(episode, example, seed + repetitions[example.id]))
            repetitions[example.id] += 1
        in_parallel(tasks, endpoint, on_end, lambda place, failure: failures.append(str(failure)))
    return failures


def in_parallel(
    tasks: Sequence[Callable[[], _Result]],
    endpoint: Endpoint,
    on_end: Callable[[int, _Result], None],
    on_failure: Callable[[int, EndpointFailure], None],
) -> None:
    """Run tasks that ask an endpoint, several at once.

    `on_end` and `on_failure` are called in this thread, with the index of a task.

    Raises:
        RunError: The endpoint refused the first requests, or failed several times in a row.
    """
    in_a_row, has_answered = 0, False
    pool = ThreadPoolExecutor(endpoint.parallel, thread_name_prefix="endpoint")
    try:
        places = {pool.submit(task): place for place, task in enumerate(tasks)}
        for future in as_completed(places):
            place = places.pop(future)
            try:
                on_end(place, future.result())
                in_a_row, has_answered = 0, True
            except EndpointFailure as failure:
                on_failure(place, failure)
                in_a_row += not (has_answered and isinstance(failure, RequestRefused))
                if in_a_row >= max(_PATIENCE, endpoint.parallel):
                    raise RunError(f"the endpoint failed {in_a_row} times in a row: {failure}") from failure
    finally:
        pool.shutdown(cancel_futures=True)


class Client:
    """Client of an endpoint, which leaves out the options of a request that the server does not support."""

    def __init__(self, endpoint: Endpoint, temperature: float) -> None:
        with needs_extra("endpoints", "a model behind an endpoint"):
            import openai
        self._openai, self._model, self._temperature = openai, endpoint.model, temperature
        self._limit, self._unsupported = "max_tokens", set[str]()
        self._client = openai.OpenAI(
            base_url=endpoint.base_url,
            api_key=os.environ.get(endpoint.key_variable) or "none",
            max_retries=endpoint.retries,
            timeout=endpoint.timeout_s,
        )

    def complete(self, messages: list[Any], *, max_tokens: int, seed: int, tools: Any) -> Any:
        """One completion of a chat.

        Raises:
            EndpointFailure: The endpoint failed for good.
            RunError: The endpoint refused the key, the model or the address.
        """
        openai = self._openai
        while True:
            wanted = {self._limit: max_tokens, "temperature": self._temperature, "seed": seed}
            options: dict[str, Any] = {k: v for k, v in wanted.items() if k not in self._unsupported}
            try:
                completion = self._client.chat.completions.create(
                    model=self._model, messages=messages, tools=tools or openai.omit, **options
                )
            except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
                raise RunError(f"the endpoint refused {self._model}: {error}") from error
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                if self._drops_option(options, str(error)):
                    continue
                raise RequestRefused(f"{type(error).__name__}: {error}") from error
            except (openai.OpenAIError, json.JSONDecodeError) as error:
                reason = str(error.__cause__ or "") or error  # openai's own is "Connection error."
                where = f"{type(error).__name__} of {self._client.base_url}"
                raise EndpointFailure(f"{where}: {reason}") from error
            if not getattr(completion, "choices", None):  # openai returns invalid JSON as text
                raise EndpointFailure(f"an answer without choices: {str(completion)[:200]}")
            return completion

    def _drops_option(self, sent: dict[str, Any], error: str) -> bool:
        """Rename or leave out an option that a refusal names as unsupported; False if it names none."""
        if not _UNSUPPORTED.search(error):
            return False
        if "max_tokens" in sent and "max_completion_tokens" in error:
            self._limit = "max_completion_tokens"
            return True
        for name in ("temperature", "seed"):
            if name in sent and re.search(rf"\b{name}\b", error):
                _logger.warning("the endpoint does not support %s; its own default holds", name)
                self._unsupported.add(name)
                return True
        return False

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def served_episode(
    session: "Session[Episode]", environment: SQLEnvironment, client: Client, *, seed: int
) -> Episode:
    """Roll out one session.

    Raises:
        EndpointFailure: The endpoint or an MCP server failed; there is no episode.
        RunError: See `Client.complete`.
    """
    settings, episode = environment.settings, session.episode
    messages: list[Any] = list(session.start())
    tools = environment.tools if settings.protocol == "native" else None
    prompt_tokens, written = None, 0
    while True:
        left = settings.max_episode_tokens - written
        limit = max(1, min(settings.max_turn_tokens, left))
        completion = client.complete(messages, max_tokens=limit, seed=seed, tools=tools)
        choice, usage = completion.choices[0], completion.usage
        if usage is not None:
            prompt_tokens = usage.prompt_tokens if prompt_tokens is None else prompt_tokens
            written = usage.prompt_tokens + usage.completion_tokens - prompt_tokens
        text, is_cut = _text(choice.message), choice.finish_reason == "length"
        is_turn_limit = is_cut and settings.max_turn_tokens < left
        if written > settings.max_episode_tokens or (
            is_cut and not (is_turn_limit and session.holds_action(text))
        ):
            episode.messages.append({"role": "assistant", "content": text})
            episode.stop_reason = "turn_length" if is_turn_limit else "budget"
            episode.is_masked = True
            return episode
        reply = session.step(text)
        if episode.stop_reason == "error":
            raise EndpointFailure(f"the MCP server died (question {episode.example.id})")
        if reply is None:
            return episode
        messages.append(choice.message.model_dump(exclude_none=True))
        messages += reply_messages(choice.message.tool_calls, reply["content"])


def _text(message: Any) -> str:
    # llama.cpp and SGLang name it `reasoning_content`, vLLM and OpenRouter `reasoning`.
    thinking = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return turn_text(thinking, message.content, calls)
