"""Attention over a `TokenTree`, as a transformers attention: each token attends to its ancestors and itself.

Scores are computed tile by tile, and again for the gradient, so that their memory does not grow with the
batch (as in FlashAttention, Dao et al. 2022, arXiv:2205.14135). On a CUDA device, where launching the kernels
of many tiles takes longer than running them, torch's fused attention does the same in one call, with a mask.

Shapes: N tokens, H key-value heads, Q query heads of each, D head size.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from text2sql_grpo.errors import ModelError
from text2sql_grpo.rollout import policy
from text2sql_grpo.token_tree.tree import Tile, TokenTree

_PREFIX = "token_tree_"  # of the attention's name, before the one for other inputs
_FAR = -1e30  # finite, so that no score is NaN
_MASKED = 16_384  # tokens of a tree, up to which a mask of all pairs is made on a CUDA device: 512 MiB
_ALIGNED = 16  # torch's fused attention copies a mask whose rows do not start at a multiple of it


class _TreeMask:
    """Attention mask of layers with a window (`TokenTree.tiles`), in place of transformers' tensor."""

    def __init__(self, running: "TreePass", window: int | None) -> None:
        self.running, self._window = running, window
        self._added: dict[torch.dtype, torch.Tensor] = {}

    @cached_property
    def tiles(self) -> list[Tile]:
        """Tiles of all queries, with their masks on the device."""
        tiles = self.running.tiles(self._window)
        return [replace(tile, hidden=tile.hidden.to(self.running.device)) for tile in tiles]

    def added(self, dtype: torch.dtype) -> torch.Tensor:
        """Mask that is added to scores, shape (N, N): one for all layers, which keep it for the gradient."""
        if dtype not in self._added:
            tree, device = self.running.tree, self.running.device
            count = len(tree.ids)
            ends, depths = (torch.as_tensor(each, device=device) for each in (tree.ends, tree.depths))
            places = torch.arange(count, device=device)
            hidden = (places > places[:, None]) | (places[:, None] >= ends)
            if self._window is not None and tree.depths.max() >= self._window:
                hidden |= depths[:, None] - depths >= self._window
            width = -(-count // _ALIGNED) * _ALIGNED
            added = torch.zeros(count, width, dtype=dtype, device=device)[:, :count]
            self._added[dtype] = added.masked_fill_(hidden, -torch.inf)
        return self._added[dtype]

    def __getitem__(self, parts: tuple[slice, ...]) -> "_TreeMask":
        """Return the mask of all queries, as Gemma 4 asks for where it could leave some out."""
        if any(part not in (slice(None), slice(0, None)) for part in parts):
            raise IndexError(f"the mask of a token tree has no part {parts}")
        return self


class TreePass:
    """One forward pass of a model over a tree."""

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        self.tree, self.device = tree, device
        self.num_attentions = 0
        self._masks: dict[int | None, _TreeMask] = {}

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[dict[str, Any]]:
        """Context of the pass: keyword arguments of a model after `attend_to_trees`.

        Raises:
            ModelError: A layer did not attend by the tree, so tokens of other rows may have reached it.
        """
        arrays = {
            "input_ids": self.tree.ids,
            "position_ids": self.tree.depths,
            "attention_mask": self.tree.counts,  # weights in the loss of a router; attention ignores them
        }
        token = _RUNNING.set(self)
        try:
            yield {name: torch.as_tensor(each, device=self.device)[None] for name, each in arrays.items()}
        finally:
            _RUNNING.reset(token)
        layers = model.config.get_text_config().num_hidden_layers
        if self.num_attentions < layers:
            raise ModelError(f"{self.num_attentions} of its {layers} layers use transformers' attention")

    def mask(self, window: int | None) -> _TreeMask:
        """Mask of layers with a sliding window, or without one."""
        return self._masks.setdefault(window, _TreeMask(self, window))

    def tiles(self, window: int | None) -> Sequence[Tile]:
        """Tiles of the tree's attention."""
        return self.tree.tiles(window)


_RUNNING: ContextVar[TreePass | None] = ContextVar("token tree of the current forward pass", default=None)


class _TreeAttention(torch.autograd.Function):
    """Attention of scaled queries (H, Q, N, D) to keys and values (H, N, D); sinks have shape (H, Q)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        tiles: list[Tile],
        softcap: float | None,
    ) -> torch.Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        for tile in tiles:
            weights, *_ = _weights(query, _seen(key, tile), sinks, tile, softcap)
            attended = weights.to(value.dtype) @ _seen(value, tile)
            output[:, :, tile.queries] = attended.unflatten(1, (query.shape[1], -1))
        ctx.save_for_backward(query, key, value, sinks, output)
        ctx.tiles, ctx.softcap = tiles, softcap
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, output = ctx.saved_tensors
        gradient = gradient.to(query.dtype)
        dots = (gradient.float() * output.float()).sum(-1, keepdim=True)
        to_query = torch.empty_like(query)
        to_key = torch.zeros_like(key, dtype=torch.float32)
        to_value = torch.zeros_like(value, dtype=torch.float32)
        to_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
        for tile in ctx.tiles:
            keys = _seen(key, tile)
            weights, slopes, to_sink = _weights(query, keys, sinks, tile, ctx.softcap)
            received = gradient[:, :, tile.queries].flatten(1, 2)
            _add(to_value, tile, weights.to(value.dtype).mT @ received)
            to_weights = (received @ _seen(value, tile).mT).float()
            dot = dots[:, :, tile.queries].flatten(1, 2)
            to_weights -= dot
            if to_sinks is not None:
                to_sinks -= (to_sink * dot).unflatten(1, (query.shape[1], -1)).sum((2, 3))
            to_scores = weights.mul_(to_weights)
            if slopes is not None:
                to_scores *= slopes
            to_scores = to_scores.to(key.dtype)
            to_query[:, :, tile.queries] = (to_scores @ keys).unflatten(1, (query.shape[1], -1))
            _add(to_key, tile, to_scores.mT @ query[:, :, tile.queries].flatten(1, 2))
        if to_sinks is not None:
            to_sinks = to_sinks.to(sinks.dtype)
        return to_query, to_key.to(key.dtype), to_value.to(value.dtype), to_sinks, None, None


def _seen(states: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Keys or values that a tile's queries attend to, shape (H, keys, D)."""
    parts = [states[:, part] for part in tile.keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _weights(
    query: torch.Tensor,
    keys: torch.Tensor,
    sinks: torch.Tensor | None,
    tile: Tile,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Attention weights of one tile, slopes of the cap and weights of the sinks.

    In float32, shape (H, Q * queries, keys), of sinks (H, Q * queries, 1).
    """
    queries = query[:, :, tile.queries].flatten(1, 2)
    if query.device.type == "cpu":  # sdpa does not round scores to bfloat16 either: a third less error
        queries, keys = queries.float(), keys.float()
    scores, slopes = queries @ keys.mT, None
    if softcap is not None:
        capped = (scores / softcap).tanh()
        scores, slopes = capped * softcap, 1 - capped**2
    last = scores.unflatten(1, (query.shape[1], -1))[..., -tile.hidden.shape[1] :]
    last.masked_fill_(tile.hidden, _FAR)
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32), slopes, None
    sink = sinks.to(scores.dtype).repeat_interleave(len(tile.hidden), dim=1)[..., None]
    weights = torch.cat([scores, sink], dim=-1).softmax(-1, dtype=torch.float32)
    return weights[..., :-1], slopes, weights[..., -1:]


def _add(total: torch.Tensor, tile: Tile, part: torch.Tensor) -> None:
    """Add the gradients of a tile's keys or values to those of all tokens."""
    sizes = [keys.stop - keys.start for keys in tile.keys]
    for keys, piece in zip(tile.keys, part.split(sizes, dim=1), strict=True):
        total[:, keys] += piece


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    plain: Callable[..., tuple[torch.Tensor, Any]] | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """Attention over a tree; for other inputs, that of `plain`, or of the module's own source for None."""
    if not isinstance(attention_mask, _TreeMask):
        if _RUNNING.get() is not None:
            raise ModelError(f"{type(module).__name__} does not use transformers' attention masks")
        options |= {} if softcap is None else {"softcap": softcap}
        options |= {} if s_aux is None else {"s_aux": s_aux}
        plain = plain or sys.modules[type(module).__module__].eager_attention_forward
        return plain(module, query, key, value, attention_mask, scaling=scaling, **options)
    attention_mask.running.num_attentions += 1
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads = (key.shape[1], -1)
    # Under autocast, rotated queries and keys are float32.
    scaled = (query[0] * scaling).to(value.dtype).unflatten(0, heads)
    sinks = None if s_aux is None else s_aux.unflatten(0, heads)
    keys, values = key[0].to(value.dtype), value[0]
    with torch.autocast(query.device.type, enabled=False):
        if _is_fused(query.device) and query.shape[2] <= _MASKED and softcap is None and sinks is None:
            output = _fused(scaled, keys, values, attention_mask.added(value.dtype))
        else:
            output = _TreeAttention.apply(  # type: ignore[no-untyped-call]
                scaled, keys, values, sinks, attention_mask.tiles, softcap
            )
    return output.flatten(0, 1).transpose(0, 1)[None].contiguous(), None


def _is_fused(device: torch.device) -> bool:
    return device.type == "cuda"


def _fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Attention of scaled queries (H, Q, N, D) to keys and values (H, N, D) by torch's own kernels."""
    keys, values = (each.repeat_interleave(query.shape[1], dim=0)[None] for each in (key, value))
    # Not cuDNN's kernel, which makes a plan for each new number of tokens.
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        output = scaled_dot_product_attention(
            query.flatten(0, 1)[None], keys, values, attn_mask=added, scale=1.0
        )
    by_head: torch.Tensor = output[0].unflatten(0, query.shape[:2])
    return by_head


def _mask(*args: Any, plain: Callable[..., Any], local_size: int | None = None, **options: Any) -> Any:
    """Mask of some layers: of the current tree, or that of `plain`."""
    running = _RUNNING.get()
    if running is not None:
        return running.mask(local_size)
    return plain(*args, local_size=local_size, **options)


for _name, _plain, _plain_mask in (("sdpa", sdpa_attention_forward, sdpa_mask), ("eager", None, eager_mask)):
    AttentionInterface.register(_PREFIX + _name, partial(_attention, plain=_plain))
    AttentionMaskInterface.register(_PREFIX + _name, partial(_mask, plain=_plain_mask))


def attend_to_trees(model: PreTrainedModel) -> None:
    """Let a model forward trees too; its attention over other inputs stays.

    Not undone: gradient checkpointing calls attention again in the backward pass.
    """
    name = policy.attention_of(model.config.get_text_config())
    if not name.startswith(_PREFIX):
        model.set_attn_implementation(_PREFIX + name)


def obstacle(model: PreTrainedModel) -> str | None:
    """Reason why a model cannot forward trees, by its config and adapter; None if they show none."""
    config = model.config.get_text_config()
    attention = policy.attention_of(config).removeprefix(_PREFIX)
    if attention not in ("sdpa", "eager"):
        return f"the model's attention is {attention}, not sdpa or eager"
    if any(getattr(config, name, 0.0) for name in ("attention_dropout", "attn_pdrop")):
        return "the model has attention dropout"
    return policy.obstacle(model)
