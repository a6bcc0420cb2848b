"""KV cache of many sequences, each with a shared prefix and a suffix of its own.

A forward pass takes a flat list of tokens, without padding: new tokens of any number of sequences, one or
many of each. Attention over the prefix is one matrix product for all its sequences together, so that its
keys and values are stored once and read once (as in Hydragen, Juravsky et al. 2024, arXiv:2402.05099).

Windows, softcaps and sinks are those that a layer passes to its attention, as to FlashAttention.

Shapes: N tokens of a pass, R rows (sequences), F prefixes, H key-value heads, Q query heads of each,
S suffix and P prefix capacity, D head size (of values another one than of queries and keys, in some models).
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

ATTENTION = "slots"
_FAR = -1e30  # finite, so that a row without any key gives no NaN
_STEP = 32  # tokens by which the capacity grows
_QUERIES = 256  # per block of scores, where torch's attention has no such layer


@dataclass(frozen=True)
class LayerKind:
    """Attention of one layer.

    Attributes:
        layer: Its place among the attentions of a pass; some layers attend more than once.
        scaling: Factor of the scores.
        window: Number of tokens that a query attends to, its own included; None for all before it.
        softcap: Bound of the scores; None for none.
        sinks: Score of a key without a value, of each query head; None for none.
    """

    layer: int
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


_RUNNING: ContextVar[tuple["PrefillPass | StepPass", Iterator[int]]] = ContextVar(
    "pass of the current forward call"
)


@contextmanager
def running(slot_pass: "PrefillPass | StepPass") -> Iterator[None]:
    """Context of a forward call whose layers attend by a pass."""
    token = _RUNNING.set((slot_pass, itertools.count()))
    try:
        yield
    finally:
        _RUNNING.reset(token)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    slot_pass, places = _RUNNING.get()
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    kind = LayerKind(next(places), scaling, sliding_window, softcap, s_aux)
    return slot_pass.attend(kind, query[0], key[0], value[0])[None], None


AttentionInterface.register(ATTENTION, _attention)


class Store:
    """Keys and values of each layer for rows or prefixes, shape (places, H, tokens, D).

    A layer's tensors are made for the first states that it attends to: heads and their sizes may differ
    between layers, and between keys and values.

    Attributes:
        places: Capacity in rows or prefixes.
        tokens: Capacity of each in tokens.
        layers: Keys and values by the index of the layer.
    """

    def __init__(self) -> None:
        self.places = self.tokens = 0
        self.layers: dict[int, list[torch.Tensor]] = {}

    def of_layer(self, layer: int, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return keys and values of a layer that attends to `states`: keys and values (H, N, D)."""
        if layer not in self.layers:
            self.layers[layer] = [
                each.new_zeros(self.places, each.shape[0], self.tokens, each.shape[2]) for each in states
            ]
        return self.layers[layer]

    def resize(self, places: int, tokens: int) -> None:
        """Change the capacity, layer by layer, so that one layer at a time is there twice."""
        if (places, tokens) != (self.places, self.tokens):
            self.places, self.tokens = places, tokens
            for layer, stored in self.layers.items():
                self.layers[layer] = [_resized(each, places, tokens) for each in stored]

    def move(self, source: int, target: int) -> None:
        """Copy the place `source` over another one."""
        for stored in self.layers.values():
            for each in stored:
                each[target] = each[source]


