"""The policy outside a trainer: a transformers model."""

from typing import Any, cast

import torch
from transformers import GenerationConfig, PreTrainedModel

from text2sql_grpo.rollout.chat_format import ChatFormat


class ModelPolicy:
    """A transformers model that answers in batches, greedy or sampled.

    Args:
        model: In evaluation mode on its device.
        chat: Its tokenizer and end-of-turn tokens.
        temperature: 0 is greedy.
        batch_size: Rows of one `generate` call.
    """

    def __init__(
        self, model: PreTrainedModel, chat: ChatFormat, *, temperature: float = 0.0, batch_size: int = 64
    ) -> None:
        self._model = model
        self._eos = sorted(chat.eos_token_ids)
        pad = chat.tokenizer.pad_token_id
        self._pad = self._eos[0] if pad is None else cast(int, pad)
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        self._sampling = sampling
        self._batch_size = batch_size

    def generate(self, prompts: list[list[int]], *, max_new_tokens: int) -> list[list[int]]:
        """One continuation per prompt, up to and with the first end-of-turn token."""
        config = GenerationConfig(
            **self._sampling,
            max_new_tokens=max_new_tokens,
            eos_token_id=self._eos,
            pad_token_id=self._pad,
        )
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        replies: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(by_length), self._batch_size):
            chosen = by_length[start : start + self._batch_size]
            for i, reply in zip(chosen, self._continue([prompts[i] for i in chosen], config), strict=True):
                replies[i] = reply
        return replies

    def _continue(self, prompts: list[list[int]], config: GenerationConfig) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self._pad)
        attention = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            attention[row, width - len(prompt) :] = 1
        device = self._model.device
        # What `config` leaves open would come from the model's own: its repetition penalty, its top_k.
        own, self._model.generation_config = self._model.generation_config, GenerationConfig()
        try:
            with torch.inference_mode():
                out = self._model.generate(
                    ids.to(device), attention_mask=attention.to(device), generation_config=config
                )
        finally:
            self._model.generation_config = own
        return [_until_eos(row, set(self._eos)) for row in out[:, width:].tolist()]


def _until_eos(ids: list[int], eos: set[int]) -> list[int]:
    for position, token in enumerate(ids):
        if token in eos:
            return ids[: position + 1]
    return ids


def context_length(model: PreTrainedModel) -> int:
    """Longest sequence that the model was made for, in tokens; a million where it does not say."""
    config = model.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or 1_000_000)
