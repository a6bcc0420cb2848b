"""The policy of a run: read from a folder or the Hub, or made on the spot and warm-started."""

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_flash_attn_2_available

from text2sql_grpo.config import Config, ModelConfig, TinyPolicyConfig, WarmStartConfig
from text2sql_grpo.data.copies import common_nouns, write_renamed_copies
from text2sql_grpo.data.databases import Databases, cache_folder
from text2sql_grpo.data.example import Example
from text2sql_grpo.data.generator import QuestionSet, make_questions
from text2sql_grpo.data.loading import load_examples
from text2sql_grpo.environment.session import SQLEnvironment
from text2sql_grpo.errors import ModelError
from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.policy import obstacle
from text2sql_grpo.sql import SQLExecutor
from text2sql_grpo.training.arguments import device_type
from text2sql_grpo.training.demonstrations import demonstrate, looking_turns
from text2sql_grpo.training.processes import main_first
from text2sql_grpo.training.tiny_policy import make_model, train_tokenizer
from text2sql_grpo.training.warm_start import warm_start

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


def load_policy(
    path: str, *, dtype: str = "auto", quantization: str = "none", attn_implementation: str = "auto"
) -> LoadedPolicy:
    """Reads a model and its tokenizer from a folder or the Hub.

    Args:
        dtype: Of the weights; `auto` takes the stored one.
        quantization: `none`, or `4bit` for NF4 with double quantisation, placed on the device of the run.
        attn_implementation: `auto` takes FlashAttention where it is installed and this project's own
            attention cannot serve the model (see `rollout.policy.obstacle`), else transformers' choice.

    Raises:
        ModelError: Nothing readable there, or no chat template, or 4-bit loading is not possible here.
    """
    options: dict[str, Any] = {"dtype": dtype}
    if attn_implementation != "auto":
        options["attn_implementation"] = attn_implementation
    if quantization == "4bit":
        options |= _four_bit_options(dtype)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, **options)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"expected a model that fits into memory, got {error} ({path})") from error
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"expected a model folder or Hub id, got {str(error).splitlines()[0]} ({path})"
        ) from error
    ChatFormat(tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    is_half_on_gpu = device_type() == "cuda" and model.dtype != torch.float32
    if attn_implementation == "auto" and is_half_on_gpu and obstacle(model) and is_flash_attn_2_available():
        model.set_attn_implementation("flash_attention_2")
    for module in model.modules():
        # bitsandbytes packs 4-bit weights on a CPU when they are first evaluated; then no gradient passes.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return LoadedPolicy(model, tokenizer, path)


def resolved(settings: ModelConfig, device: str) -> ModelConfig:
    """The settings with dtype and quantization decided for a device, so that a run folder says what was done.

    Args:
        device: Of training, such as `cuda`; see `device_type`.
    """
    dtype, quantization = settings.dtype, settings.quantization
    if dtype == "auto" and settings.path is not None:
        # Full training keeps float32 weights: updates are smaller than a step of bfloat16.
        dtype = "float32" if settings.lora is None else _frozen_dtype(device)
    if quantization == "auto":
        reason = four_bit_obstacle(device)
        quantization = "none" if reason else "4bit"
        if reason:
            logger.warning(f"LoRA on {dtype} weights, not on 4-bit ones: {reason}")
    return dataclasses.replace(settings, dtype=dtype, quantization=quantization)


def _frozen_dtype(device: str) -> Literal["float32", "bfloat16", "float16"]:
    if device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    return "float32" if device in ("cpu", "mps") else "bfloat16"


def four_bit_obstacle(device: str) -> str | None:
    """Why weights cannot be held in 4 bits on this kind of device; None if they can."""
    if os.environ.get("DISABLE_BITSANDBYTES", "0") not in ("", "0"):
        return "DISABLE_BITSANDBYTES=1 is set"
    try:
        import bitsandbytes
    except ImportError:
        return "it needs the package bitsandbytes, which is not installed (some platforms have no build)"
    if device not in bitsandbytes.supported_torch_devices:
        return f"bitsandbytes {bitsandbytes.__version__} does not run on {device}"
    return None


def _four_bit_options(dtype: str) -> dict[str, Any]:
    device = device_type()
    reason = four_bit_obstacle(device)
    if reason:
        raise ModelError(f"model.quantization 4bit: {reason}; set quantization: auto or none")
    place = f"{device}:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if dtype == "auto" else getattr(torch, dtype),
        ),
        "device_map": {"": place},
    }


_WIDE = 2048


def lora_config(settings: ModelConfig, model: PreTrainedConfig) -> LoraConfig | None:
    """PEFT's config of the adapter; None trains all weights.

    Where the settings are silent: all linear layers but the head, as adapters on attention alone learn less
    (Dettmers et al. 2023, arXiv:2305.14314, sec. 4; Schulman et al. 2025, "LoRA Without Regret"), and of
    mixtures of experts the attention layers, since a router must not be adapted and experts are no linear
    layers in transformers. Rank 16, for RL learns little per episode (ibid.), 32 for narrow models.

    Args:
        model: The config of the model that the adapter is for.
    """
    if settings.lora is None:
        return None
    text = model.get_text_config()
    has_experts = any(getattr(text, name, None) for name in ("num_experts", "num_local_experts"))
    family = ["q_proj", "k_proj", "v_proj", "o_proj"] if has_experts else "all-linear"
    rank = settings.lora.r or (16 if text.hidden_size >= _WIDE else 32)
    return LoraConfig(
        r=rank,
        lora_alpha=settings.lora.lora_alpha or 2 * rank,
        target_modules=settings.lora.target_modules or family,
        lora_dropout=0.0,  # Generation runs in train mode, so a dropout would change what the policy samples.
        task_type="CAUSAL_LM",
    )


