"""Atomic writes, appends of whole lines, and JSON and JSONL readers that name file and line in errors."""

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from text2sql_grpo.errors import DataError, RunError

PARTIAL = ".partial"  # suffix of drafts


@contextmanager
def draft(path: Path) -> Iterator[Path]:
    """File or folder to write, beside `path`: replaces `path` when the block ends, is removed if it fails.

    Each thread of each process has a draft of its own.
    """
    own = f".{path.name}.{os.getpid()}-{threading.get_ident()}"
    scratch, replaced = path.with_name(own + PARTIAL), path.with_name(f"{own}.replaced{PARTIAL}")
    try:
        yield scratch
        if path.is_dir():
            path.rename(replaced)
        scratch.replace(path)
    finally:
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        for folder in (scratch, replaced):
            shutil.rmtree(folder, ignore_errors=True)
        scratch.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: after a kill, it holds either its old content or `text`.

    Raises:
        RunError: It cannot be written.
    """
    try:
        with draft(path) as scratch:
            scratch.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error}") from error


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a JSON object atomically; see `write_text`."""
    write_text(path, json.dumps(record, indent=1) + "\n")


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON objects atomically, one a line; see `write_text`."""
    write_text(path, jsonl_text(records))


def append_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON objects, one a line, at once; a full disk leaves no half line behind.

    Raises:
        RunError: They cannot be written.
    """
    content = jsonl_text(records).encode("utf-8", "backslashreplace")
    try:
        before = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab") as file:
                file.write(content)
        except OSError:
            if path.is_file():
                os.truncate(path, before)
            raise
    except OSError as error:
        raise RunError(f"cannot write {path}: {error}") from error


def jsonl_text(records: Iterable[Mapping[str, Any]]) -> str:
    """JSON objects as text, one a line."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def read_json(path: Path) -> dict[str, Any]:
    """Object of a JSON file.

    Raises:
        DataError: It cannot be read, or holds no object.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read JSON: {error} ({path})") from error
    if not isinstance(record, dict):
        raise DataError(f"the JSON value must be an object, got {type(record).__name__} ({path})")
    return record


def read_jsonl(
    path: Path, what: str, *, convert: Callable[[dict[str, Any]], Any] = dict, skip_blank: bool = False
) -> Iterator[Any]:
    """Objects of a JSONL file, lazily.

    Args:
        path: The file, in UTF-8.
        what: Name of its content, for errors.
        convert: Called with each object; its KeyError, TypeError or ValueError refuses the line.
        skip_blank: whether blank lines are skipped, as in hand-written files, or refused.

    Raises:
        DataError: The file cannot be read, or a line is wrong; names the line.
    """
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            for line in file:
                number += 1
                if skip_blank and not line.strip():
                    continue
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise TypeError(f"got {type(record).__name__} {line[:80]!r}")
                yield convert(record)
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        place = f"{path}, line {number}" if number else str(path)
        found = f"no field {error}" if isinstance(error, KeyError) else error
        raise DataError(f"cannot read {what}, one JSON object a line: {found} ({place})") from error


def cut_lines(path: Path, *, last_step: int | None = None) -> None:
    """Cut a log back to its whole lines of steps up to `last_step`; no-op where it does not exist."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        for line in file:
            try:
                is_late = last_step is not None and json.loads(line)["step"] > last_step
            except ValueError:
                break
            if is_late or not line.endswith(b"\n"):
                break
            end += len(line)
    if end < path.stat().st_size:
        os.truncate(path, end)


def fingerprint(values: Any, files: Iterable[Path]) -> str:
    """Sixteen hexadecimal digits of a hash of plain values and of the contents of files.

    Raises:
        DataError: A file cannot be read.
    """
    digest = hashlib.sha256(json.dumps(values, default=str).encode())
    try:
        for file in files:
            digest.update(bytes.fromhex(sha256(file)))
    except OSError as error:
        raise DataError(f"cannot read a file that a cached result depends on: {error}") from error
    return digest.hexdigest()[:16]


def sha256(path: Path) -> str:
    """Hash of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
