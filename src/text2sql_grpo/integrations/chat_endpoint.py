"""Sessions played by a model behind an OpenAI-compatible endpoint: vLLM, llama.cpp, MLX's server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai

from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.environment.session import EnvironmentSettings, SQLSession
from text2sql_grpo.errors import RunError
from text2sql_grpo.integrations.tool_calls import call_text, read_arguments

# What asking again will not mend.
_REFUSALS = (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError)


class EndpointFailure(Exception):
    """The endpoint did not answer, or not as it should: nobody's episode."""


@dataclass(frozen=True)
class Sampling:
    """What a request asks for; `seed` is a hint that not every server takes."""

    model: str
    temperature: float
    seed: int


def play(
    session: SQLSession,
    client: openai.OpenAI,
    sampling: Sampling,
    settings: EnvironmentSettings,
    tools: Sequence[dict[str, Any]],
) -> Episode:
    """Plays a session to its end; token limits hold as far as the endpoint counts tokens.

    Args:
        client: It asks again after failures of connections and servers, as often as it is told to.
        tools: JSON schemas, sent with the native protocol.

    Raises:
        EndpointFailure: It failed for good, so that there is no episode.
        RunError: It refuses the key, the model or the address.
    """
    episode = session.episode
    messages: list[Any] = list(session.start())
    offered: Any = list(tools) if settings.protocol == "native" else openai.omit
    prompt_tokens, written = None, 0
    while True:
        left = settings.max_episode_tokens - written
        try:
            completion = client.chat.completions.create(
                model=sampling.model,
                messages=messages,
                temperature=sampling.temperature,
                seed=sampling.seed,
                max_tokens=max(1, min(settings.max_turn_tokens, left)),
                tools=offered,
            )
        except _REFUSALS as error:
            raise RunError(f"expected an endpoint that serves {sampling.model}, got: {error}") from error
        except openai.OpenAIError as error:
            raise EndpointFailure(f"{type(error).__name__}: {error}") from error
        if not completion.choices:
            raise EndpointFailure("an answer without choices")
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
        calls = choice.message.tool_calls or []
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": reply["content"]} for call in calls
        ] or [{"role": "user", "content": reply["content"]}]


def _text(message: Any) -> str:
    """An assistant message as the protocols read it: thinking, text, and calls that the server parsed."""
    thinking = getattr(message, "reasoning_content", None)
    calls = [
        call_text(call.function.name, read_arguments(call.function.arguments))
        for call in message.tool_calls or []
    ]
    return "".join([f"<think>{thinking}</think>" if thinking else "", message.content or "", *calls])