def tiny_policy(
    config: Config,
    examples: Sequence[Example],
    environment: SQLEnvironment,
    *,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> LoadedPolicy:
    """Makes a small policy and warm-starts it on demonstrations, or takes the one made before.

    It is kept under a hash of everything that makes it: settings, demonstrations, databases, code.

    Args:
        examples: Questions to demonstrate.
        environment: The run's; demonstrations are played in one like it that leaves room for a look.
        on_step: See `warm_start`; not called if the policy is taken from the cache.
    """
    making = _making(config, examples, environment)
    folder = making.folder()
    with main_first():  # of several processes, one makes it
        if not folder.exists():
            making.make(folder, on_step)
    return load_policy(str(folder))


def made_tiny_policy(
    config: Config, load: Callable[[Path], Sequence[Example]], environment: SQLEnvironment
) -> str | None:
    """Where the policy that `tiny_policy` would return lies; None if it is still to be made.

    Args:
        load: Reads the demonstrations.
    """
    if config.data.demonstrations is None:
        return None
    folder = _making(config, load(config.data.demonstrations), environment).folder()
    return str(folder) if folder.exists() else None


def _making(config: Config, examples: Sequence[Example], environment: SQLEnvironment) -> "_Making":
    if config.model.tiny is None or config.warm_start is None:
        raise ModelError("expected model.tiny and warm_start in the config")
    settings = dataclasses.replace(environment.settings, max_turns=_DEMONSTRATED_TURNS)
    environment = SQLEnvironment(environment.databases, environment.executor, settings)
    return _Making(config.model.tiny, config.warm_start, config.run.seed, examples, environment)


_DEMONSTRATED_TURNS = 3
_MAKING_CODE = [
    Path(__file__).with_name(f"{name}.py")
    for name in ("demonstrations", "tiny_policy", "warm_start", "shared_prefix_attention")
]


@dataclass(frozen=True)
class _Making:
    """All that decides what a warm-started policy is."""

    tiny: TinyPolicyConfig
    warm_start: WarmStartConfig
    seed: int
    examples: Sequence[Example]
    environment: SQLEnvironment

    def folder(self) -> Path:
        """Where the policy is kept, under a hash of all this."""
        return cache_folder("warm_starts") / self._fingerprint()

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        settings = (self.tiny, self.warm_start, self.environment.settings)
        digest.update(json.dumps([dataclasses.asdict(part) for part in settings]).encode())
        digest.update(f"{self.seed} {torch.__version__}".encode())
        for example in self.examples:
            digest.update(json.dumps(dataclasses.asdict(example)).encode())
        databases = self.environment.databases
        for database in sorted({example.database for example in self.examples}):
            digest.update(databases.path(database).read_bytes())
            words = databases.folder / f"{database}.json"
            digest.update(words.read_bytes() if words.exists() else b"")
        package = Path(__file__).parent.parent
        for path in sorted([*package.glob("data/*.py"), *package.glob("data/*.txt"), *_MAKING_CODE]):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def make(self, folder: Path, on_step: Callable[[int, float], None]) -> None:
        """Trains tokenizer and model, and writes them to `folder` whole or not at all."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
            practice, practice_environment = self._practice(Path(scratch) / "copies")
            # Not on the copies: their values then fall into pieces, as those of an unseen database will.
            texts = [
                text
                for example in self.examples
                for text in (
                    self.environment.session(example).start()[-1]["content"],
                    *looking_turns(example),
                )
            ]
            tokenizer = train_tokenizer(texts, vocab_size=self.tiny.vocab_size, words=common_nouns())
            chat = ChatFormat(tokenizer)
            model = make_model(self.tiny, tokenizer, seed=self.seed)
            warm_start(
                model,
                demonstrate(self.examples, self.environment, chat),
                demonstrate(practice, practice_environment, chat) if practice else None,
                self.warm_start,
                seed=self.seed,
                unfinished=folder.with_suffix(".unfinished.pt"),
                on_step=on_step,
            )
            written = Path(scratch) / "policy"
            model.save_pretrained(written)
            tokenizer.save_pretrained(written)
            if not folder.exists():  # Another process may have made the same one meanwhile.
                written.rename(folder)

    def _practice(self, folder: Path) -> tuple[list[Example], SQLEnvironment]:
        """Questions about renamed copies of the databases that the demonstrations are about."""
        environment = self.environment
        if self.warm_start.renamed_copies == 0:
            return [], environment
        names = sorted({example.database for example in self.examples})
        write_renamed_copies(
            environment.databases, names, folder, copies=self.warm_start.renamed_copies, seed=self.seed
        )
        wanted = QuestionSet(
            "copies", databases="train", count=self.warm_start.copy_questions, lookup_share=0.8, side="any"
        )
        make_questions(folder, folder, seed=self.seed, question_sets=[wanted])
        if not (folder / "copies.jsonl").exists():
            return [], environment  # The databases hold too little to ask about.
        databases = Databases(folder)
        executor = SQLExecutor(environment.settings.limits)
        examples = load_examples(folder / "copies.jsonl", databases, executor, check_gold=False)
        return examples, SQLEnvironment(databases, executor, environment.settings)
