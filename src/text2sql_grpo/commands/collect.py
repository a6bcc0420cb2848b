from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from text2sql_grpo.commands import options
from text2sql_grpo.commands.options import Count, Seconds, Temperature
from text2sql_grpo.errors import ConfigError
from text2sql_grpo.run_folder import config_around


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
    keep: list[Literal["correct", "best_of_n", "shortest_correct"]] | None = None,
    parallel: Count = 8,
    retries: Count = 5,
    timeout_s: Seconds = 600.0,
    key_variable: str = "OPENAI_API_KEY",
    settings: Sequence[str] = (),
) -> int:
    """Roll out any model to episodes on disk.

    Args:
        out: JSONL of episodes; continued if it is there.
        model_path: Model folder, such as RUN/merged, or Hub id.
        base_url: OpenAI-compatible endpoint; needs --model.
        traces: Folder with traces of vf-eval or a training, to select from; nothing is played.
        model: Name of the model at --base_url.
        config: Default: config.yaml in the folder around --model_path.
        questions: Default: data.train of the config.
        num_questions: The first N; default: all.
        samples: Episodes of each question.
        temperature: 0 is greedy.
        seed: Random seed of sampling.
        keep: Write the chats that pass these filters beside --out, as NAME.FILTER.jsonl.
        parallel: Concurrent episodes at --base_url.
        retries: Retries of one request.
        timeout_s: Seconds for one request.
        key_variable: Environment variable of the endpoint's key.
    """
    options.check_one_of(model_path=model_path, base_url=base_url, traces=traces)
    with options.writing_to(out):
        if traces is not None:
            from rich.console import Console

            from text2sql_grpo.integrations.verifiers.traces import trace_records
            from text2sql_grpo.run.collect_job import write_chats

            if not keep:
                raise ConfigError("--traces needs --keep: nothing is played, so nothing else is written")
            console, records = Console(), list(trace_records(traces))
            console.print(f"{len(records)} traces: {traces}", soft_wrap=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            write_chats(records, keep, out, console)
            return 0
        options.check_served(base_url, model, config)
        run = options.read_config(config or config_around(str(model_path)), settings)

        console = options.quiet_console()
        from text2sql_grpo.evaluation.endpoint import Endpoint
        from text2sql_grpo.run import collect_job as job

        endpoint = Endpoint(
            str(base_url),
            str(model),
            key_variable=key_variable,
            parallel=parallel,
            retries=retries,
            timeout_s=timeout_s,
        )
        return job.collect(
            run,
            out,
            model_path or endpoint,
            console=console,
            questions=questions,
            num_questions=num_questions,
            samples=samples,
            temperature=temperature,
            seed=seed,
            keep=keep or (),
        )
