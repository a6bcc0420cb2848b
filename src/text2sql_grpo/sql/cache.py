"""Cache of query results."""

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable
from marshal import dumps

from text2sql_grpo.sql.outcome import ExecutionOutcome
from text2sql_grpo.sql.sqlite_guard import CLOCK, VOLATILE

# A call without an argument, or with one that may evaluate to 'now'.
_UNSEEN_CLOCK = re.compile(
    r"\(\s*(?:--[^\n]*\n\s*|/\*.*?\*/\s*)*\)|\|\||\b(?:char|chr|format|printf|replace|concat)", re.S
)


def is_deterministic(sql: str) -> bool:
    """True if a second run on the same data surely returns the same rows, judging from the text.

    Does not see the functions inside a view.

    >>> is_deterministic("SELECT strftime('%Y', born) FROM singer"), is_deterministic("SELECT date('now')")
    (True, False)
    """
    text = sql.lower()
    for word in VOLATILE:
        if word in text:
            return False
    return not any(word in text for word in CLOCK) or _UNSEEN_CLOCK.search(text) is None


def normalised(sql: str) -> str:
    """Strip outer blanks and one last semicolon, which cannot change the rows.

    Two semicolons are several statements to the sqlite3 module, one at the beginning is an empty one.
    """
    return sql.strip(" \t\r\n").removesuffix(";").rstrip(" \t\r\n")


class ResultCache:
    """Thread-safe LRU cache of outcomes.

    Attributes:
        hits: Look-ups that found a result.
        misses: Look-ups that did not.
    """

    def __init__(self, *, max_entries: int, max_bytes: int, ttl_s: float | None = None) -> None:
        """Create an empty cache; `max_bytes` bounds the marshalled size of the results, `ttl_s` their age."""
        self.hits = 0
        self.misses = 0
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._n_bytes = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[ExecutionOutcome, int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> ExecutionOutcome | None:
        """Return the result with `from_cache` set, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and self._ttl_s is not None and time.monotonic() - entry[2] > self._ttl_s:
                self._remove(key)
                entry = None
            if entry is None:
                self.misses += 1
                return None
            self.hits += 1
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, outcome: ExecutionOutcome) -> None:
        """Store a result, unless it is larger than `max_bytes`."""
        n_bytes = len(dumps(tuple(outcome), 2))
        if n_bytes > self._max_bytes:
            return
        with self._lock:
            if key in self._entries:
                self._remove(key)
            self._entries[key] = (outcome._replace(from_cache=True), n_bytes, time.monotonic())
            self._n_bytes += n_bytes
            while len(self._entries) > self._max_entries or self._n_bytes > self._max_bytes:
                self._remove(next(iter(self._entries)))

    def clear(self) -> None:
        """Drop the results, not the counts."""
        with self._lock:
            self._entries.clear()
            self._n_bytes = 0

    def reset_lock(self) -> None:
        """Replace the lock in a forked child: the thread that held it does not exist there."""
        self._lock = threading.Lock()

    def _remove(self, key: Hashable) -> None:
        self._n_bytes -= self._entries.pop(key)[1]
