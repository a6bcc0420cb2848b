"""Parsers of verbs, made from the signatures and docstrings of their functions."""

import argparse
import difflib
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from text2sql_grpo.commands.default_config import fields_help
from text2sql_grpo.docstrings import described, opening


class Parser(argparse.ArgumentParser):
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


def add_verb(verbs: Any, verb: Callable[..., int]) -> None:
    """Add a verb with the options of its function's signature.

    Keyword-only parameters are options, required if they have no default; the others are positional.
    `settings` are fields of the config, which the verb itself reads.
    """
    text, about = opening(verb), described(verb, "Args")
    parser = verbs.add_parser(
        verb.__name__, help=text.partition("\n")[0], description=text, allow_abbrev=False
    )
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
            how["help"] += "" if is_flag or parameter.default is None else " (default: %(default)s)"
            flag = name.replace("_", "-") if is_flag else name
            parser.add_argument(*_spellings(flag), dest=name, default=parameter.default, **how)
    parser.set_defaults(verb=verb, parser=parser)
    if "settings" in hints:
        parser.set_defaults(settings=())
        parser.usage = f"{parser.format_usage().removeprefix('usage: ').rstrip()} [--section.key VALUE ...]"
        parser.epilog = "--section.key VALUE sets any field of the config: --run.seed 1 (all: train --help); "
        parser.epilog += "--sft null leaves out a section."


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
