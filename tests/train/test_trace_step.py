"""The step stays short enough to read: the functions that it enters have a ceiling."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CEILING = 45  # functions of training/ and rollout/engine.py in one step


@pytest.mark.thorough
def test_a_step_enters_few_functions(repo_root: Path) -> None:
    command = [sys.executable, "-m", "tests.trace_step", "--quick"]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert 20 < figures["spine"] <= CEILING  # fewer than 20: nothing was traced
