"""Atomic writes, appends of whole lines, bounded YAML, and JSON and JSONL readers that name file and line."""

import errno
import hashlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from text2sql_grpo.errors import DataError, RunError

PARTIAL = ".partial"  # suffix of drafts
UNUSED_DAYS = 60  # after which an entry of a cache folder is deleted
MAX_YAML_VALUES = 100_000
MAX_YAML_DEPTH = 100  # lists and mappings inside each other


@contextmanager
def draft(path: Path) -> Iterator[Path]:
    """File or folder to write, next to `path`: replaces `path` when the block ends, is removed if it fails.

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


@contextmanager
def locked(file: Path, refusal: str) -> Iterator[None]:
    """Hold a lock file, which is removed when the block ends.

    Raises:
        RunError: Another process holds it, with `refusal` as the message; or it cannot be written.
    """
    lock = FileLock(file, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise RunError(refusal) from None
    except OSError as error:
        raise RunError(f"cannot write {file}: {error}") from error
    try:
        yield
    finally:
        with suppress(OSError):  # Windows deletes no open file
            os.unlink(lock.lock_file)
        lock.release()


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


class BoundedLoader(yaml.SafeLoader):
    """YAML loader that refuses deep nests, aliases of themselves and of more than `MAX_YAML_VALUES` values.

    PyYAML's scanner looks at all open brackets for each of its tokens.
    """

    def fetch_more_tokens(self) -> None:
        """Read a token, unless the open brackets or blocks are too many."""
        if max(self.flow_level, len(self.indents)) > MAX_YAML_DEPTH:
            raise yaml.YAMLError("it is nested too deeply")
        super().fetch_more_tokens()

    def get_single_node(self) -> yaml.Node | None:
        """Compose the document."""
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _expanded_size(node, {}) > MAX_YAML_VALUES:
            raise yaml.YAMLError(f"aliases stand for more than {MAX_YAML_VALUES} values")
        return node


def _expanded_size(node: yaml.Node, known: dict[int, float]) -> float:
    """Number of values of a node with its aliases written out; infinite for an alias inside itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        pairs = node.value if isinstance(node, yaml.CollectionNode) else []
        children = [child for pair in pairs for child in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_expanded_size(child, known) for child in children)
    return known[id(node)]


def parse_yaml(text: str, loader: type[BoundedLoader] = BoundedLoader) -> Any:
    """Value of a YAML document, in work and memory bounded by its length.

    Raises:
        ValueError: It is not YAML, is nested too deeply, or holds a value that is none of its type.
    """
    try:
        return yaml.load(text, loader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:  # of `!!bool x`, `!!timestamp x`
        raise ValueError(str(error)) from error


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


def is_full_disk(error: BaseException) -> bool:
    """True if a write failed for lack of space: a full disk, a quota, or a limit on file sizes.

    torch and safetensors write in C++ and Rust: only the text of their errors shows it.
    """
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, OSError):
        return error.errno in numbers
    texts = (*map(os.strerror, numbers), "unexpected pos")
    return any(text in str(error) for text in texts)


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


def refuse_edited(paths: Iterable[Path], made: Mapping[str, str]) -> None:
    """Raise a DataError if a file exists whose hash is not the one in `made`, by name."""
    if lost := [str(path) for path in paths if path.exists() and made.get(path.name) != sha256(path)]:
        raise DataError(
            f"{', '.join(lost)} was edited since, or not made here: nothing is written. "
            "Move it away, or give another place with --out"
        )


def prune(folder: Path) -> None:
    """Delete the entries of a cache folder that no process used for `UNUSED_DAYS`."""
    oldest = time.time() - UNUSED_DAYS * 86_400
    for entry in os.scandir(folder):
        with suppress(OSError):  # deleted by another process meanwhile
            if entry.stat().st_mtime < oldest:
                shutil.rmtree(entry.path) if entry.is_dir() else os.unlink(entry.path)


prune_once = lru_cache(maxsize=64)(prune)  # per process and folder


def is_kept(entry: Path) -> bool:
    """True if a cache folder has an entry, which then counts as used; see `prune`."""
    with suppress(OSError):  # another user's
        os.utime(entry)
    return entry.exists()
