from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from text2sql_grpo.commands import options
from text2sql_grpo.commands.options import Count, Retries, Seconds, Temperature
from text2sql_grpo.config import Config, load_config
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.files import PARTIAL, locked, read_jsonl, write_jsonl
from text2sql_grpo.phrases import many
from text2sql_grpo.run_folder import config_around, episode_record
from text2sql_grpo.sft.trajectories import EpisodeFile, Keep, select_chats

if TYPE_CHECKING:
    from rich.console import Console

    from text2sql_grpo.rewards import Answer


def collect(
    *,
    out: Path,
    model_path: str | None = None,
    base_url: str | None = None,
    traces: Path | None = None,
    model: str | None = None,
    config: Path | None = None,
    questions: Path | None = None,
    num_questions: Count | None = None,
    samples: Count = 4,
    temperature: Temperature = 1.0,
    seed: int = 0,
    keep: list[Keep] | None = None,
    parallel: Count = 8,
    retries: Retries = 5,
    timeout_s: Seconds = 600.0,
    key_variable: str = "OPENAI_API_KEY",
    settings: Sequence[str] = (),
) -> int:
    """Roll out any model to episodes on disk.

    Exit code 1 if some are missing: the same command again tries only these. Example: `text2sql-grpo collect
    --model_path runs/my/merged --out episodes.jsonl --keep correct`

    Args:
        out: JSONL of episodes; continued if it is there.
        model_path: Model folder, such as RUN/merged, an adapter or a checkpoint, or Hub id.
        base_url: OpenAI-compatible endpoint; needs --model.
        traces: Folder with traces of vf-eval or a training, to select from; nothing is rolled out.
        model: Name of the model at --base_url.
        config: Default: config.yaml in the folder around --model_path.
        questions: Default: data.train of the config.
        num_questions: The first N; default: all.
        samples: Episodes of each question.
        temperature: 0 is greedy.
        seed: Random seed of sampling.
        keep: Write the chats that pass these filters next to --out, as NAME.FILTER.jsonl.
        parallel: Concurrent episodes at --base_url.
        retries: How often a failed request is sent again.
        timeout_s: Seconds for one request.
        key_variable: Environment variable of the endpoint's key.
    """
    options.check_one_of(model_path=model_path, base_url=base_url, traces=traces)
    with options.writing_to(out):
        if traces is not None:
            return _select_traces(traces, keep or (), out)
        options.check_served(base_url, model, config)
        options.check_models(model_path)
        run = load_config(config or config_around(str(model_path)), settings)
        console = options.quiet_console()
        from text2sql_grpo.evaluation.bench import Bench, UnansweredError, opened_model
        from text2sql_grpo.evaluation.endpoint import Endpoint
        from text2sql_grpo.reporting.counting import counting
        from text2sql_grpo.reporting.report_page import episodes_report, write_page
        from text2sql_grpo.rewards import RewardMix

        name = str(model_path or model)
        lock = locked(
            out.with_name(f".{out.name}.lock{PARTIAL}"),
            f"another collect is writing to this file ({out}): wait for its end, or choose another --out",
        )
        with Bench.open(run) as bench, lock:
            examples = bench.load(questions or run.data.train, limit=num_questions)
            episodes = EpisodeFile(out, _settings_of(run, name, temperature, seed))
            wanted = {(example.id, n): example for n in range(samples) for example in examples}
            todo = episodes.missing(wanted)
            failure = ""
            if todo:
                served = Endpoint(str(base_url), name, key_variable, parallel, retries, timeout_s)
                n_before = len(wanted) - len(todo)
                with counting("Collecting", len(wanted), console, done=n_before) as on_episode:

                    def write(place: int, answer: "Answer") -> None:
                        if answer.episode.stop_reason != "error":  # its tools died: no episode of the model
                            episodes.add(answer.record() | {"sample": todo[place][1], "model": name})
                        on_episode()

                    try:
                        bench.answer(
                            [wanted[key] for key in todo],
                            opened_model(model_path) if model_path else served,
                            temperature=temperature,
                            # A resumed call must not sample with the seeds of the first one.
                            seed=(seed + 1_000_003 * n_before) % 2**32,
                            rewards=RewardMix(run.rewards),
                            on_answer=write,
                        )
                    except UnansweredError as error:
                        failure = str(error)
            tools = bench.environment.sessions.tools if run.environment.protocol == "native" else None
        found = [episodes.records[key] for key in wanted if key in episodes.records]
        right = sum(record["strict"] for record in found)
        console.print(f"{len(found)} of {many(len(wanted), 'episode')}, {right} right: {out}", soft_wrap=True)
        rows = list(read_jsonl(out, "episodes", convert=episode_record))
        page = write_page(
            out.with_suffix(".html"), episodes_report(out.stem, rows, bench.environment.databases)
        )
        console.print(f"to read: {page}")
        _write_chats(found, keep or (), out, console, tools=tools)
        if len(found) < len(wanted):
            failure = failure or "an MCP server died"
            console.print(f"{failure}. Run the same command again for the rest.", soft_wrap=True)
    return int(len(found) < len(wanted))


def _select_traces(traces: Path, keep: Sequence[Keep], out: Path) -> int:
    from text2sql_grpo.integrations.verifiers.traces import trace_records
    from text2sql_grpo.reporting.terminal import TextConsole

    if not keep:
        raise ConfigError("--traces needs --keep: nothing is rolled out, so nothing else is written")
    console, records = TextConsole(), list(trace_records(traces))
    console.print(f"{len(records)} traces: {traces}", soft_wrap=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    _write_chats(records, keep, out, console)
    return 0


def _settings_of(config: Config, model: str, temperature: float, seed: int) -> dict[str, Any]:
    return {
        "model": model,
        "temperature": temperature,
        "seed": seed,
        "environment": asdict(config.environment),
        "rewards": config.rewards,
        "test_databases": config.grading.test_databases,
    }


def _write_chats(
    records: Sequence[dict[str, Any]],
    keep: Sequence[Keep],
    out: Path,
    console: "Console",
    *,
    tools: list[dict[str, Any]] | None = None,
) -> None:
    """Write the chats that pass each filter next to `out`, as `NAME.FILTER.jsonl`."""
    for name in keep:
        chats = select_chats(records, name)
        if tools is not None:
            chats = [chat | {"tools": tools} for chat in chats]
        path = out.with_suffix(f".{name}.jsonl")
        write_jsonl(path, chats)
        console.print(f"{len(chats)} chats ({name}): {path}", soft_wrap=True)
