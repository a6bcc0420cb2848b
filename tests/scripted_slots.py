"""The engine `slots` with a tiny random model that says what a test tells it to."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from text2sql_grpo.rollout.chat_format import ChatFormat
from text2sql_grpo.rollout.policy import SlotPolicy
from text2sql_grpo.rollout.sampling import Sampling


@dataclass(frozen=True)
class ScriptedSampling(Sampling):
    """Draws given tokens.

    Attributes:
        episodes: Of each session that can begin, all tokens that it says, one turn after another.
    """

    episodes: tuple[tuple[int, ...], ...] = ()

    def uniforms(self, num_sessions: int, num_tokens: int) -> torch.Tensor:
        assert num_sessions == len(self.episodes)
        width = max(num_tokens, *map(len, self.episodes))
        return torch.tensor([[*said, *[0] * (width - len(said))] for said in self.episodes])

    def draw(self, logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert len(logits) == len(uniforms)
        return uniforms, logits.log_softmax(-1).gather(-1, uniforms[:, None])[:, 0]


@cache
def smallest_model() -> PreTrainedModel:
    """One layer, random weights; long enough for every test."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=304,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=20_000,
    )
    return LlamaForCausalLM(config).eval()


def scripted_slots(
    chat: ChatFormat, episodes: Sequence[Sequence[str | list[int]]], *, max_slots: int | None = None
) -> SlotPolicy:
    """A policy that says these turns; a turn is a text, which gets its end-of-turn token, or token ids.

    Args:
        episodes: The sampled turns of each session that can begin.
    """
    said = tuple(
        tuple(token for turn in turns for token in (chat.turn_ids(turn) if isinstance(turn, str) else turn))
        for turns in episodes
    )
    return SlotPolicy(smallest_model(), ScriptedSampling(episodes=said), max_slots)
