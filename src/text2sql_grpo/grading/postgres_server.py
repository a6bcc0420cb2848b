"""Private PostgreSQL server from the system's package, for copies of variants."""

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

import psycopg

from text2sql_grpo.errors import ConfigError

ADMIN = "admin"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
# PostgreSQL refuses to run as root. Debian's package makes the first of these users, Debian the second.
UNPRIVILEGED_USERS = ("postgres", "nobody")
# What is lost in a crash is made again.
_SETTINGS = {
    **dict.fromkeys(("fsync", "synchronous_commit", "full_page_writes", "autovacuum", "jit"), "off"),
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "shared_buffers": "64MB",
    "max_connections": "1000",  # a worker keeps 16
    "listen_addresses": "",
    "port": "5432",  # a part of the socket's name
}
# The server ends when this process does, killed or not: its end of the pipe closes.
_UNTIL_THE_END = '"$@" & server=$!; cat > /dev/null; kill -QUIT $server; wait $server; rm -rf "$FOLDER"'


class PostgresServer:
    """A server of this process alone, on a unix socket, with a password of its own; gone with the process.

    Attributes:
        url: URL of its superuser.
    """

    def __init__(self, cache: Path) -> None:
        """Start the server.

        Args:
            cache: Parent of its folder. As root, the temporary folder takes its place, since the user that
                runs the server cannot enter root's.

        Raises:
            ConfigError: PostgreSQL is not installed, or does not start.
        """
        binaries = server_binaries()
        if binaries is None:
            raise ConfigError(
                "PostgreSQL's initdb is not installed here (Debian: apt-get install postgresql)"
            )
        user = _unprivileged_user()
        if user is None:
            cache.mkdir(parents=True, exist_ok=True)
        folder = Path(
            tempfile.mkdtemp(
                prefix="server-" if user is None else "text2sql-grpo-pg-", dir=None if user else cache
            )
        )
        # A socket's path may have 107 characters at most.
        self._socket = Path(tempfile.mkdtemp(prefix="pg-"))
        password = secrets.token_hex(16)
        (folder / "password").write_text(password)
        (folder / "password").chmod(0o600)
        if user is not None:
            for path in (folder, folder / "password", self._socket):
                shutil.chown(path, user)
            self._socket.chmod(0o711)
        initdb = [str(binaries / "initdb"), "--no-sync", "-D", str(folder / "data"), "-U", ADMIN]
        initdb += ["--auth", "scram-sha-256", "--pwfile", str(folder / "password")]
        made = subprocess.run(
            [*initdb, "--encoding", "UTF8", "--locale", "C"],
            cwd="/",
            user=user,
            capture_output=True,
            text=True,
        )
        if made.returncode != 0:
            for path in (folder, self._socket):
                shutil.rmtree(path, ignore_errors=True)
            raise ConfigError(f"a private PostgreSQL server cannot be made: {made.stderr.strip()[-300:]}")
        settings = {**_SETTINGS, "unix_socket_directories": str(self._socket)}
        command = [str(binaries / "postgres"), "-D", str(folder / "data")]
        command += [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _UNTIL_THE_END, "sh", *command],
                cwd="/",
                user=user,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"FOLDER": str(folder), "PATH": os.environ.get("PATH", "/usr/bin:/bin")},
                start_new_session=True,  # Ctrl-C is for this process
            )
        self._finish = weakref.finalize(self, _end, os.getpid(), self._process, (folder, self._socket))
        self.url = f"postgresql://{ADMIN}:{password}@/postgres?host={self._socket}&port=5432"
        self._wait(folder / "log")

    def close(self) -> None:
        """Stop the server and remove its folder."""
        self._finish()

    def _wait(self, log: Path) -> None:
        give_up = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                psycopg.connect(self.url).close()
                return
            except psycopg.OperationalError as error:
                if self._process.poll() is not None or time.monotonic() > give_up:
                    shown = log.read_text(errors="replace")[-300:] if log.exists() else ""
                    self.close()
                    raise ConfigError(
                        f"a private PostgreSQL server does not start: {error} {shown}"
                    ) from None
            time.sleep(0.05)


def server_binaries() -> Path | None:
    """Folder with PostgreSQL's initdb, of the newest version; None if there is none."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    initdb = versions[-1] if versions else shutil.which("initdb")
    return Path(initdb).resolve().parent if initdb else None


def _unprivileged_user() -> str | None:
    """User that runs the server; None for the present one."""
    if os.name == "nt" or os.geteuid() != 0:
        return None
    import pwd  # not on Windows

    names = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in UNPRIVILEGED_USERS if name in names), None)


def _end(owner: int, process: "subprocess.Popen[bytes]", folders: Iterable[Path]) -> None:
    if os.getpid() != owner:  # a forked process ends
        return
    with contextlib.suppress(OSError):
        if process.stdin:
            process.stdin.close()
    try:
        process.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for folder in folders:  # the user that runs the server may not remove its entry in root's folder
        shutil.rmtree(folder, ignore_errors=True)
