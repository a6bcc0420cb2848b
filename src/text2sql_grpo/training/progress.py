"""What a person sees while training runs, and how a run is stopped without losing it."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from text2sql_grpo.training.processes import any_of, are_several
from text2sql_grpo.training.run_log import RunLog

_LINE_EVERY_S = 15.0
_ECHO_S = 3.0  # what starts several processes hands them Ctrl-C on, which the terminal has sent them too


def progress_bar(console: Console, *facts: str) -> Progress:
    """A bar with the time left; each of `facts` is a field of its task, shown behind the bar."""
    columns = [TextColumn(f"{{task.fields[{fact}]}}") for fact in facts]
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        *columns,
        console=console,
    )


class TrainingProgress(TrainerCallback):
    """Writes `metrics.jsonl` and shows reward, accuracy, looks and the time left."""

    def __init__(self, run_log: RunLog, console: Console) -> None:
        self._run_log = run_log
        self._console = console
        self._bar = progress_bar(console, "facts")
        self._started = self._last_line = time.monotonic()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the bar; a terminal shows it, a log file gets a line now and then instead."""
        done = [row["elapsed_s"] for row in self._run_log.metrics() if row["step"] <= state.global_step]
        self._started = time.monotonic() - (done[-1] if done else 0.0)  # a resumed run goes on counting
        if state.is_world_process_zero and self._console.is_terminal:
            self._task = self._bar.add_task(
                "GRPO", total=state.max_steps, completed=state.global_step, facts=""
            )
            self._bar.start()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """One line of `metrics.jsonl`, and the facts behind the bar."""
        if not state.is_world_process_zero or not logs or "reward" not in logs:
            return
        elapsed_s = round(time.monotonic() - self._started, 3)
        self._run_log.write_metrics({"step": state.global_step, "elapsed_s": elapsed_s, **logs})
        facts = (
            f"reward {_number(logs.get('reward'))}  right {_number(logs.get('accuracy/strict'))}  "
            f"looks {_number(logs.get('episode/looks'))}"
        )
        if self._bar.live.is_started:
            self._bar.update(self._task, completed=state.global_step, facts=facts)
        elif time.monotonic() - self._last_line > _LINE_EVERY_S or state.global_step == state.max_steps:
            self._last_line = time.monotonic()
            left = elapsed_s / state.global_step * (state.max_steps - state.global_step)
            self._console.print(f"GRPO {state.global_step}/{state.max_steps}  {facts}  {left:.0f} s left")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stops the bar."""
        self.close()

    def close(self) -> None:
        """Leaves the terminal as it was."""
        if self._bar.live.is_started:
            self._bar.stop()


def _number(value: Any) -> str:
    is_known = isinstance(value, int | float) and math.isfinite(value)  # NaN: every episode was masked
    return f"{value:.2f}" if is_known else "-"


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """SIGTERM, by which schedulers end a program, is like Ctrl-C; only a main thread can take it."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class StopOnInterrupt(TrainerCallback):
    """Ctrl-C or SIGTERM ends the run after the step it is in, with a checkpoint; a second one at once.

    Attributes:
        is_stopping: True once a signal came.
    """

    def __init__(self, console: Console) -> None:
        self.is_stopping = False
        self._noted = 0.0
        self._console = console

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the signals over; only a main thread can, elsewhere they stay as they are."""
        try:
            before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_stopping:
            is_echo = are_several() and time.monotonic() - self._noted < _ECHO_S
            if not is_echo:
                raise KeyboardInterrupt
            return
        self.is_stopping, self._noted = True, time.monotonic()
        self._console.print("Stopping after this step, with a checkpoint (once more to stop at once) ...")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Asks the trainer for a checkpoint and its end, after the same step in every process."""
        if any_of(self.is_stopping):  # a signal that comes meanwhile counts at the end of the next step
            self.is_stopping = True
            control.should_save = True
            control.should_training_stop = True
