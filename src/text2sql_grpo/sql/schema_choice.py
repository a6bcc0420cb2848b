"""Choice of the tables that a question is about, for a schema that is too long for a prompt."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from text2sql_grpo.phrases import listed
from text2sql_grpo.sql.engines import ENGINES
from text2sql_grpo.sql.schema import Schema, Table, View
from text2sql_grpo.sql.schema_text import TEXTS, SchemaText, shown_name, without_notes

TABLE_SHARE = 0.75  # of the tokens, for tables with their columns; the rest is for names of others
# Measured on the databases of Spider together (EXPERIMENTS.md).
NAME_WEIGHT = 2.0  # of a word of a table's name; 1 for one of a column's name or of an example
IDF_POWER = 1.5
NEIGHBOUR_WEIGHT = 0.5  # of the best table that a foreign key links
_PLURAL = re.compile(r"(?<=\w\w)ies$|(?<=ss|.x|ch|sh)es$|(?<=\w\w[^s])s$")


class TableChoice:
    """Texts of one schema, each with the tables for one question.

    Args:
        schema: The schema, whose examples are compared with the question and never shown.
        max_tokens: Maximum length of a text.
        count_tokens: Counter of the model's tokenizer.
    """

    def __init__(
        self, schema: Schema, kind: SchemaText, *, max_tokens: int, count_tokens: Callable[[str], int]
    ) -> None:
        self._bare = without_notes(schema)
        self._render, self._last_line = TEXTS[kind]
        self._max_tokens, self._count_tokens = max_tokens, count_tokens
        documents = [_document(relation) for relation in schema.relations]
        tables_of = Counter(word for document in documents for word in document)
        self._weights: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for place, document in enumerate(documents):
            for word, weight in document.items():
                rarity = math.log(1 + len(documents) / tables_of[word]) ** IDF_POWER
                self._weights[word].append((place, weight * rarity))
        self._linked = _links(schema)
        self._costs = [count_tokens(self._part([place])) + 1 for place in range(len(documents))]
        self._names = [shown_name(relation) for relation in schema.relations]
        self._name_costs = [count_tokens(f", {name}") for name in self._names]

    def ranked(self, question: str) -> list[int]:
        """Places of all tables and views in `schema.relations`, those that the question is about first.

        Equal ones are in the schema's order.
        """
        own: dict[int, float] = defaultdict(float)
        for word in sorted(set(_words(question))):
            for place, weight in self._weights.get(word, ()):
                own[place] += weight
        scores = defaultdict(float, own)
        for place in {other for one in own for other in self._linked[one]}:
            scores[place] += NEIGHBOUR_WEIGHT * max(own.get(other, 0.0) for other in self._linked[place])
        return sorted(range(len(self._names)), key=lambda place: (-scores[place], place))

    def text(self, question: str) -> str | None:
        """Schema text with the columns of the best tables, and the names of others; None if no table fits."""
        ranked, left, chosen = self.ranked(question), self._max_tokens * TABLE_SHARE, []
        for place in ranked:
            if self._costs[place] <= left:
                chosen.append(place)
                left -= self._costs[place]
        others = [place for place in ranked if place not in chosen]
        left += self._max_tokens * (1 - TABLE_SHARE)
        n_names = sum(cost < left for cost in accumulate(self._name_costs[place] for place in others))
        while chosen:
            text = self._part(sorted(chosen)) + "\n" + self._line(others, n_names)
            if self._count_tokens(text) <= self._max_tokens:
                return text
            if not n_names:
                others.insert(0, chosen.pop())
            n_names = n_names * 7 // 8
        return None

    def _part(self, places: list[int]) -> str:
        """Text of some tables and views."""
        tables = tuple(self._bare.tables[place] for place in places if place < len(self._bare.tables))
        views = tuple(self._bare.relations[place] for place in places[len(tables) :])
        return self._render(replace(self._bare, tables=tables, views=views))  # type: ignore[arg-type]

    def _line(self, others: list[int], n_names: int) -> str:
        what = f"{len(others)} other tables, whose columns {ENGINES[self._bare.dialect].columns_sql} lists"
        names = listed([self._names[place] for place in others], n_names)
        return self._last_line.format(f"{what}: {names}" if n_names else what)


def table_choice(
    schema: Schema, kind: SchemaText, *, max_tokens: int | None, count_tokens: Callable[[str], int]
) -> TableChoice | None:
    """Choice of tables for a question, where a schema has too many for `max_tokens`; None where all fit."""
    render = TEXTS[kind][0]
    if max_tokens is None or len(schema.relations) < 2:
        return None
    if count_tokens(render(without_notes(schema))) <= max_tokens:
        return None
    return TableChoice(schema, kind, max_tokens=max_tokens, count_tokens=count_tokens)


def _document(relation: Table | View) -> dict[str, float]:
    """Weight of each word of a table's or view's names and examples."""
    texts = [value for column in relation.columns for value in column.examples if isinstance(value, str)]
    found = dict.fromkeys(_words(" ".join([*texts, *(column.name for column in relation.columns)])), 1.0)
    return found | dict.fromkeys(_words(relation.name), NAME_WEIGHT)


def _links(schema: Schema) -> dict[int, set[int]]:
    """Tables that a foreign key links, in either direction, by place."""
    places = {table.name: place for place, table in enumerate(schema.tables)}
    linked: dict[int, set[int]] = defaultdict(set)
    for place, table in enumerate(schema.tables):
        for other in (places.get(key.table, place) for key in table.foreign_keys):
            if other != place:
                linked[place].add(other)
                linked[other].add(place)
    return linked


def _words(text: str) -> list[str]:
    """Words in lower case without plural endings; `OrderItems` and `order_items` hold the same.

    >>> _words("Which cities have OrderItems of 2 classes?")
    ['which', 'city', 'have', 'order', 'item', 'of', '2', 'class']
    """
    parts = re.findall(r"[^\W\d_]+|\d+", re.sub(r"(?<=[a-z\d])(?=[A-Z])", " ", text).lower())
    return [_PLURAL.sub(lambda ending: "y" if ending[0] == "ies" else "", part) for part in parts]
