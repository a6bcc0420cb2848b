"""Fixtures of the tests that grade."""

from pathlib import Path

import pytest

from text2sql_grpo.grading.base_sample import DatabaseSample, read_sample


@pytest.fixture(scope="session")
def base(shop: Path) -> DatabaseSample:
    """The rows of the shop, from which test databases are made."""
    return read_sample(shop)
