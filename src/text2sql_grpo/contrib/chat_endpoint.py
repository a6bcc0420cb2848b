"""Sessions played by a model behind an OpenAI-compatible endpoint: vLLM, llama.cpp, MLX's server."""

import json
from typing import Any

import openai

from text2sql_grpo.contrib.tool_calls import reply_messages, turn_text
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.errors import RunError

# Errors that a retry cannot fix.
_REFUSALS = (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError)


class EndpointFailure(Exception):
    """The endpoint failed or returned an invalid answer: no episode was recorded."""


class RequestRefused(EndpointFailure):
    """The endpoint refused this request, such as a chat longer than its context; others may succeed."""


def play(
    example: Example,
    environment: SQLEnvironment,
    client: openai.OpenAI,
    *,
    model: str,
    temperature: float,
    seed: int,
) -> Episode:
    """Play a question to its end; token limits hold as far as the endpoint counts tokens.

    Args:
        client: Client with its own retries after failures of connections and servers.
        seed: Random seed of sampling; not every server supports it.

    Raises:
        EndpointFailure: The endpoint failed for good; there is no episode.
        RunError: The endpoint refused the key, the model or the address.
    """
    session, settings = environment.session(example), environment.settings
    episode = session.episode
    messages: list[Any] = list(session.start())
    offered: Any = environment.tools if settings.protocol == "native" else openai.omit
    prompt_tokens, written = None, 0
    while True:
        left = settings.max_episode_tokens - written
        try:
            completion = client.chat.completions.create(
                model=model,
                messages=messages,
                temperature=temperature,
                seed=seed,
                max_tokens=max(1, min(settings.max_turn_tokens, left)),
                tools=offered,
            )
        except _REFUSALS as error:
            raise RunError(f"the endpoint refused {model}: {error}") from error
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            raise RequestRefused(f"{type(error).__name__}: {error}") from error
        except (openai.OpenAIError, json.JSONDecodeError) as error:
            raise EndpointFailure(f"{type(error).__name__}: {error}") from error
        if not getattr(completion, "choices", None):  # openai returns invalid JSON as text
            raise EndpointFailure(f"an answer without choices: {str(completion)[:200]}")
        choice, usage = completion.choices[0], completion.usage
        if usage is not None:
            prompt_tokens = usage.prompt_tokens if prompt_tokens is None else prompt_tokens
            written = usage.prompt_tokens + usage.completion_tokens - prompt_tokens
        if choice.finish_reason == "length" or written > settings.max_episode_tokens:
            episode.stop_reason, episode.is_masked = "budget", True
            return episode
        reply = session.step(_text(choice.message))
        if reply is None:
            return episode
        messages.append(choice.message.model_dump(exclude_none=True))
        messages += reply_messages(choice.message.tool_calls, reply["content"])


def _text(message: Any) -> str:
    # llama.cpp and SGLang name it `reasoning_content`, vLLM and OpenRouter `reasoning`.
    thinking = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return turn_text(thinking, message.content, calls)
