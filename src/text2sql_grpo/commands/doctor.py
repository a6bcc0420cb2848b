from collections.abc import Sequence
from pathlib import Path

from text2sql_grpo.commands.options import config_or_quickstart, quiet_console, read_config, writing_to


def doctor(
    *,
    config: Path | None = None,
    accelerate: Path | None = None,
    dry_run: bool = True,
    json: bool = False,
    settings: Sequence[str] = (),
) -> int:
    """Check that a run would work on this machine.

    Estimates its memory and time too; exit code 1 if it would fail.

    Args:
        config: YAML of the run; default: the quickstart's.
        accelerate: Accelerate config that will start the run.
        dry_run: Load the model and play one step.
        json: Print JSON instead of a report.
    """
    run = read_config(config_or_quickstart(config), settings)
    with writing_to(run.run.output_dir):
        console = quiet_console()
        from text2sql_grpo.doctor import diagnosis

        return diagnosis.doctor(run, console=console, launch=accelerate, dry_run=dry_run, as_json=json)
