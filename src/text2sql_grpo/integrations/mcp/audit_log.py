"""Audit log: one line for every query of an MCP server."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

from text2sql_grpo.errors import ConfigError

MAX_SQL_CHARS = 100_000


class AuditLog:
    """Append-only JSONL file that several servers may share; only its owner can read it.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot write the audit log: {error} (at {path})") from error

    def write(self, *, session: str, sql: str, status: str, rows: int, elapsed_s: float) -> None:
        """Append a line in one write.

        Args:
            sql: Cut after `MAX_SQL_CHARS`; no text longer than the executor's limit is run.
            status: The outcome's status; `failed` if the database could not be read, `cancelled` if the
                request was.

        Raises:
            OSError: The disk is full: a query that cannot be logged gets no answer.
        """
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "session": session,
            "sql": sql[:MAX_SQL_CHARS],
            "status": status,
            "rows": rows,
            "elapsed_s": round(elapsed_s, 6),
        }
        data = json.dumps(line).encode() + b"\n"
        if os.write(self._file, data) != len(data):
            raise OSError(f"disk full while writing the audit log {self.path}")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
