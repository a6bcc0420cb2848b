"""Reference pages of the command line and of the config, out of the code.

    python docs/reference.py

Writes docs/cli.md and docs/config.md; `tests/unit/test_docs.py` compares them with the code.
"""

import inspect
import json
import textwrap
from pathlib import Path

from text2sql_grpo.commands import verbs
from text2sql_grpo.commands.default_config import REQUIRED
from text2sql_grpo.config import ConfigField, config_fields
from text2sql_grpo.docstrings import described, opening
from text2sql_grpo.files import write_text

HERE = Path(__file__).parent
MADE = "<!-- made by: python docs/reference.py -->"


def cli() -> str:
    """Page of the verbs and their options."""
    lines = ["# Command line", "", MADE, ""]
    lines += [
        "`text2sql-grpo VERB --help` prints the same. Verbs that read a config take each of its fields as"
    ]
    lines += ["an option, `--section.key VALUE` ([config](config.md))."]
    for name, verb in verbs().items():
        parameters, about = inspect.signature(verb).parameters, described(verb, "Args")
        lines += ["", f"## {name}", *textwrap.wrap(" ".join(opening(verb).split()), 118), ""]
        rows = [_option(parameters[one], text) for one, text in about.items() if one != "settings"]
        if rows:
            lines += ["| option | default | meaning |", "| --- | --- | --- |", *rows]
        if "settings" in parameters:
            lines += ["", "It takes fields of the config."]
    return "\n".join(lines) + "\n"


def _option(parameter: inspect.Parameter, about: str) -> str:
    default, text = parameter.default, about.replace("|", "\\|")
    is_named = parameter.kind is parameter.KEYWORD_ONLY
    flag = parameter.name.replace("_", "-") if isinstance(default, bool) else parameter.name
    spellings = f"`--{flag}`, `--no-{flag}`" if default is True else f"`--{flag}`"
    name = spellings if is_named else f"`{parameter.name.upper()}`"
    if default is parameter.empty:
        return f"| {name} | required | {text} |"
    shown = "" if default in (None, "") or default is False else "on" if default is True else f"`{default}`"
    return f"| {name} | {shown} | {text} |"


def config() -> str:
    """Page of the fields of a config."""
    lines = ["# Config", "", MADE, ""]
    lines += ["`text2sql-grpo config > my.yaml` prints these fields as a config with comments."]
    lines += [
        "On the command line any field is an option: `--grpo.learning_rate 1e-5`; `--sft null` leaves out a"
    ]
    lines += ["section. The section `grpo` takes the fields of `SQLGRPOConfig`, which are TRL's"]
    lines += ["([losses](losses.md)), and `rewards` takes names with their weights ([rewards](rewards.md))."]
    fields = list(config_fields())
    for section in (field for field in fields if field.section):
        optional = " Optional: absent unless given." if section.default is None else ""
        lines += ["", f"## {section.name}", *textwrap.wrap(section.about + optional, 118), ""]
        lines += ["| field | default | meaning |", "| --- | --- | --- |"]
        own = (field for field in fields if field.name.rpartition(".")[0] == section.name)
        lines += [_field(field) for field in own if not field.section]
    return "\n".join(lines) + "\n"


def _field(field: ConfigField) -> str:
    default = "required" if field.name in REQUIRED else f"`{json.dumps(field.default, default=str)}`"
    name, text = field.name.rpartition(".")[2], field.about.replace("|", "\\|")
    return f"| `{name}` | {default} | {text} |"


PAGES = {HERE / "cli.md": cli, HERE / "config.md": config}

if __name__ == "__main__":
    for path, made in PAGES.items():
        write_text(path, made())
