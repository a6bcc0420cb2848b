"""Ctrl-C and SIGTERM stop a run without losing it."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerControl

from text2sql_grpo.reliability.ranks import any_rank, is_distributed

_ECHO_S = 3.0  # a launcher forwards Ctrl-C to its processes, which the terminal has sent to them too


def stop_on_sigterm() -> AbstractContextManager[None]:
    """Treat SIGTERM, by which schedulers end a program, as Ctrl-C. No effect outside the main thread."""
    return _handling(signal.default_int_handler, signal.SIGTERM)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Handle signals inside the context. No effect outside the main thread."""
    try:
        before = {number: signal.signal(number, handler) for number in numbers}
    except ValueError:
        before = {}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class StopOnInterrupt(TrainerCallback):
    """Callback that ends a run after the current step, with a checkpoint; a second signal ends it at once."""

    def __init__(self, console: Console) -> None:
        self.is_stopping = False
        self._noted = 0.0
        self._console = console

    def listening(self) -> AbstractContextManager[None]:
        """Handle SIGINT and SIGTERM inside the context. No effect outside the main thread."""
        return _handling(self._note, signal.SIGINT, signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_stopping:
            is_echo = is_distributed() and time.monotonic() - self._noted < _ECHO_S
            if not is_echo:
                raise KeyboardInterrupt
            return
        self.is_stopping, self._noted = True, time.monotonic()
        self._console.print("Stopping after this step, with a checkpoint (once more to stop at once) ...")

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Request a log, a checkpoint and the end of training, after the same step on every rank."""
        if any_rank(self.is_stopping):  # a signal that comes meanwhile counts at the end of the next step
            self.is_stopping = True
            control.should_save = control.should_log = True
            control.should_training_stop = True
