"""Templates of questions, read from `data/templates.yaml`: SQL patterns, each with several phrasings."""

from dataclasses import dataclass
from functools import cache

import yaml

from text2sql_grpo.bundled import ROOT


@dataclass(frozen=True)
class Template:
    """One SQL pattern. `data/templates.yaml` describes the slots of its SQL and phrases.

    Attributes:
        slots: Kinds of columns to draw, in order.
        is_held_out: Used for the questions of `test_templates` alone.
        weight: Number of questions for each one of a template of weight 1. Plain look-ups are the most
            frequent.
    """

    name: str
    difficulty: str
    slots: tuple[str, ...]
    sql: str
    phrases: tuple[str, ...]
    is_held_out: bool = False
    weight: int = 1

    @property
    def family(self) -> str:
        return self.name.partition("_")[0]

    @property
    def is_join(self) -> bool:
        return "{join}" in self.sql


@cache
def templates() -> tuple[Template, ...]:
    """All templates, in the order of the file."""
    tree = yaml.safe_load((ROOT / "data" / "templates.yaml").read_text(encoding="utf-8"))
    found = []
    for name, fields in tree["templates"].items():
        shared, own = tree["shared"].get(fields.pop("shared", None), []), fields.pop("phrases", [])
        slots = tuple(fields.pop("slots"))
        found.append(Template(name, slots=slots, phrases=(*shared, *own), **fields))
    return tuple(found)
