"""One line for every query that an MCP server was asked to run."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

from text2sql_grpo.errors import ConfigError

MAX_SQL_CHARS = 100_000


class AuditLog:
    """Appends to a JSONL file that several servers may share; only its owner can read it.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"expected an audit log that can be written, got {error} (at {path})"
            ) from error

    def write(self, *, session: str, sql: str, status: str, rows: int, elapsed_s: float) -> None:
        """Adds a line, whole and at once.

        Args:
            sql: Cut after `MAX_SQL_CHARS`; no text longer than the executor's limit is run.
            status: As the executor says it; `failed` if the database could not be asked, `cancelled` if
                nobody waited for the end.

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
        """Nothing is written afterwards."""
        os.close(self._file)
