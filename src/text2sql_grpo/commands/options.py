"""Option types that several verbs share, and checks of their options."""

import argparse
import gc
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from text2sql_grpo.bundled import located
from text2sql_grpo.config import Config, check_grpo_keys, load_config
from text2sql_grpo.data.databases import Databases
from text2sql_grpo.errors import ConfigError, RunError
from text2sql_grpo.files import is_full_disk
from text2sql_grpo.run_folder import CONFIG, EVALUATION
from text2sql_grpo.sql import SQLExecutor

if TYPE_CHECKING:  # slow to import, and help does not need it
    from rich.console import Console

QUICKSTART = Path("config/quickstart.yaml")
INTERRUPTED = 130  # exit code after Ctrl-C


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
NotNegative = Annotated[int, _between(0, 10**9, int)]
Retries = Annotated[int, _between(0, 1_000, int)]
Seed = Annotated[int, _between(0, 2**32 - 1, int)]
Port = Annotated[int, _between(0, 65_535, int)]
Seconds = Annotated[float, _between(0.001, 86_400, float)]
Temperature = Annotated[float, _between(0, 100, float)]


def check_one_of(**options: object) -> None:
    """Refuse a command line that gives none of some options, or several of them."""
    if sum(value is not None for value in options.values()) != 1:
        names = ", ".join(f"--{name}" for name in options)
        raise argparse.ArgumentError(None, f"give exactly one of {names}")


def check_served(base_url: str | None, model: str | None, config: Path | None) -> None:
    """Refuse an endpoint without its model's name or a config."""
    if (base_url is None) != (model is None):
        raise ConfigError("--model names the model at --base_url: give both, or a folder as --model_path")
    if base_url is not None and config is None:
        raise ConfigError("--base_url needs --config FILE")


def check_place(out: Path) -> None:
    """Fail early if `out` cannot be written; an existing file stays.

    Raises:
        ConfigError: It cannot be written, does not end in `.json`, or is what a run wrote about itself.
    """
    if out.suffix != ".json":
        raise ConfigError(f"--out must name a .json file, got {out}")
    if out.name == EVALUATION and (out.parent / CONFIG).is_file():
        raise ConfigError(f"--out is the record of the run itself: name another file ({out})")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        is_new = not out.exists()
        out.open("a").close()
        if is_new:
            out.unlink()
    except OSError as error:
        raise ConfigError(f"--out cannot be written: {error} ({out})") from error


def check_models(*names: str | None) -> None:
    """Refuse names of models, or of their answers, that are neither files nor Hub ids; None passes."""
    from text2sql_grpo.models.sources import check_name

    for name in names:
        if name is not None:
            check_name(name)


def config_or_quickstart(config: Path | None) -> Path:
    """The config that is named; else the quickstart's, with a line on stderr that names it."""
    if config is not None:
        return config
    print(
        f"No --config: this is the quickstart, {located(QUICKSTART)}. For a config of your own: "
        "text2sql-grpo config --example quickstart > my.yaml, edit it, and add --config my.yaml",
        file=sys.stderr,
    )
    return QUICKSTART


def config_with_files(
    path: Path, settings: Sequence[str] = (), *, is_trained: bool = False, model: str | None = None
) -> Config:
    """`load_config`, with all that it names looked up before slow imports.

    Args:
        is_trained: The config's model and questions for training are needed too.
        model: Another model that is needed.

    Raises:
        RunError: A file, the model, a server or a reward function does not exist, a question is wrong, or a
            key of `grpo` is unknown.
    """
    from text2sql_grpo.data.loading import check_file
    from text2sql_grpo.models.sources import check_readable

    config = load_config(path, settings)
    check_grpo_keys(config.grpo)
    if is_trained:
        config.reward_mix()
    databases = Databases(config.data.databases)
    with SQLExecutor(workers=1) as executor:
        for url in map(databases.source, databases.names()):
            if isinstance(url, str):
                executor.execute(url, "SELECT 1")
    named: dict[str, str | Path | None] = {
        f"data.test.{name}": source for name, source in config.data.test.items()
    }
    if is_trained:
        named |= {"data.train": config.data.train, "data.dev": config.data.dev}
        if config.sft is not None:
            named |= {"sft.questions": config.sft.questions, "sft.chats": config.sft.chats}
        model = config.model.source
    if model is not None:
        check_readable(model)
    for field, source in named.items():
        if source is not None:
            check_file(source, field, None if field == "sft.chats" else databases)
    return config


def quiet_console() -> "Console":
    """Make the console of a verb; call before importing libraries.

    Hides what a user cannot change: deprecations, missing kernels, progress bars of single files.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    # PEFT looks for a resized vocabulary in the base model; adapters here never resize it.
    for text in ("Could not find a config file in", "Unable to fetch remote file"):
        warnings.filterwarnings("ignore", text, UserWarning)
    for name in ("transformers.trainer", "transformers.trainer_utils"):
        logging.getLogger(name).setLevel(logging.ERROR)

    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    from text2sql_grpo.reporting.terminal import TextConsole

    wants_downloads_shown = not are_progress_bars_disabled()
    disable_progress_bar()  # would hide the bars of downloads too
    if wants_downloads_shown:
        enable_progress_bars()
    return TextConsole()


@contextmanager
def importing() -> Iterator[None]:
    """Import libraries without searches for garbage, which takes a fifth less time: imports leave none."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def writing_to(place: Path) -> Iterator[None]:
    """Turn a full disk, and a `place` or parent of it that cannot be made, into a RunError that names it."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        where = getattr(error, "filename", None) or place
        if is_full_disk(error):
            raise RunError(f"disk full while writing {where}") from error
        is_inside = place != Path() and place.is_relative_to(str(where))
        if isinstance(error, OSError) and error.errno and is_inside:
            raise RunError(f"cannot write to {place}: {error.strerror} ({where})") from error
        raise
