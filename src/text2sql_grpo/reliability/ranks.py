"""Collectives between the ranks of one run (`accelerate launch`); no-ops in a single process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from torch import distributed

from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.files import PARTIAL

T = TypeVar("T")
_TIMEOUT = timedelta(days=365)


def is_distributed() -> bool:
    """True if the run has more than one rank."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def is_main() -> bool:
    """True on rank 0, which writes and prints."""
    return rank() == 0


def rank() -> int:
    """Rank of this process; 0 in a single process."""
    return distributed.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Number of ranks; 1 in a single process."""
    return distributed.get_world_size() if is_distributed() else 1


def create_group() -> None:
    """Create the long-timeout group. Call on every rank at start-up: later calls may be hours apart."""
    if is_distributed():
        _long_timeout_group()


def gather(value: T) -> list[T]:
    """Value of each rank, in order of ranks. Blocks until every rank has called it.

    Raises:
        RunError: Another rank died.
    """
    if not is_distributed():
        return [value]
    gathered: list[Any] = [None] * distributed.get_world_size()
    with collective_errors():
        distributed.all_gather_object(gathered, value, group=_long_timeout_group())
    return gathered


def from_main(compute: Callable[[], T]) -> T:
    """Result of a function that rank 0 alone calls; its result or RunError reaches every rank."""
    own: Any = None
    if is_main():
        try:
            own = compute()
        except RunError as error:
            own = error
    result: T | RunError = gather(own)[0]
    if isinstance(result, RunError):
        raise result
    return result


def any_rank(flag: bool) -> bool:
    """True, on every rank, if `flag` is true on at least one."""
    return any(gather(flag))


def any_reason(reason: str | None) -> str | None:
    """Return, on every rank, the reason of the first rank that has one; None if none has."""
    return next((found for found in gather(reason) if found is not None), None)


def barrier() -> None:
    """Block until every rank is here."""
    gather(None)


def check_shared(folder: Path, setting: str) -> None:
    """Fail early if a rank, on another machine, does not see what rank 0 writes to a folder.

    Args:
        setting: Name of the setting that moves the folder.

    Raises:
        ConfigError: A rank does not see it.
    """
    if not is_distributed():
        return
    with NamedTemporaryFile(dir=folder, suffix=PARTIAL) if is_main() else nullcontext() as written:
        name = gather(Path(written.name).name if written else "")[0]
        is_seen = gather((folder / name).exists())
    if not all(is_seen):
        raise ConfigError(
            f"rank {is_seen.index(False)} does not see what rank 0 writes to {folder}: set {setting} to a "
            "folder that all machines share"
        )


@contextmanager
def collective_errors() -> Iterator[None]:
    """Turn a failed collective into RunError: another rank died; see its log."""
    try:
        yield
    except RuntimeError as error:
        # gloo has no error class of its own; its messages begin with the source file.
        if isinstance(error, distributed.DistError) or (is_distributed() and "gloo" in str(error)):
            raise RunError(
                f"one of the {distributed.get_world_size()} processes died or does not answer (seen by rank "
                f"{rank()}); see the log of the rank that failed first"
            ) from error
        raise


def destroy_group() -> None:
    """Leave the process group, at the end of a run."""
    if is_distributed():
        _long_timeout_group.cache_clear()
        PartialState().destroy_process_group()


@cache
def _long_timeout_group() -> Any:
    """Group for evaluations and merges, which outlast the default timeout."""
    return distributed.new_group(backend="gloo", timeout=_TIMEOUT)


def holds_all_weights(model: torch.nn.Module) -> bool:
    """True if this rank can run the model by itself.

    FSDP reads the weights on one rank of each machine (`fsdp_cpu_ram_efficient_loading`); ZeRO-3 shards them
    while they are read (`zero3_init_flag`).
    """
    return not any(parameter.is_meta or hasattr(parameter, "ds_id") for parameter in model.parameters())
