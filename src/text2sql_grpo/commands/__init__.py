"""`text2sql-grpo VERB`: one module a verb, whose function's signature and docstring are its options and help.

Slow imports are inside the verbs, so that `--help` answers at once and `.env` is read before any library
reads the environment.
"""

import argparse
import difflib
import inspect
import logging
import os
import re
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from dotenv import load_dotenv

from text2sql_grpo import __version__
from text2sql_grpo.commands.default_config import fields_help
from text2sql_grpo.commands.options import INTERRUPTED, writing_to
from text2sql_grpo.config import Config
from text2sql_grpo.docstrings import described, opening
from text2sql_grpo.errors import RunError
from text2sql_grpo.phrases import printable

# Each verb is a function of its module's name; a group is a module with one function per verb.
_VERBS = (
    *("init", "train", "sft", "evaluate", "compare", "merge", "push", "doctor", "config", "collect", "ask"),
    *("serve", "export", "replay", "view", "mcp", "review", "role"),
    *("data make", "data log", "data words", "data teach", "data overlap", "audit data", "audit reward"),
)


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
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    try:
        if is_launched and verb.__name__ not in ("train", "sft"):
            raise RunError(f"{verb.__name__} runs in one process: leave out accelerate launch and torchrun")
        with writing_to(Path()):
            return verb(**options)
    except argparse.ArgumentError as error:
        parser.error(str(error))
    except RunError as error:
        print(printable("; ".join([f"error: {error}", *getattr(error, "__notes__", ())])), file=sys.stderr)
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


def _read(words: list[str]) -> tuple[Callable[..., int], dict[str, Any], argparse.ArgumentParser]:
    """Parse a command line into verb, options and parser."""
    parser = _Parser(
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
        _add_verb(below[group], verb)
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
    found = {}
    for name in _VERBS:
        module = "default_config" if name == "config" else name.partition(" ")[0]  # `config` holds the fields
        found[name] = getattr(import_module(f"{__name__}.{module}"), name.rpartition(" ")[2])
    return found


class _Parser(argparse.ArgumentParser):
    """Parser that suggests the closest verb or choice."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        if invalid := re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)", message):
            close = difflib.get_close_matches(invalid[1], re.findall(r"[\w-]+", invalid[2]), n=1)
            message += "".join(f": did you mean {name}?" for name in close)
        super().error(message)

    def format_help(self) -> str:
        """Help; that of `train` lists the fields of the config too."""
        return super().format_help() + (fields_help() if self.prog.endswith(" train") else "")


def _add_verb(verbs: Any, verb: Callable[..., int]) -> None:
    """Add a verb with the options of its function's signature.

    Keyword-only parameters are options, required if they have no default; the others are positional.
    `settings` are fields of the config, which the verb itself reads.
    """
    text, _, example = " ".join(opening(verb).split()).partition(" Example: ")
    parser = verbs.add_parser(
        verb.__name__,
        help=opening(verb).partition("\n")[0],
        description=f"{textwrap.fill(text, 79)}\n\n  {example.strip('`')}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    about = described(verb, "Args")
    hints = get_type_hints(verb, include_extras=True)
    for name, parameter in inspect.signature(verb).parameters.items():
        if name == "settings":
            continue
        how = _reading(hints[name], parameter.default) | {"help": about[name].replace("%", "%%")}
        if parameter.kind is not parameter.KEYWORD_ONLY:
            if parameter.default is not parameter.empty:
                how |= {"nargs": "*" if how.get("nargs") else "?", "default": parameter.default}
            parser.add_argument(name, metavar=name.upper(), **how)
        elif parameter.default is parameter.empty:
            parser.add_argument(*_spellings(name), dest=name, required=True, **how)
        else:
            is_flag = "action" in how
            how["help"] += " (on by default)" if parameter.default is True else ""
            how["help"] += "" if is_flag or parameter.default in (None, "") else " (default: %(default)s)"
            flag = name.replace("_", "-") if is_flag else name
            parser.add_argument(*_spellings(flag), dest=name, default=parameter.default, **how)
    parser.set_defaults(verb=verb, parser=parser)
    if "settings" in hints:
        parser.set_defaults(settings=())
        parser.usage = f"{parser.format_usage().removeprefix('usage: ').rstrip()} [--section.key VALUE ...]"
        parser.epilog = "--section.key VALUE sets any field of the config, such as --run.seed 1;\n"
        parser.epilog += "--sft null leaves out a section. `text2sql-grpo config` prints all fields."


def _spellings(name: str) -> list[str]:
    """Spellings of an option: verbs on one database call it `db`, others `databases`, and each takes both."""
    both = ("db", "databases")
    return [f"--{name}", *(f"--{other}" for other in both if name in both and other != name)]


def _reading(kind: Any, default: Any) -> dict[str, Any]:
    """Arguments of `add_argument` for values of a type."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction if default else "store_true"}
    if type(None) in get_args(kind):
        kind = get_args(kind)[0]
    if get_origin(kind) is list:
        return _reading(get_args(kind)[0], None) | {"nargs": "+"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    return {"type": kind.__metadata__[0] if get_origin(kind) is Annotated else kind}


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
        print(printable(self.format(record)), file=sys.stderr)
