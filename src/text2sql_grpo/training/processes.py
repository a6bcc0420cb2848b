"""What the processes of one run (`accelerate launch`) tell each other; of one process, nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from torch import distributed

from text2sql_grpo.errors import RunError

T = TypeVar("T")
_PATIENCE = timedelta(days=365)


def are_several() -> bool:
    """Whether other processes train beside this one."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def is_main() -> bool:
    """Whether this is the process that writes and prints."""
    return number() == 0


def number() -> int:
    """Of this process, from 0 for the main one."""
    return distributed.get_rank() if are_several() else 0


def meet() -> None:
    """To be called first by every process, when they have just begun: later they may come hours apart."""
    if are_several():
        _patient_group()


def gathered(values: Sequence[T]) -> list[list[T]]:
    """What each process has, in their order; waits for all of them, however long they take.

    Raises:
        RunError: One of them has ended.
    """
    if not are_several():
        return [list(values)]
    everybody: list[Any] = [None] * distributed.get_world_size()
    with others_ending():
        distributed.all_gather_object(everybody, list(values), group=_patient_group())
    return everybody


def any_of(flag: bool) -> bool:
    """Whether it is true in one process at least; the same answer in all."""
    return any(flag for (flag,) in gathered([flag]))


def wait() -> None:
    """Until every process is here, however long that takes."""
    gathered([None])


@contextmanager
def others_ending() -> Iterator[None]:
    """A process that has lost another one ends too; why, the lost one has said.

    Raises:
        RunError: One has ended.
    """
    try:
        yield
    except RuntimeError as error:
        # gloo has no class of its own for this; its messages begin with the file that they come from.
        if isinstance(error, distributed.DistError) or (are_several() and "gloo" in str(error)):
            raise RunError(
                f"expected all {distributed.get_world_size()} processes to go on, got one that ended or does "
                f"not answer (seen by process {number()}): its own message says why"
            ) from error
        raise


def end() -> None:
    """Parts from the other processes."""
    if are_several():
        _patient_group.cache_clear()
        PartialState().destroy_process_group()


@cache
def _patient_group() -> Any:
    """Waits for hours where the usual group gives up: for an evaluation, a merge."""
    return distributed.new_group(backend="gloo", timeout=_PATIENCE)


def holds_all_weights(model: torch.nn.Module) -> bool:
    """Whether this process can use a model by itself.

    FSDP lets one process of each machine read the weights (`fsdp_cpu_ram_efficient_loading`), ZeRO-3 divides
    them while they are read (`zero3_init_flag`).
    """
    return not any(parameter.is_meta or hasattr(parameter, "ds_id") for parameter in model.parameters())
