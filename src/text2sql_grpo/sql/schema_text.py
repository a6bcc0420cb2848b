"""Texts of a schema for the model, each a function of the schema alone.

`compact` and `ddl` never show a stored value; `m_schema` and `commented_ddl` show comments and a few
examples.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import partial
from itertools import zip_longest
from typing import Literal

from text2sql_grpo.errors import DataError
from text2sql_grpo.sql.address import Kind
from text2sql_grpo.sql.names import dotted_name, quote_name
from text2sql_grpo.sql.schema import Column, Example, ForeignKey, Schema, Table, View
from text2sql_grpo.sql.schema_budget import estimated_tokens, left_out, possible_cuts, without

MAX_DDL_EXAMPLE_CHARS = 40  # a longer example is cut, and ends in `...`
SchemaText = Literal["compact", "ddl", "commented_ddl", "m_schema"]

LEFT_OUT = "Left out to save space: "
_LENGTH = re.compile(r"\(\s*\d+\s*(,\s*\d+\s*)?\)")


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
