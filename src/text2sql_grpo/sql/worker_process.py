"""Parent's side of one worker process: start, request, end."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from marshal import loads
from pathlib import Path
from typing import Any, Literal, NamedTuple

from text2sql_grpo.errors import RunError
from text2sql_grpo.sql.address import Kind
from text2sql_grpo.sql.frames import LAST, FrameReader, framed, marshalled, write_all

PATIENCE_S = 1.5  # after a deadline, before the backstop kills the worker
START_S = 30.0

# The package is imported without its own `__init__`, which would import the parent's side.
_BOOT = """\
import sys
folder = sys.argv[1]
for name, path in (("text2sql_grpo", folder), ("text2sql_grpo.sql", folder + "/sql")):
    module = type(sys)(name)
    module.__path__ = [path]
    sys.modules[name] = module
from text2sql_grpo.sql.worker import main
main()
"""
_PACKAGE = Path(__file__).resolve().parents[1]

# The fields of an `ExecutionOutcome`, the last of them True if another run may end otherwise; the name of
# a class in `errors` and its text; or None: run the query again.
Answer = tuple[Any, ...]
Ending = Literal["", "planned", "crashed", "unasked"]


class Reply(NamedTuple):
    """Reply of one worker to one request.

    Attributes:
        answers: Answers in the order of the queries; fewer if the process ended.
        is_plain: True if every answer is a cacheable outcome.
        ending: End of the process: `planned` in its last frame, `crashed`, or gone before the request could
            be sent (`unasked`); empty if it lives.
    """

    answers: list[Answer | None]
    is_plain: bool
    ending: Ending


class KilledAtStart(RunError):
    """A worker was killed from outside during start-up, perhaps for want of memory."""


class Worker:
    """Handle of one worker process.

    Attributes:
        is_late: True if the backstop killed it.
        due: When the backstop kills it, by `time.perf_counter`; infinite while it is idle.
    """

    def __init__(self, kind: Kind) -> None:
        if not sys.executable:
            raise RunError("cannot start a SQL worker: sys.executable, the path of Python, is empty")
        new_group = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, str(_PACKAGE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=_environment(),
                start_new_session=not new_group,  # Ctrl-C is for the parent
                creationflags=new_group,
            )
        except OSError as error:
            raise RunError(f"cannot start a SQL worker: {error} (at {sys.executable})") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipes = (self._process.stdin, self._process.stdout)
        self._input = self._process.stdin.fileno()
        self._frames = FrameReader(self._process.stdout.fileno())
        self._is_ready = False
        self.is_late = False
        self.due = float("inf")
        path = [] if kind == "sqlite" else [entry for entry in sys.path if entry]
        with suppress(OSError):  # gone already; `_wait_until_ready` raises
            write_all(self._input, framed(marshalled((kind, os.getpid(), path))))

    def ask(self, request: bytes, n_queries: int, timeout_s: float, *, is_soon: bool = False) -> Reply:
        """Send a request and wait for its answers, or for the end of the process.

        Args:
            request: A frame.
            n_queries: Number of queries in the frame.
            timeout_s: Time limit of each query.
            is_soon: whether to poll for a moment before a blocking read.
        """
        if not self._is_ready:
            self._wait_until_ready()
        patience_s = timeout_s + PATIENCE_S
        clock = time.perf_counter
        self.due = clock() + patience_s
        try:
            write_all(self._input, request)
        except OSError:
            return Reply([], True, "unasked")
        answers: list[Answer | None] = []
        try:
            body, all_flags = self._frames.read(is_soon=is_soon)
            answers = loads(body)
            while len(answers) < n_queries and not all_flags & LAST:
                self.due = clock() + patience_s
                body, flags = self._frames.read()
                answers += loads(body)
                all_flags |= flags
        except (EOFError, OSError):
            return Reply(answers, False, "crashed")
        self.due = float("inf")
        return Reply(answers, not all_flags, "planned" if all_flags & LAST else "")

    def _wait_until_ready(self) -> None:
        self.due = time.perf_counter() + START_S
        try:
            self._frames.read()
        except (EOFError, OSError):
            code = self._process.wait()
            is_killed = os.name == "posix" and code == -signal.SIGKILL and not self.is_late
            raise (KilledAtStart if is_killed else RunError)(
                f"SQL worker exited with code {code} during start-up; see its stderr"
                f" (command: {sys.executable} -I -S)"
            ) from None
        self._is_ready = True

    def kill(self) -> None:
        """Kill the process; a blocked `ask` sees EOF."""
        self._process.kill()

    def end(self) -> None:
        """Kill the process, wait for it and close its pipes."""
        self._process.kill()
        self._process.wait()
        self.forget()

    def forget(self) -> None:
        """Close the pipes of a process that is gone, or is another process's child."""
        if self._process.returncode is None:
            self._process.returncode = 0  # not our child to wait for
        for pipe in self._pipes:
            pipe.close()


_SECRET_NAME = re.compile("TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")


def _environment() -> dict[str, str]:
    """This process's environment without secrets, and with glibc's fast bins turned off.

    glibc would merge all freed small blocks at once in some later call, for 0.3 s after a query that filled
    the memory, and under the interpreter lock: the thread that watches the deadline would wait.
    """
    before = os.environ.get("GLIBC_TUNABLES")
    kept = {name: value for name, value in os.environ.items() if not _SECRET_NAME.search(name.upper())}
    return {**kept, "GLIBC_TUNABLES": ":".join(filter(None, (before, "glibc.malloc.mxfast=0")))}
