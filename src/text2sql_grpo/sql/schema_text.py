"""Texts of a schema for the model, each a function of the schema alone, whole or within a token budget.

`compact` and `ddl` never show a stored value; `m_schema` and `commented_ddl` show comments and a few
examples.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Literal

from text2sql_grpo.errors import DataError
from text2sql_grpo.phrases import listed
from text2sql_grpo.sql.address import Kind
from text2sql_grpo.sql.names import dotted_name, quote_name
from text2sql_grpo.sql.schema import Column, Example, ForeignKey, Schema, Table, View

MAX_DDL_EXAMPLE_CHARS = 40  # a longer example is cut, and ends in `...`
SchemaText = Literal["compact", "ddl", "commented_ddl", "m_schema"]

LEFT_OUT = "Left out to save space: "
MAX_NAMES = 10  # named in the last line, of each kind
_LENGTH = re.compile(r"\(\s*\d+\s*(,\s*\d+\s*)?\)")

Cut = tuple[str, int, str]  # what is left out, of which of `schema.relations`, and the name of a column


def estimated_tokens(text: str) -> int:
    """A quarter of the characters, rounded up: close for English and SQL with usual tokenizers.

    >>> estimated_tokens("SELECT name FROM ward")
    6
    """
    return -(-len(text) // 4)


def schema_text(
    schema: Schema,
    kind: SchemaText,
    *,
    max_tokens: int | None = None,
    count_tokens: Callable[[str], int] = estimated_tokens,
) -> str:
    """Text of a schema, or as much of it as the tokens allow with a last line on the rest.

    Args:
        max_tokens: Maximum length of the whole text, by `possible_cuts`; None for no limit.
        count_tokens: Counter of the model's tokenizer; by default a quarter of the characters.

    Raises:
        DataError: `max_tokens` leaves no room even for the line that lists what was left out.
    """
    render, last_line = TEXTS[kind]
    full = render(schema)
    if max_tokens is None or count_tokens(full) <= max_tokens:
        return full
    cuts = possible_cuts(schema, has_notes=kind not in ("compact", "ddl"))

    def text(n_cuts: int) -> str:
        body = render(without(schema, frozenset(cuts[:n_cuts])))
        rest = last_line.format(LEFT_OUT + left_out(schema, cuts, n_cuts))
        return f"{body}\n{rest}" if body else rest

    def fits(n_cuts: int) -> bool:
        return count_tokens(text(n_cuts)) <= max_tokens

    if not fits(len(cuts)):
        raise DataError(
            f"max_tokens must be >= {count_tokens(text(len(cuts)))}, for a line on what is left out, "
            f"got {max_tokens} (schema of {schema.name or 'a database'})"
        )
    return text(bisect_left(range(len(cuts)), True, lo=1, key=fits))


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
        return listed([shown_name(relations[i]) for i in places], MAX_NAMES)

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


def shown_name(relation: Table | View) -> str:
    """Name of a table or view on one line, behind its namespace if that is needed, without quotes."""
    return " ".join(".".join(filter(None, (relation.namespace, relation.name))).split())


def _quoted(names: Iterable[str], dialect: Kind) -> str:
    return ", ".join(quote_name(name, dialect) for name in names)


def relation_sql(relation: Table | View, dialect: Kind) -> str:
    """Name of a table or view in a query, with its namespace if needed."""
    return dotted_name(relation.namespace, relation.name, dialect)


def compact_text(schema: Schema) -> str:
    """One line a table, such as `table visit.day, visit.ward, visit.staff_id = staff.staff_id`; no types.

    Every column has its table's name, as a query needs it, and a foreign key the column it references.
    Views follow, as `view fees.ward, fees.total`.
    """
    lines = [_compact_line("table", table, schema.dialect) for table in schema.tables]
    return "\n".join(lines + [_compact_line("view", view, schema.dialect) for view in schema.views])


def _compact_line(kind: str, relation: Table | View, dialect: Kind) -> str:
    name = relation_sql(relation, dialect)
    references = {
        column: f" = {dotted_name(key.namespace, key.table, dialect)}"
        + (f".{quote_name(reference, dialect)}" if reference else "")
        for key in relation.foreign_keys
        for column, reference in zip_longest(key.columns, key.references, fillvalue="")
    }
    columns = [
        f"{name}.{quote_name(column.name, dialect)}{references.get(column.name, '')}"
        for column in relation.columns
    ]
    return f"{kind} {', '.join(columns) or name}"


def ddl_text(schema: Schema) -> str:
    """CREATE TABLE statements with types and keys, one column a line; views as comments. SQL that runs."""
    return _ddl(schema, _create_table)


def _ddl(schema: Schema, create: Callable[[Table | View, Kind], str]) -> str:
    """Statements of the tables, then comments with the views: without its query, no CREATE VIEW could run."""
    texts = [create(table, schema.dialect) for table in schema.tables]
    for view in schema.views:
        text = create(view, schema.dialect).replace("CREATE TABLE", "VIEW", 1)
        texts.append("\n".join(f"-- {line}" for line in text.split("\n")))
    return "\n\n".join(texts)


def _create_table(relation: Table | View, dialect: Kind) -> str:
    primary = [column.name for column in relation.columns if column.is_primary_key]
    lines = []
    for column in relation.columns:
        line = f"{quote_name(column.name, dialect)} {column.type}".rstrip()
        if column.is_primary_key and len(primary) == 1:
            line += " PRIMARY KEY"
        elif not column.is_nullable and isinstance(relation, Table):
            line += " NOT NULL"
        lines.append(line)
    if len(primary) > 1:
        lines.append(f"PRIMARY KEY ({_quoted(primary, dialect)})")
    lines += [_foreign_key(key, dialect) for key in relation.foreign_keys]
    return f"CREATE TABLE {relation_sql(relation, dialect)} (\n  " + ",\n  ".join(lines) + "\n);"


def _foreign_key(key: ForeignKey, dialect: Kind) -> str:
    references = f" ({_quoted(key.references, dialect)})" if key.references else ""
    parent = dotted_name(key.namespace, key.table, dialect)
    return f"FOREIGN KEY ({_quoted(key.columns, dialect)}) REFERENCES {parent}{references}"


def _create_commented_table(relation: Table | View, dialect: Kind) -> str:
    """CREATE TABLE statement with comments and examples, as OmniSQL and Arctic show it. SQL that runs."""
    entries = []  # with the comment behind each
    for column in relation.columns:
        notes = [column.comment] if column.comment else []
        if column.examples:
            values = ", ".join(_sql_literal(value) for value in column.examples)
            notes.append(f"example: [{values}]")
        entries.append((f"{quote_name(column.name, dialect)} {column.type}".rstrip(), ", ".join(notes)))
    primary = [column.name for column in relation.columns if column.is_primary_key]
    if primary:
        entries.append((f"PRIMARY KEY ({_quoted(primary, dialect)})", ""))
    for key in relation.foreign_keys:
        name = quote_name("_".join(("fk", relation.name, *key.columns)).lower(), dialect)
        entries.append((f"CONSTRAINT {name} {_foreign_key(key, dialect)}", ""))
    lines = []
    for index, (code, note) in enumerate(entries):
        comma = "," if index < len(entries) - 1 else ""
        lines.append(f"    {code}{comma}" + (f" -- {note}" if note else ""))
    comment = f" -- {relation.comment}" if relation.comment else ""
    return "\n".join([f"CREATE TABLE {relation_sql(relation, dialect)} ({comment}", *lines, ");"])


def _sql_literal(value: Example) -> str:
    """SQL literal of a value.

    >>> _sql_literal("O'Hara"), _sql_literal(3), _sql_literal(True)
    ("'O''Hara'", '3', 'true')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return str(value)
    is_long = len(value) > MAX_DDL_EXAMPLE_CHARS
    shown = value[: MAX_DDL_EXAMPLE_CHARS - 3] + "..." if is_long else value
    return "'" + shown.replace("'", "''") + "'"


