"""Fixtures of the tests that execute SQL."""

from collections.abc import Callable

import pytest

from text2sql_grpo.sql import worker_process


@pytest.fixture
def start_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replace the last call of a worker's start-up, `main()`, by other code."""
    boot = worker_process.BOOT
    return lambda code: monkeypatch.setattr(worker_process, "BOOT", boot.replace("main()", code))
