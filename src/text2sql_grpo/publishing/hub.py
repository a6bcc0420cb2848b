"""Push a model, an adapter or a run folder to the Hugging Face Hub.

Private by default, nothing sent before all checks. Running the same command again resumes an interrupted
upload: huggingface_hub sends no file again that the Hub has, nor, with Xet, a part of one.
"""

import logging
import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import Literal

from huggingface_hub import DatasetCard, DatasetCardData, HfApi, get_token, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

from text2sql_grpo.errors import DataError, HubError
from text2sql_grpo.publishing.model_card import MARK, copy_from_run, is_written_by_hand, write_model_card
from text2sql_grpo.publishing.secrets import check_no_secrets
from text2sql_grpo.publishing.upload_checks import (
    ADAPTER_WEIGHTS,
    FORBIDDEN,
    MODEL_FILES,
    MODEL_WEIGHTS,
    RUN_FILES,
    WITHOUT_CONTENT,
    check_adapter_folder,
    check_model_folder,
)
from text2sql_grpo.run_folder import CURVE, PAGE

logger = logging.getLogger(__name__)

_REMEDIES = {
    401: "the token is wrong or expired: log in again (hf auth login), or set HF_TOKEN to a valid one",
    402: "free space or raise the account's quota, then run the same command again",
    403: "the token needs write access to this repository, and the account space for it: "
    "see https://huggingface.co/settings/tokens and https://huggingface.co/settings/billing",
    413: "free space or raise the account's quota, then run the same command again",
    429: "too many requests: wait some minutes, then run the same command again",
}
# What a run's card says of its files.
_RUN_FILES_SHOWN = {
    "rollouts.jsonl": "every episode of training, whole: messages, actions, tokens, scores",
    "metrics.jsonl": "one line a training step",
    "evaluation.jsonl": "every answer to held-out questions after training",
    "evaluation-before.jsonl": "the same before training",
    "config.yaml": "the settings",
    "evaluation.json": "accuracy on held-out sets, with intervals",
    "comparison.json": "two models on the same questions",
}


def push_to_hub(
    folder: Path,
    repo_id: str,
    *,
    private: bool = True,
    token: str | None = None,
    audits: Sequence[Path] = (),
    report: bool = False,
    allow: Sequence[str] = (),
    dry_run: bool = False,
) -> str:
    """Push a model or adapter, its tokenizer and its card; returns the repository's URL.

    The card is written from the run folder around `folder`, unless a README.md written by hand is there.
    Only model files directly in `folder` are sent: no checkpoints, no optimizer state. HF_ENDPOINT is obeyed.

    Args:
        folder: A merged model or an adapter, such as `RUN/merged` or `RUN/adapter`.
        repo_id: `name/model`; a bare `model` goes to the token's account.
        private: Require a private repository; a public one is refused. False makes a private one public.
        token: Hub token; None takes HF_TOKEN (or HF_KEY), else the one that `hf auth login` stored.
        audits: See `write_model_card`.
        report: Also send the page of the run, which holds questions and rows of the database.
        allow: Findings that are no secrets; see `check_no_secrets`.
        dry_run: Send nothing, and return a list of the files instead; needs neither a token nor the Hub.

    Raises:
        HubError: Offline mode, no token, a refused token, a public repository against `private`, a secret
            in a file, no space left, or a failure of the Hub; states whether anything was sent.
        ModelError: `folder` is no loadable model or adapter.
        DataError: The run has no page, or its page is a link out of the run folder.
    """
    if report:
        page = folder.parent / PAGE
        if not page.is_file():
            raise DataError(f"the run has no {PAGE}: write it with text2sql-grpo view {folder.parent}")
        copy_from_run(page, folder)
    files = (*MODEL_FILES, PAGE) if report else MODEL_FILES
    is_adapter = (folder / "adapter_config.json").is_file()
    weights = ADAPTER_WEIGHTS if is_adapter else MODEL_WEIGHTS
    (check_adapter_folder if is_adapter else check_model_folder)(folder)
    return _push(
        folder,
        repo_id,
        "model",
        lambda: _directly_in(folder, (*weights, *files)),
        private=private,
        token=token,
        dry_run=dry_run,
        write_card=lambda named: write_model_card(folder.parent, folder, repo_id=named, audits=audits),
        allow=allow,
        stale=weights,  # shards of an earlier push would shadow these weights
    )


