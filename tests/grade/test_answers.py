"""Answers of authors who had not read the grader, with proofs that the wrong ones are wrong."""

import pytest

from benchmarks.grading_answers import judged, unproved


@pytest.mark.parametrize("name", ["rental", "observatory"])
def test_the_proof_of_each_wrong_answer_makes_a_difference(name: str) -> None:
    assert unproved(name) == []


def test_wrong_answers_are_refused_and_right_ones_paid() -> None:
    count = judged("rental", limit=3)
    assert (count["wrong"], count["right"]) == (12, 6)
    assert (count["paid"], count["refused"], count["gaps"]) == (0, 0, 0)
