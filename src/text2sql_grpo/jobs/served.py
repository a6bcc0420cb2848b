"""Episodes of a model behind an OpenAI-compatible endpoint, several at once."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.errors import RunError, needs_extra

_PATIENCE = 4  # failures of an endpoint in a row; at least `Endpoint.parallel`


@dataclass(frozen=True)
class Endpoint:
    """Endpoint of a served model; see the options of `commands.collect`."""

    base_url: str
    model: str
    key_variable: str = "OPENAI_API_KEY"
    parallel: int = 8
    retries: int = 5
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Sample:
    """One of several episodes of a question."""

    example: Example
    number: int = 0


def play_served(
    todo: Sequence[Sample],
    environment: SQLEnvironment,
    source: Endpoint,
    write: Callable[[Sample, Episode], None],
    *,
    temperature: float,
    seed: int,
    on_end: Callable[[], None],
) -> list[str]:
    """Play each sample, with the seed of its number; hand over each episode when it ends, in one thread.

    Returns:
        Failures of samples that were not played.

    Raises:
        RunError: The endpoint refused the key or the model, or failed several times in a row.
    """
    with needs_extra("endpoints", "--base_url"):
        import openai

        from text2sql_grpo.contrib import chat_endpoint
    client = openai.OpenAI(
        base_url=source.base_url,
        api_key=os.environ.get(source.key_variable) or "none",
        max_retries=source.retries,
        timeout=source.timeout_s,
    )

    def play(sample: Sample) -> Episode:
        episode = chat_endpoint.play(
            sample.example,
            environment,
            client,
            model=source.model,
            temperature=temperature,
            seed=seed + sample.number,
        )
        if episode.stop_reason == "error":
            raise chat_endpoint.EndpointFailure(f"the MCP server died (question {episode.example.id})")
        return episode

    failures: list[str] = []
    in_a_row = 0
    pool = ThreadPoolExecutor(source.parallel, thread_name_prefix="episode")
    try:
        samples = {pool.submit(play, sample): sample for sample in todo}
        for future in as_completed(samples):
            try:
                write(samples.pop(future), future.result())
                in_a_row = 0
            except chat_endpoint.EndpointFailure as failure:
                failures.append(str(failure))
                in_a_row += not isinstance(failure, chat_endpoint.RequestRefused)
                if in_a_row >= max(_PATIENCE, source.parallel):
                    raise RunError(
                        f"the endpoint failed {in_a_row} times in a row: {failure} ({source.base_url})"
                    ) from failure
            on_end()
    finally:
        pool.shutdown(cancel_futures=True)
        client.close()
    return failures
