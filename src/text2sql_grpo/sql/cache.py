"""Cache of query results."""

import sys
import threading
from marshal import dumps, loads

from text2sql_grpo.sql.lru import Lru
from text2sql_grpo.sql.outcome import ExecutionOutcome, Limits
from text2sql_grpo.sql.sqlite_file import Fingerprint

ENTRY_BYTES = 680  # of an entry and its fingerprint, without the texts and the rows

Key = tuple[str, str, Fingerprint, Limits]  # engine and location, text, what else decides about the rows


def normalised(sql: str) -> str:
    """Strip outer blanks and one last semicolon, which cannot change the rows.

    Two semicolons are several statements to the sqlite3 module, one at the beginning is an empty one.
    """
    return sql.strip(" \t\r\n").removesuffix(";").rstrip(" \t\r\n")


class ResultCache:
    """Thread-safe LRU cache of outcomes.

    Attributes:
        max_entries: Maximum number of results; 0 if it is not to be used.
        hits: Look-ups that found a result.
    """

    def __init__(self, *, max_entries: int, max_bytes: int) -> None:
        """Create an empty cache; `max_bytes` bounds the memory that it takes."""
        self.max_entries = max_entries
        self.hits = 0
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: Lru[Key, bytes] = Lru(max_bytes, max_entries=max_entries)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> ExecutionOutcome | None:
        """Return the result with `from_cache` set, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self.hits += 1
        return ExecutionOutcome(*loads(entry))

    def put(self, key: Key, outcome: ExecutionOutcome) -> None:
        """Store a result, unless it is larger than `max_bytes`."""
        data = dumps((*outcome[:-1], True), 2)
        place, text, *_ = key
        n_bytes = ENTRY_BYTES + sys.getsizeof(place) + sys.getsizeof(text) + sys.getsizeof(data)
        if n_bytes <= self._max_bytes:
            with self._lock:
                self._entries.put(key, data, size=n_bytes)

    def reset_lock(self) -> None:
        """Replace the lock in a forked child: the thread that held it does not exist there."""
        self._lock = threading.Lock()
