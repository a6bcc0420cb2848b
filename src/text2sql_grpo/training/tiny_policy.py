"""A policy made on the spot: a tokenizer trained on the demonstrations and a small random model.

The classes are the real ones (transformers' Llama, a fast tokenizer, a chat template), so everything
that works for it works for a model from the Hub.
"""

from collections.abc import Iterable
from typing import cast

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from text2sql_grpo.config import TinyPolicyConfig
from text2sql_grpo.errors import ConfigError

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
_TAGS = ("<think>", "</think>", "<sql>", "</sql>", "<answer>", "</answer>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{{{ '{ASSISTANT}' if message.role == 'assistant' else '{USER}' }}}}"
    f"{{{{ message.content }}}}{END}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)
_KEYWORDS = (
    "SELECT|DISTINCT|FROM|WHERE|JOIN|LEFT|ON|GROUP|BY|HAVING|ORDER|LIMIT|COUNT|SUM|AVG|MIN|MAX|"
    "DESC|ASC|AND|OR|NOT|NULL|IS|IN|LIKE|BETWEEN|UNION|EXISTS|AS|CASE|WHEN|THEN|ELSE|END"
)
# SQL keywords and lower-case words are pieces. So are a plural's `s`, a capital letter, a digit and a sign,
# so that "visits" and `visit`, or the `L` of a question's "Lisbon" and of a stored `02-LSB`, share tokens.
_PIECE = Regex(rf" ?\b(?:{_KEYWORDS})\b| ?\p{{Ll}}+?(?=s\b)|s\b| ?\p{{Ll}}+|[\s\S]")


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with this project's chat template.

    Args:
        texts: What the policy will read and write.
        vocab_size: Entries in all, the special tokens and 256 bytes included.

    Raises:
        ConfigError: `vocab_size` leaves no room for merges.
    """
    smallest = 256 + 4 + len(_TAGS) + 1
    if vocab_size < smallest:
        raise ConfigError(f"expected model.tiny.vocab_size >= {smallest}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECE, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_TAGS),
        special_tokens=[PAD, USER, ASSISTANT, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in _TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(
    settings: TinyPolicyConfig, tokenizer: PreTrainedTokenizerFast, *, seed: int
) -> PreTrainedModel:
    """A randomly initialised Llama with tied embeddings, float32."""
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_heads,
        "max_position_embeddings": settings.max_positions,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**shape))
    model.generation_config = GenerationConfig(
        eos_token_id=cast(int, tokenizer.eos_token_id), pad_token_id=cast(int, tokenizer.pad_token_id)
    )
    return model
