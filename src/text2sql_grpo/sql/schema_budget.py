"""Parts of a schema that its text leaves out to fit into a token budget."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from text2sql_grpo.sql.names import listed
from text2sql_grpo.sql.schema import Schema, Table, View

MAX_NAMES = 10  # named in the last line, of each kind

Cut = tuple[str, int, str]  # what is left out, of which of `schema.relations`, and the name of a column


def estimated_tokens(text: str) -> int:
    """A quarter of the characters, rounded up: close for English and SQL with usual tokenizers.

    >>> estimated_tokens("SELECT name FROM ward")
    6
    """
    return -(-len(text) // 4)


def possible_cuts(schema: Schema, *, has_notes: bool) -> list[Cut]:
    """Everything that can be left out, in the order in which it is.

    Each time from the last view to the first table: examples, a relation at a time; comments, a relation at
    a time; columns that are no keys, the longest relation's last one first, so that all become equally
    short (a relation without keys keeps its first column); whole views and tables.

    Args:
        has_notes: True if the text shows examples and comments.
    """
    relations = list(enumerate(schema.relations))[::-1]
    noted = relations if has_notes else []
    cuts = [("examples", i, "") for i, r in noted if any(c.examples for c in r.columns)]
    cuts += [("comments", i, "") for i, r in noted if r.comment or any(c.comment for c in r.columns)]
    ranked, keys = [], _key_columns(schema)
    for i, relation in relations:
        plain = [c.name for c in relation.columns if (relation.namespace, relation.name, c.name) not in keys]
        if len(plain) == len(relation.columns):
            plain = plain[1:]
        ranked += [(rank, ("column", i, name)) for rank, name in enumerate(plain)]
    cuts += [cut for _, cut in sorted(ranked, key=lambda pair: -pair[0])]
    return cuts + [("relation", i, "") for i, _ in relations]


def _key_columns(schema: Schema) -> set[tuple[str, str, str]]:
    """Columns of primary and foreign keys, and those referenced: (namespace, table, column)."""
    keys = set()
    for table in schema.tables:
        keys |= {(table.namespace, table.name, c.name) for c in table.columns if c.is_primary_key}
        for key in table.foreign_keys:
            keys |= {(table.namespace, table.name, name) for name in key.columns}
            keys |= {(key.namespace, key.table, name) for name in key.references}
    return keys


def without(schema: Schema, cuts: frozenset[Cut]) -> Schema:
    """Schema without what the cuts leave out."""
    kept: list[Table | View] = []
    for i, relation in enumerate(schema.relations):
        if ("relation", i, "") in cuts:
            continue
        columns = tuple(c for c in relation.columns if ("column", i, c.name) not in cuts)
        if ("examples", i, "") in cuts:
            columns = tuple(replace(column, examples=()) for column in columns)
        if ("comments", i, "") in cuts:
            columns = tuple(replace(column, comment="") for column in columns)
            relation = replace(relation, comment="")
        kept.append(replace(relation, columns=columns))
    tables = tuple(relation for relation in kept if isinstance(relation, Table))
    views = tuple(relation for relation in kept if isinstance(relation, View))
    return replace(schema, tables=tables, views=views)


def without_notes(schema: Schema) -> Schema:
    """Schema without comments and examples."""
    places = range(len(schema.relations))
    return without(schema, frozenset((kind, i, "") for kind in ("examples", "comments") for i in places))


def left_out(schema: Schema, cuts: Sequence[Cut], n_cuts: int) -> str:
    """List of cuts: `all examples; 3 columns that are no keys (of ward, staff); tables visit, bill`."""
    relations = schema.relations
    total, done = Counter(kind for kind, *_ in cuts), Counter(kind for kind, *_ in cuts[:n_cuts])

    def names(kind: str) -> str:
        places = sorted({place for cut, place, _ in cuts[:n_cuts] if cut == kind})
        return listed([" ".join(relations[i].name.split()) for i in places], MAX_NAMES)

    parts = []
    for kind in ("examples", "comments"):
        if done[kind]:
            parts.append(f"all {kind}" if done[kind] == total[kind] else f"{kind} of {names(kind)}")
    if done["column"]:
        count = done["column"]
        what = "1 column that is no key" if count == 1 else f"{count} columns that are no keys"
        parts.append(f"all {what}" if count == total["column"] else f"{what} (of {names('column')})")
    if done["relation"]:
        what = "tables and views" if schema.views else "tables"
        parts.append(f"{done['relation']} of {total['relation']} {what}: {names('relation')}")
    return "; ".join(parts)
