"""Parent's side of one worker process: start, request, end."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from text2sql_grpo.errors import RunError
from text2sql_grpo.phrases import printable
from text2sql_grpo.sql.address import Kind
from text2sql_grpo.sql.engines import ENGINES
from text2sql_grpo.sql.frames import FrameReader, framed, marshalled, unmarshalled, write_all
from text2sql_grpo.sql.outcome import Limits
from text2sql_grpo.sql.sandbox import PARTS

PATIENCE_S = 1.5  # after a deadline, before the backstop kills the worker
START_S = 30.0
LOCKED_S = 30.0  # of a query that waits for a writer of its file, or for a database to open
MAX_STDERR_CHARS = 4_000  # the last ones are shown
FRAME_BYTES = 4 << 20  # of an answer's frame beyond the rows: names of columns, earlier short answers

# The package is imported without its own `__init__`, which would import the parent's side.
BOOT = """\
import os, sys
if os.name == "posix":
    os.set_blocking(2, False)  # what does not fit into the pipe is lost, and stops no worker
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
_FIELDS = (str, tuple, tuple, bool, str, float, bool, bool)
_CELLS = frozenset((type(None), int, float, str, bytes))


class KilledAtStart(RunError):
    """A worker was killed from outside during start-up, perhaps for want of memory."""


class Worker:
    """Handle of one worker process.

    Attributes:
        version: Version of the pool's grants when it started: it may read what they were.
        is_ready: True once its start-up is over.
        is_free: True if it can take a request: it is ready, and answered the last one whole.
        has_crashed: True if it ended without an announcement while it had a request.
        is_late: True if the backstop killed it.
        is_dropped: True if its pool does not use it any more.
        is_ended: True if it was waited for.
        due: When the backstop kills it, by `time.perf_counter`; infinite while it is idle.
        sandbox: Those of `sandbox.PARTS` that its kernel enforces; empty before the first answer.
    """

    def __init__(self, kind: Kind, readable: Iterable[str] = (), *, version: int = 0) -> None:
        """Start a process, which may read these files and folders in addition to Python's own.

        The kernel ends it with the thread that calls this.
        """
        if not sys.executable:
            raise RunError("cannot start a SQL worker: sys.executable, the path of Python, is empty")
        new_group = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
        self.version = version
        self.sandbox: tuple[str, ...] = ()
        self.is_ready = self.is_free = False
        self.has_crashed = self.is_late = self.is_dropped = self.is_ended = False
        self.due = float("inf")
        chosen = os.environ.get("SQLITE_TMPDIR", "")
        self._own_folder = ""  # for what the worker spills to disk
        if not chosen:
            with suppress(OSError):  # none can be made: sorts stay in memory
                self._own_folder = tempfile.mkdtemp(prefix="text2sql-")
        self._folder = chosen if os.access(chosen, os.W_OK) else self._own_folder
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", BOOT, str(PACKAGE)],  # it writes no bytecode
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,  # not this process's own, which may be a terminal
                bufsize=0,
                env=_environment(kind, self._folder),
                start_new_session=not new_group,  # Ctrl-C is for the parent
                creationflags=new_group,
            )
        except OSError as error:
            self._remove_folder()
            raise RunError(f"cannot start a SQL worker: {error} (at {sys.executable})") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input = self._process.stdin.fileno()
        self._frames = FrameReader(self._process.stdout.fileno())
        path = [entry for entry in sys.path if entry] if ENGINES[kind].needs_packages else []
        with suppress(OSError):  # gone already; `wait_until_ready` raises
            setup = (kind, os.getpid(), path, tuple(readable), self._folder)
            write_all(self._input, framed(marshalled(setup)))

    def ask(self, request: bytes, n_queries: int, limits: Limits) -> list[Answer | None]:
        """Send a frame with queries to a ready worker; answers in their order, fewer if the process ended."""
        patience_s = limits.timeout_s + PATIENCE_S
        max_bytes = 2 * limits.max_bytes + 2 * limits.max_sql_bytes + FRAME_BYTES
        clock = time.perf_counter
        until = clock() + LOCKED_S + 2 * n_queries * patience_s  # whatever it sends meanwhile
        answers: list[Answer | None] = []
        self.is_free = is_last = False
        self.due = clock() + patience_s
        try:
            write_all(self._input, request)
        except OSError:
            return answers
        try:
            while len(answers) < n_queries and not is_last:
                self.due = min(clock() + patience_s, until)
                body, is_last = self._frames.read(max_bytes=max_bytes)
                answers += _answers(body, n_queries - len(answers))
        except (EOFError, OSError, ValueError):  # it ended, or not this package's code wrote the frame
            self.kill()
            self.has_crashed = True
            return answers
        self.due = float("inf")
        self.is_free = not is_last
        return answers

    def wait_until_ready(self, *, require_sandbox: bool) -> None:
        """Wait for the end of the start-up.

        Raises:
            RunError: The process ended, or its sandbox lacks a part that is required.
        """
        if self.is_ready:
            return
        self.due = time.perf_counter() + START_S
        try:
            found = unmarshalled(self._frames.read(max_bytes=FRAME_BYTES)[0])
            self.sandbox = tuple(part for part in PARTS if part in found)
        except (EOFError, OSError, TypeError, ValueError) as error:
            if not isinstance(error, EOFError | OSError):  # it goes on, and is not this package's code
                self.kill()
            code = self._process.wait()
            is_killed = os.name == "posix" and code == -signal.SIGKILL and not self.is_late
            raise (KilledAtStart if is_killed else RunError)(
                f"SQL worker exited with code {code} during start-up"
                f" (command: {sys.executable} -I -S -B): {self.stderr() or 'it wrote nothing to stderr'}"
            ) from None
        self.due = float("inf")
        missing = [part for part in PARTS if part not in self.sandbox]
        if missing and require_sandbox:
            raise RunError(
                f"the sandbox of a SQL worker lacks {', '.join(missing)}: use a Linux kernel that has them"
                " (Landlock: 5.13 or newer), or require_sandbox=False"
            )
        self.is_ready = self.is_free = True

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_busy(self) -> bool:
        """True while it runs a query; False during its start-up."""
        return self.is_ready and self.due < float("inf")

    def stderr(self) -> str:
        """Text that it wrote to stderr, without control characters; reads what is there now."""
        data, stream = b"", self._process.stderr
        if os.name == "posix" and stream is not None:  # elsewhere the read would wait
            with suppress(OSError, ValueError):  # closed
                os.set_blocking(stream.fileno(), False)
                data = stream.read(1 << 16) or b""
        return printable(data.decode(errors="replace").strip()[-MAX_STDERR_CHARS:])

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
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _remove_folder(self) -> None:
        if self._own_folder:
            shutil.rmtree(self._own_folder, ignore_errors=True)


