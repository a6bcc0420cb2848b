"""One run of the main job: its parts, its folder, and the times of its stages."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from text2sql_grpo.config import Config
from text2sql_grpo.evaluation.bench import Bench
from text2sql_grpo.reliability.alerts import Alerts


@dataclass
class Run:
    """One run of the main job, from an open bench to a merged model.

    Attributes:
        alerts: The alerts, one or none.
    """

    bench: Bench
    console: Console
    alerts: list[Alerts]
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        return self.bench.config

    @property
    def folder(self) -> Path:
        return self.config.run.output_dir

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; the run prints the times at its end."""
        started, cpu_started = time.monotonic(), time.process_time()
        yield
        self.seconds[name] = round(time.monotonic() - started, 1)
        self.cpu_seconds[name] = round(time.process_time() - cpu_started, 1)
