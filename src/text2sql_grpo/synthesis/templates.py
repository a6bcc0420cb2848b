"""Templates of questions: SQL patterns, each with several phrasings."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from text2sql_grpo.bundled import ROOT
from text2sql_grpo.errors import DataError
from text2sql_grpo.files import parse_yaml
from text2sql_grpo.synthesis.words import Source

BUNDLED = ROOT / "data" / "templates.yaml"
OWN = ROOT / "data" / "own_templates.yaml"


@dataclass(frozen=True)
class Template:
    """One SQL pattern. `data/templates.yaml` describes the slots of its SQL and phrases.

    Attributes:
        is_plain: Conditions begin with "whose", and name the owner of a joined table's column.
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
    is_plain: bool = False

    @property
    def family(self) -> str:
        return self.name.partition("_")[0]

    def fits(self, source: Source) -> bool:
        """True if the pattern reads the tables of a source, can be written with it, and counts each row once.

        Rows that a third table links to many of another are counted once only if it is one of the other. All
        rows of a parent have its noun, not that of a key: employees without a department are no managers.
        """
        if set(source.tables) != {"", *(slot.rpartition(".")[0] for slot in self.slots)}:
            return False
        if source.link and {"parent.named", "parent.title"} & set(self.slots):
            others = [slot for slot in self.slots if slot.startswith("parent.")]
            return len(others) == 1 and "{on}" not in self.sql
        if source.link or "{on}" not in self.sql:
            return not source.link
        return bool(source.on) and source.has_parents_noun


@cache
def templates(path: Path = BUNDLED) -> tuple[Template, ...]:
    """All templates, in the order of the file.

    Raises:
        DataError: The file holds something else.
    """
    found = []
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
        for name, fields in tree["templates"].items():
            shared, own = tree["shared"].get(fields.pop("shared", None), []), fields.pop("phrases", [])
            slots = tuple(fields.pop("slots"))
            is_plain = tree.get("is_plain", False)
            found.append(Template(name, slots=slots, phrases=(*shared, *own), is_plain=is_plain, **fields))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"cannot read templates of questions: {error!r} (at {path})") from error
    return tuple(found)