def push_run_folder(
    run: Path,
    repo_id: str,
    *,
    include: Sequence[str] = (),
    private: bool = True,
    token: str | None = None,
    allow: Sequence[str] = (),
    dry_run: bool = False,
) -> str:
    """Push a run as a dataset: config, metrics, episodes, answers and a card; returns its URL.

    Checkpoints, models, adapters and the files of trackers are sent only by `include`.

    Args:
        repo_id: See `push_to_hub`, also for `private`, `token`, `allow` and `dry_run`.
        include: Names or patterns of more folders and files in it, such as `adapter` or `checkpoint-*`.

    Raises:
        HubError: See `push_to_hub`.
        DataError: No run folder, or nothing in it has a name of `include`.
    """
    if not (run / "config.yaml").is_file():
        raise DataError(f"no run folder: config.yaml is missing ({run})")
    for pattern in include:
        parts = Path(pattern).parts
        is_inside = parts and ".." not in parts and not Path(pattern).is_absolute()
        if not is_inside or not any(run.glob(pattern)):
            raise DataError(f"--include must name files in the run folder, got {pattern!r} ({run})")

    def names() -> list[str]:
        chosen = [path for pattern in include for path in run.glob(pattern)]
        files = {file for path in chosen for file in ([path] if path.is_file() else path.rglob("*"))}
        more = {file.relative_to(run).as_posix() for file in files if file.is_file()}
        return sorted({*_directly_in(run, RUN_FILES), *(name for name in more if not _is_forbidden(name))})

    return _push(
        run,
        repo_id,
        "dataset",
        names,
        private=private,
        token=token,
        dry_run=dry_run,
        write_card=lambda _: _write_run_card(run),
        allow=allow,
    )


def _write_run_card(run: Path) -> None:
    found = [name for name in _RUN_FILES_SHOWN if (run / name).is_file()]
    tables = [name.removesuffix(".jsonl") for name in found if name.endswith(".jsonl")]
    configs = [{"config_name": name, "data_files": f"{name}.jsonl"} for name in tables]
    data = DatasetCardData(tags=["text-to-sql", "grpo", "rollouts"], configs=configs)
    lines = [f"- `{name}`: {_RUN_FILES_SHOWN[name]}" for name in found]
    curve = f"![Learning curve]({CURVE})\n\n" if (run / CURVE).is_file() else ""
    text = (
        f"---\n{data.to_yaml()}\n---\n{MARK}\n\n# {run.resolve().name}\n\n"
        "Config, metrics and episodes of a training run of text2sql-grpo.\n\n"
        f"{curve}{chr(10).join(lines)}\n"
    )
    DatasetCard(text).save(run / "README.md")


def _listing(folder: Path, repo_id: str, kind: str, names: Sequence[str], *, private: bool) -> str:
    """Lines on what a push would send: each file with its size, and those that may show the database."""
    sizes = {name: (folder / name).stat().st_size for name in names}
    how = "private" if private else "PUBLIC"
    lines = [f"would be sent to the {how} {kind} repository {repo_id}, {sum(sizes.values()):,} bytes:"]
    lines += [f"{size:>16,}  {folder / name}" for name, size in sizes.items()]
    lines.append(f"{'card':>16}  {folder / 'README.md'}")
    if shown := [name for name in names if not _matches(Path(name).name, WITHOUT_CONTENT)]:
        lines.append(
            f"Questions, names of the schema or rows of the database may stand in {', '.join(shown)}."
        )
    return "\n".join([*lines, "Nothing was sent."])


