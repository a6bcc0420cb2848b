from pathlib import Path

from text2sql_grpo.commands.options import check_one_of, writing_to
from text2sql_grpo.errors import ConfigError


def push(
    *,
    repo_id: str,
    folder: Path | None = None,
    run_folder: Path | None = None,
    public: bool = False,
    include: list[str] | None = None,
    audit: list[Path] | None = None,
    allow: list[str] | None = None,
) -> int:
    """Push a model or a run to the Hugging Face Hub.

    Args:
        repo_id: name/model; without a name: your own account.
        folder: Merged model or adapter, inside its run folder.
        run_folder: Run folder, pushed as a dataset.
        public: Make it public; default: private.
        include: Also push these of a run folder, such as adapter or 'checkpoint-*'.
        audit: Output of `audit data --json` for a model's card; default: audit*.json of the run.
        allow: Findings of the search for secrets that are none, as it names them; * stands for any text.
    """
    check_one_of(folder=folder, run_folder=run_folder)
    if folder is None and audit:
        raise ConfigError("--audit goes into a model's card: it needs --folder")
    if run_folder is None and include:
        raise ConfigError("--include needs --run_folder")
    from text2sql_grpo.publishing.hub import push_run_folder, push_to_hub

    private, allowed = not public, allow or ()
    with writing_to(folder or run_folder or Path()):
        if folder is not None:
            print(push_to_hub(folder, repo_id, private=private, audits=audit or (), allow=allowed))
        elif run_folder is not None:
            print(push_run_folder(run_folder, repo_id, include=include or (), private=private, allow=allowed))
    return 0
