"""What an attack may have touched: files, threads, processes, memory. Without /proc, less is seen."""

import glob
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

SAMPLED_S = 0.02
MB = 1_000_000


def files_below(folder: Path) -> dict[str, bytes]:
    """The content of each file, at any depth."""
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if not path.is_dir()
    }


def child_pids() -> set[int]:
    """Processes that this one started, and that are not waited for yet."""
    found: set[int] = set()
    for path in glob.glob("/proc/self/task/*/children"):
        with suppress(OSError), open(path) as file:  # of a thread that has ended
            found.update(map(int, file.read().split()))
    return found


def living_children() -> set[int]:
    """Those among `child_pids` that have not ended."""
    return {pid for pid in child_pids() if _status(pid).get("State", "Z")[0] not in "ZX"}


def resident_bytes(pid: int | str = "self") -> int:
    """Memory of a process now; 0 if that cannot be seen."""
    return _kilobytes(_status(pid).get("VmRSS", "0"))


def wait_for(is_so: Callable[[], object], timeout_s: float = 10.0) -> bool:
    """Whether it becomes so in time."""
    deadline = time.monotonic() + timeout_s
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(is_so())


class PeakMemory:
    """Samples the largest memory of this process and of each of its children, while the context lasts.

    Args:
        others: Children that are left out.

    Attributes:
        own_bytes: The peak of this process.
        child_bytes: The largest peak of any child. Of one that ended inside, what it had some 20 ms before.
    """

    def __init__(self, others: frozenset[int] = frozenset()) -> None:
        self._others = others
        self.own_bytes = 0
        self.child_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample_often)

    def __enter__(self) -> Self:
        for pid in (os.getpid(), *child_pids()):
            with suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak becomes what there is now
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._sample()

    def _sample_often(self) -> None:
        while not self._is_over.wait(SAMPLED_S):
            self._sample()

    def _sample(self) -> None:
        self.own_bytes = max(self.own_bytes, _peak_bytes(os.getpid()))
        # Until it runs its own program, a new child is seen with the memory of this process.
        started = [pid for pid in child_pids() - self._others if _command(pid) != _command("self")]
        self.child_bytes = max([self.child_bytes, *map(_peak_bytes, started)])


@dataclass(frozen=True)
class Surroundings:
    """What is compared before and after an attack."""

    files: dict[str, bytes]
    n_threads: int
    own_bytes: int

    @classmethod
    def of(cls, folder: Path) -> Self:
        return cls(files_below(folder), threading.active_count(), resident_bytes())


def _peak_bytes(pid: int) -> int:
    return _kilobytes(_status(pid).get("VmHWM", "0"))


def _command(pid: int | str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _kilobytes(field: str) -> int:
    return int(field.split()[0]) * 1024


def _status(pid: int | str) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    return dict(re.findall(r"^(\w+):\s*(.*)$", text, re.MULTILINE))
