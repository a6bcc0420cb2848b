"""Wall-clock time by stage."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stages:
    """Seconds of each stage; each moment since `restart` is counted once.

    A stage inside another one interrupts it; `update` is the stage outside all others. On a GPU, work is
    counted where the host waits for it.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin anew, outside all stages."""
        self._seconds: dict[str, float] = {}
        self._shares = {"update": 1.0}
        self._since = time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """Seconds of each stage until now."""
        self._switch(self._shares)
        return dict(self._seconds)

    @contextmanager
    def of(self, **weights: float) -> Iterator[None]:
        """Count the time of the context for a stage, or divide it among several by their weights."""
        total = sum(weights.values())
        before = self._switch({name: weight / total for name, weight in weights.items()})
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, shares: dict[str, float]) -> dict[str, float]:
        now, before = time.perf_counter(), self._shares
        for name, share in before.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + share * (now - self._since)
        self._shares, self._since = shares, now
        return before
