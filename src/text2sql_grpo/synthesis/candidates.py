"""One question drawn from one template on one database."""

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from text2sql_grpo.data.example import Example
from text2sql_grpo.sql.names import quote_name
from text2sql_grpo.synthesis.conditions import (
    COLUMN,
    CONDITIONS,
    Condition,
    in_words,
    literal,
    superlatives,
    without_unit,
)
from text2sql_grpo.synthesis.nouns import is_plural, plural, vocabulary
from text2sql_grpo.synthesis.templates import Template
from text2sql_grpo.synthesis.words import Column, Database, Source, Table

Side = Literal["seen", "held_out", "any"]

FEW = (2, 3, 4, 5)
LEAST = (2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)  # least sizes of groups
MAX_CATEGORIES = 24
MAX_LITERAL_LENGTH = 30


@dataclass(frozen=True)
class Draft:
    """A question with its SQL, not yet run.

    Attributes:
        example: The question, without id and split; its SQL is SQLite's.
        tables: Tables that the gold query reads.
        is_single: True if the question is about one row.
    """

    example: Example
    tables: tuple[str, ...]
    is_single: bool


class Drafter:
    """Generator of drafts of one template on one database.

    Args:
        sources: Sources to draw from; those without all the slots of the template are left out.
        side: Side of the (database, template, columns) combinations and (column, literal) pairs to draw:
            held out for `test_values`, the others, or any.
    """

    def __init__(
        self, database: Database, template: Template, sources: Sequence[Source], *, side: Side
    ) -> None:
        self.database = database
        self.template = template
        self.side = side
        self._known: dict[tuple[str, str], list[tuple[Column, list[Condition]]]] = {}
        self.sources = [
            source
            for source in sources
            if template.fits(source) and all(self._choices(source, slot) for slot in template.slots)
        ]

    def _choices(self, source: Source, slot: str) -> list[tuple[Column, list[Condition]]]:
        """Columns for a slot, each with the conditions on the wanted side; with none for a slot to show."""
        role, _, kind = slot.rpartition(".")
        table = source.tables[role]
        if (table.name, kind) not in self._known:
            columns = [column for column in table.columns if _fits(kind, column, table)]
            pairs = [(column, self._wanted(column, kind)) for column in columns]
            self._known[table.name, kind] = [pair for pair in pairs if pair[1] or kind not in CONDITIONS]
        return self._known[table.name, kind]

    def _wanted(self, column: Column, kind: str) -> list[Condition]:
        place = f"{column.table}.{column.name}"
        return [
            condition
            for condition in (CONDITIONS[kind](column) if kind in CONDITIONS else ())
            if not condition.literal or self._is_wanted("literal", place, condition.literal)
        ]

    def _is_wanted(self, *key: str) -> bool:
        """True for a key on the wanted side; a fixed sixth of all keys is held out."""
        return self.side == "any" or (stable_number(*key) % 6 == 0) == (self.side == "held_out")

    def draw(self, rng: random.Random) -> Draft | None:
        """Draw a draft; None if this draw failed (then draw again)."""
        source = rng.choice(self.sources)
        picked: dict[str, Column] = {}
        conditions: list[Condition] = []
        owners: list[str] = []
        for slot in self.template.slots:
            role, _, kind = slot.rpartition(".")
            free = [pair for pair in self._choices(source, slot) if pair[0] not in picked.values()]
            if not free:
                return None
            column, tests = rng.choice(free)
            picked[kind if kind not in picked else f"{role or 'second'}_{kind}"] = column
            if tests:
                conditions.append(rng.choice(tests))
                owners.append(source.owners[role])
        places = sorted(
            {source.tables[""].name, *(f"{column.table}.{column.name}" for column in picked.values())}
        )
        if not self._is_wanted("columns", self.database.name, self.template.name, *places):
            return None
        k = str(rng.choice(LEAST if "HAVING" in self.template.sql and self.template.is_plain else FEW))
        where = in_words(conditions, rng, owners=owners if self.template.is_plain else None)
        nouns = _nouns(source, picked) | {"where": where, "k": k}
        phrases = self.template.phrases
        if said := picked.get("said"):
            condition = next(each for each in conditions if each.column is said)
            nouns["value"] = condition.value
            if not condition.words:
                phrases = tuple(phrase for phrase in phrases if "{value}" not in phrase)
        example = Example(
            id="",
            database=self.database.name,
            question=_sentence(rng.choice(phrases).format(**nouns)),
            gold_sql=self._sql(source, picked, conditions, k),
            difficulty=self.template.difficulty,
            family=self.template.family,
            template=self.template.name,
            **self._other_queries(source, picked, conditions, k),
        )
        return Draft(example, source.names, is_single="named" in picked and len(source.tables) == 1)

    def _other_queries(
        self, source: Source, picked: dict[str, Column], conditions: list[Condition], k: str
    ) -> dict[str, Any]:
        """Look and guess of a look-up, or the check of a value that is stored as in the question."""
        if said := picked.get("said"):
            worded = [column for name, column in picked.items() if name.endswith("said")]
            guesses = [
                replace(each, test=f"= {literal(each.value)}") if each.column in worded else each
                for each in conditions
            ]
            return {"look_sql": _look(said), "guess_sql": self._sql(source, picked, guesses, k)}
        text = next((picked[kind] for kind in ("text", "category", "named") if kind in picked), None)
        if text is None or text.kind != "text":
            return {}
        value = next(each.value for each in conditions if each.column is text)
        return {"check_sql": f"{_look(text)} WHERE {text.sql} LIKE {literal(f'%{value}%')}"}

    def _sql(self, source: Source, picked: dict[str, Column], conditions: list[Condition], k: str) -> str:
        def name(column: Column) -> str:
            return f"{quote_name(column.table)}.{column.sql}" if len(source.tables) > 1 else column.sql

        names = {kind: name(column) for kind, column in picked.items()} | {"k": k}
        names["where"] = " AND ".join(
            f"{name(each.column)} {each.test.replace(COLUMN, name(each.column))}" for each in conditions
        )
        child, parent = source.tables[""].sql, source.tables.get("parent", source.tables[""]).sql
        names |= {"table": source.sql, "join": source.sql, "child": child, "parent": parent}
        return self.template.sql.format(on=source.on, **names)


