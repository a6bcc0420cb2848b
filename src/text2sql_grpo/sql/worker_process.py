"""Parent's side of one worker process: start, request, end."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from marshal import loads
from pathlib import Path
from typing import Any, Literal, NamedTuple

from text2sql_grpo.errors import RunError
from text2sql_grpo.sql.address import Kind
from text2sql_grpo.sql.frames import LAST, FrameReader, framed, marshalled, write_all
from text2sql_grpo.sql.sandbox import PARTS

PATIENCE_S = 1.5  # after a deadline, before the backstop kills the worker
START_S = 30.0

# The package is imported without its own `__init__`, which would import the parent's side.
BOOT = """\
import sys
folder = sys.argv[1]
for name, path in (("text2sql_grpo", folder), ("text2sql_grpo.sql", folder + "/sql")):
    module = type(sys)(name)
    module.__path__ = [path]
    sys.modules[name] = module
from text2sql_grpo.sql.worker import main
main()
"""
PACKAGE = Path(__file__).resolve().parents[1]

# The fields of an `ExecutionOutcome`, the last of them True if another run may end otherwise; the name of
# a class in `errors`, or `frames.UNFORESEEN`, and its text; or None: run the query again.
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
        is_ready: True once its start-up is over.
        is_dropped: True if its pool does not use it any more.
        is_ended: True if it was waited for.
        due: When the backstop kills it, by `time.perf_counter`; infinite while it is idle.
        readable: Files and folders that it may read besides Python's own.
        sandbox: Those of `sandbox.PARTS` that its kernel enforces; empty before the first answer.
    """

    def __init__(self, kind: Kind, readable: tuple[str, ...] = (), *, require_sandbox: bool = False) -> None:
        """Start a process.

        The kernel ends it with the thread that calls this.
        """
        if not sys.executable:
            raise RunError("cannot start a SQL worker: sys.executable, the path of Python, is empty")
        new_group = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
        self.readable = readable
        self.sandbox: tuple[str, ...] = ()
        self._require_sandbox = require_sandbox
        chosen = os.environ.get("SQLITE_TMPDIR", "")
        self._own_folder = "" if chosen else _temporary_folder()
        self._folder = chosen if os.access(chosen, os.W_OK) else self._own_folder
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", BOOT, str(PACKAGE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=_environment(kind, self._folder),
                start_new_session=not new_group,  # Ctrl-C is for the parent
                creationflags=new_group,
            )
        except OSError as error:
            self._remove_folder()
            raise RunError(f"cannot start a SQL worker: {error} (at {sys.executable})") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipes = (self._process.stdin, self._process.stdout)
        self._input = self._process.stdin.fileno()
        self._frames = FrameReader(self._process.stdout.fileno())
        self.is_ready = False
        self.is_late = self.is_dropped = self.is_ended = False
        self.due = float("inf")
        path = [] if kind == "sqlite" else [entry for entry in sys.path if entry]
        with suppress(OSError):  # gone already; `_wait_until_ready` raises
            write_all(self._input, framed(marshalled((kind, os.getpid(), path, readable, self._folder))))

    def ask(self, request: bytes, n_queries: int, timeout_s: float, *, is_soon: bool = False) -> Reply:
        """Send a request and wait for its answers, or for the end of the process.

        Args:
            request: A frame.
            n_queries: Number of queries in the frame.
            timeout_s: Time limit of each query.
            is_soon: whether to poll for a moment before a blocking read.
        """
        self.wait_until_ready()
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

    def wait_until_ready(self) -> None:
        """Wait for the end of the start-up.

        Raises:
            RunError: The process ended, or its sandbox lacks a part that is required.
        """
        if self.is_ready:
            return
        self.due = time.perf_counter() + START_S
        try:
            self.sandbox = tuple(loads(self._frames.read()[0]))
        except (EOFError, OSError):
            code = self._process.wait()
            is_killed = os.name == "posix" and code == -signal.SIGKILL and not self.is_late
            raise (KilledAtStart if is_killed else RunError)(
                f"SQL worker exited with code {code} during start-up; see its stderr"
                f" (command: {sys.executable} -I -S)"
            ) from None
        self.due = float("inf")
        missing = [part for part in PARTS if part not in self.sandbox]
        if missing and self._require_sandbox:
            raise RunError(
                f"the sandbox of a SQL worker lacks {', '.join(missing)}: use a Linux kernel that has them"
                " (Landlock: 5.13 or newer), or require_sandbox=False"
            )
        self.is_ready = True

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_busy(self) -> bool:
        """True while it runs a query; False during its start-up."""
        return self.is_ready and self.due < float("inf")

    def kill(self) -> None:
        """Kill the process; a blocked `ask` sees EOF."""
        self._process.kill()

    def end(self) -> None:
        """Kill the process, wait for it and close its pipes."""
        self._process.kill()
        self._process.wait()
        self.forget()
        self._remove_folder()
        self.is_ended = True

    def forget(self) -> None:
        """Close the pipes of a process that is gone, or is another process's child."""
        if self._process.returncode is None:
            self._process.returncode = 0  # not our child to wait for
        for pipe in self._pipes:
            pipe.close()

    def _remove_folder(self) -> None:
        if self._own_folder:
            shutil.rmtree(self._own_folder, ignore_errors=True)


# Variables that change how a program starts, finds its libraries or shows time and text.
_INHERITED = frozenset(
    ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TZDIR", "TMPDIR", "TEMP", "TMP", "SYSTEMROOT", "WINDIR")
) | {"LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "VIRTUAL_ENV"}
_OF_POSTGRESQL = ("PG", "SSL_CERT_", "KRB5")


def _environment(kind: Kind, folder: str) -> dict[str, str]:
    """Inherited variables, those of the database's client, and settings of glibc.

    With its fast bins glibc would merge all freed small blocks at once in some later call, for 0.3 s after a
    query that filled the memory, and under the interpreter lock: the thread that watches the deadline would
    wait. Longer lists of freed blocks in each thread, which are never merged, save DuckDB 30 us a query.
    """
    prefixes = ("LC_", *_OF_POSTGRESQL) if kind == "postgresql" else ("LC_",)
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.upper() in _INHERITED or name.startswith(prefixes)
    }
    if folder:
        kept["SQLITE_TMPDIR"] = folder
    return {**kept, "GLIBC_TUNABLES": "glibc.malloc.mxfast=0:glibc.malloc.tcache_count=200"}


def _temporary_folder() -> str:
    """New folder for what one worker spills to disk; empty if none can be made."""
    try:
        return tempfile.mkdtemp(prefix="text2sql-")
    except OSError:
        return ""
