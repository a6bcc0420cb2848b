"""Checks before an upload: complete models and adapters, listed files of a run, and no secrets."""

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from safetensors import SafetensorError, safe_open

from text2sql_grpo.errors import HubError, ModelError
from text2sql_grpo.publishing.secrets import Secret, joined, plain_lines, secrets, tokens

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
# A vocabulary may hold any word.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_SECRET_VARIABLE = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|WEBHOOK|APIKEY|(^|_)(KEY|PASS|PWD|PAT|DSN|AUTH)$|_KEY_",
    re.IGNORECASE,
)
_MIN_SECRET_CHARS = 8
_MIN_SECRET_CHARS_IN_VOCABULARY = 16
_MAX_HEADER_BYTES = _MAX_LINE_BYTES = 16_000_000
_PRINTABLE = re.compile(rb"[\x20-\x7e]{8,}")


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


def check_no_secrets(folder: Path, names: Iterable[str], *, allow: Sequence[str] = ()) -> None:
    """Check that no file holds a secret of this environment, or text that looks like a secret.

    Of safetensors only the header is read, since weights hold no text.

    Args:
        allow: Findings that are no secrets, such as `config.yaml:3:password-1f2e`; `*` stands for any text.

    Raises:
        HubError: A file cannot be read, or holds secrets: lists them by file, line and rule, values masked.
    """
    try:
        findings = [finding for name in names for finding in _findings(folder / name, name)]
    except (OSError, EOFError, zlib.error) as error:
        raise HubError(f"cannot search for secrets: {error}; nothing was sent ({folder})") from error
    left = [
        finding for finding in findings if not any(fnmatchcase(finding.name, pattern) for pattern in allow)
    ]
    if left:
        listed = "\n".join(f"  {finding.name}  {finding.secret.masked}" for finding in left)
        raise HubError(
            f"a file holds {left[0].what}: nothing was sent ({folder / left[0].file}, line {left[0].line});"
            f" remove it first, or add --allow FINDING if it is no secret. All findings:\n{listed}"
        )


@dataclass(frozen=True)
class _Finding:
    file: str
    line: int
    secret: Secret

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.secret.name}"

    @property
    def what(self) -> str:
        if self.secret.rule.startswith("$"):
            return f"the value of {self.secret.rule[1:]}"
        return f"text like a secret (rule {self.secret.rule})"


def _findings(path: Path, name: str) -> Iterator[_Finding]:
    is_vocabulary = name.endswith(_VOCABULARIES)
    variables = _secret_variables(_MIN_SECRET_CHARS_IN_VOCABULARY if is_vocabulary else _MIN_SECRET_CHARS)
    search = tokens if is_vocabulary else secrets
    clean: set[str] = set()  # the lines of a log repeat each other
    before = ""
    for number, line in _text_lines(path):
        found: list[Secret] = []
        parts = plain_lines(line)
        for variable, value in variables.items():
            if value in line or any(value in part for part in parts):
                found.append(Secret(f"${variable}", value))
        for part in parts:
            if part not in clean:
                new = list(search(part))
                found += new
                if not new:
                    clean.add(part)
            found += search(joined(before, part) or "")
            before = part if part.strip() else before
        for index, secret in enumerate(found):  # each value once, by the first rule that found it
            if not any(secret.value in other.value or other.value in secret.value for other in found[:index]):
                yield _Finding(name, number, secret)


def _secret_variables(least: int) -> dict[str, str]:
    """Values of variables that are named like secrets; of many lines, the longest."""
    values = {
        name: max(value.split("\n"), key=len).strip()
        for name, value in os.environ.items()
        if _SECRET_VARIABLE.search(name)
    }
    return {name: value for name, value in values.items() if len(value) >= least}


def _text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of text in a file; of binary lines, the printable parts."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        if path.suffix == ".safetensors":
            size = int.from_bytes(file.read(8), "little")
            yield 1, file.read(min(size, _MAX_HEADER_BYTES)).decode(errors="replace")
            return
        number = 1
        while line := file.readline(_MAX_LINE_BYTES):
            line = line.replace(b"\0", b"")  # UTF-16
            try:
                text = line.decode()
            except UnicodeDecodeError:
                text = "\n".join(run.decode() for run in _PRINTABLE.findall(line))
            if len(text) >= _MIN_SECRET_CHARS:
                yield number, text
            number += line.endswith(b"\n")
