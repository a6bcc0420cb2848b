"""Tiny random models, tokenizers and LoRA adapters on disk, of the real classes.

`python -m tests.tiny_model FOLDER` writes the model of config/test.yaml.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.rounding import in_float64

CHAT_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKEN_IDS = torch.arange(2 * 24).reshape(2, 24)


def write_tokenizer(
    folder: Path, texts: Sequence[str] = (), *, vocab_size: int = 400
) -> PreTrainedTokenizerFast:
    """A tokenizer with chat markers and template; one token a byte (ids 0..255), or more with `texts`.

    Args:
        texts: To learn `vocab_size` byte-level tokens from.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if texts:
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
        backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_model(
    folder: Path,
    *,
    architecture: str = "llama",
    vocab_size: int = 304,
    hidden_size: int = 32,
    num_layers: int = 2,
    max_positions: int = 128,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    texts: Sequence[str] = (),
    **fields: Any,
) -> Path:
    """A random model with its tokenizer; `qwen2` ties its embeddings and has biases, `llama` neither.

    Args:
        texts: See `write_tokenizer`.
        fields: Of the architecture's config.
    """
    torch.manual_seed(seed)
    model_class, config_class = {
        "llama": (LlamaForCausalLM, LlamaConfig),
        "qwen2": (Qwen2ForCausalLM, Qwen2Config),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config),
        "gemma": (GemmaForCausalLM, GemmaConfig),
        "mistral": (MistralForCausalLM, MistralConfig),
    }[architecture]
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        tie_word_embeddings=architecture == "qwen2",
        initializer_range=0.1,
        **fields,
    )
    model_class(config).to(dtype).save_pretrained(folder)
    write_tokenizer(folder, texts, vocab_size=vocab_size - 4)
    return folder


def write_adapter(
    folder: Path, base: Path, *, target_modules: str | list[str] = "all-linear", seed: int = 1
) -> Path:
    """A LoRA adapter for `base`, its weights random so that it changes the answers."""
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules=target_modules, lora_dropout=0.1, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> torch.Tensor:
    """Logits for `TOKEN_IDS`, shape (2, 24, vocabulary), without dropout."""
    return model.eval()(input_ids=TOKEN_IDS, use_cache=False).logits


def exact_logits_of(model: torch.nn.Module) -> torch.Tensor:
    """Logits of `logits_of` in float64, where models with equal weights agree; the model stays in float64."""
    with in_float64():
        return logits_of(model.double())


def write_test_config_model(folder: Path) -> None:
    """The random model of config/test.yaml; its tokenizer is trained on some bundled questions."""
    questions = Path(__file__).parents[1] / "data" / "questions" / "train.jsonl"
    rows = [json.loads(line) for line in questions.read_text(encoding="utf-8").splitlines()[:300]]
    texts = [f"<answer>{row['gold_sql']}</answer>\n{row['question']}" for row in rows]
    write_model(folder, texts=texts, vocab_size=1024, hidden_size=64, max_positions=1024)


if __name__ == "__main__":
    write_test_config_model(Path(sys.argv[1]))
