"""`config`: every field of the config, with its meaning and default."""

import json
import textwrap

# Fields without a default, with the values of the quickstart.
REQUIRED = {
    "model.path": "smollm2-135m",
    "data.databases": "data/databases",
    "data.train": "data/questions/train.jsonl",
}


def config() -> int:
    """Print a default config as YAML, with comments.

    Each field follows its meaning; optional sections are commented out.
    """
    from text2sql_grpo.config import config_fields

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
    from text2sql_grpo.config import config_fields

    lines = ["", "settings:"]
    for field in config_fields():
        default = (
            "required" if field.name in REQUIRED else f"default: {json.dumps(field.default, default=str)}"
        )
        about = field.about if field.section else f"{field.about} ({default})"
        lines.append(f"  {'' if field.section else '--'}{field.name} {'|'.join(field.choices)}".rstrip())
        lines += textwrap.wrap(about, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines) + "\n"
