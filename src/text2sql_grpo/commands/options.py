"""Kinds of options that several verbs share, and what verbs do around their jobs."""

import argparse
import errno
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from text2sql_grpo.errors import ModelError, RunError

if TYPE_CHECKING:  # slow to import, and help needs neither
    from rich.console import Console

    from text2sql_grpo.config import Config

QUICKSTART = Path("config/quickstart.yaml")


def _between(low: float, high: float, kind: type[int] | type[float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {kind.__name__} from {low} to {high}, got {text!r}")
        return value

    return read


Count = Annotated[int, _between(1, 10**9, int)]
Port = Annotated[int, _between(0, 65_535, int)]
Seconds = Annotated[float, _between(0.001, 86_400, float)]
Temperature = Annotated[float, _between(0, 100, float)]


def check_one_of(**options: object) -> None:
    """Refuse a command line that gives none of some options, or several of them."""
    if sum(value is not None for value in options.values()) != 1:
        names = ", ".join(f"--{name}" for name in options)
        raise argparse.ArgumentError(None, f"give exactly one of {names}")


def read_config(path: Path, settings: Sequence[str] = ()) -> "Config":
    """The config of a YAML file, with settings of the command line applied."""
    from text2sql_grpo.config import load_config

    return load_config(path, settings)


def config_around(model_path: str) -> Path:
    """The config of the run that made a model."""
    folder = Path(model_path)
    if not folder.is_dir():
        raise ModelError(
            f"no model folder such as RUN/merged at {model_path}; for a model of the Hub add --config FILE"
        )
    config = folder.resolve().parent / "config.yaml"
    if not config.is_file():
        raise ModelError(f"no config of the model's run at {config}: add --config FILE")
    return config


def quiet_console(*, highlight: bool = True) -> "Console":
    """Console of a job; call before importing the job, to hide what a user can do nothing about.

    These are deprecations, notes of the trainer, and progress bars of single files.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    # PEFT looks for a resized vocabulary in the base model; adapters here never resize it.
    for text in ("Could not find a config file in", "Unable to fetch remote file"):
        warnings.filterwarnings("ignore", text, UserWarning)
    for name in ("transformers.trainer", "transformers.trainer_utils"):
        logging.getLogger(name).setLevel(logging.ERROR)

    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    wants_downloads_shown = not are_progress_bars_disabled()
    disable_progress_bar()  # would hide the bars of downloads too
    if wants_downloads_shown:
        enable_progress_bars()
    return Console(highlight=highlight)


@contextmanager
def writing_to(place: Path) -> Iterator[None]:
    """Turn a full disk into a RunError, at `place` where the failed write names no file."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        if not _is_full_disk(error):
            raise
        where = getattr(error, "filename", None) or place
        raise RunError(f"disk full while writing {where}") from error


def _is_full_disk(error: BaseException) -> bool:
    """Whether a write failed for want of space: a full disk, a quota, or a limit on file sizes.

    torch and safetensors write in C++ and Rust: their errors say so in their text alone.
    """
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, OSError):
        return error.errno in numbers
    texts = (*map(os.strerror, numbers), "unexpected pos")
    return any(text in str(error) for text in texts)
