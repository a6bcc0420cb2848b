"""Cache of the entries used last."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Lru(Generic[K, V]):
    """Cache bounded by a number of entries, or by their sizes added up; not thread-safe.

    Args:
        max_size: Largest sum of sizes; a larger entry is not kept.
        size_of: Size of a value; 1 by default, which bounds their number.
    """

    def __init__(self, max_size: int, size_of: Callable[[V], int] = lambda value: 1) -> None:
        self._max_size, self._size_of, self._size = max_size, size_of, 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def get(self, key: K) -> V | None:
        """Return the value, and keep it longer; None if there is none."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: K, value: V) -> list[V]:
        """Store a value, and return those that went for it."""
        _, before = self._entries.pop(key, (value, 0))
        size = self._size_of(value)
        self._entries[key] = (value, size)
        self._size += size - before
        gone = []
        while self._size > self._max_size:
            _, (old, old_size) = self._entries.popitem(last=False)
            self._size -= old_size
            gone.append(old)
        return gone
