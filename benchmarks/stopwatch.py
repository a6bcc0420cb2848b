"""Wall and processor time of a block, with the work of a CUDA device finished on both ends."""

import time
from dataclasses import dataclass, field
from typing import Self

import torch


def wait_for_device() -> None:
    """Wait until the CUDA device has done all that was queued; nothing without one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass
class Stopwatch:
    """Wall and processor time of all that ran under it, in seconds."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    _started: tuple[float, float] = field(default=(0.0, 0.0), repr=False)

    def __enter__(self) -> Self:
        wait_for_device()
        self._started = (time.perf_counter(), time.process_time())
        return self

    def __exit__(self, *_: object) -> None:
        wait_for_device()
        self.seconds += time.perf_counter() - self._started[0]
        self.cpu_s += time.process_time() - self._started[1]
