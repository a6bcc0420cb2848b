"""Collection of episodes of any model in the environment of a config, and of chats to train on."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import set_seed

from text2sql_grpo.config import Config
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.episode import Episode
from text2sql_grpo.evaluation.bench import Workbench, open_workbench
from text2sql_grpo.evaluation.endpoint import Endpoint, served_episodes
from text2sql_grpo.files import write_jsonl
from text2sql_grpo.models.cpu import inference_autocast
from text2sql_grpo.models.loaded_policy import load_policy
from text2sql_grpo.reporting.progress import progress_bar
from text2sql_grpo.rewards import Judge, RewardMix
from text2sql_grpo.rollout.engine import run
from text2sql_grpo.sft.trajectories import EpisodeFile, Keep, select_chats

_SESSIONS_AT_ONCE = 1_000  # queued for the engine; they hold their prompts


@dataclasses.dataclass(frozen=True)
class Sample:
    """One of several episodes of a question."""

    example: Example
    number: int = 0


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
    wanted = {(example.id, n): Sample(example, n) for n in range(samples) for example in examples}
    todo = [wanted[key] for key in episodes.missing(wanted)]
    failures: list[str] = []
    if todo:
        model = source if isinstance(source, str) else source.model
        max_rows = bench.environment.settings.observation.max_rows
        judge = Judge(bench.grader, bench.executor, RewardMix(config.rewards), max_rows_shown=max_rows)

        def write(sample: Sample, episode: Episode) -> None:
            answer = judge.judge(episode, bench.databases.address(episode.example.database))
            episodes.add(answer.record() | {"sample": sample.number, "model": model})

        with closing(bench.environment), progress_bar(console) as bar:
            task = bar.add_task("Collecting", total=len(wanted), completed=len(wanted) - len(todo))

            def on_end() -> None:
                bar.advance(task)

            if isinstance(source, str):
                failures = _play_local(todo, bench, source, write, temperature, seed, on_end, console)
            else:

                def over(place: int, episode: Episode) -> None:
                    write(todo[place], episode)
                    on_end()

                examples = [sample.example for sample in todo]
                seed += len(wanted) - len(todo)  # a resumed call samples anew
                failures = served_episodes(
                    examples, bench.environment, source, temperature=temperature, seed=seed, on_end=over
                )
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
    todo: Sequence[Sample],
    bench: Workbench,
    source: str,
    write: Callable[[Sample, Episode], None],
    temperature: float,
    seed: int,
    on_end: Callable[[], None],
    console: Console,
) -> list[str]:
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
        sample_of: dict[int, Sample] = {}
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
