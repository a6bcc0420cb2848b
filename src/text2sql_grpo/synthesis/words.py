"""Words and values of a database, for the question generator."""

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from text2sql_grpo.synthesis.nouns import column_noun, count_noun, table_noun, vocabulary
from text2sql_grpo.synthesis.roles import Kind, Value, roles_of
from text2sql_grpo.errors import DataError
from text2sql_grpo.sql import schema as sql_schema
from text2sql_grpo.sql.schema import quote_name, read_schema
from text2sql_grpo.sql.sqlite_file import open_database

MAX_VALUES = 10_000
_KEY_ENDING = re.compile("_?(id|code|no|num|number|key)$", re.I)
_DATE = re.compile(r"\d{4}-\d\d-\d\d")


@dataclass(frozen=True)
class Column:
    """One column, its noun phrase and its values.

    Attributes:
        sql: Name in SQL, quoted if needed.
        is_key: Part of a primary or foreign key.
        values: Distinct values without NULL, sorted, at most `MAX_VALUES`.
        said: Stored value -> value as people say it, if the two differ; empty for most columns.
        clauses: Value as people say it -> phrases behind the plural of a row's noun ("on the Lisbon ward");
            under `""` those of any other value, with `{}` in its place.
        roles: See `roles_of`.
    """

    table: str
    name: str
    sql: str
    noun: str
    kind: Kind
    is_key: bool
    has_nulls: bool
    values: tuple[Value, ...]
    said: Mapping[Value, str] = field(default_factory=dict)
    clauses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    roles: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Table:
    """One table; `noun` names one row."""

    name: str
    sql: str
    noun: str
    row_count: int
    columns: tuple[Column, ...]


@dataclass(frozen=True)
class Source:
    """Tables of a query: one, or one with one or two others joined to it.

    Attributes:
        sql: Text behind FROM.
        tables: The table whose rows are asked about under `""`, its parent under `parent`, another parent
            under `other`, the parent's parent under `far`.
        owners: Words before a column of each table: "customer's ".
        join: Text that joins the parent; empty for one table.
    """

    sql: str
    tables: dict[str, Table]
    owners: dict[str, str]
    join: str = ""


@dataclass(frozen=True)
class Database:
    """A database open for reading, with its words.

    Attributes:
        native: Translates a query to the SQL of the database that the file stands for; None if it cannot.
    """

    name: str
    split: str
    connection: sqlite3.Connection
    sources: tuple[Source, ...]
    native: Callable[[str], str | None] = str


def open_with_words(path: Path, name: str, words_path: Path) -> Database:
    """Open a SQLite file for reading, with the words people use for its content.

    Args:
        path: The SQLite file.
        name: Name of the database.
        words_path: JSON with `split`, `tables`, `columns`, `said` and `clauses`, all optional; without the
            file, words come from identifiers and values, and the split is `train`.

    Raises:
        DataError: A file cannot be read, or the words name a table or column that the database lacks.
    """
    try:
        words = json.loads(words_path.read_text(encoding="utf-8")) if words_path.exists() else {}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the words as JSON: {error} (at {words_path})") from error
    schema = read_schema(path)
    known = {f"{table.name}.{column.name}" for table in schema.tables for column in table.columns}
    asked = {*words.get("columns", {}), *words.get("said", {}), *words.get("clauses", {})}
    unknown = sorted(
        (set(words.get("tables", {})) - {table.name for table in schema.tables}) | (asked - known)
    )
    if unknown:
        raise DataError(f"unknown tables or columns of {path}: {unknown} (at {words_path})")
    with ExitStack() as stack:
        connection = stack.enter_context(closing(open_database(path)))
        try:
            tables = {table.name: _read_table(connection, table, words) for table in schema.tables}
        except sqlite3.Error as error:
            raise DataError(f"cannot read the database: {error} (at {path})") from error
        stack.pop_all()
    single = [Source(table.sql, {"": table}, {"": ""}) for table in tables.values()]
    sources = (*single, *_joins(list(_links(schema, tables))))
    return Database(name, words.get("split", "train"), connection, sources)


def _joins(links: Sequence[Source]) -> Iterator[Source]:
    """Joins of a table with its parent, and with another parent or the parent's parent."""
    for link in links:
        yield link
        for second in links:
            child, parent = second.tables[""], second.tables["parent"]
            if parent not in link.tables.values() and child in link.tables.values():
                role, owner = ("other", "") if child is link.tables[""] else ("far", link.owners["parent"])
                tables = link.tables | {role: parent}
                owners = link.owners | {role: owner + second.owners["parent"]}
                yield Source(f"{link.sql} {second.join}", tables, owners)


def _links(schema: sql_schema.Schema, tables: Mapping[str, Table]) -> Iterator[Source]:
    """Joins that a question can name without ambiguity: pairs of tables with a single foreign key."""
    pairs = Counter(
        frozenset((table.name, key.table)) for table in schema.tables for key in table.foreign_keys
    )
    for table in schema.tables:
        for key in table.foreign_keys:
            is_plain = len(key.columns) == len(key.references) == 1 and key.table != table.name
            is_named = all(name in tables and tables[name].columns for name in (table.name, key.table))
            if is_plain and is_named and pairs[frozenset((table.name, key.table))] == 1:
                child, parent = tables[table.name], tables[key.table]
                column, target = quote_name(key.columns[0]), quote_name(key.references[0])
                join = f"JOIN {parent.sql} ON {child.sql}.{column} = {parent.sql}.{target}"
                role = None
                if key.columns[0].lower() != key.references[0].lower():
                    role = column_noun(_KEY_ENDING.sub("", key.columns[0]), child.noun)
                is_role = role and role != child.noun and not {"in", "of"} & set(role.split())
                owner = role if is_role else parent.noun
                # A candidate who is a person has the person's name.
                owners = {"": "", "parent": f"{owner}'s " if owner != "person" else ""}
                yield Source(f"{child.sql} {join}", {"": child, "parent": parent}, owners, join)