def _nouns(source: Source, picked: dict[str, Column]) -> dict[str, str]:
    """Nouns for the slots of a template's phrases."""
    nouns = {kind: column.noun for kind, column in picked.items()}
    nouns |= {f"{kind}s": plural(column.noun) for kind, column in picked.items()}
    if number := picked.get("number"):
        nouns["measure"] = without_unit(number.noun)
    if measure := picked.get("measure"):
        nouns["most"], nouns["least"] = superlatives(measure)
        nouns["is"] = "are" if is_plural(measure.noun) else "is"
    row = source.tables[""].noun
    nouns |= {"row": row, "rows": plural(row)}
    if parent := source.tables.get("parent"):
        role = source.owners["parent"]  # "customer's ", but "with a category whose " of rows behind a link
        owner = role.removesuffix("'s ") if role.endswith("'s ") else parent.noun
        nouns |= {"parents": plural(parent.noun), "owner": owner, "owners": plural(owner)}
    return nouns


def _sentence(text: str) -> str:
    """Close the gaps of empty conditions in a question, and capitalise it."""
    text = re.sub(r" +([?.,]|$)", r"\1", re.sub(" +", " ", text))
    return text[0].upper() + text[1:]


def _look(column: Column) -> str:
    """Query that lists a column, and so the stored form of its values."""
    return f"SELECT DISTINCT {column.sql} FROM {quote_name(column.table)}"


def stable_number(*key: str) -> int:
    """Hash of a text, the same on every machine."""
    return int.from_bytes(hashlib.sha256("\x1f".join(key).encode()).digest()[:8], "big")


def _fits(kind: str, column: Column, table: Table) -> bool:
    """True if a column fits a kind of slot; kinds that are not listed here are roles."""
    nouns, n_values = set(column.noun.split()), len(column.values)
    is_number = column.kind == "number" and not column.is_key and not column.said and n_values > 2
    is_name = column.noun.endswith("number") or not nouns.isdisjoint(vocabulary()["not_measured"])
    is_short = not column.is_key and n_values > 1 and column.longest <= MAX_LITERAL_LENGTH
    is_group = column.kind == "text" and is_short and 2 < n_values <= MAX_CATEGORIES
    fits = {
        "said": 1 < n_values <= MAX_CATEGORIES,
        "text": column.kind == "text" and is_short and not column.said,
        "pattern": "label" in column.roles,
        "amount": is_number,
        "date": column.kind == "date" and not column.is_key,
        "null": column.has_nulls and not column.is_key,
        "column": not column.is_key and n_values > 2,
        "number": is_number and not is_name,
        "total": is_number and not is_name and nouns.isdisjoint(vocabulary()["not_added"]),
        "short": is_short and 2 < n_values <= min(50, table.row_count // 2),
        "repeated": not column.is_key and n_values > 2 and n_values * 4 <= table.row_count * 3,
        "group": is_group and not column.has_nulls,
    }
    return fits.get(kind, kind in column.roles)
