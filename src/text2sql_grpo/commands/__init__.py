"""`text2sql-grpo VERB`: one module a verb, whose function's signature and docstring are its options and help.

Everything heavy is imported inside the verbs, so that `--help` answers at once and `.env` is read
before any library looks at its variables.
"""

import argparse
import difflib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dotenv import load_dotenv

from text2sql_grpo import __version__
from text2sql_grpo.commands import (
    ask,
    audit,
    collect,
    compare,
    config,
    data,
    doctor,
    evaluate,
    mcp,
    merge,
    push,
    sft,
    train,
)
from text2sql_grpo.commands.options import writing_to
from text2sql_grpo.commands.parser import Parser, add_verb
from text2sql_grpo.errors import RunError

Verb = Callable[..., int]
VERBS: tuple[Verb, ...] = (train.train, sft.sft, evaluate.evaluate, compare.compare, merge.merge, push.push)
VERBS += (doctor.doctor, config.config, collect.collect, ask.ask, mcp.mcp)
GROUPS: dict[str, tuple[str, tuple[Verb, ...]]] = {
    "data": ("Make questions, compare question files.", (data.make, data.overlap)),
    "audit": ("Find what is wrong with questions or a reward.", (audit.data, audit.reward)),
}
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of one verb: 0, 1 after an error told in a message, 130 after Ctrl-C.

    Args:
        argv: Without the program's name; None takes the command line.
    """
    verb, options, parser = _read(sys.argv[1:] if argv is None else list(argv))
    load_dotenv(Path(".env"))
    if os.environ.get("HF_KEY") and not os.environ.get("HF_TOKEN"):
        os.environ["HF_TOKEN"] = os.environ["HF_KEY"]
    logging.basicConfig(format="%(message)s", handlers=[_MessageHandler()])
    logging.getLogger("text2sql_grpo").setLevel(logging.INFO)
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


def _read(words: list[str]) -> tuple[Verb, dict[str, Any], Parser]:
    """The verb of a command line, its options, and its parser."""
    parser = Parser(
        prog="text2sql-grpo",
        description="Train language models to answer questions over a SQL database.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(required=True, metavar="verb")
    for verb in VERBS:
        add_verb(verbs, verb)
    for name, (about, group) in GROUPS.items():
        below = verbs.add_parser(name, help=about, description=about, allow_abbrev=False)
        verbs_below = below.add_subparsers(required=True, metavar="verb")
        for verb in group:
            add_verb(verbs_below, verb)
    if words[:1] == ["warm-start"]:
        parser.error("warm-start was removed: use sft (docs/sft.md)")
    found, rest = parser.parse_known_args(words)
    options = vars(found)
    verb, parser = options.pop("verb"), options.pop("parser")
    unknown = [word for word in rest if word.startswith("--") and "." not in word.partition("=")[0]]
    if rest and (unknown or "settings" not in options):
        known = [f"--{name}" for name in options]
        close = difflib.get_close_matches((unknown or rest)[0].partition("=")[0], known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        parser.error(f"unknown options: {' '.join(unknown or rest)}{hint}")
    return verb, options | ({"settings": rest} if rest else {}), parser


class _MessageHandler(logging.Handler):
    """Prints to whatever stderr is at the moment: a progress bar on the terminal stands in for it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)
