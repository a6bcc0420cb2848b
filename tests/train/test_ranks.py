"""Collectives of a single process; `test_many_processes.py` has those of two."""

from pathlib import Path

import pytest

from tests.tiny_model import write_model
from text2sql_grpo import trl_compat
from text2sql_grpo.models.loaded_policy import load_policy
from text2sql_grpo.reliability import ranks
from text2sql_grpo.rollout.policy import SlotPolicy


def test_one_process_is_the_main_one_and_waits_for_nobody() -> None:
    assert (ranks.rank(), ranks.is_main(), ranks.is_distributed()) == (0, True, False)
    assert ranks.gather([1, 2]) == [[1, 2]]
    assert (ranks.any_rank(True), ranks.any_rank(False)) == (True, False)
    ranks.create_group()
    ranks.barrier()
    ranks.destroy_group()


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shape"), ranks.collective_errors():
        raise RuntimeError("gloo of another shape")


def test_a_model_that_others_are_to_fill_cannot_be_used_alone(tmp_path: Path) -> None:
    model = load_policy(str(write_model(tmp_path / "model"))).model
    assert ranks.holds_all_weights(model)
    with trl_compat.whole_weights(model):  # nothing is divided, so nothing happens
        assert SlotPolicy(model).model is model
    assert not ranks.holds_all_weights(model.to("meta"))
