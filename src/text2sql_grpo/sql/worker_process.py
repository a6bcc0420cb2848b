"""One worker process, as its parent sees it: how it starts, is asked, and ends."""

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

PATIENCE_S = 1.5  # after a deadline that a worker lets pass in silence
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

# The fields of an `ExecutionOutcome`, the last of them True if another run may end otherwise; a name of
# one of our exceptions and its text; or None: not answered, run it again.
Answer = tuple[Any, ...]
Ending = Literal["", "announced", "silent", "unasked"]


class Reply(NamedTuple):
    """What came back from one worker.

    Attributes:
        answers: In the order of the queries; fewer than those if the process ended.
        is_plain: True if every answer is an outcome that another run would give again.
        ending: How the process ended: it `announced` its end after the last answer, fell `silent`, or was
            gone before it was asked; empty if it lives.
    """

    answers: list[Answer | None]
    is_plain: bool
    ending: Ending


class KilledAtStart(RunError):
    """Somebody else ended a worker that was still starting, for want of memory perhaps."""


class Worker:
    """One worker process, as its parent sees it.

    Attributes:
        is_late: True if the backstop killed it.
        due: When the backstop kills it, by `time.perf_counter`; infinite while it is idle.
    """

    def __init__(self, kind: Kind) -> None:
        if not sys.executable:
            raise RunError("expected sys.executable to be the path of Python, got none; SQL workers need it")
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
            raise RunError(f"expected to start a SQL worker, got {error} (at {sys.executable})") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipes = (self._process.stdin, self._process.stdout)
        self._input = self._process.stdin.fileno()
        self._frames = FrameReader(self._process.stdout.fileno())
        self._is_ready = False
        self.is_late = False
        self.due = float("inf")
        path = [] if kind == "sqlite" else [entry for entry in sys.path if entry]
        with suppress(OSError):  # gone already; `_wait_until_ready` says so
            write_all(self._input, framed(marshalled((kind, os.getpid(), path))))

    def ask(self, request: bytes, n_queries: int, timeout_s: float, *, is_soon: bool = False) -> Reply:
        """Sends a request and waits for its answers, or for the end of the process.

        Args:
            request: A frame.
            n_queries: In it.
            timeout_s: Of each query.
            is_soon: Whether the answer may come so fast that sleeping until then does not pay.
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
            return Reply(answers, False, "silent")
        self.due = float("inf")
        return Reply(answers, not all_flags, "announced" if all_flags & LAST else "")

    def _wait_until_ready(self) -> None:
        self.due = time.perf_counter() + START_S
        try:
            self._frames.read()
        except (EOFError, OSError):
            code = self._process.wait()
            is_killed = os.name == "posix" and code == -signal.SIGKILL and not self.is_late
            raise (KilledAtStart if is_killed else RunError)(
                f"expected a SQL worker to start, but it ended with code {code} before its first query; "
                f"its last words stand on standard error (command: {sys.executable} -I -S)"
            ) from None
        self._is_ready = True

    def kill(self) -> None:
        """Ends the process; whoever waits for it is told."""
        self._process.kill()

    def end(self) -> None:
        """Ends the process and leaves nothing of it."""
        self._process.kill()
        self._process.wait()
        self.forget()

    def forget(self) -> None:
        """Closes the pipes of a process that is gone, or another process's child."""
        if self._process.returncode is None:
            self._process.returncode = 0  # not ours to wait for
        for pipe in self._pipes:
            pipe.close()


_SECRET_NAME = re.compile("TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")


def _environment() -> dict[str, str]:
    """This process's without its secrets, and with glibc told not to keep small freed blocks apart.

    glibc would join them all at once in some later call, for 0.3 s after a query that filled the memory, and
    under the interpreter lock: the thread that watches the clock would wait.
    """
    before = os.environ.get("GLIBC_TUNABLES")
    kept = {name: value for name, value in os.environ.items() if not _SECRET_NAME.search(name.upper())}
    return {**kept, "GLIBC_TUNABLES": ":".join(filter(None, (before, "glibc.malloc.mxfast=0")))}
