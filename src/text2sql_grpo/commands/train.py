from collections.abc import Sequence
from pathlib import Path

from text2sql_grpo.commands.options import (
    INTERRUPTED,
    QUICKSTART,
    config_with_files,
    importing,
    quiet_console,
    writing_to,
)


def train(*, config: Path = QUICKSTART, resume: str | None = None, settings: Sequence[str] = ()) -> int:
    """Train, evaluate and merge a model.

    Supervised fine-tuning if the config has it, evaluation, GRPO, evaluation, merge.

    Args:
        config: YAML of the run.
        resume: Checkpoint to resume from; auto: the newest of the run.
    """
    run = config_with_files(config, settings, is_trained=True)
    with writing_to(run.run.output_dir):
        console = quiet_console()
        with importing():
            from text2sql_grpo.run import pipeline

        result = pipeline.train(run, resume=resume, console=console)
    return 0 if result.merged else INTERRUPTED
