from collections.abc import Sequence
from dataclasses import asdict
from json import dumps
from pathlib import Path

from text2sql_grpo.commands.options import config_or_quickstart, quiet_console, writing_to
from text2sql_grpo.config import load_config
from text2sql_grpo.errors import DataError
from text2sql_grpo.phrases import many, printable
from text2sql_grpo.run_folder import METRICS


def doctor(
    *,
    config: Path | None = None,
    accelerate: Path | None = None,
    dry_run: bool = True,
    json: bool = False,
    run: Path | None = None,
    settings: Sequence[str] = (),
) -> int:
    """Check that a run would work on this machine, or what went wrong in one.

    Estimates its memory and time too; exit code 1 if it would fail. Example: `text2sql-grpo doctor --config
    my.yaml`

    Args:
        config: YAML of the run; default: the quickstart's.
        accelerate: Accelerate config that will start the run.
        dry_run: Load the model, and roll out and train one step.
        json: Print JSON instead of a report.
        run: Folder of a run: print what went wrong in it, and which field to change, instead.
    """
    if run is not None:
        return _print_findings(run, as_json=json)
    checked = load_config(config_or_quickstart(config), settings)
    with writing_to(checked.run.output_dir):
        console = quiet_console()
        from text2sql_grpo.doctor import diagnosis

        return diagnosis.doctor(checked, console=console, launch=accelerate, dry_run=dry_run, as_json=json)


def _print_findings(run: Path, *, as_json: bool) -> int:
    """Print the findings of a run; 0 also where there are some."""
    from text2sql_grpo.reporting.run_findings import findings, read_logs

    logs = read_logs(run)
    if not logs.steps:
        raise DataError(
            f"no training steps: {run / METRICS} is missing or has none; give the folder of a run"
        )
    found = findings(logs)
    if as_json:
        print(dumps([asdict(finding) for finding in found], indent=1))
        return 0
    print(f"{run}: {many(len(logs.steps), 'step')}, {many(len(logs.episodes), 'episode')}")
    for number, finding in enumerate(found, 1):
        print(printable(f"{number}. {finding.what}\n   {finding.change}"))
    if not found:
        print("nothing found that went wrong")
    return 0
