"""How frames are read: when they are there, late, in parts, or never come."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from text2sql_grpo.sql import frames
from text2sql_grpo.sql.frames import FrameReader, framed, write_all


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with suppress(OSError):  # closed by the test
            os.close(end)


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_frames_arrive_whole_and_in_order(pipe: tuple[int, int], delay_s: float) -> None:
    bodies = [b"one", b"", bytes(3 * frames.READ_BYTES), b"four"]

    def write() -> None:
        for number, body in enumerate(bodies):
            time.sleep(delay_s)
            frame = framed(body, is_last=number == 3)
            write_all(pipe[1], frame[:3])  # not even a header
            write_all(pipe[1], frame[3:])

    writer = threading.Thread(target=write)
    writer.start()
    reader = FrameReader(pipe[0])
    found = [reader.read() for _ in bodies]
    writer.join()
    assert found == list(zip(bodies, [False] * 3 + [True], strict=True))


def test_closed_pipe_is_the_end(pipe: tuple[int, int]) -> None:
    os.close(pipe[1])
    with pytest.raises(EOFError):
        FrameReader(pipe[0]).read()