def _answers(body: bytes, n_queries: int) -> list[Answer | None]:
    """Answers in a frame; raises ValueError if they are not what a worker sends."""
    answers = unmarshalled(body)
    if type(answers) is not list or len(answers) > n_queries:
        raise ValueError("a SQL worker sent no list of answers")
    for answer in answers:
        if answer is None:
            continue
        if type(answer) is not tuple:
            raise ValueError("a SQL worker sent no answer")
        kinds = tuple(map(type, answer))
        if kinds == _FIELDS:
            _, columns, rows, *_ = answer
            is_table = {tuple}.issuperset(map(type, rows)) and {len(columns)}.issuperset(map(len, rows))
            if not is_table or not _CELLS.issuperset(map(type, chain.from_iterable(rows))):
                raise ValueError("a SQL worker sent rows of another shape")
        elif kinds != (str, str):
            raise ValueError("a SQL worker sent an answer of another shape")
    return answers


# Variables that change how a program starts, finds its libraries or shows time and text.
_INHERITED = frozenset(
    ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TZDIR", "TMPDIR", "TEMP", "TMP", "SYSTEMROOT", "WINDIR")
) | {"LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "VIRTUAL_ENV"}


def _environment(kind: Kind, folder: str) -> dict[str, str]:
    """Inherited variables, those of the database's client, and settings of glibc.

    With its fast bins glibc would merge all freed small blocks at once in some later call, for 0.3 s after a
    query that filled the memory, and under the interpreter lock: the thread that watches the deadline would
    wait. Longer lists of freed blocks in each thread, which are never merged, save DuckDB 30 us a query.
    """
    prefixes = ("LC_", *ENGINES[kind].variables)
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.upper() in _INHERITED or name.startswith(prefixes)
    }
    if folder:
        kept["SQLITE_TMPDIR"] = folder
    return {**kept, "GLIBC_TUNABLES": "glibc.malloc.mxfast=0:glibc.malloc.tcache_count=200"}
