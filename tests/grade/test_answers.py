"""Answers of authors who had not read the grader, with proofs that the wrong ones are wrong."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import but_first_thorough

# Not those of PostgreSQL.
SETS = ["fishery", "rental", "school", "press", "observatory", "orchard", "parcels", "cycles"]


@pytest.fixture(scope="module")
def benchmark(repo_root: Path) -> Any:
    """The module, with its neighbours importable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repo_root / "benchmarks"))
        yield importlib.import_module("grading_answers")


@pytest.mark.parametrize("name", but_first_thorough(SETS))
def test_the_proof_of_each_wrong_answer_makes_a_difference(benchmark: Any, name: str) -> None:
    assert benchmark.unproved(name) == []


def test_wrong_answers_are_refused_and_right_ones_paid(benchmark: Any) -> None:
    count = benchmark.judged("rental", limit=3)
    assert (count["wrong"], count["right"]) == (12, 6)
    assert (count["paid"], count["refused"], count["gaps"]) == (0, 0, 0)
