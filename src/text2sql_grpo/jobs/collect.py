"""Collection of episodes of any model in the environment of a config, and of chats to train on."""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import set_seed

from text2sql_grpo.config import Config
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.errors import RunError, needs_extra
from text2sql_grpo.files import write_jsonl
from text2sql_grpo.jobs.setup import Workbench, open_workbench
from text2sql_grpo.models.cpu import inference_autocast
from text2sql_grpo.models.hardware import choose_threads
from text2sql_grpo.models.policy import load_policy
from text2sql_grpo.rewards import Judge, RewardMix
from text2sql_grpo.rollout.engine import run
from text2sql_grpo.training.progress import progress_bar
from text2sql_grpo.training.trajectories import EpisodeFile, Keep, select_chats

_SESSIONS_AT_ONCE = 1_000  # queued for the engine; they hold their prompts
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
class _Sample:
    example: Example
    number: int


def collect(
    config: Config,
    out: Path,
    source: str | Endpoint,
    *,
    console: Console,
    questions: Path | None = None,
    num_questions: int | None = None,
    samples: int = 4,
    temperature: float = 1.0,
    seed: int = 0,
    keep: Sequence[Keep] = (),
) -> int:
    """Play each question several times; resume an earlier call with the same file.

    Options: see `commands.collect`.

    Args:
        config: Config of data, environment, rewards and grading; its model is not used.
        out: JSONL of whole episodes, one line per sample, like `rollouts.jsonl`.
        source: A model folder or Hub id, or an endpoint.

    Returns:
        The exit code: 1 if episodes are missing, which another call tries again.

    Raises:
        RunError: Anything wrong with model, endpoint, config or data, or `out` cannot be written.
    """
    bench = open_workbench(config)
    examples = bench.load(questions or config.data.train, limit=num_questions)
    episodes = EpisodeFile(out, _settings(config, source, temperature, seed))
    wanted = {(example.id, n): _Sample(example, n) for n in range(samples) for example in examples}
    todo = [wanted[key] for key in episodes.missing(wanted)]
    failures: list[str] = []
    if todo:
        model = source if isinstance(source, str) else source.model
        max_rows = bench.environment.settings.observation.max_rows
        judge = Judge(bench.grader, bench.executor, RewardMix(config.rewards), max_rows_shown=max_rows)

        def write(sample: _Sample, episode: Episode) -> None:
            answer = judge.judge(episode, bench.databases.address(episode.example.database))
            episodes.add(answer.record() | {"sample": sample.number, "model": model})

        with closing(bench.environment), progress_bar(console) as bar:
            task = bar.add_task("Collecting", total=len(wanted), completed=len(wanted) - len(todo))

            def on_end() -> None:
                bar.advance(task)

            if isinstance(source, str):
                failures = _play_local(todo, bench, source, write, temperature, seed, on_end, console)
            else:
                failures = _play_served(todo, bench, source, write, temperature, seed, on_end)
    found = [record for record in episodes.records if (record["example"], record["sample"]) in wanted]
    right = sum(record["strict"] for record in found)
    console.print(f"{len(found)} of {len(wanted)} episodes, {right} right: {out}", soft_wrap=True)
    is_native = config.environment.protocol == "native"
    write_chats(found, keep, out, console, tools=bench.environment.tools if is_native else None)
    if failures:
        console.print(f"{len(failures)} episodes were not played, the first: {failures[0]}", soft_wrap=True)
        console.print("Run the same command again to try them once more.")
    return int(len(found) < len(wanted))


def _settings(config: Config, source: str | Endpoint, temperature: float, seed: int) -> dict[str, Any]:
    return {
        "model": source if isinstance(source, str) else source.model,
        "temperature": temperature,
        "seed": seed,
        "environment": json.loads(json.dumps(dataclasses.asdict(config.environment), default=str)),
        "rewards": config.rewards,
        "neighbours": config.grading.neighbours,
    }


def _play_local(
    todo: Sequence[_Sample],
    bench: Workbench,
    source: str,
    write: Callable[[_Sample, Episode], None],
    temperature: float,
    seed: int,
    on_end: Callable[[], None],
    console: Console,
) -> list[str]:
    choose_threads(console)
    loaded = load_policy(source)
    model = loaded.ready()
    chat = bench.chat(loaded.tokenizer, model)
    policy = bench.policy(model, chat, temperature=temperature)
    # A resumed call must not sample with the seed of the first one.
    set_seed(seed + 1_000_003 * todo[0].number + len(todo))
    failures: list[str] = []
    with (
        ThreadPoolExecutor(1, thread_name_prefix="judge") as judge,
        inference_autocast(model, bf16=bench.config.evaluation.bf16),
    ):
        sample_of: dict[int, _Sample] = {}
        written: list[Future[None]] = []

        def over(episode: Episode) -> None:
            if episode.stop_reason == "error":
                failures.append(f"the MCP server died (question {episode.example.id})")
            else:
                written.append(judge.submit(write, sample_of[id(episode)], episode))
            on_end()

        for start in range(0, len(todo), _SESSIONS_AT_ONCE):
            part = todo[start : start + _SESSIONS_AT_ONCE]
            sessions = [bench.environment.session(sample.example) for sample in part]
            sample_of |= {id(one.episode): sample for one, sample in zip(sessions, part, strict=True)}
            run(sessions, policy, chat, bench.budgets(model), on_end=over)
            for future in written:
                future.result()
            written.clear()
    return failures


def _play_served(
    todo: Sequence[_Sample],
    bench: Workbench,
    source: Endpoint,
    write: Callable[[_Sample, Episode], None],
    temperature: float,
    seed: int,
    on_end: Callable[[], None],
) -> list[str]:
    with needs_extra("collect", "--base_url"):
        import openai

        from text2sql_grpo.contrib import chat_endpoint
    client = openai.OpenAI(
        base_url=source.base_url,
        api_key=os.environ.get(source.key_variable) or "none",
        max_retries=source.retries,
        timeout=source.timeout_s,
    )

    def play(sample: _Sample) -> Episode:
        episode = chat_endpoint.play(
            sample.example,
            bench.environment,
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


def write_chats(
    records: Sequence[dict[str, Any]],
    keep: Sequence[Keep],
    out: Path,
    console: Console,
    *,
    tools: list[dict[str, Any]] | None = None,
) -> None:
    """Write the chats that pass each filter beside `out`, as `NAME.FILTER.jsonl`."""
    for name in keep:
        chats = select_chats(records, name)
        if tools is not None:
            chats = [chat | {"tools": tools} for chat in chats]
        path = out.with_suffix(f".{name}.jsonl")
        write_jsonl(path, chats)
        console.print(f"{len(chats)} chats ({name}): {path}", soft_wrap=True)
