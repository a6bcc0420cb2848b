"""Progress of what is counted: a bar, or lines where there is no terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import, and help does not need it
    from rich.console import Console
    from rich.progress import Progress

LINE_EVERY_S = 15.0  # between lines of progress
_SPEED_OVER_S = 1800.0


def progress_bar(console: "Console", *facts: str, stays: bool = True) -> "Progress":
    """Make a bar with the time left; each of `facts` is a field of its task, shown behind the bar.

    One that `stays` is left at its end; where there is no terminal, that is all of it.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn(f"{{task.fields[{fact}]}}", markup=False) for fact in facts]
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        *columns,
        console=console,
        speed_estimate_period=_SPEED_OVER_S,  # a step may take minutes
        transient=not stays,
        disable=not (stays or console.is_terminal),
    )


@contextmanager
def counting(
    title: str, total: int, console: "Console | None" = None, *, done: int = 0
) -> Iterator[Callable[[], None]]:
    """Bar, or a line now and then if the console is no terminal; each call of the function counts one.

    Args:
        console: Where the bar stays; None for stderr, without a trace of it at the end.
        done: Number counted before.
    """
    from text2sql_grpo.reporting.terminal import TextConsole

    shown, last_line = console or TextConsole(stderr=True), time.monotonic()
    bar = progress_bar(shown, stays=console is not None)

    def count() -> None:
        nonlocal last_line
        bar.advance(task)
        if not shown.is_terminal and time.monotonic() - last_line > LINE_EVERY_S:
            last_line = time.monotonic()
            shown.print(f"{title} {bar.tasks[task].completed:.0f}/{total}")

    with bar:
        task = bar.add_task(title, total=total, completed=done)
        yield count
