"""A policy made on the spot: a tokenizer trained on the demonstrations and a small random model.

The classes are the real ones (transformers' Llama, a fast tokenizer, a chat template), so everything
that works for it works for a model from the Hub.
"""

import math
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
    """A randomly initialised Llama with tied embeddings, float32, that can already copy.

    Output projections start at zero, and the first two layers hold induction heads: see
    `_hold_induction_heads`.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        max_position_embeddings=settings.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        attention_bias=True,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif parameter.ndim == 2:
                parameter.normal_(std=_WEIGHT_STD)
        if settings.num_layers > 1 and settings.num_heads > 3:
            _hold_induction_heads(model)
    model.generation_config = GenerationConfig(
        eos_token_id=cast(int, tokenizer.eos_token_id), pad_token_id=cast(int, tokenizer.pad_token_id)
    )
    return model


_ROPE_THETA = 1e6
_WEIGHT_STD = 0.05
# Attention logits at their peak, and the scale of what is compared and of what is copied.
_PREVIOUS_LOGIT, _MATCH_SCALE, _COPY_SCALE = 40.0, 3.0, 8.0


def _hold_induction_heads(model: PreTrainedModel) -> None:
    """Writes the induction circuit of Olsson et al. 2022 (arXiv:2209.11895) into the first two layers.

    Two heads of layer 0 attend to the token before and write what it is into the residual stream. Four
    heads of layer 1 attend to tokens that stand behind an earlier copy of the current one, and add
    what stands there to the prediction. Training from nothing finds these heads too, but copying the
    names of an unseen schema then took more steps than a laptop has time for.
    """
    config = model.config
    width, size = config.hidden_size, config.hidden_size // config.num_attention_heads
    half = size // 2
    first, second = (layer.self_attn for layer in model.base_model.layers[:2])
    content = torch.nn.init.orthogonal_(torch.empty(width, width))
    before = torch.nn.init.orthogonal_(torch.empty(width, 2 * size))
    copied = torch.nn.init.orthogonal_(torch.empty(width, width))

    # Rotary pairs (i, i + half) turn by angle[i] per position: a key of constant direction and a query
    # turned back by one step meet best one token apart. Fast pairs tell positions apart.
    angle = _ROPE_THETA ** (-torch.arange(half) / half)
    fast = torch.arange(3)
    strength = math.sqrt(_PREVIOUS_LOGIT * math.sqrt(size) / len(fast))
    for head in range(2):
        rows = slice(head * size, (head + 1) * size)
        first.q_proj.weight[rows] = 0
        first.k_proj.weight[rows] = 0
        first.k_proj.bias[head * size + fast] = strength
        first.q_proj.bias[head * size + fast] = strength * torch.cos(angle[fast])
        first.q_proj.bias[head * size + half + fast] = -strength * torch.sin(angle[fast])
        first.v_proj.weight[rows] = content[rows]
        first.o_proj.weight[:, rows] = _WEIGHT_STD * before[:, rows]

    # Slow pairs hardly turn within a context, so there content can be compared at any distance.
    slow = torch.cat([torch.arange(half // 2, half), torch.arange(half // 2, half) + half])
    for head in range(4):
        rows = slice(head * size, (head + 1) * size)
        part = slice(head * len(slow), (head + 1) * len(slow))
        second.q_proj.weight[rows] = 0
        second.k_proj.weight[rows] = 0
        second.q_proj.weight[head * size + slow] = _MATCH_SCALE * content[part]
        second.k_proj.weight[head * size + slow] = _MATCH_SCALE * before[:, part].T
        second.v_proj.weight[rows] = copied[rows]
        second.o_proj.weight[:, rows] = _COPY_SCALE * _WEIGHT_STD * copied[rows].T
