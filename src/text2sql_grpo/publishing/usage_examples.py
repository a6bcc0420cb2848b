"""Usage examples for a model card: the prompt of its run, in transformers, vLLM and clients."""

import dataclasses
from collections.abc import Mapping
from pprint import pformat
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from text2sql_grpo.environment.prompts import system_text, user_text
from text2sql_grpo.environment.protocols import TOOLS
from text2sql_grpo.environment.session import EnvironmentSettings
from text2sql_grpo.phrases import many
from text2sql_grpo.sql.schema import Column, Schema, Table
from text2sql_grpo.sql.schema_text import schema_text

TEMPLATES = Environment(
    loader=PackageLoader("text2sql_grpo.publishing", ""),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
"""Templates of the card and of its examples, in Markdown."""
TEMPLATES.filters["many"] = many
_QUESTION = "How many cities are there?"
_COLUMNS = (
    Column("name", "TEXT", is_nullable=True, is_primary_key=False),
    Column("people", "INTEGER", is_nullable=True, is_primary_key=False),
)
_WORLD = Schema((Table("city", _COLUMNS, foreign_keys=(), n_rows=0),), name="world")


def usage_examples(settings: Mapping[str, Any], *, repo_id: str, base: str | None, is_adapter: bool) -> str:
    """Section of a model card, in Markdown.

    Args:
        settings: Section `environment` of the run's config; missing fields have their defaults.
        repo_id: Hub id, or a folder.
        base: Hub id or folder of the adapter's base.
    """
    names = {field.name for field in dataclasses.fields(EnvironmentSettings)} - {"observation", "limits"}
    known = EnvironmentSettings(**{name: settings[name] for name in names if name in settings})
    messages = [{"role": "user", "content": user_text(_QUESTION, schema_text(_WORLD, known.schema_text))}]
    if known.instructions:
        system = system_text(known.protocol, known.max_turns)
        messages.insert(0, {"role": "system", "content": system})
    return TEMPLATES.get_template("usage_examples.md.jinja").render(
        settings=known,
        messages=pformat(messages, width=100, sort_dicts=False),
        tools=pformat(TOOLS, width=100, sort_dicts=False) if known.protocol == "native" else "",
        repo_id=repo_id,
        base=base,
        is_adapter=is_adapter,
    )
