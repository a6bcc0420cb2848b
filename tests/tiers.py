"""Which cases of a test run by default, and which only where all are asked for."""

from collections.abc import Sequence

import pytest


def but_first_thorough(values: Sequence[object]) -> list[object]:
    """Values of one parameter of a test, all but the first thorough."""
    first, *others = values
    return [first, *(pytest.param(value, marks=pytest.mark.thorough) for value in others)]
