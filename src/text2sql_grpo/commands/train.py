from collections.abc import Sequence
from pathlib import Path

from text2sql_grpo.commands.options import (
    INTERRUPTED,
    QUICKSTART,
    importing,
    quiet_console,
    read_config,
    writing_to,
)


def train(*, config: Path = QUICKSTART, resume: str | None = None, settings: Sequence[str] = ()) -> int:
    """Train, evaluate and merge a model.

    Supervised fine-tuning if the config has it, evaluation, GRPO, evaluation, merge.

    Args:
        config: YAML of the run.
        resume: Checkpoint to resume from; auto: the newest of the run.
    """
    run = read_config(config, settings)
    with writing_to(run.run.output_dir):
        console = quiet_console()
        with importing():
            from text2sql_grpo.run import pipeline

        result = pipeline.train(run, resume=resume, console=console)
    return 0 if result.merged else INTERRUPTED
