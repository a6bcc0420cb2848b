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


@pytest.mark.parametrize("is_soon", [False, True])
@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_frames_arrive_whole_and_in_order(pipe: tuple[int, int], is_soon: bool, delay_s: float) -> None:
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
    found = [reader.read(is_soon=is_soon) for _ in bodies]
    writer.join()
    assert found == list(zip(bodies, [False] * 3 + [True], strict=True))


@pytest.mark.parametrize("is_soon", [False, True])
def test_closed_pipe_is_the_end(pipe: tuple[int, int], is_soon: bool) -> None:
    os.close(pipe[1])
    with pytest.raises(EOFError):
        FrameReader(pipe[0]).read(is_soon=is_soon)


def test_reader_that_waits_in_vain_sleeps(pipe: tuple[int, int]) -> None:
    reader = FrameReader(pipe[0])
    writer = threading.Timer(0.3, write_all, (pipe[1], framed(b"late")))
    writer.start()
    before = time.thread_time()
    assert reader.read(is_soon=True) == (b"late", False)
    assert time.thread_time() - before < 0.05
    writer.join()


@pytest.mark.skipif(os.name == "nt", reason="pipes always block on Windows")
def test_reader_looks_again_where_looking_helps(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "SPIN_S", 30.0)
    reader = FrameReader(pipe[0])
    reader._n_skips = 63
    for n_skips in (15, 3, 0):
        threading.Timer(0.05, write_all, (pipe[1], framed(b"soon"))).start()
        assert reader.read(is_soon=True) == (b"soon", 0)
        assert reader._n_skips == n_skips


@pytest.mark.skipif(os.name == "nt", reason="pipes always block on Windows")
def test_reader_seldom_looks_where_looking_is_in_vain(pipe: tuple[int, int]) -> None:
    reader = FrameReader(pipe[0])
    looks = []
    for _ in range(200):
        looks.append(reader._n_skips_left == 0)
        assert reader._poll() == b""
    assert sum(looks) == 7  # after 1, 3, 7, 15, 31, 63 and 127 reads that did not look
    n_skips = reader._n_skips
    while reader._n_skips_left:
        reader._poll()
    write_all(pipe[1], framed(b"there"))
    assert reader.read(is_soon=True) == (b"there", 0)
    assert reader._n_skips == n_skips  # nothing was waited for
