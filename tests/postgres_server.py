"""A private PostgreSQL server for tests, from the system's package (Debian: postgresql)."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from text2sql_grpo.sql.postgres_role import restricted_role_sql

# A database with `dblink` refuses roles that may call it.
WITHOUT_DBLINK = """
    DO $do$ DECLARE routine regprocedure; BEGIN
        FOR routine IN SELECT oid FROM pg_proc WHERE proname ~ '^dblink' LOOP
            EXECUTE format('REVOKE EXECUTE ON ROUTINE %s FROM PUBLIC', routine);
        END LOOP;
    END $do$
"""
HOST = "127.0.0.1"
ADMIN = "admin"
ADMIN_PASSWORD = "of-the-admin"
PASSWORD = "of-a-reader"  # of every role made here
START_TIMEOUT_S = 60
# PostgreSQL refuses to run as root. Debian's package makes the first of these users, Debian the second.
UNPRIVILEGED_USERS = ("postgres", "nobody")


@dataclass(frozen=True)
class PostgresServer:
    """A running server that answers this machine alone, and only with a password.

    Attributes:
        port: A port that was free.
        folder: Holds its data (`data/`), its log (`log`) and its unix socket.
        binaries: Holds initdb and pg_ctl.
        user: The user that runs it; None for the present one.
    """

    port: int
    folder: Path
    binaries: Path
    user: str | None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        settings = (
            f"-c listen_addresses={HOST} -c port={self.port} -c unix_socket_directories={self.folder}"
            " -c fsync=off -c shared_buffers=16MB -c max_connections=40 -c lc_messages=C"
            " -c temp_file_limit=256MB"
        )
        log = ["-l", str(self.folder / "log"), "-w", "-t", str(START_TIMEOUT_S)]
        _run([*self._control("start"), *log, "-o", settings], self.user)

    def stop(self, mode: str = "fast") -> None:
        """Stop it; with the mode `immediate` as after a crash."""
        _run([*self._control("stop"), "-m", mode, "-w"], self.user)

    def _control(self, action: str) -> list[str]:
        return [str(self.binaries / "pg_ctl"), action, "-D", str(self.folder / "data")]

    def url(self, user: str, password: str, database: str = "postgres") -> str:
        """The URL of one of its databases; special characters of the password must be escaped already."""
        return f"postgresql://{user}:{password}@{HOST}:{self.port}/{database}"

    def admin_url(self, database: str = "postgres") -> str:
        """The URL of one of its databases, for the superuser."""
        return self.url(ADMIN, ADMIN_PASSWORD, database)

    def admin(self, database: str = "postgres") -> psycopg.Connection:
        """A session of the superuser, without transactions."""
        return psycopg.connect(self.admin_url(database), autocommit=True)

    def create(self, name: str, script: str = "", *, schemas: Sequence[str] = ("public",)) -> str:
        """Make a database from a script, anew if there is one; its URL for a role that may only read it."""
        with self.admin() as admin:
            admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
            admin.execute(f"DROP ROLE IF EXISTS reader_of_{name}")
            admin.execute(f"CREATE DATABASE {name}")
        with self.admin(name) as admin:
            admin.execute(script or "SELECT 1")
            admin.execute(restricted_role_sql(f"reader_of_{name}", PASSWORD, name, schemas=schemas))
        return self.url(f"reader_of_{name}", PASSWORD, name)


def postgres_binaries() -> Path | None:
    """The folder with initdb and pg_ctl, of the newest version; None if PostgreSQL is not installed."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    initdb = versions[-1] if versions else shutil.which("initdb")
    return Path(initdb).resolve().parent if initdb else None


@contextlib.contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """A new, empty server, stopped and removed at the end; the test is skipped where there is none."""
    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("needs PostgreSQL's initdb and pg_ctl (Debian: apt-get install postgresql)")
    # Not pytest's folder: the path of a unix socket may have 107 characters at most.
    folder = Path(tempfile.mkdtemp(prefix="pg_"))
    (folder / "password").write_text(ADMIN_PASSWORD)
    user = _prepare_folder(folder)
    data = str(folder / "data")
    server = PostgresServer(_free_port(), folder, binaries, user)
    try:
        initdb = [str(binaries / "initdb"), "--no-sync", "-D", data, "-U", ADMIN, "--auth", "scram-sha-256"]
        _run([*initdb, "--pwfile", str(folder / "password"), "--encoding", "UTF8", "--locale", "C"], user)
        server.start()
        try:
            yield server
        finally:
            server.stop("immediate")
    finally:
        shutil.rmtree(folder)


def _prepare_folder(folder: Path) -> str | None:
    """Gives the folder to the user that will run the server; None for the present one."""
    if os.name == "nt" or os.geteuid() != 0:
        return None
    import pwd  # not on Windows

    names = {entry.pw_name for entry in pwd.getpwall()}
    user = next(name for name in UNPRIVILEGED_USERS if name in names)
    for path in (folder, *folder.iterdir()):
        shutil.chown(path, user)
    return user


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _run(command: Sequence[str], user: str | None) -> None:
    # Into a file: the server inherits the output of pg_ctl, so that a pipe would stay open.
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, cwd="/", user=user, timeout=2 * START_TIMEOUT_S
        )
        output.seek(0)
        text = output.read().decode(errors="replace")
    if done.returncode != 0:
        raise RuntimeError(f"expected {command[0]} {command[1]} to succeed, got {done.returncode}: {text}")
