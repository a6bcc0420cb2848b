from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from text2sql_grpo.commands import options
from text2sql_grpo.commands.options import Count, Temperature
from text2sql_grpo.run_folder import config_around


def evaluate(
    *,
    model_path: str | None = None,
    base_url: str | None = None,
    model: str | None = None,
    num_samples: Count | None = None,
    config: Path | None = None,
    sets: list[str] | None = None,
    metrics: list[Literal["strict", "official", "ves"]] | None = None,
    temperature: Temperature = 0.0,
    seed: int = 0,
    out: Path | None = None,
    parallel: Count = 8,
    key_variable: str = "OPENAI_API_KEY",
    settings: Sequence[str] = (),
) -> int:
    """Answer held-out questions with a model.

    Args:
        model_path: Model folder, such as RUN/merged, or Hub id.
        base_url: OpenAI-compatible endpoint; needs --model and --config.
        model: Name of the model at --base_url.
        num_samples: N of each held-out set, shown whole.
        config: Default: config.yaml in the folder around the model.
        sets: Held-out sets; default: all of the config.
        metrics: Columns of the table; default: the accuracies strict and official. ves adds BIRD's R-VES:
            the time of right answers against that of the gold, run in turn 100 times each, one query at a
            time. It is a timing, and so noisy: compare runs on one idle machine.
        temperature: 0 is greedy.
        seed: Random seed of sampling.
        out: Default: evaluation-MODEL.json in the folder around the model; for --base_url here.
        parallel: Concurrent episodes at --base_url.
        key_variable: Environment variable of the endpoint's key.
    """
    options.check_one_of(model_path=model_path, base_url=base_url)
    options.check_served(base_url, model, config)
    run = options.read_config(config or config_around(str(model_path)), settings)
    path = Path(model_path or str(model))
    folder = path.resolve().parent if model_path and path.is_dir() else Path()
    out = out or folder / f"evaluation-{path.resolve().name}.json"
    with options.writing_to(out):
        console = options.quiet_console()
        from text2sql_grpo.evaluation.endpoint import Endpoint
        from text2sql_grpo.run import evaluate_job as job

        endpoint = Endpoint(str(base_url), str(model), key_variable=key_variable, parallel=parallel)
        job.evaluate(
            model_path or endpoint,
            run,
            num_samples=num_samples,
            sets=sets,
            metrics=metrics,
            temperature=temperature,
            seed=seed,
            out=out,
            console=console,
        )
    return 0
