"""Push a merged model folder to the Hugging Face Hub: private by default, nothing sent before all checks."""

import json
import logging
import os
from pathlib import Path

from huggingface_hub import HfApi, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]
from safetensors import SafetensorError, safe_open

from text2sql_grpo.errors import HubError, ModelError
from text2sql_grpo.publishing.model_card import is_written_by_hand, write_model_card

logger = logging.getLogger(__name__)

TOKEN_VARIABLES = ("HF_TOKEN", "HF_KEY")
_WEIGHT_FILES = ("model*.safetensors", "model.safetensors.index.json")
_TEXT_FILES = (
    *("README.md", "LICENSE*", "config.json", "generation_config.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt"),
)


def find_token() -> str | None:
    """The Hub token of this environment; None if neither HF_TOKEN nor the older HF_KEY is set."""
    return next((token for name in TOKEN_VARIABLES if (token := os.environ.get(name, "").strip())), None)


def push_to_hub(folder: Path, repo_id: str, *, private: bool = True, token: str | None = None) -> str:
    """Address of the repository that now holds the model, its tokenizer and its model card.

    The card is written from the run folder around `folder`, unless a README.md written by hand is there.
    Only model files directly in `folder` go out: no checkpoints, no optimizer state. HF_ENDPOINT is obeyed.

    Args:
        folder: A merged model folder, such as `RUN/merged`.
        repo_id: `name/model`; a bare `model` goes to the token's own account.
        private: Keep it from everybody else; a repository that is already public is then refused.
        token: Of the Hub; None takes HF_TOKEN (or HF_KEY) from the environment.

    Raises:
        HubError: Offline mode, no token, a token that is refused, a repository more public than asked
            for, or a Hub that fails; the text says whether anything was sent.
        ModelError: `folder` is no loadable model.
    """
    if is_offline_mode():
        raise HubError(f"expected to be online, but HF_HUB_OFFLINE is set; nothing was sent ({folder})")
    token = token or find_token()
    if token is None:
        names = " or ".join(TOKEN_VARIABLES)
        raise HubError(f"expected a Hub token in {names} (environment or .env), got none; nothing was sent")
    check_model_folder(folder)

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    sent = "nothing was sent"
    try:
        user = api.whoami()["name"]
        repo_id = repo_id if "/" in repo_id else f"{user}/{repo_id}"
        if not is_written_by_hand(folder / "README.md"):
            write_model_card(folder.parent, folder, repo_id=repo_id)
        existed = api.repo_exists(repo_id)
        url = str(api.create_repo(repo_id, private=private, exist_ok=True))
        if private and not api.repo_info(repo_id).private:
            raise HubError(f"expected a private repository, {repo_id} is public (--public allows it); {sent}")
        logger.info("%s repository %s, uploading %s", "existing" if existed else "new", url, folder)
        sent = "some files may have been sent"
        api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message="Upload model",
            allow_patterns=_upload_names(folder),
            delete_patterns=list(_WEIGHT_FILES),  # shards of an earlier push would shadow these weights
        )
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise HubError(f"the Hub refused the token ({status}) for {repo_id}; {sent}: {error}") from error
        raise HubError(f"the Hub answered {status} for {repo_id}; {sent}: {error}") from error
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        raise HubError(f"could not push {folder} to {api.endpoint}/{repo_id}; {sent}: {error}") from error
    return url


def check_model_folder(folder: Path) -> None:
    """Return if config, weights and tokenizer are all there and readable.

    The weight files' headers are read, not the weights; a cut-off file is found.

    Raises:
        ModelError: What is missing or broken, and where.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"expected a model folder with config.json, found none: {folder}")
    index = folder / "model.safetensors.index.json"
    try:
        names = {"model.safetensors"}
        if index.is_file():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        for name in sorted(names):
            with safe_open(folder / name, framework="numpy") as weights:
                weights.keys()
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"expected readable safetensors weights: {error} ({folder})") from error

    from transformers import AutoConfig, AutoTokenizer  # seconds to import; the checks above come first

    try:
        AutoConfig.from_pretrained(str(folder))
        AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"expected a readable config and tokenizer: {error} ({folder})") from error


def _upload_names(folder: Path) -> list[str]:
    """Names of the model files directly in `folder`: the Hub's own patterns would reach into subfolders."""
    return sorted({path.name for pattern in (*_WEIGHT_FILES, *_TEXT_FILES) for path in folder.glob(pattern)})
