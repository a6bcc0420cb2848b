"""Log-probs of completions, with each distinct prompt of a micro-batch forwarded once.

A prompt's completions stand behind it in one flat list without padding (`shared_prefix_attention`). Only what
comes before a scored token is forwarded, and only scored tokens get logits.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from text2sql_grpo.training.shared_prefix_attention import PackedTokens, pack


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch of B rows with completions of up to K tokens.

    Attributes:
        tokens: What is forwarded.
        sources: Of each scored token, the forwarded token that predicts it; shape (M,).
        targets: The scored tokens; shape (M,).
        places: Of each scored token, its place among all B * K; shape (M,).
        shape: (B, K).
    """

    tokens: PackedTokens
    sources: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    shape: tuple[int, int]

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the scored tokens in their places, 0 elsewhere; shape (B, K)."""
        empty = values.new_zeros(self.shape[0] * self.shape[1])
        return empty.index_copy(0, self.places, values).view(self.shape)


def pack_batch(input_ids: torch.Tensor, attention_mask: torch.Tensor, is_scored: torch.Tensor) -> PackedBatch:
    """Rows with equal prompts behind one copy of it.

    Args:
        input_ids: Prompts and completions, padded anywhere; shape (B, P + K).
        attention_mask: 0 for padding; same shape.
        is_scored: Which completion tokens need a log-prob; shape (B, K). If none does, the first one gets it,
            so that the result depends on the weights all the same.
    """
    batch_size, width = is_scored.shape
    ids, present, scored = input_ids.cpu(), attention_mask.bool().cpu(), is_scored.bool().cpu()
    prompt_width = ids.shape[1] - width
    scored = scored & present[:, prompt_width:]
    if not scored.any():
        scored = torch.zeros_like(scored).index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(True))
        present = present.clone()
        present[0, prompt_width] = True
    groups: list[tuple[list[int], list[list[int]]]] = []
    columns: dict[int, torch.Tensor] = {}
    members = []
    for rows in group_rows(ids[:, :prompt_width], present[:, :prompt_width]):
        members.append([row for row in rows if scored[row].any()])
        continuations = []
        for row in members[-1]:
            columns[row] = present[row, prompt_width:].nonzero()[:, 0]
            last = int(scored[row, columns[row]].nonzero().max())
            continuations.append(ids[row, prompt_width + columns[row][:last]].tolist())
        prompt = ids[rows[0], :prompt_width][present[rows[0], :prompt_width]].tolist()
        groups.append((prompt if continuations else [], continuations))
    tokens = pack(groups, input_ids.device)
    sources, places = [], []
    for (prompt, _), rows, starts in zip(groups, members, tokens.starts, strict=True):
        for row, start in zip(rows, starts[1:], strict=True):
            numbers = scored[row, columns[row]].nonzero()[:, 0]
            before = torch.where(numbers == 0, starts[0] + len(prompt) - 1, start + numbers - 1)
            sources.append(before)
            places.append(row * width + columns[row][numbers])
    place = torch.cat(places)
    targets = ids[:, prompt_width:].flatten()[place]
    device = input_ids.device
    return PackedBatch(
        tokens, torch.cat(sources).to(device), targets.to(device), place.to(device), (batch_size, width)
    )


def group_rows(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor) -> list[list[int]]:
    """Rows with equal prompts, in the order in which those come first; both of shape (B, P)."""
    rows_of = defaultdict(list)
    for row, (ids, mask) in enumerate(zip(prompt_ids.cpu(), prompt_mask.bool().cpu(), strict=True)):
        rows_of[tuple(ids[mask].tolist())].append(row)
    return list(rows_of.values())


@contextmanager
def keep_hidden_states(backbone: torch.nn.Module, places: torch.Tensor) -> Iterator[None]:
    """Lets a model's head see the hidden states of some tokens alone."""

    def keep(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, places]
        return output

    hook = backbone.register_forward_hook(keep)
    try:
        yield
    finally:
        hook.remove()
