from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from text2sql_grpo.commands import options
from text2sql_grpo.commands.options import Count, Temperature
from text2sql_grpo.run_folder import config_around


def evaluate(
    *,
    model_path: str,
    num_samples: Count | None = None,
    config: Path | None = None,
    sets: list[str] | None = None,
    metrics: list[Literal["strict", "official", "ves"]] | None = None,
    temperature: Temperature = 0.0,
    seed: int = 0,
    out: Path | None = None,
    settings: Sequence[str] = (),
) -> int:
    """Answer held-out questions with a model.

    Args:
        model_path: Model folder, such as RUN/merged, or Hub id.
        num_samples: N of each held-out set, shown whole.
        config: Default: config.yaml in the folder around the model.
        sets: Held-out sets; default: all of the config.
        metrics: Columns of the table; default: the accuracies strict and official. ves adds BIRD's R-VES:
            the time of right answers against that of the gold, run in turn 100 times each, one query at a
            time. It is a timing, and so noisy: compare runs on one idle machine.
        temperature: 0 is greedy.
        seed: Random seed of sampling.
        out: Default: evaluation-MODEL.json in the folder around the model.
    """
    run = options.read_config(config or config_around(model_path), settings)
    model = Path(model_path)
    folder = model.resolve().parent if model.is_dir() else Path()
    out = out or folder / f"evaluation-{model.resolve().name}.json"
    with options.writing_to(out):
        console = options.quiet_console()
        from text2sql_grpo.jobs import evaluate as job

        job.evaluate(
            model_path,
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