def _read_table(connection: sqlite3.Connection, table: sql_schema.Table, words: Mapping[str, Any]) -> Table:
    sql = quote_name(table.name)
    foreign = {name for key in table.foreign_keys for name in key.columns}
    given = words.get("tables", {}).get(table.name) or table_noun(_rows_name(table))
    if len(foreign) > 1 and foreign >= {column.name for column in table.columns}:
        given = None  # it links other tables
    noun = given or f'row of the table "{table.name}"'
    columns = []
    for declared in table.columns:
        name = quote_name(declared.name)
        query = f"SELECT DISTINCT {name} FROM {sql} ORDER BY 1 LIMIT {MAX_VALUES + 1}"
        found = [row[0] for row in connection.execute(query)]
        values = tuple(value for value in found if value is not None)
        kind = _kind(values)
        place = f"{table.name}.{declared.name}"
        phrase = words.get("columns", {}).get(place)
        if phrase is None and given and (phrase := column_noun(declared.name, noun)) and kind == "number":
            phrase = count_noun(phrase)
        if kind is None or phrase is None:
            continue
        is_key = declared.is_primary_key or declared.name in foreign
        has_nulls = len(values) < len(found)
        columns.append(
            Column(
                table=table.name,
                name=declared.name,
                sql=name,
                noun=phrase,
                kind=kind,
                is_key=is_key,
                has_nulls=has_nulls,
                values=values,
                said=_said(place, phrase, values, words),
                clauses=_clauses(words.get("clauses", {}).get(place, [])),
                roles=roles_of(phrase, kind, values, table.n_rows, is_key=is_key, has_nulls=has_nulls),
            )
        )
    nouns = Counter(column.noun for column in columns)
    distinct = tuple(column for column in columns if nouns[column.noun] == 1)
    return Table(table.name, sql, noun, table.n_rows, distinct)


def _rows_name(table: sql_schema.Table) -> str:
    """Name of what a row is: the table's, or its key's if the table is called by its columns (`ZIP_CITY`)."""
    keys = [column.name for column in table.columns if column.is_primary_key]
    letters = [re.sub(r"[\W_]", "", column.name).lower() for column in table.columns]
    is_called = len(letters) > 1 and "".join(letters) == re.sub(r"[\W_]", "", table.name).lower()
    return keys[0] if is_called and len(keys) == 1 else table.name


def _kind(values: tuple[Any, ...]) -> Kind | None:
    """Kind of the stored values, whatever the declared type; None if mixed, blobs or empty."""
    if not values:
        return None
    if all(isinstance(value, int | float) for value in values):
        return "number"
    if not all(isinstance(value, str) for value in values):
        return None
    return "date" if all(_DATE.match(value) for value in values) else "text"


def _said(place: str, noun: str, values: tuple[Value, ...], words: Mapping[str, Any]) -> dict[Value, str]:
    """Stored -> said for one column: from `words` if it maps any column, else derived."""
    if "said" in words:
        given = words["said"].get(place, {})
        said = {value: given[str(value)] for value in values if str(value) in given}
        if given and not _is_usable(said):
            raise DataError(f"said forms must be distinct and not the stored ones, got {said} ({place})")
        return said
    if set(noun.split()) & set(vocabulary()["contacts"]):
        return {}
    found: dict[Value, str] = {
        value: form for value in values if isinstance(value, str) and (form := said_form(value))
    }
    return found if len(found) * 2 > len(values) and len(found) > 1 and _is_usable(found) else {}


def _clauses(given: list[str] | dict[str, list[str]]) -> dict[str, tuple[str, ...]]:
    by_value = given if isinstance(given, dict) else {"": given}
    return {said: tuple(phrases) for said, phrases in by_value.items()}


def _is_usable(said: Mapping[Value, str]) -> bool:
    forms = [form.lower() for form in said.values()]
    return len(set(forms)) == len(forms) and all(
        str(value).lower() != form.lower() for value, form in said.items()
    )


def said_form(stored: str) -> str | None:
    """Stored value as people say it, by a few rules; None if none applies.

    >>> said_form("IN_TRANSIT"), said_form("02-Lisbon"), said_form("SMITH, J."), said_form("Lisbon")
    ('in transit', 'Lisbon', 'J. Smith', None)
    """
    if re.fullmatch(r"[A-Za-z]+(_[A-Za-z0-9]+)+", stored):
        return stored.replace("_", " ").lower()
    if numbered := re.fullmatch(r"\d+[-_. ]+([A-Za-z].*)", stored):
        return numbered[1]
    if person := re.fullmatch(r"([A-Z][\w'-]+), ([A-Z]\w*\.?)", stored):
        return f"{person[2]} {person[1].title()}"
    return None
