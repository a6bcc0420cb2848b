"""What processes tell each other: one alone, and two that meet over gloo."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import distributed

from tests.processes import needs_fork
from tests.tiny_model import write_model
from text2sql_grpo import trl_compat
from text2sql_grpo.errors import RunError
from text2sql_grpo.models.loaded_policy import load_policy
from text2sql_grpo.reliability import ranks
from text2sql_grpo.rollout.policy import SlotPolicy


def two(job: Callable[[int], None]) -> list[int]:
    """The exit codes of two processes that do a job: 0, 1 after a `RunError`, 70 after anything else."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    pids = []
    for number in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            code = 70
            try:
                signal.alarm(30)
                distributed.init_process_group("gloo", init_method=address, rank=number, world_size=2)
                job(number)
                code = 0
            except RunError:
                code = 1
            finally:
                os._exit(code)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def test_one_process_is_the_main_one_and_waits_for_nobody() -> None:
    assert (ranks.rank(), ranks.is_main(), ranks.is_distributed()) == (0, True, False)
    assert ranks.gather([1, 2]) == [[1, 2]]
    assert (ranks.any_rank(True), ranks.any_rank(False)) == (True, False)
    ranks.create_group()
    ranks.barrier()
    ranks.destroy_group()


@needs_fork
def test_two_processes_know_what_each_has(tmp_path: Path) -> None:
    def job(number: int) -> None:
        ranks.create_group()
        assert ranks.gather([number] * number) == [[], [1]]
        assert ranks.any_rank(number == 1)
        assert not ranks.any_rank(False)
        assert ranks.is_main() == (number == 0)
        ranks.barrier()

    assert two(job) == [0, 0]


@needs_fork
def test_a_process_that_ends_leaves_nobody_waiting() -> None:
    def job(number: int) -> None:
        ranks.create_group()
        if number == 1:
            raise RunError("mine")
        with pytest.raises(
            RunError, match=r"one of the 2 processes died or does not answer \(seen by rank 0\)"
        ):
            ranks.barrier()

    assert two(job) == [0, 1]


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shape"), ranks.collective_errors():
        raise RuntimeError("gloo of another shape")


def test_a_model_that_others_are_to_fill_cannot_be_used_alone(tmp_path: Path) -> None:
    model = load_policy(str(write_model(tmp_path / "model"))).model
    assert ranks.holds_all_weights(model)
    with trl_compat.whole_weights(model):  # nothing is divided, so nothing happens
        assert SlotPolicy(model).model is model
    assert not ranks.holds_all_weights(model.to("meta"))
