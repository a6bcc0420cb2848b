"""Wire format between the parent and its worker processes: marshal values after a short header.

Both ends are the same interpreter. Version 2 of the format has no references between values, so that
a marshalled list is its length followed by its items, each of which can be made on its own.
Imported by the workers: nothing heavy here.
"""

from __future__ import annotations

import os
from functools import cache
from marshal import dumps, loads

TYPE_CHECKING = False  # see `sqlite`
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

READ_BYTES = 1 << 16  # a larger buffer costs more than the calls it saves
HEADER_BYTES = 5
UNFORESEEN = "unforeseen"  # in place of the name of an error: a fault of the adapter on this query


def marshalled(value: Any) -> bytes:
    return dumps(value, 2)


def marshalled_list(items: list[bytes]) -> bytes:
    """Marshal a list of marshalled items."""
    return b"[" + len(items).to_bytes(4, "little") + b"".join(items)


@cache
def _skip_items() -> Callable[[bytes, int], Any]:
    """Matcher of items whose length needs no look: short texts and blobs, small lists and tuples."""
    import re  # not in the workers

    short = b"|".join(re.escape(bytes((n, 0, 0, 0))) + b".{%d}" % n for n in range(64))
    return re.compile(rb"(?:[NTF]|i.{4}|g.{8}|[(\[].\0\0\0|[us](?:" + short + rb"))*+", re.DOTALL).match


def unmarshalled(data: bytes) -> Any:
    """Value of marshal's format 2, from a process that is not trusted.

    `marshal.loads` makes code objects, and allocates as many items as a list announces. Here the values are
    None, booleans, numbers, texts, blobs, lists and tuples, in memory of a multiple of the data's length.

    Raises:
        ValueError: The data hold anything else, or are cut short.
    """
    skip = _skip_items()
    at, end, n_items = 0, len(data), len(data)  # an item takes a byte at least
    while (at := skip(data, at).end()) < end:
        kind, length = data[at : at + 1], int.from_bytes(data[at + 1 : at + 5], "little", signed=True)
        at += 5
        if kind in b"us":
            at += length
        elif kind in b"([":
            n_items -= length
        elif kind == b"l":
            length = abs(length)
            at += 2 * length
        else:
            raise ValueError(f"unknown type {kind!r} in a frame")
        if length < 0 or n_items < 0 or at > end:
            raise ValueError("a frame is cut short")
    try:
        return loads(data)
    except (EOFError, TypeError) as error:
        raise ValueError(f"a frame cannot be read: {error}") from error


def framed(body: bytes, *, is_last: bool = False) -> bytes:
    """Frame of a body; the process ends after a last one, and queries without an answer were not run."""
    return len(body).to_bytes(4, "little") + bytes((is_last,)) + body


def write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


class FrameReader:
    """Frames from a pipe, one after the other."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def read(self, *, max_bytes: int = 1 << 32) -> tuple[bytes, bool]:
        """Return the next frame's body, and whether it is the last one.

        Args:
            max_bytes: Maximum length of the body.

        Raises:
            EOFError: The other end is closed.
            ValueError: The frame is longer than `max_bytes`; the rest cannot be read.
        """
        data = self._rest or self._read()
        while len(data) < HEADER_BYTES:
            data += self._read()
        end = HEADER_BYTES + int.from_bytes(data[:4], "little")
        if end > HEADER_BYTES + max_bytes:
            raise ValueError(f"a frame of at most {max_bytes} bytes was expected, got {end - HEADER_BYTES}")
        if len(data) < end:
            buffer = bytearray(data)
            while len(buffer) < end:
                buffer += self._read()
            data = bytes(buffer)
        self._rest = data[end:]
        return data[HEADER_BYTES:end], bool(data[4])

    def _read(self) -> bytes:
        data = os.read(self._descriptor, READ_BYTES)
        if not data:
            raise EOFError
        return data
