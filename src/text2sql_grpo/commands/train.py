import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from text2sql_grpo.commands.options import (
    INTERRUPTED,
    config_or_quickstart,
    config_with_files,
    importing,
    quiet_console,
    writing_to,
)

if TYPE_CHECKING:
    from text2sql_grpo.config import Config


def train(
    *,
    config: Path | None = None,
    resume: str | None = None,
    smoke: bool = False,
    settings: Sequence[str] = (),
) -> int:
    """Train, evaluate and merge a model.

    Supervised fine-tuning if the config has it, evaluation, GRPO, evaluation, merge.

    Args:
        config: YAML of the run; default: the quickstart's.
        resume: Checkpoint to resume from; auto: the newest of the run.
        smoke: One step of 8 short episodes, into the folder RUN-smoke, to show that everything works: about a
            minute with a small model.
    """
    config = config_or_quickstart(config)
    run = config_with_files(config, settings, is_trained=True)
    if smoke:
        run = config_with_files(config, [*_smoke_settings(run), *settings], is_trained=True)
    with writing_to(run.run.output_dir):
        console = quiet_console()
        with importing():
            from text2sql_grpo.run import pipeline

        result = pipeline.train(run, resume=resume, console=console)
    return 0 if result.merged else INTERRUPTED


def _smoke_settings(run: "Config") -> list[str]:
    """Settings that make a run short; those of the command line come after them."""
    episode = run.environment
    short = {
        "run.output_dir": f"{run.run.output_dir}-smoke",
        "data.train_samples": 64,
        "data.test_samples": 2,
        "environment.max_turn_tokens": min(episode.max_turn_tokens, 72),
        "selection": {},
        "start": None,
        "evaluation": {"before_training": False, "merge_samples": 0},
        "alerts": None,
    }
    grpo = {"max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 8, "report_to": "none"}
    grpo |= {"gradient_accumulation_steps": 1, "generation_batch_size": None, "steps_per_generation": None}
    short |= {f"grpo.{name}": value for name, value in grpo.items()}
    if run.sft is not None and run.sft.adapter is None:
        short |= {"sft.max_steps": 2, "sft.batch_size": 4}
    return [f"--{name}={json.dumps(value)}" for name, value in short.items()]