class SlotCache:
    """KV cache; rows and prefixes in use are contiguous.

    Attributes:
        suffixes: Keys and values of rows.
        prefixes: Keys and values of prefixes.
        num_rows: Rows in use.
        prefix: Index of each row's prefix; shape (max_rows,).
        length: Stored suffix tokens of each row; shape (max_rows,).
        prefix_lengths: Tokens of each prefix in use.
    """

    def __init__(self, *, max_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.num_rows = dtype, 0
        self.prefix = torch.zeros(max_rows, dtype=torch.long, device=device)
        self.length = torch.zeros(max_rows, dtype=torch.long, device=device)
        self.prefix_lengths: list[int] = []
        self.suffixes, self.prefixes = Store(), Store()
        self._line: _Line | None = None
        self._longest: int | None = None  # at least the longest suffix; None if rows came or went

    def add_prefixes(self, lengths: Sequence[int]) -> None:
        """Add prefixes behind those in use, to be filled by a `PrefillPass`."""
        self.prefix_lengths += lengths
        tokens = max(self.prefixes.tokens, _rounded(max(self.prefix_lengths)))
        self.prefixes.resize(max(self.prefixes.places, len(self.prefix_lengths)), tokens)
        self._line = None

    def drop_prefix(self, number: int) -> int:
        """Remove an unused prefix; returns the old index of the one that takes its place."""
        last = len(self.prefix_lengths) - 1
        self.prefixes.move(last, number)
        self.prefix[self.prefix == last] = number
        self.prefix_lengths[number] = self.prefix_lengths[last]
        self.prefix_lengths.pop()
        self._line = None
        return last

    def add_row(self, prefix: int) -> int:
        """Add a row without a suffix; returns its index."""
        row = self.num_rows
        self.num_rows += 1
        self.prefix[row] = prefix
        self.length[row] = 0
        self._line = self._longest = None
        return row

    def drop_row(self, row: int) -> int:
        """Remove a row; returns the old index of the one that takes its place."""
        self.num_rows -= 1
        last = self.num_rows
        if row != last:
            for state in (self.prefix, self.length):
                state[row] = state[last].clone()
            if last < self.suffixes.places:  # else it has no room yet, and no suffix
                self.suffixes.move(last, row)
        self._line = self._longest = None
        return last

    def make_room(self, positions: torch.Tensor, *, is_one_each: bool) -> None:
        """Resize the suffixes so that every row in use can hold tokens at these positions.

        Synchronises with the device only if more has changed than one token per row.
        """
        if self._longest is None or not is_one_each:
            self._longest = int(torch.cat([positions + 1, self.length[: self.num_rows]]).max())
        else:
            self._longest += 1
        tokens = self._longest
        rows, capacity = self.suffixes.places, self.suffixes.tokens
        if not capacity // 2 < _rounded(tokens) <= capacity:
            rows, capacity = self.num_rows, _rounded(tokens + tokens // 8)
        self.suffixes.resize(max(rows, self.num_rows), capacity)

    def line(self) -> "_Line":
        """Layout of the rows in use by prefix."""
        if self._line is None:
            prefix = self.prefix[: self.num_rows]
            lengths = torch.tensor(self.prefix_lengths, device=prefix.device)
            counts = prefix.bincount(minlength=len(lengths))
            order = prefix.argsort(stable=True)
            index = torch.arange(len(prefix), device=prefix.device)
            rank = torch.empty_like(prefix)
            rank[order] = index - (counts.cumsum(0) - counts)[prefix[order]]
            per_prefix = int(counts.max())
            places = prefix * per_prefix + rank
            is_token = torch.arange(self.prefixes.tokens, device=prefix.device) < lengths[:, None]
            mask = torch.where(is_token, 0.0, _FAR)[:, None]
            rows = _inverse(places, len(lengths) * per_prefix)
            self._line = _Line(per_prefix, places, rows, mask, lengths)
        return self._line


def _rounded(tokens: int) -> int:
    return max(1, -(-tokens // _STEP)) * _STEP


def _resized(stored: torch.Tensor, places: int, tokens: int) -> torch.Tensor:
    kept = stored[:places, :, :tokens]
    resized = stored.new_empty((places, stored.shape[1], tokens, stored.shape[3]))
    resized[: len(kept), :, : kept.shape[2]] = kept
    # Unwritten entries are read too, with weight 0: they must be finite.
    resized[len(kept) :] = 0
    resized[: len(kept), :, kept.shape[2] :] = 0
    return resized


@dataclass(frozen=True)
class _Line:
    """Layout of the rows in use by their prefix, with the same number of places for each prefix.

    Attributes:
        per_prefix: Places per prefix.
        places: Place of each row.
        rows: Row of each place; any row if the place is free.
        mask: Mask added to the scores of the prefixes' tokens; shape (F, 1, P).
        lengths: Tokens of each prefix; shape (F,).
    """

    per_prefix: int
    places: torch.Tensor
    rows: torch.Tensor
    mask: torch.Tensor
    lengths: torch.Tensor


def _inverse(places: torch.Tensor, size: int) -> torch.Tensor:
    """Inverse of `places`: the index at each of `size` places; 0 if the place is free."""
    inverse = places.new_zeros(size)
    inverse[places] = torch.arange(len(places), device=places.device)
    return inverse


class PrefillPass:
    """Prefill of prefixes: their tokens one after another, each prefix causal in itself.

    Args:
        numbers: Indices of the prefixes, in the order of their tokens.
    """

    def __init__(self, cache: SlotCache, numbers: Sequence[int]) -> None:
        self._cache, self._numbers = cache, numbers
        self._lengths = [cache.prefix_lengths[number] for number in numbers]

    def attend(
        self, kind: LayerKind, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attention output, shape (N, H * Q, D), of queries (H * Q, N, D), keys and values (H, N, D)."""
        query, key, value = (each.to(self._cache.dtype) for each in (query, key, value))
        prefixes = self._cache.prefixes.of_layer(kind.layer, (key, value))
        outputs = []
        spans = (each.split(self._lengths, dim=1) for each in (query, key, value))
        for number, queries, keys, values in zip(self._numbers, *spans, strict=True):
            for stored, states in zip(prefixes, (keys, values), strict=True):
                stored[number, :, : states.shape[1]] = states
            outputs.append(_causal(queries, keys, values, kind))
        return torch.cat(outputs, dim=1).transpose(0, 1).contiguous()  # JetMoE's code needs a view of it


def _causal(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kind: LayerKind) -> torch.Tensor:
    """Attention of one sequence's last tokens to all of it, shape (H * Q, tokens, D) as the queries."""
    count, before = query.shape[1], keys.shape[1] - query.shape[1]
    mask = None
    if before or (kind.window is not None and kind.window < count):
        mask = torch.ones(count, before + count, dtype=torch.bool, device=query.device).tril(before)
        if kind.window is not None:
            mask = mask.triu(before - kind.window + 1)
    if kind.softcap is None and kind.sinks is None:
        return functional.scaled_dot_product_attention(
            query[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=kind.scaling,
            enable_gqa=len(query) != len(keys),
        )[0]
    if mask is None:
        mask = torch.ones(count, count, dtype=torch.bool, device=query.device).tril()
    heads = (len(keys), -1)
    outputs = []
    for part, seen in zip((query * kind.scaling).split(_QUERIES, dim=1), mask.split(_QUERIES), strict=True):
        grouped = part.unflatten(0, heads)  # (H, Q, tokens, D)
        hidden = torch.where(seen, 0.0, _FAR).repeat(grouped.shape[1], 1)
        found = _attended(grouped.flatten(1, 2), keys, values, hidden, kind)
        output, log_sum = (each.view(*part.shape[:2], -1) for each in found)
        if kind.sinks is not None:
            output = output * (log_sum - kind.sinks.float()[:, None, None]).sigmoid()
        outputs.append(output.to(query.dtype))
    return torch.cat(outputs, dim=1)


class StepPass:
    """Pass that appends tokens to suffixes: one to each of some rows, then several to each of some others.

    Args:
        singles: Rows that get one token, in order; shape (n,).
        chunk_rows: Rows that get several.
        chunk_sizes: Number of tokens of each.
        num_short: Number of leading chunks that are short, and attend together with the single tokens.

    Attributes:
        rows: Row of each token; shape (N,).
        positions: Position of each token in its suffix; shape (N,).
    """

    def __init__(
        self,
        cache: SlotCache,
        singles: torch.Tensor,
        chunk_rows: Sequence[int],
        chunk_sizes: Sequence[int],
        num_short: int = 0,
    ) -> None:
        self._cache = cache
        # Row, prefix, new tokens, and length of the suffix with these, of each of the other chunks.
        self._chunks: list[list[int]] = []
        device = singles.device
        rows = torch.tensor(chunk_rows, dtype=torch.long, device=device)
        sizes = torch.tensor(chunk_sizes, dtype=torch.long, device=device)
        count = sum(chunk_sizes)  # given, to avoid a synchronisation with the device
        index = torch.arange(len(rows), device=device).repeat_interleave(sizes, output_size=count)
        columns = torch.arange(count, device=device) - (sizes.cumsum(0) - sizes)[index]
        self.rows = torch.cat([singles, rows[index]])
        columns = torch.cat([torch.zeros_like(singles), columns])
        self.positions = cache.length[self.rows] + columns
        cache.make_room(self.positions, is_one_each=not chunk_rows)
        first = self._num_first = len(singles) + sum(chunk_sizes[:num_short])
        width = max(chunk_sizes[:num_short], default=1)
        self._first = _Together(cache, self.rows[:first], columns[:first], width) if first else None
        rows, sizes = rows[num_short:], sizes[num_short:]
        if len(rows):
            facts = (rows, cache.prefix[rows], sizes, cache.length[rows] + sizes)
            self._chunks = torch.stack(facts, dim=1).tolist()

    def attend(
        self, kind: LayerKind, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attention output, shape (N, H * Q, D), of queries (H * Q, N, D), keys and values (H, N, D)."""
        cache, dtype = self._cache, self._cache.dtype
        new = key.to(dtype), value.to(dtype)
        cache.prefixes.of_layer(kind.layer, new)  # made here if no prefix has a token
        suffixes = cache.suffixes.of_layer(kind.layer, new)
        for stored, states in zip(suffixes, new, strict=True):
            stored[self.rows, :, self.positions] = states.transpose(0, 1)
        outputs = []
        start = self._num_first
        if self._first is not None:
            first = (query[:, :start] * kind.scaling).to(dtype).transpose(0, 1)
            outputs.append(self._first.attend(kind, first.unflatten(1, (len(key), -1))).flatten(1, 2))
        # One attention for each row computes no padding: replies differ in length by ten times.
        for row, prefix, size, length in self._chunks:
            parts = zip(cache.prefixes.layers[kind.layer], suffixes, strict=True)
            keys, values = (
                torch.cat([shared[prefix, :, : cache.prefix_lengths[prefix]], own[row, :, :length]], dim=1)
                for shared, own in parts
            )
            chunk = query[:, start : start + size].to(dtype)
            outputs.append(_causal(chunk, keys, values, kind).transpose(0, 1))
            start += size
        return torch.cat(outputs)


class _Together:
    """A few queries of each of some rows, against the stored keys; for all rows in use, without a copy.

    Args:
        rows: Row of each query.
        columns: Its number among the queries of its row.
        width: Most queries of a row; T below.
    """

    def __init__(self, cache: SlotCache, rows: torch.Tensor, columns: torch.Tensor, width: int) -> None:
        self._cache, self._places, self._width = cache, rows * width + columns, width
        self._tokens = _inverse(self._places, cache.num_rows * width)
        columns = torch.arange(width, device=rows.device)
        self._last = cache.length[: cache.num_rows, None] + columns  # token that is seen last; (R, T)
        seen = torch.arange(cache.suffixes.tokens, device=rows.device) <= self._last[..., None]
        self._line = cache.line()
        # Of suffixes (R, T, S) and of prefixes (F, 1 or places * T, P), by the window.
        self._masks: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}
        self._masks[None] = (torch.where(seen, 0.0, _FAR), self._line.mask)

    def attend(self, kind: LayerKind, query: torch.Tensor) -> torch.Tensor:
        """Attention output of these queries, shape (n, H, Q, D) as they are."""
        heads = query.shape[1:3]
        query = query[self._tokens].unflatten(0, (-1, self._width))
        query = query.transpose(1, 2).flatten(2, 3)  # (R, H, T * Q, D)
        suffix_mask, prefix_mask = (
            mask if mask.shape[1] == 1 else mask.repeat_interleave(heads[1], dim=1)
            for mask in self._masks_of(kind.window)
        )
        keys, values = (each[: self._cache.num_rows] for each in self._cache.suffixes.layers[kind.layer])
        own = _attended(query, keys, values, suffix_mask[:, None], kind)

        line = self._line
        count = len(self._cache.prefix_lengths)
        keys, values = (each[:count] for each in self._cache.prefixes.layers[kind.layer])
        in_line = query[line.rows].unflatten(0, (count, line.per_prefix))
        in_line = in_line.transpose(1, 2).flatten(2, 3)  # (F, H, places * T * Q, D)
        shared = [
            part.unflatten(2, (line.per_prefix, -1)).transpose(1, 2).flatten(0, 1)[line.places]
            for part in _attended(in_line, keys, values, prefix_mask[:, None], kind)
        ]
        share = (shared[1] - own[1]).sigmoid()  # softmax over the keys of both
        output = torch.lerp(own[0].float(), shared[0].float(), share)
        if kind.sinks is not None:
            sinks = kind.sinks.float().view(*heads, 1).repeat(1, self._width, 1)
            output = output * (torch.logaddexp(own[1], shared[1]) - sinks).sigmoid()
        output = output.to(query.dtype).unflatten(2, (self._width, -1)).transpose(1, 2).flatten(0, 1)
        picked: torch.Tensor = output[self._places]
        return picked

    def _masks_of(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Masks of suffixes and of prefixes."""
        line, cache = self._line, self._cache
        capacity, longest = cache.suffixes.tokens, max(cache.prefix_lengths)
        if window is not None and window >= longest + capacity:
            window = None
        if window is not None and window not in self._masks:
            suffix, prefix = self._masks[None]
            device, prefixes = suffix.device, cache.prefix[: cache.num_rows]
            first = self._last - window + 1  # in the suffix; below 0 in the prefix
            hidden = torch.arange(capacity, device=device) < first[..., None]
            suffix = suffix.masked_fill(hidden, _FAR)
            first = (first + line.lengths[prefixes][:, None])[line.rows].view(len(line.lengths), -1)
            hidden = torch.arange(prefix.shape[-1], device=device) < first[..., None]  # (F, places * T, P)
            prefix = prefix.masked_fill(hidden, _FAR)
            self._masks[window] = suffix, prefix
        return self._masks[window]


def _attended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, kind: LayerKind
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output, and the logarithm of the sum of the exponentials of each query's scores."""
    scores = query @ keys.transpose(-1, -2)
    if kind.window is not None or kind.softcap is not None:
        scores = scores.float()  # float16 does not hold `_FAR`, which may hide all keys of a query here
    if kind.softcap is not None:
        scores = (scores / kind.softcap).tanh_().mul_(kind.softcap)
    scores = scores.add_(mask)
    weights = scores.softmax(-1, dtype=torch.float32)
    # The largest weight is its score's exponential over the sum; cheaper than a logsumexp.
    log_sum = scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
    return weights.to(values.dtype) @ values, log_sum
