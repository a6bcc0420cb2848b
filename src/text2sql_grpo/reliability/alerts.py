"""Alerts when training collapses or stalls: on the terminal, by a webhook, and through W&B."""

import json
import math
import os
import re
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.text import Text
from transformers import TrainerCallback, TrainerState, TrainingArguments

from text2sql_grpo.config import AlertsConfig
from text2sql_grpo.errors import ConfigError

_PATIENCE_S = 10.0  # for the receiver of an alert


# Field of `AlertsConfig` that limits a metric's mean, the metric, and the alert.
_LIMITS = (
    ("min_reward", "reward", "the reward has collapsed"),
    ("min_entropy", "entropy", "the policy has become certain of every token"),
    ("max_kl", "kl", "the policy has left its reference"),
    ("max_zero_variance_groups", "frac_reward_zero_std", "nearly all groups have zero variance"),
    ("max_hack_rate", "hack/rate", "answers win the reward by other means than being right"),
)


class Alerts(TrainerCallback):
    """Callback that watches metrics and the time between steps; delivery failures are printed once.

    An alert is sent when its limit is passed, and again only after the metric was back within it.

    Raises:
        ConfigError: The webhook is no address, or names an environment variable that is not set.
    """

    def __init__(self, settings: AlertsConfig, console: Console, *, run_name: str) -> None:
        self._settings = settings
        self._console = console
        self._run_name = run_name
        self._webhook = _address(settings.webhook)
        self._recent: dict[str, deque[float]] = {}
        self._active: set[str] = set()
        self._unreachable: set[str] = set()
        self._outbox: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._sender: threading.Thread | None = None
        self._last_step = time.monotonic()
        self._is_over = threading.Event()
        self._step = 0
        self._tracks_with_wandb = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Start the clock, on rank 0."""
        self._tracks_with_wandb = "wandb" in args.report_to
        self._last_step = time.monotonic()
        self._is_over.clear()
        if state.is_world_process_zero and self._settings.stalled_s is not None:
            threading.Thread(target=self._watch, args=(self._settings.stalled_s,), daemon=True).start()

    def on_step_end(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Reset the clock."""
        self._last_step, self._step = time.monotonic(), state.global_step
        self._active.discard("stalled_s")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock until the context ends: an evaluation is not a stalled step."""
        self._last_step = math.inf
        try:
            yield
        finally:
            self._last_step = time.monotonic()

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Compare each metric with its limit."""
        if not state.is_world_process_zero or not logs or "reward" not in logs:
            return
        for field, metric, what in _LIMITS:
            value, bound = logs.get(metric), getattr(self._settings, field)
            if bound is None or value is None or value != value:
                continue
            recent = self._recent.setdefault(field, deque(maxlen=self._settings.window))
            recent.append(value)
            mean = sum(recent) / len(recent)
            is_passed = mean < bound if field.startswith("min_") else mean > bound
            if not is_passed:
                self._active.discard(field)
            elif len(recent) == recent.maxlen:
                facts = f"mean {metric} of the last {len(recent)} logged steps is {mean:.4g}"
                self._alert(field, f"{what}: {facts}, alerts.{field} is {bound:g}")

    def close(self) -> None:
        """Stop the clock, and wait a few seconds for alerts that are being sent."""
        self._is_over.set()
        if self._sender is not None:
            self._outbox.put(None)
            self._sender.join(_PATIENCE_S)
            self._sender = None

    def _watch(self, stalled_s: float) -> None:
        while not self._is_over.wait(min(stalled_s / 4, 10.0)):
            waited_s = time.monotonic() - self._last_step
            if waited_s > stalled_s:
                self._alert("stalled_s", f"no step was finished for {waited_s:.0f} s")

    def _alert(self, name: str, what: str) -> None:
        if name in self._active:
            return
        self._active.add(name)
        text = f"{self._run_name}, after step {self._step}: {what}"
        self._console.print(Text(f"alert: {text}"), soft_wrap=True)
        record = {"text": text, "content": text, "alert": name, "run": self._run_name, "step": self._step}
        self._outbox.put(record)
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_all, daemon=True)
            self._sender.start()

    def _send_all(self) -> None:
        while (record := self._outbox.get()) is not None:
            if self._webhook is not None:
                try:
                    _post(self._webhook, record)
                except (OSError, HTTPException) as error:
                    self._print_failure("the webhook", error)
            if self._tracks_with_wandb:
                import wandb

                try:
                    if wandb.run is not None:
                        wandb.run.alert(title=f"{record['run']}: {record['alert']}", text=record["text"])
                except (wandb.Error, OSError) as error:
                    self._print_failure("W&B", error)

    def _print_failure(self, receiver: str, error: Exception) -> None:
        if receiver not in self._unreachable:
            self._unreachable.add(receiver)
            self._console.print(Text(f"An alert did not reach {receiver}: {error}"), soft_wrap=True)


def _post(address: str, record: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "text2sql-grpo"}
    request = urllib.request.Request(address, json.dumps(record).encode(), headers)
    with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
        answer.read()


def _address(webhook: str | None) -> str | None:
    if webhook is None:
        return None
    for name in re.findall(r"\$(\w+|{[^}]*})", webhook):  # as `expandvars` reads them
        if name.strip("{}") not in os.environ:
            raise ConfigError(f"alerts.webhook names an environment variable that is not set: ${name}")
    address = os.path.expandvars(webhook)
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        # Not its value, which may be a secret.
        raise ConfigError(
            f"alerts.webhook must be an address that begins with https:// or http://, or $NAME of an "
            f"environment variable that holds one, got {webhook!r}"
        )
    return address