def m_schema_text(schema: Schema) -> str:
    """M-Schema, of XiYan-SQL (arXiv:2411.08599), with views as `# View: fees`; names stand unquoted."""
    lines = [f"【DB_ID】 {schema.name}", "【Schema】"]
    for relation in schema.relations:
        kind = "Table" if isinstance(relation, Table) else "View"
        comment = f", {relation.comment}" if relation.comment else ""
        name = _m_schema_name(relation.namespace, relation.name)
        columns = ",\n".join(_m_schema_column(column) for column in relation.columns)
        lines += [f"# {kind}: {name}{comment}", "[", columns, "]"]
    keys = [
        f"{_m_schema_name(table.namespace, table.name)}.{column}="
        f"{_m_schema_name(key.namespace, key.table)}.{reference}"
        for table in schema.tables
        for key in table.foreign_keys
        for column, reference in zip(key.columns, key.references or key.columns, strict=True)
    ]
    return "\n".join(lines + (["【Foreign keys】", *keys] if keys else []))


def _m_schema_name(namespace: str, name: str) -> str:
    return f"{namespace}.{name}" if namespace else name


def _m_schema_column(column: Column) -> str:
    kind = _LENGTH.sub("", column.type).strip()
    if "'" not in kind:  # else the values of an enumeration
        kind = kind.upper()
    parts = [f"{column.name}:{kind}" if kind else column.name]
    parts += [column.comment] if column.comment else []
    parts += ["Primary Key"] if column.is_primary_key else []
    if column.examples:
        values = ", ".join(
            str(value).lower() if isinstance(value, bool) else str(value) for value in column.examples
        )
        parts.append(f"Examples: [{values}]")
    return f"({', '.join(parts)})"


# Renderer of each kind, and the form of its last line.
TEXTS: dict[SchemaText, tuple[Callable[[Schema], str], str]] = {
    "compact": (compact_text, "{}"),
    "ddl": (ddl_text, "-- {}"),
    "commented_ddl": (partial(_ddl, create=_create_commented_table), "-- {}"),
    "m_schema": (m_schema_text, "【{}】"),
}
