"""Cache of the entries used last."""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Lru(Generic[K, V]):
    """Cache bounded by a number of entries, or by their sizes added up; not thread-safe.

    Args:
        max_size: Largest sum of sizes; a larger entry is not kept.
        max_entries: Largest number of entries; None for no further limit.
    """

    def __init__(self, max_size: int, *, max_entries: int | None = None) -> None:
        self._max_size, self._max_entries, self._size = max_size, max_entries, 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value, and keep it longer; None if there is none."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: K, value: V, *, size: int = 1) -> list[V]:
        """Store a value, and return those that went for it; with sizes of 1, `max_size` is their number."""
        _, before = self._entries.pop(key, (value, 0))
        self._entries[key] = (value, size)
        self._size += size - before
        gone = []
        max_entries = len(self) if self._max_entries is None else self._max_entries
        while self._size > self._max_size or len(self) > max_entries:
            _, (old, old_size) = self._entries.popitem(last=False)
            self._size -= old_size
            gone.append(old)
        return gone
