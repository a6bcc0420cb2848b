"""`text2sql-grpo <verb>`: reads options, calls one function, turns errors into messages.

Everything heavy is imported inside the verbs, so that `--help` answers at once and `.env` is read
before any library looks at its variables.
"""

import argparse
import errno
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dotenv import load_dotenv

from text2sql_grpo.cli import publishing, questions, serving, training
from text2sql_grpo.errors import RunError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of one verb: 0, 1 after an error told in a message, 130 after Ctrl-C.

    Args:
        argv: Without the program's name; None takes the command line.
    """
    options = _read(argv)
    load_dotenv(Path(".env"))
    if os.environ.get("HF_KEY") and not os.environ.get("HF_TOKEN"):
        os.environ["HF_TOKEN"] = os.environ["HF_KEY"]
    logging.basicConfig(format="%(message)s", handlers=[_MessageHandler()])
    logging.getLogger("text2sql_grpo").setLevel(logging.INFO)
    try:
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if not _is_full_disk(error):
            raise
        # A failed write names no file; then it is the place where the verb writes.
        where = getattr(error, "filename", None) or options.writes_to
        print(f"error: expected space to write, got a full disk (at {where})", file=sys.stderr)
        return 1


def _is_full_disk(error: BaseException) -> bool:
    """Whether a write failed for want of space: a full disk, a quota, or a limit on file sizes.

    torch and safetensors write in C++ and Rust: their errors say so in their text alone.
    """
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, OSError):
        return error.errno in numbers
    texts = (*map(os.strerror, numbers), "unexpected pos")
    return any(text in str(error) for text in texts)


def _read(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="text2sql-grpo",
        description="Train language models to answer questions over a SQL database.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(required=True, metavar="verb")
    for part in (training, publishing, questions, serving):
        part.add_verbs(verbs)
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["warm-start"]:
        parser.error("warm-start was removed: use sft (docs/sft.md)")
    options, rest = parser.parse_known_args(words)
    options.settings = rest
    unknown = [word for word in rest if word.startswith("--") and "." not in word.partition("=")[0]]
    if rest and (unknown or not options.takes_settings):
        options.parser.error(f"unknown options: {' '.join(unknown or rest)}")
    return options


class _MessageHandler(logging.Handler):
    """Prints to whatever stderr is at the moment: a progress bar on the terminal stands in for it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)
