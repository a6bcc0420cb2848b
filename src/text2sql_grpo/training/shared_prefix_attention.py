"""Attention over a flat list of tokens: prefixes, each followed by the sequences that continue it.

No padding and no repeated prefix. Scores are computed tile by tile, and again for the gradient, so that
their memory does not grow with the batch (as in FlashAttention, Dao et al. 2022, arXiv:2205.14135).

Shapes: N tokens, H key-value heads, Q query heads of each, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "shared_prefix"
_TILE = 128  # queries
_FAR = -1e30  # finite, so that it can be added and taken off


@dataclass(frozen=True)
class _Tile:
    """A tile of queries, which attend to `prefix` and to `own`.

    Attributes:
        own: Keys of the queries' sequences; the queries' own keys are the last.
        mask: Added to the scores of the queries' own keys; shape (queries, queries).
    """

    queries: slice
    prefix: slice
    own: slice
    mask: torch.Tensor


@dataclass(frozen=True)
class PackedTokens:
    """Tokens of one pass, group by group: a prefix, then its continuations one after another.

    Attributes:
        ids: Shape (N,).
        positions: Position of each token in its own sequence; shape (N,).
        tiles: All queries with the keys that they attend to.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    tiles: list[_Tile]

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of a model after `attend_to_packed`."""
        return {
            "input_ids": self.ids[None],
            "position_ids": self.positions[None],
            "attention_mask": self.ids.new_zeros(1, 1, 1, 1),  # unused; transformers makes a mask without it
            "packed": self,
        }


def pack(groups: Sequence[tuple[list[int], Sequence[list[int]]]], device: torch.device) -> PackedTokens:
    """Pack prefixes, each with its continuations; both may be empty."""
    ids: list[int] = []
    positions: list[int] = []
    tiles = []
    causal = torch.full((_TILE, _TILE), _FAR, device=device).triu_(1)
    for prefix, continuations in groups:
        start, end = len(ids), len(ids) + len(prefix)
        tiles += _tiles([(start, end)], slice(start, start), causal)
        ids += prefix
        positions += range(len(prefix))
        spans = []
        for continuation in continuations:
            spans.append((len(ids), len(ids) + len(continuation)))
            ids += continuation
            positions += range(len(prefix), len(prefix) + len(continuation))
        tiles += _tiles(spans, slice(start, end), causal)
    return PackedTokens(torch.tensor(ids, device=device), torch.tensor(positions, device=device), tiles)


def _tiles(spans: Sequence[tuple[int, int]], prefix: slice, causal: torch.Tensor) -> list[_Tile]:
    """Cut sequences into tiles: several short sequences in one, a long one in several."""
    tiles = []
    short: list[tuple[int, int]] = []
    for start, end in spans:
        if short and end - short[0][0] > _TILE:
            tiles.append(_tile_of_short(short, prefix, causal))
            short = []
        if 0 < end - start <= _TILE:
            short.append((start, end))
            continue
        for first in range(start, end, _TILE):
            queries = slice(first, min(first + _TILE, end))
            size = queries.stop - first
            tiles.append(_Tile(queries, prefix, slice(start, queries.stop), causal[:size, :size]))
    return [*tiles, _tile_of_short(short, prefix, causal)] if short else tiles


def _tile_of_short(spans: Sequence[tuple[int, int]], prefix: slice, causal: torch.Tensor) -> _Tile:
    queries = slice(spans[0][0], spans[-1][1])
    size = queries.stop - queries.start
    mask = causal[:size, :size]
    if len(spans) > 1:
        lengths = torch.tensor([end - start for start, end in spans], device=mask.device)
        number = torch.arange(len(spans), device=mask.device).repeat_interleave(lengths, output_size=size)
        mask = mask.masked_fill(number[:, None] != number, _FAR)
    return _Tile(queries, prefix, queries, mask)


class _SharedPrefixAttention(torch.autograd.Function):
    """Attention of scaled queries (H, Q, N, D) to keys and values (H, N, D)."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tiles: list[_Tile]
    ) -> torch.Tensor:
        output = torch.empty_like(query)
        for tile in tiles:
            attended = _weights(query, key, tile).to(value.dtype) @ _seen(value, tile)
            output[:, :, tile.queries] = attended.unflatten(1, (query.shape[1], -1))
        ctx.save_for_backward(query, key, value, output)
        ctx.tiles = tiles
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        query, key, value, output = ctx.saved_tensors
        gradient = gradient.to(query.dtype)
        dots = (gradient.float() * output.float()).sum(-1, keepdim=True)
        to_query = torch.empty_like(query)
        to_key = torch.zeros_like(key, dtype=torch.float32)
        to_value = torch.zeros_like(value, dtype=torch.float32)
        for tile in ctx.tiles:
            weights = _weights(query, key, tile)
            received = gradient[:, :, tile.queries].flatten(1, 2)
            _add(to_value, tile, weights.to(value.dtype).mT @ received)
            to_weights = (received @ _seen(value, tile).mT).float()
            to_weights -= dots[:, :, tile.queries].flatten(1, 2)
            to_scores = weights.mul_(to_weights).to(key.dtype)
            to_query[:, :, tile.queries] = (to_scores @ _seen(key, tile)).unflatten(1, (query.shape[1], -1))
            _add(to_key, tile, to_scores.mT @ query[:, :, tile.queries].flatten(1, 2))
        return to_query, to_key.to(key.dtype), to_value.to(value.dtype), None


def _seen(states: torch.Tensor, tile: _Tile) -> torch.Tensor:
    """Keys or values that a tile's queries attend to, shape (H, prefix and own, D)."""
    if tile.prefix.stop in (tile.prefix.start, tile.own.start):  # one behind the other
        return states[:, tile.own.start - (tile.prefix.stop - tile.prefix.start) : tile.own.stop]
    return torch.cat([states[:, tile.prefix], states[:, tile.own]], dim=1)


def _weights(query: torch.Tensor, key: torch.Tensor, tile: _Tile) -> torch.Tensor:
    """Attention weights of one tile, float32, shape (H, Q * queries, prefix and own)."""
    queries, keys = query[:, :, tile.queries].flatten(1, 2), _seen(key, tile)
    if query.device.type == "cpu":  # sdpa does not round scores to bfloat16 either: a third less error
        queries, keys = queries.float(), keys.float()
    scores = queries @ keys.mT
    among = scores.unflatten(1, (query.shape[1], -1))[..., -len(tile.mask) :]
    among += tile.mask.to(scores.dtype)
    return scores.softmax(-1, dtype=torch.float32)


def _add(total: torch.Tensor, tile: _Tile, part: torch.Tensor) -> None:
    """Add the gradients of a tile's keys or values to those of all tokens."""
    length = tile.prefix.stop - tile.prefix.start
    total[:, tile.prefix] += part[:, :length]
    total[:, tile.own] += part[:, length:]


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    packed: PackedTokens | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if packed is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return output, None
    # Under autocast, rotated queries and keys are float32.
    scaled = (query[0] * scaling).to(value.dtype).unflatten(0, (key.shape[1], -1))
    with torch.autocast(query.device.type, enabled=False):
        output = _SharedPrefixAttention.apply(  # type: ignore[no-untyped-call]
            scaled, key[0].to(value.dtype), value[0], packed.tiles
        )
    return output.flatten(0, 1).transpose(0, 1)[None], None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def attend_to_packed(model: PreTrainedModel) -> None:
    """Let a model forward `packed` tokens too; other inputs use sdpa as before.

    Not undone: gradient checkpointing calls attention again in the backward pass.
    """
    model.set_attn_implementation(ATTENTION)
