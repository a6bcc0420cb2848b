"""Sampling of the next token: temperature, top-k, top-p and min-p as transformers defines them."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

_BLOCK = 256  # tokens


@dataclass(frozen=True)
class Sampling:
    """Sampling distribution over the vocabulary; TRL's fields and defaults.

    Attributes:
        temperature: 0 is greedy.
        top_p: In (0, 1]; 1 keeps every token.
        top_k: 0 keeps every token.
        min_p: In [0, 1]; None keeps every token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None

    @cached_property
    def _warpers(self) -> LogitsProcessorList:
        warpers = LogitsProcessorList()
        if self.temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            warpers.append(TopPLogitsWarper(self.top_p))
        if self.min_p is not None:
            warpers.append(MinPLogitsWarper(self.min_p))
        return warpers

    def uniforms(self, num_sessions: int, num_tokens: int) -> torch.Tensor:
        """Uniform random numbers in [0, 1) for `draw`, shape (num_sessions, num_tokens).

        With one number for each token of each session, samples depend on the seed and not on the batch.
        """
        return torch.rand(num_sessions, num_tokens if self.temperature > 0 else 1)

    def draw(self, logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample one token per row, with its log-probability.

        A greedy token's is that of the distribution at temperature 1.

        Args:
            logits: Shape (N, vocabulary).
            uniforms: From `uniforms`, shape (N,).

        Returns:
            Token ids and float32 log-probabilities, both of shape (N,).
        """
        logits = logits.float()
        if self.temperature == 0:
            tokens = logits.argmax(-1)
        else:
            logits = self._warpers(torch.empty(0), logits)
            tokens = _drawn(logits.softmax(-1), uniforms)
        return tokens, logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def _drawn(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """First token of each row whose cumulative probability is above its uniform number; shape (N,).

    First its block of tokens is found, then the token: a float64 sum over the whole vocabulary takes as long
    as a fifth of a decode step of a small model. A token of probability 0 is never drawn.
    """
    rest = -probabilities.shape[-1] % _BLOCK
    blocks = (functional.pad(probabilities, (0, rest)) if rest else probabilities).unflatten(-1, (-1, _BLOCK))
    mass = blocks.sum(-1).double().cumsum(-1)
    heights = uniforms.double()[:, None] * mass[:, -1:]
    block = torch.searchsorted(mass, heights, right=True)
    before = functional.pad(mass, (1, 0)).gather(-1, block)
    own = before + blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(-1)
    # The float32 sum of the block may be larger than `own` by a rounding.
    heights = torch.minimum(heights, own[:, -1:].nextafter(before))
    return (block * _BLOCK + torch.searchsorted(own, heights, right=True))[:, 0]
