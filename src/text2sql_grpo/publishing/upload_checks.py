"""Files of an upload, and checks that models and adapters are complete."""

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from text2sql_grpo.errors import ModelError

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
# Without questions, names of the schema or rows; any other file may hold some.
WITHOUT_CONTENT = (*MODEL_FILES, "*.safetensors", "*.index.json", "*.pt", "metrics.jsonl")
# Never sent.
FORBIDDEN = (".*", "*.env", "*.pem", "*.key", "id_rsa*", "id_ed25519*", "*.partial")


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
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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
