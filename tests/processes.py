"""Jobs in forked processes, which are spared the imports, and how they end."""

import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

needs_fork = pytest.mark.skipif(
    not hasattr(os, "fork") or torch.cuda.is_available() or torch.get_num_threads() > 1,
    reason="needs fork, which neither CUDA nor threads of torch survive",
)


def fork(output: Path, job: Callable[[], int], variables: Mapping[str, str] | None = None) -> int:
    """Id of a process that does a job and exits with its code; 70 after an error.

    Args:
        output: Without its suffix: `OUTPUT.txt` gets what the process prints, `OUTPUT.error` its traceback.
        variables: Environment variables of the process.
    """
    pid = os.fork()
    if pid == 0:
        code = 70
        gc.freeze()
        try:
            os.environ.update(variables or {})
            sys.stdout = sys.stderr = output.with_suffix(".txt").open("a", buffering=1)
            code = job()
        except BaseException:
            output.with_suffix(".error").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    return pid


def printed(output: Path) -> str:
    """What a process printed, and its traceback."""
    files = [output.with_suffix(suffix) for suffix in (".txt", ".error")]
    return "".join(path.read_text() for path in files if path.exists())


def has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def ended(pids: list[int], *, patience_s: float = 60.0) -> list[int]:
    """Exit codes; minus the signal that ended one. Those that wait for ever are killed."""
    codes: dict[int, int] = {}
    begun = time.monotonic()
    while len(codes) < len(pids):
        for pid in [pid for pid in pids if pid not in codes]:
            if has_ended(pid):
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            elif time.monotonic() - begun > patience_s:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]