def _directly_in(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Names of files directly in a folder: the Hub's patterns would match in subfolders too."""
    return sorted({path.name for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _is_in(folder: Path, name: str) -> bool:
    return (folder / name).resolve().is_relative_to(folder.resolve())


def _is_forbidden(name: str) -> bool:
    return any(_matches(part, FORBIDDEN) for part in name.split("/"))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _token(token: str | None, folder: Path) -> str:
    if is_offline_mode():
        raise HubError(f"cannot push: HF_HUB_OFFLINE is set; nothing was sent ({folder})")
    # HF_KEY is an older name of HF_TOKEN.
    token = token or os.environ.get("HF_TOKEN") or os.environ.get("HF_KEY") or get_token()
    if not token:
        raise HubError("no Hub token: log in with `hf auth login`, or set HF_TOKEN; nothing was sent")
    return token.strip()


def _push(
    folder: Path,
    repo_id: str,
    kind: Literal["model", "dataset"],
    names: Callable[[], list[str]],
    *,
    private: bool,
    token: str | None,
    dry_run: bool,
    write_card: Callable[[str], object],
    allow: Sequence[str],
    stale: Sequence[str] = (),
) -> str:
    """Push files; returns the repository's URL.

    Args:
        names: Returns the names of the files, once the card is written.
        write_card: Writes the card of this repository, unless there is one written by hand.
        stale: Patterns of other files to delete in the repository.
    """
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=None if dry_run else _token(token, folder))
    if out := [name for name in [*names(), "README.md"] if not _is_in(folder, name)]:
        raise HubError(
            f"links out of the folder are not followed: copy {', '.join(out)}; nothing was sent ({folder})"
        )
    searched = set(names()) - {"README.md"}  # written below
    check_no_secrets(folder, searched, allow=allow)
    if dry_run:
        return _listing(folder, repo_id, kind, sorted(searched), private=private)
    sent = "nothing was sent"
    try:
        user = api.whoami()["name"]
        repo_id = repo_id if "/" in repo_id else f"{user}/{repo_id}"
        if not is_written_by_hand(folder / "README.md"):
            write_card(repo_id)
        check_no_secrets(folder, set(names()) - searched, allow=allow)
        existed = api.repo_exists(repo_id, repo_type=kind)
        url = str(api.create_repo(repo_id, repo_type=kind, private=private, exist_ok=True))
        is_private = api.repo_info(repo_id, repo_type=kind).private
        if private and not is_private:
            raise HubError(f"the repository {repo_id} is public: use another, or --public; {sent}")
        logger.info("%s repository %s, uploading %s", "existing" if existed else "new", url, folder)
        sent = "some files may have been sent, and the same command resumes from there"
        api.upload_folder(
            repo_id=repo_id,
            repo_type=kind,
            folder_path=folder,
            commit_message=f"Upload {kind}",
            allow_patterns=[escape(name) for name in names()],
            delete_patterns=list(stale) or None,
        )
        if is_private and not private:
            sent = "all files were sent, but the repository is still private"
            api.update_repo_settings(repo_id, repo_type=kind, private=False)
            logger.warning("%s was private and is now public, with its earlier files and history", url)
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        # The upload of one large file wraps the Hub's answer.
        answer = next((e for e in (error, error.__cause__) if isinstance(e, HfHubHTTPError)), None)
        if answer is None:
            cause = f" {error.__cause__}" if error.__cause__ else ""
            raise HubError(
                f"could not push {folder} to {api.endpoint}/{repo_id}; {sent}; "
                f"check network, HF_ENDPOINT and --repo_id: {error}{cause}"
            ) from error
        status = answer.response.status_code
        remedy = _REMEDIES.get(status, "see https://status.huggingface.co, and run the same command again")
        raise HubError(f"the Hub answered ({status}) for {repo_id}; {sent}; {remedy}: {error}") from error
    return url
