"""`config`: every field of the config, with its meaning and default."""

import argparse
import json
import re
import textwrap
from pathlib import Path
from typing import Annotated

from text2sql_grpo.bundled import ROOT, located
from text2sql_grpo.config import config_fields

# Fields without a default, with the values of the quickstart.
REQUIRED = {
    "model.path": "smollm2-135m",
    "data.databases": "data/databases",
    "data.train": "data/questions/train.jsonl",
}


def _examples() -> dict[str, Path]:
    folder = ROOT / "config"
    files = sorted(folder.rglob("*.yaml"))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def _example(name: str) -> str:
    name, names = name.removeprefix("config/").removesuffix(".yaml"), ["list", *_examples()]
    if name not in names:
        raise argparse.ArgumentTypeError(f"no example {name!r}: there are {', '.join(names[1:])}")
    return name


def config(*, example: Annotated[str, _example] | None = None) -> int:
    """Print a default config as YAML, with comments.

    Each field follows its meaning; optional sections are commented out. Example: `text2sql-grpo config
    --example quickstart > my.yaml`

    Args:
        example: Print this config of the package instead, such as quickstart; list: their names. Paths of the
            package's data are absolute where the working folder has none.
    """
    if example == "list":
        for name, file in _examples().items():
            print(f"{name:32} {file.read_text('utf-8').partition(chr(10))[0].lstrip('# ')}")
        return 0
    if example is not None:
        text = _examples()[example].read_text("utf-8")
        print(re.sub(r"(?<=: )data/[\w./-]+", lambda path: str(located(Path(path[0]))), text), end="")
        return 0
    absent = None
    for field in config_fields():
        if absent is None or not field.name.startswith(f"{absent}."):
            absent = field.name if field.section and field.default is None else None
        *parents, key = field.name.split(".")
        margin = "# " * (absent is not None) + "  " * len(parents)
        for line in textwrap.wrap(field.about, width=100):
            print(f"{margin}# {line}")
        default = REQUIRED.get(field.name, field.default)
        print(f"{margin}{key}:" if field.section else f"{margin}{key}: {json.dumps(default, default=str)}")
    return 0


def fields_help() -> str:
    """List every field of the config, for a help text."""
    lines = ["", "settings:"]
    for field in config_fields():
        default = (
            "required" if field.name in REQUIRED else f"default: {json.dumps(field.default, default=str)}"
        )
        about = field.about if field.section else f"{field.about} ({default})"
        lines.append(f"  {'' if field.section else '--'}{field.name}")
        lines += textwrap.wrap(about, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines) + "\n"
