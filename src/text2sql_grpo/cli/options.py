"""What the verbs have in common: kinds of values, settings of a config, quiet libraries."""

import argparse
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from text2sql_grpo.errors import ModelError

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
SETTING = "--section.key"


def quiet_libraries() -> None:
    """Hide what a user can do nothing about: deprecations, missing kernels, bars of single files."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    # PEFT looks for a resized vocabulary in the base model; adapters here never resize it.
    warnings.filterwarnings("ignore", "Could not find a config file in", UserWarning)
    for name in ("bitsandbytes", "transformers.trainer", "transformers.trainer_utils"):
        logging.getLogger(name).setLevel(logging.ERROR)

    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    wants_downloads_shown = not are_progress_bars_disabled()
    disable_progress_bar()  # would hide the bars of downloads too
    if wants_downloads_shown:
        enable_progress_bars()


def config_around(model_path: str) -> Path:
    """The config of the run that made a model."""
    folder = Path(model_path)
    if not folder.is_dir():
        raise ModelError(
            f"expected a model folder such as RUN/merged, got none (at {model_path}); "
            "for a model of the Hub add --config FILE"
        )
    config = folder.resolve().parent / "config.yaml"
    if not config.is_file():
        raise ModelError(f"expected a model folder inside its run folder, got no {config}: add --config FILE")
    return config


def add_verb(
    verbs: Verbs,
    name: str,
    about: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """The parser of a new verb, to be given its options."""
    parser = verbs.add_parser(name, help=about, description=about, allow_abbrev=False)
    parser.set_defaults(run=run, parser=parser, takes_settings=False, writes_to=Path())
    return parser


def take_settings(parser: argparse.ArgumentParser) -> None:
    """Lets a verb take any field of the config as an option."""
    parser.set_defaults(takes_settings=True)
    parser.usage = f"{parser.format_usage().removeprefix('usage: ').rstrip()} [{SETTING} VALUE ...]"
    parser.epilog = f"{SETTING} VALUE sets any field of the config, such as --run.seed 1."


def count(text: str) -> int:
    """An int from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an int >= 1, got {text!r}")
    return int(text)


def port(text: str) -> int:
    """An int from 0 to 65535."""
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"expected an int from 0 to 65535, got {text!r}")
    return int(text)


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number > 0, got {text!r}")
    return value


def temperature(text: str) -> float:
    """A finite number from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number >= 0, got {text!r}")
    return value
