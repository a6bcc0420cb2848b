"""Checks before an upload: complete models and adapters, listed files of a run, and no secrets."""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from text2sql_grpo.errors import HubError, ModelError

MODEL_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
ADAPTER_WEIGHTS = ("adapter_model*.safetensors",)
MODEL_FILES = (
    *("README.md", "LICENSE*", "config.json", "generation_config.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "adapter_config.json", "learning_curve.png"),
)
RUN_FILES = (
    *("README.md", "LICENSE*", "config.yaml", "metrics.jsonl", "rollouts.jsonl", "traces.jsonl"),
    *("evaluation*.json", "evaluation*.jsonl", "comparison*.json", "comparison*.jsonl", "audit*.json"),
    *("learning_curve.png", "report.html"),
)
# Never sent.
FORBIDDEN = (".env*", "*.env", "*.pem", "*.key", ".netrc", "id_rsa*", "id_ed25519*", "*.partial")
# Binary, or a tokenizer's vocabulary, which may hold any text.
_NOT_READ = (
    *(".safetensors", ".png", ".pt", ".pth", ".bin", ".wandb"),
    *("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"),
)
_SECRET_VARIABLE = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|WEBHOOK|(^|_)KEY$|_KEY_|APIKEY", re.IGNORECASE
)
_MIN_SECRET_CHARS = 8
_SECRET = re.compile(
    rb"(?:\b|\\[nrt])"  # a line break in JSON is written with a letter, which is no boundary
    rb"(?:hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{32,}|AKIA[0-9A-Z]{16}\b"
    rb"|gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{22,})"
    rb"|-----BEGIN [A-Z ]*PRIVATE KEY-----|https://hooks\.slack\.com/services/\w"
    rb"|https://discord(?:app)?\.com/api/webhooks/\d"
    # A password in an address, but no placeholder such as `..`, `<password>` or `$PASSWORD`.
    rb"|\w://[^\s:@/\"']{0,64}:(?!\.\.|\*\*|<|\$\{?[A-Z])[^\s@/\"']{1,512}@"
)


def check_model_folder(folder: Path) -> None:
    """Check that config, weights and tokenizer are all there and readable.

    Reads the headers of the weight files, not the weights; detects truncated files.

    Raises:
        ModelError: A file is missing or broken.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"no model folder: config.json is missing ({folder})")
    index = folder / "model.safetensors.index.json"
    try:
        names = {"model.safetensors"}
        if index.is_file():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot read the safetensors weights: {error} ({folder})") from error
    _check_weights(folder, names)

    from transformers import AutoConfig, AutoTokenizer  # seconds to import; the checks above come first

    try:
        AutoConfig.from_pretrained(str(folder))
        AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot read config and tokenizer: {error} ({folder})") from error


def check_adapter_folder(folder: Path) -> None:
    """Check that config and weights of a LoRA adapter are there and readable.

    Raises:
        ModelError: A file is missing or broken.
    """
    from peft import PeftConfig

    try:
        PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"cannot read adapter_config.json: {error} ({folder})") from error
    _check_weights(folder, {"adapter_model.safetensors"})


def _check_weights(folder: Path, names: Iterable[str]) -> None:
    try:
        for name in sorted(names):
            with safe_open(folder / name, framework="numpy") as weights:
                weights.keys()
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read the safetensors weights: {error} ({folder})") from error


def check_no_secrets(folder: Path, names: Iterable[str]) -> None:
    """Check that no file holds a secret of this environment, or text that looks like a secret.

    Raises:
        HubError: Names file, line and variable; the secret itself is not shown.
    """
    values = {
        name: value.strip().encode()
        for name, value in os.environ.items()
        if _SECRET_VARIABLE.search(name) and len(value.strip()) >= _MIN_SECRET_CHARS
    }
    for name in names:
        if name.endswith(_NOT_READ):
            continue
        with (folder / name).open("rb") as file:
            for number, line in enumerate(file, 1):
                found = [f"the value of {variable}" for variable, value in values.items() if value in line]
                if not found and _SECRET.search(line):
                    found = ["text like a token, a private key, a webhook or a password in an address"]
                if found:
                    raise HubError(
                        f"a file holds {found[0]}: nothing was sent ({folder / name}, line {number});"
                        " remove it first"
                    )
