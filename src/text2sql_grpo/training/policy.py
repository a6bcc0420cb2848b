"""The policy of a run: read from a folder or the Hub, or made on the spot and warm-started."""

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from text2sql_grpo.config import Config, ModelConfig, WarmStartConfig
from text2sql_grpo.data.databases import cache_folder
from text2sql_grpo.data.example import Example
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.errors import ModelError
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.training.demonstrations import guessing_turns, looking_turns, play
from text2sql_grpo.training.tiny_policy import make_model, train_tokenizer
from text2sql_grpo.training.warm_start import Demonstrations, warm_start

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedPolicy:
    """A model with its tokenizer.

    Attributes:
        folder: Where the weights lie: a folder or a Hub id.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: str


def load_policy(path: str, *, dtype: str = "auto", quantization: str = "none") -> LoadedPolicy:
    """Reads a model and its tokenizer from a folder or the Hub.

    Raises:
        ModelError: Nothing readable there, or no chat template, or 4-bit loading is not possible here.
    """
    options: dict[str, Any] = {"dtype": dtype}
    if quantization == "4bit":
        options["quantization_config"] = _four_bit()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"expected a model folder or Hub id, got {str(error).splitlines()[0]} ({path})") from error
    ChatFormat(tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return LoadedPolicy(model, tokenizer, path)


def _four_bit() -> Any:
    if os.environ.get("DISABLE_BITSANDBYTES") == "1":
        raise ModelError("model.quantization is 4bit, but DISABLE_BITSANDBYTES=1 is set: set quantization: none")
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ModelError(
            "model.quantization 4bit needs the package bitsandbytes, which is not installed "
            "(it has no build for some platforms): set quantization: none"
        ) from error
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def lora_config(settings: ModelConfig) -> LoraConfig | None:
    """PEFT's config of the adapter; None trains all weights."""
    if settings.lora is None:
        return None
    # Generation runs in train mode, so a dropout would change what the policy samples.
    return LoraConfig(**dataclasses.asdict(settings.lora), lora_dropout=0.0, task_type="CAUSAL_LM")


def tiny_policy(
    config: Config,
    examples: Sequence[Example],
    environment: SQLEnvironment,
    *,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> LoadedPolicy:
    """Makes a small policy and warm-starts it on demonstrations, or takes the one made before.

    It is kept under a hash of everything that makes it: settings, demonstrations, schemas, code.

    Args:
        examples: Questions to demonstrate.
        on_step: See `warm_start`; not called if the policy is taken from the cache.
    """
    if config.model.tiny is None or config.warm_start is None:
        raise ModelError("expected model.tiny and warm_start in the config")
    name = _fingerprint(config, examples, environment)
    folder = cache_folder("warm_starts") / name
    if not folder.exists():
        _make(config, config.warm_start, examples, environment, folder, on_step)
    return load_policy(str(folder))


def _make(
    config: Config,
    settings: WarmStartConfig,
    examples: Sequence[Example],
    environment: SQLEnvironment,
    folder: Path,
    on_step: Callable[[int, float], None],
) -> None:
    assert config.model.tiny is not None
    texts = []
    for example in examples:
        texts += [message["content"] for message in environment.session(example).start()]
        texts += looking_turns(example)
    tokenizer = train_tokenizer(texts, vocab_size=config.model.tiny.vocab_size)
    chat = ChatFormat(tokenizer)
    looking = [play(example, looking_turns(example), environment, chat) for example in examples]
    guessing = [
        play(example, guessing_turns(example), environment, chat) if example.guess_sql else looked
        for example, looked in zip(examples, looking, strict=True)
    ]
    model = make_model(config.model.tiny, tokenizer, seed=config.run.seed)
    warm_start(
        model,
        Demonstrations(looking, guessing),
        settings,
        seed=config.run.seed,
        pad_id=tokenizer.pad_token_id,
        unfinished=folder.with_suffix(".unfinished.pt"),
        on_step=on_step,
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    written = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".warm_start-"))
    try:
        model.save_pretrained(written)
        tokenizer.save_pretrained(written)
        if not folder.exists():  # Another process may have made the same one meanwhile.
            written.rename(folder)
    finally:
        shutil.rmtree(written, ignore_errors=True)


def _fingerprint(config: Config, examples: Sequence[Example], environment: SQLEnvironment) -> str:
    digest = hashlib.sha256()
    assert config.model.tiny is not None and config.warm_start is not None
    settings = [config.model.tiny, config.warm_start, config.environment]
    digest.update(json.dumps([dataclasses.asdict(part) for part in settings]).encode())
    digest.update(str(config.run.seed).encode())
    for example in examples:
        digest.update(json.dumps(dataclasses.asdict(example)).encode())
    for database in sorted({example.database for example in examples}):
        digest.update(environment.databases.path(database).read_bytes())
    for module in ("demonstrations", "tiny_policy", "warm_start"):
        digest.update(Path(__file__).with_name(f"{module}.py").read_bytes())
    digest.update(torch.__version__.encode())
    return digest.hexdigest()[:16]
