"""Text of a schema within a token budget; its last line lists what is left out."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.names import listed
from text2sql_grpo.sql.schema import Schema, Table, View

MAX_NAMES = 10  # named in the last line, of each kind

_Cut = tuple[str, int, str]  # what is left out, of which of `schema.relations`, and the name of a column


def estimated_tokens(text: str) -> int:
    """A quarter of the characters, rounded up: close for English and SQL with usual tokenizers.

    >>> estimated_tokens("SELECT name FROM ward")
    6
    """
    return -(-len(text) // 4)


def text_within(
    schema: Schema,
    render: Callable[[Schema], str],
    *,
    last_line: str,
    has_notes: bool,
    max_tokens: int | None,
    count_tokens: Callable[[str], int],
) -> str:
    """Render the schema, or as much of it as the tokens allow with a last line on the rest.

    Left out one by one, each time from the last view to the first table: examples, a relation at a time;
    comments, a relation at a time; columns that are no keys, the longest relation's last one first, so that
    all become equally short (a relation without keys keeps its first column); whole views and tables.

    Args:
        last_line: Template with `{}` for the list of what was left out.
        has_notes: True if the text shows examples and comments.
        max_tokens: Maximum length of the whole text; None for no limit.

    Raises:
        DataError: Not even the last line fits.
    """
    full = render(schema)
    if max_tokens is None or count_tokens(full) <= max_tokens:
        return full
    cuts = _cuts(schema, has_notes=has_notes)

    def text(n_cuts: int) -> str:
        body = render(_without(schema, frozenset(cuts[:n_cuts])))
        return (body + "\n" if body else "") + last_line.format(_left_out(schema, cuts, n_cuts))

    def fits(n_cuts: int) -> bool:
        return count_tokens(text(n_cuts)) <= max_tokens

    if not fits(len(cuts)):
        raise DataError(
            f"max_tokens must be >= {count_tokens(text(len(cuts)))}, for a line on what is left out, "
            f"got {max_tokens} (schema of {schema.name or 'a database'})"
        )
    return text(bisect_left(range(len(cuts)), True, lo=1, key=fits))


def _cuts(schema: Schema, *, has_notes: bool) -> list[_Cut]:
    """Everything that can be left out, in the order in which it is."""
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


def _without(schema: Schema, cuts: frozenset[_Cut]) -> Schema:
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
    return _without(schema, frozenset((kind, i, "") for kind in ("examples", "comments") for i in places))


def _left_out(schema: Schema, cuts: Sequence[_Cut], n_cuts: int) -> str:
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
