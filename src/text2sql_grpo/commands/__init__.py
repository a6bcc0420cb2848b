"""`text2sql-grpo VERB`: one module a verb, whose function's signature and docstring are its options and help.

Slow imports are inside the verbs, so that `--help` answers at once and `.env` is read before any library
reads the environment.
"""

import argparse
import difflib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from dotenv import load_dotenv

from text2sql_grpo import __version__
from text2sql_grpo.commands.options import writing_to
from text2sql_grpo.commands.parser import Parser, add_verb
from text2sql_grpo.errors import RunError

# Each verb is a function of its module's name; a group is a module with one function per verb.
VERBS = (
    *("train", "sft", "evaluate", "compare", "merge", "push", "doctor", "config", "collect", "ask"),
    *("mcp", "role"),
)
GROUPS = {"data": ("make", "overlap"), "audit": ("data", "reward")}
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; exit code 0, 1 after an error with a message, or 130 after Ctrl-C.

    `argv` are the arguments without the program's name; None for the command line.
    """
    # Read when torch is imported. Threads that spin while they wait halve their own speed on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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


def _read(words: list[str]) -> tuple[Callable[..., int], dict[str, Any], Parser]:
    """Parse a command line into verb, options and parser."""
    parser = Parser(
        prog="text2sql-grpo",
        description="Train language models to answer questions over a SQL database.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(required=True, metavar="verb")
    for name in VERBS:
        add_verb(verbs, getattr(import_module(f"{__name__}.{name}"), name))
    for name, group in GROUPS.items():
        module = import_module(f"{__name__}.{name}")
        below = verbs.add_parser(name, help=module.__doc__, description=module.__doc__, allow_abbrev=False)
        verbs_below = below.add_subparsers(required=True, metavar="verb")
        for verb in group:
            add_verb(verbs_below, getattr(module, verb))
    if words[:1] == ["warm-start"]:
        parser.error("warm-start was removed: use sft (docs/sft.md)")
    found, rest = parser.parse_known_args(words)
    options = vars(found)
    verb, parser = options.pop("verb"), options.pop("parser")
    unknown = [word for word in rest if word.startswith("--") and not _is_setting(word.partition("=")[0])]
    if rest and (unknown or "settings" not in options):
        known = [f"--{name}" for name in options]
        close = difflib.get_close_matches((unknown or rest)[0].partition("=")[0], known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        parser.error(f"unknown options: {' '.join(unknown or rest)}{hint}")
    return verb, options | ({"settings": rest} if rest else {}), parser


def _is_setting(flag: str) -> bool:
    """True if a flag names a field of the config, or a whole section: `--run.seed`, `--sft`."""
    from text2sql_grpo.config import Config

    return "." in flag or flag.removeprefix("--") in {field.name for field in fields(Config)}


def _is_news(record: logging.LogRecord) -> bool:
    """False where bitsandbytes misses a kernel for inference that is not used here."""
    return not record.msg.startswith("Failed to load CPU gemm")


class _MessageHandler(logging.Handler):
    """Handler that prints to the current stderr, which a progress bar may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)
