"""Trie of token rows in one flat list without padding: each distinct prefix once.

Tokens stand in depth-first order, so the descendants of a token follow it directly: token k is an ancestor
of token t, or t itself, exactly if `k <= t < ends[k]` (as in Tree Training, 2025, arXiv:2511.00413).

Shapes: N tokens of the tree, Q queries of a tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_TILE = 128  # queries


@dataclass(frozen=True)
class Tile:
    """Queries next to each other, with the keys that they attend to.

    Attributes:
        queries: Their places.
        keys: Places of the keys, by depth; the queries' own are the last.
        hidden: True where a query does not attend to a key, for the last keys; the others are seen by all
            queries. Shape (Q, at most the number of keys).
    """

    queries: slice
    keys: tuple[slice, ...]
    hidden: torch.Tensor

    @property
    def scores(self) -> int:
        """Number of attention scores of one head."""
        return len(self.hidden) * sum(int(key.stop - key.start) for key in self.keys)


@dataclass(frozen=True)
class TokenTree:
    """Trie of rows of tokens.

    Attributes:
        ids: Tokens, shape (N,).
        depths: Position of each token in its row, shape (N,).
        ends: First place behind the descendants of each token, shape (N,).
        places: Places of the tokens of each row.
        branches: Places of each row with tokens of its own, and the number that earlier rows have too.
    """

    ids: np.ndarray
    depths: np.ndarray
    ends: np.ndarray
    places: list[np.ndarray]
    branches: list[tuple[np.ndarray, int]]

    @property
    def counts(self) -> np.ndarray:
        """Number of rows of each token, shape (N,)."""
        return np.bincount(np.concatenate(self.places), minlength=len(self.ids))

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> "TokenTree":
        """Build the tree of rows of one integer type."""
        ends = np.empty(sum(map(len, rows)), np.int64)
        places = [np.empty(0, np.int64)] * len(rows)
        ids, depths, branches = [], [], []
        total, last, path = 0, np.empty(0), places[0]
        for row in sorted(range(len(rows)), key=lambda row: rows[row].tobytes()):
            tokens = rows[row]
            shared = _shared_length(last, tokens)
            ends[path[shared:]] = total
            new = len(tokens) - shared
            path = places[row] = np.concatenate([path[:shared], np.arange(total, total + new)])
            if new:
                branches.append((path, shared))
            ids.append(tokens[shared:])
            depths.append(np.arange(shared, len(tokens)))
            total, last = total + new, tokens
        ends[path] = total
        return cls(np.concatenate(ids), np.concatenate(depths), ends[:total], places, branches)

    def tiles(self, window: int | None = None) -> list[Tile]:
        """Cut the tokens into tiles of attention: several short branches in one, a long one in several.

        Args:
            window: A token attends to this many tokens, itself the last of them; None for all.
        """
        spans = list[tuple[int, int, np.ndarray, int]]()  # start, stop, ancestors of the start, common ones
        for path, shared in self.branches:
            start, stop = int(path[shared]), int(path[-1]) + 1
            if spans:
                first, _, above, common = spans[-1]
                common = min(common, shared)
                if stop - first <= _TILE and len(above) - common <= _TILE:
                    spans[-1] = first, stop, above, common
                    continue
            for first in range(start, stop, _TILE):
                above = path[: shared + first - start]
                spans.append((first, min(first + _TILE, stop), above, len(above)))
        return [self._tile(*span, window) for span in spans]

    def _tile(self, start: int, stop: int, above: np.ndarray, common: int, window: int | None) -> Tile:
        """Tile of the tokens from `start` to `stop`.

        Args:
            above: Ancestors of the first token. A token's ancestors before `start` are among them.
            common: Number of them that are ancestors of all tokens.
        """
        queries = np.arange(start, stop)[:, None]
        keys = np.concatenate([above, queries[:, 0]])
        depths = self.depths[start:stop, None]
        is_near = window is None or depths.max() < window
        if window is not None:
            far = max(0, int(depths.min()) - window + 1)  # as many ancestors are out of reach for all
            keys, common = keys[far:], max(0, common - far)
        masked = keys[common if is_near else 0 :]
        hidden = (masked > queries) | (queries >= self.ends[masked])
        if not is_near:
            hidden |= depths - self.depths[masked] >= window
        return Tile(slice(start, stop), _slices(keys), torch.from_numpy(hidden))


def _slices(places: np.ndarray) -> tuple[slice, ...]:
    """Merge neighbours among ascending places."""
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    return tuple(slice(int(run[0]), int(run[-1]) + 1) for run in runs)


def _shared_length(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length
