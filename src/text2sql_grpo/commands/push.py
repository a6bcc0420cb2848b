from pathlib import Path
from typing import Any

from text2sql_grpo.commands.options import check_one_of, writing_to
from text2sql_grpo.errors import ConfigError


def push(
    *,
    repo_id: str,
    folder: Path | None = None,
    run_folder: Path | None = None,
    public: bool = False,
    include: list[str] | None = None,
    report: bool = False,
    dry_run: bool = False,
    audit: list[Path] | None = None,
    allow: list[str] | None = None,
) -> int:
    """Push a model or a run to the Hugging Face Hub.

    The rollouts and answers of a run hold questions, the schema and rows of the database; the card of a model
    names its databases and question files. Example: `text2sql-grpo push --folder runs/my/merged --repo_id
    me/my-model --dry-run`

    Args:
        repo_id: name/model; without a name: your own account.
        folder: Merged model or adapter, inside its run folder; or the run folder, for its merged model.
        run_folder: Run folder, pushed as a dataset.
        public: Make it public; default: private.
        include: Also push these of a run folder, such as adapter or 'checkpoint-*'.
        report: Push a run's page, report.html, with its model; it holds questions and rows of the database.
        dry_run: List the files that would be sent, with their sizes, and send nothing; needs no token.
        audit: Output of `audit data --json` for a model's card; default: audit*.json of the run.
        allow: Findings of the search for secrets to send all the same, as it names them; * is any text.
    """
    check_one_of(folder=folder, run_folder=run_folder)
    if folder is None and audit:
        raise ConfigError("--audit goes into a model's card: it needs --folder")
    if folder is None and report:
        raise ConfigError(
            "--report goes next to a model: it needs --folder (a run folder is pushed with its page)"
        )
    if run_folder is None and include:
        raise ConfigError("--include needs --run_folder")
    from text2sql_grpo.models.sources import local_folder

    folder = None if folder is None else local_folder(folder)
    from text2sql_grpo.publishing.hub import push_run_folder, push_to_hub

    options: dict[str, Any] = {"private": not public, "allow": allow or (), "dry_run": dry_run}
    with writing_to(folder or run_folder or Path()):
        if folder is not None:
            print(push_to_hub(folder, repo_id, audits=audit or (), report=report, **options))
        elif run_folder is not None:
            print(push_run_folder(run_folder, repo_id, include=include or (), **options))
    return 0
