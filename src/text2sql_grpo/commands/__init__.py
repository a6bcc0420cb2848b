"""`text2sql-grpo VERB`: one module a verb, whose function's signature and docstring are its options and help.

Slow imports are inside the verbs, so that `--help` answers at once and `.env` is read before any library
reads the environment.
"""

import argparse
import difflib
import inspect
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from dotenv import load_dotenv

from text2sql_grpo import __version__
from text2sql_grpo.commands.options import INTERRUPTED, writing_to
from text2sql_grpo.commands.parser import Parser, add_verb
from text2sql_grpo.config import Config
from text2sql_grpo.errors import RunError

# Each verb is a function of its module's name; a group is a module with one function per verb.
VERBS = (
    *("init", "train", "sft", "evaluate", "compare", "merge", "push", "doctor", "config", "collect", "ask"),
    *("serve", "export", "replay", "view", "mcp", "review", "role"),
)
GROUPS = {"data": ("make", "log", "words", "teach", "overlap"), "audit": ("data", "reward")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; exit code 0, 1 after an error with a message, or 130 after Ctrl-C.

    `argv` are the arguments without the program's name; None for the command line.
    """
    # Read when torch is imported. Threads that spin while they wait halve their own speed on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a model may write what no terminal can show
    verb, options, parser = _read(sys.argv[1:] if argv is None else list(argv))
    load_dotenv(Path(".env"))
    if os.environ.get("HF_KEY") and not os.environ.get("HF_TOKEN"):
        os.environ["HF_TOKEN"] = os.environ["HF_KEY"]
    logging.basicConfig(format="%(message)s", handlers=[_MessageHandler()])
    logging.getLogger("text2sql_grpo").setLevel(logging.INFO)
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_news)
    try:
        with writing_to(Path()):
            return verb(**options)
    except argparse.ArgumentError as error:
        parser.error(str(error))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if _has_reader():
            raise
        return 1


def _has_reader() -> bool:
    """False if stdout is a pipe whose reader ended, as in `config | head`; stdout then leads nowhere."""
    try:
        print(flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit fails again
        return False
    return True


def _read(words: list[str]) -> tuple[Callable[..., int], dict[str, Any], Parser]:
    """Parse a command line into verb, options and parser."""
    parser = Parser(
        prog="text2sql-grpo",
        description="Train language models to answer questions over a SQL database.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    below = {"": parser.add_subparsers(required=True, metavar="verb")}
    for name, verb in verbs().items():
        group = name.rpartition(" ")[0]
        if group not in below:
            about = import_module(verb.__module__).__doc__
            own_parser = below[""].add_parser(group, help=about, description=about, allow_abbrev=False)
            below[group] = own_parser.add_subparsers(required=True, metavar="verb")
        add_verb(below[group], verb)
    if words[:1] == ["warm-start"]:
        parser.error("warm-start was removed: use sft (docs/sft.md)")
    own, settings = _without_settings(words)
    found, unknown = parser.parse_known_args(own)
    options = vars(found)
    verb, parser = options.pop("verb"), options.pop("parser")
    if settings and "settings" not in options:
        unknown = settings[:1]
    if unknown:
        known = [f"--{name}" for name in options]
        close = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        parser.error(f"unknown options: {' '.join(unknown)}{hint}")
    return verb, options | ({"settings": settings} if settings else {}), parser


def verbs() -> dict[str, Callable[..., int]]:
    """Functions of the verbs by name, such as `train` and `data make`."""
    modules = {name: name for name in VERBS} | {"config": "default_config"}  # `config` holds the fields
    modules |= {f"{group} {verb}": group for group, own in GROUPS.items() for verb in own}
    return {
        name: getattr(import_module(f"{__name__}.{module}"), name.rpartition(" ")[2])
        for name, module in modules.items()
    }


def _without_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate fields of the config, with their values, from the words of the verb itself.

    A field has a dot or is a whole section that is not an option of the verb: `--run.seed 1`, `--sft null`.
    argparse would take the values for positional words.
    """
    known, sections = verbs(), {field.name for field in fields(Config)}
    verb = known.get(" ".join(words[:1])) or known.get(" ".join(words[:2]))
    if verb is not None:
        sections -= {*inspect.signature(verb).parameters}
    own, settings, rest = list[str](), list[str](), deque(words)
    while rest:
        word = rest.popleft()
        name, equals, _ = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not ("." in name or name in sections):
            own.append(word)
            continue
        settings.append(word)
        if not equals and rest and not rest[0].startswith("--"):
            settings.append(rest.popleft())
    return own, settings


def _is_news(record: logging.LogRecord) -> bool:
    """False where bitsandbytes misses a kernel for inference that is not used here."""
    return not record.msg.startswith("Failed to load CPU gemm")


class _MessageHandler(logging.Handler):
    """Handler that prints to the current stderr, which a progress bar may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)
