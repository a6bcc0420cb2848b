"""A limit on the size of files, in place of a full disk."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let writes beyond this size fail, as on a full disk; skip the test where there are no such limits.

    Of a module that is imported meanwhile, Python would write a part of the bytecode, and fail to read it.
    """
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with patch.dict(os.environ, PYTHONDONTWRITEBYTECODE="1"), patch.object(sys, "dont_write_bytecode", True):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
