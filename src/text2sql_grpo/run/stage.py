"""One run of the main job: its parts, its folder, and the times of its stages."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from text2sql_grpo.config import Config
from text2sql_grpo.evaluation.bench import Bench
from text2sql_grpo.reliability.alerts import Alerts


@dataclass
class Run:
    """One run of the main job, from an open bench to a merged model.

    Attributes:
        alerts: The alerts, one or none.
        warnings: Warnings of the run so far, each once.
    """

    bench: Bench
    console: Console
    alerts: list[Alerts]
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    warnings: dict[str, None] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        return self.bench.config

    @property
    def folder(self) -> Path:
        return self.config.run.output_dir

    def warn(self, text: str) -> None:
        """Print a warning, and keep it for the report."""
        self.warnings[text] = None
        self.console.print(Text(f"warning: {text}"), soft_wrap=True)

    @contextmanager
    def keeping_warnings(self) -> Iterator[None]:
        """Keep what this package's loggers warn of inside the context."""
        logger, handler = logging.getLogger("text2sql_grpo"), _Keeper(self.warnings)
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; the run prints the times at its end."""
        started, cpu_started = time.monotonic(), time.process_time()
        yield
        self.seconds[name] = round(time.monotonic() - started, 1)
        self.cpu_seconds[name] = round(time.process_time() - cpu_started, 1)


class _Keeper(logging.Handler):
    """Handler that keeps the messages of warnings."""

    def __init__(self, kept: dict[str, None]) -> None:
        super().__init__(logging.WARNING)
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        self._kept[record.getMessage()] = None
